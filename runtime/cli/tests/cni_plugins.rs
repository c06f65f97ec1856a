//! CNI jobs of the built worker program: shell scripts act as misbehaving plugins, and Debian's plugins
//! (package containernetworking-plugins, in /usr/lib/cni; iptables) attach a pod. Those require root; they
//! run in a network namespace that acts as the host.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use coracle_job::{
    Answer, Attachment, CniCommand, CniJob, CniOutcome, Failure, FailureKind, Job, Outcome, PortMapping,
    WORKER, read_message, write_message,
};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// A plugin directory that is removed at the end of the test.
struct Plugins(PathBuf);

impl Plugins {
    fn new(test: &str) -> Plugins {
        let dir = std::env::temp_dir().join(format!("coracle-cni-{test}-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        Plugins(dir)
    }

    /// Creates a plugin named `name` that runs `script`; `$D` in the script is the plugin directory.
    fn script(&self, name: &str, script: &str) -> &Plugins {
        let path = self.0.join(name);
        fs::write(&path, format!("#!/bin/sh\nD={}\n{script}\n", self.0.display())).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        self
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.0.join(name)).unwrap_or_default()
    }

    fn job(&self, command: CniCommand, version: &str, kinds: &[&str]) -> CniJob {
        let plugins: Vec<_> = kinds.iter().map(|kind| format!(r#"{{"type":"{kind}"}}"#)).collect();
        CniJob {
            command,
            conflist: format!(
                r#"{{"cniVersion":"{version}","name":"net","plugins":[{}]}}"#,
                plugins.join(",")
            ),
            bin_dirs: vec!["/nonexistent".into(), self.0.clone()],
            attachment: Attachment {
                container_id: "c0ffee".into(),
                netns: "/proc/self/ns/net".into(),
                interface: "eth0".into(),
                arguments: vec![("IgnoreUnknown".into(), "1".into()), ("K8S_POD_NAME".into(), "web".into())],
                ..Attachment::default()
            },
            timeout_ms: 10_000,
        }
    }
}

impl Drop for Plugins {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn start(mut command: Command, job: CniJob) -> Child {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .env("CNI_ARGS", "of an outer call")
        .spawn()
        .unwrap();
    write_message(&mut child.stdin.take().unwrap(), &Job::Cni(job)).unwrap();
    child
}

fn answer(mut child: Child) -> Result<CniOutcome, Failure> {
    let answer = loop {
        match read_message::<Answer>(child.stdout.as_mut().unwrap()).unwrap() {
            // What it waits for is for the daemon's log.
            Some(Answer::Waiting(what)) => assert!(what.starts_with("CNI plugin "), "{what}"),
            answer => break answer,
        }
    };
    child.wait().unwrap();
    match answer {
        Some(Answer::Done(Outcome::Cni(outcome))) => Ok(outcome),
        Some(Answer::Failed(failure)) => Err(failure),
        other => panic!("{other:?}"),
    }
}

/// The program, started by the worker's name.
fn worker() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_coracle"));
    command.arg0(WORKER);
    command
}

fn run(job: CniJob) -> Result<CniOutcome, Failure> {
    answer(start(worker(), job))
}

/// Waits until `done` returns true, for at most 10 s.
fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(10);
    while !done() {
        assert!(Instant::now() < end, "{what}: not within 10 s");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether a process has ended; zombies count.
fn is_dead(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
    stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('Z'))
}

const RESULT: &str = r#"{"cniVersion":"1.0.0","interfaces":[{"name":"eth0","mac":"02:00:00:00:00:01","sandbox":"/x"}],"ips":[{"address":"10.9.0.2/24","interface":0}]}"#;

#[test]
fn add_passes_each_result_on_and_del_runs_in_reverse_order() {
    let plugins = Plugins::new("chain");
    let log = r#"echo "$CNI_COMMAND $1 $CNI_CONTAINERID $CNI_IFNAME $CNI_NETNS $CNI_ARGS" >>$D/log; cat >>$D/log; echo >>$D/log"#;
    let named = |name: &str| format!("set -- {name}; {log}; [ $CNI_COMMAND = DEL ] || echo '{RESULT}'");
    plugins.script("one", &named("one")).script("two", &named("two"));
    let outcome =
        run(plugins.job(CniCommand::Add { previous_result: None }, "1.0.0", &["one", "two"])).unwrap();
    assert_eq!(outcome.addresses, ["10.9.0.2"]);
    assert_eq!(outcome.result, RESULT);
    assert_eq!(outcome.interfaces[0].mac, "02:00:00:00:00:01");
    let about = "c0ffee eth0 /proc/self/ns/net IgnoreUnknown=1;K8S_POD_NAME=web";
    let base = |kind: &str| format!(r#""cniVersion":"1.0.0","name":"net","type":"{kind}""#);
    let with = |kind: &str| {
        format!(r#"{{"cniVersion":"1.0.0","name":"net","prevResult":{RESULT},"type":"{kind}"}}"#)
    };
    let expected = format!("ADD one {about}\n{{{}}}\nADD two {about}\n{}\n", base("one"), with("two"));
    assert_eq!(plugins.read("log"), expected);

    fs::remove_file(plugins.0.join("log")).unwrap();
    let del = CniCommand::Del { previous_result: Some(RESULT.into()) };
    run(plugins.job(del.clone(), "1.0.0", &["one", "two"])).unwrap();
    assert_eq!(
        plugins.read("log"),
        format!("DEL two {about}\n{}\nDEL one {about}\n{}\n", with("two"), with("one"))
    );

    fs::remove_file(plugins.0.join("log")).unwrap();
    let mut old = plugins.job(del, "0.3.1", &["one"]);
    old.attachment.netns = "/etc/passwd".into();
    run(old).unwrap();
    let about = "c0ffee eth0  IgnoreUnknown=1;K8S_POD_NAME=web";
    let expected = format!("DEL one {about}\n{}\n", r#"{"cniVersion":"0.3.1","name":"net","type":"one"}"#);
    assert_eq!(plugins.read("log"), expected, "no prevResult before 0.4.0, no CNI_NETNS without a namespace");
}

#[test]
fn a_failed_add_is_followed_by_del_and_its_error_returned() {
    let plugins = Plugins::new("undo");
    plugins.script("good", &format!("echo $CNI_COMMAND good >>$D/log; echo '{RESULT}'"));
    plugins.script(
        "bad",
        r#"echo $CNI_COMMAND bad >>$D/log; echo '{"code":11,"msg":"come back later"}'; exit 1"#,
    );
    let failure =
        run(plugins.job(CniCommand::Add { previous_result: None }, "1.0.0", &["good", "bad", "good"]))
            .unwrap_err();
    assert_eq!(failure.message, r#"plugin type="bad" failed (add): come back later"#);
    assert_eq!(failure.kind, FailureKind::Plugin);
    assert_eq!(plugins.read("log"), "ADD good\nADD bad\nDEL good\nDEL bad\n", "DEL stops at the first error");
    let failure = run(plugins.job(CniCommand::Add { previous_result: None }, "1.0.0", &["good", "absent"]))
        .unwrap_err();
    let looked = format!("no such program in /nonexistent, {}", plugins.0.display());
    assert_eq!(failure.message, format!(r#"plugin type="absent" failed (add): {looked}"#));
}

#[test]
fn every_kind_of_failure_has_a_specific_error() {
    let plugins = Plugins::new("words");
    let cases = [
        ("echo rubbish; echo why >&2; exit 3", "why"),
        ("echo rubbish; exit 3", "ended with exit status: 3 and no message"),
        ("exit 1", "ended with exit status: 1 and no message"),
        ("kill -9 $$", "ended with signal: 9 (SIGKILL) and no message"),
        ("true", "returned no result"),
        ("exec >&- 2>&-; sleep 0.1", "returned no result"),
        ("echo rubbish", "returned a result that cannot be parsed: expected value at line 1 column 1"),
        (r#"echo '{"cniVersion":"7.0.0"}'"#, r#"returned a result of unknown cniVersion "7.0.0""#),
        ("head -c 2000000 /dev/zero", "printed more than 1048576 bytes"),
        ("head -c 100000 /dev/zero | tr '\\0' x >&2; echo ' end' >&2; exit 1", "…"),
    ];
    for (index, (script, expected)) in cases.iter().enumerate() {
        let kind = format!("p{index}");
        plugins.script(&kind, &format!("[ $CNI_COMMAND = ADD ] || exit 0\n{script}"));
        let message = run(plugins.job(CniCommand::Add { previous_result: None }, "1.0.0", &[&kind]))
            .unwrap_err()
            .message;
        let said =
            message.strip_prefix(&format!(r#"plugin type="{kind}" failed (add): "#)).unwrap_or(&message);
        if *expected == "…" {
            assert!(said.len() < 1100 && said.starts_with("xxx"), "{} bytes", said.len());
        } else {
            assert_eq!(said, *expected, "{script}");
        }
    }
    plugins.script("none", r#"echo '{"cniVersion":"1.0.0","ips":[]}'"#);
    let failure =
        run(plugins.job(CniCommand::Add { previous_result: None }, "1.0.0", &["none"])).unwrap_err();
    assert_eq!(failure.message, r#"network "net" (add): the result gives eth0 no address"#);
}

#[test]
fn a_plugin_that_hangs_is_killed_with_its_children() {
    let plugins = Plugins::new("hang");
    plugins.script("hang", "[ $CNI_COMMAND = ADD ] || exit 0\nsleep 1000 & echo $! $$ >$D/pids; wait");
    let mut job = plugins.job(CniCommand::Add { previous_result: None }, "1.0.0", &["hang"]);
    job.timeout_ms = 500;
    let begun = Instant::now();
    let failure = run(job).unwrap_err();
    assert!(failure.message.contains("did not end within"), "{}", failure.message);
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    for pid in plugins.read("pids").split_whitespace() {
        until("the plugin's processes are dead", || is_dead(pid));
    }
}

#[test]
fn a_background_process_with_open_pipes_is_not_awaited() {
    let plugins = Plugins::new("pipes");
    plugins.script("fork", &format!("sleep 1000 & echo $! >$D/pid; echo '{RESULT}'"));
    let begun = Instant::now();
    run(plugins.job(CniCommand::Add { previous_result: None }, "1.0.0", &["fork"])).unwrap();
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    kill(Pid::from_raw(plugins.read("pid").trim().parse().unwrap()), Signal::SIGKILL).unwrap();
}

#[test]
fn the_plugin_of_a_killed_worker_ends() {
    let plugins = Plugins::new("orphan");
    plugins.script("hang", "echo $$ >$D/pid; exec sleep 1000");
    let mut child =
        start(worker(), plugins.job(CniCommand::Add { previous_result: None }, "1.0.0", &["hang"]));
    until("the plugin runs", || plugins.read("pid").ends_with('\n'));
    child.kill().unwrap();
    child.wait().unwrap();
    until("the plugin is dead", || is_dead(&plugins.read("pid")));
}

#[test]
fn execution_is_retried_while_the_program_is_being_written() {
    let plugins = Plugins::new("busy");
    plugins.script("busy", &format!("echo '{RESULT}'"));
    let writer = fs::OpenOptions::new().append(true).open(plugins.0.join("busy")).unwrap();
    let child = start(worker(), plugins.job(CniCommand::Add { previous_result: None }, "1.0.0", &["busy"]));
    std::thread::sleep(Duration::from_millis(120));
    drop(writer);
    answer(child).unwrap();
    plugins.script("denied", "true");
    fs::set_permissions(plugins.0.join("denied"), fs::Permissions::from_mode(0o644)).unwrap();
    let message = run(plugins.job(CniCommand::Del { previous_result: None }, "1.0.0", &["denied"]))
        .unwrap_err()
        .message;
    assert!(message.contains("execute ") && message.contains("ermission denied"), "{message}");
}

#[test]
fn del_stops_at_the_first_error_and_ignores_missing_objects() {
    let plugins = Plugins::new("del");
    plugins.script("ok", "echo ok >>$D/log");
    plugins.script("gone", r#"echo gone >>$D/log; echo '{"code":3,"msg":"unknown container"}'; exit 1"#);
    plugins.script("stuck", r#"echo stuck >>$D/log; echo '{"code":5,"msg":"resource busy"}'; exit 1"#);
    let del = CniCommand::Del { previous_result: None };
    run(plugins.job(del.clone(), "1.0.0", &["ok", "gone", "ok"])).unwrap();
    assert_eq!(plugins.read("log"), "ok\ngone\nok\n");
    let failure = run(plugins.job(del.clone(), "1.0.0", &["ok", "stuck", "gone"])).unwrap_err();
    assert_eq!(failure.message, r#"plugin type="stuck" failed (del): resource busy"#);
    assert_eq!(plugins.read("log"), "ok\ngone\nok\ngone\nstuck\n", "the first is not called");
    run(plugins.job(del.clone(), "1.0.0", &["uninstalled"])).unwrap_err();
    let mut without = plugins.job(del, "1.0.0", &["uninstalled"]);
    without.attachment.netns = "/run/netns/coracle-never-was".into();
    run(without).unwrap();
}

#[test]
fn status_runs_for_lists_that_support_it() {
    let plugins = Plugins::new("status");
    plugins.script(
        "sick",
        r#"env | grep ^CNI_ | sort | cut -d= -f1 >$D/env; echo '{"code":50,"msg":"no route"}'; exit 1"#,
    );
    run(plugins.job(CniCommand::Status, "1.0.0", &["sick"])).unwrap();
    let failure = run(plugins.job(CniCommand::Status, "1.1.0", &["sick"])).unwrap_err();
    assert_eq!(failure.message, r#"plugin type="sick" failed (status): no route"#);
    assert_eq!(plugins.read("env"), "CNI_COMMAND\nCNI_PATH\n");
}

/// A named network namespace that is removed at the end of the test.
struct Netns(String);

impl Netns {
    fn new(role: &str) -> Netns {
        let name = format!("coracle-cni-{role}-{}", std::process::id());
        sh(&format!("ip netns add {name} && ip -n {name} link set lo up"));
        Netns(name)
    }

    fn path(&self) -> String {
        format!("/run/netns/{}", self.0)
    }

    fn sh(&self, script: &str) -> String {
        sh(&format!("nsenter --net={} sh -c '{script}'", self.path()))
    }
}

impl Drop for Netns {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.0]).status();
    }
}

fn sh(script: &str) -> String {
    let output = Command::new("sh").arg("-c").arg(script).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{script}: {errors} (this test needs root, iproute2 and iptables)");
    String::from_utf8(output.stdout).unwrap()
}

/// The names of host-local's lease files, without its other files.
fn leases(data: &Path) -> Vec<String> {
    let names = fs::read_dir(data.join("coracle-test")).into_iter().flatten();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> =
        names.filter(|name| name != "lock" && !name.starts_with("last_reserved")).collect();
    names.sort();
    names
}

#[test]
fn debians_plugins_attach_a_pod_and_remove_everything_as_root() {
    let data = Plugins::new("real");
    let (host, pod) = (Netns::new("host"), Netns::new("pod"));
    let program = data.0.join(WORKER);
    symlink(env!("CARGO_BIN_EXE_coracle"), &program).unwrap();
    let conflist = format!(
        r#"{{"cniVersion":"1.0.0","name":"coracle-test","plugins":[{{"type":"loopback"}},
            {{"type":"bridge","bridge":"ccni0","isGateway":true,"ipMasq":true,"ipam":{{"type":"host-local",
              "dataDir":"{}","ranges":[[{{"subnet":"10.88.77.0/24"}}]],"routes":[{{"dst":"0.0.0.0/0"}}]}}}},
            {{"type":"portmap","capabilities":{{"portMappings":true}},"snat":true}}]}}"#,
        data.0.display()
    );
    let port =
        PortMapping { host_port: 12088, container_port: 80, protocol: "tcp".into(), host_ip: String::new() };
    let job = |command: CniCommand, netns: &str| CniJob {
        command,
        conflist: conflist.clone(),
        bin_dirs: vec!["/opt/cni/bin".into(), "/usr/lib/cni".into()],
        attachment: Attachment {
            container_id: "coracle0cni0test".into(),
            netns: netns.into(),
            interface: "eth0".into(),
            arguments: vec![("IgnoreUnknown".into(), "1".into())],
            port_mappings: vec![port.clone()],
            ..Attachment::default()
        },
        timeout_ms: 20_000,
    };
    let run = |job| {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", host.path())).arg(&program);
        answer(start(command, job))
    };
    // Twice with the namespace at DEL, then without it as after a reboot: leases and rules must be removed in
    // both cases.
    for round in ["plain", "again", "rebooted"] {
        let added = run(job(CniCommand::Add { previous_result: None }, &pod.path())).unwrap();
        assert_eq!(added.addresses.len(), 1, "{round}: {added:?}");
        let address = &added.addresses[0];
        assert!(address.starts_with("10.88.77."), "{round}: {address}");
        assert_eq!(leases(&data.0), std::slice::from_ref(address), "{round}");
        assert!(pod.sh("ip -4 addr show eth0").contains(address), "{round}");
        assert!(host.sh("iptables-save -t nat").contains("12088"), "{round}");

        let del = CniCommand::Del { previous_result: Some(added.result) };
        let netns = if round == "rebooted" { "/run/netns/coracle-was-before".to_owned() } else { pod.path() };
        run(job(del.clone(), &netns)).unwrap();
        assert_eq!(leases(&data.0), Vec::<String>::new(), "{round}");
        let rules = host.sh("iptables-save");
        assert!(!rules.contains("12088"), "{round}: {rules}");
        // Without a namespace bridge 1.1.1 keeps its masquerade rule, which a real reboot would remove.
        assert!(!rules.contains("coracle0cni0test") || round == "rebooted", "{round}: {rules}");
        if round != "rebooted" {
            assert!(!pod.sh("ip -o link").contains("eth0"), "{round}");
            assert!(!host.sh("ip -o link").contains("veth"), "{round}");
        }
        run(job(del, &netns)).unwrap_or_else(|failure| panic!("{round}: a second del: {}", failure.message));
    }
}
