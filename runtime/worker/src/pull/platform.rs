//! Which images of an index this node can run, and which of them it runs best: Linux, its own architecture, the most of
//! its CPU that an image asks for; on arm64 also 32-bit images, where the CPU still has that mode.

use std::cmp::Reverse;

use serde::Deserialize;

/// Go's name for the architecture this program was built for.
pub(crate) const ARCHITECTURE: &str = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };

/// The `platform` of a descriptor.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
pub(super) struct Platform {
    #[serde(default)]
    pub(super) architecture: String,
    #[serde(default)]
    pub(super) os: String,
    #[serde(default)]
    pub(super) variant: String,
}

/// What the node runs.
#[derive(Clone, Copy, Debug)]
struct Cpu {
    architecture: &'static str,
    /// Of amd64: 1 to 4, the microarchitecture levels of the x86-64 psABI.
    level: u8,
    /// Of arm64: it runs 32-bit programs, too.
    has_arm: bool,
}

/// Smaller is better: first its own architecture, then the highest variant.
pub(super) type Rank = (u8, Reverse<u8>);

impl Platform {
    /// `None`: not for this node.
    pub(super) fn rank(&self) -> Option<Rank> {
        if self.os != "linux" {
            return None;
        }
        // Asked of the kernel only where it matters.
        let has_arm = self.architecture == "arm" && ARCHITECTURE == "arm64" && runs_arm();
        self.rank_on(Cpu { architecture: ARCHITECTURE, level: level(), has_arm })
    }

    fn rank_on(&self, cpu: Cpu) -> Option<Rank> {
        let number = |plain: u8| match self.variant.as_str() {
            "" => Some(plain),
            variant => variant.strip_prefix('v')?.parse::<u8>().ok(),
        };
        match (self.architecture.as_str(), cpu.architecture) {
            ("amd64", "amd64") => {
                number(1).filter(|asked| *asked <= cpu.level).map(|asked| (0, Reverse(asked)))
            }
            // What is above v8 asks for what not every board has.
            ("arm64", "arm64") => number(8).filter(|asked| *asked == 8).map(|asked| (0, Reverse(asked))),
            ("arm", "arm64") if cpu.has_arm => {
                number(7).filter(|asked| (5..=8).contains(asked)).map(|asked| (1, Reverse(asked)))
            }
            _ => None,
        }
    }
}

/// Whether an image config's words name something this node runs; old ones leave them out.
pub(crate) fn is_ours(os: &str, architecture: &str) -> bool {
    let is_linux = matches!(os, "" | "linux");
    let is_arm = architecture == "arm" && ARCHITECTURE == "arm64" && runs_arm();
    is_linux && (matches!(architecture, "" | ARCHITECTURE) || is_arm)
}

/// Whether the kernel and the CPU run 32-bit programs: only then may a process say that it is one.
fn runs_arm() -> bool {
    use nix::sys::personality::{self, Persona};
    /// `PER_LINUX32` of linux/personality.h.
    const LINUX32: Persona = Persona::from_bits_retain(8);
    let Ok(before) = personality::get() else { return false };
    let runs = personality::set(LINUX32).is_ok();
    runs && personality::set(before).is_ok()
}

/// The level of this CPU.
#[cfg(target_arch = "x86_64")]
fn level() -> u8 {
    use std::arch::is_x86_feature_detected as has;
    let two = has!("cmpxchg16b")
        && has!("popcnt")
        && has!("sse3")
        && has!("sse4.1")
        && has!("sse4.2")
        && has!("ssse3");
    let three = has!("avx") && has!("avx2") && has!("bmi1") && has!("bmi2") && has!("f16c") && has!("fma");
    let three = three && has!("lzcnt") && has!("movbe");
    let four =
        has!("avx512f") && has!("avx512bw") && has!("avx512cd") && has!("avx512dq") && has!("avx512vl");
    1 + [two, three, four].iter().take_while(|has| **has).count() as u8
}

/// Levels are amd64's.
#[cfg(not(target_arch = "x86_64"))]
fn level() -> u8 {
    1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn best(cpu: Cpu, platforms: &[(&str, &str)]) -> Option<usize> {
        let rank = |(architecture, variant): &(&str, &str)| {
            let platform = Platform {
                architecture: (*architecture).into(),
                os: "linux".into(),
                variant: (*variant).into(),
            };
            platform.rank_on(cpu)
        };
        let ranked =
            platforms.iter().enumerate().filter_map(|(index, platform)| Some((rank(platform)?, index)));
        ranked.min().map(|(_, index)| index)
    }

    #[test]
    fn the_best_that_runs_is_chosen() {
        let amd64 = |level| Cpu { architecture: "amd64", level, has_arm: false };
        let arm64 = |has_arm| Cpu { architecture: "arm64", level: 1, has_arm };
        let all =
            [("amd64", "v3"), ("amd64", ""), ("amd64", "v2"), ("arm64", "v8"), ("arm", "v6"), ("arm", "v7")];
        assert_eq!(best(amd64(1), &all), Some(1));
        assert_eq!(best(amd64(2), &all), Some(2));
        assert_eq!(best(amd64(4), &all), Some(0));
        assert_eq!(best(arm64(true), &all), Some(3));
        assert_eq!(best(arm64(true), &all[4..]), Some(1), "the highest of 32 bits");
        assert_eq!(best(arm64(false), &all[4..]), None);
        assert_eq!(best(arm64(true), &[("arm64", "v9"), ("arm64", "")]), Some(1));
        assert_eq!(best(amd64(4), &[("amd64", "v5"), ("amd64", "x"), ("386", ""), ("s390x", "")]), None);
    }

    #[test]
    fn this_cpu_has_a_level_and_other_systems_are_not_ours() {
        assert!((1..=4).contains(&level()));
        assert!(is_ours("", "") && is_ours("linux", ARCHITECTURE));
        assert!(!is_ours("windows", ARCHITECTURE) && !is_ours("linux", "s390x"));
        let windows =
            Platform { architecture: ARCHITECTURE.into(), os: "windows".into(), variant: String::new() };
        assert_eq!(windows.rank(), None);
    }
}
