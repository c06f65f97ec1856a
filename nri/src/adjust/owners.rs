//! Owners of a container's fields during one request: the plugin that set a field owns it (NRI 4.2).

use std::collections::BTreeMap;

use crate::api;

/// Fields that have an owner. Numbers and names are those of the protocol; the names are used in texts of conflicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(i32)]
pub(crate) enum Field {
    Annotations = 1,
    Mounts = 2,
    OciHooks = 3,
    Devices = 4,
    CdiDevices = 5,
    Env = 6,
    Args = 7,
    MemLimit = 8,
    MemReservation = 9,
    MemSwapLimit = 10,
    MemKernelLimit = 11,
    MemTCPLimit = 12,
    MemSwappiness = 13,
    MemDisableOomKiller = 14,
    MemUseHierarchy = 15,
    CPUShares = 16,
    CPUQuota = 17,
    CPUPeriod = 18,
    CPURealtimeRuntime = 19,
    CPURealtimePeriod = 20,
    CPUSetCPUs = 21,
    CPUSetMems = 22,
    PidsLimit = 23,
    HugepageLimits = 24,
    BlockioClass = 25,
    RdtClass = 26,
    CgroupsUnified = 27,
    CgroupsPath = 28,
    OomScoreAdj = 29,
    Rlimits = 30,
    IoPriority = 31,
    SeccompPolicy = 32,
    Namespace = 33,
    Sysctl = 34,
    LinuxNetDevices = 35,
    LinuxSched = 36,
    RdtClosID = 37,
    RdtSchemata = 38,
    RdtEnableMonitoring = 39,
    MemoryPolicy = 40,
}

impl Field {
    /// Whether each entry of the field has its own owner.
    fn is_compound(self) -> bool {
        matches!(
            self,
            Self::Annotations
                | Self::Mounts
                | Self::Devices
                | Self::CdiDevices
                | Self::Env
                | Self::HugepageLimits
                | Self::CgroupsUnified
                | Self::Rlimits
                | Self::Namespace
                | Self::Sysctl
                | Self::LinuxNetDevices
        )
    }
}

/// The owners of one container's fields, by field and entry. The prefix `-` of a plugin name means that the plugin has
/// cleared the entry.
#[derive(Clone, Default)]
pub(crate) struct Owners(BTreeMap<(Field, String), String>);

impl Owners {
    /// Claims an entry for a plugin; for simple fields `entry` is empty.
    pub(crate) fn claim(&mut self, field: Field, entry: &str, plugin: &str) -> Result<(), String> {
        let key = (field, entry.to_owned());
        match self.0.get(&key) {
            Some(owner) if owner.strip_prefix('-') != Some(plugin) => {
                let owner = owner.strip_prefix('-').unwrap_or(owner);
                Err(format!("plugins {plugin:?} and {owner:?} both tried to set {field:?} {entry}"))
            }
            Some(_) | None => {
                self.0.insert(key, plugin.to_owned());
                Ok(())
            }
        }
    }

    /// Records that a plugin has removed an entry of any owner; only this plugin may set the entry later.
    pub(crate) fn clear(&mut self, field: Field, entry: &str, plugin: &str) {
        self.0.insert((field, entry.to_owned()), format!("-{plugin}"));
    }

    /// Records that a plugin has added to a field that several plugins may extend.
    pub(crate) fn accumulate(&mut self, field: Field, plugin: &str) {
        let owner = self.0.entry((field, String::new())).or_default();
        if !owner.is_empty() {
            owner.push(',');
        }
        owner.push_str(plugin);
    }

    /// Claims or clears a simple field, depending on its value.
    pub(crate) fn set_or_clear(
        &mut self,
        field: Field,
        plugin: &str,
        is_cleared: bool,
    ) -> Result<(), String> {
        if is_cleared {
            self.clear(field, "", plugin);
            return Ok(());
        }
        self.claim(field, "", plugin)
    }

    /// Claims the entries of a map, in which a key with the prefix `-` removes an entry. Removals are processed first,
    /// so that a plugin can replace an entry of another plugin.
    pub(crate) fn map<V: Default>(
        &mut self,
        field: Field,
        plugin: &str,
        merged: &mut BTreeMap<String, V>,
        asked: BTreeMap<String, V>,
    ) -> Result<(), String> {
        let (removals, sets): (Vec<_>, Vec<_>) = asked.into_iter().partition(|(key, _)| key.starts_with('-'));
        for (marker, _) in removals {
            let key = &marker[1..];
            self.clear(field, key, plugin);
            merged.remove(key);
            merged.insert(marker, V::default());
        }
        for (key, value) in sets {
            self.claim(field, &key, plugin)?;
            merged.insert(key, value);
        }
        Ok(())
    }

    /// Claims the entries of a list by their keys; a key with the prefix `-` removes an entry.
    pub(crate) fn list<T>(
        &mut self,
        field: Field,
        plugin: &str,
        merged: &mut Vec<T>,
        asked: Vec<T>,
        key: impl Fn(&T) -> &String,
    ) -> Result<(), String> {
        let (removals, sets): (Vec<_>, Vec<_>) =
            asked.into_iter().partition(|entry| key(entry).starts_with('-'));
        for marker in removals {
            let name = key(&marker)[1..].to_owned();
            self.clear(field, &name, plugin);
            merged.retain(|entry| *key(entry) != name && *key(entry) != *key(&marker));
            merged.push(marker);
        }
        self.entries(field, plugin, merged, sets, key)
    }

    /// Claims the entries of a list by their keys; entries cannot be removed.
    pub(crate) fn entries<T>(
        &mut self,
        field: Field,
        plugin: &str,
        merged: &mut Vec<T>,
        asked: Vec<T>,
        key: impl Fn(&T) -> &String,
    ) -> Result<(), String> {
        for entry in asked {
            self.claim(field, key(&entry), plugin)?;
            merged.retain(|other| key(other) != key(&entry));
            merged.push(entry);
        }
        Ok(())
    }

    /// Claims every field that is set in `asked`.
    pub(crate) fn resources(&mut self, plugin: &str, asked: &api::LinuxResources) -> Result<(), String> {
        let mut claim = |field, is_set: bool| if is_set { self.claim(field, "", plugin) } else { Ok(()) };
        let memory = asked.memory.unwrap_or_default();
        claim(Field::MemLimit, memory.limit.is_some())?;
        claim(Field::MemReservation, memory.reservation.is_some())?;
        claim(Field::MemSwapLimit, memory.swap.is_some())?;
        claim(Field::MemKernelLimit, memory.kernel.is_some())?;
        claim(Field::MemTCPLimit, memory.kernel_tcp.is_some())?;
        claim(Field::MemSwappiness, memory.swappiness.is_some())?;
        claim(Field::MemDisableOomKiller, memory.disable_oom_killer.is_some())?;
        claim(Field::MemUseHierarchy, memory.use_hierarchy.is_some())?;
        if let Some(cpu) = &asked.cpu {
            claim(Field::CPUShares, cpu.shares.is_some())?;
            claim(Field::CPUQuota, cpu.quota.is_some())?;
            claim(Field::CPUPeriod, cpu.period.is_some())?;
            claim(Field::CPURealtimeRuntime, cpu.realtime_runtime.is_some())?;
            claim(Field::CPURealtimePeriod, cpu.realtime_period.is_some())?;
            claim(Field::CPUSetCPUs, !cpu.cpus.is_empty())?;
            claim(Field::CPUSetMems, !cpu.mems.is_empty())?;
        }
        for limit in &asked.hugepage_limits {
            self.claim(Field::HugepageLimits, &limit.page_size, plugin)?;
        }
        for key in asked.unified.keys() {
            self.claim(Field::CgroupsUnified, key, plugin)?;
        }
        if asked.pids.is_some() {
            self.claim(Field::PidsLimit, "", plugin)?;
        }
        if let Some(class) = &asked.blockio_class {
            self.set_or_clear(Field::BlockioClass, plugin, class.value.is_empty())?;
        }
        match &asked.rdt_class {
            Some(class) => self.set_or_clear(Field::RdtClass, plugin, class.value.is_empty()),
            None => Ok(()),
        }
    }

    /// The name of the plugin that has set or removed any entry of a field; `None` if there is none.
    pub(crate) fn any(&self, field: Field) -> Option<String> {
        let found = self.0.iter().find(|((owned, _), _)| *owned == field);
        found.map(|(_, owner)| owner.trim_start_matches('-').to_owned())
    }

    /// The owners as an NRI message, for validators.
    pub(crate) fn told(&self) -> api::FieldOwners {
        let mut told = api::FieldOwners::default();
        for ((field, entry), owner) in &self.0 {
            let number = *field as i32;
            if field.is_compound() {
                let owners = &mut told.compound.entry(number).or_default().owners;
                owners.insert(entry.clone(), owner.clone());
            } else {
                told.simple.insert(number, owner.clone());
            }
        }
        told
    }
}
