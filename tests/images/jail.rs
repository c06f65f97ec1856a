//! The confined processes that parse untrusted archives, observed from outside while they run.

use std::fs;
use std::io::Write;
use std::process::{Command, Stdio};

use coracle_tests::host::{self, wait_for, wait_until};
use coracle_tests::image::Image;
use coracle_tests::layer::{Compression, Layer};
use coracle_tests::node::{Node, binaries};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::find;

/// Bits of capabilities(7): CHOWN, DAC_OVERRIDE, FOWNER, FSETID, MKNOD, SETFCAP.
const UNPACK: u64 = 1 | 1 << 1 | 1 << 3 | 1 << 4 | 1 << 27 | 1 << 31;

fn hexadecimal(pid: i32, key: &str) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(key));
    u64::from_str_radix(line.unwrap_or_default().trim(), 16).unwrap_or(u64::MAX)
}

/// A child of this node's workers with this command line, after its filter was set.
pub(crate) fn confined(node: &Node, words: &str) -> Option<i32> {
    let workers: Vec<u64> = node.workers().iter().map(|worker| worker.pid as u64).collect();
    let is_ours =
        |pid: i32| host::proc_value(pid, "status", "PPid").is_some_and(|parent| workers.contains(&parent));
    let children = host::processes(words);
    let pid = children.into_iter().map(|process| process.pid).find(|pid| is_ours(*pid))?;
    // Its worker has one filter, which it inherits.
    (host::proc_value(pid, "status", "Seccomp_filters") >= Some(2)).then_some(pid)
}

/// Asserts the confinement of both kinds of children.
fn assert_shut_in(node: &Node, pid: i32, capabilities: u64) {
    let value = |key| host::proc_value(pid, "status", key);
    assert_eq!((value("Seccomp"), value("NoNewPrivs"), value("Threads")), (Some(2), Some(1), Some(1)));
    for key in ["CapEff:", "CapPrm:", "CapBnd:"] {
        assert_eq!(hexadecimal(pid, key), capabilities, "{key}");
    }
    // The kernel ends it before a pod if memory is short: a zstd window has up to 512 MiB.
    let score = fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).expect("its score");
    assert_eq!(score.trim(), "500");
    assert_eq!(hexadecimal(pid, "CapInh:") | hexadecimal(pid, "CapAmb:"), 0);
    for kind in ["pid", "mnt", "net", "ipc", "uts", "cgroup"] {
        assert_ne!(host::namespace(pid, kind), host::namespace(node.pid(), kind), "{kind}");
    }
    // It has a PID in a nested PID namespace without processes of the node, so it can signal none.
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("its status");
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:")).expect("NSpid");
    assert_eq!(numbers.split_whitespace().last(), Some("1"), "{numbers}");
    let environment = fs::read(format!("/proc/{pid}/environ")).expect("its environment");
    assert!(environment.is_empty(), "{environment:?}");
}

/// Asserts that the process sees one directory only.
fn assert_sees_one_directory(pid: i32) {
    let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo")).expect("its mounts");
    assert_eq!(mounts.lines().count(), 1, "one directory and nothing else: {mounts}");
    let fields: Vec<&str> = mounts.split(' ').collect();
    assert!(fields[3].contains("/layers/tmp-") && fields[4] == "/", "{mounts}");
    for flag in ["nosuid", "nodev", "noexec"] {
        assert!(fields[5].contains(flag), "{flag}: {mounts}");
    }
    // The archive, its messages, the log, and files that it writes.
    for (number, target) in host::open_files(pid) {
        assert!(number < 3 || target.starts_with("/"), "inherited: {number}: {target:?}");
    }
}

/// Asserts that the process sees an empty, read-only root, its input and pipes.
fn assert_sees_nothing(pid: i32) {
    let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo")).expect("its mounts");
    assert_eq!(mounts.lines().count(), 1, "nothing else: {mounts}");
    assert!(
        mounts.contains(" - tmpfs ") && mounts.split(' ').nth(5).is_some_and(|flags| flags.starts_with("ro"))
    );
    assert_eq!(fs::read_dir(format!("/proc/{pid}/root")).expect("its root").count(), 0);
    for (number, target) in host::open_files(pid) {
        assert!(number < 3 || target.to_string_lossy().starts_with("pipe:"), "{number}: {target:?}");
    }
}

/// Stops a process while it is examined; `None` if it has ended.
fn hold(pid: i32) -> Option<i32> {
    kill(Pid::from_raw(pid), Signal::SIGSTOP).ok()?;
    let is_there = fs::read_to_string(format!("/proc/{pid}/mountinfo")).is_ok_and(|text| !text.is_empty());
    is_there.then_some(pid)
}

/// An archive parser without its own PID namespace, or without the privileges for its confinement, reports
/// what is missing and reads nothing. Regression: it logged an error and unpacked the layer.
#[test]
fn an_archive_is_not_parsed_without_complete_confinement() {
    let folder = std::env::temp_dir().join(format!("coracle-jail-{}", std::process::id()));
    let layer = Layer::new(&[coracle_tests::layer::Entry::file("taken", b"x")], Compression::Plain);
    for user in [0, 65534] {
        fs::create_dir_all(&folder).expect("a folder");
        std::os::unix::fs::chown(&folder, Some(user), Some(user)).expect("its owner");
        let archive = folder.join("layer.tar");
        fs::write(&archive, &layer.blob).expect("an archive");
        // A copy, because other users may not access the directory of the programs.
        let program = folder.join("coracle-worker");
        fs::copy(binaries().join("coracle-worker"), &program).expect("the program");
        // In a new mount namespace, because a worker takes the directory as its root.
        let output = Command::new("unshare")
            .args(["--mount", "--", "setpriv", "--clear-groups"])
            .args([format!("--reuid={user}"), format!("--regid={user}")])
            .arg(&program)
            .args(["confined", "unpack", "1000000", "100", "0", "0"])
            .current_dir(&folder)
            .stdin(fs::File::open(&archive).expect("the archive"))
            .output()
            .expect("unshare and setpriv of util-linux");
        assert!(!folder.join("taken").exists(), "user {user}: it was unpacked outside of a jail");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(said.contains("jail: ") && said.contains("PID namespace"), "user {user}: {said:?}");
        fs::remove_dir_all(&folder).expect("ours");
    }
}

#[test]
fn archive_parsers_see_one_directory_and_have_few_privileges() {
    let node = Node::start();
    let archive = Image::probe(&node.probe(), "slow").oci_archive("localhost/slow:1");
    // An archive that arrives slowly: a FIFO.
    let pipe = node.folder().join("slow.tar");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
    let mut import = Command::new(binaries().join("coracle"))
        .args(["image", "--state"])
        .arg(node.state())
        .arg("import")
        .arg(&pipe)
        .stdout(Stdio::null())
        .spawn()
        .expect("the program runs");
    let mut writer = fs::File::options().write(true).open(&pipe).expect("the import opens it");
    writer.write_all(&archive[..archive.len() / 2]).expect("half of it");
    let pid = wait_for("its reader is shut in", || confined(&node, "confined spool"));
    assert_shut_in(&node, pid, UNPACK);
    assert_sees_one_directory(pid);
    let pid = wait_for("its decompressor is shut in", || confined(&node, "confined decompress"));
    assert_shut_in(&node, pid, 0);
    assert_sees_nothing(pid);
    // Its worker has the privileges for the store, and no network.
    let worker = node.workers().first().expect("it runs").pid;
    assert_eq!(host::proc_value(worker, "status", "NoNewPrivs"), Some(1));
    assert_eq!(host::proc_value(worker, "status", "Seccomp"), Some(2));
    assert_eq!(
        hexadecimal(worker, "CapEff:") & (1 << 19 | 1 << 12 | 1 << 16),
        0,
        "no ptrace, network, modules"
    );
    assert_ne!(host::namespace(worker, "net"), host::namespace(node.pid(), "net"));
    writer.write_all(&archive[archive.len() / 2..]).expect("the rest");
    drop(writer);
    assert!(import.wait().expect("it ends").success());
    assert!(find(&node, "localhost/slow:1").is_some());
    node.stop();
}

#[test]
fn a_layer_parser_sees_only_its_layer() {
    let node = Node::start();
    // One large layer: both processes still run when they are examined on a busy machine.
    let image = Image::of(vec![Layer::bomb(256)]);
    let file = node.folder().join("big.tar");
    fs::write(&file, image.oci_archive("localhost/big:1")).expect("an archive");
    let mut import = Command::new(binaries().join("coracle"))
        .args(["image", "--state"])
        .arg(node.state())
        .arg("import")
        .arg(&file)
        .stdout(Stdio::null())
        .spawn()
        .expect("the program runs");
    // Only layers have an unpack process; the archive has a decompressor, too.
    let unpacks = wait_for("a layer is being unpacked", || hold(confined(&node, "confined unpack")?));
    // It is blocked, because its reader is stopped.
    let decompresses = wait_for("and decompressed", || hold(confined(&node, "confined decompress")?));
    assert_shut_in(&node, unpacks, UNPACK);
    assert_sees_one_directory(unpacks);
    assert_shut_in(&node, decompresses, 0);
    assert_sees_nothing(decompresses);
    for pid in [unpacks, decompresses] {
        kill(Pid::from_raw(pid), Signal::SIGCONT).expect("it is there");
    }
    assert!(import.wait().expect("it ends").success());
    assert!(find(&node, "localhost/big:1").is_some());
    wait_until("all confined children have ended", || confined(&node, "confined").is_none());
    node.stop();
}

/// A frame that requires more memory than a node has, and an archive with too many names: both end the parser
/// with a specific error and do not affect the node.
#[test]
fn archives_that_need_too_much_memory_are_refused() {
    let node = Node::start();
    let endless = coracle_tests::layer::pax_of(4 << 20);
    let packed = coracle_tests::layer::pack(&endless, Compression::Zstd);
    for (what, blob) in [("plain", endless.clone()), ("packed", packed)] {
        let mut layer = Layer::new(&[], Compression::Plain);
        layer.diff_id = coracle_tests::layer::digest(&endless);
        layer.blob = blob;
        let refused = node.try_import(&Image::of(vec![layer]).oci_archive("localhost/pax:1"));
        let error = refused.expect_err(what);
        assert!(error.contains("metadata of an entry is too long"), "{what}: {error}");
    }
    // The archive of the images itself.
    let error = node.try_import(&endless).expect_err("no archive of images");
    assert!(error.contains("metadata of an entry is too long"), "{error}");
    node.stop();
}
