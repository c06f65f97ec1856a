//! The log file: all its bytes, parsed like the kubelet does.

use std::fs;
use std::os::unix::fs::MetadataExt;

use coracle_tests::cri::proto::ReopenContainerLogRequest;
use coracle_tests::host;

use coracle_tests::pod_fixture::PodFixture;

/// Maximum content of one line of the file; containerd splits there, and tools rely on it.
const PIECE_BYTES_MAX: usize = 16 << 10;

/// Parses lines into (stream, tag, content) and checks their time stamps.
fn parse(text: &str) -> Vec<(String, String, String)> {
    let mut last = String::new();
    text.lines()
        .map(|line| {
            let mut words = line.splitn(4, ' ');
            let mut word = || words.next().unwrap_or_else(|| panic!("short line {line:?}")).to_owned();
            let (time, stream, tag, content) = (word(), word(), word(), word());
            assert!(time.len() == 30 && time.ends_with('Z'), "{time} has nine digits and is UTC");
            assert!(time >= last, "{time} after {last}");
            last = time;
            (stream, tag, content)
        })
        .collect()
}

#[test]
fn log_lines_have_the_tag_of_their_stream() {
    let fixture = PodFixture::start();
    let id = fixture.run(&fixture.config("one", &["both"]));
    let path = fixture.node.exited(&id).log_path;
    let mut lines = parse(&fs::read_to_string(&path).expect("a log"));
    lines.sort();
    let full = |stream: &str, text: &str| (stream.to_owned(), "F".to_owned(), text.to_owned());
    assert_eq!(lines, [full("stderr", "to stderr"), full("stdout", "to stdout")]);
    assert_eq!(fs::metadata(&path).expect("a log").mode() & 0o777, 0o640);
    fixture.node.stop();
}

#[test]
fn a_long_line_is_pieces_that_join_and_a_missing_newline_is_partial() {
    let fixture = PodFixture::start();
    let id = fixture.run(&fixture.config("long", &["lines", "3", "50000"]));
    let lines = parse(&fs::read_to_string(fixture.node.exited(&id).log_path).expect("a log"));
    assert!(lines.iter().all(|line| line.2.len() <= PIECE_BYTES_MAX));
    let joined: String =
        lines.iter().map(|line| format!("{}{}", line.2, if line.1 == "F" { "\n" } else { "" })).collect();
    assert_eq!(joined.lines().map(str::len).collect::<Vec<_>>(), [50_000; 3]);
    let id = fixture.run(&fixture.config("raw", &["raw", "no newline"]));
    let lines = parse(&fs::read_to_string(fixture.node.exited(&id).log_path).expect("a log"));
    assert_eq!(lines, [("stdout".to_owned(), "P".to_owned(), "no newline".to_owned())]);
    fixture.node.stop();
}

#[test]
fn the_log_is_complete_when_the_exit_is_reported() {
    let fixture = PodFixture::start();
    let id = fixture.run(&fixture.config("much", &["lines", "5000", "200"]));
    let lines = parse(&fs::read_to_string(fixture.node.exited(&id).log_path).expect("a log"));
    assert_eq!(lines.len(), 5000);
    for (index, line) in lines.iter().enumerate() {
        assert!(line.2.starts_with(&format!("{index:08} ")), "line {index}");
    }
    fixture.node.stop();
}

#[test]
fn no_line_is_lost_or_repeated_when_a_log_is_reopened() {
    let fixture = PodFixture::start();
    let id = fixture.run(&fixture.config("ticks", &["ticks", "1"]));
    let path = fixture.node.container(&id).log_path;
    let rotated: Vec<String> = (0..5).map(|index| format!("{path}.{index}")).collect();
    for old in &rotated {
        host::wait_until("some lines", || fs::metadata(&path).is_ok_and(|about| about.len() > 500));
        fs::rename(&path, old).expect("rotate");
        fixture
            .node
            .reopen_container_log(ReopenContainerLogRequest { container_id: id.clone() })
            .expect("reopen");
        assert!(fs::exists(&path).expect("a look"), "the new file is there when the answer is");
    }
    let stop = coracle_tests::cri::proto::StopContainerRequest { container_id: id.clone(), timeout: 0 };
    fixture.node.stop_container(stop).expect("stop");
    let all: String =
        rotated.iter().chain([&path]).map(|file| fs::read_to_string(file).expect("a log")).collect();
    for (index, line) in parse(&all).iter().enumerate() {
        assert_eq!(line.2, format!("tick {index}"));
    }
    fs::remove_file(&path).expect("the log");
    let reopen = ReopenContainerLogRequest { container_id: id };
    fixture.node.reopen_container_log(reopen).expect_err("it does not run");
    assert!(!fs::exists(&path).expect("a look"), "no file for a container that does not run");
    fixture.node.stop();
}
