//! Computes the capabilities of a container's process. Without I/O, except [`bounding`], which reads the daemon's own
//! set from the kernel: a nested or restricted daemon cannot grant capabilities that it lacks. Rules: CRI 3.3
//! (containerd's default set and order of add and drop), CVE-2022-24769 for the empty inheritable set.

use std::str::FromStr;

use caps::{CapSet, Capability};
use nix::errno::Errno;
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::collect;

/// The sets of a process; bit n is capability n. The inheritable set is the ambient one (CVE-2022-24769).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capabilities {
    /// Bounding set: the capabilities that an exec can gain at most.
    pub bounding: u64,
    /// Effective capability set.
    pub effective: u64,
    /// Permitted set: the capabilities that can be made effective.
    pub permitted: u64,
    /// Ambient set: kept when a user other than root executes a file without file capabilities.
    pub ambient: u64,
}

/// The request of the security context. Names may have any case and may omit `CAP_`; `add` and `drop` may contain
/// `ALL`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// Names in the CRI's `add_capabilities`.
    pub add: Vec<String>,
    /// Names in the CRI's `drop_capabilities`.
    pub drop: Vec<String>,
    /// Names in the CRI's `add_ambient_capabilities`.
    pub add_ambient: Vec<String>,
    /// Whether all capabilities of the daemon are granted, regardless of the lists.
    pub privileged: bool,
}

/// The default capabilities: containerd's set, which pod security baselines assume.
const DEFAULT: [Capability; 14] = [
    Capability::CAP_CHOWN,
    Capability::CAP_DAC_OVERRIDE,
    Capability::CAP_FSETID,
    Capability::CAP_FOWNER,
    Capability::CAP_MKNOD,
    Capability::CAP_NET_RAW,
    Capability::CAP_SETGID,
    Capability::CAP_SETUID,
    Capability::CAP_SETFCAP,
    Capability::CAP_SETPCAP,
    Capability::CAP_NET_BIND_SERVICE,
    Capability::CAP_SYS_CHROOT,
    Capability::CAP_KILL,
    Capability::CAP_AUDIT_WRITE,
];

/// The effective capabilities of this process, as a bit mask. A process of a user other than root has none, whatever
/// its bounding set contains.
///
/// # Errors
/// [`Error::Kernel`] if they cannot be read.
pub fn effective() -> Result<u64, Error> {
    let set = caps::read(None, CapSet::Effective)
        .map_err(|_| Error::kernel("read", "the effective capabilities", Errno::EIO))?;
    Ok(set.iter().fold(0, |bits, capability| bits | capability.bitmask()))
}

/// Resolves the sets, with which the program is executed. For a user other than root the kernel then clears all but the
/// ambient ones (capabilities(7)); until then they let the process reach its program in a directory that only root may
/// enter, as in other runtimes. `available` is the daemon's own [`bounding`] set: requested capabilities outside of this
/// set are ignored, with a warning in the second value.
///
/// # Errors
/// [`Error::Invalid`] for an unknown capability name.
pub fn resolve(request: &Request, available: u64) -> Result<(Capabilities, Vec<String>), Error> {
    let add = parse("add_capabilities", &request.add)?;
    let drop = parse("drop_capabilities", &request.drop)?;
    let asked_ambient = parse("add_ambient_capabilities", &request.add_ambient)?;
    let mut set = DEFAULT.iter().fold(0, |set, capability| set | capability.bitmask());
    if add.has_all {
        set = available;
    }
    if drop.has_all {
        set = 0;
    }
    set = (set | add.named) & !drop.named;
    if request.privileged {
        set = available;
    }
    let ambient = (asked_ambient.named | if asked_ambient.has_all { available } else { 0 }) & available;
    let refused = (add.named & !drop.named | asked_ambient.named) & !available;
    let warnings = names(refused)
        .into_iter()
        .map(|name| format!("capability {name} left out: the runtime lacks it"))
        .collect();
    let bounding = (set & available) | ambient;
    let sets = Capabilities { bounding, effective: bounding, permitted: bounding, ambient };
    Ok((sets, warnings))
}

/// The bounding set of this process: the capabilities that it can grant to a container.
///
/// # Errors
/// [`Error::Kernel`] if the set cannot be read.
pub fn bounding() -> Result<u64, Error> {
    let set = caps::read(None, CapSet::Bounding)
        .map_err(|_| Error::kernel("read", "the bounding set", Errno::last()))?;
    Ok(set.iter().fold(0, |bits, capability| bits | capability.bitmask()))
}

struct Parsed {
    named: u64,
    has_all: bool,
}

/// The bit mask of a capability with a name such as `CAP_SYS_ADMIN`; `None` for an unknown name.
pub(crate) fn bit(name: &str) -> Option<u64> {
    Capability::from_str(name).ok().map(|capability| capability.bitmask())
}

fn parse(field: &str, names: &[String]) -> Result<Parsed, Error> {
    let mut parsed = Parsed { named: 0, has_all: false };
    for name in names {
        if name.eq_ignore_ascii_case("ALL") {
            parsed.has_all = true;
            continue;
        }
        // ASCII only: with the full Unicode rules the letter ſ is a lower-case S.
        let upper = name.to_ascii_uppercase();
        let canonical = if upper.starts_with("CAP_") { upper } else { format!("CAP_{upper}") };
        let capability = Capability::from_str(&canonical)
            .map_err(|_| Error::invalid(field, format!("unknown capability {name:?}")))?;
        parsed.named |= capability.bitmask();
    }
    Ok(parsed)
}

/// Names of the capabilities in a bit mask (`CAP_CHOWN`), by number.
pub fn names(set: u64) -> Vec<String> {
    let mut all: Vec<Capability> = caps::all().into_iter().filter(|one| set & one.bitmask() != 0).collect();
    collect::sort_by_key(&mut all, Capability::index);
    all.into_iter().map(|capability| capability.to_string()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVERYTHING: u64 = (1 << 41) - 1;
    /// The value `CapBnd` of a containerd container with default capabilities.
    const DEFAULT_BITS: u64 = 0xa804_25fb;
    const NET_ADMIN: u64 = 1 << 12;
    const NET_RAW: u64 = 1 << 13;
    const SYS_RESOURCE: u64 = 1 << 24;

    fn request(add: &[&str], drop: &[&str]) -> Request {
        let owned = |names: &[&str]| names.iter().map(ToString::to_string).collect();
        Request { add: owned(add), drop: owned(drop), ..Request::default() }
    }

    #[test]
    fn add_and_drop_in_the_order_of_containerd() {
        let table: [(&[&str], &[&str], u64); 9] = [
            (&[], &[], DEFAULT_BITS),
            (&["NET_ADMIN"], &[], DEFAULT_BITS | NET_ADMIN),
            (&["cap_net_admin"], &["Net_Raw"], (DEFAULT_BITS | NET_ADMIN) & !NET_RAW),
            (&[], &["ALL"], 0),
            (&["NET_ADMIN"], &["all"], NET_ADMIN),
            (&["ALL"], &[], EVERYTHING),
            (&["All"], &["NET_RAW"], EVERYTHING & !NET_RAW),
            (&["ALL"], &["ALL"], 0),
            (&["NET_RAW"], &["NET_RAW"], DEFAULT_BITS & !NET_RAW),
        ];
        for (add, drop, expected) in table {
            let (sets, warnings) = resolve(&request(add, drop), EVERYTHING).unwrap();
            let all =
                Capabilities { bounding: expected, effective: expected, permitted: expected, ambient: 0 };
            assert_eq!((sets, warnings), (all, vec![]), "add {add:?} drop {drop:?}");
        }
    }

    #[test]
    fn ambient_capabilities_are_in_all_sets() {
        let mut asked = request(&[], &["ALL"]);
        asked.add_ambient = vec!["NET_ADMIN".into()];
        let (sets, _) = resolve(&asked, EVERYTHING).unwrap();
        let four = [sets.bounding, sets.effective, sets.permitted, sets.ambient];
        assert_eq!(four, [NET_ADMIN; 4]);
    }

    #[test]
    fn capabilities_that_the_daemon_lacks_are_not_granted() {
        let available = EVERYTHING & !SYS_RESOURCE;
        let privileged = Request { privileged: true, ..request(&[], &["ALL"]) };
        let (sets, warnings) = resolve(&privileged, available).unwrap();
        assert_eq!((sets.bounding, sets.effective, warnings.len()), (available, available, 0));
        let (sets, warnings) = resolve(&request(&["SYS_RESOURCE"], &[]), available).unwrap();
        assert_eq!(sets.bounding, DEFAULT_BITS);
        assert_eq!(warnings, ["capability CAP_SYS_RESOURCE left out: the runtime lacks it"]);
        let (sets, _) = resolve(&request(&["ALL"], &[]), available).unwrap();
        assert_eq!(sets.bounding, available);
    }

    #[test]
    fn an_unknown_name_is_refused_in_every_list() {
        for name in ["", "CAP_", "NET-ADMIN", "SYS_EVERYTHING", "CAP_CAP_KILL", "ſys_admin"] {
            let ambient = Request { add_ambient: vec![name.into()], ..Request::default() };
            for request in [request(&[name], &[]), request(&[], &[name]), ambient] {
                assert!(matches!(resolve(&request, EVERYTHING), Err(Error::Invalid { .. })), "{request:?}");
            }
        }
    }

    #[test]
    fn the_bounding_set_is_that_of_the_kernel() {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("CapBnd:")).unwrap();
        assert_eq!(bounding().unwrap(), u64::from_str_radix(line.trim(), 16).unwrap());
    }
}
