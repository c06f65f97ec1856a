//! The table of all pods and containers ([`Pods`]: look-ups, lists and names), and what they share ([`Engine`]). What concerns one
//! pod or container is a method of [`Pod`] or [`Container`].
//!
//! ```text
//! Pods ──► Pod, Container (in the table) ──► Engine ──► Node
//!   ▲                                          │
//!   └────────────── weak reference ────────────┘
//! ```

use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::{Rc, Weak};

use coracle_base::error::{Error, Kind};
use coracle_base::log;
use coracle_base::store::Unread;
use coracle_sandbox::cgroup::{CgroupPath, Driver};
use coracle_sandbox::collect;
use coracle_sandbox::{ContainerId, PodId};

use crate::lifecycle::LifecycleHooks;
use crate::node::Node;
use crate::notices::{ChangeKind, Listener, Listeners, Notice};
use crate::operations::Operations;
use crate::unknown::{Retries, Unknown};
use crate::{Container, Pod, output, spec, state};

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
    /// The containers by their pods.
    by_pod: RefCell<BTreeSet<(PodId, ContainerId)>>,
}

/// The pods of this node.
pub struct Pods {
    engine: Rc<Engine>,
    pub(crate) table: Table,
    /// Pods whose state could not be determined at the start.
    pub(crate) unknown: RefCell<BTreeMap<PodId, Unknown>>,
    pub(crate) retries: Retries,
    pub(crate) unread: Unread,
}

impl Pods {
    /// Creates an empty table: [`Pods::recover`] fills it before the first call is served.
    pub fn new(node: Node, hooks: Rc<dyn LifecycleHooks>) -> Rc<Self> {
        Rc::new_cyclic(|pods| Self {
            engine: Engine::new(node, hooks, pods.clone()),
            table: Table::default(),
            unknown: RefCell::default(),
            retries: Retries::default(),
            unread: Unread::default(),
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
        self.pods_by_id("")
    }

    /// The listed pods whose IDs begin with `prefix`, newest first.
    pub fn pods_by_id(&self, prefix: &str) -> Vec<Rc<Pod>> {
        let pods = self.table.pods.borrow();
        let found = with_prefix(&pods, PodId::from_bytes, prefix).filter(|pod| pod.is_visible());
        let mut found: Vec<_> = found.cloned().collect();
        collect::sort_by_key(&mut found, |pod| Reverse(pod.record().created_at_ns));
        found
    }

    /// All pods, including those that are being created or removed, which lists do not show.
    pub fn every_pod(&self) -> Vec<Rc<Pod>> {
        self.table.pods.borrow().values().cloned().collect()
    }

    /// Whether the name of a cgroup is the ID of a listed container or of a pod, or may be that of one whose record cannot be
    /// read for the moment.
    pub(crate) fn may_be_known(&self, name: &ContainerId) -> bool {
        let pod = PodId::from_bytes(*name.as_bytes());
        self.table.containers.borrow().contains_key(name)
            || self.table.pods.borrow().contains_key(&pod)
            || self.unknown.borrow().contains_key(&pod)
            || self.is_any_unread()
    }

    /// Whether the record of a pod, or of one of its containers, cannot be read for the moment.
    pub(crate) fn is_any_unread(&self) -> bool {
        self.unknown.borrow().values().any(|unknown| unknown.is_unread)
    }

    /// The containers that lists show, newest first.
    pub fn containers(&self) -> Vec<Rc<Container>> {
        self.containers_by_id("", "")
    }

    /// All containers, also those that are being created.
    pub(crate) fn all_containers(&self) -> Vec<Rc<Container>> {
        self.table.containers.borrow().values().cloned().collect()
    }

    /// The listed containers whose IDs begin with `prefix`, of pods whose IDs begin with `pod_prefix`, newest first.
    pub fn containers_by_id(&self, prefix: &str, pod_prefix: &str) -> Vec<Rc<Container>> {
        let containers = self.table.containers.borrow();
        let found: Vec<_> = match pod_prefix {
            "" => with_prefix(&containers, ContainerId::from_bytes, prefix).collect(),
            _ => {
                let pods = self.table.pods.borrow();
                let pods = with_prefix(&pods, PodId::from_bytes, pod_prefix);
                let own = pods.flat_map(|pod| self.table.ids_of(pod.id));
                own.filter_map(|id| containers.get(&id).filter(|_| id.to_string().starts_with(prefix)))
                    .collect()
            }
        };
        newest_first(found.into_iter())
    }

    /// The listed containers of a pod, newest first.
    pub fn listed_containers_of(&self, pod: PodId) -> Vec<Rc<Container>> {
        newest_first(self.containers_of(pod).iter())
    }

    /// Finds a pod by an ID or a unique prefix of one, for a client.
    ///
    /// # Errors
    /// `NotFound`; `InvalidArgument` for an ambiguous prefix; `Unavailable` if the pod's record cannot be
    /// read at the moment, or the pod is being undone after the end of the daemon that created it.
    pub fn pod(&self, id: &str) -> Result<Rc<Pod>, Error> {
        let pods = self.table.pods.borrow();
        let found = find(&pods, PodId::from_bytes, |pod| pod.is_visible(), id, "pod sandbox");
        let pod = found.map_err(|error| {
            let unknown = self.unknown.borrow();
            let mut unlisted = unknown.keys().filter(|id| !pods.contains_key(id));
            let is_it = !id.is_empty() && unlisted.any(|unlisted| unlisted.to_string().starts_with(id));
            // Undoing it may fail, and then it is listed.
            let mut undone = pods.iter().filter(|(_, pod)| pod.record().state.is_earlier());
            let is_undone = !id.is_empty() && undone.any(|(undone, _)| undone.to_string().starts_with(id));
            match is_undone && error.kind() == Kind::NotFound {
                true => error.context("it is being undone").with_kind(Kind::Unavailable),
                false => unless_unread(error, is_it || self.has_unread_spare_files()),
            }
        })?;
        if pod.record().state == (state::Pod::Ready { is_told: false }) {
            pod.record.borrow_mut().state = state::Pod::Ready { is_told: true };
        }
        Ok(pod)
    }

    /// Finds a container by an ID or a unique prefix of one, for a client.
    ///
    /// # Errors
    /// `NotFound`; `InvalidArgument` for an ambiguous prefix; `Unavailable` if the records of a pod cannot be
    /// read at the moment that may have this container.
    pub fn container(&self, id: &str) -> Result<Rc<Container>, Error> {
        let containers = self.table.containers.borrow();
        let found = find(&containers, ContainerId::from_bytes, |found| found.is_visible(), id, "container");
        let container = found.map_err(|error| {
            let is_it = error.kind() == Kind::NotFound && self.may_be_unread(id);
            unless_unread(error, is_it || self.has_unread_spare_files())
        })?;
        if matches!(container.record().state, state::Container::Created { is_told: false, .. }) {
            container.update_state(|state| {
                if let state::Container::Created { is_told, .. } = state {
                    *is_told = true;
                }
            });
        }
        Ok(container)
    }

    /// Whether any pod or container may have its record in a spare file, since the last power cut.
    fn has_unread_spare_files(&self) -> bool {
        self.node().host.records.unmoved().is_some()
    }

    /// Finds a container for a plugin. Unlike [`Pods::container`], this does not count as the use of the ID
    /// by a client.
    pub fn container_for_plugin(&self, id: &str) -> Option<Rc<Container>> {
        let containers = self.table.containers.borrow();
        id.parse().ok().and_then(|id| containers.get(&id)).filter(|container| container.is_visible()).cloned()
    }

    /// Finds a pod by its complete ID for an observer of the node's cgroups, also one that is being created: its cgroup exists
    /// before it is listed. Does not count as the use of the ID by a client.
    pub fn any_pod(&self, id: &PodId) -> Option<Rc<Pod>> {
        self.table.pods.borrow().get(id).cloned()
    }

    /// Finds a container like [`Pods::any_pod`].
    pub fn any_container(&self, id: &ContainerId) -> Option<Rc<Container>> {
        self.table.containers.borrow().get(id).cloned()
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
        self.table.by_pod.borrow_mut().insert((container.pod.id, container.id));
        self.table.containers.borrow_mut().insert(container.id, Rc::clone(container));
    }

    /// Removes a container of a pod.
    pub(crate) fn leave_container(&self, container: &Container) {
        self.table.by_pod.borrow_mut().remove(&(container.pod.id, container.id));
        self.table.containers.borrow_mut().remove(&container.id);
    }

    /// Removes a pod and its name.
    pub(crate) fn leave(&self, id: PodId) {
        self.table.names.borrow_mut().retain(|_, holder| *holder != id);
        self.table.pods.borrow_mut().remove(&id);
        self.forget_unread(id);
        self.set_unknown(id, None);
    }

    /// The containers of a pod, including those being created.
    pub(crate) fn containers_of(&self, pod: PodId) -> Vec<Rc<Container>> {
        let containers = self.table.containers.borrow();
        self.table.ids_of(pod).into_iter().filter_map(|id| containers.get(&id).cloned()).collect()
    }

    /// Drops all listeners at shutdown.
    pub fn end_listening(&self) {
        self.engine().listeners.clear();
    }
}

impl Table {
    /// The IDs of a pod's containers.
    fn ids_of(&self, pod: PodId) -> Vec<ContainerId> {
        let own = (pod, ContainerId::from_bytes([0; 32]))..=(pod, ContainerId::from_bytes([u8::MAX; 32]));
        self.by_pod.borrow().range(own).map(|(_, id)| *id).collect()
    }
}

fn newest_first<'a>(containers: impl Iterator<Item = &'a Rc<Container>>) -> Vec<Rc<Container>> {
    let mut listed: Vec<_> = containers.filter(|container| container.is_visible()).cloned().collect();
    collect::sort_by_key(&mut listed, |container| Reverse(container.record().created_at_ns));
    listed
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

/// The lowest ID whose text begins with `prefix`; `None` if no ID does.
fn lowest(prefix: &str) -> Option<[u8; 32]> {
    let mut bytes = [0; 32];
    for (index, digit) in prefix.bytes().enumerate() {
        let value = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => return None,
        };
        *bytes.get_mut(index / 2)? |= if index % 2 == 0 { value << 4 } else { value };
    }
    Some(bytes)
}

/// The entries whose IDs begin with `prefix`, which are adjacent in the table. An empty prefix matches all.
fn with_prefix<'a, K: Ord + std::fmt::Display, V>(
    entries: &'a BTreeMap<K, V>,
    make: fn([u8; 32]) -> K,
    prefix: &'a str,
) -> impl Iterator<Item = &'a V> {
    let from = lowest(prefix).into_iter().flat_map(move |lowest| entries.range(make(lowest)..));
    from.take_while(move |(key, _)| prefix.is_empty() || key.to_string().starts_with(prefix))
        .map(|(_, value)| value)
}

/// Finds the visible entry whose ID is `id` or the only one that begins with `id` (CRI 2.0).
fn find<K: Ord + std::fmt::Display, V: Clone>(
    entries: &BTreeMap<K, V>,
    make: fn([u8; 32]) -> K,
    is_visible: impl Fn(&V) -> bool,
    id: &str,
    what: &str,
) -> Result<V, Error> {
    let mut found = with_prefix(entries, make, id).filter(|value| !id.is_empty() && is_visible(value));
    match (found.next(), found.next()) {
        (Some(value), None) => Ok(value.clone()),
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
    fn an_ambiguous_prefix_of_an_id_is_refused() {
        let id = |start: [u8; 2], end: u8| {
            let mut bytes = [0; 32];
            bytes[..2].copy_from_slice(&start);
            bytes[31] = end;
            PodId::from_bytes(bytes)
        };
        let ids = [
            id([0xaa, 0x10], 1),
            id([0xaa, 0x20], 2),
            id([0xab, 0], 3),
            id([0xbb, 0], 4),
            id([0xff; 2], 0xff),
        ];
        let entries: BTreeMap<_, _> = ids.iter().map(|id| (*id, *id)).collect();
        let find = |prefix: &str| find(&entries, PodId::from_bytes, |found| *found != ids[2], prefix, "pod");
        for wanted in [0, 1, 3, 4] {
            assert_eq!(find(&ids[wanted].to_string()).unwrap(), ids[wanted]);
        }
        assert_eq!(
            [find("aa1").unwrap(), find("b").unwrap(), find("ffff0").unwrap()],
            [ids[0], ids[3], ids[4]]
        );
        let whole = ids[0].to_string();
        for (id, expected) in [
            ("aa", "several ids"),
            ("a", "several ids"),
            ("", "not found"),
            ("ab", "not found"),
            ("cc", "not found"),
            ("b*", "not found"),
            ("BB", "not found"),
            (format!("{whole}0").as_str(), "not found"),
            (&whole.replace("01", "02"), "not found"),
        ] {
            let error = find(id).unwrap_err().to_string();
            assert!(error.contains(expected), "{id:?}: {error}");
        }
        let with = |prefix| with_prefix(&entries, PodId::from_bytes, prefix).count();
        assert_eq!([with(""), with("a"), with("aa"), with("0"), with("x")], [5, 3, 2, 0, 0]);
    }
}
