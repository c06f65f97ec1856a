//! Against a systemd of our own on a socket: what it says late, in another order, wrongly, or not at all.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::thread;

use super::*;

/// Answers one client by `script`, which is given the stream behind the authentication.
fn systemd(name: &str, script: impl FnOnce(BufReader<UnixStream>) + Send + 'static) -> PathBuf {
    let path = std::env::temp_dir().join(format!("coracle-scope-{}-{name}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path).unwrap();
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        assert!(line.starts_with("\0AUTH EXTERNAL "), "{line:?}");
        stream.write_all(b"OK 0123456789abcdef\r\n").unwrap();
        line.clear();
        reader.read_line(&mut line).unwrap();
        assert_eq!(line, "BEGIN\r\n");
        script(reader);
    });
    path
}

/// Takes a call; answers with its serial.
fn take_call(reader: &mut BufReader<UnixStream>) -> u32 {
    let mut head = [0; message::HEAD_BYTES];
    reader.read_exact(&mut head).unwrap();
    let mut rest = vec![0; message::length(&head).unwrap() - head.len()];
    reader.read_exact(&mut rest).unwrap();
    u32::from_le_bytes([head[8], head[9], head[10], head[11]])
}

/// A message with the fields `(code, type, text)` and maybe a reply's serial.
fn incoming(kind: u8, reply: u32, fields: &[(u8, &str, &str)], body: &[u8]) -> Vec<u8> {
    let mut out = Writer::default();
    out.byte(b'l').byte(kind).byte(0).byte(1).u32(body.len() as u32).u32(1);
    out.array(8, |array| {
        array.align(8).byte(5).signature("u").u32(reply);
        for (code, kind, text) in fields {
            array.align(8).byte(*code).signature(kind);
            if *kind == "g" {
                array.signature(text);
            } else {
                array.string(text);
            }
        }
    });
    out.align(8);
    let mut bytes = out.into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

fn text(value: &str) -> Vec<u8> {
    let mut body = Writer::default();
    body.string(value);
    body.into_bytes()
}

fn job_removed(job: &str, result: &str) -> Vec<u8> {
    let mut body = Writer::default();
    body.u32(1).string(job).string("a.scope").string(result);
    incoming(4, 0, &[(3, "s", "JobRemoved"), (8, "g", "uoss")], &body.into_bytes())
}

fn start_job() -> ScopeJob {
    let command = ScopeCommand::Start { slice: "a.slice".into(), description: "d".into(), pid: 1 };
    let properties = vec![
        ("TasksMax".into(), ScopeProperty::Number(9)),
        ("AllowedCPUs".into(), ScopeProperty::Mask(vec![1])),
    ];
    ScopeJob { unit: "a.scope".into(), command, properties }
}

fn ask(path: PathBuf, job: &ScopeJob) -> Result<(), Failure> {
    let bus = Bus::open(&path, false, Duration::from_secs(5));
    let outcome = bus.and_then(|mut bus| carry_out(&mut bus, job));
    let _ = std::fs::remove_file(path);
    outcome
}

#[test]
fn a_scope_is_started_when_its_job_is_done_whichever_message_comes_first() {
    for is_signal_first in [true, false] {
        let path = systemd(&format!("order-{is_signal_first}"), move |mut reader| {
            let subscribe = take_call(&mut reader);
            reader.get_mut().write_all(&incoming(2, subscribe, &[], &[])).unwrap();
            let start = take_call(&mut reader);
            let reply = incoming(2, start, &[(8, "g", "o")], &text("/job/7"));
            let mut messages = [job_removed("/job/7", "done"), reply];
            if !is_signal_first {
                messages.reverse();
            }
            reader.get_mut().write_all(&job_removed("/job/6", "failed")).unwrap();
            messages.iter().for_each(|message| reader.get_mut().write_all(message).unwrap());
        });
        assert_eq!(ask(path, &start_job()), Ok(()), "{is_signal_first}");
    }
}

#[test]
fn its_words_are_passed_on_and_what_is_gone_is_told_apart() {
    let refuse = |error: &'static str, words: &'static str| {
        systemd(error, move |mut reader| {
            let serial = take_call(&mut reader);
            reader
                .get_mut()
                .write_all(&incoming(3, serial, &[(4, "s", error), (8, "g", "s")], &text(words)))
                .unwrap();
        })
    };
    let set = ScopeJob { command: ScopeCommand::Set, ..start_job() };
    let failure =
        ask(refuse("org.freedesktop.systemd1.NoSuchUnit", "Unit a.scope not loaded."), &set).unwrap_err();
    assert_eq!(failure.kind, FailureKind::NotFound);
    assert!(failure.message.contains("SetUnitProperties: Unit a.scope not loaded."), "{}", failure.message);
    let failure = ask(refuse("org.freedesktop.DBus.Error.AccessDenied", "no"), &set).unwrap_err();
    assert_eq!(failure.kind, FailureKind::Internal);
}

#[test]
fn a_property_that_this_systemd_lacks_is_left_out_and_a_unit_that_is_gone_is_stopped() {
    let old = systemd("old", |mut reader| {
        let set = take_call(&mut reader);
        let words = text("Cannot set property OOMPolicy, or unknown property.");
        let error = [(4, "s", "org.freedesktop.DBus.Error.PropertyReadOnly"), (8, "g", "s")];
        reader.get_mut().write_all(&incoming(3, set, &error, &words)).unwrap();
        let again = take_call(&mut reader);
        reader.get_mut().write_all(&incoming(2, again, &[], &[])).unwrap();
    });
    let mut set = ScopeJob { command: ScopeCommand::Set, ..start_job() };
    set.properties.push((OOM_POLICY.into(), ScopeProperty::Text("kill".into())));
    assert_eq!(ask(old, &set), Ok(()));
    let gone = systemd("gone", |mut reader| {
        let subscribe = take_call(&mut reader);
        reader.get_mut().write_all(&incoming(2, subscribe, &[], &[])).unwrap();
        let stop = take_call(&mut reader);
        let error = [(4, "s", "org.freedesktop.systemd1.NoSuchUnit"), (8, "g", "s")];
        reader.get_mut().write_all(&incoming(3, stop, &error, &text("not loaded"))).unwrap();
    });
    assert_eq!(ask(gone, &ScopeJob { command: ScopeCommand::Stop, ..start_job() }), Ok(()));
}

#[test]
fn a_start_that_fails_an_answer_that_is_garbage_and_none_are_failures() {
    let failed = systemd("failed", |mut reader| {
        let subscribe = take_call(&mut reader);
        reader.get_mut().write_all(&incoming(2, subscribe, &[], &[])).unwrap();
        let start = take_call(&mut reader);
        reader.get_mut().write_all(&incoming(2, start, &[(8, "g", "o")], &text("/job/7"))).unwrap();
        reader.get_mut().write_all(&job_removed("/job/7", "failed")).unwrap();
    });
    let failure = ask(failed, &start_job()).unwrap_err();
    assert!(failure.message.contains("\"failed\""), "{}", failure.message);
    let garbage = systemd("garbage", |mut reader| {
        take_call(&mut reader);
        reader.get_mut().write_all(&[b'x'; 64]).unwrap();
    });
    assert_eq!(ask(garbage, &start_job()).unwrap_err().kind, FailureKind::Internal);
    let closed = systemd("closed", |mut reader| {
        take_call(&mut reader);
    });
    assert_eq!(ask(closed, &start_job()).unwrap_err().kind, FailureKind::Unavailable);
    let silent = systemd("silent", |mut reader| {
        take_call(&mut reader);
        let _ = reader.read(&mut [0]); // until the client gives up
    });
    let bus = Bus::open(&silent, false, Duration::from_millis(50))
        .and_then(|mut bus| carry_out(&mut bus, &start_job()));
    assert!(bus.unwrap_err().message.contains("does not answer"));
    let _ = std::fs::remove_file(silent);
    let nobody = Bus::open(std::path::Path::new("/nonexistent"), false, Duration::from_secs(1)).unwrap_err();
    assert_eq!(nobody.kind, FailureKind::Unavailable);
}
