# Completions of coracle for bash; made by runtime/cli/src/cli/pages_tests.rs.
_coracle() {
    local word=${COMP_WORDS[COMP_CWORD]} words
    [[ ${COMP_WORDS[1]}:${COMP_WORDS[COMP_CWORD-1]} == pods:--state || ${COMP_WORDS[1]}:${COMP_WORDS[COMP_CWORD-1]} == ps:--state ]] || case ${COMP_WORDS[COMP_CWORD-1]} in
        --config|--root|--state|--cni-conf-dir|--cni-bin-dir|--nri-socket) COMPREPLY=($(compgen -f -- "$word")); return ;;
        --log-level) COMPREPLY=($(compgen -W "error warn info debug" -- "$word")); return ;;
        --log-format) COMPREPLY=($(compgen -W "text json" -- "$word")); return ;;
        --listen|--cgroup-parent|--metrics) COMPREPLY=(); return ;;
    esac
    case $COMP_CWORD:${COMP_WORDS[1]}:${COMP_WORDS[2]} in
        1:*) words="serve check config why support-dump k3s kubeadm pods ps images stats events logs exec image version" ;;
        *:serve:*) words="--config --root --state --listen --log-level --log-format --cgroup-parent --cni-conf-dir --cni-bin-dir --nri-socket --metrics" ;;
        *:check:*) words="--json --config --root --state --listen --log-level --log-format --cgroup-parent --cni-conf-dir --cni-bin-dir --nri-socket --metrics" ;;
        2:config:*) words="default check status" ;;
        2:k3s:*) words="enable disable status" ;;
        2:kubeadm:*) words="enable disable status" ;;
        2:image:*) words="import take-over bundle export pull list df explain check tag pin unpin remove prune" ;;
        *:config:check) words="--config --root --state --listen --log-level --log-format --cgroup-parent --cni-conf-dir --cni-bin-dir --nri-socket --metrics" ;;
        *:k3s:enable)
            case ${COMP_WORDS[COMP_CWORD-1]} in --host-root) COMPREPLY=($(compgen -f -- "$word")); return ;; esac
            case ${COMP_WORDS[COMP_CWORD-1]} in -o|--output) COMPREPLY=($(compgen -W "text json" -- "$word")); return ;; esac
            words="-n --dry-run --no-images --host-root -o --output"
            ;;
        *:k3s:disable)
            case ${COMP_WORDS[COMP_CWORD-1]} in --host-root) COMPREPLY=($(compgen -f -- "$word")); return ;; esac
            case ${COMP_WORDS[COMP_CWORD-1]} in -o|--output) COMPREPLY=($(compgen -W "text json" -- "$word")); return ;; esac
            words="-n --dry-run --host-root -o --output"
            ;;
        *:k3s:status)
            case ${COMP_WORDS[COMP_CWORD-1]} in --host-root) COMPREPLY=($(compgen -f -- "$word")); return ;; esac
            case ${COMP_WORDS[COMP_CWORD-1]} in -o|--output) COMPREPLY=($(compgen -W "text json" -- "$word")); return ;; esac
            words="--host-root -o --output"
            ;;
        *:kubeadm:enable)
            case ${COMP_WORDS[COMP_CWORD-1]} in --host-root) COMPREPLY=($(compgen -f -- "$word")); return ;; esac
            case ${COMP_WORDS[COMP_CWORD-1]} in -o|--output) COMPREPLY=($(compgen -W "text json" -- "$word")); return ;; esac
            words="-n --dry-run --no-images --host-root -o --output"
            ;;
        *:kubeadm:disable)
            case ${COMP_WORDS[COMP_CWORD-1]} in --host-root) COMPREPLY=($(compgen -f -- "$word")); return ;; esac
            case ${COMP_WORDS[COMP_CWORD-1]} in -o|--output) COMPREPLY=($(compgen -W "text json" -- "$word")); return ;; esac
            words="-n --dry-run --host-root -o --output"
            ;;
        *:kubeadm:status)
            case ${COMP_WORDS[COMP_CWORD-1]} in --host-root) COMPREPLY=($(compgen -f -- "$word")); return ;; esac
            case ${COMP_WORDS[COMP_CWORD-1]} in -o|--output) COMPREPLY=($(compgen -W "text json" -- "$word")); return ;; esac
            words="--host-root -o --output"
            ;;
        *:image:import)
            case ${COMP_WORDS[COMP_CWORD-1]} in -o|--output) COMPREPLY=($(compgen -W "text json" -- "$word")); return ;; esac
            words="-o --output"
            [[ $word == -* ]] || { COMPREPLY=($(compgen -f -- "$word")); return; } ;;
        *:image:take-over)
            case ${COMP_WORDS[COMP_CWORD-1]} in --from) COMPREPLY=($(compgen -f -- "$word")); return ;; esac
            case ${COMP_WORDS[COMP_CWORD-1]} in --namespace) COMPREPLY=(); return ;; esac
            case ${COMP_WORDS[COMP_CWORD-1]} in -o|--output) COMPREPLY=($(compgen -W "text json" -- "$word")); return ;; esac
            words="--from --namespace -n --dry-run -o --output"
            ;;
        *:image:bundle)
            case ${COMP_WORDS[COMP_CWORD-1]} in --store) COMPREPLY=($(compgen -f -- "$word")); return ;; esac
            words="--store"
            ;;
        *:image:export)
            case ${COMP_WORDS[COMP_CWORD-1]} in -o|--output) COMPREPLY=($(compgen -f -- "$word")); return ;; esac
            words="-o --output"
            [[ $word == -* ]] || words=$(coracle image list --quiet 2>/dev/null) ;;
        *:image:pull)
            case ${COMP_WORDS[COMP_CWORD-1]} in -o|--output) COMPREPLY=($(compgen -W "text json" -- "$word")); return ;; esac
            words="-o --output"
            [[ $word == -* ]] || words=$(coracle image list --quiet 2>/dev/null) ;;
        *:image:list)
            case ${COMP_WORDS[COMP_CWORD-1]} in -o|--output) COMPREPLY=($(compgen -W "text json" -- "$word")); return ;; esac
            words="--pulling -q --quiet -o --output"
            ;;
        *:image:df)
            case ${COMP_WORDS[COMP_CWORD-1]} in -o|--output) COMPREPLY=($(compgen -W "text json" -- "$word")); return ;; esac
            words="-o --output"
            ;;
        *:image:explain)
            case ${COMP_WORDS[COMP_CWORD-1]} in -o|--output) COMPREPLY=($(compgen -W "text json" -- "$word")); return ;; esac
            words="-o --output"
            [[ $word == -* ]] || words=$(coracle image list --quiet 2>/dev/null) ;;
        *:image:check)
            case ${COMP_WORDS[COMP_CWORD-1]} in -o|--output) COMPREPLY=($(compgen -W "text json" -- "$word")); return ;; esac
            words="--repair --policy -o --output"
            ;;
        *:image:tag)
            case ${COMP_WORDS[COMP_CWORD-1]} in -o|--output) COMPREPLY=($(compgen -W "text json" -- "$word")); return ;; esac
            words="-o --output"
            [[ $word == -* ]] || words=$(coracle image list --quiet 2>/dev/null) ;;
        *:image:pin)
            case ${COMP_WORDS[COMP_CWORD-1]} in -o|--output) COMPREPLY=($(compgen -W "text json" -- "$word")); return ;; esac
            words="-o --output"
            [[ $word == -* ]] || words=$(coracle image list --quiet 2>/dev/null) ;;
        *:image:unpin)
            case ${COMP_WORDS[COMP_CWORD-1]} in -o|--output) COMPREPLY=($(compgen -W "text json" -- "$word")); return ;; esac
            words="-o --output"
            [[ $word == -* ]] || words=$(coracle image list --quiet 2>/dev/null) ;;
        *:image:remove)
            case ${COMP_WORDS[COMP_CWORD-1]} in -o|--output) COMPREPLY=($(compgen -W "text json" -- "$word")); return ;; esac
            words="-f --force -o --output"
            [[ $word == -* ]] || words=$(coracle image list --quiet 2>/dev/null) ;;
        *:image:prune)
            case ${COMP_WORDS[COMP_CWORD-1]} in -o|--output) COMPREPLY=($(compgen -W "text json" -- "$word")); return ;; esac
            words="-o --output"
            ;;
        *:config:status)
            case ${COMP_WORDS[COMP_CWORD-1]} in -o|--output) COMPREPLY=($(compgen -W "text json" -- "$word")); return ;; esac
            words="-o --output"
            ;;
        *:why:*)
            words=""
            ;;
        *:support-dump:*)
            words=""
            [[ $word == -* ]] || { COMPREPLY=($(compgen -f -- "$word")); return; } ;;
        *:pods:*)
            case ${COMP_WORDS[COMP_CWORD-1]} in --id) COMPREPLY=(); return ;; esac
            case ${COMP_WORDS[COMP_CWORD-1]} in --name) COMPREPLY=(); return ;; esac
            case ${COMP_WORDS[COMP_CWORD-1]} in --namespace) COMPREPLY=(); return ;; esac
            case ${COMP_WORDS[COMP_CWORD-1]} in -s|--state) COMPREPLY=($(compgen -W "ready notready" -- "$word")); return ;; esac
            case ${COMP_WORDS[COMP_CWORD-1]} in --label) COMPREPLY=(); return ;; esac
            case ${COMP_WORDS[COMP_CWORD-1]} in -n|--last) COMPREPLY=(); return ;; esac
            case ${COMP_WORDS[COMP_CWORD-1]} in -o|--output) COMPREPLY=($(compgen -W "table wide json yaml" -- "$word")); return ;; esac
            words="-a --all --id --name --namespace -s --state --label -n --last -l --latest -q --quiet --no-trunc -o --output"
            ;;
        *:ps:*)
            case ${COMP_WORDS[COMP_CWORD-1]} in --id) COMPREPLY=(); return ;; esac
            case ${COMP_WORDS[COMP_CWORD-1]} in --name) COMPREPLY=(); return ;; esac
            case ${COMP_WORDS[COMP_CWORD-1]} in --namespace) COMPREPLY=(); return ;; esac
            case ${COMP_WORDS[COMP_CWORD-1]} in -s|--state) COMPREPLY=($(compgen -W "created running exited unknown" -- "$word")); return ;; esac
            case ${COMP_WORDS[COMP_CWORD-1]} in --label) COMPREPLY=(); return ;; esac
            case ${COMP_WORDS[COMP_CWORD-1]} in -p|--pod) COMPREPLY=($(compgen -W "$(coracle pods --quiet 2>/dev/null)" -- "$word")); return ;; esac
            case ${COMP_WORDS[COMP_CWORD-1]} in --image) COMPREPLY=($(compgen -W "$(coracle image list --quiet 2>/dev/null)" -- "$word")); return ;; esac
            case ${COMP_WORDS[COMP_CWORD-1]} in -n|--last) COMPREPLY=(); return ;; esac
            case ${COMP_WORDS[COMP_CWORD-1]} in -o|--output) COMPREPLY=($(compgen -W "table wide json yaml" -- "$word")); return ;; esac
            words="-a --all --id --name --namespace -s --state --label -p --pod --image -n --last -l --latest -q --quiet --no-trunc -o --output"
            ;;
        *:images:*)
            case ${COMP_WORDS[COMP_CWORD-1]} in -o|--output) COMPREPLY=($(compgen -W "table wide json yaml" -- "$word")); return ;; esac
            words="-q --quiet --no-trunc -o --output"
            [[ $word == -* ]] || words=$(coracle image list --quiet 2>/dev/null) ;;
        *:stats:*)
            case ${COMP_WORDS[COMP_CWORD-1]} in --id) COMPREPLY=(); return ;; esac
            case ${COMP_WORDS[COMP_CWORD-1]} in --name) COMPREPLY=(); return ;; esac
            case ${COMP_WORDS[COMP_CWORD-1]} in --namespace) COMPREPLY=(); return ;; esac
            case ${COMP_WORDS[COMP_CWORD-1]} in --label) COMPREPLY=(); return ;; esac
            case ${COMP_WORDS[COMP_CWORD-1]} in -p|--pod) COMPREPLY=($(compgen -W "$(coracle pods --quiet 2>/dev/null)" -- "$word")); return ;; esac
            case ${COMP_WORDS[COMP_CWORD-1]} in --seconds) COMPREPLY=(); return ;; esac
            case ${COMP_WORDS[COMP_CWORD-1]} in -o|--output) COMPREPLY=($(compgen -W "table wide json yaml" -- "$word")); return ;; esac
            words="--id --name --namespace --label -p --pod --seconds -q --quiet --no-trunc -o --output"
            ;;
        *:events:*)
            case ${COMP_WORDS[COMP_CWORD-1]} in -o|--output) COMPREPLY=($(compgen -W "text json" -- "$word")); return ;; esac
            words="-o --output"
            ;;
        *:logs:*)
            case ${COMP_WORDS[COMP_CWORD-1]} in --tail) COMPREPLY=(); return ;; esac
            case ${COMP_WORDS[COMP_CWORD-1]} in --since) COMPREPLY=(); return ;; esac
            words="-f --follow --tail --since -t --timestamps"
            [[ $word == -* ]] || words=$(coracle ps --all --quiet 2>/dev/null) ;;
        *:exec:*)
            words="-i --interactive -t --tty"
            [[ $word == -* ]] || words=$(coracle ps --all --quiet 2>/dev/null) ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    declare -F __ltrim_colon_completions >/dev/null && __ltrim_colon_completions "$word"
}
complete -o filenames -F _coracle coracle
