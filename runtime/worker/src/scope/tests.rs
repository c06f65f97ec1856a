//! Against a systemd of our own, on a socket of its own and behind a bus: what it says late, in another order, wrongly, or
//! not at all.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread;

use zbus::blocking::connection::Builder;
use zbus::blocking::{Connection, MessageIterator};
use zbus::zvariant::{ObjectPath, OwnedValue, Value};
use zbus::{Guid, Message};

use super::*;

const PATH: &str = "/org/freedesktop/systemd1";
const INTERFACE: &str = "org.freedesktop.systemd1.Manager";
/// systemd's name on our bus.
const OWNER: &str = ":1.1";
const BUS_VARIABLE: &str = "DBUS_SYSTEM_BUS_ADDRESS";

fn listener(name: &str) -> (PathBuf, UnixListener) {
    let path = std::env::temp_dir().join(format!("coracle-scope-{}-{name}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    (path.clone(), UnixListener::bind(&path).unwrap())
}

/// The other side of one client.
struct Peer {
    calls: MessageIterator,
    connection: Connection,
}

impl Peer {
    fn accept(stream: UnixStream) -> Option<Self> {
        let calls = Builder::async_io_unix_stream(stream)
            .server(Guid::generate())
            .ok()?
            .p2p()
            .build_message_iterator()
            .ok()?;
        Some(Self { connection: Connection::from(&calls), calls })
    }

    /// The next call, which must be this one.
    fn take(&mut self, member: &str) -> Message {
        let call = self.calls.next().unwrap().unwrap();
        assert_eq!(call.header().member().unwrap().as_str(), member);
        call
    }

    fn subscribed(&mut self) {
        let call = self.take("Subscribe");
        self.connection.reply(&call.header(), &()).unwrap();
    }

    fn promise(&self, call: &Message, job: &str) {
        self.connection.reply(&call.header(), &ObjectPath::try_from(job).unwrap()).unwrap();
    }

    fn refuse(&self, call: &Message, error: &str, words: &str) {
        self.connection.reply_error(&call.header(), error, &words).unwrap();
    }

    fn job_removed(&self, job: &str, unit: &str, result: &str) {
        self.connection.send(&job_removed(OWNER, job, unit, result)).unwrap();
    }
}

fn job_removed(sender: &str, job: &str, unit: &str, result: &str) -> Message {
    let body = (1u32, ObjectPath::try_from(job).unwrap(), unit, result);
    let signal = Message::signal(PATH, INTERFACE, "JobRemoved").unwrap();
    signal.sender(sender).unwrap().build(&body).unwrap()
}

/// A systemd on its own socket, which serves one client by `script`.
fn systemd(name: &str, script: impl FnOnce(Peer) + Send + 'static) -> PathBuf {
    let (path, listener) = listener(name);
    thread::spawn(move || script(Peer::accept(listener.accept().unwrap().0).unwrap()));
    path
}

fn start_job() -> ScopeJob {
    let command = ScopeCommand::Start { slice: "a.slice".into(), description: "d".into(), pid: 7 };
    let properties = vec![
        ("TasksMax".into(), ScopeProperty::Number(9)),
        ("AllowedCPUs".into(), ScopeProperty::Mask(vec![1, 2])),
        (OOM_POLICY.into(), ScopeProperty::Text("kill".into())),
    ];
    ScopeJob { unit: "a.scope".into(), command, properties }
}

fn ask_within(limit: Duration, path: PathBuf, job: &ScopeJob) -> Result<(), Failure> {
    let socket = path.clone();
    let outcome = within(limit, job, move || {
        Manager::by_socket(&socket).map_err(|error| failure(FailureKind::Unavailable, error.to_string()))
    });
    let _ = std::fs::remove_file(path);
    outcome
}

fn ask(path: PathBuf, job: &ScopeJob) -> Result<(), Failure> {
    ask_within(Duration::from_secs(20), path, job)
}

/// What a StartTransientUnit says; its types are D-Bus' own.
fn expect_start(call: &Message) {
    type Properties = Vec<(String, OwnedValue)>;
    let body = call.body();
    assert_eq!(body.signature().to_string(), "(ssa(sv)a(sa(sv)))");
    let (unit, _, properties, others): (String, String, Properties, Vec<(String, Properties)>) =
        body.deserialize().unwrap();
    assert_eq!((unit.as_str(), others.len()), ("a.scope", 0));
    let properties: BTreeMap<_, _> = properties.into_iter().collect();
    let expected: [(&str, Value<'_>); 11] = [
        ("AllowedCPUs", vec![1u8, 2].into()),
        ("CPUAccounting", true.into()),
        ("CollectMode", "inactive-or-failed".into()),
        ("DefaultDependencies", false.into()),
        ("Delegate", true.into()),
        ("Description", "d".into()),
        ("MemoryAccounting", true.into()),
        ("OOMPolicy", "kill".into()),
        ("PIDs", vec![7u32].into()),
        ("Slice", "a.slice".into()),
        ("TasksMax", 9u64.into()),
    ];
    for (name, value) in &expected {
        assert_eq!(properties.get(*name).map(|value| &**value), Some(value), "{name}");
    }
    assert_eq!(properties.len(), expected.len() + 1, "{properties:?}");
    assert_eq!(**properties.get("TasksAccounting").unwrap(), Value::from(true));
}

#[test]
fn a_scope_is_started_when_its_job_is_done_whichever_message_comes_first() {
    for is_signal_first in [true, false] {
        let path = systemd(&format!("order-{is_signal_first}"), move |mut peer| {
            peer.subscribed();
            let call = peer.take("StartTransientUnit");
            expect_start(&call);
            peer.job_removed("/job/6", "b.scope", "failed");
            if is_signal_first {
                peer.job_removed("/job/7", "a.scope", "done");
            }
            peer.promise(&call, "/job/7");
            if !is_signal_first {
                peer.job_removed("/job/7", "a.scope", "done");
            }
            let _ = peer.calls.next(); // until the client goes
        });
        assert_eq!(ask(path, &start_job()), Ok(()), "{is_signal_first}");
    }
}

#[test]
fn its_words_are_passed_on_and_what_is_gone_is_told_apart() {
    let set = ScopeJob { command: ScopeCommand::Set, ..start_job() };
    let refused = |error: &'static str, words: &'static str| {
        let path = systemd(error, move |mut peer| {
            let call = peer.take("SetUnitProperties");
            assert_eq!(call.body().signature().to_string(), "(sba(sv))");
            peer.refuse(&call, error, words);
            let _ = peer.calls.next();
        });
        ask(path, &set).unwrap_err()
    };
    let gone = refused("org.freedesktop.systemd1.NoSuchUnit", "Unit a.scope not loaded.");
    assert_eq!(gone.kind, FailureKind::NotFound);
    for part in ["a.scope", "SetUnitProperties", "Unit a.scope not loaded."] {
        assert!(gone.message.contains(part), "{}", gone.message);
    }
    assert_eq!(refused("org.freedesktop.DBus.Error.AccessDenied", "no").kind, FailureKind::Internal);
}

#[test]
fn a_property_that_this_systemd_lacks_is_left_out() {
    let old = systemd("old", |mut peer| {
        let call = peer.take("SetUnitProperties");
        let words = "Cannot set property OOMPolicy, or unknown property.";
        peer.refuse(&call, "org.freedesktop.DBus.Error.PropertyReadOnly", words);
        let again = peer.take("SetUnitProperties");
        let (_, _, properties): (String, bool, Vec<(String, OwnedValue)>) =
            again.body().deserialize().unwrap();
        assert!(properties.iter().all(|(name, _)| name != OOM_POLICY));
        peer.connection.reply(&again.header(), &()).unwrap();
        let _ = peer.calls.next();
    });
    assert_eq!(ask(old, &ScopeJob { command: ScopeCommand::Set, ..start_job() }), Ok(()));
}

/// A start that was under way ends first, by another job: that is not the end of the stop.
#[test]
fn a_stop_waits_for_its_own_job_and_a_unit_that_is_gone_is_stopped() {
    let stop = ScopeJob { command: ScopeCommand::Stop, ..start_job() };
    let (sender, is_over) = sync_channel(1);
    let busy = systemd("stop", move |mut peer| {
        peer.subscribed();
        let call = peer.take("StopUnit");
        peer.job_removed("/job/7", "a.scope", "canceled");
        peer.promise(&call, "/job/8");
        thread::sleep(Duration::from_millis(100)); // for a client that would not wait
        sender.send(()).unwrap();
        peer.job_removed("/job/8", "a.scope", "done");
        let _ = peer.calls.next();
    });
    assert_eq!(ask(busy, &stop), Ok(()));
    is_over.try_recv().expect("its own job had ended");
    let gone = systemd("gone", |mut peer| {
        peer.subscribed();
        let call = peer.take("StopUnit");
        peer.refuse(&call, "org.freedesktop.systemd1.NoSuchUnit", "not loaded");
        let _ = peer.calls.next();
    });
    assert_eq!(ask(gone, &stop), Ok(()));
}

#[test]
fn a_start_that_fails_an_answer_that_is_garbage_and_none_are_failures() {
    let failed = systemd("failed", |mut peer| {
        peer.subscribed();
        let call = peer.take("StartTransientUnit");
        peer.promise(&call, "/job/7");
        peer.job_removed("/job/7", "a.scope", "failed");
        let _ = peer.calls.next();
    });
    let failure = ask(failed, &start_job()).unwrap_err();
    assert!(failure.message.contains("\"failed\""), "{}", failure.message);
    let closed = systemd("closed", |mut peer| {
        peer.subscribed();
        let call = peer.take("StartTransientUnit");
        peer.promise(&call, "/job/7");
    });
    assert_eq!(ask(closed, &start_job()).unwrap_err().kind, FailureKind::Unavailable);
    let silent = systemd("silent", |mut peer| {
        peer.subscribed();
        let _ = peer.calls.next();
        thread::sleep(Duration::from_secs(20)); // longer than the client waits
    });
    let failure = ask_within(Duration::from_millis(500), silent, &start_job()).unwrap_err();
    assert_eq!(failure.kind, FailureKind::Unavailable);
    assert!(failure.message.contains("a.scope: systemd did not answer within 500ms"), "{}", failure.message);
    let nobody = ask("/nonexistent".into(), &start_job()).unwrap_err();
    assert_eq!(nobody.kind, FailureKind::Unavailable);
}

#[test]
fn garbage_ends_the_job_with_a_failure() {
    for garbage in
        [&b"x"[..], b"OK 0123456789abcdef0123456789abcdef\r\nAGREE_UNIX_FD\r\nxxxxxxxxxxxxxxxxxxxxxxxxxx"]
    {
        let (path, listener) = listener(&format!("garbage-{}", garbage.len()));
        thread::spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            let _ = stream.read(&mut [0; 1024]);
            let _ = stream.write_all(garbage);
            let _ = stream.read(&mut [0; 1024]);
        });
        ask_within(Duration::from_secs(1), path, &start_job()).unwrap_err();
    }
}

/// A bus with a systemd on it: answers every client. Before the end of the unit's job somebody else says that it failed.
fn bus(listener: &UnixListener) {
    let peers = Arc::new(Mutex::new(Vec::<Connection>::new()));
    while let Ok((stream, _)) = listener.accept() {
        let peers = Arc::clone(&peers);
        thread::spawn(move || {
            let Some(peer) = Peer::accept(stream) else { return };
            peers.lock().unwrap().push(peer.connection.clone());
            for call in peer.calls {
                let Ok(call) = call else { return };
                let header = call.header();
                let reply = |body: &str| peer.connection.reply(&header, &body).unwrap();
                match header.member().unwrap().as_str() {
                    "Hello" => reply(":1.7"),
                    "GetNameOwner" => reply(OWNER),
                    "StartTransientUnit" => {
                        expect_start(&call);
                        peer.connection.reply(&header, &ObjectPath::try_from("/job/7").unwrap()).unwrap();
                        for (sender, result) in [(":1.66", "failed"), (OWNER, "done")] {
                            let signal = job_removed(sender, "/job/7", "a.scope", result);
                            peers.lock().unwrap().iter().for_each(|peer| drop(peer.send(&signal)));
                        }
                    }
                    "NameHasOwner" => peer.connection.reply(&header, &true).unwrap(),
                    _ => peer.connection.reply(&header, &()).unwrap(),
                }
            }
        });
    }
}

/// cgroups-rs takes the bus from the environment, so the job runs in a process of its own.
#[test]
fn a_scope_is_started_over_the_bus_and_others_signals_do_not_count() {
    let (path, listener) = listener("bus");
    thread::spawn(move || bus(&listener));
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--ignored", "--nocapture", "scope::tests::start_over_the_bus_of_the_environment"])
        .env(BUS_VARIABLE, format!("unix:path={}", path.display()))
        .output()
        .unwrap();
    let _ = std::fs::remove_file(path);
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

#[test]
#[ignore = "run by a_scope_is_started_over_the_bus_and_others_signals_do_not_count"]
fn start_over_the_bus_of_the_environment() {
    assert!(std::env::var_os(BUS_VARIABLE).is_some());
    assert_eq!(run(&start_job()), Ok(()));
}
