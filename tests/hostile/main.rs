//! Attacks on coracle. The programs of these tests run as root inside containers, with the capabilities,
//! filters and namespaces of ordinary pods, and try to name, trace, signal, limit, open or exhaust objects of
//! others (`tests/probe/src/attack`). docs/threat-model.md lists the guarantees with their tests;
//! docs/security.md has the CVEs, and docs/results the findings, after which tests are named.
//!
//! A test that finds nothing must be able to find something: each also asserts that its attacker ran, saw
//! processes, or sent packets.
#![forbid(unsafe_code)]

mod adjustments;
mod attackers;
mod cdi;
mod crowds;
mod escapes;
mod exhaustion;
mod files;
mod findings;
mod frames;
mod images;
mod mapped;
mod memory;
mod network;
mod plugins;
mod processes;
mod shared;
mod trace;

use coracle_tests::cri::proto::{
    Capability, ContainerConfig, NamespaceMode, PodSandboxConfig, PodSandboxState, PodSandboxStatusRequest,
    SecurityProfile, security_profile::ProfileType,
};
use coracle_tests::host::wait_until;
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request::{self, exec, security};

/// Masked paths of kubelets 1.31 to 1.36 (pkg/securitycontext; moby's list).
const MASKED: [&str; 13] = [
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
    "/sys/devices/system/cpu/cpu0/thermal_throttle",
];

/// Read-only paths of kubelets.
const READ_ONLY: [&str; 5] = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// The privileges of an attacker in its container, where it is always root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rights {
    /// The default capabilities under RuntimeDefault.
    Default,
    /// The default capabilities without a seccomp filter, the CRI's default.
    Unfiltered,
    /// SYS_PTRACE under RuntimeDefault: the pod of Kubernetes' page about shared process namespaces.
    Ptrace,
    /// All capabilities under RuntimeDefault.
    All,
    /// SYS_PTRACE without a filter.
    PtraceUnfiltered,
    /// All capabilities without a filter. Not privileged: devices, masks and namespaces are the usual ones.
    AllUnfiltered,
}

impl Rights {
    const EVERY: [Rights; 6] = [
        Rights::Default,
        Rights::Unfiltered,
        Rights::Ptrace,
        Rights::All,
        Rights::PtraceUnfiltered,
        Rights::AllUnfiltered,
    ];

    /// Applies these privileges, and the kubelet's masks, to a container.
    fn give(self, config: &mut ContainerConfig) {
        let added: &[&str] = match self {
            Rights::Default | Rights::Unfiltered => &[],
            Rights::Ptrace | Rights::PtraceUnfiltered => &["SYS_PTRACE"],
            Rights::All | Rights::AllUnfiltered => &["ALL"],
        };
        let is_filtered = matches!(self, Rights::Default | Rights::Ptrace | Rights::All);
        let kind = if is_filtered { ProfileType::RuntimeDefault } else { ProfileType::Unconfined };
        let context = security(config);
        context.capabilities = Some(Capability {
            add_capabilities: added.iter().map(|&name| name.to_owned()).collect(),
            ..Default::default()
        });
        context.seccomp = Some(SecurityProfile { profile_type: kind.into(), ..Default::default() });
        context.masked_paths = MASKED.map(String::from).to_vec();
        context.readonly_paths = READ_ONLY.map(String::from).to_vec();
    }

    fn has_sys_admin(self) -> bool {
        matches!(self, Rights::All | Rights::AllUnfiltered)
    }
}

/// A container with these privileges that executes the probe with these arguments.
fn armed(fixture: &PodFixture, name: &str, rights: Rights, words: &[&str]) -> ContainerConfig {
    let mut config = fixture.config(name, words);
    rights.give(&mut config);
    config
}

/// A pod whose containers share a PID namespace.
fn shared(mut pod: PodSandboxConfig) -> PodSandboxConfig {
    request::share_pids(&mut pod);
    pod
}

/// A pod with a user namespace.
fn mapped(pod: PodSandboxConfig) -> PodSandboxConfig {
    request::mapped(pod, 200_000)
}

/// Lets a container share the PID namespace of another.
fn beside(config: &mut ContainerConfig, target: &str) {
    let options = security(config).namespace_options.as_mut().expect("set");
    options.pid = NamespaceMode::Target.into();
    options.target_id = target.into();
}

/// Output and errors of the probe in a running container, whatever its exit code.
#[track_caller]
fn says(fixture: &PodFixture, container: &str, words: &[&str]) -> String {
    let answer = fixture.node.exec_sync(exec(container, words, 60)).expect("exec");
    String::from_utf8_lossy(&[answer.stdout, answer.stderr].concat()).into_owned()
}

/// The lines of a report that show a successful attack.
fn got(report: &str) -> Vec<&str> {
    report.lines().filter(|line| line.starts_with("GOT ")).collect()
}

/// Fails if an attack succeeded, with the whole report.
#[track_caller]
fn reached_nothing(report: &str) {
    let reached = got(report);
    assert!(reached.is_empty(), "reached: {reached:#?}\nthe whole report:\n{report}");
}

/// Waits until a container has written a line with this start.
#[track_caller]
fn wait_for_line(fixture: &PodFixture, container: &str, start: &str) {
    wait_until(&format!("{container} writes {start:?}"), || {
        fixture.node.output(container).lines().any(|line| line.starts_with(start))
    });
}

/// Whether the fixture's pod is Ready.
fn is_ready(fixture: &PodFixture) -> bool {
    let ask = PodSandboxStatusRequest { pod_sandbox_id: fixture.pod_id.clone(), ..Default::default() };
    let status = fixture.node.pod_sandbox_status(ask).expect("status").status.expect("a status");
    status.state() == PodSandboxState::SandboxReady
}

/// The fixture after its daemon was killed and started again.
fn restarted(mut fixture: PodFixture) -> PodFixture {
    fixture.node.restart();
    fixture
}
