//! Tests scope jobs with a simulated bus and systemd, which answers late, in another order, wrongly, or not
//! at all.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
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
/// systemd's unique name on the simulated bus.
const OWNER: &str = ":1.1";
const BUS_VARIABLE: &str = "DBUS_SYSTEM_BUS_ADDRESS";

fn listener(name: &str) -> (PathBuf, UnixListener) {
    let path = std::env::temp_dir().join(format!("coracle-scope-{}-{name}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    (path.clone(), UnixListener::bind(&path).unwrap())
}

/// The bus side of one client's connection.
struct Peer {
    calls: MessageIterator,
    connection: Connection,
}

impl Peer {
    fn accept(listener: &UnixListener) -> Option<Self> {
        let stream = listener.accept().ok()?.0;
        let calls = Builder::async_io_unix_stream(stream).server(Guid::generate());
        let calls = calls.ok()?.p2p().build_message_iterator().ok()?;
        Some(Self { connection: Connection::from(&calls), calls })
    }

    /// Receives the next call that is not for the bus or a subscription, and checks that it is the method
    /// `member`.
    fn take(&mut self, member: &str) -> Message {
        loop {
            let call = self.calls.next().unwrap().unwrap();
            let header = call.header();
            match header.member().unwrap().as_str() {
                "Hello" => self.connection.reply(&header, &":1.7").unwrap(),
                "GetNameOwner" => self.connection.reply(&header, &OWNER).unwrap(),
                "AddMatch" | "RemoveMatch" | "Subscribe" => self.connection.reply(&header, &()).unwrap(),
                other => {
                    assert_eq!(other, member);
                    return call;
                }
            }
        }
    }

    /// Answers calls for the bus until the client disconnects.
    fn serve(mut self) {
        while let Some(Ok(call)) = self.calls.next() {
            let _ = self.connection.reply(&call.header(), &());
        }
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

/// A bus with a systemd that serves one client with `script`.
fn systemd(name: &str, script: impl FnOnce(Peer) + Send + 'static) -> PathBuf {
    let (path, listener) = listener(name);
    thread::spawn(move || script(Peer::accept(&listener).unwrap()));
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
    let address = format!("unix:path={}", path.display());
    let outcome = within(limit, job, move || {
        let connection = Builder::address(address.as_str()).and_then(Builder::build);
        let manager = connection.and_then(Manager::on);
        manager.map_err(|error| Failure::new(FailureKind::Unavailable, error.to_string()))
    });
    let _ = std::fs::remove_file(path);
    outcome
}

fn ask(path: PathBuf, job: &ScopeJob) -> Result<(), Failure> {
    ask_within(Duration::from_secs(20), path, job)
}

/// Checks a StartTransientUnit call, including its D-Bus types.
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
fn errors_of_systemd_are_passed_on_and_missing_units_are_not_found() {
    let set = ScopeJob { command: ScopeCommand::Set, ..start_job() };
    let refused = |error: &'static str, words: &'static str| {
        let path = systemd(error, move |mut peer| {
            let call = peer.take("SetUnitProperties");
            assert_eq!(call.body().signature().to_string(), "(sba(sv))");
            peer.refuse(&call, error, words);
            peer.serve();
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
fn a_property_that_systemd_does_not_support_is_omitted() {
    let old = systemd("old", |mut peer| {
        let call = peer.take("SetUnitProperties");
        let words = "Cannot set property OOMPolicy, or unknown property.";
        peer.refuse(&call, "org.freedesktop.DBus.Error.PropertyReadOnly", words);
        let again = peer.take("SetUnitProperties");
        let (_, _, properties): (String, bool, Vec<(String, OwnedValue)>) =
            again.body().deserialize().unwrap();
        assert!(properties.iter().all(|(name, _)| name != OOM_POLICY));
        peer.connection.reply(&again.header(), &()).unwrap();
        peer.serve();
    });
    assert_eq!(ask(old, &ScopeJob { command: ScopeCommand::Set, ..start_job() }), Ok(()));
}

/// The result of a pending start job arrives first; the stop must not treat it as its own.
#[test]
fn a_stop_waits_for_its_own_job_and_a_missing_unit_is_no_error() {
    let stop = ScopeJob { command: ScopeCommand::Stop, ..start_job() };
    let (sender, is_over) = sync_channel(1);
    let busy = systemd("stop", move |mut peer| {
        let call = peer.take("StopUnit");
        peer.job_removed("/job/7", "a.scope", "canceled");
        peer.promise(&call, "/job/8");
        thread::sleep(Duration::from_millis(100)); // time for a client that does not wait
        sender.send(()).unwrap();
        peer.job_removed("/job/8", "a.scope", "done");
        peer.serve();
    });
    assert_eq!(ask(busy, &stop), Ok(()));
    is_over.try_recv().expect("its own job had ended");
    let gone = systemd("gone", |mut peer| {
        let call = peer.take("StopUnit");
        peer.refuse(&call, "org.freedesktop.systemd1.NoSuchUnit", "not loaded");
        peer.serve();
    });
    assert_eq!(ask(gone, &stop), Ok(()));
}

#[test]
fn a_systemd_that_disconnects_or_is_silent_is_a_failure() {
    let stop = ScopeJob { command: ScopeCommand::Stop, ..start_job() };
    let closed = systemd("closed", |mut peer| {
        let call = peer.take("StopUnit");
        peer.promise(&call, "/job/7");
    });
    assert_eq!(ask(closed, &stop).unwrap_err().kind, FailureKind::Unavailable);
    let silent = systemd("silent", |mut peer| {
        peer.take("StopUnit");
        thread::sleep(Duration::from_secs(20)); // longer than the client waits
    });
    let failure = ask_within(Duration::from_millis(500), silent, &stop).unwrap_err();
    assert_eq!(failure.kind, FailureKind::Unavailable);
    assert!(failure.message.contains("a.scope: systemd did not answer within 500ms"), "{}", failure.message);
    let nobody = ask("/nonexistent".into(), &stop).unwrap_err();
    assert_eq!(nobody.kind, FailureKind::Unavailable);
}

#[test]
fn a_malformed_answer_is_a_failure() {
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

/// The course of a start: the signals to all clients before and after the reply.
struct Start {
    before: Vec<Message>,
    after: Vec<Message>,
}

/// A message bus with two clients: one waits for the signal of the job, the client of cgroups-rs makes the
/// method call.
fn bus(listener: &UnixListener, start: Start) {
    let (peers, start) = (Arc::new(Mutex::new(Vec::<Connection>::new())), Arc::new(start));
    while let Some(mut peer) = Peer::accept(listener) {
        peers.lock().unwrap().push(peer.connection.clone());
        let (peers, start) = (Arc::clone(&peers), Arc::clone(&start));
        thread::spawn(move || {
            let tell = |signals: &[Message]| {
                for (signal, peer) in signals.iter().flat_map(|signal| {
                    peers.lock().unwrap().clone().into_iter().map(move |peer| (signal, peer))
                }) {
                    let _ = peer.send(signal);
                }
            };
            let call = peer.take("StartTransientUnit");
            expect_start(&call);
            tell(&start.before);
            peer.promise(&call, "/job/7");
            tell(&start.after);
            peer.serve();
        });
    }
}

/// Runs the job in a separate process, because cgroups-rs reads the bus address from the environment; returns
/// the process's output.
fn start_on_bus(name: &str, start: Start) -> String {
    let (path, listener) = listener(name);
    thread::spawn(move || bus(&listener, start));
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--ignored", "--nocapture", "tests::start_on_the_bus_of_the_environment"])
        .env(BUS_VARIABLE, format!("unix:path={}", path.display()))
        .output()
        .unwrap();
    let _ = std::fs::remove_file(path);
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[test]
#[ignore = "run by start_on_bus, in a process with an environment of its own"]
fn start_on_the_bus_of_the_environment() {
    assert!(std::env::var_os(BUS_VARIABLE).is_some());
    println!("outcome: {:?}", run(&start_job()));
}

/// Results of other units' jobs, and signals of other senders than systemd, are ignored.
#[test]
fn a_job_result_may_arrive_before_or_after_the_reply() {
    let signals = || {
        vec![
            job_removed(OWNER, "/job/6", "b.scope", "failed"),
            job_removed(":1.66", "/job/7", "a.scope", "failed"),
            job_removed(OWNER, "/job/7", "a.scope", "done"),
        ]
    };
    for (name, start) in [
        ("before", Start { before: signals(), after: Vec::new() }),
        ("after", Start { before: Vec::new(), after: signals() }),
    ] {
        let text = start_on_bus(name, start);
        assert!(text.contains("outcome: Ok(())"), "{name}: {text}");
    }
}

#[test]
fn a_start_that_fails_is_a_failure() {
    let after = vec![job_removed(OWNER, "/job/7", "a.scope", "failed")];
    let text = start_on_bus("failed", Start { before: Vec::new(), after });
    assert!(text.contains("outcome: Err(") && text.contains("the start job ended with"), "{text}");
}
