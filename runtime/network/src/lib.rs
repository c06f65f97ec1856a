//! Pod networking by CNI: chooses the active configuration, determines whether the network is ready, and
//! attaches and detaches pods. The common plugins are built in (`builtin`); workers execute the others, also
//! between built-in plugins of one list (`walk`). This crate starts no plugin process itself.
//!
//! ```text
//! directory ── scan, inotify ──> conf::List ── plan(pod) ──> Recorded ── stored by the engine ──> add … del
//!       └─ no file: DefaultNetwork ──┘                                                 walk: builtin, workers
//!                                     └── STATUS every 10 s (lists of 1.1.0) ──> ready()
//! ```
//!
//! The pod's record contains all parameters of its attachment before `add`, so `del` does not depend on
//! configuration that may have changed since. The first `add` waits until pods of an earlier boot are
//! detached: otherwise their addresses would be allocated twice, or would stay allocated. Rules: CRI 2.2, CRI
//! 5 and BOOT-3; docs/cni.md.
#![forbid(unsafe_code)]

mod arguments;
mod builtin;
mod conf;
mod directory;
pub mod lost;
mod status;
mod walk;

use std::cell::RefCell;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::time::Duration;

use coracle_base::error::{Error, Kind, describe_io};
use coracle_base::workers::Workers;
use coracle_base::{log, reactor};
use coracle_job::{Attachment, CniCommand, Job, Outcome};
use serde::{Deserialize, Serialize};
use smol::channel::{self, Receiver, Sender};

pub use self::arguments::{Dns, PodNetwork};
pub use self::builtin::DefaultNetwork;
use self::conf::List;
use self::directory::Signature;
use self::status::Health;

/// Time limit of STATUS, which is executed every [`STATUS_PERIOD`].
const STATUS_LIMIT: Duration = Duration::from_secs(5);
/// Interval of STATUS (CRI 5.7: 5 to 10 s).
const STATUS_PERIOD: Duration = Duration::from_secs(10);
/// Time to wait after a change before the directory is read, because editors and installers write, sync and
/// rename.
const DEBOUNCE: Duration = Duration::from_millis(100);
/// Time for which the watch is suspended when inotify fails (no instances left). During this time the RPC
/// Status checks the directory.
const WATCH_RETRY: Duration = Duration::from_secs(30);

/// A function that runs a job in a worker process: [`in_workers`], or a closure in tests.
pub(crate) type RunJob = Box<dyn Fn(Job) -> Pin<Box<dyn Future<Output = Result<Outcome, Error>>>>>;

/// Returns a function that runs jobs in `workers` and keeps the text of a plugin's error.
pub fn in_workers(workers: Rc<Workers>) -> RunJob {
    Box::new(move |job| {
        let workers = Rc::clone(&workers);
        Box::pin(async move { workers.run(job).await.map_err(Error::from) })
    })
}

/// The attachment of one pod: all parameters that `del` needs, independent of later changes of the
/// configuration, the daemon or the node. It is part of the pod's record, where it should be stored as JSON
/// text: then records of other releases can be read, with defaults for missing fields.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recorded {
    /// The self-contained list as JSON.
    pub conflist: String,
    /// The parameters for the plugins of the list.
    pub attachment: Attachment,
    /// Whether all plugins are built in. DEL must then use the built-in plugins, too, because plugin programs
    /// do not find their rules.
    #[serde(default, skip_serializing_if = "is_false")]
    pub(crate) is_built_in: bool,
    /// Indices of the built-in plugins if the other plugins are programs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub built_in: Vec<usize>,
}

fn is_false(value: &bool) -> bool {
    !value
}

impl Recorded {
    /// Removes the path of the namespace, for a pod of an earlier boot: plugins then release only objects
    /// outside of the namespace.
    #[must_use]
    pub fn without_namespace(mut self) -> Recorded {
        self.attachment.netns.clear();
        self
    }
}

/// The node's network configuration as `coracle check` reports it.
pub struct Survey {
    /// Name of the network.
    pub name: String,
    /// File of the network configuration; `None` for the built-in default network.
    pub file: Option<PathBuf>,
    /// Types of plugins that are neither built in nor in a plugin directory.
    pub missing: Vec<String>,
    /// The problem of another file in the directory; `None` if there is none.
    pub problem: Option<String>,
}

/// Reads the configuration once, for `coracle check`.
///
/// # Errors
/// The reason why there is no network, as text for users.
pub fn survey(options: &Options) -> Result<Survey, String> {
    let (list, status) = decide(options, directory::scan(&options.conf_dir), None);
    let (list, problem) = match (list, status) {
        (Some(list), status) => (list, status.err()),
        (None, status) => return Err(status.err().unwrap_or_default()),
    };
    if list.file.is_empty() {
        return Ok(Survey { name: "built in".into(), file: None, missing: Vec::new(), problem });
    }
    let is_there = |kind: &String| options.bin_dirs.iter().any(|dir| dir.join(kind).is_file());
    let kinds = options.programs(&list).map(|programs| conf::kinds(&programs)).unwrap_or_default();
    let missing = kinds.into_iter().filter(|kind| !is_there(kind)).collect();
    Ok(Survey { name: list.name.clone(), file: Some(options.conf_dir.join(&list.file)), missing, problem })
}

/// Returns the list that is active after a scan, and the problem if there is one. The built-in default
/// network is used only if the directory has no configuration: a file that cannot be read means that another
/// network is intended.
fn decide(
    options: &Options,
    scan: directory::Scan,
    before: Option<Rc<List>>,
) -> (Option<Rc<List>>, Result<(), String>) {
    let is_empty = scan.list.is_none() && scan.bad.is_empty() && scan.error.is_none();
    if let (true, Some(default)) = (is_empty, &options.default) {
        let found = List::built_in(default.conflist(""));
        return (before.filter(|before| **before == found).or(Some(Rc::new(found))), Ok(()));
    }
    directory::choose(before, scan, &options.conf_dir)
}

/// Writes sysctls, files below /proc/sys with their values, in the network namespace at `path`.
///
/// # Errors
/// `Unknown`, as for a failed container, with the sysctl that the kernel refused; the later ones were not written.
pub fn set_sysctls(path: &Path, sysctls: &[(String, String)]) -> Result<(), Error> {
    coracle_netlink::inside(path, || {
        for (file, value) in sysctls {
            // Without O_CREAT, with which the kernel answers "permission denied" for a missing sysctl.
            let written = std::fs::OpenOptions::new().write(true).open(file);
            written.and_then(|mut file| file.write_all(value.as_bytes())).map_err(|error| {
                let name = file.trim_start_matches("/proc/sys/");
                Error::new(Kind::Unknown, format!("set sysctl {name} to {value:?}: {}", describe_io(&error)))
            })?;
        }
        Ok(())
    })?
}

/// Directories of configurations and plugins, and the default network.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Directory of configurations; may be missing.
    pub conf_dir: PathBuf,
    /// Directories of plugin executables.
    pub bin_dirs: Vec<PathBuf>,
    /// Whether built-in plugins are used.
    pub runs_built_in: bool,
    /// The network of a node without configuration; `None`: no network.
    pub default: Option<DefaultNetwork>,
}

impl Options {
    /// The plugins of `list` that are programs, as a list; `None` if no program is needed.
    fn programs(&self, list: &List) -> Option<String> {
        if self.runs_built_in { builtin::programs(&list.text) } else { Some(list.text.clone()) }
    }
}

/// The CNI network of the node.
pub struct Network {
    options: Options,
    run: RunJob,
    netfilter: builtin::Netfilter,
    state: RefCell<State>,
    /// Wakes the STATUS task when the list changes.
    changed: (Sender<()>, Receiver<()>),
    /// Closed when pods of an earlier boot are detached; no value is ever sent.
    recovered: (Sender<()>, Receiver<()>),
}

/// The active list and its state.
struct State {
    list: Option<Rc<List>>,
    /// The problem found by the last scan; `Ok` if there is none.
    load: Result<(), String>,
    /// The signature of the directory at the last scan.
    seen: Signature,
    health: Health,
}

impl State {
    /// The active list; the error is the reason why there is none.
    fn in_force(&self) -> Result<Rc<List>, String> {
        let why = || self.load.as_ref().err().map_or("no configuration", String::as_str);
        self.list.clone().ok_or_else(|| format!("cni plugin not initialized: {}", why()))
    }
}

impl Network {
    /// Creates the network and reads the configuration.
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

    /// Starts the tasks that watch the directory and run STATUS; they end with the network.
    pub fn start(self: &Rc<Self>) {
        reactor::spawn(follow(Rc::downgrade(self), self.options.conf_dir.clone())).detach();
        reactor::spawn(ask_for_status(Rc::downgrade(self), self.changed.1.clone())).detach();
    }

    /// Checks whether pods can be attached, for the condition NetworkReady. The call is cheap: it runs no
    /// plugin, and reads files only after a change.
    ///
    /// # Errors
    /// The message for the reason `NetworkPluginNotReady`, as text for users.
    pub fn ready(&self) -> Result<(), String> {
        self.catch_up();
        let state = self.state.borrow();
        state.in_force()?;
        state.health.ready().map_err(|why| format!("cni plugin not ready: {why}"))
    }

    /// The result of the last scan, for `lastCNILoadStatus` of a verbose Status. A list can be active
    /// although its file is now invalid.
    ///
    /// # Errors
    /// The problem of the file, as text for users.
    pub fn load_status(&self) -> Result<(), String> {
        self.state.borrow().load.clone()
    }

    /// The active list as JSON, for `cniconfig` of a verbose Status; `None` if there is none.
    pub fn conflist(&self) -> Option<String> {
        self.state.borrow().list.as_ref().map(|list| list.text.clone())
    }

    /// Determines how `pod` would be attached now; the caller must record the result before [`Network::add`].
    /// Does not fail while the network is not ready: the plugins will then fail with the specific error.
    ///
    /// # Errors
    /// `FailedPrecondition` if no network is active; `InvalidArgument` for invalid values of the
    /// configuration or the request.
    pub fn plan(&self, pod: &PodNetwork<'_>) -> Result<Recorded, Error> {
        self.catch_up();
        let list = self.state.borrow().in_force().map_err(|why| Error::new(Kind::FailedPrecondition, why))?;
        let attachment = arguments::attachment(pod, &list)?;
        if !attachment.port_mappings.is_empty() && !list.capabilities.contains("portMappings") {
            log::warn!("host ports of a pod are ignored, no plugin of the network supports them"; pod = pod.id, network = list.name);
        }
        let conflist = match &self.options.default {
            Some(default) if list.file.is_empty() => default.conflist(pod.pod_cidr),
            _ => list.text.clone(),
        };
        let (is_built_in, built_in) = self.choose(&conflist, &attachment);
        Ok(Recorded { conflist, attachment, is_built_in, built_in })
    }

    /// Whether all plugins are built in; if not, the indices of those that are.
    fn choose(&self, conflist: &str, attachment: &Attachment) -> (bool, Vec<usize>) {
        if !self.options.runs_built_in {
            return (false, Vec::new());
        }
        let (reasons, choice) = match builtin::choose(conflist, attachment) {
            Ok(choice) if choice.reasons.is_empty() => return (true, Vec::new()),
            Ok(choice) => (choice.reasons.join("; "), choice.places),
            Err(why) => (why, Vec::new()),
        };
        log::debug!("pod is attached by plugin programs"; pod = attachment.container_id, reason = reasons);
        (false, choice)
    }

    /// Permits ADD. Must be called once, when the pods of an earlier boot are detached as far as possible.
    pub fn recovered(&self) {
        self.recovered.0.close();
    }

    /// Scans the directory again if it has changed, in case inotify did not report the change.
    fn catch_up(&self) {
        if self.state.borrow().seen != directory::signature(&self.options.conf_dir) {
            self.look();
        }
    }

    /// Scans the directory and activates the resulting list. Each change of the problem is logged once.
    fn look(&self) {
        // Before the files are read: the next check then detects a change in between.
        let seen = directory::signature(&self.options.conf_dir);
        let scan = directory::scan(&self.options.conf_dir);
        for (file, why) in &scan.bad {
            log::debug!("network configuration file is invalid"; file = file, error = why);
        }
        let mut state = self.state.borrow_mut();
        let before = state.list.clone();
        let (list, load) = decide(&self.options, scan, before.clone());
        if let Err(why) = &load
            && state.load.as_ref() != Err(why)
        {
            log::warn!("no valid network configuration"; error = why);
        }
        state.load = load;
        state.seen = seen;
        if list == before {
            return;
        }
        match &list {
            Some(list) => {
                log::info!("network configuration loaded"; network = list.name, file = list.file, version = list.version);
            }
            None => log::warn!("network configuration removed"; dir = self.options.conf_dir.display()),
        }
        state.health = Health::of(list.as_deref().filter(|list| self.options.programs(list).is_some()));
        state.list = list;
        // If the channel is full, a wake-up is pending already.
        let _ = self.changed.0.try_send(());
    }

    /// Executes STATUS of `programs`, the programs of `list`, and stores the result if the list is still
    /// active.
    async fn ask(&self, list: &Rc<List>, programs: String) {
        let answer = self.work(CniCommand::Status, programs, &Attachment::default(), STATUS_LIMIT).await;
        let mut state = self.state.borrow_mut();
        if state.list.as_ref().is_some_and(|current| Rc::ptr_eq(current, list)) {
            let was_ready = state.health.ready().is_ok();
            state.health.update(answer.map(drop).map_err(|error| error.to_string()));
            match state.health.ready() {
                Ok(()) if !was_ready => log::info!("network ready"; network = list.name),
                Err(why) if was_ready => log::warn!("network not ready"; network = list.name, error = why),
                _ => {}
            }
        }
    }
}

/// Watches the directory until the network is dropped.
async fn follow(network: Weak<Network>, dir: PathBuf) {
    loop {
        let armed = reactor::arm(std::slice::from_ref(&dir));
        let Some(there) = network.upgrade() else { return };
        there.look();
        drop(there);
        // The whole directory is scanned after each change.
        let changed = match armed {
            Ok(armed) => armed.next().await,
            Err(error) => Err(error),
        };
        if let Err(error) = changed {
            log::warn!("cannot watch the network configuration, will retry"; dir = Path::display(&dir), error = describe_io(&error));
            reactor::sleep(WATCH_RETRY).await;
        }
        reactor::sleep(DEBOUNCE).await;
    }
}

/// Executes STATUS when the list changes, and then every [`STATUS_PERIOD`], for lists that support it. For
/// other lists the task sleeps without a timer.
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
