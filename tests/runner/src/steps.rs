//! The table of all steps: what there is to run, in which tier, and after what. It is the only list of the suites.
//!
//! A step runs when the steps that it names are done, and a processor of its lane is free. The order in the table is the order
//! in which steps of one lane start.

use std::process::Command;

/// Amount of what is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tier {
    /// `make check`: while editing.
    Check,
    /// `make test`: what a change must pass.
    Test,
    /// `make test-all`: everything, in parts.
    All,
}

/// Resource that steps compete for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    /// Package managers, which have locks of their own.
    Install,
    /// cargo, which locks the directory that it builds into.
    Cargo,
    /// Compilers of Go, at the lowest priority: their programs are needed late.
    Go,
    /// Suites. Most of their tests wait more than they work.
    Suite,
    /// Guests, and jobs of the workflow: each uses a processor all the time.
    Guest,
}

/// Action of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Work {
    /// Executes a line by bash; its exit status is the result, unless it prints results of Rust's test harness.
    Line(&'static str),
    /// Builds the test programs of the workspace, which the steps below run.
    BuildTests,
    /// Runs the unit tests of all crates, and those of `tests/*.rs` beside them.
    Units,
    /// Runs a suite of `tests/` with these arguments of the test harness.
    Suite { name: &'static str, threads: Threads, arguments: &'static [&'static str] },
}

/// Number of tests of a suite that run at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Threads {
    /// Two for each processor: tests that wait.
    Waiting,
    /// Four for each processor: tests that wait most of their time, for time limits and slow lines that they make.
    Idle,
    /// One for each processor: guests, and programs that are parallel themselves.
    Working,
}

/// One step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    pub(crate) name: &'static str,
    pub(crate) lane: Lane,
    /// Names of steps that must have ended; a failed one lets this step fail without being run.
    pub(crate) after: &'static [&'static str],
    pub(crate) tiers: &'static [Tier],
    /// The parts of `make test-all` that it belongs to; a step that others need is in their parts, too.
    pub(crate) parts: &'static [&'static str],
    /// Property that it proves, for the table of CONTRIBUTING.md; empty for preparations.
    pub(crate) proves: &'static str,
    pub(crate) work: Work,
}

use Lane::{Cargo, Go, Guest, Install, Suite};
use Threads::{Idle, Waiting, Working};
use Tier::{All, Check, Test};

const CHECK: &[Tier] = &[Check];
const TEST: &[Tier] = &[Test, All];
const EACH: &[Tier] = &[Check, Test, All];
const ALL: &[Tier] = &[All];

/// Shortest form of a row.
const fn step(
    name: &'static str,
    lane: Lane,
    after: &'static [&'static str],
    tiers: &'static [Tier],
    parts: &'static [&'static str],
    proves: &'static str,
    work: Work,
) -> Step {
    Step { name, lane, after, tiers, parts, proves, work }
}

const fn suite(name: &'static str, threads: Threads) -> Work {
    Work::Suite { name, threads, arguments: &[] }
}

/// A part of a suite, by words for Rust's test harness.
const fn filtered(name: &'static str, threads: Threads, arguments: &'static [&'static str]) -> Work {
    Work::Suite { name, threads, arguments }
}

const fn line(text: &'static str) -> Work {
    Work::Line(text)
}

/// All steps. What is built and installed comes first in each lane, in the order in which most waits for it.
#[rustfmt::skip]
pub(crate) const STEPS: &[Step] = &[
    // What is installed and built.
    step("root's packages", Install, &[], CHECK, &[], "", line("tests/tools/install check")),
    step("packages", Install, &[], TEST, &[], "", line("tests/tools/install packages")),
    step("servers", Install, &["packages"], TEST, &[], "", line("tests/tools/install servers")),
    step("kernels", Install, &["servers"], TEST, &[], "", line("tests/tools/install kernels")),
    step("format", Cargo, &[], &[Check, Test], &[], "the code is formatted", line("cargo fmt --all --check")),
    step("monitor", Cargo, &["packages"], EACH, &[], "", line("make --no-print-directory monitor")),
    step("tests", Cargo, &["packages"], EACH, &[], "", Work::BuildTests),
    step("clippy", Cargo, &[], CHECK, &[], "no lint complains", line("make --no-print-directory clippy")),
    step("rustdoc", Cargo, &[], CHECK, &[], "links in comments resolve", line("make --no-print-directory docs")),
    step("programs", Cargo, &["packages"], TEST, &[], "", line("make --no-print-directory programs")),
    step("other programs", Cargo, &["kernels"], TEST, &[], "", line("make --no-print-directory other-programs")),
    step("cross", Cargo, &["kernels"], ALL, &[], "", line("make --no-print-directory cross")),
    step("chunked layers", Go, &["packages"], TEST, &[], "", line("tests/tools/install go-chunked")),
    step("cri-tools", Go, &["packages"], TEST, &[], "", line("tests/tools/install go-cri-tools")),
    step("clients", Go, &["packages"], TEST, &[], "", line("tests/tools/install go-clients")),
    step("kubelet", Go, &["packages"], TEST, &[], "", line("tests/tools/install go-kubelet")),
    step("guest crictl", Go, &["cri-tools"], TEST, &[], "", line("tests/tools/install guest-crictl")),
    step("peer", Go, &["packages"], TEST, &[], "", line("tests/tools/install compare")),
    step("peer suites' programs", Go, &["peer"], ALL, &[], "", line("tests/tools/install peer-suites")),
    step("containerd", Go, &["packages"], ALL, &[], "", line("tests/tools/install containerd")),
    step("signers", Go, &["packages"], ALL, &[], "", line("tests/tools/install signers")),
    step("packaging tools", Go, &["packages"], ALL, &[], "", line("tests/tools/install packaging && tests/tools/install kubeadm")),
    step("guest packages", Install, &["kernels"], ALL, &[], "", line("tests/tools/install qemu")),
    step("guest suites", Cargo, &["guest packages"], ALL, &[], "", line("make --no-print-directory guests")),
    step("cluster programs", Go, &["kubelet"], ALL, &[], "", line("tests/tools/install e2e")),
    step("workload programs", Go, &["kubelet", "peer"], ALL, &[], "", line("tests/tools/install workloads")),
    step("bare root", Install, &["servers"], ALL, &[], "", line("tests/tools/install workflow")),
    // What is tested.
    step("house", Suite, &["tests"], EACH, &["suites"], "the source tree: dependencies, style, citations", suite("house", Waiting)),
    step("workflow list", Suite, &["tests"], EACH, &["suites"], "each step of CI's workflow has an entry, and each action a digest", filtered("packaging", Waiting, &["workflow::"])),
    step("units", Suite, &["tests", "monitor", "root's packages"], EACH, &["suites"], "each crate by itself; 6 s of simulated histories", Work::Units),
    // The longest first, so that no long one is left at the end.
    step("images", Suite, IMAGES, TEST, &["suites"], "pulls, imports, layers, registries, pins", suite("images", Idle)),
    step("faults", Suite, LAYERS, TEST, &["suites"], "kill -9 and errors at a sample of system calls, lost and damaged files, full disks", suite("faults", Waiting)),
    step("compare", Suite, PEER, TEST, &["suites"], "containers and layers as with containerd, all cases of the tables", line("make --no-print-directory compare PART=\"containers layers verifiers\" SECONDS=0")),
    step("hostile", Suite, AFTER, TEST, &["suites"], "attackers in containers and images", suite("hostile", Waiting)),
    step("conformance", Suite, CLIENT, TEST, &["suites"], "critest, over SPDY and WebSocket", suite("conformance", Working)),
    step("lifecycle", Suite, AFTER, TEST, &["suites"], "pods and containers as clients and the kernel see them", suite("lifecycle", Waiting)),
    step("network", Suite, AFTER, TEST, &["suites"], "the built-in network, CNI plugins, host ports", suite("network", Waiting)),
    step("streaming", Suite, CLIENT, TEST, &["suites"], "exec, attach and port-forward over SPDY and WebSocket", suite("streaming", Waiting)),
    step("kubelet suite", Suite, &["tests", "programs", "other programs", "servers", "kubelet", "clients", "cri-tools"], TEST, &["suites"], "a real kubelet with static pods, and as k3s starts it", suite("kubelet", Waiting)),
    step("docs", Suite, CLIENT, TEST, &["suites"], "the commands of the pages", suite("docs", Waiting)),
    step("nri", Suite, &["tests", "programs", "other programs", "servers", "clients"], TEST, &["suites"], "NRI plugins, those of NRI's own library too", suite("nri", Waiting)),
    step("crictl", Suite, &["tests", "programs", "other programs", "servers", "cri-tools", "clients"], TEST, &["suites"], "crictl, and gRPC clients of seven years", suite("crictl", Waiting)),
    step("floor", Suite, AFTER, TEST, &["suites"], "the lower bound of benchmarks (tests/floor) makes pods that run", suite("floor", Waiting)),
    step("boot", Guest, &["tests", "programs", "other programs", "kernels", "guest crictl"], TEST, &["suites"], "a node of each architecture boots and runs a pod", filtered("qemu", Working, &["edge::"])),
    // Parts of `make test-all`.
    step("long compare", Suite, PEER, ALL, &["compare"], "ten minutes of random cases for each part", line("make --no-print-directory compare SECONDS=600")),
    step("peer suites", Suite, &["tests", "programs", "other programs", "servers", "peer suites' programs"], ALL, &["compare"], "containerd's own tests of its CRI", line("make --no-print-directory peer-suites")),
    step("workloads", Suite, &["tests", "programs", "workload programs"], ALL, &["workloads"], "VPNs, databases, systemd, podman, DNS: what users run, under a kubelet, as with containerd", line("make --no-print-directory workloads")),
    step("packaging", Suite, &["tests", "programs", "cross", "servers", "packaging tools", "guest packages"], ALL, &["packaging"], "packages of every kind, releases, completions, set-up of k3s and kubeadm", suite("packaging", Waiting)),
    step("workflow check", Guest, &["tests", "bare root"], ALL, &["workflow"], "the job `check` of CI's workflow in a bare Debian root, as a user and as root", filtered("packaging", Working, &["--ignored", "workflow::check"])),
    step("workflow deny", Guest, &["tests", "bare root"], ALL, &["workflow"], "its job `deny`: licences and advisories", filtered("packaging", Working, &["--ignored", "workflow::deny"])),
    step("workflow test", Guest, &["tests", "bare root"], ALL, &["workflow"], "its job `test`: `make test` of a clean clone", filtered("packaging", Working, &["--ignored", "workflow::test"])),
    step("workflow parts", Guest, &["tests", "bare root"], ALL, &["workflow"], "one of its jobs `parts`", filtered("packaging", Working, &["--ignored", "workflow::parts"])),
    step("workflow dist", Guest, &["tests", "bare root"], ALL, &["workflow"], "its jobs `dist` and `release`, but for what signs and publishes", filtered("packaging", Working, &["--ignored", "workflow::dist"])),
    step("kubeadm", Suite, &["tests", "programs", "servers", "packaging tools", "kubelet"], ALL, &["packaging"], "the commands of the pages that need kubeadm", filtered("docs", Waiting, &["--ignored"])),
    step("take-over", Suite, &["tests", "programs", "servers", "containerd"], ALL, &["packaging"], "images are taken over from containerd's store; containerd and podman pull converted ones", filtered("images", Waiting, &["--ignored", "take_over::", "convert::"])),
    step("signatures", Suite, &["tests", "programs", "servers", "signers"], ALL, &["signatures"], "images that cosign and notation signed are pulled by policies with their keys", filtered("images", Waiting, &["--ignored", "signers::"])),
    step("slow faults", Suite, AFTER, ALL, &["slow"], "kill -9 at thirty moments of a pod's life with each kind of network", filtered("faults", Waiting, &["--ignored"])),
    step("slow images", Suite, LAYERS, ALL, &["slow"], "pulls of what changed with the longest tables, the memory of workers, slow clients of neighbours", filtered("images", Waiting, &["--ignored", "partial::", "partial_attacks::", "false_neighbours::"])),
    step("slow lifecycle", Suite, AFTER, ALL, &["slow"], "pauses between measurements of layers", filtered("lifecycle", Waiting, &["--ignored"])),
    step("inject", Suite, LAYERS, ALL, &["inject"], "kill -9 and errors at every system call of a pod's life", line("make --no-print-directory inject")),
    step("simulate", Suite, &["packages"], ALL, &["inject"], "ten minutes of random histories on a simulated node", line("make --no-print-directory simulate")),
    step("guest x86_64", Guest, GUEST, ALL, &["qemu"], "life cycle, reboot, clock in 1970, limits as cgroups-rs sets them, with cgroup v2", filtered("qemu", Working, &["x86_64_with", "clock::", "limits_on", "a_guest_that", "programs::", "volatile::"])),
    step("guest aarch64", Guest, GUEST, ALL, &["qemu"], "the same life cycle and reboot on another CPU", filtered("qemu", Working, &["aarch64_with"])),
    step("power cuts", Guest, GUEST, ALL, &["power-cuts"], "six power cuts during work and boot", filtered("qemu", Working, &["six_power_cuts"])),
    step("systemd", Guest, &["tests", "guest suites", "kubelet", "packaging tools"], ALL, &["systemd"], "the package under systemd, the pages' lines there, a kubelet with the systemd driver", filtered("qemu", Working, &["packaged_under_systemd_on_x86_64", "a_kubelet_with"])),
    step("modules", Guest, GUEST, ALL, &["modules"], "AppArmor and SELinux", filtered("qemu", Working, &["apparmor_on_x86_64", "selinux_on_x86_64"])),
    step("guest architectures", Guest, &["tests", "guest suites", "packaging tools"], ALL, &["more-guests"], "systemd, AppArmor and SELinux on aarch64", filtered("qemu", Working, &["--ignored", "systemd_on_aarch64", "apparmor_on_aarch64", "selinux_on_aarch64"])),
    step("guest attacks", Guest, GUEST, ALL, &["more-guests"], "the suite of attacks with cgroup v2, on both architectures and under AppArmor; full tables of the kernel", filtered("qemu", Working, &["--ignored", "attacks_on", "tables::"])),
    step("whole suites in guests", Guest, GUEST, ALL, &["more-guests"], "NRI, images, network, faults and critest with cgroup v2 and AppArmor", filtered("qemu", Working, &["--ignored", "suites::nri", "suites::images", "suites::network", "suites::faults", "suites::critest"])),
    step("cluster", Guest, &["tests", "programs", "cluster programs"], ALL, &["cluster"], "a whole cluster used as users do, and a sample of Conformance", line("make --no-print-directory cluster-sample")),
];

/// Prerequisites of most suites. They need no program of the other architecture, but wait for its build, too: tests flush many
/// small files, and a flush waits for what a linker writes.
const AFTER: &[&str] = &["tests", "programs", "other programs", "servers"];
/// Prerequisites of the suite of images. It takes longest and waits for time limits, which a linker does not lengthen, so it begins
/// beside the build for the other architecture.
const IMAGES: &[&str] = &["tests", "programs", "servers", "chunked layers"];
/// Prerequisites of suites with layers that have a table of contents.
const LAYERS: &[&str] = &["tests", "programs", "other programs", "servers", "chunked layers"];
/// Prerequisites of suites with crictl or critest.
const CLIENT: &[&str] = &["tests", "programs", "other programs", "servers", "cri-tools"];
/// Prerequisites of the comparison with containerd.
const PEER: &[&str] = &["tests", "programs", "other programs", "servers", "peer"];
/// Prerequisites of guests with whole suites.
const GUEST: &[&str] = &["tests", "guest suites"];

impl Step {
    /// Returns whether it proves nothing and only prepares other steps.
    pub(crate) fn is_preparation(&self) -> bool {
        self.proves.is_empty()
    }
}

/// The steps of a tier, and for [`Tier::All`] those of these parts with what they need.
pub(crate) fn of(tier: Tier, parts: &[&str]) -> Vec<Step> {
    let in_tier = |step: &&Step| step.tiers.contains(&tier);
    let is_wanted = |step: &Step| tier != All || step.parts.iter().any(|part| parts.contains(part));
    let mut names: Vec<&str> =
        STEPS.iter().filter(in_tier).filter(|step| is_wanted(step)).map(|step| step.name).collect();
    let mut at = 0;
    while let Some(name) = names.get(at) {
        let needed =
            STEPS.iter().filter(in_tier).find(|step| step.name == *name).map_or(&[][..], |step| step.after);
        let missing: Vec<_> = needed.iter().filter(|name| !names.contains(name)).copied().collect();
        names.extend(missing);
        at += 1;
    }
    STEPS.iter().filter(in_tier).filter(|step| names.contains(&step.name)).copied().collect()
}

/// The names of all suites, without repetition.
pub(crate) fn suite_names() -> Vec<&'static str> {
    let mut names = Vec::new();
    for step in STEPS {
        if let Work::Suite { name, .. } = step.work
            && !names.contains(&name)
        {
            names.push(name);
        }
    }
    names
}

/// The names of all parts of `make test-all`.
pub(crate) fn part_names() -> Vec<&'static str> {
    let mut names: Vec<&str> = Vec::new();
    for part in STEPS.iter().flat_map(|step| step.parts) {
        if !names.contains(part) {
            names.push(part);
        }
    }
    names
}

/// The environment of a suite: the programs, and the tools before those of the machine.
pub(crate) fn set_environment(command: &mut Command) {
    let here = std::env::current_dir().expect("the workspace exists");
    let target = here.join("target");
    let programs = target.join(format!("{}-unknown-linux-musl/release", std::env::consts::ARCH));
    if std::env::var_os("CORACLE_BIN_DIR").is_none() {
        command.env("CORACLE_BIN_DIR", programs);
    }
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{}:{path}", target.join("tools/bin").display()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_suite_has_a_step() {
        let manifest =
            std::fs::read_to_string(crate::workspace().join("tests/Cargo.toml")).expect("its manifest");
        let mut count = 0;
        for target in manifest.split("[[test]]").skip(1) {
            let name = target.split('"').nth(1).expect("a name");
            let is_program = target.contains("test = false");
            assert!(is_program || suite_names().contains(&name), "no step runs the suite {name}");
            count += 1;
        }
        assert!(count > 10, "{count} suites");
    }

    /// CI runs `make test`, and each other part as a job of its own.
    #[test]
    fn the_workflow_of_ci_has_each_part() {
        let workflow =
            std::fs::read_to_string(crate::workspace().join(".github/workflows/ci.yml")).expect("it");
        let list = workflow.split("part: [").nth(1).and_then(|rest| rest.split(']').next()).expect("a list");
        let listed: Vec<&str> = list.split(", ").collect();
        let parts: Vec<&str> = part_names().into_iter().filter(|part| *part != "suites").collect();
        assert_eq!(listed, parts, "the matrix of parts in ci.yml");
    }

    #[test]
    fn each_step_is_after_known_ones_and_in_a_part() {
        let mut names: Vec<&str> = Vec::new();
        for step in STEPS {
            assert!(!names.contains(&step.name), "two steps are called {}", step.name);
            for name in step.after {
                assert!(names.contains(name), "{}: {name} is no step before it", step.name);
            }
            let has_part = !step.parts.is_empty();
            assert_eq!(
                has_part,
                !step.is_preparation() && step.tiers.contains(&All),
                "the part of {}",
                step.name
            );
            names.push(step.name);
        }
    }

    #[test]
    fn a_part_includes_the_steps_that_it_needs() {
        let names: Vec<_> = of(All, &["power-cuts"]).iter().map(|step| step.name).collect();
        assert_eq!(
            names,
            ["packages", "servers", "kernels", "tests", "guest packages", "guest suites", "power cuts"]
        );
        let checked: Vec<_> = of(Check, &[]).iter().map(|step| step.name).collect();
        assert_eq!(
            checked,
            [
                "root's packages",
                "format",
                "monitor",
                "tests",
                "clippy",
                "rustdoc",
                "house",
                "workflow list",
                "units"
            ]
        );
    }
}
