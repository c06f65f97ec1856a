//! Tests of the rules of plans as tables from requests to operations. They need neither root nor a kernel.

use std::path::PathBuf;

use coracle_wire::{Op, Propagation, Text, walk};

use super::*;
use crate::capability::Capabilities;
use crate::identity::Identity;
use crate::userns::{IdRange, UserMappings};

/// The version of the frames of this build's monitors.
const VERSION: u16 = coracle_wire::VERSION;

fn ops(record: &[u8]) -> Vec<Op<'_>> {
    walk(record).expect("header").map(|op| op.expect("operation")).collect()
}

fn words(record: &[u8]) -> Vec<String> {
    (0..ops(record).len()).map(|index| describe(record, index as u16)).collect()
}

fn process() -> Process {
    Process {
        arguments: vec!["sleep".into(), "1".into()],
        environment: vec![b"PATH=/bin:/usr/bin".to_vec(), b"A=\xff".to_vec()],
        working_directory: "/work".into(),
        identity: Identity { uid: 1000, gid: 1000, groups: vec![1000, 50_000] },
        capabilities: Capabilities { bounding: 0xff, ..Capabilities::default() },
        attributes: Attributes { no_new_privileges: false },
        oom_score_adj: -997,
    }
}

fn process_plan() -> ProcessPlan {
    let seccomp = Some(Seccomp { program: [6, 0, 0, 0, 0, 0, 0xff, 0x7f].repeat(2), flags: 0 });
    ProcessPlan {
        process: process(),
        limits: vec![Limit { resource: 7, soft: 1024, hard: 524_288 }],
        tty: false,
        confinement: Confinement { seccomp, ..Confinement::default() },
    }
}

/// The launch record of a container that does not wait.
fn compile(plan: &ContainerPlan, process: &ProcessPlan) -> Result<Vec<u8>, Error> {
    super::container(plan, process, VERSION, Waits::Never).map(|record| record.bytes)
}

/// The launch record of a container with the usual process, for a monitor of this version.
fn launch(plan: &ContainerPlan, version: u16, waits: Waits) -> Result<LaunchRecord, Error> {
    super::container(plan, &process_plan(), version, waits)
}

/// The launch record of a container with the usual process.
fn container(plan: &ContainerPlan) -> Result<Vec<u8>, Error> {
    compile(plan, &process_plan())
}

fn container_plan() -> ContainerPlan {
    ContainerPlan {
        root: Root {
            layers_directory: "/layers".into(),
            lowers: vec!["b".into(), "a".into()],
            upper: "/pods/u".into(),
            work: "/pods/w".into(),
            mountpoint: "/pods/m".into(),
            read_only: false,
            label: None,
        },
        cgroup_joins: vec!["/sys/fs/cgroup/memory/x/tasks".into()],
        has_cgroup_namespace: true,
        has_kcore: true,
        cgroup_mount: CgroupMount::Namespaced,
        mounts: vec![],
        image_volumes: vec![],
        files: Files {
            hosts: "/p/hosts".into(),
            host_name: "/p/hostname".into(),
            resolv_conf: "/p/resolv.conf".into(),
        },
        shm: "/p/shm".into(),
        devices: vec![],
        scheduling: Scheduling::default(),
        masked_paths: vec!["/proc/kcore".into()],
        readonly_paths: vec!["/proc/sys".into()],
        privileged: false,
        user_namespace: None,
        is_cgroup_mount_writable: false,
        without_mounts: Vec::new(),
        namespaces: Vec::new(),
        sysctls: Vec::new(),
        own_namespaces: PodNamespaces { network: true, ipc: true, uts: true },
    }
}

fn mount(source: &str, target: &str) -> Mount {
    Mount {
        source: Source::Host(PathBuf::from(source)),
        target: target.into(),
        read_only: false,
        recursive_read_only: false,
        propagation: Propagation::Private,
        no_exec: false,
        no_suid: false,
        no_dev: false,
        maps_owners: false,
    }
}

fn sandbox_plan() -> SandboxPlan {
    SandboxPlan {
        shares_pids: false,
        namespaces: PodNamespaces { network: true, ipc: true, uts: true },
        shm_directory: "/p/shm".into(),
        host_name: "web-0".into(),
        sysctls: vec![
            ("net.ipv4.ip_unprivileged_port_start".into(), "80".into()),
            ("kernel.sem".into(), "1 2 3 4".into()),
        ],
        convenience_sysctls: true,
        oom_score_adj: Some(-998),
        user_namespace: None,
        label: None,
    }
}

mod container;
mod mount_plan;
mod process;
