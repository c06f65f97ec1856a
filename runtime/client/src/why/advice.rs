//! Advice about an error, chosen by the error's text: the advice of docs/troubleshooting.md, for the
//! terminal. The module does no I/O.

/// The cure for a host path whose file system hangs; `coracle_base::hostpath` has the texts.
const MOUNT_AGAIN: &str = "mount the network file system again, or remove the pods that use it";

/// A part of an error's text in lower case, and the cure. The first one that fits counts, so what is specific comes first.
const CURES: [(&str, &str); 44] = [
    (
        "signaturevalidationfailed",
        "sign the image, or correct image.policy: `coracle image explain IMAGE` shows the rule and its keys",
    ),
    (
        "no cni configuration file",
        "install the cluster's network (Flannel, Calico, …), or set network.default = \"builtin\"; `coracle check` shows what is found",
    ),
    (
        "cni plugin not initialized",
        "correct the CNI configuration that the line names; `coracle check` shows what is found",
    ),
    (
        "no such program in",
        "install the plugin in a directory of cni.bin_dirs; if it is gone for good, remove the pod a second time: that ends without it",
    ),
    (
        "not valid yet",
        "set the clock of this node (NTP, or a real-time clock): `coracle check` compares it; otherwise wait until the certificate is valid",
    ),
    (
        "certificate has expired",
        "renew the registry's certificate, and compare the clock of this node: `coracle check`",
    ),
    (
        "signed itself",
        "add the registry's certificate as ca_file in registries.yaml, or its ca in hosts.toml",
    ),
    (
        "authority that this node does not trust",
        "add the authority's certificate as ca_file in registries.yaml, or its ca in hosts.toml; `coracle image explain IMAGE` shows what is used",
    ),
    ("certificate", "check the certificate and the clock: `coracle image explain IMAGE`, `coracle check`"),
    ("web page (html)", "log in to the network's portal, or correct the address of the registry"),
    ("toomanyrequests", "log in to the registry, or use a mirror"),
    (
        "unauthorized",
        "give credentials: an imagePullSecret, or registries.yaml; `coracle image explain IMAGE` shows where they come from",
    ),
    (
        "denied: requested access",
        "give credentials: an imagePullSecret, or registries.yaml; `coracle image explain IMAGE` shows where they come from",
    ),
    ("no match for platform", "use an image that was built for this machine"),
    ("manifest unknown", "correct the name or the tag of the image"),
    (
        "registryunavailable",
        "look at the network, the proxy and the mirrors: `coracle image explain IMAGE` lists the endpoints in order",
    ),
    (
        "no space left",
        "make room: `coracle image df`, `coracle image prune`, or a larger disk; running pods continue",
    ),
    ("disk quota", "make room: `coracle image df`, `coracle image prune`, or a larger quota"),
    (
        "read-only file system",
        "the disk went read-only, often after an I/O error: see `dmesg`, repair it and mount it writable; running pods continue",
    ),
    ("i/o error", "the disk has errors: see `dmesg`, and replace it"),
    (
        "seccomp",
        "put a valid seccomp profile where the message names it, on every node, or use RuntimeDefault",
    ),
    ("apparmor", "load the AppArmor profile on this node, or use RuntimeDefault"),
    (
        "moved to quarantine",
        "the disk damaged a record: check the disk; the pod was ended and the kubelet creates a new sandbox; the files are below quarantine/",
    ),
    ("damaged record", "the disk damaged a record: check the disk; the files are below quarantine/"),
    (
        "cgroup controller",
        "switch the controller on: the kernel option or boot parameter that `coracle check` names (on a Raspberry Pi cgroup_enable=memory)",
    ),
    (
        "controller",
        "switch the controller on: the kernel option or boot parameter that `coracle check` names (on a Raspberry Pi cgroup_enable=memory)",
    ),
    (
        "hook",
        "look at the hook's program, which is named: it comes from a device (CDI) or an NRI plugin; coracle ends it at its time limit",
    ),
    (
        "cni plugin",
        "look at the plugin and what it needs (its agent, the API server): coracle ends it at its time limit",
    ),
    ("set-up step network", "look at the network plugin and what it needs (its agent, the API server)"),
    ("file system did not respond", MOUNT_AGAIN),
    ("file system still does not respond", MOUNT_AGAIN),
    ("file systems that do not respond", MOUNT_AGAIN),
    ("exec format error", "use an image that was built for this machine"),
    (
        "no such file or directory",
        "correct the path: of the command in the image, or of the volume on the node",
    ),
    ("permission denied", "make the file executable in the image, or readable for the container's user"),
    (
        "the name is held by",
        "an earlier pod of this name is still being removed; if that lasts, `crictl rmp -f` its id",
    ),
    (
        "user namespaces",
        "hostUsers: false needs Linux 5.19 and a file system that maps owners: `coracle check`",
    ),
    ("runtime_handler", "add the name of the RuntimeClass to runtime_handlers"),
    ("not found", "pull or import it, or correct its name"),
    (
        "lost its network",
        "another program removed the pod's link or its bridge (k3s-killall.sh, ip link delete); the kubelet creates a new sandbox",
    ),
    (
        "monitor died",
        "something killed the pod's monitor, often a kubelet that ended an orphaned pod, or the kernel when memory ran out: see `dmesg`",
    ),
    ("deadline", "what the message names took too long: look at it; the kubelet tries again"),
    ("is not ready", "the pod is being stopped or has ended; the kubelet makes a new one"),
    ("worker", "see `dmesg` for a killed coracle-worker, and the log of the daemon"),
];

/// The advice for an error text; general advice if no entry matches.
pub(crate) fn cure(error: &str) -> &'static str {
    let text = error.to_lowercase();
    let found = CURES.iter().find(|(part, _)| text.contains(part));
    found.map_or(
        "no advice for this text; docs/troubleshooting.md lists more, `coracle check` checks this node",
        |(_, cure)| cure,
    )
}

/// Explains an exit code: its meaning and the advice.
pub(crate) fn exit(code: i32) -> (&'static str, &'static str) {
    match code {
        126 => ("its command could not be executed", "make it executable"),
        127 => ("a shell did not find its command", "correct the command or the image"),
        134 => ("it aborted (SIGABRT)", "see its output"),
        137 => (
            "it was killed (SIGKILL): by a stop that took too long, or by hand",
            "see what stopped it; a program should end on SIGTERM",
        ),
        139 => ("it crashed (SIGSEGV)", "see its output; often an image for another C library or machine"),
        143 => ("it ended on SIGTERM, as a stop asks it to", "nothing, if it was to be stopped"),
        _ => ("its program ended so", "see its output: `kubectl logs`, with --previous after a restart"),
    }
}

#[cfg(test)]
mod tests {
    use super::{CURES, cure};

    #[test]
    fn a_specific_text_is_not_hidden_by_a_general_one() {
        for (index, (part, _)) in CURES.iter().enumerate() {
            let hiding = CURES[..index].iter().find(|(earlier, _)| part.contains(earlier));
            assert_eq!(hiding, None, "{part}");
            assert_eq!(*part, part.to_lowercase());
        }
        assert!(cure("pull image x: Certificate is NOT valid yet").starts_with("set the clock"));
        for text in [
            "CreateContainer: mounts[0].host_path /nfs: the file system did not respond within 10s",
            "/nfs: the file system still does not respond; 3 workers are blocked on it",
            "/nfs/b: not accessed, because 8 workers are blocked on file systems that do not respond: /nfs/a",
        ] {
            assert!(cure(text).starts_with("mount the network file system again"), "{text}: {}", cure(text));
        }
        assert!(cure("gibberish").starts_with("no advice"));
    }
}
