//! Lifecycle of a plugin's connection: registration, Configure, Synchronize while the gate is held, replacement, and
//! its end (NRI 2).
//!
//! Before its registration a connection may be from any process. Therefore all steps before registration are limited in
//! time and number and do not affect other connections: one task per connection, no lock, at most 64 connections.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::time::{Duration, Instant};

use prost::Message;
use smol::channel::Receiver;

use crate::api;
use crate::bound;
use crate::connection::{Connection, Held, Incoming, Outcome};
use crate::dispatch::Dispatcher;
use crate::io::{Level, Stream, Verdict};
use crate::message::{Code, Status, get_status};
use crate::plugin::Plugin;
use crate::settings::Duplicates;
use crate::synchronize;
use crate::{EVENTS_ALL, NRI_VERSION};

/// Maximum number of connections that have not registered; for a further one the oldest is closed (NRI-R11).
const UNREGISTERED_MAX: usize = 64;

/// Rate limit of joins for one index and name: this number at once, then one per [`TOKEN_EVERY`] (NRI-R15).
const TOKENS: u32 = 32;
const TOKEN_EVERY: Duration = Duration::from_secs(2);

/// Time limit of the wait for the gate. Events have time limits, so a longer wait means that an operation hangs.
const GATE_LIMIT: Duration = Duration::from_secs(30);

/// Time limit of the updates that a plugin requests in its answer to Synchronize; the gate is held during this time.
const UPDATES_LIMIT: Duration = Duration::from_secs(2);

/// Number of consecutive failed synchronizations without a delay. Before further ones there is a delay; each delay is
/// twice the previous one (NRI-R16).
const SYNC_FAILURES_FREE: u32 = 2;
const SYNC_WAIT_MIN: Duration = Duration::from_secs(10);
const SYNC_WAIT_MAX: Duration = Duration::from_secs(300);

/// Maximum number of plugin names with a recorded join history.
const NAMES_MAX: usize = 1024;

/// Time limit of the call Shutdown.
const SHUTDOWN_LIMIT: Duration = Duration::from_millis(500);

/// The process at the other end of a connection, for the log.
#[derive(Clone, Copy, Debug, Default)]
pub struct Peer {
    /// PID of the process; 0: unknown.
    pub pid: i32,
    /// User ID of the process.
    pub uid: u32,
}

/// A plugin that the runtime has started.
pub struct Launched {
    /// Index of the plugin: the first two digits of its file name.
    pub index: String,
    /// Name of the plugin: its file name after index and hyphen.
    pub name: String,
    /// Configuration of the plugin, passed unchanged.
    pub config: String,
}

/// State of unregistered connections and of the limits on joins and on what connections hold.
#[derive(Default)]
pub(crate) struct Joins {
    held: Held,
    unregistered: RefCell<VecDeque<Rc<Connection>>>,
    histories: RefCell<BTreeMap<String, History>>,
}

/// Join history of one index and name, for the limits on joins.
struct History {
    tokens: u32,
    counted_at: Instant,
    sync_failures: u32,
}

impl Dispatcher {
    /// Accepts a connection; all further steps run in a separate task.
    pub fn accept(self: &Rc<Self>, stream: Stream, peer: Peer) {
        let (connection, requests) = Connection::start(Rc::clone(&self.host), &self.joins.held, stream);
        {
            let mut unregistered = self.joins.unregistered.borrow_mut();
            unregistered.retain(|connection| connection.is_open());
            if unregistered.len() >= UNREGISTERED_MAX
                && let Some(oldest) = unregistered.pop_front()
            {
                oldest.close("it did not register before newer connections");
            }
            unregistered.push_back(Rc::clone(&connection));
        }
        let dispatcher = Rc::clone(self);
        self.host.spawn(Box::pin(async move {
            let registered = dispatcher.register(&connection, &requests, peer).await;
            dispatcher.joins.forget(&connection);
            match registered {
                Ok(plugin) => {
                    if let Err(why) = dispatcher.join(&plugin, &requests, String::new()).await {
                        dispatcher.log(Level::Error, &plugin, &format!("not joined: {why}"));
                    }
                }
                Err(why) => {
                    let text = format!("connection of process {} closed: {why}", peer.pid);
                    dispatcher.host.log(Level::Warn, "", &text);
                    connection.close(&why);
                }
            }
        }));
    }

    /// Registers a plugin that the runtime has started, with index and name from its file name. Returns when the plugin
    /// is active.
    ///
    /// # Errors
    /// The reason why the plugin did not become active.
    pub async fn launched(self: &Rc<Self>, stream: Stream, launched: Launched) -> Result<Running, String> {
        let (connection, requests) = Connection::start(Rc::clone(&self.host), &self.joins.held, stream);
        let registered = self.first_request(&connection, &requests).await;
        let (stream, _) = registered.inspect_err(|why| connection.close(why))?;
        connection.answer(stream, Ok(Vec::new()));
        let max_inflight = self.settings.borrow().max_inflight;
        let plugin = Plugin::new(launched.index, launched.name, Rc::clone(&connection), max_inflight);
        self.prepare(&plugin, launched.config).await.inspect_err(|why| connection.close(why))?;
        let (dispatcher, serving) = (Rc::clone(self), Rc::clone(&plugin));
        self.host.spawn(Box::pin(async move { dispatcher.serve(&serving, &requests).await }));
        Ok(Running { plugin })
    }

    async fn first_request(
        &self,
        connection: &Rc<Connection>,
        requests: &Receiver<Incoming>,
    ) -> Result<(u32, api::RegisterPluginRequest), String> {
        let limit = self.settings.borrow().registration_timeout;
        let first =
            smol::future::or(async { requests.recv().await.map_err(|_| connection.cause()) }, async {
                self.host.sleep(limit).await;
                Err(format!("it did not register within {limit:?}"))
            });
        let first = first.await?;
        let refuse = |code, text: String| {
            connection.answer(first.stream, Err((get_status(code, &text), Vec::new())));
            text
        };
        if first.method != REGISTER {
            return Err(refuse(Code::FAILED_PRECONDITION, format!("{}: not registered", first.method)));
        }
        match bound::decode(&first.payload) {
            Ok(request) => Ok((first.stream, request)),
            Err(why) => Err(refuse(Code::INTERNAL, format!("RegisterPlugin: the request {why}"))),
        }
    }

    async fn register(
        &self,
        connection: &Rc<Connection>,
        requests: &Receiver<Incoming>,
        peer: Peer,
    ) -> Result<Rc<Plugin>, String> {
        let (stream, request) = self.first_request(connection, requests).await?;
        let api::RegisterPluginRequest { plugin_name: name, plugin_idx: index, nri_version } = request;
        let refuse = |code, message: String| {
            connection.answer(stream, Err((get_status(code, &message), Vec::new())));
            message
        };
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.+".contains(&byte);
        if name.is_empty() || !name.bytes().all(is_name) {
            return Err(refuse(Code::INVALID_ARGUMENT, format!("invalid plugin name: {name:?}")));
        }
        if index.len() != 2 || !index.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(refuse(Code::INVALID_ARGUMENT, format!("invalid plugin index: {index:?}")));
        }
        let settings = Rc::clone(&self.settings.borrow());
        let plugin = Plugin::new(index, name, Rc::clone(connection), settings.max_inflight);
        if settings.duplicates == Duplicates::Reject && !self.same(&plugin).is_empty() {
            let text = format!("plugin {:?} is already registered", plugin.title());
            return Err(refuse(Code::ALREADY_EXISTS, text));
        }
        connection.answer(stream, Ok(Vec::new()));
        let text = format!("registered by process {} of user {}, NRI {nri_version:?}", peer.pid, peer.uid);
        self.log(Level::Info, &plugin, &text);
        Ok(plugin)
    }

    /// Runs a plugin from its registration to the end of the connection.
    async fn join(
        self: &Rc<Self>,
        plugin: &Rc<Plugin>,
        requests: &Receiver<Incoming>,
        config: String,
    ) -> Result<(), String> {
        // It may request updates during its synchronization (NRI 2.5).
        let (dispatcher, serving, requests) = (Rc::clone(self), Rc::clone(plugin), requests.clone());
        self.host.spawn(Box::pin(async move { dispatcher.serve(&serving, &requests).await }));
        self.wait_for_turn(plugin).await;
        self.prepare(plugin, config).await.inspect_err(|why| plugin.connection.close(why))
    }

    /// Delays a plugin that connects too often or whose synchronization has failed; the plugin's library waits for
    /// Configure without a timeout.
    async fn wait_for_turn(&self, plugin: &Plugin) {
        let wait = self.joins.turn(&plugin.title());
        if !wait.is_zero() {
            self.log(
                Level::Warn,
                plugin,
                &format!("it joins too often, or its synchronization failed: delayed by {wait:?}"),
            );
            smol::future::or(async { self.host.sleep(wait).await }, plugin.connection.ended()).await;
        }
    }

    /// Calls Configure and Synchronize; after success the plugin is active.
    async fn prepare(self: &Rc<Self>, plugin: &Rc<Plugin>, config: String) -> Result<(), String> {
        self.configure_plugin(plugin, config).await?;
        let gate = smol::future::or(async { Some(self.gate.exclusive().await) }, async {
            self.host.sleep(GATE_LIMIT).await;
            None
        });
        let Some(_gate) = gate.await else {
            return Err(format!("events in progress do not end within {GATE_LIMIT:?}"));
        };
        let title = plugin.title();
        let synchronized = self.synchronize(plugin).await;
        self.joins.synchronized(&title, synchronized.is_ok());
        let updates = synchronized?;
        let apply = self.apply_logged("Synchronize", updates);
        smol::future::or(apply, async {
            self.host.sleep(UPDATES_LIMIT).await;
            self.log(Level::Warn, plugin, "its updates take too long: the remaining ones are dropped");
        })
        .await;
        let older = match self.settings.borrow().duplicates {
            Duplicates::Replace => self.same(plugin),
            Duplicates::Allow | Duplicates::Reject => Vec::new(),
        };
        self.activate(plugin);
        self.log(Level::Info, plugin, &format!("active, events {:#06x}", plugin.events.get()));
        for older in older {
            // No call is in progress, because this task holds the gate.
            self.deactivate(&older);
            older.connection.close("replaced by another plugin with this name");
        }
        Ok(())
    }

    async fn configure_plugin(&self, plugin: &Rc<Plugin>, config: String) -> Result<(), String> {
        let settings = Rc::clone(&self.settings.borrow());
        let millis = |duration: Duration| i64::try_from(duration.as_millis()).unwrap_or(i64::MAX);
        let request = api::ConfigureRequest {
            config,
            runtime_name: settings.runtime_name.clone(),
            runtime_version: settings.runtime_version.clone(),
            registration_timeout: millis(settings.registration_timeout),
            request_timeout: millis(settings.request_timeout),
            nri_version: NRI_VERSION.to_owned(),
        };
        let payload = request.encode_to_vec();
        let answer = plugin.connection.call("Configure", &payload, settings.request_timeout).await;
        let answer = answered("Configure", answer)?;
        let answer = bound::decode::<api::ConfigureResponse>(&answer);
        let events = answer.map_err(|why| format!("Configure: its answer {why}"))?.events;
        if events & !EVENTS_ALL != 0 {
            return Err(format!("invalid plugin events: {events:#x}"));
        }
        plugin.events.set(if events == 0 { EVENTS_ALL } else { events });
        Ok(())
    }

    async fn synchronize(&self, plugin: &Rc<Plugin>) -> Result<Vec<api::ContainerUpdate>, String> {
        let limit = self.settings.borrow().sync_timeout;
        let begun = Instant::now();
        let mut updates = Vec::new();
        for chunk in synchronize::chunks(self.host.snapshot())? {
            let left = limit.saturating_sub(begun.elapsed());
            let answer = plugin.connection.call("Synchronize", &chunk.encode_to_vec(), left).await;
            let answer = answered("Synchronize", answer)?;
            let answer = bound::decode::<api::SynchronizeResponse>(&answer)
                .map_err(|why| format!("Synchronize: its answer {why}"))?;
            if answer.more != chunk.more || (chunk.more && !answer.update.is_empty()) {
                return Err("Synchronize: it does not support several messages (before NRI v0.7)".to_owned());
            }
            updates = answer.update;
        }
        Ok(updates)
    }

    /// Answers a plugin's own requests until it disconnects.
    async fn serve(self: &Rc<Self>, plugin: &Rc<Plugin>, requests: &Receiver<Incoming>) {
        while let Ok(request) = requests.recv().await {
            let (dispatcher, plugin) = (Rc::clone(self), Rc::clone(plugin));
            self.host.spawn(Box::pin(async move {
                let answer = dispatcher.requested(&plugin, &request);
                let answer = match request.timeout.is_zero() {
                    true => answer.await,
                    // The caller has timed out by then.
                    false => {
                        smol::future::or(answer, async {
                            dispatcher.host.sleep(request.timeout).await;
                            refusal(Code::DEADLINE_EXCEEDED, "the updates take longer than the call may")
                        })
                        .await
                    }
                };
                plugin.connection.answer(request.stream, answer);
            }));
        }
        let was_active = self.active.borrow().iter().any(|other| Rc::ptr_eq(other, plugin));
        self.deactivate(plugin);
        if was_active {
            self.log(Level::Warn, plugin, &format!("gone: {}", plugin.connection.cause()));
        }
    }

    async fn requested(&self, plugin: &Plugin, request: &Incoming) -> Result<Vec<u8>, (Status, Vec<u8>)> {
        match request.method.as_str() {
            REGISTER => refusal(Code::FAILED_PRECONDITION, "it is registered already"),
            "UpdateContainers" => match bound::decode(&request.payload) {
                Ok(request) => self.update_containers(plugin, request).await,
                Err(why) => refusal(Code::INTERNAL, &format!("UpdateContainers: the request {why}")),
            },
            other => refusal(Code::UNIMPLEMENTED, &format!("unknown method {other:?}")),
        }
    }

    /// Applies unsolicited updates, concurrently with events in progress (NRI 3.7).
    async fn update_containers(
        &self,
        plugin: &Plugin,
        request: api::UpdateContainersRequest,
    ) -> Result<Vec<u8>, (Status, Vec<u8>)> {
        let mut failed = Vec::new();
        for update in request.update {
            let verdict = self.host.update(update.clone()).await;
            if let Verdict::Failed(why) = verdict
                && !update.ignore_failure
            {
                self.log(
                    Level::Warn,
                    plugin,
                    &format!("update of container {:.13}: {why}", update.container_id),
                );
                failed.push(update);
            }
        }
        self.evict(plugin, request.evict);
        if failed.is_empty() {
            return Ok(api::UpdateContainersResponse::default().encode_to_vec());
        }
        let ids = failed.iter().map(|update| update.container_id.as_str()).collect::<Vec<_>>().join(", ");
        let status = get_status(Code::UNKNOWN, format!("NRI update of some containers failed: {ids}"));
        Err((status, api::UpdateContainersResponse { failed }.encode_to_vec()))
    }

    /// The other active plugins with this plugin's index and name.
    fn same(&self, plugin: &Plugin) -> Vec<Rc<Plugin>> {
        let title = plugin.title();
        self.active.borrow().iter().filter(|other| other.title() == title).cloned().collect()
    }

    /// Disconnects all plugins; if `tell` is set, after calling Shutdown.
    pub async fn shutdown(&self, tell: bool) {
        let plugins = self.active.borrow().clone();
        if tell {
            let payload = api::Empty::default().encode_to_vec();
            let calls =
                plugins.iter().map(|plugin| plugin.connection.call("Shutdown", &payload, SHUTDOWN_LIMIT));
            crate::validate::all(calls.collect()).await;
        }
        for plugin in &plugins {
            self.deactivate(plugin);
            plugin.connection.close("the runtime is stopping");
        }
        for connection in self.joins.unregistered.take() {
            connection.close("the runtime is stopping");
        }
    }
}

/// An active plugin that the runtime has started.
pub struct Running {
    plugin: Rc<Plugin>,
}

impl Running {
    /// Waits until the plugin's connection is closed.
    pub async fn ended(&self) {
        self.plugin.connection.ended().await;
    }
}

const REGISTER: &str = "RegisterPlugin";

fn refusal(code: Code, text: &str) -> Result<Vec<u8>, (Status, Vec<u8>)> {
    Err((get_status(code, text), Vec::new()))
}

fn answered(what: &str, outcome: Outcome<Vec<u8>>) -> Result<Vec<u8>, String> {
    match outcome {
        Outcome::Ok(answer) => Ok(answer),
        Outcome::Refused(status) => Err(format!("{what}: {}", status.message)),
        Outcome::TimedOut => Err(format!("{what}: no answer in time")),
        Outcome::Lost => Err(format!("{what}: the connection was lost")),
    }
}

impl Joins {
    /// Removes a connection from the list of unregistered ones.
    fn forget(&self, connection: &Rc<Connection>) {
        self.unregistered.borrow_mut().retain(|other| !Rc::ptr_eq(other, connection));
    }

    /// The delay before the next join of the plugin `title` (index and name).
    fn turn(&self, title: &str) -> Duration {
        let mut histories = self.histories.borrow_mut();
        if histories.len() >= NAMES_MAX {
            histories.clear();
        }
        let now = Instant::now();
        let history = histories.entry(title.to_owned()).or_insert(History {
            tokens: TOKENS,
            counted_at: now,
            sync_failures: 0,
        });
        let earned = (now - history.counted_at).as_secs() / TOKEN_EVERY.as_secs();
        if earned > 0 {
            history.tokens =
                TOKENS.min(history.tokens.saturating_add(u32::try_from(earned).unwrap_or(TOKENS)));
            history.counted_at = now;
        }
        let for_token = match history.tokens.checked_sub(1) {
            Some(left) => {
                history.tokens = left;
                Duration::ZERO
            }
            None => TOKEN_EVERY,
        };
        let for_sync = match history.sync_failures.checked_sub(SYNC_FAILURES_FREE) {
            Some(more) => SYNC_WAIT_MAX.min(SYNC_WAIT_MIN.saturating_mul(1 << more.min(8))),
            None => Duration::ZERO,
        };
        for_token.max(for_sync)
    }

    fn synchronized(&self, title: &str, is_well: bool) {
        if let Some(history) = self.histories.borrow_mut().get_mut(title) {
            history.sync_failures = if is_well { 0 } else { history.sync_failures.saturating_add(1) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tests rule NRI-R15 of docs/specs/nri.md.
    #[test]
    fn a_burst_of_joins_is_delayed() {
        let joins = Joins::default();
        for _ in 0..TOKENS {
            assert_eq!(joins.turn("10-a"), Duration::ZERO);
        }
        assert_eq!(joins.turn("10-a"), TOKEN_EVERY);
        assert_eq!(joins.turn("11-a"), Duration::ZERO, "another one does not wait");
    }

    /// Tests rule NRI-R16 of docs/specs/nri.md.
    #[test]
    fn failed_synchronizations_are_delayed_with_growing_intervals() {
        let joins = Joins::default();
        joins.turn("10-a");
        let mut waits = Vec::new();
        for _ in 0..8 {
            joins.synchronized("10-a", false);
            waits.push(joins.turn("10-a").as_secs());
        }
        assert_eq!(waits, [0, 10, 20, 40, 80, 160, 300, 300]);
        joins.synchronized("10-a", true);
        assert_eq!(joins.turn("10-a"), Duration::ZERO);
    }
}
