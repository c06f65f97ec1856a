# Completions of coracle for bash; made by runtime/daemon/src/cli/pages.rs.
_coracle() {
    local word=${COMP_WORDS[COMP_CWORD]} words
    case ${COMP_WORDS[COMP_CWORD-1]} in
        --config|--root|--state|--cni-conf-dir|--cni-bin-dir|--nri-socket) COMPREPLY=($(compgen -f -- "$word")); return ;;
        --log-level) COMPREPLY=($(compgen -W "error warn info debug" -- "$word")); return ;;
        --listen|--cgroup-parent|--metrics) COMPREPLY=(); return ;;
    esac
    case $COMP_CWORD:${COMP_WORDS[1]}:${COMP_WORDS[2]} in
        1:*) words="serve check config image version" ;;
        *:serve:*) words="--config --root --state --listen --log-level --cgroup-parent --cni-conf-dir --cni-bin-dir --nri-socket --metrics" ;;
        *:check:*) words="--json --config --root --state --listen --log-level --cgroup-parent --cni-conf-dir --cni-bin-dir --nri-socket --metrics" ;;
        2:config:*) words="default check" ;;
        2:image:*) words="import export list explain check pin unpin remove" ;;
        *:config:check) words="--config --root --state --listen --log-level --cgroup-parent --cni-conf-dir --cni-bin-dir --nri-socket --metrics" ;;
        *:image:remove) words="--force" ;;
        *:image:import) COMPREPLY=($(compgen -f -- "$word")); return ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o filenames -F _coracle coracle
