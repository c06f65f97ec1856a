//! A client of systemd's manager on the system bus.
//!
//! | method | implementation |
//! |---|---|
//! | StartTransientUnit | cgroups-rs' `SystemdClient::start` |
//! | result of a job | zbus: `SystemdClient` does not wait for jobs |
//! | StopUnit | zbus: `SystemdClient::stop` does not report whether the unit existed, and so whether there is a job to wait for |
//! | SetUnitProperties | zbus: `SystemdClient::set_properties` reports success if it cannot connect to the bus |
//!
//! systemd's private socket, /run/systemd/private, is not used: its messages have the sender
//! `org.freedesktop.systemd1`, which is not a unique name, so that zbus panics.

use std::io;

use cgroups_rs::systemd::dbus::error::Error as ClientError;
use cgroups_rs::systemd::{NO_SUCH_UNIT, Property, SystemdClient, UNIT_MODE_REPLACE};
use coracle_job::{Failure, FailureKind};
use coracle_sandbox::describe_io;
use zbus::blocking::fdo::DBusProxy;
use zbus::blocking::{Connection, MessageIterator};
use zbus::message::{Body, Type};
use zbus::names::{BusName, OwnedUniqueName};
use zbus::zvariant::{DynamicType, ObjectPath, OwnedObjectPath};
use zbus::{Error, MatchRule};

const SYSTEMD: &str = "org.freedesktop.systemd1";
const PATH: &str = "/org/freedesktop/systemd1";
const INTERFACE: &str = "org.freedesktop.systemd1.Manager";

/// A connection to systemd's manager.
pub(super) struct Manager {
    connection: Connection,
    /// Unique name of systemd on the bus: only its signals are accepted.
    owner: OwnedUniqueName,
}

impl Manager {
    /// Connects to the system bus.
    ///
    /// # Errors
    /// `Unavailable` if there is no bus, or no systemd on it.
    pub(super) fn connect() -> Result<Self, Failure> {
        Connection::system().and_then(Self::on).map_err(|error| {
            Failure::new(FailureKind::Unavailable, format!("the system bus: {}", text_of(&error)))
        })
    }

    /// Finds systemd's unique name on the bus of this connection.
    pub(super) fn on(connection: Connection) -> zbus::Result<Self> {
        let owner = DBusProxy::new(&connection)?.get_name_owner(BusName::try_from(SYSTEMD)?)?;
        Ok(Self { connection, owner })
    }

    /// Starts a scope and waits for the result of systemd's job, which is `done` on success.
    ///
    /// # Errors
    /// The error of systemd; `NotFound` if the unit or process does not exist.
    pub(super) fn start(&self, unit: &str, properties: Vec<Property<'_>>) -> Result<String, Failure> {
        let jobs = self.jobs(unit)?;
        let client = SystemdClient::new(unit, properties).and_then(|client| client.start());
        client.map_err(|error| match error {
            ClientError::Dbus(error) => failed("StartTransientUnit", &error),
            ClientError::InvalidProperties => Failure::new(FailureKind::Internal, error.to_string()),
        })?;
        // The unit is new, so the first job that ends is its start.
        result(jobs, None)
    }

    /// Stops a unit and waits for systemd's job.
    ///
    /// # Errors
    /// Those of [`Manager::start`].
    pub(super) fn stop(&self, unit: &str) -> Result<(), Failure> {
        let jobs = self.jobs(unit)?;
        let reply = self.call("StopUnit", &(unit, UNIT_MODE_REPLACE))?;
        let job: OwnedObjectPath = reply.deserialize().map_err(|error| failed("StopUnit", &error))?;
        result(jobs, Some(&job)).map(drop)
    }

    /// Sets properties for the lifetime of the unit, which has no unit file.
    ///
    /// # Errors
    /// Those of [`Manager::start`].
    pub(super) fn set_properties(&self, unit: &str, properties: &[Property<'_>]) -> Result<(), Failure> {
        const IS_RUNTIME: bool = true;
        self.call("SetUnitProperties", &(unit, IS_RUNTIME, properties)).map(drop)
    }

    /// A stream of the results of the unit's jobs.
    fn jobs(&self, unit: &str) -> Result<MessageIterator, Failure> {
        let listen = || {
            let rule = MatchRule::builder()
                .msg_type(Type::Signal)
                // Any process may send signals on the system bus.
                .sender(self.owner.as_ref())?
                .path(PATH)?
                .interface(INTERFACE)?
                .member("JobRemoved")?
                .arg(2, unit)?;
            MessageIterator::for_match_rule(rule.build(), &self.connection, None)
        };
        let jobs = listen().map_err(|error| failed("AddMatch", &error))?;
        self.call("Subscribe", &())?;
        Ok(jobs)
    }

    fn call(&self, method: &str, body: &(impl serde::Serialize + DynamicType)) -> Result<Body, Failure> {
        let reply = self.connection.call_method(Some(SYSTEMD), PATH, Some(INTERFACE), method, body);
        reply.map(|reply| reply.body()).map_err(|error| failed(method, &error))
    }
}

/// Waits for the end of a job; returns its result.
fn result(jobs: MessageIterator, wanted: Option<&ObjectPath<'_>>) -> Result<String, Failure> {
    for signal in jobs {
        let signal = signal.map_err(|error| failed("JobRemoved", &error))?;
        let body = signal.body();
        let (_, job, _, result): (u32, ObjectPath<'_>, &str, &str) =
            body.deserialize().map_err(|error| failed("JobRemoved", &error))?;
        if wanted.is_none_or(|wanted| *wanted == job) {
            return Ok(result.to_owned());
        }
    }
    Err(Failure::new(FailureKind::Unavailable, "systemd closed the connection before its job ended"))
}

/// Converts an error: distinguishes a missing process or unit, and a lost connection, from other errors.
fn failed(method: &str, error: &Error) -> Failure {
    const CLOSED: [io::ErrorKind; 2] = [io::ErrorKind::InvalidData, io::ErrorKind::InvalidInput];
    let kind = match error {
        Error::MethodError(name, ..) => match name.as_str() {
            NO_SUCH_UNIT
            | "org.freedesktop.systemd1.NoSuchProcess"
            | "org.freedesktop.DBus.Error.UnixProcessIdUnknown"
            | "System.Error.ESRCH" => FailureKind::NotFound,
            _ => FailureKind::Internal,
        },
        Error::InputOutput(error) if !CLOSED.contains(&error.kind()) => FailureKind::Unavailable,
        Error::Connection(..) | Error::Handshake(_) => FailureKind::Unavailable,
        _ => FailureKind::Internal,
    };
    Failure::new(kind, format!("{method}: {}", text_of(error)))
}

/// The text of an error of the bus; that of an I/O error without the library's prefix.
fn text_of(error: &Error) -> String {
    match error {
        Error::InputOutput(error) => describe_io(error),
        error => error.to_string(),
    }
}
