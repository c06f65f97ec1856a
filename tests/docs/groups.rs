//! The nodes on which lines run, except those about images: each test sets one group of `rules.toml` up, checks the
//! symptom that the page names, and runs the lines of the group.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use coracle_tests::cri::proto::{
    LinuxContainerResources, Mount, RunPodSandboxRequest, StartContainerRequest,
};
use coracle_tests::fresh_disk::FreshDisk;
use coracle_tests::host::wait_until;
use coracle_tests::image::Image;
use coracle_tests::layer::Entry;
use coracle_tests::mute_fs::MuteFs;
use coracle_tests::node::{Node, Options, binaries};
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::registry::Registry;
use coracle_tests::request::{bridge_pod, container, create, host_pod, run};

use crate::extract::Kind;
use crate::line_runner::{LineRunner, text_of};
use crate::pages::{blocks, read, workspace};

/// A pod of the name in the pages.
fn web() -> PodFixture {
    PodFixture::with(host_pod("web"))
}

/// A pod for crictl, in the file `other.json` of the directory.
fn write_other(runner: &LineRunner) {
    let pod = r#"{"metadata": {"name": "other", "namespace": "default", "uid": "other-1"},
        "linux": {"security_context": {"namespace_options": {"network": 2}}}}"#;
    fs::write(runner.folder().join("other.json"), pod).expect("a pod");
}

#[test]
fn documented_commands_run_on_a_node_with_a_pod() {
    let mut fixture = web();
    let containerd = format!("unix://{}/containerd.sock", fixture.node.folder().display());
    fixture.node.rewrite_config(&format!("[metrics]\ncontainerd_socket = \"{containerd}\"\n"));
    fixture.node.restart();
    let registry = Registry::start(fixture.node.folder());
    let image = Image::probe(&fixture.node.probe(), "shop");
    registry.push(&image, "shop", "1");
    let name = registry.name("shop", "1");
    fixture.node.pull_image(coracle_tests::request::pull(&name)).expect("pull");
    let config = container("app", &name, &["ticks", "50"], &fixture.pod);
    let id = fixture.run(&config);
    wait_until("a line of log", || fixture.node.output(&id).contains("tick 0"));
    let runner = LineRunner::of(&fixture.node)
        .with("IMAGE", &name)
        .with("IMAGE…", &name)
        .with("ID", &id)
        .with("CONTAINER", "app")
        .with("COMMAND…", "/probe print hello")
        .with("NAME", "web")
        .with("FILE", "file.tar")
        .with("FILE…", "all.tar file.tar");
    write_other(&runner);
    let plain = image.repacked(
        &coracle_tests::image::probe_entries(&fixture.node.probe()),
        coracle_tests::layer::Compression::Plain,
    );
    for name in ["busybox.tar", "all.tar", "file.tar"] {
        fs::write(runner.folder().join(name), plain.docker_archive(&["localhost/archived:1"])).expect("ours");
    }
    runner.run_group("running");
    fixture.node.stop();
}

#[test]
fn lines_that_remove_all_pods_leave_none() {
    let fixture = web();
    fixture.run(&fixture.config("app", &["sleep", "forever"]));
    let runner = LineRunner::of(&fixture.node);
    write_other(&runner);
    runner.run_group("emptied");
    fixture.node.stop();
}

/// The make targets exist; tests and CI run them.
#[test]
fn lines_of_make_name_targets() {
    LineRunner::workspace().run_group("tree");
}

/// The tree of a release in an archive of the name that `packaging/dist` gives it, compressed less, which saves a minute.
#[test]
fn lines_about_a_release_run_on_an_unpacked_archive() {
    let node = Node::start();
    let runner = LineRunner::of(&node);
    assert!(read("packaging/dist").contains("name=coracle-$version-$triple\n"));
    let triple = format!("{}-unknown-linux-musl", std::env::consts::ARCH);
    let name = format!("coracle-{}-{triple}", env!("CARGO_PKG_VERSION"));
    let made = Command::new(workspace().join("packaging/tree"))
        .arg(&triple)
        .arg(runner.folder().join(&name))
        .env("CORACLE_PROGRAMS", binaries())
        .current_dir(workspace())
        .output()
        .expect("packaging/tree");
    assert!(made.status.success(), "{}", text_of(&made));
    let packed = runner.run(&format!("tar -c {name} | gzip -1 >{name}.tar.gz && rm -r {name}"));
    assert!(packed.status.success(), "{}", text_of(&packed));
    let runner = runner.with("coracle-VERSION-TRIPLE", name).with("/usr/share/", "slash/usr/share/");
    runner.run_group("release");
    node.stop();
}

#[test]
fn a_mistake_in_the_configuration_is_named_and_ends_the_daemon() {
    let node = Node::start();
    let config = node.folder().join("config.toml");
    let valid = fs::read_to_string(&config).expect("the configuration");
    fs::write(&config, format!("listens = \"unix:///x\"\n{valid}")).expect("our file");
    let runner = LineRunner::of(&node);
    runner.run_group("mistake");
    for command in ["coracled", "coracle serve"] {
        let serve = runner.run(command);
        assert_eq!(serve.status.code(), Some(2), "{command}: {}", text_of(&serve));
    }
    fs::write(&config, valid).expect("our file");
    node.stop();
}

#[test]
fn a_second_daemon_on_the_same_state_ends_and_check_names_the_first() {
    let node = Node::start();
    let runner = LineRunner::of(&node);
    let other = format!("unix://{}/other.sock", node.folder().display());
    let serve = runner.run(&format!("coracle serve --listen {other}"));
    assert!(text_of(&serve).contains("another daemon runs on this state directory"), "{}", text_of(&serve));
    let program = runner.folder().join("bin/coracle");
    let script = fs::read_to_string(&program).expect("a script");
    let endpoint = format!("unix://{}", node.socket().display());
    fs::write(&program, script.replace(&endpoint, &other)).expect("our file");
    runner.run_group("second");
    node.stop();
}

/// The daemon sees no `/run/systemd`, also if this machine runs systemd.
#[test]
fn the_systemd_driver_is_refused_without_systemd() {
    let mut node = Node::start();
    let config = node.folder().join("config.toml");
    let valid = fs::read_to_string(&config).expect("the configuration");
    fs::write(&config, valid.replace("\"cgroupfs\"", "\"systemd\"")).expect("our file");
    let hide = "! test -d /run/systemd || mount -t tmpfs tmpfs /run/systemd; exec \"$@\"";
    let hidden = ["unshare", "--mount", "--propagation", "private", "sh", "-c"];
    let runner = LineRunner::of(&node).wrapped(&[&hidden[..], &[hide, "sh"]].concat());
    // The name of the node's cgroup is not that of a slice.
    let program = runner.folder().join("bin/coracle");
    let script = fs::read_to_string(&program).expect("a script");
    let parent = format!("--cgroup-parent {}", node.cgroup_parent());
    fs::write(&program, script.replace(&parent, "")).expect("our file");
    runner.run_group("without-systemd");
    fs::write(&config, valid).expect("our file");
    node.restart();
    node.stop();
}

#[test]
fn a_damaged_record_is_in_quarantine() {
    let mut node = Node::start();
    let pod_id = node.run_pod(&host_pod("web"));
    node.kill9();
    let record = node.root().join("pods").join(&pod_id).join("record");
    let bytes = fs::read(&record).expect("the record");
    fs::write(&record, &bytes[..bytes.len() / 2]).expect("our file");
    node.launch();
    LineRunner::of(&node).run_group("damaged");
    node.stop();
}

#[test]
fn a_read_only_root_is_reported() {
    let folder = coracle_tests::node::base().join(format!("docs-{}", std::process::id()));
    fs::create_dir_all(&folder).expect("a folder");
    let disk = FreshDisk::new(&folder, 64);
    let node = Node::with(Options { root: Some(disk.path().join("root")), ..Options::default() });
    let remount = |how: &str| {
        let words = ["-o", &format!("remount,{how}"), disk.path().to_str().expect("a path")];
        assert!(Command::new("mount").args(words).status().expect("mount").success());
    };
    remount("ro");
    LineRunner::of(&node).run_group("read-only");
    remount("rw");
    node.stop();
    drop(disk);
    fs::remove_dir_all(folder).expect("it is ours");
}

#[test]
fn a_node_without_a_network_says_so() {
    let node = Node::start();
    LineRunner::of(&node).run_group("no-network");
    let refused = node.run_pod_sandbox(run(&bridge_pod("web"))).expect_err("there is no network");
    assert!(refused.message().contains("cni plugin not initialized"), "{refused}");
    node.stop();
}

#[test]
fn an_absent_plugin_is_named() {
    let node = Node::start();
    let list = r#"{"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "absent"}]}"#;
    fs::write(node.cni().join("10-pods.conflist"), list).expect("a network");
    LineRunner::of(&node).run_group("absent-plugin");
    node.stop();
}

#[test]
fn an_unknown_handler_is_refused_and_info_lists_the_known_ones() {
    let node = Node::start();
    let request = RunPodSandboxRequest { runtime_handler: "gvisor".into(), ..run(&host_pod("web")) };
    let refused = node.run_pod_sandbox(request).expect_err("no such handler");
    let words = ["runtime_handler: no runtime for", "is configured"];
    assert!(words.iter().all(|part| refused.message().contains(part)), "{refused}");
    LineRunner::of(&node).run_group("handler");
    node.stop();
}

/// The name of a pod is held until its sandbox is removed.
#[test]
fn a_held_name_is_shown_with_its_pod() {
    let node = Node::start();
    let pod = host_pod("web");
    node.run_pod(&pod);
    let mut other = pod.clone();
    other.hostname = String::new();
    other.labels.insert("another".into(), "configuration".into());
    let refused = node.run_pod_sandbox(run(&other)).expect_err("it is held");
    assert!(refused.message().contains("the name is held by "), "{refused}");
    LineRunner::of(&node).run_group("held");
    node.stop();
}

/// In a network namespace of their own, whose forwarding is off, and a mount namespace with their own /etc.
#[test]
fn lines_about_forwarding_run_in_a_network_of_their_own() {
    let node = Node::start();
    let off = "echo 0 >/proc/sys/net/ipv4/ip_forward; exec \"$@\"";
    let unshared = ["unshare", "--net", "sh", "-c", off, "sh"];
    LineRunner::of(&node).wrapped(&unshared).run_group("forwarding");
    node.stop();
}

/// The daemon has a network namespace of its own, because the table of that of the machine is used by other tests, too.
#[test]
fn rules_of_pods_are_deleted_and_made_again_for_the_next_pod() {
    let private = ["unshare", "--net", "sh", "-c", "ip link set lo up; exec \"$@\"", "sh"];
    let wrapper = private.map(str::to_owned).into();
    let node = Node::with(Options { wrapper, ..Options::default() });
    let list = serde_json::json!({
        "cniVersion": "1.0.0", "name": "pods",
        "plugins": [{ "type": "bridge", "bridge": node.bridge(), "isGateway": true, "ipMasq": true,
            "ipam": { "type": "host-local", "dataDir": node.folder().join("leases"),
                      "ranges": [[{ "subnet": format!("{}.0/24", node.subnet()) }]] } }],
    });
    fs::write(node.cni().join("10-pods.conflist"), list.to_string()).expect("a network");
    let namespace = format!("--net=/proc/{}/ns/net", node.pid());
    let runner = LineRunner::of(&node).wrapped(&["nsenter", &namespace]);
    let rules = || text_of(&runner.run("nft list ruleset"));
    wait_until("the network is configured", || {
        text_of(&runner.run("crictl info | grep -B3 NetworkReady")).contains("\"status\": true")
    });
    let first = node.run_pod(&bridge_pod("web"));
    assert!(rules().contains(&first), "{}", rules());
    runner.run_group("rules");
    assert!(!rules().contains("table ip coracle"), "{}", rules());
    let second = node.run_pod(&bridge_pod("other"));
    assert!(rules().contains(&second), "{}", rules());
    node.remove_pod(&first);
    node.remove_pod(&second);
    node.stop();
}

/// kubeadm has a network, /etc/kubernetes and /var/lib/kubelet of its own here, and no init system that it could ask to stop a
/// kubelet. `init` and `join` run all phases with `--dry-run`, in which kubeadm checks the runtime but asks no API server, and
/// where a token of its own source is that of the cluster.
#[test]
#[ignore = "needs kubeadm: make test-all PARTS=packaging"]
fn lines_of_kubeadm_use_the_socket_of_the_node() {
    let node = Node::start();
    let pod_id = node.run_pod(&host_pod("web"));
    let own = "for at in /etc /var/lib; do
mount -t tmpfs tmpfs /mnt && mkdir /mnt/upper /mnt/work
mount -t overlay overlay -o lowerdir=$at,upperdir=/mnt/upper,workdir=/mnt/work $at && umount /mnt
done
mkdir -p /etc/kubernetes /var/lib/kubelet
mount -t tmpfs tmpfs /etc/kubernetes && mount -t tmpfs tmpfs /var/lib/kubelet
rm -f /etc/resolv.conf && : >/etc/resolv.conf
ip link set lo up && ip link add node type bridge && ip link set node up
ip address add 192.0.2.2/24 dev node && ip route add default via 192.0.2.1
exec \"$@\"";
    let wrapper = ["unshare", "--mount", "--net", "--propagation", "private", "sh", "-ec", own, "sh"];
    // What kubeadm requires of the machine, and nothing of what it requires of the runtime.
    let ignored = "--ignore-preflight-errors=SystemVerification,Swap,NumCPU,Mem,\
        FileContent--proc-sys-net-bridge-bridge-nf-call-iptables,FileContent--proc-sys-net-ipv4-ip_forward";
    let runner = LineRunner::of(&node).with("IGNORED", ignored).wrapped(&wrapper);
    let program = runner.folder().join("bin/systemctl");
    fs::write(&program, "#!/bin/sh\nexit 4\n").expect("a script");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("our file");
    runner.run_group("kubeadm");
    assert!(
        !node.list_pod_sandbox(Default::default()).expect("list").items.iter().any(|pod| pod.id == pod_id)
    );
    node.stop();
}

#[test]
fn programs_that_cannot_be_executed_are_shown() {
    let fixture = web();
    let entries = [Entry::program("garbage", b"\x7fELF but not for this machine")];
    let image = Image::probe(&fixture.node.probe(), "broken")
        .plus(coracle_tests::layer::Layer::new(&entries, coracle_tests::layer::Compression::Gzip));
    fixture.node.try_import(&image.oci_archive("localhost/broken:1")).expect("import");
    let mut last = String::new();
    for (command, symptom) in
        [("/garbage", "exec format error"), ("/app", "exec: \"/app\": no such file or directory")]
    {
        let mut config = container(&command[1..], "localhost/broken:1", &[], &fixture.pod);
        config.command = vec![command.into()];
        last = fixture.create(&config);
        let start = StartContainerRequest { container_id: last.clone() };
        let refused = fixture.node.start_container(start).expect_err(command);
        assert!(refused.message().contains(symptom), "{refused}");
    }
    LineRunner::of(&fixture.node).with("ID", &last).run_group("programs");
    fixture.node.stop();
}

/// The guest of the lines under systemd has no FUSE, so the journal is the node's log here.
#[test]
fn a_volume_that_does_not_respond_is_named() {
    let fixture = web();
    let mute = MuteFs::mount(&fixture.node.folder().join("mute"));
    mute.fall_silent();
    let mut config = fixture.config("app", &["true"]);
    config.mounts.push(Mount {
        container_path: "/volume".into(),
        host_path: format!("{}/below", mute.path()),
        ..Default::default()
    });
    let request = create(&fixture.pod_id, &config, &fixture.pod);
    let refused = fixture.node.create_container(request).expect_err("it does not respond");
    assert_eq!(refused.code(), tonic::Code::DeadlineExceeded, "{refused}");
    LineRunner::of(&fixture.node)
        .with("DAEMON_LOG", fixture.node.folder().join("daemon.log").display())
        .run_group("mute");
    drop(mute);
    fixture.node.stop();
}

#[test]
fn a_container_that_used_too_much_memory_is_explained() {
    let fixture = web();
    let mut config = fixture.config("app", &["burn", "256"]);
    let limit = LinuxContainerResources { memory_limit_in_bytes: 32 << 20, ..Default::default() };
    config.linux.as_mut().expect("set").resources = Some(limit);
    let id = fixture.run(&config);
    fixture.node.exited(&id);
    LineRunner::of(&fixture.node).run_group("oom");
    fixture.node.stop();
}

#[test]
fn a_certificate_that_cannot_be_read_is_named() {
    let node = Node::start();
    let keys = "[streaming]\ntls_cert_file = \"/nowhere/a.pem\"\ntls_key_file = \"/nowhere/a.key\"\n";
    node.rewrite_config(keys);
    LineRunner::of(&node).run_group("certificate");
    node.rewrite_config("");
    node.stop();
}

#[test]
fn check_without_programs_prints_what_the_page_shows() {
    let node = Node::start();
    let programs = node.folder().join("programs");
    fs::create_dir(&programs).expect("a folder");
    fs::copy(binaries().join("coracle-worker"), programs.join("coracle-worker"))
        .expect("one of two programs");
    node.rewrite_config(&format!("program_dir = \"{}\"\n", programs.display()));
    LineRunner::of(&node).run_group("without-programs");
    node.rewrite_config("");
    node.stop();
}

/// Sections of coracle's configuration; other TOML has no runner in these pages.
#[test]
fn configurations_of_the_pages_are_valid() {
    let node = Node::start();
    let runner = LineRunner::of(&node);
    let found = blocks(Kind::Toml);
    // The key of a site is read, too.
    let key = runner.folder().join("site.key");
    fs::write(&key, "0".repeat(64)).expect("our file");
    for (page, group) in &found {
        let file = runner.folder().join("page.toml");
        let text = group.lines.join("\n").replace("/etc/coracle/site.key", &key.to_string_lossy());
        fs::write(&file, text).expect("our file");
        let checked = Command::new(binaries().join("coracle")).args(["config", "check"]).arg(&file).output();
        let checked = checked.expect("the program runs");
        assert!(checked.status.success(), "{page}:{}: {}", group.number, text_of(&checked));
    }
    assert!(found.len() > 5, "{} blocks", found.len());
    node.stop();
}
