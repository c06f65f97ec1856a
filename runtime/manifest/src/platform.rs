//! Chooses the platform of an index: Linux, this architecture, and the highest CPU variant that this CPU
//! supports; on arm64 also 32-bit images if the CPU supports them, and on amd64 those for 386.

use std::cmp::Reverse;
use std::fmt;

use coracle_sandbox::seccomp::Architecture;

use coracle_json::{Object, Problem};

/// Go's name of the architecture for which this program was built.
pub const ARCHITECTURE: &str = Architecture::HERE[0].go_name();

/// A platform with the names of Go.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Platform {
    architecture: String,
    os: String,
    variant: String,
}

impl fmt::Display for Platform {
    /// Formats the platform in docker's notation, `linux/arm64/v8`.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}/{}", self.os, self.architecture)?;
        match self.variant.as_str() {
            "" => Ok(()),
            variant => write!(out, "/{variant}"),
        }
    }
}

/// The architecture and variant of the node's CPU.
#[derive(Clone, Copy, Debug)]
struct Cpu {
    architecture: &'static str,
    /// On amd64 the microarchitecture level of the x86-64 psABI, 1 to 4.
    level: u8,
    /// On arm64 whether the CPU can run 32-bit programs.
    has_arm: bool,
}

/// Order of platforms, smaller is better: this architecture first, then the highest variant.
pub(crate) type Rank = (u8, Reverse<u8>);

impl Platform {
    /// Reads the `platform` of a descriptor.
    pub(crate) fn read(json: &Object<'_>) -> Result<Self, Problem> {
        Ok(Self::named(&json.text("os")?, &json.text("architecture")?, &json.text("variant")?))
    }

    /// The platform with these names, which are replaced by those of Go as containerd does it (`Normalize` of
    /// github.com/containerd/platforms): builders also write the names of the kernel and of distributions.
    fn named(os: &str, architecture: &str, variant: &str) -> Self {
        let [os, architecture, variant] = [os, architecture, variant].map(str::to_ascii_lowercase);
        let (architecture, variant) = match (architecture.as_str(), variant.as_str()) {
            ("i386", _) => ("386", ""),
            ("x86_64" | "x86-64" | "amd64", "v1") => ("amd64", ""),
            ("x86_64" | "x86-64", variant) => ("amd64", variant),
            ("aarch64" | "arm64", "8" | "v8" | "v8.0") => ("arm64", ""),
            ("aarch64", variant) => ("arm64", variant),
            ("armhf", _) | ("arm", "" | "7") => ("arm", "v7"),
            ("armel", _) | ("arm", "6") => ("arm", "v6"),
            ("arm", "5") => ("arm", "v5"),
            ("arm", "8") => ("arm", "v8"),
            known => known,
        };
        let os = if os.is_empty() { "linux" } else { &os };
        Self { architecture: architecture.to_owned(), os: os.to_owned(), variant: variant.to_owned() }
    }

    /// Rank of the platform; `None` if this node does not support it.
    pub(crate) fn rank(&self) -> Option<Rank> {
        if self.os != "linux" {
            return None;
        }
        // The kernel is queried only if necessary.
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
            // As containerd: what an index has for 32 bits counts if there is nothing else.
            ("386", "amd64") => Some((1, Reverse(0))),
            // Variants above v8 require features that not all boards have.
            ("arm64", "arm64") => number(8).filter(|asked| *asked == 8).map(|asked| (0, Reverse(asked))),
            ("arm", "arm64") if cpu.has_arm => {
                number(7).filter(|asked| (5..=8).contains(asked)).map(|asked| (1, Reverse(asked)))
            }
            // The programs for arm require ARMv7.
            ("arm", "arm") => {
                number(7).filter(|asked| (5..=7).contains(asked)).map(|asked| (0, Reverse(asked)))
            }
            ("riscv64", "riscv64") if self.variant.is_empty() => Some((0, Reverse(0))),
            _ => None,
        }
    }
}

/// The platform of an image config that this node does not support, by name; `None` if it is supported. Old configs
/// omit the platform, which counts as supported.
pub(crate) fn foreign(os: &str, architecture: &str) -> Option<String> {
    let architecture = if architecture.is_empty() { ARCHITECTURE } else { architecture };
    // The variant in a config says for what the image was built, and not what it needs.
    let platform = Platform::named(os, architecture, "");
    platform.rank().is_none().then(|| platform.to_string())
}

/// Whether the kernel and the CPU support 32-bit programs: only then can a process switch to that
/// personality.
fn runs_arm() -> bool {
    use nix::sys::personality::{self, Persona};
    /// Value `PER_LINUX32` of linux/personality.h: 32-bit programs.
    const LINUX32: Persona = Persona::from_bits_retain(8);
    let Ok(before) = personality::get() else { return false };
    let runs = personality::set(LINUX32).is_ok();
    runs && personality::set(before).is_ok()
}

/// The microarchitecture level of this CPU.
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

/// The microarchitecture level; always 1, because only amd64 has levels.
#[cfg(not(target_arch = "x86_64"))]
fn level() -> u8 {
    1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn best(cpu: Cpu, platforms: &[(&str, &str)]) -> Option<usize> {
        let rank = |(architecture, variant): &(&str, &str)| {
            Platform::named("linux", architecture, variant).rank_on(cpu)
        };
        let ranked =
            platforms.iter().enumerate().filter_map(|(index, platform)| Some((rank(platform)?, index)));
        ranked.min().map(|(_, index)| index)
    }

    #[test]
    fn the_best_supported_platform_is_chosen() {
        let amd64 = |level| Cpu { architecture: "amd64", level, has_arm: false };
        let arm64 = |has_arm| Cpu { architecture: "arm64", level: 1, has_arm };
        let all =
            [("amd64", "v3"), ("amd64", ""), ("amd64", "v2"), ("arm64", "v8"), ("arm", "v6"), ("arm", "v7")];
        assert_eq!(best(amd64(1), &all), Some(1));
        assert_eq!(best(amd64(2), &all), Some(2));
        assert_eq!(best(amd64(4), &all), Some(0));
        assert_eq!(best(arm64(true), &all), Some(3));
        assert_eq!(best(arm64(true), &all[4..]), Some(1), "the highest 32-bit variant");
        assert_eq!(best(arm64(false), &all[4..]), None);
        assert_eq!(best(arm64(true), &[("arm64", "v9"), ("arm64", "")]), Some(1));
        let other = |architecture| Cpu { architecture, level: 1, has_arm: false };
        assert_eq!(best(other("arm"), &all), Some(5));
        assert_eq!(
            best(other("arm"), &[("arm64", "v8"), ("arm", "v8"), ("arm", "v5"), ("arm", "v6")]),
            Some(3)
        );
        assert_eq!(best(other("riscv64"), &[("amd64", ""), ("riscv64", "x"), ("riscv64", "")]), Some(2));
        assert_eq!(best(amd64(4), &[("amd64", "v5"), ("amd64", "x"), ("s390x", "")]), None);
        assert_eq!(best(amd64(1), &[("386", ""), ("amd64", "")]), Some(1));
        assert_eq!(best(amd64(1), &[("arm64", ""), ("i386", "")]), Some(1));
        assert_eq!(best(arm64(true), &[("386", "")]), None);
    }

    /// The table of `Normalize` of github.com/containerd/platforms.
    #[test]
    fn names_are_normalised_as_by_containerd() {
        for (platform, expected) in [
            (("Linux", "AMD64", ""), "linux/amd64"),
            (("linux", "x86_64", ""), "linux/amd64"),
            (("", "x86-64", "v1"), "linux/amd64"),
            (("linux", "amd64", "v3"), "linux/amd64/v3"),
            (("linux", "i386", "x"), "linux/386"),
            (("linux", "aarch64", ""), "linux/arm64"),
            (("linux", "arm64", "V8"), "linux/arm64"),
            (("linux", "arm64", "v9"), "linux/arm64/v9"),
            (("linux", "armhf", ""), "linux/arm/v7"),
            (("linux", "armel", ""), "linux/arm/v6"),
            (("linux", "arm", ""), "linux/arm/v7"),
            (("linux", "arm", "6"), "linux/arm/v6"),
            (("Windows", "s390x", ""), "windows/s390x"),
        ] {
            let (os, architecture, variant) = platform;
            assert_eq!(Platform::named(os, architecture, variant).to_string(), expected, "{platform:?}");
        }
    }

    #[test]
    fn the_cpu_level_is_known_and_other_systems_are_unsupported() {
        assert!((1..=4).contains(&level()));
        assert_eq!((foreign("", ""), foreign("LINUX", ARCHITECTURE)), (None, None));
        assert_eq!(foreign("windows", ARCHITECTURE), Some(format!("windows/{ARCHITECTURE}")));
        assert_eq!(foreign("linux", "s390x").as_deref(), Some("linux/s390x"));
    }
}
