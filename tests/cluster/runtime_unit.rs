//! The daemon of a node as a unit of systemd, for a suite that stops and starts its runtime through systemd's D-Bus interface
//! where systemd does not run.
//!
//! It listens on systemd's private socket, which clients use if there is no system bus, and implements those methods of
//! `org.freedesktop.systemd1.Manager` that the suite calls: GetUnitByPID, StopUnit and StartUnit, with the signal JobRemoved.
//! Each other call is answered with an error.

use std::fs;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::{io, thread};

use coracle_tests::node::Node;
use zbus::blocking::Connection;
use zbus::blocking::connection::Builder;
use zbus::message::Type;
use zbus::zvariant::ObjectPath;
use zbus::{Guid, Message};

/// systemd's private socket.
const SOCKET: &str = "/run/systemd/private";
const UNIT: &str = "coracle.service";
/// The unit's object path: the dot of its name is escaped.
const UNIT_PATH: &str = "/org/freedesktop/systemd1/unit/coracle_2eservice";
const MANAGER_PATH: &str = "/org/freedesktop/systemd1";
const MANAGER: &str = "org.freedesktop.systemd1.Manager";

/// State of all connections.
struct Bus {
    /// `None` once it was taken.
    node: Mutex<Option<Node>>,
    /// Open connections; signals are sent to each, whether it has subscribed or not.
    peers: Mutex<Vec<Connection>>,
    jobs: Mutex<u32>,
}

/// The daemon of a node as a unit, in threads that end with the process.
pub(crate) struct RuntimeUnit(Arc<Bus>);

impl RuntimeUnit {
    /// Serves this node.
    pub(crate) fn serve(node: Node) -> io::Result<RuntimeUnit> {
        fs::create_dir_all(Path::new(SOCKET).parent().expect("it is in a directory"))?;
        let listener = UnixListener::bind(SOCKET)?;
        let bus =
            Arc::new(Bus { node: Mutex::new(Some(node)), peers: Mutex::default(), jobs: Mutex::default() });
        let unit = RuntimeUnit(Arc::clone(&bus));
        thread::spawn(move || accept(&listener, &bus));
        Ok(unit)
    }

    /// Ends the service; calls are answered with errors from now on.
    pub(crate) fn into_node(self) -> Node {
        self.0.node().take().expect("it is taken once")
    }
}

fn accept(listener: &UnixListener, bus: &Arc<Bus>) {
    for stream in listener.incoming() {
        let (Ok(stream), bus) = (stream, Arc::clone(bus)) else { continue };
        thread::spawn(move || {
            // The end of a connection is no failure: the suite has its own check of each answer.
            let _ = bus.connection(stream);
        });
    }
}

impl Bus {
    fn node(&self) -> MutexGuard<'_, Option<Node>> {
        self.node.lock().expect("no thread panicked with the node")
    }

    /// Answers the calls of a connection until it ends.
    fn connection(&self, stream: UnixStream) -> zbus::Result<()> {
        let server = Builder::async_io_unix_stream(stream).server(Guid::generate())?.p2p();
        let calls = server.build_message_iterator()?;
        let connection = Connection::from(&calls);
        self.peers.lock().expect("no panic").push(connection.clone());
        for call in calls {
            let call = call?;
            if call.message_type() == Type::MethodCall {
                self.answer(&call, &connection)?;
            }
        }
        Ok(())
    }

    fn answer(&self, call: &Message, connection: &Connection) -> zbus::Result<()> {
        let (header, body) = (call.header(), call.body());
        let refuse = |error: &str| connection.reply_error(&header, error, &());
        let is_unit = body.deserialize::<(&str, &str)>().is_ok_and(|(unit, _mode)| unit == UNIT);
        match header.member().map_or("", |member| member.as_str()) {
            "GetUnitByPID" if self.pid().is_some_and(|pid| body.deserialize() == Ok(pid)) => {
                connection.reply(&header, &ObjectPath::try_from(UNIT_PATH)?)
            }
            "GetUnitByPID" => refuse("org.freedesktop.systemd1.NoUnitForPID"),
            "StopUnit" if is_unit => self.job(call, connection, Node::terminate),
            // The suite starts it again after each spec, whether it stopped it or not.
            "StartUnit" if is_unit => self.job(call, connection, |node| {
                if !node.has_daemon() {
                    node.launch();
                }
            }),
            "StopUnit" | "StartUnit" => refuse("org.freedesktop.systemd1.NoSuchUnit"),
            // Of the bus that other clients have: every connection gets all signals.
            "AddMatch" => connection.reply(&header, &()),
            _ => refuse("org.freedesktop.DBus.Error.UnknownMethod"),
        }
    }

    /// The daemon's process id; `None` while the unit is stopped.
    fn pid(&self) -> Option<u32> {
        self.node().as_ref().filter(|node| node.has_daemon()).map(|node| node.pid() as u32)
    }

    /// Answers with a job, does it, and tells all connections that it is done.
    fn job(&self, call: &Message, connection: &Connection, work: impl FnOnce(&mut Node)) -> zbus::Result<()> {
        let mut jobs = self.jobs.lock().expect("no panic");
        *jobs += 1;
        let path = ObjectPath::try_from(format!("{MANAGER_PATH}/job/{jobs}"))?;
        connection.reply(&call.header(), &path)?;
        if let Some(node) = self.node().as_mut() {
            work(node);
        }
        let signal = Message::signal(MANAGER_PATH, MANAGER, "JobRemoved")?;
        let signal = signal.build(&(*jobs, &path, UNIT, "done"))?;
        // Those that have ended refuse it.
        self.peers.lock().expect("no panic").retain(|peer| peer.send(&signal).is_ok());
        Ok(())
    }
}
