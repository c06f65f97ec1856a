//! `coracle check` from outside on the machine that runs the tests, which can run pods; missing requirements
//! are reported.

use std::process::Command;

use coracle_tests::node::{Node, binaries};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use serde_json::Value;

use crate::{Folder, run, said};

fn check(folder: &Folder, config: &str, flags: &[&str]) -> (bool, String) {
    let file = folder.write("config.toml", config);
    let output =
        run(Command::new(binaries().join("coracle")).args(["check", "--config"]).arg(file).args(flags));
    (output.status.success(), said(&output))
}

/// A configuration with its own paths for everything.
fn own(folder: &Folder) -> String {
    let folder = folder.path().display();
    format!(
        "root = \"{folder}/root\"\nstate = \"{folder}/state\"\nlisten = \"unix://{folder}/sock\"\n\
         [cni]\nconf_dir = \"{folder}/cni\"\nbin_dirs = [\"{folder}/bin\"]\n\
         [nri]\nsocket_path = \"{folder}/nri.sock\"\n[registry]\nconfig = \"{folder}/registries.yaml\"\n"
    )
}

fn state(report: &str, name: &str) -> String {
    let report: Value = serde_json::from_str(report).unwrap_or_else(|error| panic!("{error}: {report}"));
    let needs = report["needs"].as_array().expect("needs");
    let need = needs.iter().find(|need| need["name"] == name).unwrap_or_else(|| panic!("{name}: {report}"));
    need["state"].as_str().expect("a state").to_owned()
}

#[test]
fn this_machine_meets_the_requirements() {
    let folder = Folder::new("check");
    let (is_fine, text) = check(&folder, &own(&folder), &[]);
    assert!(is_fine && text.contains("\npods can run\n"), "{text}");
    assert!(text.contains("have      overlayfs\n"), "{text}");
    assert!(text.contains("have      Linux 5.10: this is Linux "), "{text}");
    let (is_fine, json) = check(&folder, &own(&folder), &["--json"]);
    assert!(is_fine, "{json}");
    // One line per requirement, and the summary.
    let report: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(report["can_run_pods"], true);
    let count = text.lines().filter(|line| !line.starts_with("pages: ")).count();
    assert_eq!(report["needs"].as_array().expect("needs").len(), count - 1);
    for need in report["needs"].as_array().expect("needs") {
        let page = crate::workspace().join(need["page"].as_str().expect("a page"));
        let page = std::fs::read_to_string(page).expect("it is there");
        assert!(page.contains(&format!("| {} |", need["name"].as_str().expect("a name"))), "{need}");
    }
}

#[test]
fn without_its_programs_no_pod_runs() {
    let folder = Folder::new("programs");
    let config = format!("program_dir = \"{}/nowhere\"\n{}", folder.path().display(), own(&folder));
    let (is_fine, text) = check(&folder, &config, &[]);
    assert!(!is_fine && text.contains("see what is missing above\npages: "), "{text}");
    let line = text.lines().find(|line| line.contains("  programs")).expect("its line");
    assert!(line.starts_with("missing   programs: no ") && line.contains("/nowhere/coracle-pod"), "{line}");
}

#[test]
fn an_unsuitable_root_is_reported() {
    let folder = Folder::new("root");
    // /proc always exists, and cannot store layers.
    let (is_fine, json) = check(&folder, &own(&folder), &["--json", "--root", "/sys/kernel"]);
    assert_eq!(state(&json, "file system of root"), "unknown");
    assert!(is_fine, "an unknown state is no reason to refuse: {json}");
    assert_eq!(state(&json, "space in root"), "degraded");
}

#[test]
fn the_network_is_reported_with_its_plugins() {
    let folder = Folder::new("cni");
    let (_, text) = check(&folder, &own(&folder), &[]);
    assert!(text.contains("degraded  CNI network: no CNI configuration file in "), "{text}");
    let list = r#"{"cniVersion":"1.0.0","name":"pods","plugins":[{"type":"macvlan"},{"type":"tuning"}]}"#;
    folder.write("cni/10-pods.conflist", list);
    folder.write("bin/macvlan", "");
    let (is_fine, text) = check(&folder, &own(&folder), &[]);
    assert!(text.contains("have      CNI network: network pods of "), "{text}");
    assert!(text.contains("degraded  CNI plugins: no tuning; "), "{text}");
    assert!(is_fine, "pods on the node's network run all the same: {text}");
}

#[test]
fn mistakes_in_registries_yaml_are_named_with_their_line() {
    let folder = Folder::new("registries");
    folder.write("registries.yaml", "mirrors:\n  example.org:\n    endpoint:\n      - \"ftp://mirror\"\n");
    let (_, text) = check(&folder, &own(&folder), &[]);
    let line = text.lines().find(|line| line.contains("registries file")).expect("its line");
    assert!(line.starts_with("degraded") && line.contains("registries.yaml:4"), "{line}");
    folder.write("registries.yaml", "mirrors:\n  example.org:\n    endpoint:\n      - \"https://mirror\"\n");
    let (_, json) = check(&folder, &own(&folder), &["--json"]);
    assert_eq!(state(&json, "registries file"), "have");
}

#[test]
fn a_daemon_that_answers_is_fine_and_a_silent_one_is_not() {
    let node = Node::start();
    let folder = Folder::new("daemon");
    let state_directory = node.state().display().to_string();
    let listen = format!("unix://{}", node.socket().display());
    let (_, text) = check(&folder, &own(&folder), &["--state", &state_directory, "--listen", &listen]);
    assert!(text.contains("have      one daemon on root and state: a daemon answers at "), "{text}");
    let (_, json) = check(&folder, &own(&folder), &["--json", "--state", &state_directory]);
    assert_eq!(state(&json, "one daemon on root and state"), "degraded", "another socket, the same state");
    // For a configuration with another socket, its NRI socket counts as that of another runtime.
    let nri = node.nri().display().to_string();
    let (_, json) = check(&folder, &own(&folder), &["--json", "--nri-socket", &nri]);
    assert_eq!(state(&json, "no other runtime"), "degraded");
    node.stop();
}

/// A file that the daemon would call broken is no network, also where the built-in one is the default.
#[test]
fn a_broken_list_is_no_network_even_with_a_default() {
    let folder = Folder::new("broken-list");
    let config = own(&folder) + "[network]\ndefault = \"builtin\"\n";
    let (_, text) = check(&folder, &config, &[]);
    assert!(text.contains("have      CNI network: built in"), "{text}");
    folder.write("cni/10-x.conflist", "garbage");
    let (_, text) = check(&folder, &config, &[]);
    assert!(text.contains("degraded  CNI network: ") && text.contains("10-x.conflist: expected"), "{text}");
}

/// Another user may have every capability in the bounding set and can use none.
#[test]
fn a_user_without_capabilities_gets_the_answer_that_pods_cannot_run() {
    let folder = Folder::new("user");
    let file = folder.write("config.toml", &own(&folder));
    let output = run(Command::new("setpriv")
        .args(["--reuid", "1001", "--regid", "1001", "--clear-groups"])
        .arg(binaries().join("coracle"))
        .args(["check", "--config"])
        .arg(file));
    let text = said(&output);
    assert!(!output.status.success(), "{text}");
    assert!(text.contains("missing   CAP_SYS_ADMIN: not in effect for user 1001"), "{text}");
}

#[test]
fn certificates_and_hosts_files_are_checked() {
    let folder = Folder::new("tls");
    let here = folder.path().display().to_string();
    let config =
        own(&folder).replace("[registry]\n", &format!("[registry]\ncerts_dir = \"{here}/certs.d\"\n"));
    let line = |name: &str| {
        let (_, text) = check(&folder, &config, &[]);
        text.lines().find(|line| line.contains(name)).expect("its line").to_owned()
    };
    folder.write(
        "registries.yaml",
        &format!("configs:\n  example.org:\n    tls:\n      ca_file: {here}/no.pem\n"),
    );
    let found = line("registries file");
    assert!(found.starts_with("degraded") && found.contains("/no.pem: no such file"), "{found}");
    folder.write("no.pem", "no certificate");
    let found = line("registries file");
    assert!(found.starts_with("degraded") && found.contains("no certificate is in it"), "{found}");
    folder.write("registries.yaml", "");
    assert!(line("registries file").starts_with("have"));
    folder.write("certs.d/example.org/hosts.toml", "server = [\n");
    let found = line("registries file");
    assert!(found.starts_with("degraded") && found.contains("hosts.toml:"), "{found}");
}

/// Checks that no kind of file that cannot be read blocks a check, and that each is described in the words of the other
/// errors, never in the form of the standard library: `No such file or directory (os error 2)`.
#[test]
fn files_that_cannot_be_read_are_described_like_all_other_errors() {
    let folder = Folder::new("unreadable");
    let here = folder.path().display().to_string();
    folder.write("file", "");
    std::fs::create_dir(folder.path().join("directory")).expect("a folder");
    std::os::unix::fs::symlink("loop", folder.path().join("loop")).expect("a link");
    mkfifo(&folder.path().join("fifo"), Mode::S_IRWXU).expect("a FIFO");
    let settings = [
        "[registry]\nconfig = \"PATH\"\n",
        "[registry]\ncerts_dir = \"PATH\"\n",
        "[registry]\nconfig = \"HERE/registries.yaml\"\n",
        "[streaming]\ntls_cert_file = \"PATH\"\ntls_key_file = \"PATH\"\n",
        "[cni]\nconf_dir = \"PATH\"\n",
        "[nri]\nplugin_path = \"PATH\"\nplugin_config_path = \"PATH\"\n",
        "[image]\nimport_dir = \"PATH\"\n",
        "program_dir = \"PATH\"\n",
    ];
    let commands: [&[&str]; 3] =
        [&["check", "--config"], &["config", "check"], &["image", "explain", "example.org/a", "--config"]];
    let mut described = 0;
    for (path, words) in [
        ("absent", "no such file or directory"),
        ("file/below", "not a directory"),
        ("directory", "is a directory"),
        ("loop", "too many symbolic links"),
        ("fifo", ""),
    ] {
        let path = format!("{here}/{path}");
        folder.write(
            "registries.yaml",
            &format!("configs: {{\"example.org\": {{tls: {{ca_file: {path}, cert_file: {path}, key_file: {path}}}}}}}\n"),
        );
        let given = settings.iter().map(|setting| setting.replace("PATH", &path).replace("HERE", &here));
        let given = given.map(|setting| folder.write("config.toml", &setting)).map(|file| {
            let limit = ["--kill-after=5", "60"];
            let coracle = binaries().join("coracle");
            commands
                .map(|words| run(Command::new("timeout").args(limit).arg(&coracle).args(words).arg(&file)))
        });
        let mut asked = given.chain(std::iter::once(commands.map(|words| {
            run(Command::new("timeout").arg("60").arg(binaries().join("coracle")).args(words).arg(&path))
        })));
        let outputs: Vec<_> = asked.by_ref().flatten().collect();
        for output in &outputs {
            let text = said(output);
            assert_ne!(output.status.code(), Some(124), "{path}: it waits: {text}");
            assert!(!text.contains("os error"), "{path}: {text}");
            described += usize::from(!words.is_empty() && text.contains(words));
        }
        assert!(outputs.iter().any(|output| said(output).contains(words)), "{path}: nothing says {words:?}");
    }
    assert!(described > 10, "{described} descriptions");
}

/// `config check` reports what the daemon refuses, with the same text, and a configuration without a mistake
/// starts.
#[test]
fn config_check_knows_what_serve_refuses() {
    let folder = Folder::new("config-check");
    let builtin = "[network]\ndefault = \"builtin\"\n";
    let here = folder.path().display().to_string();
    let cases = [
        (format!("{builtin}subnets = [\"10.86.0.0/33\"]\n"), "subnet", true),
        (format!("{builtin}bridge = \"a-name-of-21-bytes-xxx\"\n"), "bridge", true),
        (format!("[streaming]\ntls_cert_file = \"{here}/a.pem\"\n"), "go together", true),
        (
            format!("[streaming]\ntls_cert_file = \"{here}/a.pem\"\ntls_key_file = \"{here}/a.key\"\n"),
            "a.pem",
            false,
        ),
    ];
    for (more, words, is_refused) in cases {
        let file = folder.write("config.toml", &(own(&folder) + &more));
        let coracle = || Command::new(binaries().join("coracle"));
        let output = run(coracle().args(["config", "check"]).arg(&file));
        assert_eq!(output.status.code(), Some(1), "{more}: {}", said(&output));
        assert!(said(&output).contains(words), "{more}: {}", said(&output));
        if is_refused {
            let output = run(Command::new(binaries().join("coracled")).arg("--config").arg(&file));
            assert_eq!(output.status.code(), Some(2), "{more}: {}", said(&output));
            assert!(said(&output).contains(words), "{more}: {}", said(&output));
        }
    }
    let file = folder.write("config.toml", &own(&folder));
    let output = run(Command::new(binaries().join("coracle")).args(["config", "check"]).arg(&file));
    assert!(output.status.success(), "{}", said(&output));
}
