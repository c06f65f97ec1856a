//! Programs that decide whether an image may be pulled (containerd's `io.containerd.image-verifier.v1.bindir`): the same programs beside both,
//! what they see, and whether the image is pulled. A table without random cases.

use std::fs;
use std::path::{Path, PathBuf};

use coracle_tests::host::{wait_until, write_program};
use coracle_tests::image::Image;
use coracle_tests::request::pull;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::Run;

/// Name of a case and its programs, each with its name and its script. A program without a script cannot be executed.
type Row = (&'static str, &'static [(&'static str, &'static str)]);

const ROWS: &[Row] = &[
    ("one accepts", &[("one", "echo signed by us")]),
    ("one accepts without a reason", &[("one", "")]),
    ("one refuses", &[("one", "echo not signed; exit 3")]),
    ("one is killed", &[("one", "kill -9 $$")]),
    ("all accept", &[("a", ""), ("b", ""), ("c", "")]),
    ("the second of three refuses", &[("c", ""), ("b", "exit 1"), ("a", "")]),
    (
        "the last of ten refuses",
        &[
            ("0", ""),
            ("1", ""),
            ("2", ""),
            ("3", ""),
            ("4", ""),
            ("5", ""),
            ("6", ""),
            ("7", ""),
            ("8", ""),
            ("9", "exit 1"),
        ],
    ),
    (
        "the last of eleven refuses",
        &[
            ("0", ""),
            ("1", ""),
            ("2", ""),
            ("3", ""),
            ("4", ""),
            ("5", ""),
            ("6", ""),
            ("7", ""),
            ("8", ""),
            ("9", ""),
            ("a", "exit 1"),
        ],
    ),
    ("one hangs", &[("one", "exec sleep 60")]),
    ("one hangs with a child", &[("one", "sleep 60; exit 0")]),
    ("one prints for ever", &[("one", "exec yes")]),
    ("one prints errors for ever", &[("one", "exec yes >&2")]),
    ("a long reason", &[("one", "head -c 100000 /dev/zero | tr '\\0' x")]),
    ("a long reason of a refusal", &[("one", "head -c 100000 /dev/zero | tr '\\0' x; exit 1")]),
    ("input is not read", &[("one", "exec <&-; exit 0")]),
    ("output is closed", &[("one", "exec >&- 2>&-; exit 0")]),
    ("a process is left behind", &[("one", "sleep 60 & exit 0")]),
    ("a file that cannot be executed", &[("one", ""), ("first", "TEXT")]),
    ("a hidden file that cannot be executed", &[("one", ""), (".text", "TEXT")]),
    ("an interpreter that is absent", &[("one", "INTERPRETER")]),
    ("no program", &[]),
];

pub(crate) fn run(run: &mut Run<'_>) {
    let folders = run.pair.folders();
    let directories = [folders.ours, folders.theirs].map(|folder| folder.join("verifiers"));
    let image = Image::probe(&run.pair.ours().probe(), "verified");
    let digest = run.pair.registry.push(&image, "verified", "1");
    let by_tag = run.pair.registry.name("verified", "1");
    let by_digest = format!("{}/verified@{digest}", run.pair.registry.address());
    configure(
        run,
        &format!("[image.policy]\nverifiers = {:?}\nverifier_timeout = \"2s\"\n", directories[0]),
        &by_tag,
    );
    for (what, programs) in ROWS {
        compare(run, what, &by_tag, &directories, programs);
    }
    compare(run, "one accepts a digest", &by_digest, &directories, ROWS[0].1);
    compare(run, "one refuses a digest", &by_digest, &directories, ROWS[2].1);
    directories.iter().for_each(|directory| fs::remove_dir_all(directory).expect("the directory is ours"));
    let answers = run.pair.each(|cri| told(&cri.pull_image(pull(&by_tag))));
    run.begin_case();
    run.compare("no directory: answer", &answers.ours.0, &answers.theirs.0, &answers.ours.1);
    configure(run, "", &by_tag);
}

/// Changes the configuration of coracle and waits for it.
fn configure(run: &Run<'_>, text: &str, name: &str) {
    let node = run.pair.ours();
    node.rewrite_config(text);
    kill(Pid::from_raw(node.pid()), Signal::SIGHUP).expect("the daemon is ours");
    wait_until("the configuration is read", || {
        let output = node.tool(&["image", "explain", name]).stdout;
        String::from_utf8_lossy(&output).contains("image.policy.verifiers") != text.is_empty()
    });
}

fn compare(run: &mut Run<'_>, what: &str, name: &str, directories: &[PathBuf; 2], programs: &[(&str, &str)]) {
    run.begin_case();
    directories.iter().for_each(|directory| write(directory, programs));
    let answers = run.pair.each(|cri| told(&cri.pull_image(pull(name))));
    let [ours, theirs] = directories
        .each_ref()
        .map(|directory| fs::read_to_string(directory.with_extension("seen")).unwrap_or_default());
    let input = format!("ours: {}\n                theirs: {}", answers.ours.1, answers.theirs.1);
    run.compare(&format!("{what}: answer"), &answers.ours.0, &answers.theirs.0, &input);
    run.compare(&format!("{what}: programs saw"), &ours, &theirs, &input);
}

/// Whether the image was pulled, and the text.
fn told<T>(answer: &Result<T, tonic::Status>) -> (String, String) {
    match answer {
        Ok(_) => ("pulled".to_owned(), String::new()),
        Err(status) => ("refused".to_owned(), status.message().chars().take(300).collect()),
    }
}

/// Replaces the programs of a directory, each of which writes its arguments and its input beside the directory.
fn write(directory: &Path, programs: &[(&str, &str)]) {
    let seen = directory.with_extension("seen");
    let _ = fs::remove_file(&seen);
    let _ = fs::remove_dir_all(directory);
    fs::create_dir(directory).expect("a directory");
    for (name, script) in programs {
        let path = directory.join(name);
        match *script {
            "TEXT" => fs::write(path, "text").expect("a file"),
            "INTERPRETER" => write_program(&path, "#!/absent/interpreter\n"),
            script => {
                let record = format!("(basename \"$0\"; echo \"$@\"; head -c 1000) >>{seen:?}");
                write_program(&path, &format!("#!/bin/sh\n{record}\n{script}\n"));
            }
        }
    }
}
