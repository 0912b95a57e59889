#compdef llmrun
# Completion of llmrun for zsh. Run `llmrun completion` for installation instructions.

_llmrun() {
    local program=${(Q)words[1]} line value files=
    local -a found
    program=${program/#\~/$HOME}
    for line in "${(@f)$("$program" completion --complete -- "${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}" 2>/dev/null)}"; do
        value=${line%%$'\t'*}
        if [[ $value == ":files" ]]; then
            files=yes
        elif [[ -n $value ]]; then
            found+=("${value//:/\\:}:${line#*$'\t'}")
        fi
    done
    if [[ -n $files ]]; then
        compset -P '--*='
        _files
    else
        _describe llmrun found
    fi
}

if [[ ${funcstack[1]} == _llmrun ]]; then
    _llmrun "$@"
else
    (( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
    compdef _llmrun llmrun
fi
