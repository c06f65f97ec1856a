//! The target architectures as described in `targets/*/target.mk`, and a second-class one in `targets/second`, which the
//! Makefile, `tests/tools/install` and the edge image also use.

/// A target architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arch {
    X86_64,
    Aarch64,
    /// Second-class: built and tested by `make test-qemu-second` only.
    Armv7,
}

/// Kernel modules that suites need, in addition to the target's own modules for a node with a virtual disk.
const OF_SUITES: [&str; 26] = [
    "dummy",
    "fuse",
    "loop",
    // For the rules of the built-in network; guests do not load modules on demand.
    "nft_nat",
    "nft_masq",
    "nft_meta_bridge",
    "nft_fib_ipv4",
    "nft_fib_ipv6",
    // For iptables, which CNI's portmap uses.
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
    // For kube-proxy.
    "xt_statistic",
    "xt_tcpudp",
    "ipt_REJECT",
    // For bandwidth limits of pods.
    "sch_tbf",
    "sch_ingress",
    "cls_u32",
    "act_mirred",
    "ifb",
];

impl Arch {
    /// The architectures of releases.
    pub(crate) const ALL: [Arch; 2] = [Arch::X86_64, Arch::Aarch64];

    /// Name in rustc and QEMU.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Arch::X86_64 => "x86_64",
            Arch::Aarch64 => "aarch64",
            Arch::Armv7 => "armv7",
        }
    }

    /// Debian's name of the architecture.
    pub(crate) fn debian(self) -> &'static str {
        self.value("DEBIAN")
    }

    /// Target triple of coracle's programs.
    pub(crate) fn triple(self) -> &'static str {
        self.value("TRIPLE")
    }

    /// All modules to load, without dependencies.
    pub(crate) fn modules(self) -> Vec<&'static str> {
        self.value("MODULES").split(' ').chain(OF_SUITES).collect()
    }

    /// A value of the target's file.
    pub(crate) fn value(self, key: &str) -> &'static str {
        let text = match self {
            Arch::X86_64 => include_str!("../../targets/x86_64/target.mk"),
            Arch::Aarch64 => include_str!("../../targets/aarch64/target.mk"),
            Arch::Armv7 => include_str!("../../targets/second/armv7/target.mk"),
        };
        let mut lines = text.lines();
        let value = lines.find_map(|line| line.strip_prefix(key)?.strip_prefix(" := "));
        value.unwrap_or_else(|| panic!("target.mk of {}: no {key}", self.name()))
    }
}
