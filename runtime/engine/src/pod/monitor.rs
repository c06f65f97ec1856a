//! The monitor's step in the set-up and teardown of a pod sandbox: starts `coracle-pod`, connects to it, also after a restart of the daemon,
//! and handles the loss of the connection and the end of the monitor.

use std::rc::Rc;
use std::time::Duration;

use coracle_base::error::{Error, Kind};
use coracle_base::{log, reactor, time};
use coracle_sandbox::cgroup::Limits;
use coracle_sandbox::{Event, Request, monitor, plan};

use crate::link::{Link, LinkError, News};
use crate::pod::{KILL_LIMIT, strays};
use crate::record::{DurableRecord, Network};
use crate::spec::PodPid;
use crate::state;
use crate::{Pod, files, retries};

/// Time limit for the first answer of a monitor. It usually takes a millisecond; longer if the machine swaps
/// or another process holds a namespace lock of the kernel.
const HELLO_LIMIT: Duration = Duration::from_secs(20);

/// OOM score adjustment of monitors, equal to that of pause processes: the kubelet expects that the kernel
/// does not kill infrastructure first (CRI 2.5).
const SANDBOX_OOM_SCORE_ADJ: i32 = -998;

/// Time limit for processes that another program has moved into the cgroup of a pod whose monitor is ended.
const MOVED_LIMIT: Duration = Duration::from_secs(1);
/// Pause between two looks for them.
const MOVED_PAUSE: Duration = Duration::from_millis(1);

impl Pod {
    pub(super) async fn make_monitor(self: &Rc<Self>) -> Result<(), Error> {
        retries::require_descriptors()?;
        let node = self.node();
        let directory = node.paths.pod_state(self.id);
        let mut committed = Ok(());
        let (setup, spawned) = {
            let record = self.record();
            let namespaces = record.spec.own_namespaces();
            let plan::PodNamespaces { network, ipc, uts } = namespaces;
            let setup = plan::sandbox(&plan::SandboxPlan {
                namespaces,
                shares_pids: record.spec.namespaces.pid == PodPid::Pod,
                shm_directory: node.paths.shm(self.id),
                host_name: files::hostname(&record.spec),
                sysctls: record.spec.sysctls.clone(),
                convenience_sysctls: network,
                oom_score_adj: Some(SANDBOX_OOM_SCORE_ADJ),
                user_namespace: record.spec.user_mappings(),
                label: node.kernel.modules.pod_file_label(&record.selinux_level),
            })?;
            let entry = node.cgroups.entry(&self.cgroup()?)?;
            let user = record.spec.user_mappings();
            let base = node.monitors.base(&node.paths)?;
            let spawn = monitor::Spawn {
                program: &node.monitors.program,
                base: &base,
                directory: &directory,
                network,
                ipc,
                uts,
                user: user.as_ref(),
                setup: &setup,
                cgroup: entry.into.as_ref().map(std::os::fd::AsFd::as_fd),
                cgroup_joins: &entry.join_files,
            };
            drop(record);
            let spawned = monitor::spawn(&spawn, || committed = self.commit_in_advance())?;
            (setup, spawned)
        };
        // After the link exists, because undoing uses it to wait for the monitor's end.
        let link = self.open_link(spawned).map_err(|error| Error::new(Kind::Internal, error.to_string()))?;
        if let Err(error) = greet(&link).await {
            if let Some((index, errno)) = error.operation() {
                return Err(Error::new(Kind::Unknown, plan::explain(&setup, index, errno)));
            }
            let text = link.failure().await.map_or(error.to_string(), |failure| failure.to_string());
            return Err(Error::new(Kind::Internal, text));
        }
        committed?;
        self.adopt_monitor().await
    }

    /// Commits the pod's record in advance, while the monitor starts: the next state is Ready, or ADD
    /// follows.
    fn commit_in_advance(&self) -> Result<(), Error> {
        let mut record = self.record().clone();
        if self.has_network() {
            // An error is returned by its own step.
            let Ok(request) = self.plan_network() else { return Ok(()) };
            record.network = Some(Network { request: request.clone(), addresses: Vec::new(), result: None });
            record.commit_in_advance(self.node())?;
            if let state::Pod::Creating { planned, .. } = &mut self.record.borrow_mut().state {
                *planned = Some(Box::new(request));
            }
        } else {
            record.state = state::Pod::Ready { is_told: false };
            record.commit_in_advance(self.node())?;
        }
        Ok(())
    }

    /// Connects to a new or recovered monitor and waits for its Hello.
    pub(crate) async fn attach(self: &Rc<Self>, monitor: monitor::Monitor) -> Result<(), LinkError> {
        let link = self.open_link(monitor)?;
        greet(&link).await
    }

    fn open_link(self: &Rc<Self>, monitor: monitor::Monitor) -> Result<Rc<Link>, LinkError> {
        let weak = Rc::downgrade(self);
        let number = self.connection.links.get() + 1;
        self.connection.links.set(number);
        let on_news = move |news| {
            let Some(pod) = weak.upgrade() else { return };
            match news {
                News::Event(Event::Exited(exit)) => pod.container_exited(&exit),
                News::Event(Event::ExecExited { exec, exit }) => pod.exec_exited(exec, exit),
                News::Gone if pod.connection.links.get() == number => pod.monitor_gone(),
                News::Lost if pod.connection.links.get() == number => pod.monitor_lost(),
                News::Gone | News::Lost => {}
            }
        };
        let link = Link::open(monitor, on_news)?;
        *self.connection.link.borrow_mut() = Some(Rc::clone(&link));
        Ok(link)
    }

    /// Handles the end of a monitor. If the monitor ended without a request, the pod becomes NotReady (its
    /// namespaces may no longer exist), and its containers are killed, because no process would write their
    /// logs or reap them. A pod whose stop was interrupted is NotReady and may have running containers, too.
    fn monitor_gone(self: &Rc<Self>) {
        if !self.unlink() && !self.runs_any() {
            return;
        }
        // Not an error of its own: a kubelet kills all processes of an orphaned pod's cgroup, this one among them.
        log::warn!("the pod's monitor died"; pod = self.id, name = self.name());
        let pod = Rc::clone(self);
        reactor::spawn(async move {
            let _operation = pod.operation.lock().await;
            if let Some(unknown) = pod.note_monitors_end().await {
                pod.keep_trying(unknown);
            }
        })
        .detach();
    }

    pub(super) async fn unmake_monitor(&self) -> Result<(), Error> {
        // Whatever runs below it: without it nothing leads to these processes.
        if self.monitor_pid()? != 0 {
            self.end_strays(|_| true).await?;
        }
        self.end_monitor().await
    }

    /// Kills the monitor by its cgroup and by its process, which another program may have moved, and waits for its
    /// end. SIGKILL is sufficient: all its state is in the record, and its containers have ended.
    pub(crate) async fn end_monitor(&self) -> Result<(), Error> {
        let cgroup = self.cgroup()?;
        let link = self.connection.link.borrow().clone();
        let Some(link) = link else {
            // Perhaps no file leads to it, and it is in its cgroup in one of several hierarchies only.
            let end = time::now() + MOVED_LIMIT;
            while !self.node().cgroups.kill_in_all(&cgroup)? && time::now() < end {
                reactor::sleep(MOVED_PAUSE).await;
            }
            return strays::end_monitor(&self.node().paths.pod_state(self.id)).await;
        };
        self.node().cgroups.kill(&cgroup)?;
        link.kill()?;
        let ended = reactor::deadline(KILL_LIMIT, link.ended()).await;
        ended.map_err(|_| strays::unended_monitor(link.pid()))?;
        // Only now: a retry waits again for a monitor that has not ended.
        *self.connection.link.borrow_mut() = None;
        Ok(())
    }

    /// Handles the loss of the connection to a running monitor: the daemon connects again, and containers
    /// continue to run. The monitor then repeats the events that the daemon has missed; callers of running
    /// execs get an error.
    fn monitor_lost(self: &Rc<Self>) {
        if !self.unlink() && !self.runs_any() {
            return;
        }
        log::warn!("connection to the pod's monitor lost, reconnecting"; pod = self.id);
        let pod = Rc::clone(self);
        reactor::spawn(async move {
            let _operation = pod.operation.lock().await;
            if !pod.record().state.is_ready() && !pod.runs_any() {
                return;
            }
            if let Some(unknown) = pod.take_over().await {
                pod.keep_trying(unknown);
            }
        })
        .detach();
    }

    /// Lets systemd adopt the monitor's cgroup.
    async fn adopt_monitor(&self) -> Result<(), Error> {
        if !self.record().has_scopes {
            return Ok(());
        }
        let name = self.record().spec.name.clone();
        let description = format!("coracle pod sandbox {}/{}", name.namespace, name.name);
        self.node().adopt(&self.cgroup()?, self.pid(), description, &Limits::default()).await
    }
}

async fn greet(link: &Link) -> Result<(), LinkError> {
    let hello = Request::Hello { version: coracle_sandbox::FRAMES_VERSION };
    link.ask(hello, &[], HELLO_LIMIT).await.map(drop)
}
