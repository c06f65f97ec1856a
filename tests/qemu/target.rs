//! The two targets, as `targets/*/target.mk` describes them: the Makefile, `tests/tools/install` and the edge image read the
//! same files.

/// One of the two targets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arch {
    X86_64,
    Aarch64,
}

/// Modules beside the target's own, those of a node with a virtual disk: what suites ask a kernel for.
const OF_SUITES: [&str; 21] = [
    "dummy",
    "loop",
    // What the built-in network's rules are made of; nothing in a guest loads a module when it is asked for.
    "nft_nat",
    "nft_masq",
    "nft_fib_ipv4",
    "nft_fib_ipv6",
    // What iptables is made of here, for CNI's portmap.
    "nft_compat",
    "nft_chain_nat",
    "xt_MASQUERADE",
    "xt_addrtype",
    "xt_comment",
    "xt_conntrack",
    "xt_mark",
    "xt_multiport",
    "xt_nat",
    "xt_REDIRECT",
    // What limits of a pod's traffic are made of.
    "sch_tbf",
    "sch_ingress",
    "cls_u32",
    "act_mirred",
    "ifb",
];

impl Arch {
    /// Both.
    pub(crate) const ALL: [Arch; 2] = [Arch::X86_64, Arch::Aarch64];

    /// As rustc and QEMU call it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Arch::X86_64 => "x86_64",
            Arch::Aarch64 => "aarch64",
        }
    }

    /// As Debian calls it.
    pub(crate) fn debian(self) -> &'static str {
        self.value("DEBIAN")
    }

    /// What our programs are built for.
    pub(crate) fn triple(self) -> &'static str {
        self.value("TRIPLE")
    }

    /// All modules to load, each for itself.
    pub(crate) fn modules(self) -> Vec<&'static str> {
        self.value("MODULES").split(' ').chain(OF_SUITES).collect()
    }

    /// A value of the target's file.
    pub(crate) fn value(self, key: &str) -> &'static str {
        let text = match self {
            Arch::X86_64 => include_str!("../../targets/x86_64/target.mk"),
            Arch::Aarch64 => include_str!("../../targets/aarch64/target.mk"),
        };
        let mut lines = text.lines();
        let value = lines.find_map(|line| line.strip_prefix(key)?.strip_prefix(" := "));
        value.unwrap_or_else(|| panic!("targets/{}/target.mk: no {key}", self.name()))
    }
}
