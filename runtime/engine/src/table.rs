//! The table of all pods and containers ([`Pods`]: look-ups, lists and names), and what they share ([`Engine`]). What concerns one
//! pod or container is a method of [`Pod`] or [`Container`].
//!
//! ```text
//! Pods ──► Pod, Container (in the table) ──► Engine ──► Node
//!   ▲                                          │
//!   └────────────── weak reference ────────────┘
//! ```

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::{Rc, Weak};

use coracle_base::error::{Error, Kind};
use coracle_base::log;
use coracle_sandbox::cgroup::{CgroupPath, Driver};
use coracle_sandbox::{ContainerId, PodId};

use crate::lifecycle::LifecycleHooks;
use crate::node::Node;
use crate::notices::{ChangeKind, Listener, Listeners, Notice};
use crate::operations::Operations;
use crate::unknown::{Retries, Unknown};
use crate::{Container, Pod, output, spec};

/// Maximum number of different warnings that are remembered; texts may contain names from clients.
const WARNINGS_MAX: usize = 256;

/// The node, and the services of this daemon that all pods share.
pub struct Engine {
    /// The environment of the pods.
    pub node: Node,
    /// The lifecycle hooks, which call NRI plugins.
    pub(crate) hooks: Rc<dyn LifecycleHooks>,
    pub(crate) listeners: Listeners<Pod>,
    /// Running operations on pods and containers.
    pub operations: Rc<Operations>,
    /// The output budget of all ExecSync calls.
    pub(crate) exec_output: Rc<output::Budget>,
    /// Texts of warnings that were logged: every container may request a limit that this kernel does not
    /// have.
    warned: RefCell<BTreeSet<String>>,
    pods: Weak<Pods>,
}

/// All pods and containers by their IDs, and the reserved names.
#[derive(Default)]
pub(crate) struct Table {
    pub(crate) pods: RefCell<BTreeMap<PodId, Rc<Pod>>>,
    pub(crate) names: RefCell<HashMap<spec::PodName, PodId>>,
    pub(crate) containers: RefCell<BTreeMap<ContainerId, Rc<Container>>>,
}

/// The pods of this node.
pub struct Pods {
    engine: Rc<Engine>,
    pub(crate) table: Table,
    /// Pods whose state could not be determined at the start.
    pub(crate) unknown: RefCell<BTreeMap<PodId, Unknown>>,
    pub(crate) retries: Retries,
}

impl Pods {
    /// Creates an empty table: [`Pods::recover`] fills it before the first call is served.
    pub fn new(node: Node, hooks: Rc<dyn LifecycleHooks>) -> Rc<Self> {
        Rc::new_cyclic(|pods| Self {
            engine: Engine::new(node, hooks, pods.clone()),
            table: Table::default(),
            unknown: RefCell::default(),
            retries: Retries::default(),
        })
    }

    /// The node and the services that all pods share.
    pub fn engine(&self) -> &Rc<Engine> {
        &self.engine
    }

    /// The environment of the pods.
    pub fn node(&self) -> &Node {
        &self.engine.node
    }

    /// The listed pods, newest first.
    pub fn pods(&self) -> Vec<Rc<Pod>> {
        let mut pods: Vec<_> =
            self.table.pods.borrow().values().filter(|pod| pod.is_visible()).cloned().collect();
        pods.sort_by_key(|pod| std::cmp::Reverse(pod.record().created_at_ns));
        pods
    }

    /// All pods, including those that are being created or removed, which lists do not show.
    pub fn every_pod(&self) -> Vec<Rc<Pod>> {
        self.table.pods.borrow().values().cloned().collect()
    }

    /// The containers that lists show, newest first.
    pub fn containers(&self) -> Vec<Rc<Container>> {
        let containers = self.table.containers.borrow();
        let mut containers: Vec<_> =
            containers.values().filter(|container| container.is_visible()).cloned().collect();
        containers.sort_by_key(|container| std::cmp::Reverse(container.record().created_at_ns));
        containers
    }

    /// Finds a pod by an ID or a unique prefix of one, for a client.
    ///
    /// # Errors
    /// `NotFound`; `InvalidArgument` for an ambiguous prefix; `Unavailable` if the pod's record cannot be
    /// read at the moment, or the pod is being undone after the end of the daemon that created it.
    pub fn pod(&self, id: &str) -> Result<Rc<Pod>, Error> {
        let pods = self.table.pods.borrow();
        let found = find(pods.iter().filter(|(_, pod)| pod.is_visible()), id, "pod sandbox");
        let pod = found.map_err(|error| {
            let unknown = self.unknown.borrow();
            let mut unlisted = unknown.keys().filter(|id| !pods.contains_key(id));
            let is_it = !id.is_empty() && unlisted.any(|unlisted| unlisted.to_string().starts_with(id));
            // Undoing it may fail, and then it is listed.
            let mut undone =
                pods.iter().filter(|(_, pod)| !pod.is_visible() && pod.creation.is_earlier.get());
            let is_undone = !id.is_empty() && undone.any(|(undone, _)| undone.to_string().starts_with(id));
            match is_undone && error.kind() == Kind::NotFound {
                true => error.context("it is being undone").with_kind(Kind::Unavailable),
                false => unless_unread(error, is_it),
            }
        })?;
        pod.creation.is_known.set(true);
        Ok(pod)
    }

    /// Finds a container by an ID or a unique prefix of one, for a client.
    ///
    /// # Errors
    /// `NotFound`; `InvalidArgument` for an ambiguous prefix; `Unavailable` if a record cannot be read at the
    /// moment, which may be that of this container.
    pub fn container(&self, id: &str) -> Result<Rc<Container>, Error> {
        let containers = self.table.containers.borrow();
        let visible = containers.iter().filter(|(_, container)| container.is_visible());
        let container = find(visible, id, "container").map_err(|error| {
            unless_unread(error, self.unknown.borrow().values().any(|unknown| unknown.is_unread))
        })?;
        container.creation.is_known.set(true);
        Ok(container)
    }

    /// Finds a container for a plugin. Unlike [`Pods::container`], this does not count as the use of the ID
    /// by a client.
    pub fn container_for_plugin(&self, id: &str) -> Option<Rc<Container>> {
        let containers = self.table.containers.borrow();
        id.parse().ok().and_then(|id| containers.get(&id)).filter(|container| container.is_visible()).cloned()
    }

    /// Calls `listener` at every change until it returns false.
    pub fn listen(&self, listener: Listener<Pod>) {
        self.engine().listeners.add(listener);
    }

    /// Number of pods whose monitor is of an older build.
    pub fn outdated(&self) -> usize {
        let is_outdated =
            |pod: &&Rc<Pod>| pod.connection.link.borrow().as_ref().is_some_and(|link| link.is_outdated());
        self.table.pods.borrow().values().filter(is_outdated).count()
    }

    /// Number of listeners for changes.
    pub fn listeners(&self) -> usize {
        self.engine().listeners.len()
    }

    /// Removes the default cgroup parent at shutdown if coracle created it and there are no pods.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn release_cgroup_parent(&self) -> Result<(), Error> {
        match self.node().placement.driver {
            Driver::Cgroupfs => Ok(self
                .node()
                .cgroups
                .unmake_if_unused(&CgroupPath::parse(&self.node().placement.parent)?)?),
            Driver::Systemd => Ok(()),
        }
    }

    /// Enters a pod into the table; a pod that holds its name already keeps it.
    pub(crate) fn enter(&self, pod: &Rc<Pod>) {
        self.table.names.borrow_mut().entry(pod.record().spec.name.clone()).or_insert(pod.id);
        self.table.pods.borrow_mut().insert(pod.id, Rc::clone(pod));
    }

    /// Enters a container of a pod in the table.
    pub(crate) fn enter_container(&self, container: &Rc<Container>) {
        self.table.containers.borrow_mut().insert(container.id, Rc::clone(container));
    }

    /// Removes a pod and its name.
    pub(crate) fn leave(&self, id: PodId) {
        self.table.names.borrow_mut().retain(|_, holder| *holder != id);
        self.table.pods.borrow_mut().remove(&id);
        self.set_unknown(id, None);
    }

    /// The containers of a pod, including those being created.
    pub(crate) fn containers_of(&self, pod: PodId) -> Vec<Rc<Container>> {
        self.table.containers.borrow().values().filter(|container| container.pod.id == pod).cloned().collect()
    }

    /// Drops all listeners at shutdown.
    pub fn end_listening(&self) {
        self.engine().listeners.clear();
    }
}

impl Engine {
    pub(crate) fn new(node: Node, hooks: Rc<dyn LifecycleHooks>, pods: Weak<Pods>) -> Rc<Self> {
        Rc::new(Self {
            node,
            hooks,
            listeners: Listeners::default(),
            operations: Rc::default(),
            exec_output: output::Budget::new(),
            warned: RefCell::default(),
            pods,
        })
    }

    /// The table of all pods; `None` if it was dropped at the end of the daemon.
    pub fn pods(&self) -> Option<Rc<Pods>> {
        self.pods.upgrade()
    }

    /// Logs a warning about an ignored setting, once in the lifetime of the daemon.
    pub(crate) fn warn_once(&self, text: String) {
        let mut warned = self.warned.borrow_mut();
        if warned.len() < WARNINGS_MAX && !warned.contains(&text) {
            log::warn!("unsupported by this kernel, ignored"; reason = text);
            warned.insert(text);
        }
    }

    /// Notifies listeners of a change. `container` is the name of the container; empty for a change of the
    /// pod itself.
    pub(crate) fn tell(&self, kind: ChangeKind, id: &impl std::fmt::Display, container: &str, pod: &Rc<Pod>) {
        // There is usually no listener, and formatting an ID takes time.
        if self.listeners.len() > 0 {
            let at_ns = self.node.kernel.clock.now_ns();
            self.listeners.tell(&Notice { kind, id: id.to_string(), container, pod, at_ns });
        }
    }
}

/// The error for an object that is not in the table: `Unavailable` instead of `NotFound` if a record could
/// not be read, because a client that receives `NotFound` assumes that the object is removed.
fn unless_unread(error: Error, is_unread: bool) -> Error {
    match error.kind() == Kind::NotFound && is_unread {
        true => error.context("a record cannot be read at the moment").with_kind(Kind::Unavailable),
        false => error,
    }
}

/// Finds the entry whose ID is `id` or the only one that begins with `id` (CRI 2.0).
fn find<'a, K: std::fmt::Display + 'a, V: Clone + 'a>(
    entries: impl Iterator<Item = (&'a K, &'a V)>,
    id: &str,
    what: &str,
) -> Result<V, Error> {
    let is_digits = !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    let mut found = entries.filter(|(key, _)| is_digits && key.to_string().starts_with(id));
    match (found.next(), found.next()) {
        (Some((_, value)), None) => Ok(value.clone()),
        (None, _) => Err(Error::new(Kind::NotFound, format!("{what} {id:?}: not found"))),
        (Some(_), Some(_)) => {
            Err(Error::new(Kind::InvalidArgument, format!("{what} {id:?}: several ids start so")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_is_never_a_guess() {
        let ids = ["aa10".to_owned(), "aa20".to_owned(), "bb00".to_owned()];
        let entries = || ids.iter().map(|id| (id, id));
        assert_eq!(find(entries(), "bb", "pod").unwrap(), "bb00");
        assert_eq!(find(entries(), "aa10", "pod").unwrap(), "aa10");
        for (id, expected) in
            [("aa", "several ids"), ("", "not found"), ("cc", "not found"), ("b*", "not found")]
        {
            let error = find(entries(), id, "pod").unwrap_err().to_string();
            assert!(error.contains(expected), "{id:?}: {error}");
        }
    }
}
