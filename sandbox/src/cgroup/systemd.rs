//! The part of the systemd driver without D-Bus: names of slices and scopes, and limits as properties of a scope.
//!
//! systemd owns the cgroup tree of its host. A container's cgroup is created and limited through files as with the
//! cgroupfs driver, with the name of a scope; then systemd is asked to adopt it, with its processes, as a delegated
//! scope. The limits are also set as properties, because systemd's next daemon-reload would overwrite unknown ones with
//! its defaults. A worker makes the D-Bus calls. Rules: CRI 3.15; systemd.slice(5), systemd.scope(5),
//! systemd.resource-control(5); CGROUP_DELEGATION.

use super::Version;
use super::files::{read, write};
use super::resources::{Limits, Now, Write, writes};
use super::{CgroupPath, Cgroups};
use crate::Error;

/// Cgroup drivers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Driver {
    /// coracle creates the cgroup directories itself.
    #[default]
    Cgroupfs,
    /// coracle creates the cgroup directories, and systemd adopts them as scopes in slices.
    Systemd,
}

impl Driver {
    /// The driver's name in configurations of kubelets and runtimes.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cgroupfs => "cgroupfs",
            Self::Systemd => "systemd",
        }
    }
}

/// A property of a unit for `StartTransientUnit` and `SetUnitProperties`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Property {
    /// Name, for example `MemoryMax`.
    pub name: &'static str,
    /// Value of the property.
    pub value: PropertyValue,
}

/// Types of property values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PropertyValue {
    /// D-Bus type `t`; the largest number means "infinity".
    Number(u64),
    /// D-Bus type `s`, a text.
    Text(&'static str),
    /// D-Bus type `ay`: CPUs or memory nodes, the first in the lowest bit of the first byte.
    Mask(Vec<u8>),
}

/// The value "infinity" in properties.
const INFINITY: u64 = u64::MAX;

/// systemd stores a quota as whole percents of a CPU: multiples of 10 ms per second.
const QUOTA_STEP_US: u128 = 10_000;

/// Upper bound of CPU and node numbers in a list; the kernel's limit is 8192.
const LIST_MAX: usize = 8192;

/// Property of scopes since systemd 253.
const OOM_POLICY: &str = "OOMPolicy";

/// Files whose value is used unchanged as a property's value: file, property.
const NUMBERS: [(&str, &str); 10] = [
    ("cpu.shares", "CPUShares"),
    ("cpu.weight", "CPUWeight"),
    ("memory.high", "MemoryHigh"),
    ("memory.limit_in_bytes", "MemoryLimit"),
    ("memory.low", "MemoryLow"),
    ("memory.max", "MemoryMax"),
    ("memory.min", "MemoryMin"),
    ("memory.swap.max", "MemorySwapMax"),
    ("pids.max", "TasksMax"),
    ("io.weight", "IOWeight"),
];

impl Cgroups {
    /// The properties of systemd for the requested limits; other limits are only in the files of the cgroup.
    ///
    /// # Errors
    /// [`Error::Invalid`] for invalid limits, the same as for [`Cgroups::apply`].
    pub fn properties(&self, limits: &Limits) -> Result<Vec<Property>, Error> {
        Ok(properties(&writes(limits, self.version(), Now::default())?, self.version()))
    }

    /// The device rules of the cgroup on v1, one per line; `None` on v2, where systemd does not change the eBPF
    /// program.
    pub fn legacy_devices(&self, path: &CgroupPath) -> Option<String> {
        match self.version() {
            Version::V1 => read(&self.limit_directory(path, "devices")?.join("devices.list")).ok(),
            Version::V2 => None,
        }
    }

    /// Restores the device rules, because systemd allows all devices for a unit without device properties.
    ///
    /// # Errors
    /// [`Error::Kernel`] naming the rule and the file.
    pub fn restore_legacy_devices(&self, path: &CgroupPath, devices: Option<String>) -> Result<(), Error> {
        let Some((devices, directory)) = devices.zip(self.limit_directory(path, "devices")) else {
            return Ok(());
        };
        if read(&directory.join("devices.list"))? == devices {
            return Ok(());
        }
        write(&directory.join("devices.deny"), "a")?;
        devices.lines().try_for_each(|rule| write(&directory.join("devices.allow"), rule))
    }
}

/// Converts writes to properties. If several writes have the same property, the last one is used.
fn properties(writes: &[Write], version: Version) -> Vec<Property> {
    let mut found: Vec<Property> = Vec::new();
    let mut put = |name, value| {
        found.retain(|property| property.name != name);
        found.push(Property { name, value });
    };
    let (mut quota, mut period) = (None, None);
    for Write { file, value, .. } in writes {
        let file = file.as_str();
        if let Some((_, name)) = NUMBERS.iter().find(|(known, _)| *known == file)
            && let Some(number) = number(value)
        {
            put(*name, PropertyValue::Number(number));
        }
        match file {
            "cpu.max" => {
                let mut words = value.split_ascii_whitespace();
                quota = words.next().and_then(number);
                period = words.next().and_then(number).or(period);
            }
            "cpu.cfs_quota_us" => quota = number(value),
            "cpu.cfs_period_us" => period = number(value),
            // The value says whether an OOM kill of one process kills all; `stop` would end the remaining ones
            // gracefully.
            "memory.oom.group" => {
                put(OOM_POLICY, PropertyValue::Text(if value.trim() == "1" { "kill" } else { "continue" }));
            }
            // v1 has no such properties, only files.
            "cpuset.cpus" if version == Version::V2 => {
                mask(value).into_iter().for_each(|mask| put("AllowedCPUs", PropertyValue::Mask(mask)));
            }
            "cpuset.mems" if version == Version::V2 => {
                mask(value).into_iter().for_each(|mask| put("AllowedMemoryNodes", PropertyValue::Mask(mask)));
            }
            _ => {}
        }
    }
    if let Some(period) = period {
        put("CPUQuotaPeriodUSec", PropertyValue::Number(period));
    }
    if let Some(quota) = quota {
        put("CPUQuotaPerSecUSec", PropertyValue::Number(per_second(quota, period.unwrap_or(100_000))));
    }
    found
}

/// Parses a limit; `max` and negative numbers are converted to [`INFINITY`]. `None` if the text is invalid.
fn number(text: &str) -> Option<u64> {
    match text.trim() {
        "max" => Some(INFINITY),
        text => text.parse::<i128>().ok().map(|number| u64::try_from(number).unwrap_or(INFINITY)),
    }
}

/// CPU time per second, rounded up, so that a container never gets less than requested.
fn per_second(quota_us: u64, period_us: u64) -> u64 {
    if quota_us == INFINITY || period_us == 0 {
        return INFINITY;
    }
    let per_second = u128::from(quota_us) * 1_000_000 / u128::from(period_us);
    u64::try_from(per_second.div_ceil(QUOTA_STEP_US) * QUOTA_STEP_US).unwrap_or(INFINITY)
}

/// Converts a list such as `0-3,7` to a bit mask; `None` if it is invalid.
fn mask(list: &str) -> Option<Vec<u8>> {
    let mut mask = Vec::new();
    for range in list.split(',').map(str::trim).filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        if last >= LIST_MAX {
            return None;
        }
        for bit in first..=last {
            if mask.len() <= bit / 8 {
                mask.resize(bit / 8 + 1, 0);
            }
            mask[bit / 8] |= 1 << (bit % 8);
        }
    }
    (!mask.is_empty()).then_some(mask)
}

/// The cgroup of a slice, given by its path or its name alone; each dash in the name is a level.
///
/// # Errors
/// [`Error::Invalid`] if it is not the name of a slice.
pub fn slice(parent: &str) -> Result<CgroupPath, Error> {
    let invalid = |why: &str| {
        Error::invalid("cgroup parent", format!("{parent:?} {why} (the cgroup driver is systemd)"))
    };
    let name = parent.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    let stem = name.strip_suffix(".slice").ok_or_else(|| invalid("is not a slice, NAME.slice"))?;
    if stem.is_empty() || stem.split('-').any(str::is_empty) {
        return Err(invalid("is no valid slice name"));
    }
    let levels = stem.match_indices('-').map(|(at, _)| at).chain([stem.len()]);
    let path: String = levels.map(|at| format!("/{}.slice", &stem[..at])).collect();
    CgroupPath::parse(&path)
}

/// Name of the scope of a container or a pod's monitor.
pub fn scope(id: &impl std::fmt::Display) -> String {
    format!("coracle-{id}.scope")
}

/// The ID in the name of a scope that coracle created; `None` for any other name.
pub fn id_of_scope(name: &str) -> Option<&str> {
    name.strip_prefix("coracle-")?.strip_suffix(".scope")
}

#[cfg(test)]
mod tests {
    use super::super::Resources;
    use super::*;

    #[test]
    fn slices_nest_by_their_dashes() {
        let pod = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1_2.slice";
        for (parent, expected) in [
            (pod, pod),
            ("kubepods-burstable-pod1_2.slice", pod),
            ("system.slice", "/system.slice"),
            ("/system.slice/", "/system.slice"),
        ] {
            assert_eq!(slice(parent).unwrap().as_str(), expected, "{parent}");
        }
        for bad in ["", "/kubepods/burstable", ".slice", "-a.slice", "a-.slice", "a--b.slice", "/a.slice/b"] {
            assert!(slice(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn limits_are_the_properties_that_systemd_has() {
        let number = |name, value| Property { name, value: PropertyValue::Number(value) };
        let resources = Resources {
            cpu_shares: 1024,
            cpu_quota_us: 15_500,
            cpu_period_us: 50_000,
            memory_limit_bytes: 64 << 20,
            cpuset_cpus: "0-1,9".into(),
            unified: vec![("memory.high".into(), "max".into()), ("memory.oom.group".into(), "1".into())],
            ..Resources::default()
        };
        let limits =
            Limits { pids_max: -1, memory_reservation_bytes: Some(1 << 20), ..Limits::from(resources) };
        let of = |version| {
            let mut found = properties(&writes(&limits, version, Now::default()).unwrap(), version);
            found.sort_by_key(|property| property.name);
            found
        };
        let expected = [
            Property { name: "AllowedCPUs", value: PropertyValue::Mask(vec![0b11, 0b10]) },
            number("CPUQuotaPerSecUSec", 310_000),
            number("CPUQuotaPeriodUSec", 50_000),
            number("CPUWeight", 100),
            number("MemoryHigh", INFINITY),
            number("MemoryLow", 1 << 20),
            number("MemoryMax", 64 << 20),
            number("MemorySwapMax", 0),
            Property { name: "OOMPolicy", value: PropertyValue::Text("kill") },
            number("TasksMax", INFINITY),
        ];
        assert_eq!(of(Version::V2), expected);
        let expected = [
            number("CPUQuotaPerSecUSec", 310_000),
            number("CPUQuotaPeriodUSec", 50_000),
            number("CPUShares", 1024),
            number("MemoryLimit", 64 << 20),
            number("TasksMax", INFINITY),
        ];
        assert_eq!(of(Version::V1), expected);
        assert_eq!(properties(&[], Version::V2), []);
    }

    #[test]
    fn quotas_are_rounded_up_to_whole_percents() {
        for (quota, period, expected) in [
            (100_000, 100_000, 1_000_000),
            (1_000, 100_000, 10_000),
            (1_001, 100_000, 20_000),
            (33_333, 100_000, 340_000),
            (INFINITY, 100_000, INFINITY),
            (1, 0, INFINITY),
        ] {
            assert_eq!(per_second(quota, period), expected, "{quota}/{period}");
        }
    }

    #[test]
    fn cpusets_are_converted_to_bit_masks_or_refused() {
        for (list, expected) in [
            ("0", Some(vec![1])),
            ("1-3, 8", Some(vec![0b1110, 1])),
            ("", None),
            ("a", None),
            ("0-9999", None),
            ("3-1", None),
        ] {
            assert_eq!(mask(list), expected, "{list:?}");
        }
    }
}
