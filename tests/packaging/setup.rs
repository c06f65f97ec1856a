//! `coracle k3s` and `coracle kubeadm` from outside, on copies of directory trees as k3s and kubeadm v1.33 to v1.36 write them
//! (`trees/`): enabled, repeated, refused, interrupted, changed by a user, and restored. The files below var/lib/kubelet of
//! kubeadm v1.35.0 and v1.36.0 are those that `kubeadm init phase kubelet-start` of these versions wrote; all other trees are
//! written after the sources of the programs.

mod services;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use coracle_tests::containerd::Containerd;
use coracle_tests::image::{Image, program};
use coracle_tests::node::binaries;
use nix::sys::stat::Mode;
use serde_json::Value;

use crate::{Folder, run, said, workspace};

const OURS: &str = "unix:///run/coracle/coracle.sock";
const K3S_DROP_IN: &str = "etc/rancher/k3s/config.yaml.d/50-coracle.yaml";
const K3S_TOML: &str = "etc/coracle/conf.d/k3s.toml";
const ORDER: &str = "etc/systemd/system/k3s.service.d/50-coracle.conf";

/// Entry of a tree: kind and mode, and the content of a file or the target of a link.
type Entries = BTreeMap<PathBuf, (u32, Vec<u8>)>;

/// A copy of a tree.
struct Tree {
    folder: Folder,
    program: &'static str,
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a directory");
    for entry in fs::read_dir(from).expect("a tree").flatten() {
        let to = to.join(entry.file_name());
        match entry.file_type().expect("a type").is_dir() {
            true => copy(&entry.path(), &to),
            false => drop(fs::copy(entry.path(), to).expect("a file")),
        }
    }
}

fn collect(root: &Path, path: &Path, entries: &mut Entries) {
    for entry in fs::read_dir(path).expect("a directory").flatten() {
        let about = entry.path().symlink_metadata().expect("an entry");
        let content = match about.file_type() {
            kind if kind.is_file() => fs::read(entry.path()).expect("a file"),
            kind if kind.is_symlink() => {
                fs::read_link(entry.path()).expect("a link").into_os_string().into_encoded_bytes()
            }
            _ => Vec::new(),
        };
        let name = entry.path().strip_prefix(root).expect("it is below").to_owned();
        entries.insert(name, (about.mode(), content));
        if about.is_dir() {
            collect(root, &entry.path(), entries);
        }
    }
}

impl Tree {
    /// Copies the tree of `program` of a version.
    fn new(test: &str, program: &'static str, version: &str) -> Tree {
        let folder = Folder::new(&format!("setup-{program}-{test}-{version}"));
        let from = workspace().join(format!("tests/packaging/trees/{program}-{version}"));
        copy(&from, &folder.path().join("root"));
        Tree { folder, program }
    }

    fn root(&self) -> PathBuf {
        self.folder.path().join("root")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        self.folder.write(&format!("root/{name}"), text);
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    fn entries(&self) -> Entries {
        let mut entries = Entries::new();
        collect(&self.root(), &self.root(), &mut entries);
        entries
    }

    /// Runs a command; returns its exit code and output.
    fn run(&self, words: &[&str]) -> (i32, String) {
        let output = run(Command::new(binaries().join("coracle"))
            .arg(self.program)
            .args(words)
            .arg("--host-root")
            .arg(self.root()));
        (output.status.code().expect("it ended"), said(&output))
    }

    #[track_caller]
    fn succeeds(&self, words: &[&str]) -> String {
        let (code, text) = self.run(words);
        assert_eq!(code, 0, "{words:?}: {text}");
        text
    }

    /// The command is refused with this text, and nothing is changed.
    #[track_caller]
    fn refuses(&self, words: &[&str], expected: &str) {
        let before = self.entries();
        let (code, text) = self.run(words);
        assert_eq!(code, 1, "{words:?}: {text}");
        assert!(text.contains(expected), "{expected}: {text}");
        assert!(self.entries() == before, "{words:?} changed something: {text}");
    }
}

/// Runs `coracle config check` on the configuration in the tree.
fn config_check(tree: &Tree) {
    tree.write("etc/coracle/config.toml", "");
    let file = tree.path("etc/coracle/config.toml");
    let output = run(Command::new(binaries().join("coracle")).args(["config", "check"]).arg(&file));
    assert!(output.status.success(), "{}", said(&output));
    fs::remove_file(file).expect("the file");
}

/// Enables, repeats, and disables; between both `check` sees the tree.
fn there_and_back(tree: &Tree, check: impl Fn(&Tree)) {
    let before = tree.entries();
    let shown = tree.succeeds(&["enable", "--dry-run"]);
    assert!(shown.contains("would write /etc/coracle/setup/"), "{shown}");
    assert!(tree.entries() == before, "--dry-run changed something");
    assert_eq!(tree.run(&["status"]).0, 1);
    let said = tree.succeeds(&["enable"]);
    let would = |line: &str| line.starts_with("would ");
    assert_eq!(
        shown.lines().filter(|line| would(line)).count(),
        said.lines().take_while(|line| line.contains(" /")).count()
    );
    assert!(said.contains("now run:\n") && said.contains("systemctl daemon-reload"), "{said}");
    config_check(tree);
    check(tree);
    let enabled = tree.entries();
    assert!(tree.succeeds(&["enable"]).contains("nothing to change"));
    assert!(tree.entries() == enabled, "a second enable changed something");
    let status = tree.succeeds(&["status"]);
    assert!(status.starts_with(&format!("{}: enabled\n", tree.program)), "{status}");
    let shown = tree.succeeds(&["disable", "--dry-run"]);
    assert!(shown.contains("would remove /etc/coracle/setup/"), "{shown}");
    assert!(tree.entries() == enabled, "--dry-run changed something");
    tree.succeeds(&["disable"]);
    assert!(tree.entries() == before, "not restored");
    assert!(tree.succeeds(&["disable"]).contains("nothing to change"));
    assert_eq!(tree.run(&["status"]).0, 1);
}

#[test]
fn k3s_is_configured_by_drop_ins_and_restored() {
    for version in ["1.33", "1.34", "1.35", "1.36"] {
        let tree = Tree::new("k3s", "k3s", version);
        there_and_back(&tree, |tree| {
            assert!(tree.read(K3S_DROP_IN).ends_with(&format!("\ncontainer-runtime-endpoint: \"{OURS}\"\n")));
            let toml = tree.read(K3S_TOML);
            for line in [
                "conf_dir = \"/var/lib/rancher/k3s/agent/etc/cni/net.d\"",
                "bin_dirs = [\"/var/lib/rancher/k3s/data/cni\", \"/var/lib/rancher/k3s/data/current/bin\"]",
                "config = \"/etc/rancher/k3s/registries.yaml\"",
                "import_dir = \"/var/lib/rancher/k3s/agent/images\"",
                "driver = \"systemd\"",
            ] {
                assert!(toml.contains(line), "{line}: {toml}");
            }
            assert!(!toml.contains("containerd_socket"), "no containerd is installed: {toml}");
            assert!(tree.read(ORDER).ends_with("[Unit]\nAfter=coracle.service\nWants=coracle.service\n"));
            assert!(tree.read("etc/crictl.yaml").contains(OURS));
            let mode = fs::metadata(tree.path(K3S_DROP_IN)).expect("the drop-in").permissions().mode();
            assert_eq!(mode & 0o7777, 0o644);
        });
    }
}

#[test]
fn kubeadms_records_are_changed_and_restored() {
    let local = &["config.yaml", "instance-config.yaml"][..];
    for (version, files) in
        [("1.33", &["kubeadm-flags.env"][..]), ("1.34", local), ("1.35", local), ("1.36", local)]
    {
        let tree = Tree::new("kubeadm", "kubeadm", version);
        fs::set_permissions(tree.path("var/lib/kubelet/config.yaml"), fs::Permissions::from_mode(0o600))
            .expect("a mode");
        let before = tree.entries();
        there_and_back(&tree, |tree| {
            for (path, (mode, content)) in tree.entries() {
                let Some((old_mode, old)) = before.get(&path) else { continue };
                let name = path.file_name().expect("a name").to_str().expect("text");
                let is_changed = files.contains(&name) && path.starts_with("var/lib/kubelet");
                assert_eq!((content != *old, mode), (is_changed, *old_mode), "{}", path.display());
                if is_changed {
                    let text = String::from_utf8(content).expect("text");
                    assert!(text.contains(OURS) && !text.contains("/containerd.sock"), "{text}");
                    assert_eq!(text.lines().count(), String::from_utf8_lossy(old).lines().count(), "{text}");
                }
            }
            let toml = tree.read("etc/coracle/conf.d/kubeadm.toml");
            assert!(toml.contains("driver = \"systemd\""), "{toml}");
            assert!(
                toml.contains("containerd_socket = \"unix:///run/containerd/containerd.sock\""),
                "{toml}"
            );
        });
        let text = tree.succeeds(&["enable"]);
        assert!(text.contains("systemctl disable --now containerd"), "{text}");
        assert_eq!(text.contains("kubectl annotate node"), version == "1.33", "{text}");
    }
}

/// The store of a containerd 2.3.4 in the place of each program's own.
#[test]
fn images_of_the_old_containerd_are_listed_and_taken_over_by_a_step() {
    for (program_name, version, store) in [
        ("k3s", "1.34", "var/lib/rancher/k3s/agent/containerd"),
        ("kubeadm", "1.34", "var/lib/containerd"),
        ("kubeadm", "1.33", "srv/old containerd"),
    ] {
        let tree = Tree::new("images", program_name, version);
        let mut containerd = Containerd::start(tree.folder.path());
        let image = Image::probe(&program(&binaries()), "old");
        containerd.import(&image.oci_archive("localhost/whole:1"));
        let broken = Image::probe(&program(&binaries()), "broken");
        containerd.import(&broken.oci_archive("localhost/broken:1"));
        containerd.terminate();
        fs::remove_file(containerd.blob(&broken.id())).expect("a config");
        let place = tree.path(store);
        fs::create_dir_all(place.parent().expect("it is below")).expect("a directory");
        fs::rename(containerd.root(), &place).expect("the store");
        if store.starts_with("srv") {
            tree.write("etc/containerd/config.toml", "version = 3\nroot = '/srv/old containerd'\n[grpc]\n");
        }
        let before = tree.entries();
        let shown = tree.succeeds(&["enable", "--dry-run"]);
        let step = match store.contains(' ') {
            true => format!("coracle image take-over --from '/{store}'"),
            false => format!("coracle image take-over --from /{store}"),
        };
        let (restart, taken) = (shown.find("restart coracle"), shown.find(&step));
        assert!(restart.is_some() && restart < taken, "coracle runs before: {shown}");
        assert!(shown.contains("imports:\n    localhost/whole:1  "), "{shown}");
        assert!(shown.contains("pulled again:\n    localhost/broken:1: config sha256:"), "{shown}");
        let json: Value =
            serde_json::from_str(&tree.succeeds(&["enable", "-n", "-o", "json"])).expect("JSON");
        assert_eq!(json["images"].as_array().map(Vec::len), Some(2), "{json}");
        let shown = tree.succeeds(&["enable", "--dry-run", "--no-images"]);
        assert!(!shown.contains("take-over") && !shown.contains("localhost/"), "{shown}");
        assert!(tree.entries() == before, "--dry-run changed something");
        // A store that cannot be read does not prevent the change.
        let metadata = place.join("io.containerd.metadata.v1.bolt/meta.db");
        fs::write(&metadata, "rubbish").expect("another file");
        let shown = tree.succeeds(&["enable", "--dry-run"]);
        assert!(shown.contains("its images cannot be listed: ") && shown.contains("damaged"), "{shown}");
        assert!(tree.succeeds(&["enable"]).contains(&step));
        tree.succeeds(&["disable"]);
    }
}

/// A link as the store of the tree leads to a directory of the tree, never to one outside.
#[test]
fn a_store_outside_of_the_tree_is_not_read() {
    let tree = Tree::new("store-link", "kubeadm", "1.34");
    let outside = tree.folder.path().join("outside/io.containerd.metadata.v1.bolt");
    fs::create_dir_all(&outside).expect("a directory");
    fs::write(outside.join("meta.db"), "rubbish").expect("a file");
    symlink(tree.folder.path().join("outside"), tree.path("var/lib/containerd")).expect("a link");
    let shown = tree.succeeds(&["enable", "--dry-run"]);
    assert!(!shown.contains("take-over") && !shown.contains("cannot be listed"), "{shown}");
}

#[test]
fn an_upgrade_from_kubeadm_1_33_keeps_coracle_and_what_cannot_be_restored_is_named() {
    let tree = Tree::new("upgraded", "kubeadm", "1.33");
    tree.succeeds(&["enable"]);
    // kubeadm 1.34 moves the flag to instance-config.yaml and merges this file into config.yaml.
    tree.write("var/lib/kubelet/kubeadm-flags.env", "KUBELET_KUBEADM_ARGS=\"\"\n");
    tree.write("var/lib/kubelet/instance-config.yaml", &format!("containerRuntimeEndpoint: \"{OURS}\"\n"));
    let config = tree.read("var/lib/kubelet/config.yaml");
    tree.write(
        "var/lib/kubelet/config.yaml",
        &config.replace("Endpoint: \"\"", &format!("Endpoint: {OURS}")),
    );
    let status = tree.succeeds(&["status"]);
    assert!(status.contains("in place  /var/lib/kubelet/instance-config.yaml"), "{status}");
    let (code, text) = tree.run(&["disable"]);
    assert!(code == 1 && text.contains("kubeadm-flags.env: has 0 lines"), "{text}");
    assert!(text.contains("unix:///var/run/containerd/containerd.sock"), "the old value is named: {text}");
    assert!(tree.read("var/lib/kubelet/instance-config.yaml").contains(OURS));
}

#[test]
fn what_k3s_refuses_is_refused_first() {
    let config = "etc/rancher/k3s/config.yaml";
    for (name, text, expected) in [
        (config, "embedded-registry: true\n", "config.yaml:1: embedded-registry needs"),
        (config, "a: b\ndocker: true\n", "config.yaml:2: docker selects"),
        (config, "rootless: true\n", "rootless: coracle runs pods as root"),
        (
            config,
            "container-runtime-endpoint: /run/crio/crio.sock\n",
            "config.yaml:1: container-runtime-endpoint is /run/crio",
        ),
        (config, "a: [1\nb: 2\n", "config.yaml:2: "),
        (config, "a: 1\na: 2\n", "config.yaml:2: duplicate key"),
        (config, "data-dir: relative\n", "config.yaml:1: data-dir \"relative\" is not an absolute path"),
        (
            config,
            "kubelet-arg:\n- v=2\n- container-runtime-endpoint=/run/x\n",
            "config.yaml:3: the kubelet's runtime endpoint is /run/x",
        ),
        (config, "kubelet-arg: [cgroup-driver=none]\n", "cgroup driver \"none\""),
        (
            config,
            "image-service-endpoint: unix:///run/x.sock\n",
            "config.yaml:1: image-service-endpoint is unix:///run/x.sock",
        ),
        (
            config,
            "kubelet-arg: [image-service-endpoint=/run/x]\n",
            "config.yaml:1: the kubelet's runtime endpoint is /run/x",
        ),
        (
            "etc/rancher/k3s/config.yaml.d/99-x.yaml",
            "container-runtime-endpoint: \"\"\n",
            "99-x.yaml:1: container-runtime-endpoint is empty, and k3s reads it after 50-coracle.yaml",
        ),
        ("etc/rancher/k3s/registries.yaml", "mirrors: [broken\n", "registries.yaml:"),
        (
            "etc/coracle/config.toml",
            "[cgroup]\nparent = \"mine\"\n",
            "conf.d/k3s.toml: coracle would not start with it: cgroup.parent",
        ),
        ("etc/rancher/k3s/config.yaml.d/90.yml", "docker: true\n", "90.yml:1: docker selects"),
        (
            "etc/systemd/system/k3s.service.d/x.conf",
            "[Service]\nExecStart=\nExecStart=/usr/local/bin/k3s server --docker\n",
            "x.conf: docker selects",
        ),
        ("etc/default/k3s", "K3S_CONFIG_FILE=http://a/b\n", "http://a/b is not an absolute path"),
        (
            "var/lib/rancher/k3s/agent/etc/kubelet.conf.d/10.conf",
            "containerRuntimeEndpoint: unix:///run/x\n",
            "10.conf:1: the kubelet's runtime endpoint",
        ),
        (K3S_TOML, "[cni]\n", "k3s.toml: exists, and `coracle k3s enable` did not write it"),
        (K3S_DROP_IN, "a: b\n", "50-coracle.yaml: exists"),
        ("etc/coracle/config.toml", "listne = 1\n", "config.toml:1"),
    ] {
        let tree = Tree::new("refused", "k3s", "1.34");
        tree.write(name, text);
        tree.refuses(&["enable"], expected);
        let shown = if text == "listne = 1\n" { "config.toml:1" } else { "\"changes\":[]" };
        tree.refuses(&["enable", "--dry-run", "-o", "json"], shown);
    }
    let tree = Tree::new("missing", "k3s", "1.34");
    fs::remove_file(tree.path("usr/local/bin/k3s")).expect("the program");
    fs::remove_file(tree.path("etc/systemd/system/k3s.service")).expect("the unit");
    tree.refuses(&["enable"], "k3s is not installed");
}

#[test]
fn settings_that_would_override_the_endpoint_are_refused() {
    for (version, name, text, expected) in [
        (
            "1.34",
            "etc/default/kubelet",
            "KUBELET_EXTRA_ARGS=--container-runtime-endpoint=/run/x\n",
            "etc/default/kubelet: the kubelet's runtime",
        ),
        ("1.34", "var/lib/kubelet/config.yaml", "a: [1\n", "config.yaml:"),
        (
            "1.34",
            "var/lib/kubelet/config.yaml",
            "{containerRuntimeEndpoint: x}\n",
            "config.yaml:1: containerRuntimeEndpoint has an unusual form",
        ),
        (
            "1.34",
            "var/lib/kubelet/instance-config.yaml",
            "containerRuntimeEndpoint: [a]\n",
            "instance-config.yaml:1",
        ),
        (
            "1.33",
            "var/lib/kubelet/kubeadm-flags.env",
            "KUBELET_KUBEADM_ARGS=\"--container-runtime-endpoint a\"\n",
            "not joined by an equals sign",
        ),
    ] {
        let tree = Tree::new("refused", "kubeadm", version);
        tree.write(name, text);
        tree.refuses(&["enable"], expected);
    }
    let tree = Tree::new("missing", "kubeadm", "1.34");
    fs::remove_dir_all(tree.path("var/lib/kubelet")).expect("the directory");
    let text = tree.succeeds(&["enable"]);
    assert!(text.contains(&format!("kubeadm init --cri-socket {OURS}")), "{text}");
    tree.succeeds(&["disable"]);
    fs::remove_file(tree.path("usr/bin/kubeadm")).expect("the program");
    tree.refuses(&["enable"], "kubeadm is not installed");
}

#[test]
fn the_nodes_own_settings_are_used() {
    let tree = Tree::new("own", "k3s", "1.34");
    tree.write("etc/default/k3s", "K3S_CONFIG_FILE=/srv/k3s.yaml\n");
    tree.write(
        "srv/k3s.yaml",
        "data-dir: \"/data/a \\\"b\\\"\"\nprivate-registry: /srv/registries.yaml\nkubelet-arg+: cgroup-driver=cgroupfs\nembedded-registry: false\n",
    );
    tree.write("etc/coracle/config.toml", "listen = \"unix:///srv/c.sock\"\n");
    tree.write("etc/coracle/registries.yaml", "");
    tree.write("usr/bin/containerd", "");
    tree.write("run/k3s/containerd/io.containerd.runtime.v2.task/k8s.io/abc/config.json", "{}");
    tree.write("etc/crictl.yaml", "runtime-endpoint: unix:///run/k3s/containerd/containerd.sock\n");
    tree.write("usr/lib/systemd/system/k3s-agent.service", "[Service]\nExecStart=/usr/local/bin/k3s agent\n");
    let before = tree.entries();
    let text = tree.succeeds(&["enable"]);
    for expected in [
        "k8s.io: 1 containers of the old runtime run: drain the node first",
        "/etc/crictl.yaml:1: crictl's endpoint is unix:///run/k3s",
        "/etc/coracle/registries.yaml: no longer used",
        "systemctl restart k3s-agent",
    ] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    assert!(tree.read("srv/k3s.yaml.d/50-coracle.yaml").ends_with("endpoint: \"unix:///srv/c.sock\"\n"));
    assert!(tree.path("etc/systemd/system/k3s-agent.service.d/50-coracle.conf").exists());
    let toml = tree.read(K3S_TOML);
    for line in [
        "import_dir = \"/data/a \\\"b\\\"/agent/images\"",
        "config = \"/srv/registries.yaml\"",
        "driver = \"cgroupfs\"",
        "containerd_socket = \"unix:///run/containerd/containerd.sock\"",
    ] {
        assert!(toml.contains(line), "{line}: {toml}");
    }
    // Another socket: a second enable writes what changed, and only this.
    tree.write("etc/coracle/config.toml", "listen = \"unix:///srv/d.sock\"\n");
    let (code, text) = tree.run(&["status"]);
    assert!(code == 1 && text.contains("outdated  /srv/k3s.yaml.d/50-coracle.yaml"), "{text}");
    let text = tree.succeeds(&["enable"]);
    assert!(text.contains("changed /srv/k3s.yaml.d/50-coracle.yaml") && !text.contains("k3s.toml"), "{text}");
    tree.write("etc/coracle/config.toml", "listen = \"unix:///srv/c.sock\"\n");
    tree.succeeds(&["disable"]);
    assert!(tree.entries() == before, "not restored");
}

#[test]
fn a_file_that_was_changed_since_is_left_and_named() {
    let tree = Tree::new("changed", "k3s", "1.34");
    tree.succeeds(&["enable"]);
    let mine = tree.read(K3S_TOML) + "# mine\n";
    tree.write(K3S_TOML, &mine);
    let (code, status) = tree.run(&["status", "-o", "json"]);
    let status: Value = serde_json::from_str(status.lines().next().expect("a line")).expect("JSON");
    assert_eq!((code, status["state"].as_str()), (1, Some("partly enabled")), "{status}");
    let parts = status["parts"].as_array().expect("parts");
    let changed: Vec<_> = parts.iter().filter(|part| part["state"] == "changed").collect();
    assert!(changed.len() == 1 && changed[0]["path"] == format!("/{K3S_TOML}"), "{status}");
    tree.refuses(&["enable"], "k3s.toml: was changed since");
    let (code, text) = tree.run(&["disable"]);
    assert!(code == 1 && text.contains("k3s.toml: was changed since") && text.contains(": left"), "{text}");
    assert_eq!(tree.read(K3S_TOML), mine);
    assert!(!tree.path(K3S_DROP_IN).exists() && !tree.path(ORDER).exists(), "the others are removed");
    fs::remove_file(tree.path(K3S_TOML)).expect("the file");
    tree.succeeds(&["disable"]);
    assert!(!tree.path("etc/coracle").exists() && !tree.path("etc/rancher/k3s/config.yaml.d").exists());
}

#[test]
fn other_kinds_of_files_and_large_ones_are_refused_without_waiting() {
    let config = "etc/rancher/k3s/config.yaml";
    let tree = Tree::new("fifo", "k3s", "1.34");
    fs::remove_file(tree.path(config)).expect("the file");
    nix::unistd::mkfifo(&tree.path(config), Mode::from_bits_truncate(0o600)).expect("a FIFO");
    tree.refuses(&["enable"], "config.yaml: Fifo, not a regular file");
    fs::remove_file(tree.path(config)).expect("the FIFO");
    fs::File::create(tree.path(config)).and_then(|file| file.set_len(100 << 20)).expect("a sparse file");
    tree.refuses(&["enable"], "config.yaml: longer than 1048576 bytes");
    fs::write(tree.path(config), [b'a', b':', b' ', 0xff, b'\n']).expect("a file");
    tree.refuses(&["enable"], "config.yaml: not UTF-8");
    fs::remove_file(tree.path(config)).expect("the file");
    fs::create_dir(tree.path(config)).expect("a directory");
    tree.refuses(&["enable"], "config.yaml: Directory, not a regular file");
}

/// Symbolic links resolve below the root of the tree, and no file is written through one at the end of a path.
#[test]
fn symbolic_links_do_not_lead_out_of_the_tree() {
    let tree = Tree::new("links", "k3s", "1.34");
    let outside = tree.folder.path().join("outside");
    fs::create_dir(&outside).expect("a directory");
    fs::write(outside.join("victim"), "secret: 1\n").expect("a file");
    // Up and out, and by the absolute path of the directory outside.
    for target in ["../../../../../../outside", outside.to_str().expect("text")] {
        let link = tree.path("etc/rancher/k3s/config.yaml.d");
        symlink(target, &link).expect("a link");
        let (_, text) = tree.run(&["enable"]);
        let found: Vec<_> = fs::read_dir(&outside).expect("it is there").flatten().collect();
        assert_eq!(found.len(), 1, "{text}");
        tree.run(&["disable"]);
        fs::remove_file(&link).expect("the link");
    }
    symlink(outside.join("victim"), tree.path("etc/crictl.yaml")).expect("a link");
    let (code, text) = tree.run(&["enable"]);
    assert!(code == 1 && text.contains("/etc/crictl.yaml: Symlink, not a regular file"), "{text}");
    assert_eq!(fs::read_to_string(outside.join("victim")).expect("it is there"), "secret: 1\n");
    // The output names the files that were written before; a retry completes the change.
    assert!(text.contains(&format!("written /{K3S_TOML}")) && text.contains("repeat the command"), "{text}");
    assert!(!tree.path(K3S_DROP_IN).exists(), "the endpoint comes last");
    fs::remove_file(tree.path("etc/crictl.yaml")).expect("the link");
    let text = tree.succeeds(&["enable"]);
    assert!(text.contains(&format!("written /{K3S_DROP_IN}")) && !text.contains(K3S_TOML), "{text}");
    tree.succeeds(&["status"]);
}

/// A directory in which no file can be created, found in the middle of the changes.
#[test]
fn a_partial_failure_is_reported_and_completed_by_a_retry() {
    let tree = Tree::new("middle", "k3s", "1.34");
    let before = tree.entries();
    // A file where a directory should be.
    tree.write("etc/rancher/k3s/config.yaml.d", "");
    let (code, text) = tree.run(&["enable"]);
    assert!(code == 1 && text.contains("/etc/rancher/k3s/config.yaml.d"), "{text}");
    assert!(text.contains(&format!("written /{ORDER}")), "{text}");
    let (code, status) = tree.run(&["status"]);
    assert!(code == 1 && status.starts_with("k3s: partly enabled\n"), "{status}");
    fs::remove_file(tree.path("etc/rancher/k3s/config.yaml.d")).expect("the file");
    // A killed command leaves its temporary file.
    tree.write("etc/rancher/k3s/config.yaml.d/.50-coracle.yaml.coracle-new", "half");
    tree.succeeds(&["enable"]);
    tree.succeeds(&["disable"]);
    fs::remove_dir(tree.path("etc/rancher/k3s/config.yaml.d"))
        .expect("it was there before the second enable");
    assert!(tree.entries() == before, "not restored");
}

#[test]
fn invalid_arguments_of_setup_are_refused() {
    let tree = Tree::new("words", "k3s", "1.34");
    for (words, expected) in [
        (&["enable", "now"][..], "now: nothing more"),
        (&["enable", "-o", "yaml"], "--output yaml: text or json"),
        (&["enable", "--dry-rn"], "unknown option `--dry-rn`, did you mean `--dry-run`?"),
    ] {
        let (code, text) = tree.run(words);
        assert!(code == 2 && text.contains(expected), "{words:?}: {text}");
    }
    let text = tree.succeeds(&["enable", "-n", "-o", "json"]);
    let plan: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!((plan["dry_run"].as_bool(), plan["problems"].as_array().map(Vec::len)), (Some(true), Some(0)));
    let last = plan["changes"].as_array().and_then(|changes| changes.last()).expect("a change");
    assert_eq!(last["path"], format!("/{K3S_DROP_IN}"), "the endpoint comes last: {plan}");
}
