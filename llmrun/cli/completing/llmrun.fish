# Completion of llmrun for fish. Run `llmrun completion` for installation instructions.

function __llmrun_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    set -l program (string replace -r '^~' $HOME -- $words[1])
    for line in ($program completion --complete -- $words[2..] "$current" 2>/dev/null)
        if test "$line" = :files
            set -l flag (string match -r -- '^--[^=]*=' "$current")
            for path in (__fish_complete_path (string replace -- "$flag" "" "$current"))
                echo "$flag$path"
            end
        else
            echo $line
        end
    end
end

complete -c llmrun -f -a '(__llmrun_complete)'
