//! The same directory tree as each program writes it that makes layers, or that people make them with: GNU tar, busybox, bsdtar
//! (libarchive) and Python's tarfile, in each of their formats. A program that this machine lacks is left out, with a line that
//! says so.

use std::process::{Command, Stdio};

use coracle_tests::node::base;

use crate::archive::Archive;

/// Makes the tree in the working directory. Names exceed what ustar (100 and 255 bytes) and v7 hold; times have fractions.
const TREE: &str = r#"
set -e
umask 022
mkdir -p d/empty d/sticky "d/with blank" d/ü
long=$(printf 'l%.0s' $(seq 120)); longer=$(printf 'm%.0s' $(seq 200))
mkdir -p "long/$longer/$longer"
echo content >d/file; echo x >"long/$long"; echo y >"long/$longer/$longer/deep"; echo z >d/ü/ä; : >d/none
head -c 70000 /dev/urandom >d/random
ln -s file d/link; ln -s "$longer/$longer/deep" long/link; ln d/file d/hard; ln "long/$long" long/hard
mkfifo d/fifo; mknod d/null c 1 3; mknod d/block b 7 1
truncate -s 3M d/sparse; echo middle | dd of=d/sparse bs=1 seek=1500000 conv=notrunc status=none
chmod 1777 d/sticky; chmod 4755 d/file; chmod 2750 "d/with blank"; chmod 0 d/none
chown 1000:1000 d/random; chown 3000000:4000000 d/sticky; chown -h 5:6 d/link
find . ! -type l -exec touch -d '2020-02-03 04:05:06.789012345' {} +
find . -type l -exec touch -h -d '2021-02-03 04:05:06' {} +
touch -d '1965-01-01' d/none; touch -d '2150-01-01' d/null
"#;

/// Python's writer; its arguments are the format and the directory.
const PYTHON: &str = "import sys, tarfile\n\
    out = tarfile.open(fileobj=sys.stdout.buffer, mode='w|', format=getattr(tarfile, sys.argv[1]))\n\
    out.add(sys.argv[2], arcname='.')\nout.close()";

pub(super) fn cases() -> Vec<(String, Vec<Archive>)> {
    let folder = base().join(format!("written-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a directory");
    let made = Command::new("sh").args(["-c", TREE]).current_dir(&folder).status().expect("sh");
    assert!(made.success(), "the tree");
    let place = folder.display().to_string();
    let mut cases = Vec::new();
    for (name, words) in writers(&place) {
        match written(&words) {
            Some(bytes) => cases.push((format!("written by {name}"), vec![Archive::written(bytes)])),
            None => println!("layers: without what {name} writes: it is not on this machine"),
        }
    }
    std::fs::remove_dir_all(&folder).expect("the directory is ours");
    cases
}

/// Names of the writers with their commands.
fn writers(place: &str) -> Vec<(String, Vec<String>)> {
    let mut all = Vec::new();
    let mut add = |name: String, words: &[&str]| {
        all.push((name, words.iter().map(|word| (*word).to_owned()).collect()));
    };
    for format in ["gnu", "oldgnu", "pax", "ustar", "v7"] {
        let option = format!("--format={format}");
        add(format!("GNU tar, {format}"), &["tar", "-C", place, &option, "-cf", "-", "."]);
    }
    for version in ["0.0", "0.1", "1.0"] {
        let option = format!("--sparse-version={version}");
        let words = ["tar", "-C", place, "--format=pax", "--sparse", &option, "-cf", "-", "."];
        add(format!("GNU tar, pax with sparse {version}"), &words);
    }
    let sparse = ["tar", "-C", place, "--format=gnu", "--sparse", "-cf", "-", "."];
    // The type of such an entry is known to GNU tar and libarchive only.
    add("GNU tar, GNU type of sparse files".to_owned(), &sparse);
    add("busybox".to_owned(), &["busybox", "tar", "-C", place, "-cf", "-", "."]);
    for format in ["pax", "rpax", "ustar", "gnutar", "v7"] {
        add(format!("bsdtar, {format}"), &["bsdtar", "-C", place, "--format", format, "-cf", "-", "."]);
    }
    for format in ["USTAR_FORMAT", "GNU_FORMAT", "PAX_FORMAT"] {
        add(format!("Python, {format}"), &["python3", "-c", PYTHON, format, place]);
    }
    all
}

/// The archive that a program writes to its standard output; `None`: it is missing. A program leaves out what its format cannot
/// hold, and says so by its exit code.
fn written(words: &[String]) -> Option<Vec<u8>> {
    if !crate::has_program(&words[0]) {
        return None;
    }
    let mut command = Command::new(&words[0]);
    let output = command.args(&words[1..]).stdin(Stdio::null()).output().expect("the program runs");
    assert!(!output.stdout.is_empty(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    Some(output.stdout)
}
