//! The configuration of a running daemon: reloads, their outcome in Status and `coracle config status`, and the defaults of
//! runtime handlers.

use std::fs;
use std::process::Command;
use std::time::Duration;

use coracle_tests::cri::proto::StatusRequest;
use coracle_tests::host::wait_until;
use coracle_tests::node::{Node, Options, binaries};
use coracle_tests::request::{container, create, host_pod, run, security};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tonic::Code;

/// Runs `coracle config status`; returns whether the files are in force, and the output.
fn status(node: &Node, words: &[&str]) -> (bool, String) {
    let output = Command::new(binaries().join("coracle"))
        .args(["config", "status", "--config"])
        .arg(node.folder().join("config.toml"))
        .arg("--state")
        .arg(node.state())
        .args(words)
        .output()
        .expect("it runs");
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&text).into_owned())
}

/// State, reason and message of the condition about the configuration.
fn condition(node: &Node) -> (bool, String, String) {
    let status = node.status(StatusRequest::default()).expect("status").status.expect("a status");
    let found = status.conditions.into_iter().find(|condition| condition.r#type == "ConfigurationApplied");
    let found = found.expect("the condition");
    (found.status, found.reason, found.message)
}

fn reload(node: &Node, more: &str) {
    node.rewrite_config(more);
    kill(Pid::from_raw(node.pid()), Signal::SIGHUP).expect("the daemon is ours");
}

#[test]
fn the_outcome_of_a_reload_is_shown() {
    let node = Node::start();
    assert_eq!(condition(&node), (true, String::new(), String::new()));
    let (is_in_force, text) = status(&node, &[]);
    assert!(is_in_force && text.starts_with("configuration loaded at the start, 20"), "{text}");
    assert!(text.contains("  read           /"), "{text}");
    // Changed, but not reloaded.
    std::thread::sleep(Duration::from_millis(20));
    node.rewrite_config("[cdi]\nspec_dirs = \"oops\"\n");
    fs::create_dir_all(node.folder().join("conf.d")).expect("a directory");
    fs::write(node.folder().join("conf.d/new.toml"), "").expect("a drop-in");
    let (is_in_force, text) = status(&node, &[]);
    assert!(
        !is_in_force && text.contains("  changed since  /") && text.contains("  new since      /"),
        "{text}"
    );
    kill(Pid::from_raw(node.pid()), Signal::SIGHUP).expect("the daemon is ours");
    wait_until("the reload has failed", || !condition(&node).0);
    let (_, reason, message) = condition(&node);
    assert_eq!(reason, "RefusedReload");
    assert!(message.contains("found 1 mistakes") && message.contains("cdi.spec_dirs: expected"), "{message}");
    let (is_in_force, text) = status(&node, &["-o", "json"]);
    let json: Value = serde_json::from_str(&text[..=text.rfind('}').expect("an object")]).expect("JSON");
    let mistake = json["failedReload"]["mistakes"][0].as_str().expect("a mistake");
    assert!(!is_in_force && mistake.contains("config.toml:") && mistake.contains("cdi.spec_dirs"), "{json}");
    // A key that needs a restart, after a reload and after one more.
    for _ in 0..2 {
        reload(&node, "[cdi]\nspec_dirs = [\"/nowhere\"]\n");
        wait_until("the reload has succeeded", || condition(&node).1 == "NeedsRestart");
        let (is_true, _, message) = condition(&node);
        assert!(is_true && message.ends_with(": cdi.spec_dirs"), "{message}");
        let (is_in_force, text) = status(&node, &[]);
        assert!(!is_in_force && text.contains("after a restart of the daemon: cdi.spec_dirs"), "{text}");
        assert!(text.starts_with("configuration loaded by a reload, 20"), "{text}");
    }
    fs::remove_file(node.folder().join("conf.d/new.toml")).expect("the drop-in");
    assert!(status(&node, &[]).1.contains("  removed since  /"));
    reload(&node, "");
    wait_until("the first configuration is back", || condition(&node).1.is_empty());
    let (is_in_force, text) = status(&node, &[]);
    assert!(is_in_force, "{text}");
    let (is_in_force, text) = status(&node, &["now"]);
    assert!(!is_in_force && text.contains("now: nothing more is expected here"), "{text}");
    let (is_in_force, text) = status(&node, &["--state", "/nonexistent"]);
    assert!(!is_in_force && text.contains("ask the daemon at /nonexistent/control.sock"), "{text}");
    node.stop();
}

#[test]
fn a_runtime_handler_has_defaults_of_its_own() {
    let folder = std::env::temp_dir().join(format!("coracle-handlers-test-{}", std::process::id()));
    fs::create_dir_all(&folder).expect("a directory");
    fs::write(
        folder.join("radio.yaml"),
        "cdiVersion: '0.8.0'\nkind: vendor.test/radio\ndevices:\n- name: one\n  containerEdits: {env: [RADIO=one]}\n",
    )
    .expect("a file");
    let defaults = |device: &str| {
        let has_v2 = std::path::Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
        let cgroup = if has_v2 { "cgroup = [\"gpu=pids.max=77\"]\n" } else { "" };
        format!(
            "[cdi]\nspec_dirs = [{:?}]\n[runtime_handlers]\naliases = [\"gpu\", \"plain\"]\ncdi_devices = [\"gpu={device}\"]\n\
             annotations = [\"gpu=example.test/a=of the class\", \"gpu=example.test/b=b\"]\nseccomp = [\"gpu=runtime/default\"]\n\
             no_new_privileges = [\"gpu\"]\n{cgroup}",
            folder.display().to_string()
        )
    };
    let node = Node::with(Options { config: defaults("vendor.test/radio=one"), ..Options::default() });
    let image = node.import_probe();
    let sees = |handler: &str, is_privileged: bool| {
        let mut pod = host_pod(&format!("of-{handler}-{is_privileged}"));
        pod.log_directory = node.log_directory(&format!("{handler}-{is_privileged}"));
        let context = pod.linux.as_mut().and_then(|linux| linux.security_context.as_mut());
        context.expect("a context").privileged = is_privileged;
        let mut request = run(&pod);
        request.runtime_handler = handler.to_owned();
        let pod_id = node.run_pod_sandbox(request).expect("a pod").pod_sandbox_id;
        let mut config = container("one", &image, &["see", "env", "ids"], &pod);
        config.annotations.insert("example.test/a".into(), "of the pod".into());
        security(&mut config).privileged = is_privileged;
        let id = node.run_container(&pod_id, &config, &pod);
        node.exited(&id);
        (node.output(&id), node.container(&id).annotations)
    };
    let (seen, annotations) = sees("gpu", false);
    for line in ["RADIO=one", "ids NoNewPrivs 1", "ids Seccomp 2"] {
        assert!(seen.contains(line), "no {line} in {seen}");
    }
    assert_eq!(annotations["example.test/a"], "of the pod", "the request counts");
    assert_eq!(annotations["example.test/b"], "b");
    let (seen, _) = sees("gpu", true);
    for line in ["RADIO=one", "ids NoNewPrivs 0", "ids Seccomp 0"] {
        assert!(seen.contains(line), "privileged: no {line} in {seen}");
    }
    for handler in ["plain", ""] {
        let (seen, annotations) = sees(handler, false);
        assert!(!seen.contains("RADIO") && seen.contains("ids NoNewPrivs 0"), "{handler}: {seen}");
        assert!(!annotations.contains_key("example.test/b"), "{handler}: {annotations:?}");
    }
    // A device that does not exist: the container is refused, and the pod is not.
    reload(&node, &defaults("vendor.test/radio=two"));
    let pod = host_pod("unknown-device");
    wait_until("the reload is applied", || {
        status(&node, &[]).1.starts_with("configuration loaded by a reload")
    });
    let mut request = run(&pod);
    request.runtime_handler = "gpu".into();
    let pod_id = node.run_pod_sandbox(request).expect("a pod").pod_sandbox_id;
    let config = container("one", &image, &["true"], &pod);
    let refused = node.create_container(create(&pod_id, &config, &pod)).expect_err("no such device");
    assert!(refused.code() == Code::InvalidArgument && refused.message().contains("radio=two"), "{refused}");
    // A default of a handler that is not served is a mistake.
    reload(&node, "[runtime_handlers]\nno_new_privileges = [\"crnu\"]\n");
    wait_until("the reload has failed", || !condition(&node).0);
    assert!(condition(&node).2.contains("no_new_privileges: \"crnu\" is not in runtime_handlers.aliases"));
    node.stop();
    fs::remove_dir_all(folder).expect("it is ours");
}

/// Each reload answers an administrator: its mistakes are logged although the last reload had the same.
#[test]
fn each_refused_reload_names_its_mistakes() {
    let node = Node::start();
    let count = |text: &str| node.log().matches(text).count();
    for reloads in 1..=2 {
        reload(&node, "[cdi]\nspec_dirs = \"oops\"\n");
        wait_until("it is refused", || count("reload failed, keeping the old configuration") == reloads);
    }
    let named = node.log().lines().filter(|line| line.contains("spec_dirs")).count();
    assert_eq!(named, 2, "{}", node.log());
    node.stop();
}
