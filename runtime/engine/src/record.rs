//! The records of pods and containers: everything that a new daemon needs to find all objects of an earlier
//! one, and to answer status calls. They are written only when a state changes, with the durability that the
//! state requires:
//!
//! | state | stored as | after a power cut |
//! |---|---|---|
//! | pod being created, before its network | a note below `--state` | its directory is removed |
//! | pod with a network | committed below `--root`, before ADD | NotReady, DEL |
//! | pod ready | committed | NotReady, like every pod |
//! | pod not ready | a note | NotReady |
//! | container being created, created | a note | its directory is garbage |
//! | container running, exited | committed | lost, or exited as it was |
//!
//! Committed records are in files with two slots (`coracle_base::store::Slots`), so that a commit costs one flush of the disk.
//!
//! A note is newer than the committed record; a commit removes it. If a daemon is killed between the two, the
//! next one reads the note: the change did not happen, and no client was notified of it. This allows a commit
//! in advance, concurrent with the change itself: "ready" is on disk while the monitor still starts, and the
//! note says "being created" until it has started.

use coracle_base::error::{Error, Kind};
use coracle_base::log;
use coracle_base::store::{self, Damage, Loaded, Slots};
use coracle_sandbox::cgroup::{CgroupPath, Limits};
use coracle_sandbox::plan::{Confinement, Limit, Process, ProcessPlan};
use coracle_sandbox::{ContainerId, PodId, disk};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

use crate::node::Node;
use crate::paths::{self, Paths, RECORD};
use crate::spec::{ContainerPid, ContainerSpec, PodSpec};
use crate::state;

/// Number of the resource RLIMIT_NOFILE in getrlimit(2); equal on all supported architectures.
const RLIMIT_NOFILE: u32 = 7;

/// Soft limit of open files of containers. It is low so that programs that loop over all descriptors are fast
/// (CRI 3.13).
pub const OPEN_FILES_SOFT: u64 = 1024;
/// Hard limit of open files of containers; common in container runtimes.
pub const OPEN_FILES_HARD: u64 = 524_288;

/// The record of a pod sandbox.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PodRecord {
    /// ID, printed as 64 hexadecimal digits.
    pub id: PodId,
    /// Boot ID (`/proc/sys/kernel/random/boot_id`) at the creation, by which a reboot is detected (BOOT-1).
    pub boot: String,
    /// Wall clock in nanoseconds since 1970; strictly increasing over all pods.
    pub created_at_ns: i64,
    /// The request for the pod sandbox.
    pub spec: PodSpec,
    /// The effective cgroup parent: that of the request, or the configured default.
    pub cgroup_parent: String,
    /// Whether coracle created the cgroup parent, which is then removed with its last pod.
    pub(crate) owns_cgroup_parent: bool,
    /// State of the pod's lifecycle.
    pub state: state::Pod,
    /// CNI configuration and attachment, recorded before ADD; `None` if the pod uses the node's network, or
    /// if nothing must be undone.
    pub network: Option<Network>,
    /// Addresses of the pod; kept after its network was removed.
    pub addresses: Vec<String>,
    /// Events of the pod of which NRI plugins were notified.
    pub notified: Notified,
    /// SELinux level of the pod's containers and their files; empty: no labels.
    pub(crate) selinux_level: String,
    /// Whether the cgroups of the pod are scopes of systemd.
    pub has_scopes: bool,
}

/// Events of an object of which NRI plugins were notified: each event is sent once, also across restarts of
/// the daemon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notified {
    /// Whether plugins were notified that the object has ended.
    pub stop: bool,
    /// Whether plugins were notified that the object was removed.
    pub remove: bool,
}

/// The parameters for CNI DEL, and the result of CNI ADD.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Network {
    /// Parameters of ADD and DEL; stored as JSON inside of the record, so that fields can be added.
    #[serde(with = "as_json")]
    pub request: coracle_network::Recorded,
    /// Addresses of the pod, primary one first.
    pub addresses: Vec<String>,
    /// The final result of ADD as JSON; `None` until ADD has succeeded.
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

/// The record of a container.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ContainerRecord {
    /// ID, printed as 64 hexadecimal digits.
    pub id: ContainerId,
    /// ID of the container's pod sandbox.
    pub pod: PodId,
    /// Wall clock in nanoseconds since 1970; strictly increasing over all pods and containers.
    pub created_at_ns: i64,
    /// The request for the container.
    pub spec: ContainerSpec,
    /// The image of the container.
    pub image: ContainerImage,
    /// The resolved main process; all execs use the same user and environment (CRI 2.20).
    pub process: Process,
    /// Absolute path of the log file; empty: output is dropped.
    pub log_path: String,
    /// Stop signal as the kernel's number.
    pub stop_signal: i32,
    /// State of the container's lifecycle.
    pub state: state::Container,
    /// Image volumes of the container, in the order of their mounts.
    pub image_volumes: Vec<ImageVolumeUse>,
    /// Effective limits; `None`: the limits of the request.
    pub limits: Option<Limits>,
    /// Changes that NRI plugins made at the creation.
    pub adjusted: Adjusted,
    /// Events of the container of which NRI plugins were notified.
    pub notified: Notified,
}

/// Changes that NRI plugins made at the creation, as far as they are needed later.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Adjusted {
    /// Encoded NRI ContainerAdjustment without its limits, for later events; empty: no changes.
    pub adjustment: Vec<u8>,
    /// Resource limits for all processes including execs, which replace the default ones.
    pub rlimits: Vec<Limit>,
    /// Cgroup path that a plugin has set; empty: a cgroup below the pod's parent.
    pub cgroup: String,
    /// PID namespace that a plugin has set; `None`: the requested one.
    pub pid: Option<ContainerPid>,
    /// OCI hooks, including those of devices.
    pub hooks: coracle_job::Hooks,
}

/// The image of an image volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageVolumeUse {
    /// Image ID, `sha256:…`.
    pub id: String,
    /// Directories of the image's layers, lowest first: the store keeps them while the container exists.
    pub layers: Vec<String>,
}

impl ContainerRecord {
    /// The effective limits of the container.
    pub fn limits(&self) -> Limits {
        let of_request = || Limits::from(self.spec.resources.clone());
        self.limits.clone().unwrap_or_else(of_request)
    }

    /// The plan of a process of the container: of its main process, or of an exec.
    pub(crate) fn plan(&self, process: Process, confinement: Confinement, tty: bool) -> ProcessPlan {
        let open_files = Limit { resource: RLIMIT_NOFILE, soft: OPEN_FILES_SOFT, hard: OPEN_FILES_HARD };
        let mut limits = vec![open_files];
        for limit in &self.adjusted.rlimits {
            limits.retain(|known| known.resource != limit.resource);
            limits.push(*limit);
        }
        ProcessPlan { process, limits, tty, confinement }
    }

    /// The effective PID namespace.
    pub fn pid(&self) -> ContainerPid {
        self.adjusted.pid.unwrap_or(self.spec.pid)
    }

    /// Directories of all layers that the container uses, including those of image volumes.
    pub(crate) fn layer_names(&self) -> impl Iterator<Item = &str> {
        let of_volumes = self.image_volumes.iter().flat_map(|volume| &volume.layers);
        self.image.layers.iter().map(|layer| layer.name.as_str()).chain(of_volumes.map(String::as_str))
    }
}

/// The image of a container, with the names that its status reports.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ContainerImage {
    /// Image ID, `sha256:…`.
    pub id: String,
    /// A tag of the image, or the image name in the request.
    pub name: String,
    /// A repo digest if one is known, otherwise the ID.
    pub reference: String,
    /// Layers of the image, lowest first: the store keeps them while the container exists.
    pub layers: Vec<coracle_job::Layer>,
}

/// Version of the bodies of both records. Bodies are postcard without field names, therefore every change of
/// a field requires another version. This build reads only its own version, because there is no release yet;
/// after the first release, each version must be able to read the previous one.
const VERSION: u8 = 2;

impl PodRecord {
    /// The cgroup of the pod's monitor or of one of its containers, by ID, relative to the root of every
    /// hierarchy.
    ///
    /// # Errors
    /// `InvalidArgument` for a parent that is not a cgroup path.
    pub fn cgroup(&self, id: &impl std::fmt::Display) -> Result<CgroupPath, Error> {
        paths::cgroup(&self.cgroup_parent, self.has_scopes, id)
    }

    /// The `cgroupsPath` of the OCI runtime specification, in the format of runc, which NRI plugins know.
    pub fn oci_cgroup(&self, id: &impl std::fmt::Display) -> String {
        match self.has_scopes {
            true => format!("{}:coracle:{id}", self.cgroup_parent.rsplit('/').next().unwrap_or_default()),
            false => format!("{}/{id}", self.cgroup_parent.trim_end_matches('/')),
        }
    }

    /// Loads the record of a pod; a record with another ID counts as damaged.
    pub(crate) fn load(paths: &Paths, id: PodId) -> Result<Self, Damage> {
        let record: Self = RecordPaths::of_pod(paths, id).load()?;
        if record.id == id {
            Ok(record)
        } else {
            Err(Damage::Damaged(format!("it is the record of {}", record.id)))
        }
    }
}

impl ContainerRecord {
    /// Loads the record of a container; a record with another ID counts as damaged.
    pub(crate) fn load(paths: &Paths, pod: PodId, id: ContainerId) -> Result<Self, Damage> {
        let record: Self = RecordPaths::of_container(paths, pod, id).load()?;
        match record.id == id && record.pod == pod {
            true => Ok(record),
            false => Err(Damage::Damaged(format!("it is the record of {} in {}", record.id, record.pod))),
        }
    }

    /// Start time in a record with state Running that was committed in advance, while the effective state is
    /// Created; `None` if there is no such record, or it cannot be read.
    pub(crate) fn started_ahead(&self, paths: &Paths) -> Option<i64> {
        if !self.state.is_created() {
            return None;
        }
        let committed: Self = RecordPaths::of_container(paths, self.pod, self.id).load_committed().ok()?;
        match committed.state {
            state::Container::Running { started_at_ns, .. } => Some(started_at_ns),
            _ => None,
        }
    }
}

/// A record that the next daemon must be able to read.
pub trait DurableRecord {
    /// Paths of the record.
    fn record_paths(&self, paths: &Paths) -> RecordPaths;

    /// The body of the record in its encoding.
    fn body(&self) -> Result<Vec<u8>, Error>;

    /// Makes the record durable and removes its note.
    fn commit(&self, node: &Node) -> Result<(), Error> {
        self.commit_in_advance(node)?;
        self.make_effective(&node.paths)
    }

    /// Makes a record durable in advance: the existing note has precedence until [`DurableRecord::make_effective`].
    fn commit_in_advance(&self, node: &Node) -> Result<(), Error> {
        self.record_paths(&node.paths).commit(&node.host.records, &self.body()?)
    }

    /// Makes a record that was committed in advance effective: removes the note.
    fn make_effective(&self, paths: &Paths) -> Result<(), Error> {
        self.record_paths(paths).forget_note()
    }

    /// Stores the record as a note until the next boot.
    fn note(&self, paths: &Paths) -> Result<(), Error> {
        self.record_paths(paths).note(&self.body()?)
    }
}

impl DurableRecord for PodRecord {
    fn record_paths(&self, paths: &Paths) -> RecordPaths {
        RecordPaths::of_pod(paths, self.id)
    }

    fn body(&self) -> Result<Vec<u8>, Error> {
        encode(self)
    }
}

impl DurableRecord for ContainerRecord {
    fn record_paths(&self, paths: &Paths) -> RecordPaths {
        RecordPaths::of_container(paths, self.pod, self.id)
    }

    fn body(&self) -> Result<Vec<u8>, Error> {
        encode(self)
    }
}

/// Paths of a record: the committed file and the note.
pub struct RecordPaths {
    title: String,
    kind: store::Kind,
    durable: PathBuf,
    noted: PathBuf,
    noted_name: String,
}

impl RecordPaths {
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

    fn commit(&self, records: &Slots, body: &[u8]) -> Result<(), Error> {
        records
            .commit(&self.durable, RECORD, self.kind, VERSION, body)
            .map_err(|error| error.context(&self.title))
    }

    fn forget_note(&self) -> Result<(), Error> {
        store::forget_note(&self.noted, &self.noted_name).map_err(|error| error.context(&self.title))
    }

    fn note(&self, body: &[u8]) -> Result<(), Error> {
        store::note(&self.noted, &self.noted_name, self.kind, VERSION, body)
            .map_err(|error| error.context(&self.title))
    }

    fn read<T: serde::de::DeserializeOwned>(&self, directory: &Path, name: &str) -> Result<T, Damage> {
        store::load(directory, name, self.kind).and_then(|loaded| decode(&loaded, VERSION))
    }

    /// Reads the committed record, also if a note has precedence.
    fn load_committed<T: serde::de::DeserializeOwned>(&self) -> Result<T, Damage> {
        self.read(&self.durable, RECORD)
    }

    /// Loads the note, otherwise the committed record. A damaged note is ignored, and the committed record is
    /// used.
    fn load<T: serde::de::DeserializeOwned>(&self) -> Result<T, Damage> {
        let noted = self.read(&self.noted, &self.noted_name);
        let damage = match noted {
            // It is newer than the committed record: without it the state is unknown.
            Ok(_) | Err(Damage::Io(_)) => return noted,
            Err(damage) => damage,
        };
        match (self.load_committed(), damage) {
            (Err(Damage::Absent), damage) => Err(damage),
            (durable, Damage::Absent) => durable,
            (durable, damage) => {
                log::warn!("damaged note ignored"; what = self.title, reason = damage);
                durable
            }
        }
    }
}

/// Puts records in their places that a power cut has left in spare files ([`Slots::adopt`]).
///
/// # Errors
/// The spare files cannot be listed.
pub(crate) fn adopt(node: &Node) -> Result<(), Error> {
    let paths = &node.paths;
    node.host.records.adopt(store::Kind::Pod, |loaded| {
        let record: PodRecord = decode(loaded, VERSION)?;
        Ok(Some(paths.pod(record.id).join(RECORD)))
    })?;
    // After the pods: a container whose pod was removed is garbage.
    node.host.records.adopt(store::Kind::Container, |loaded| {
        let record: ContainerRecord = decode(loaded, VERSION)?;
        let is_there = disk::exists(&paths.pod(record.pod)).map_err(Damage::Io)?;
        Ok(is_there.then(|| paths.container(record.pod, record.id).join(RECORD)))
    })
}

pub(crate) fn encode<T: Serialize>(record: &T) -> Result<Vec<u8>, Error> {
    postcard::to_allocvec(record).map_err(not_encoded)
}

pub(crate) fn decode<T: serde::de::DeserializeOwned>(loaded: &Loaded, version: u8) -> Result<T, Damage> {
    require_version(loaded, version)?;
    match postcard::take_from_bytes(&loaded.body) {
        Ok((record, [])) => Ok(record),
        Ok((_, rest)) => Err(not_decoded(Ok(rest.len()))),
        Err(error) => Err(not_decoded(Err(error))),
    }
}

// Of the functions above there is one for each kind of record; of these there is one for all.

#[cold]
fn not_encoded(error: postcard::Error) -> Error {
    Error::new(Kind::Internal, format!("encode a record: {error}"))
}

fn require_version(loaded: &Loaded, version: u8) -> Result<(), Damage> {
    if loaded.version == version {
        return Ok(());
    }
    let text = format!("its version is {}, and this build reads version {version}", loaded.version);
    Err(Damage::Damaged(text))
}

/// The damage of a body with this number of bytes too many, or with an error.
#[cold]
fn not_decoded(rest: Result<usize, postcard::Error>) -> Damage {
    Damage::Damaged(match rest {
        Ok(length) => format!("{length} bytes follow its body"),
        Err(error) => format!("its body cannot be read: {error}"),
    })
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
            state: state::Pod::NotReady { why: state::Down::Rebooted, is_down: true },
            network: None,
            addresses: Vec::new(),
            notified: Notified::default(),
            selinux_level: String::new(),
            has_scopes: false,
        }
    }

    fn loaded(body: Vec<u8>) -> Loaded {
        Loaded { version: VERSION, body }
    }

    /// The format of version 2, byte by byte: a change requires another version.
    #[test]
    fn the_format_of_pod_records_of_version_2_is_unchanged() {
        let id = "07".repeat(32);
        let spec = "03776562 026e73 0175 02 00 022f6c 00 00 01016b0176 00 00 00 010001 00 00 00 00 00 00";
        let expected = format!("{id} 0162 02 {spec} 022f63 01 0202 00 00 0000 00 00").replace(' ', "");
        let bytes = encode(&record()).unwrap();
        assert_eq!(bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>(), expected);
    }

    /// The types are those of the sandbox crate, so a change there could change the records.
    #[test]
    fn the_format_of_process_and_limits_in_records_of_version_2_is_unchanged() {
        let identity = coracle_sandbox::identity::Identity { uid: 7, gid: 300, groups: vec![300, 9] };
        let capabilities = coracle_sandbox::capability::Capabilities {
            bounding: 1 << 40,
            effective: 2,
            permitted: 3,
            ambient: 4,
        };
        let process = Process {
            arguments: vec!["a".into()],
            environment: vec![b"B=\xff".to_vec()],
            working_directory: "/w".into(),
            identity,
            capabilities,
            attributes: coracle_sandbox::plan::Attributes { no_new_privileges: true },
            oom_score_adj: -998,
        };
        let (user, sets) = ((7u32, 300u32, [300u32, 9].to_vec()), (1u64 << 40, 2u64, 3u64, 4u64));
        let fields = (["a"].to_vec(), [b"B=\xff".to_vec()].to_vec(), "/w", user, sets, true, -998i32);
        assert_eq!(encode(&process).unwrap(), encode(&fields).unwrap());
        let limit = Limit { resource: 7, soft: 1 << 33, hard: u64::MAX };
        assert_eq!(encode(&limit).unwrap(), encode(&(7u32, 1u64 << 33, u64::MAX)).unwrap());
        let resources = coracle_sandbox::cgroup::Resources {
            cpu_period_us: 1,
            cpu_quota_us: -2,
            cpu_shares: 3,
            memory_limit_bytes: 1 << 40,
            oom_score_adj: -5,
            cpuset_cpus: "0-1".into(),
            cpuset_mems: "0".into(),
            hugepage_limits: vec![("2MB".into(), 6)],
            unified: vec![("memory.high".into(), "max".into())],
            memory_swap_limit_bytes: -1,
        };
        let limits = Limits {
            resources,
            pids_max: -1,
            memory_reservation_bytes: Some(7),
            kernel_memory_bytes: None,
            kernel_tcp_bytes: Some(8),
            swappiness: Some(9),
            disable_oom_killer: Some(true),
            realtime_runtime_us: None,
            realtime_period_us: Some(10),
        };
        let resources = (
            (1i64, -2i64, 3i64, 1i64 << 40, -5i64),
            ("0-1", "0", vec![("2MB", 6u64)], vec![("memory.high", "max")], -1i64),
        );
        let rest = (Some(7i64), None::<i64>, Some(8i64), Some(9u64), Some(true), None::<i64>, Some(10u64));
        assert_eq!(encode(&limits).unwrap(), encode(&(resources, -1i64, rest)).unwrap());
    }

    #[test]
    fn records_are_decoded_with_every_field() {
        let range = IdMapping { container_id: 0, host_id: 65_536, length: 65_536 };
        let mut record = record();
        record.spec.user_namespace = Some(UserNamespace { uids: vec![range], gids: vec![range] });
        record.spec.resources =
            Some(coracle_sandbox::cgroup::Resources { cpu_shares: 7, ..Default::default() });
        record.addresses = vec!["10.0.0.7".into()];
        record.notified = Notified { stop: true, remove: false };
        record.selinux_level = "s0:c1,c2".into();
        record.has_scopes = true;
        let back: PodRecord = decode(&loaded(encode(&record).unwrap()), VERSION).unwrap();
        assert_eq!((&back.spec, &back.addresses), (&record.spec, &record.addresses));
        assert_eq!((back.notified.stop, back.notified.remove, back.has_scopes), (true, false, true));
        assert_eq!(back.selinux_level, record.selinux_level);
    }

    /// Records of builds before the first release, and of later versions, are quarantined and never misread.
    #[test]
    fn records_of_other_versions_are_refused_by_their_number() {
        for version in [1, VERSION + 1] {
            let other = Loaded { version, body: encode(&record()).unwrap() };
            let Err(Damage::Damaged(why)) = decode::<PodRecord>(&other, VERSION) else {
                panic!("{version} is read")
            };
            assert_eq!(why, format!("its version is {version}, and this build reads version 2"));
        }
        let longer = [encode(&record()).unwrap(), vec![0]].concat();
        assert!(decode::<PodRecord>(&loaded(longer), VERSION).is_err());
    }

    #[test]
    fn a_note_is_newer_until_the_next_commit_and_costs_no_more_than_itself() {
        let dir = coracle_base::testdir::TestDir::new("record");
        let paths = Paths { root: dir.path().join("root"), state: dir.path().join("state") };
        let mut record = record();
        std::fs::create_dir_all(paths.pod(record.id)).unwrap();
        let state =
            |paths: &Paths| PodRecord::load(paths, PodId::from_bytes([7; 32])).map(|record| record.state);
        record.state = state::Pod::NEW;
        record.note(&paths).unwrap();
        assert!(state(&paths).unwrap().is_earlier());
        let note = paths.pod_state(record.id).join(RECORD);
        std::fs::write(&note, b"CORR").unwrap();
        assert!(matches!(state(&paths), Err(Damage::Damaged(_))));
        record.state = state::Pod::Ready { is_told: true };
        let records = Slots::new(&paths.root);
        record.record_paths(&paths).commit(&records, &record.body().unwrap()).unwrap();
        record.make_effective(&paths).unwrap();
        assert!(!note.exists());
        record.state = state::Pod::NotReady { why: state::Down::Stopped, is_down: false };
        record.note(&paths).unwrap();
        assert_eq!(state(&paths).unwrap(), record.state);
        for damaged in [&b"CORR"[..], b""] {
            std::fs::write(&note, damaged).unwrap();
            assert_eq!(state(&paths).unwrap(), state::Pod::Ready { is_told: false });
        }
        // The state after a reboot.
        std::fs::remove_dir_all(&paths.state).unwrap();
        assert_eq!(state(&paths).unwrap(), state::Pod::Ready { is_told: false });
    }

    /// Any input is decoded or refused without a panic.
    #[test]
    fn damaged_bodies_are_refused() {
        let bytes = encode(&record()).unwrap();
        for cut in 0..bytes.len() {
            assert!(decode::<PodRecord>(&loaded(bytes[..cut].to_vec()), VERSION).is_err(), "cut at {cut}");
        }
        for bit in 0..bytes.len() * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            let _ = decode::<PodRecord>(&loaded(damaged), VERSION); // the checksum before it tells; here it only must not panic
        }
    }
}
