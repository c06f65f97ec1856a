//! The pods' network by CNI: which configuration is in force, whether the node's network is ready, and attaching and
//! detaching one pod. The common plugins are built in (`builtin`); others run in a worker, also those between them in one
//! list (`walk`): this room knows their configuration and what each pod was told, never a plugin process.
//!
//! ```text
//!   directory ── scan, inotify ──> conf::List ── plan(pod) ──> Recorded ── stored by the core ──> add … del
//!       └─ nothing there: DefaultNetwork ──┘                                                 walk: builtin, workers
//!                                     └── STATUS every 10 s (lists of 1.1.0) ──> ready()
//! ```
//!
//! What a pod was attached with is in its record before `add`, so `del` needs no configuration that may have changed or
//! gone since. The first `add` waits until pods of an earlier boot are detached: their leases must not be handed out
//! twice, and host-local would otherwise count them as taken.
//! Rules: CRI 2.2, CRI 5 and BOOT-3; docs/cni.md.
#![forbid(unsafe_code)]

mod builtin;
mod conf;
mod directory;
mod plan;
mod status;
mod walk;

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::time::Duration;

use coracle_base::error::{Error, Kind};
use coracle_base::workers::Workers;
use coracle_base::{log, reactor};
use coracle_job::{Attachment, CniCommand, Job, Outcome};
use serde::{Deserialize, Serialize};
use smol::channel::{self, Receiver, Sender};

pub use self::builtin::DefaultNetwork;
use self::conf::List;
use self::directory::Signature;
pub use self::plan::{Dns, PodNetwork};
use self::status::Health;

/// Longest STATUS: it is asked every [`STATUS_PERIOD`].
const STATUS_LIMIT: Duration = Duration::from_secs(5);
/// How often plugins are asked for their STATUS (CRI 5.7: 5 to 10 s).
const STATUS_PERIOD: Duration = Duration::from_secs(10);
/// Changes that follow each other this closely are looked at once: editors and installers write, sync and rename.
const SETTLE: Duration = Duration::from_millis(100);
/// How long the watch rests when the kernel refuses one (no inotify instances left). Status looks by itself meanwhile.
const REST: Duration = Duration::from_secs(30);

/// Runs a job in a worker process: [`in_workers`], or a test's closure.
pub(crate) type RunJob = Box<dyn Fn(Job) -> Pin<Box<dyn Future<Output = Result<Outcome, Error>>>>>;

/// Runs jobs in `workers`; a plugin's refusal keeps its words.
pub fn in_workers(workers: Rc<Workers>) -> RunJob {
    Box::new(move |job| {
        let workers = Rc::clone(&workers);
        Box::pin(async move { workers.run(job, |_, _| {}).await.map_err(Error::from) })
    })
}

/// How one pod is attached; all that `del` needs, whatever happens to the configuration, the daemon or the node. Part of
/// the pod's record, where it is best kept as JSON text of its own: then a record of another release can be read, with
/// defaults for what it lacks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recorded {
    /// The flat list, as JSON.
    pub conflist: String,
    /// What its plugins are told of the pod.
    pub attachment: Attachment,
    /// It is the built-in plugins that attach it: those that detach it, too, as its rules are where no other looks.
    #[serde(default, skip_serializing_if = "is_false")]
    pub(crate) is_built_in: bool,
    /// Places in the list of those that are built in, where others are programs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub built_in: Vec<usize>,
}

fn is_false(value: &bool) -> bool {
    !value
}

impl Recorded {
    /// For a pod whose namespace is gone, as those of an earlier boot: plugins release what lies outside of it.
    #[must_use]
    pub fn without_namespace(mut self) -> Recorded {
        self.attachment.netns.clear();
        self
    }
}

/// The node's network as one look finds it, without a daemon.
pub struct Survey {
    /// Its name.
    pub name: String,
    /// The file that it is from; none for the built-in default.
    pub file: Option<PathBuf>,
    /// Types of its plugins that are neither built in nor in any directory.
    pub missing: Vec<String>,
}

/// Looks once, for `coracle check`. `Err`: why there is no network.
///
/// # Errors
/// The reason why there is no network, for people.
pub fn survey(options: &Options) -> Result<Survey, String> {
    let conf_dir = &options.conf_dir;
    let (list, status) = directory::settle(None, directory::scan(conf_dir), conf_dir);
    let Some(list) = list else {
        let built_in = Survey { name: "built in".into(), file: None, missing: Vec::new() };
        return options.default.as_ref().map(|_| built_in).ok_or(status.err().unwrap_or_default());
    };
    let is_there = |kind: &String| options.bin_dirs.iter().any(|dir| dir.join(kind).is_file());
    let kinds = options.programs(&list).map(|programs| conf::kinds(&programs)).unwrap_or_default();
    let missing = kinds.into_iter().filter(|kind| !is_there(kind)).collect();
    Ok(Survey { name: list.name.clone(), file: Some(conf_dir.join(&list.file)), missing })
}

/// Where configuration and plugins are, and what is there without.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The directory of configurations, which may be missing.
    pub conf_dir: PathBuf,
    /// Where plugins are searched.
    pub bin_dirs: Vec<PathBuf>,
    /// Whether lists of built-in plugins are run without programs.
    pub runs_built_in: bool,
    /// The network of a node without any configuration.
    pub default: Option<DefaultNetwork>,
}

impl Options {
    /// Those plugins of `list` that are programs, as a list; `None`: no program is needed.
    fn programs(&self, list: &List) -> Option<String> {
        if self.runs_built_in { builtin::programs(&list.text) } else { Some(list.text.clone()) }
    }
}

/// The node's one CNI network.
pub struct Network {
    options: Options,
    run: RunJob,
    netfilter: builtin::Netfilter,
    state: RefCell<State>,
    /// Wakes the task that asks for STATUS when there is another list to ask about.
    changed: (Sender<()>, Receiver<()>),
    /// Closed when pods of an earlier boot are detached; nothing is ever sent.
    recovered: (Sender<()>, Receiver<()>),
}

/// What is in force, and how we know.
struct State {
    list: Option<Rc<List>>,
    /// The last look at the directory: what was wrong.
    load: Result<(), String>,
    /// The directory as it was at that look.
    seen: Signature,
    health: Health,
}

impl State {
    /// The list in force, else why there is none.
    fn in_force(&self) -> Result<Rc<List>, String> {
        let why = || self.load.as_ref().err().map_or("no configuration", String::as_str);
        self.list.clone().ok_or_else(|| format!("cni plugin not initialized: {}", why()))
    }
}

impl Network {
    /// Reads the configuration.
    pub fn new(options: Options, run: RunJob) -> Rc<Network> {
        let state = State { list: None, load: Ok(()), seen: Signature::default(), health: Health::default() };
        let network = Rc::new(Network {
            options,
            run,
            netfilter: builtin::Netfilter::default(),
            state: RefCell::new(state),
            changed: channel::bounded(1),
            recovered: channel::bounded(1),
        });
        network.look();
        network
    }

    /// Starts the tasks that follow the directory and the plugins' health; they end with the network.
    pub fn start(self: &Rc<Self>) {
        reactor::spawn(follow(Rc::downgrade(self), self.options.conf_dir.clone())).detach();
        reactor::spawn(ask_for_status(Rc::downgrade(self), self.changed.1.clone())).detach();
    }

    /// Whether pods can be attached, for the condition NetworkReady; else the message that goes with the reason
    /// `NetworkPluginNotReady`. Cheap: no plugin runs for it, and files are read only after a change.
    ///
    /// # Errors
    /// What is missing, for people.
    pub fn ready(&self) -> Result<(), String> {
        self.catch_up();
        let state = self.state.borrow();
        state.in_force()?;
        state.health.ready().map_err(|why| format!("cni plugin not ready: {why}"))
    }

    /// How the last look at the directory went, for `lastCNILoadStatus` of a verbose Status: a list can be in force while
    /// its file is broken now.
    ///
    /// # Errors
    /// What is wrong with the file, for people.
    pub fn load_status(&self) -> Result<(), String> {
        self.state.borrow().load.clone()
    }

    /// The list in force as JSON, for `cniconfig` of a verbose Status.
    pub fn conflist(&self) -> Option<String> {
        self.state.borrow().list.as_ref().map(|list| list.text.clone())
    }

    /// How `pod` would be attached now: to be recorded before [`Network::add`]. A network that says it is not ready is
    /// no reason to refuse: its plugins will, with words that fit.
    ///
    /// # Errors
    /// `FailedPrecondition` where no network is in force, `InvalidArgument` for what the configuration or the request cannot
    /// be.
    pub fn plan(&self, pod: &PodNetwork<'_>) -> Result<Recorded, Error> {
        self.catch_up();
        let list = self.state.borrow().in_force().map_err(|why| Error::new(Kind::FailedPrecondition, why))?;
        let attachment = plan::attachment(pod, &list)?;
        if !attachment.port_mappings.is_empty() && !list.capabilities.contains("portMappings") {
            log::warn!("no plugin of the network maps host ports: the pod runs without"; pod = pod.id, network = list.name);
        }
        let conflist = match &self.options.default {
            Some(default) if list.file.is_empty() => default.conflist(pod.pod_cidr),
            _ => list.text.clone(),
        };
        let (is_built_in, built_in) = self.choose(&conflist, &attachment);
        Ok(Recorded { conflist, attachment, is_built_in, built_in })
    }

    /// Whether all plugins are built in, else the places of those that are.
    fn choose(&self, conflist: &str, attachment: &Attachment) -> (bool, Vec<usize>) {
        if !self.options.runs_built_in {
            return (false, Vec::new());
        }
        let (reasons, choice) = match builtin::choose(conflist, attachment) {
            Ok(choice) if choice.reasons.is_empty() => return (true, Vec::new()),
            Ok(choice) => (choice.reasons.join("; "), choice.places),
            Err(why) => (why, Vec::new()),
        };
        log::debug!("programs attach the pod"; pod = attachment.container_id, reason = reasons);
        (false, choice)
    }

    /// Pods of an earlier boot are detached, as well as could be: from now on pods may be attached.
    pub fn recovered(&self) {
        self.recovered.0.close();
    }

    /// Looks again if the directory is not what it was: in case the watch missed something.
    fn catch_up(&self) {
        if self.state.borrow().seen != directory::signature(&self.options.conf_dir) {
            self.look();
        }
    }

    /// Looks at the directory and takes over what is there. Each change of what is wrong is logged once.
    fn look(&self) {
        // Before the files are read: a change in between is then seen at the next look.
        let seen = directory::signature(&self.options.conf_dir);
        let scan = directory::scan(&self.options.conf_dir);
        for (file, why) in &scan.bad {
            log::debug!("network configuration not usable"; file = file, error = why);
        }
        let mut state = self.state.borrow_mut();
        let before = state.list.clone();
        let is_empty = scan.list.is_none() && scan.bad.is_empty() && scan.error.is_none();
        let (mut list, mut load) = directory::settle(before.clone(), scan, &self.options.conf_dir);
        if let (true, Some(default)) = (is_empty, &self.options.default) {
            let found = List::built_in(default.conflist(""));
            list = before.clone().filter(|before| **before == found).or(Some(Rc::new(found)));
            load = Ok(());
        }
        if let Err(why) = &load
            && state.load.as_ref() != Err(why)
        {
            log::warn!("network configuration"; error = why);
        }
        state.load = load;
        state.seen = seen;
        if list == before {
            return;
        }
        match &list {
            Some(list) => {
                log::info!("network configuration taken over"; network = list.name, file = list.file, version = list.version);
            }
            None => log::warn!("no network configuration any more"; dir = self.options.conf_dir.display()),
        }
        state.health = Health::of(list.as_deref().filter(|list| self.options.programs(list).is_some()));
        state.list = list;
        // A full channel is a wake-up that is still to come.
        let _ = self.changed.0.try_send(());
    }

    /// Asks `programs` of `list`, and notes the answer if that list is still in force.
    async fn ask(&self, list: &Rc<List>, programs: String) {
        let answer = self.work(CniCommand::Status, programs, &Attachment::default(), STATUS_LIMIT).await;
        let mut state = self.state.borrow_mut();
        if state.list.as_ref().is_some_and(|current| Rc::ptr_eq(current, list)) {
            let was_ready = state.health.ready().is_ok();
            state.health.hear(answer.map(drop).map_err(|error| error.to_string()));
            match state.health.ready() {
                Ok(()) if !was_ready => log::info!("network ready"; network = list.name),
                Err(why) if was_ready => log::warn!("network not ready"; network = list.name, error = why),
                _ => {}
            }
        }
    }
}

/// Follows the directory until the network is dropped.
async fn follow(network: Weak<Network>, dir: PathBuf) {
    loop {
        let armed = reactor::arm(std::slice::from_ref(&dir));
        let Some(there) = network.upgrade() else { return };
        there.look();
        drop(there);
        if let Err(error) = wait(armed).await {
            log::warn!("watch network configuration"; dir = Path::display(&dir), error = error);
            reactor::sleep(REST).await;
        }
        reactor::sleep(SETTLE).await;
    }
}

/// Waits for one change.
async fn wait(armed: std::io::Result<reactor::Watched>) -> std::io::Result<()> {
    // What changed is not read: the whole directory is looked at again.
    armed?.readable().await
}

/// Asks for STATUS at once when the list changes, and then every [`STATUS_PERIOD`], for lists that have it. Sleeps
/// without a timer while there is none.
async fn ask_for_status(network: Weak<Network>, changed: Receiver<()>) {
    loop {
        let Some(there) = network.upgrade() else { return };
        let list = there.state.borrow().list.clone();
        let list = list.filter(|list| list.has_status());
        let asked = list.and_then(|list| there.options.programs(&list).map(|programs| (list, programs)));
        let is_asked = asked.is_some();
        if let Some((list, programs)) = asked {
            there.ask(&list, programs).await;
        }
        drop(there);
        let ended = match is_asked {
            true => matches!(reactor::deadline(STATUS_PERIOD, changed.recv()).await, Ok(Err(_))),
            false => changed.recv().await.is_err(),
        };
        if ended {
            return;
        }
    }
}

#[cfg(test)]
mod tests;
