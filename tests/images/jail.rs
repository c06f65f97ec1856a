//! The processes that read what strangers packed, seen from outside while they do it.

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

/// A process of this node's workers with these words, once its filter is in force.
fn inmate(node: &Node, words: &str) -> Option<i32> {
    let workers: Vec<u64> = node.workers().iter().map(|worker| worker.pid as u64).collect();
    let is_ours =
        |pid: i32| host::proc_value(pid, "status", "PPid").is_some_and(|parent| workers.contains(&parent));
    let inmates = host::processes(words);
    let pid = inmates.into_iter().map(|process| process.pid).find(|pid| is_ours(*pid))?;
    // Its worker has one already, which it inherits.
    (host::proc_value(pid, "status", "Seccomp_filters") >= Some(2)).then_some(pid)
}

/// What both kinds of children have: nothing but what is asserted here is theirs.
fn assert_shut_in(node: &Node, pid: i32, capabilities: u64) {
    let value = |key| host::proc_value(pid, "status", key);
    assert_eq!((value("Seccomp"), value("NoNewPrivs"), value("Threads")), (Some(2), Some(1), Some(1)));
    for key in ["CapEff:", "CapPrm:", "CapBnd:"] {
        assert_eq!(hexadecimal(pid, key), capabilities, "{key}");
    }
    assert_eq!(hexadecimal(pid, "CapInh:") | hexadecimal(pid, "CapAmb:"), 0);
    for kind in ["pid", "mnt", "net", "ipc", "uts", "cgroup"] {
        assert_ne!(host::namespace(pid, kind), host::namespace(node.pid(), kind), "{kind}");
    }
    // Its own number in the innermost namespace: no process of the node has one there, so it can signal none.
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("its status");
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:")).expect("NSpid");
    assert_eq!(numbers.split_whitespace().last(), Some("1"), "{numbers}");
    let environment = fs::read(format!("/proc/{pid}/environ")).expect("its environment");
    assert!(environment.is_empty(), "{environment:?}");
}

/// One directory is all it sees.
fn assert_sees_one_directory(pid: i32) {
    let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo")).expect("its mounts");
    assert_eq!(mounts.lines().count(), 1, "one directory and nothing else: {mounts}");
    let fields: Vec<&str> = mounts.split(' ').collect();
    assert!(fields[3].contains("/layers/tmp-") && fields[4] == "/", "{mounts}");
    for flag in ["nosuid", "nodev", "noexec"] {
        assert!(fields[5].contains(flag), "{flag}: {mounts}");
    }
    // The archive, its words, the log; and what it writes.
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).expect("its descriptors").flatten() {
        let number: i32 = entry.file_name().to_string_lossy().parse().expect("a number");
        let target = fs::read_link(entry.path()).unwrap_or_default();
        assert!(number < 3 || target.starts_with("/"), "inherited: {number}: {target:?}");
    }
}

/// An empty, read-only root, its input, and pipes.
fn assert_sees_nothing(pid: i32) {
    let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo")).expect("its mounts");
    assert_eq!(mounts.lines().count(), 1, "nothing else: {mounts}");
    assert!(
        mounts.contains(" - tmpfs ") && mounts.split(' ').nth(5).is_some_and(|flags| flags.starts_with("ro"))
    );
    assert_eq!(fs::read_dir(format!("/proc/{pid}/root")).expect("its root").count(), 0);
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).expect("its descriptors").flatten() {
        let number: i32 = entry.file_name().to_string_lossy().parse().expect("a number");
        let target = fs::read_link(entry.path()).unwrap_or_default();
        assert!(number < 3 || target.to_string_lossy().starts_with("pipe:"), "{number}: {target:?}");
    }
}

/// Holds a process while it is looked at; one that ended first is none.
fn hold(pid: i32) -> Option<i32> {
    kill(Pid::from_raw(pid), Signal::SIGSTOP).ok()?;
    let is_there = fs::read_to_string(format!("/proc/{pid}/mountinfo")).is_ok_and(|text| !text.is_empty());
    is_there.then_some(pid)
}

/// Outside of a PID namespace of its own, and without the rights to make its jail, the reader of archives says what it lacks
/// and reads nothing. On 8e6441f it wrote "jail: it goes on without" and unpacked the layer.
#[test]
fn a_jail_that_is_not_whole_reads_nothing() {
    let folder = std::env::temp_dir().join(format!("coracle-jail-{}", std::process::id()));
    let layer = Layer::new(&[coracle_tests::layer::Entry::file("taken", b"x")], Compression::Plain);
    for user in [0, 65534] {
        fs::create_dir_all(&folder).expect("a folder");
        std::os::unix::fs::chown(&folder, Some(user), Some(user)).expect("its owner");
        let archive = folder.join("layer.tar");
        fs::write(&archive, &layer.blob).expect("an archive");
        // A copy: nobody else may look into the folder of the programs.
        let program = folder.join("coracle-worker");
        fs::copy(binaries().join("coracle-worker"), &program).expect("the program");
        // In a mount namespace of ours, for a worker that takes the folder for its root.
        let output = Command::new("unshare")
            .args(["--mount", "--", "setpriv", "--clear-groups"])
            .args([format!("--reuid={user}"), format!("--regid={user}")])
            .arg(&program)
            .args(["inmate", "unpack", "1000000", "100"])
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
fn who_reads_an_archive_sees_one_directory_and_may_do_little() {
    let node = Node::start();
    let archive = Image::probe(&node.probe(), "slow").oci_archive("localhost/slow:1");
    // An archive that comes slowly: a pipe with a name.
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
    let mut writer = fs::File::options().write(true).open(&pipe).expect("somebody reads it");
    writer.write_all(&archive[..archive.len() / 2]).expect("half of it");
    let pid = wait_for("its reader is shut in", || inmate(&node, "inmate spool"));
    assert_shut_in(&node, pid, UNPACK);
    assert_sees_one_directory(pid);
    let pid = wait_for("its decompressor is shut in", || inmate(&node, "inmate decompress"));
    assert_shut_in(&node, pid, 0);
    assert_sees_nothing(pid);
    // Its worker has what the store needs, and no network.
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
fn who_unpacks_a_layer_sees_that_layer_only() {
    let node = Node::start();
    // One layer, and large: both processes are still there when they are looked for on a busy machine, and no other layer's.
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
    // Only a layer has one; the archive has a decompressor, too.
    let unpacks = wait_for("a layer is being unpacked", || hold(inmate(&node, "inmate unpack")?));
    // It cannot get far: who writes to the pipe waits for who reads it.
    let decompresses = wait_for("and decompressed", || hold(inmate(&node, "inmate decompress")?));
    assert_shut_in(&node, unpacks, UNPACK);
    assert_sees_one_directory(unpacks);
    assert_shut_in(&node, decompresses, 0);
    assert_sees_nothing(decompresses);
    for pid in [unpacks, decompresses] {
        kill(Pid::from_raw(pid), Signal::SIGCONT).expect("it is there");
    }
    assert!(import.wait().expect("it ends").success());
    assert!(find(&node, "localhost/big:1").is_some());
    wait_until("nobody is left", || inmate(&node, "inmate").is_none());
    node.stop();
}

/// A frame that asks for more memory than a node has, and an archive whose names are longer than it: both end the reader,
/// not the node, and say so.
#[test]
fn what_wants_too_much_memory_is_refused() {
    let node = Node::start();
    let endless = coracle_tests::layer::pax_of(4 << 20);
    let packed = coracle_tests::layer::pack(&endless, Compression::Zstd);
    for (what, blob) in [("plain", endless.clone()), ("packed", packed)] {
        let mut layer = Layer::new(&[], Compression::Plain);
        layer.diff_id = coracle_tests::layer::digest(&endless);
        layer.blob = blob;
        let refused = node.try_import(&Image::of(vec![layer]).oci_archive("localhost/pax:1"));
        let error = refused.expect_err(what);
        assert!(error.contains("described too long"), "{what}: {error}");
    }
    // The archive of the images itself.
    let error = node.try_import(&endless).expect_err("no archive of images");
    assert!(error.contains("described too long"), "{error}");
    node.stop();
}
