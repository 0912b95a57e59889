# Completion of llmrun for bash. Run `llmrun completion` for installation instructions.

_llmrun() {
    # Bash also splits words at ":" and "=", as in qwen3:4b. Join the parts that no blank separates.
    local rest=${COMP_LINE:0:COMP_POINT} word last=-1 index
    local -a words=()
    for ((index = 0; index <= COMP_CWORD; index++)); do
        word=${COMP_WORDS[index]}
        if [[ $last -lt 0 || $rest == [[:blank:]]* ]]; then
            last=$((last + 1))
            words[last]=
            rest=${rest#"${rest%%[![:blank:]]*}"}
        fi
        [[ $index -lt $COMP_CWORD ]] || word=$rest
        words[last]+=$word
        rest=${rest#"$word"}
    done

    # Bash replaces only the text after the last ":" or "=".
    local current=${words[last]} kept=
    [[ $current == *:* && $COMP_WORDBREAKS == *:* ]] && kept=${current%"${current##*:}"}
    [[ ${current#"$kept"} == *=* && $COMP_WORDBREAKS == *=* ]] && kept=${current%"${current##*=}"}

    local program=${1/#\~/$HOME} files= value
    COMPREPLY=()
    while IFS=$'\t' read -r value _; do
        if [[ $value == ":files" ]]; then
            files=yes
        else
            printf -v value '%q' "${value#"$kept"}"
            COMPREPLY+=("$value")
        fi
    done < <("$program" completion --complete -- "${words[@]:1}" 2>/dev/null)
    # Without candidates, bash completes file names unless the `default` option is disabled.
    if [[ -z $files ]] && type compopt &>/dev/null; then
        compopt +o default
    fi
}

complete -o default -F _llmrun llmrun
