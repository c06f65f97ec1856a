//! One history. Its seed determines the calls of clients, the events on the node, when daemons are killed,
//! when the power is cut, and which calls of the engine fail.

use std::cell::{OnceCell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::time::Duration;

use coracle_base::reactor;
use coracle_engine::Pods;
use coracle_engine::state::transitions;
use coracle_images::Images;
use coracle_sandbox::{Exit, simulation};

use crate::cgroups::Cgroups;
use crate::check::{check, check_empty, check_memory};
use crate::clients::{Action, Call, Clients, Told, ToldContainer, ToldPod};
use crate::engine::Ground;
use crate::node::Node;
use crate::random::Random;
use crate::world::{CHANGES, Killed, MS, OTHERS, Role, S, US, World, trace};

/// Maximum number of daemons in one history.
const DAEMONS_MAX: u64 = 5;
const PODS_MAX: usize = 3;
const CONTAINERS_MAX: usize = 3;

/// Time after which errors have no further effect: retries wait at most 15 s.
const HEALING: Duration = Duration::from_secs(40);
/// Time after which a record that cannot be read is set aside, and what it has described has ended.
const SETTING_ASIDE: Duration = Duration::from_secs(660);

/// The events that a history may contain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kind {
    /// Probability of an error for each call of the engine, per mille.
    pub(crate) errors: u64,
    /// Whether daemons are killed during a call to the node.
    pub(crate) kills: bool,
    /// Whether all calls of one kind fail, for a daemon's whole life.
    pub(crate) lasting: bool,
    /// Whether the power is cut.
    pub(crate) power_cuts: bool,
    /// Whether monitors are killed or frozen.
    pub(crate) monitors: bool,
    /// Whether another program moves processes out of their cgroups.
    pub(crate) moves: bool,
    /// Whether the node has a hierarchy of v1 beside that of v2.
    pub(crate) is_hybrid: bool,
    /// Whether another program removes directories of the daemon.
    pub(crate) removals: bool,
    /// Whether records become unreadable between two daemons.
    pub(crate) bad_records: bool,
}

impl Kind {
    fn of(random: &mut Random) -> Self {
        let errors = if random.happens(500) { random.pick(&[1, 3, 10, 30]) } else { 0 };
        Self {
            errors,
            kills: random.happens(700),
            lasting: random.happens(200),
            power_cuts: random.happens(350),
            monitors: random.happens(350),
            moves: random.happens(250),
            is_hybrid: random.happens(400),
            removals: random.happens(250),
            bad_records: random.happens(150),
        }
    }
}

thread_local! {
    /// The first panic of this thread: the executor does not report panics of detached tasks.
    static PANICKED: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Records the panics of all threads from now on, and prints them.
pub(crate) fn note_panics() {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        PANICKED.with_borrow_mut(|first| _ = first.get_or_insert_with(|| panic.to_string()));
        print(panic);
    }));
}

/// Statistics of one history.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) histories: u64,
    pub(crate) daemons: u64,
    pub(crate) calls: u64,
    pub(crate) checks: u64,
    pub(crate) kills: u64,
    pub(crate) power_cuts: u64,
    pub(crate) errors: u64,
    /// Number of calls of engines to the simulated node.
    pub(crate) node_calls: u64,
}

impl Counts {
    pub(crate) fn add(&mut self, other: Self) {
        self.histories += other.histories;
        self.daemons += other.daemons;
        self.calls += other.calls;
        self.checks += other.checks;
        self.kills += other.kills;
        self.power_cuts += other.power_cuts;
        self.errors += other.errors;
        self.node_calls += other.node_calls;
    }
}

impl std::fmt::Display for Counts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { histories, daemons, calls, checks, kills, power_cuts, errors, node_calls } = self;
        write!(
            f,
            "{histories} histories, {daemons} daemons, {calls} calls of clients, {node_calls} calls of the node, {checks} checks, \
             {kills} kills in a call, {power_cuts} power cuts, {errors} errors"
        )
    }
}

/// The failure of a history.
#[derive(Debug)]
pub(crate) struct Failed {
    pub(crate) seed: u64,
    pub(crate) broken: Vec<String>,
    pub(crate) trace: Vec<String>,
}

/// How the life of a daemon ended.
enum End {
    /// The daemon was killed while it waited for events.
    Killed,
    /// The daemon could not start; the value is its error.
    Refused(String),
    /// Rules were violated; the values describe the violations.
    Broken(Vec<String>),
    /// The history is complete.
    Complete,
}

/// A history in progress.
struct History {
    ground: Rc<Ground>,
    images: OnceCell<Rc<Images>>,
    clients: Clients,
    /// Random numbers for the decisions of the history; the node has a separate sequence.
    random: RefCell<Random>,
    kind: Kind,
    counts: RefCell<Counts>,
}

/// Runs the history of a seed.
///
/// # Errors
/// The violated rules.
pub(crate) fn run(ground: &Rc<Ground>, seed: u64, is_traced: bool) -> Result<Counts, Failed> {
    let mut random = Random::new(seed);
    let kind = Kind::of(&mut random);
    let node = Rc::new(Node::new(World::new(random.next(), is_traced)));
    let clients = Clients { node: Rc::clone(&node), told: Rc::new(RefCell::new(Told::default())) };
    let history = Rc::new(History {
        ground: Rc::clone(ground),
        images: OnceCell::new(),
        clients,
        random: RefCell::new(random),
        kind,
        counts: RefCell::default(),
    });
    node.world.borrow_mut().cgroups = Cgroups::new(kind.is_hybrid);
    trace!(node.world.borrow_mut(), "{kind:?}");
    simulation::install(Some(Rc::clone(&node) as Rc<dyn simulation::SimulatedNode>));
    PANICKED.set(None);
    let mut broken = history.lives();
    broken.extend(PANICKED.take());
    simulation::install(None);
    let mut world = node.world.borrow_mut();
    if !broken.is_empty() {
        return Err(Failed { seed, broken, trace: std::mem::take(&mut world.trace) });
    }
    let mut counts = *history.counts.borrow();
    (counts.histories, counts.errors, counts.node_calls) = (1, world.errors, world.calls);
    counts.calls = history.clients.told.borrow().calls;
    Ok(counts)
}

impl History {
    fn below(&self, limit: u64) -> u64 {
        self.random.borrow_mut().below(limit)
    }

    fn happens(&self, per_mille: u64) -> bool {
        self.random.borrow_mut().happens(per_mille)
    }

    fn lives(self: &Rc<Self>) -> Vec<String> {
        let node = &self.clients.node;
        let count = 1 + self.below(DAEMONS_MAX);
        let mut number = 0;
        loop {
            number += 1;
            let is_last = number >= count;
            // A daemon that is started again and again comes up when the errors end.
            let has_faults = !is_last && number < count + DAEMONS_MAX;
            self.set_faults(has_faults);
            self.counts.borrow_mut().daemons += 1;
            node.world.borrow_mut().begin_daemon();
            trace!(node.world.borrow_mut(), "daemon {number} starts");
            let life = Rc::clone(self);
            let ended = catch_unwind(AssertUnwindSafe(|| {
                reactor::run(async move {
                    let end = life.life(is_last).await;
                    // Destructors have no effect, as after SIGKILL.
                    life.clients.node.world.borrow_mut().is_daemon_dead = true;
                    end
                })
            }));
            let mut world = node.world.borrow_mut();
            world.is_daemon_dead = false;
            world.daemon_ends();
            let violation = transitions::take().or(world.violation.take());
            drop(world);
            self.clients.daemon_ends();
            if let Some(violation) = violation {
                return vec![violation];
            }
            match ended {
                Ok(End::Complete) => return Vec::new(),
                Ok(End::Broken(broken)) => return broken,
                Ok(End::Refused(error)) if is_last => {
                    return vec![format!("the daemon does not start: {error}")];
                }
                Ok(End::Killed | End::Refused(_)) => {}
                Err(payload) if payload.is::<Killed>() => self.counts.borrow_mut().kills += 1,
                Err(payload) => {
                    let text = payload.downcast_ref::<String>().cloned();
                    let text = text.or_else(|| payload.downcast_ref::<&str>().map(|text| (*text).to_owned()));
                    return vec![format!("panic: {}", text.unwrap_or_default())];
                }
            }
            if self.kind.power_cuts && self.happens(500) {
                self.counts.borrow_mut().power_cuts += 1;
                node.world.borrow_mut().lose_power();
            } else {
                // It is started again after a moment, in which the rest of the node proceeds.
                let pause = self.below(2) * self.below(3 * S);
                let mut world = node.world.borrow_mut();
                let until_ns = world.now_ns + pause;
                world.pass(until_ns);
            }
            if self.kind.bad_records && self.happens(500) {
                node.world.borrow_mut().spoil_record();
            }
        }
    }

    fn set_faults(&self, has_faults: bool) {
        let mut world = self.clients.node.world.borrow_mut();
        world.faults.errors = if has_faults { self.kind.errors } else { 0 };
        (world.faults.killed_at, world.faults.killed_before, world.faults.lasting) = (None, None, None);
        if has_faults && self.kind.lasting && self.happens(500) {
            let name = self.random.borrow_mut().pick(&[CHANGES, OTHERS].concat());
            world.faults.lasting = Some((name, self.below(60) as usize));
        }
        if has_faults && self.kind.kills {
            let after = match self.below(6) {
                0 => 60,
                1 => 300,
                2 => 1500,
                _ => {
                    let name = self.random.borrow_mut().pick(CHANGES);
                    world.faults.killed_before = Some((name, self.below(6)));
                    return;
                }
            };
            world.faults.killed_at = Some(world.calls + 1 + self.below(after));
        }
    }

    async fn life(self: &Rc<Self>, is_last: bool) -> End {
        let pods = self.ground.engine(&self.clients.node, &self.images);
        if let Err(error) = pods.recover().await {
            return End::Refused(error.to_string());
        }
        pods.follow_state_directory();
        self.clients.node.world.borrow_mut().removals.is_daemon_up = true;
        self.clients.look(&pods);
        let rounds = 1 + self.below(4);
        for _ in 0..rounds {
            let mut calls = Vec::new();
            let count = 1 + self.below(6);
            for _ in 0..count {
                if let Some(action) = self.choose() {
                    let limit = self.limit();
                    calls.push(reactor::spawn(self.clients.clone().call(Rc::clone(&pods), action, limit)));
                }
                self.disturb();
                let pause = self.pause();
                reactor::sleep(pause).await;
            }
            if !is_last && self.happens(150) {
                return End::Killed;
            }
            for call in calls {
                let _ = call.await;
            }
            pods.engine().operations.none_left().await;
            self.clients.look(&pods);
            if let Err(broken) = self.rest(&pods).await {
                return End::Broken(broken);
            }
        }
        if !is_last {
            return End::Killed;
        }
        match self.finish(&pods).await {
            Ok(()) => End::Complete,
            Err(broken) => End::Broken(broken),
        }
    }

    /// How long a client waits for its answer: until it comes, or not long. CreateContainer takes less than a millisecond.
    fn limit(&self) -> Option<Duration> {
        let mut random = self.random.borrow_mut();
        random.happens(100).then(|| {
            let longest = random.pick(&[200 * US, 30 * MS]);
            Duration::from_nanos(random.below(longest))
        })
    }

    /// Time until the next call.
    fn pause(&self) -> Duration {
        let mut random = self.random.borrow_mut();
        Duration::from_nanos(match random.below(10) {
            0 => random.below(20 * S),
            1..4 => random.below(30 * MS),
            4..6 => random.below(MS),
            _ => 0,
        })
    }

    /// Kills or freezes a random monitor, with a probability of 10 %, moves a random process to another cgroup, with one of
    /// 30 %, and removes a directory, with one of 10 %, if the history permits this.
    fn disturb(&self) {
        let mut random = self.random.borrow_mut();
        if self.kind.moves && random.happens(300) {
            let mut world = self.clients.node.world.borrow_mut();
            let pids: Vec<i32> = (world.processes.iter())
                .filter(|(_, process)| process.role != Role::Blocked)
                .map(|(pid, _)| *pid)
                .collect();
            if !pids.is_empty() {
                let pid = random.pick(&pids);
                world.move_at_random(pid);
            }
        }
        if self.kind.removals && random.happens(100) {
            self.clients.node.world.borrow_mut().schedule_removal();
        }
        if !self.kind.monitors || !random.happens(100) {
            return;
        }
        let mut world = self.clients.node.world.borrow_mut();
        let monitors: Vec<i32> = (world.processes.iter())
            .filter(|(_, process)| process.role == Role::Monitor && !process.is_dying)
            .map(|(pid, _)| *pid)
            .collect();
        if monitors.is_empty() {
            return;
        }
        let pid = random.pick(&monitors);
        if random.happens(500) {
            trace!(world, "monitor {pid} is killed");
            let directory = world.monitors[&pid].directory.clone();
            world.killed_monitors.insert(directory);
            world.kill(pid, Exit::Signal(9));
        } else {
            trace!(world, "monitor {pid} is frozen");
            let until_ns = world.now_ns + random.below(20 * S);
            if let Some(monitor) = world.monitors.get_mut(&pid) {
                monitor.frozen_until_ns = until_ns;
            }
        }
    }

    /// Chooses the next call; `None` if no call is possible.
    fn choose(&self) -> Option<Action> {
        let mut told = self.clients.told.borrow_mut();
        let mut random = self.random.borrow_mut();
        let mut actions = Vec::new();
        let mut offer = |weight: usize, action: Action| actions.extend(std::iter::repeat_n(action, weight));
        let living = told.pods.iter().filter(|pod| pod.remove != Call::Done).count();
        let (new_pod, new_container) = (told.pods.len(), told.containers.len());
        if living < PODS_MAX {
            offer(if living == 0 { 8 } else { 3 }, Action::RunPod(new_pod));
        }
        for (index, pod) in told.pods.iter().enumerate().filter(|(_, pod)| pod.remove != Call::Done) {
            if pod.run != Call::Done && !pod.is_earlier {
                offer(3, Action::RunPod(index));
            }
            if pod.id.is_some() {
                offer(1, Action::StopPod(index));
                offer(1, Action::RemovePod(index));
                let own = told.containers.iter().filter(|container| container.pod == index);
                if own.filter(|container| container.remove != Call::Done).count() < CONTAINERS_MAX {
                    offer(4, Action::Create(new_container + index));
                }
            }
        }
        for (index, container) in told.containers.iter().enumerate() {
            if container.remove == Call::Done {
                continue;
            }
            if container.create != Call::Done && !container.is_earlier {
                offer(2, Action::Create(index));
            }
            if container.id.is_some() {
                offer(if container.start.was_made() { 1 } else { 6 }, Action::Start(index));
                offer(1, Action::Stop(index, random.pick(&[0, 1, 10])));
                offer(1, Action::Remove(index));
            }
        }
        if actions.is_empty() {
            return None;
        }
        let action = random.pick(&actions);
        Some(match action {
            Action::RunPod(index) if index == new_pod => {
                // The name of a removed pod is free, unless it is being made again: by a call in progress, or by one whose
                // client has left.
                let is_free = |pod: &&ToldPod| {
                    pod.remove == Call::Done && !matches!(pod.run, Call::Open | Call::Unanswered)
                };
                let free = told.pods.iter().filter(is_free).map(|pod| pod.name).next_back();
                let is_held = |name: u32| told.pods.iter().any(|pod| pod.name == name && !is_free(&pod));
                let name =
                    free.filter(|name| !is_held(*name) && random.happens(500)).unwrap_or(new_pod as u32);
                told.pods.push(ToldPod { name, ..ToldPod::default() });
                action
            }
            Action::Create(number) if number >= new_container => {
                let pod = number - new_container;
                told.containers.push(ToldContainer {
                    pod,
                    name: new_container as u32,
                    ..ToldContainer::default()
                });
                Action::Create(new_container)
            }
            _ => action,
        })
    }

    /// Disables injected errors, lets time pass, and checks the rules; then enables the errors again.
    async fn rest(self: &Rc<Self>, pods: &Rc<Pods>) -> Result<(), Vec<String>> {
        let faults = {
            let mut world = self.clients.node.world.borrow_mut();
            let now_ns = world.now_ns;
            for monitor in world.monitors.values_mut() {
                monitor.frozen_until_ns = now_ns;
            }
            std::mem::take(&mut world.faults)
        };
        let has_bad_record = self.clients.node.world.borrow().has_bad_record();
        reactor::sleep(if has_bad_record { SETTING_ASIDE } else { HEALING }).await;
        self.counts.borrow_mut().checks += 1;
        let mut broken = check(&self.clients, pods);
        // Something may just have happened by itself.
        for _ in 0..3 {
            if broken.is_empty() {
                break;
            }
            reactor::sleep(Duration::from_secs(5)).await;
            let again = check(&self.clients, pods);
            broken.retain(|rule| again.contains(rule));
        }
        let mut world = self.clients.node.world.borrow_mut();
        let calls = world.calls;
        (world.faults.errors, world.faults.lasting) = (faults.errors, faults.lasting);
        // The kill comes as many calls later as it would have come.
        world.faults.killed_at = faults.killed_at.map(|at| at.max(calls + 1));
        world.faults.killed_before = faults.killed_before;
        if broken.is_empty() { Ok(()) } else { Err(broken) }
    }

    /// Removes all objects without injected errors: every call must succeed, and the node must be empty
    /// afterwards.
    async fn finish(self: &Rc<Self>, pods: &Rc<Pods>) -> Result<(), Vec<String>> {
        let mut broken = Vec::new();
        let names: Vec<usize> = {
            let told = self.clients.told.borrow();
            let is_retried = |pod: &ToldPod| {
                matches!(pod.run, Call::Failed | Call::Unanswered) && pod.id.is_none() && !pod.is_earlier
            };
            (0..told.pods.len()).filter(|index| is_retried(&told.pods[*index])).collect()
        };
        for index in names {
            let name = format!("sim/pod{}", self.clients.told.borrow().pods[index].name);
            if pods.pods().iter().any(|pod| pod.name() == name) {
                continue;
            }
            let retried = self.clients.clone().call(Rc::clone(pods), Action::RunPod(index), None).await;
            if let Err(error) = retried {
                broken.push(format!("a retry of RunPodSandbox for {name} fails: {error}"));
            }
        }
        for pod in pods.pods() {
            let title = format!("pod {:.13}", pod.id);
            let stops = self.happens(500);
            if stops && let Err(error) = pod.stop().await {
                broken.push(format!("{title} cannot be stopped: {error}"));
            }
            if let Err(error) = pod.remove().await {
                broken.push(format!("{title} cannot be removed: {error}"));
            }
        }
        reactor::sleep(HEALING).await;
        broken.extend(check_empty(&self.clients, pods));
        broken.extend(check_memory(pods));
        if broken.is_empty() { Ok(()) } else { Err(broken) }
    }
}
