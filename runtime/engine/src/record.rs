//! The records of pods and containers: what a new daemon needs to find every object of an old one, and what status
//! calls give back. Written only when a state changes, and as durable as the state is worth:
//!
//! | state | where | after a power cut |
//! |---|---|---|
//! | pod being created, its network not begun | a note below `--state` | its directory is garbage |
//! | pod with a network | committed below `--root`, before ADD | NotReady, DEL |
//! | pod ready | committed | NotReady, as every pod |
//! | pod not ready | a note | NotReady |
//! | container created | a note | its directory is garbage |
//! | container running, exited | committed | lost, or exited as it was |
//!
//! A note is newer than what is committed, which takes it away. A daemon that is killed between the two finds the note: for it
//! the change has not been, and nobody was told of it. That lets a commit run ahead, beside what it tells of: "ready" is on disk
//! while the monitor still starts, and the note says "being created" until it has.

use coracle_base::error::{Error, Kind};
use coracle_base::log;
use coracle_base::store::{self, Damage, Loaded};
use coracle_sandbox::cgroup::CgroupPath;
use coracle_sandbox::{ContainerId, PodId};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

use crate::paths::{self, Paths, RECORD};
use crate::spec::{ContainerPid, ContainerSpec, PodSpec, Resources};
use crate::state;

/// A pod sandbox.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PodRecord {
    /// The id, 64 hex digits where it is printed.
    pub id: PodId,
    /// `/proc/sys/kernel/random/boot_id` when it was made: tells a reboot (BOOT-1).
    pub boot: String,
    /// Wall clock, nanoseconds since 1970; strictly rising over all pods.
    pub created_at_ns: i64,
    /// What was asked for.
    pub spec: PodSpec,
    /// The cgroup parent in force: the request's, or the configured default.
    pub cgroup_parent: String,
    /// The parent was not there before: it goes with its last pod.
    pub(crate) owns_cgroup_parent: bool,
    /// Where it is in its life.
    pub state: state::Pod,
    /// The CNI configuration and attachment, recorded before ADD; `None`: the node's network, or nothing to undo.
    pub network: Option<Network>,
    /// Addresses of the pod, also when its network is gone.
    pub addresses: Vec<String>,
    /// What plugins have been told.
    pub told: Told,
    /// The SELinux level of its containers and their files; empty: they have no labels.
    pub(crate) selinux_level: String,
    /// Its cgroups are scopes of systemd's.
    pub has_scopes: bool,
}

/// Which events of an object plugins have been told of: each once in its life, restarts of the daemon included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Told {
    /// That it has ended.
    pub stop: bool,
    /// That it is removed.
    pub remove: bool,
}

/// What DEL will need, and what ADD gave.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Network {
    /// As JSON inside the record, so that fields can come to it one by one.
    #[serde(with = "as_json")]
    pub request: coracle_network::Recorded,
    /// Addresses of the pod, primary first.
    pub addresses: Vec<String>,
    /// The final result as JSON, once ADD has succeeded.
    pub result: Option<String>,
}

mod as_json {
    use serde::de::{DeserializeOwned, Error as _};
    use serde::ser::Error as _;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(crate) fn serialize<T: Serialize, S: Serializer>(
        value: &T,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serde_json::to_string(value).map_err(S::Error::custom)?.serialize(serializer)
    }

    pub(crate) fn deserialize<'de, T: DeserializeOwned, D: Deserializer<'de>>(
        from: D,
    ) -> Result<T, D::Error> {
        serde_json::from_str(&String::deserialize(from)?).map_err(D::Error::custom)
    }
}

/// A container.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ContainerRecord {
    /// The id, 64 hex digits where it is printed.
    pub id: ContainerId,
    /// The pod sandbox that it is in.
    pub pod: PodId,
    /// Wall clock, nanoseconds since 1970; strictly rising over all pods and containers.
    pub created_at_ns: i64,
    /// What was asked for.
    pub spec: ContainerSpec,
    /// The image that it was made from.
    pub image: ContainerImage,
    /// Its main process.
    pub process: Process,
    /// Absolute; empty: output is dropped.
    pub log_path: String,
    /// Kernel's number of the signal that StopContainer sends.
    pub stop_signal: i32,
    /// Where it is in its life.
    pub state: state::Container,
    /// Its image volumes, in the order of their mounts.
    pub image_volumes: Vec<ImageVolumeUse>,
    /// Limits in force; `None`: those of the request.
    pub limits: Option<Limits>,
    /// What plugins made of it.
    pub adjusted: Adjusted,
    /// What plugins have been told.
    pub told: Told,
}

/// What a container's cgroup limits: the request, the updates since, and what only plugins ask for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// What the CRI can ask for.
    pub resources: Resources,
    /// 0: as it is; negative: none.
    pub pids_max: i64,
    /// `memory.low`, or the soft limit of cgroup v1.
    pub memory_reservation_bytes: Option<i64>,
    /// Kernel memory, cgroup v1 alone.
    pub kernel_memory_bytes: Option<i64>,
    /// Buffers of TCP, cgroup v1 alone.
    pub kernel_tcp_bytes: Option<i64>,
    /// From 0 to 100, cgroup v1 alone.
    pub swappiness: Option<u64>,
    /// Whether the kernel stops it instead of killing when memory is short, cgroup v1 alone.
    pub disable_oom_killer: Option<bool>,
    /// Microseconds of real-time scheduling in each period, cgroup v1 alone.
    pub realtime_runtime_us: Option<i64>,
    /// The period of `realtime_runtime_us` in microseconds.
    pub realtime_period_us: Option<u64>,
}

/// What plugins changed at creation, as far as it is needed afterwards.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Adjusted {
    /// NRI's ContainerAdjustment without its limits, encoded: what events show of the container.
    pub adjustment: Vec<u8>,
    /// RLIMIT_…, soft, hard: every process has them, execs too.
    pub rlimits: Vec<(u32, u64, u64)>,
    /// Where its cgroup is; empty: below the pod's parent.
    pub cgroup: String,
    /// Its pid namespace, where that is another.
    pub pid: Option<ContainerPid>,
    /// Programs to run; those of devices are among them.
    pub hooks: coracle_job::Hooks,
}

/// The image that a volume was made from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageVolumeUse {
    /// `sha256:…`, equal to Image.id.
    pub id: String,
    /// Directories of its layers, lowest first: kept while the container lives.
    pub layers: Vec<String>,
}

impl ContainerRecord {
    /// The limits in force.
    pub fn limits(&self) -> Limits {
        let of_request = || Limits { resources: self.spec.resources.clone(), ..Limits::default() };
        self.limits.clone().unwrap_or_else(of_request)
    }

    /// Which pid namespace it lives in.
    pub fn pid(&self) -> ContainerPid {
        self.adjusted.pid.unwrap_or(self.spec.pid)
    }

    /// Directories of all layers that it needs, those of volumes included.
    pub(crate) fn layer_names(&self) -> impl Iterator<Item = &str> {
        let of_volumes = self.image_volumes.iter().flat_map(|volume| &volume.layers);
        self.image.layers.iter().map(|layer| layer.name.as_str()).chain(of_volumes.map(String::as_str))
    }
}

/// The image a container was made from, by every name status shows.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ContainerImage {
    /// `sha256:…`, equal to Image.id.
    pub id: String,
    /// A tag users know, or what was asked.
    pub name: String,
    /// A repo digest if one is known, else the id.
    pub reference: String,
    /// Its layers, lowest first: kept while the container lives.
    pub layers: Vec<coracle_job::Layer>,
}

/// The main process as resolved at create, which every exec repeats (CRI 2.20).
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Process {
    /// The program and its arguments.
    pub arguments: Vec<String>,
    /// `NAME=value`, in order, last duplicate first removed.
    pub environment: Vec<Vec<u8>>,
    /// Absolute, inside the container.
    pub working_directory: String,
    /// User id inside the container.
    pub uid: u32,
    /// Primary group id inside the container.
    pub gid: u32,
    /// Ascending, with the primary group.
    pub groups: Vec<u32>,
    /// What it is allowed.
    pub capabilities: Capabilities,
    /// Whether exec can give it no rights (prctl(2), PR_SET_NO_NEW_PRIVS).
    pub no_new_privileges: bool,
    /// Always set: a process inherits the monitor's otherwise, which is the pod's infrastructure.
    pub oom_score_adj: i32,
}

/// Capability sets as bit masks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capabilities {
    /// What it can ever have.
    pub bounding: u64,
    pub(crate) effective: u64,
    pub(crate) permitted: u64,
    pub(crate) ambient: u64,
}

/// Version of both bodies, which are postcard without names: any change of a field is another version. This build reads its own
/// alone, since nothing has been released yet; from the first release on a new version comes with the way from the one before.
const VERSION: u8 = 2;

impl PodRecord {
    /// The cgroup of its monitor or one of its containers, from the top of every hierarchy.
    ///
    /// # Errors
    /// `InvalidArgument` for a parent that is no path of a cgroup.
    pub fn cgroup(&self, id: &impl std::fmt::Display) -> Result<CgroupPath, Error> {
        paths::cgroup(&self.cgroup_parent, self.has_scopes, id)
    }

    /// The same as the OCI runtime specification's `cgroupsPath`: what runc takes and plugins know.
    pub fn oci_cgroup(&self, id: &impl std::fmt::Display) -> String {
        match self.has_scopes {
            true => format!("{}:coracle:{id}", self.cgroup_parent.rsplit('/').next().unwrap_or_default()),
            false => format!("{}/{id}", self.cgroup_parent.trim_end_matches('/')),
        }
    }

    /// Reads it back; a record that names another pod is damage, too.
    pub(crate) fn load(paths: &Paths, id: PodId) -> Result<Self, Damage> {
        let record: Self = Place::of_pod(paths, id).load()?;
        if record.id == id {
            Ok(record)
        } else {
            Err(Damage::Damaged(format!("it is the record of {}", record.id)))
        }
    }
}

impl ContainerRecord {
    /// Reads it back; a record that names another container is damage, too.
    pub(crate) fn load(paths: &Paths, pod: PodId, id: ContainerId) -> Result<Self, Damage> {
        let record: Self = Place::of_container(paths, pod, id).load()?;
        match record.id == id && record.pod == pod {
            true => Ok(record),
            false => Err(Damage::Damaged(format!("it is the record of {} in {}", record.id, record.pod))),
        }
    }
}

/// A record that is kept for the next daemon.
pub trait Kept {
    /// Where.
    fn place(&self, paths: &Paths) -> Place;

    /// As it is kept.
    fn body(&self) -> Result<Vec<u8>, Error>;

    /// Makes the record durable.
    fn commit(&self, paths: &Paths) -> Result<(), Error> {
        let place = self.place(paths);
        place.commit(&self.body()?)?;
        place.forget_note()
    }

    /// Makes a record durable that is not true yet: the note that there is stays in force until [`Kept::reach`].
    fn commit_ahead(&self, paths: &Paths) -> Result<(), Error> {
        self.place(paths).commit(&self.body()?)
    }

    /// What was committed ahead is true now.
    fn reach(&self, paths: &Paths) -> Result<(), Error> {
        self.place(paths).forget_note()
    }

    /// Keeps the record until the next boot.
    fn note(&self, paths: &Paths) -> Result<(), Error> {
        self.place(paths).note(&self.body()?)
    }
}

impl Kept for PodRecord {
    fn place(&self, paths: &Paths) -> Place {
        Place::of_pod(paths, self.id)
    }

    fn body(&self) -> Result<Vec<u8>, Error> {
        encode(self)
    }
}

impl Kept for ContainerRecord {
    fn place(&self, paths: &Paths) -> Place {
        Place::of_container(paths, self.pod, self.id)
    }

    fn body(&self) -> Result<Vec<u8>, Error> {
        encode(self)
    }
}

/// Where a record is, durable and noted.
pub struct Place {
    title: String,
    kind: store::Kind,
    durable: PathBuf,
    noted: PathBuf,
    noted_name: String,
}

impl Place {
    fn of_pod(paths: &Paths, id: PodId) -> Self {
        Self {
            title: format!("record of pod sandbox {id:.13}"),
            kind: store::Kind::Pod,
            durable: paths.pod(id),
            noted: paths.pod_state(id),
            noted_name: RECORD.into(),
        }
    }

    fn of_container(paths: &Paths, pod: PodId, id: ContainerId) -> Self {
        Self {
            title: format!("record of container {id:.13}"),
            kind: store::Kind::Container,
            durable: paths.container(pod, id),
            noted: paths.records(pod),
            noted_name: id.to_string(),
        }
    }

    fn commit(&self, body: &[u8]) -> Result<(), Error> {
        store::commit(&self.durable, RECORD, self.kind, VERSION, body)
            .map_err(|error| error.context(&self.title))
    }

    fn forget_note(&self) -> Result<(), Error> {
        store::forget_note(&self.noted, &self.noted_name).map_err(|error| error.context(&self.title))
    }

    fn note(&self, body: &[u8]) -> Result<(), Error> {
        store::note(&self.noted, &self.noted_name, self.kind, VERSION, body)
            .map_err(|error| error.context(&self.title))
    }

    /// A damaged note costs what it told, not what was committed before.
    fn load<T: serde::de::DeserializeOwned>(&self) -> Result<T, Damage> {
        let read = |directory: &Path, name: &str| {
            store::load(directory, name, self.kind).and_then(|loaded| decode(&loaded))
        };
        let noted = read(&self.noted, &self.noted_name);
        let damage = match noted {
            // It is newer than what is durable: without it nobody knows what is so.
            Ok(_) | Err(Damage::Io(_)) => return noted,
            Err(damage) => damage,
        };
        match (read(&self.durable, RECORD), damage) {
            (Err(Damage::Absent), damage) => Err(damage),
            (durable, Damage::Absent) => durable,
            (durable, damage) => {
                log::warn!("a note is left out"; what = self.title, reason = damage);
                durable
            }
        }
    }
}

fn encode<T: Serialize>(record: &T) -> Result<Vec<u8>, Error> {
    postcard::to_allocvec(record)
        .map_err(|error| Error::new(Kind::Internal, format!("encode a record: {error}")))
}

fn decode<T: serde::de::DeserializeOwned>(loaded: &Loaded) -> Result<T, Damage> {
    if loaded.version != VERSION {
        let text = format!("its version is {}, and this build reads version {VERSION}", loaded.version);
        return Err(Damage::Damaged(text));
    }
    match postcard::take_from_bytes(&loaded.body) {
        Ok((record, [])) => Ok(record),
        Ok((_, rest)) => Err(Damage::Damaged(format!("{} bytes follow its body", rest.len()))),
        Err(error) => Err(Damage::Damaged(format!("its body cannot be read: {error}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{IdMapping, PodName, PodNamespaces, PodPid, Sharing, UserNamespace};

    fn record() -> PodRecord {
        let name = PodName { name: "web".into(), namespace: "ns".into(), uid: "u".into(), attempt: 2 };
        let namespaces = PodNamespaces { network: Sharing::Node, ipc: Sharing::Pod, pid: PodPid::Container };
        PodRecord {
            id: PodId::from_bytes([7; 32]),
            boot: "b".into(),
            created_at_ns: 1,
            spec: PodSpec {
                name,
                hostname: String::new(),
                log_directory: "/l".into(),
                dns: None,
                ports: Vec::new(),
                labels: vec![("k".into(), "v".into())],
                annotations: Vec::new(),
                runtime_handler: String::new(),
                cgroup_parent: String::new(),
                namespaces,
                privileged: false,
                sysctls: Vec::new(),
                user_namespace: None,
                overhead: None,
                resources: None,
                selinux: None,
            },
            cgroup_parent: "/c".into(),
            owns_cgroup_parent: true,
            state: state::Pod::NotReady { why: state::Down::Rebooted },
            network: None,
            addresses: Vec::new(),
            told: Told::default(),
            selinux_level: String::new(),
            has_scopes: false,
        }
    }

    fn loaded(body: Vec<u8>) -> Loaded {
        Loaded { version: VERSION, body }
    }

    /// The layout of version 2, byte by byte: a change of these bytes is another version.
    #[test]
    fn a_pod_record_of_version_2_is_these_bytes() {
        let id = "07".repeat(32);
        let spec = "03776562 026e73 0175 02 00 022f6c 00 00 01016b0176 00 00 00 010001 00 00 00 00 00 00";
        let expected = format!("{id} 0162 02 {spec} 022f63 01 0202 00 00 0000 00 00").replace(' ', "");
        let bytes = encode(&record()).unwrap();
        assert_eq!(bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>(), expected);
    }

    #[test]
    fn every_field_comes_back() {
        let range = IdMapping { container_id: 0, host_id: 65_536, length: 65_536 };
        let mut record = record();
        record.spec.user_namespace = Some(UserNamespace { uids: vec![range], gids: vec![range] });
        record.spec.resources = Some(Resources { cpu_shares: 7, ..Resources::default() });
        record.addresses = vec!["10.0.0.7".into()];
        record.told = Told { stop: true, remove: false };
        record.selinux_level = "s0:c1,c2".into();
        record.has_scopes = true;
        let back: PodRecord = decode(&loaded(encode(&record).unwrap())).unwrap();
        assert_eq!((&back.spec, &back.addresses), (&record.spec, &record.addresses));
        assert_eq!((back.told.stop, back.told.remove, back.has_scopes), (true, false, true));
        assert_eq!(back.selinux_level, record.selinux_level);
    }

    /// Records of builds before the first release, and of later ones: set aside with a reason, and never read as something else.
    #[test]
    fn records_of_other_versions_are_refused_by_their_number() {
        for version in [1, VERSION + 1] {
            let other = Loaded { version, body: encode(&record()).unwrap() };
            let Err(Damage::Damaged(why)) = decode::<PodRecord>(&other) else { panic!("{version} is read") };
            assert_eq!(why, format!("its version is {version}, and this build reads version 2"));
        }
        let longer = [encode(&record()).unwrap(), vec![0]].concat();
        assert!(decode::<PodRecord>(&loaded(longer)).is_err());
    }

    #[test]
    fn a_note_is_newer_until_the_next_commit_and_costs_no_more_than_itself() {
        let dir = coracle_base::testdir::TestDir::new("record");
        let paths = Paths { root: dir.path().join("root"), state: dir.path().join("state") };
        let mut record = record();
        std::fs::create_dir_all(paths.pod(record.id)).unwrap();
        let state =
            |paths: &Paths| PodRecord::load(paths, PodId::from_bytes([7; 32])).map(|record| record.state);
        record.state = state::Pod::Creating;
        record.note(&paths).unwrap();
        assert_eq!(state(&paths).unwrap(), state::Pod::Creating);
        let note = paths.pod_state(record.id).join(RECORD);
        std::fs::write(&note, b"CORR").unwrap();
        assert!(matches!(state(&paths), Err(Damage::Damaged(_))));
        record.state = state::Pod::Ready;
        record.commit(&paths).unwrap();
        assert!(!note.exists());
        record.state = state::Pod::NotReady { why: state::Down::Stopped };
        record.note(&paths).unwrap();
        assert_eq!(state(&paths).unwrap(), record.state);
        for damaged in [&b"CORR"[..], b""] {
            std::fs::write(&note, damaged).unwrap();
            assert_eq!(state(&paths).unwrap(), state::Pod::Ready);
        }
        // As the next boot finds it.
        std::fs::remove_dir_all(&paths.state).unwrap();
        assert_eq!(state(&paths).unwrap(), state::Pod::Ready);
    }

    /// Whatever a disk gives back for a body, decoding it ends, and never panics.
    #[test]
    fn damaged_bodies_are_refused() {
        let bytes = encode(&record()).unwrap();
        for cut in 0..bytes.len() {
            assert!(decode::<PodRecord>(&loaded(bytes[..cut].to_vec())).is_err(), "cut at {cut}");
        }
        for bit in 0..bytes.len() * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            let _ = decode::<PodRecord>(&loaded(damaged)); // the checksum before it tells; here it only must not panic
        }
    }
}
