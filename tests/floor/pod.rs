//! One pod with one container: set-up, exec and teardown, with the kernel objects that coracle makes.

use std::convert::Infallible;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;
use nix::libc;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::net::if_::if_nametoindex;
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use nix::sys::wait::WaitStatus;
use nix::unistd::{pause, pipe2, sethostname, setsid};

use crate::base::Base;
use crate::cgroups::{Cgroup, write};
use crate::container::{self, FILES, Program};
use crate::netlink::{Batch, Socket};
use crate::raw::{Child, Ready};
use crate::{Network, Outcome, failed};

/// Length of a record of coracle with a usual request.
const RECORD_BYTES: usize = 600;
/// Settings of a pod's network namespace, and of its link.
const POD_SETTINGS: [(&str, &str); 2] =
    [("ipv4/ip_unprivileged_port_start", "0"), ("ipv4/ping_group_range", "0 2147483647")];
const LINK_SETTINGS: [(&str, &str); 2] = [("accept_dad", "0"), ("addr_gen_mode", "1")];

/// A running pod.
#[derive(Debug)]
pub(crate) struct Pod<'a> {
    base: &'a Base,
    network: Network,
    folder: PathBuf,
    link: String,
    cgroup: Cgroup,
    sandbox: Child,
    /// The container's cgroups.
    pub(crate) container_cgroup: Cgroup,
    /// The container's first process.
    pub(crate) container: Child,
    output: File,
    keyring: String,
    execs: Vec<String>,
}

/// The namespaces that a container shares with its pod, besides the mount namespace it starts from.
fn shared(network: Network) -> CloneFlags {
    match network {
        Network::Host => CloneFlags::CLONE_NEWIPC,
        Network::Bridge => CloneFlags::CLONE_NEWIPC | CloneFlags::CLONE_NEWUTS | CloneFlags::CLONE_NEWNET,
    }
}

impl<'a> Pod<'a> {
    /// Sets up pod `number`, whose container runs the probe with these arguments; returns when the program has
    /// been executed.
    ///
    /// # Errors
    /// The first failure. The objects remain until the base is dropped.
    pub(crate) fn up(base: &'a Base, network: Network, number: u32, words: &[&str]) -> Outcome<Pod<'a>> {
        let folder = base.folder.join(format!("pod{number}"));
        make_files(&folder).map_err(|error| failed("make the pod's files", error))?;
        let cgroup = base.cgroups.make(&format!("pod{number}"))?;
        let mut sandbox = Child::new(cgroup.open()?, 0, |ready| hold(&folder, &cgroup, network, ready))?;
        sandbox.ready()?;
        let link = format!("{}{}v", base.name, number % 1000);
        if network == Network::Bridge {
            connect(base, &folder, &link, &sandbox)?;
        }
        let container_cgroup = base.cgroups.make(&format!("container{number}"))?;
        container_cgroup.restrict_devices()?;
        let keyring = format!("{}-{number}", base.name);
        let (read, write) = pipe2(OFlag::O_CLOEXEC).map_err(|errno| failed("make a pipe", errno))?;
        let program = Program { words, output: write, keyring: &keyring };
        let mut container = Child::new(container_cgroup.open()?, libc::CLONE_NEWPID, |_| {
            let layer = base.folder.join("layer");
            container::first(&folder, &layer, &sandbox.pidfd, &container_cgroup, shared(network), &program)
        })?;
        drop(program);
        // Beside the start of the container, as coracle does.
        commit(&folder).map_err(|error| failed("write the record", error))?;
        container.ready()?;
        let output = File::from(read);
        let execs = Vec::new();
        Ok(Pod {
            base,
            network,
            folder,
            link,
            cgroup,
            sandbox,
            container_cgroup,
            container,
            output,
            keyring,
            execs,
        })
    }

    /// Runs the probe in the container's namespaces; returns its output when it has exited with 0.
    ///
    /// # Errors
    /// The first failure, or the output of a program that did not exit with 0.
    pub(crate) fn exec(&mut self, words: &[&str]) -> Outcome<String> {
        let name = format!("exec-{}", self.execs.len());
        let cgroup = self.container_cgroup.exec(&name)?;
        self.execs.push(name);
        let (read, write) = pipe2(OFlag::O_CLOEXEC).map_err(|errno| failed("make a pipe", errno))?;
        let program = Program { words, output: write, keyring: &self.keyring };
        let own = File::open("/proc/self/ns/pid").map_err(|error| failed("open a namespace", error))?;
        enter_pids(&self.container.pidfd)?;
        let child = Child::new(cgroup.open()?, 0, |_| {
            container::another(&self.container.pidfd, &cgroup, shared(self.network), &program)
        });
        enter_pids(&own)?;
        drop(program);
        let mut child = child?;
        child.ready()?;
        let output = all(File::from(read))?;
        match child.ended()? {
            WaitStatus::Exited(_, 0) => Ok(output),
            status => Err(format!("exec of {words:?}: {status:?}: {output}")),
        }
    }

    /// Waits for the end of the container's program, which must exit by itself; returns its output.
    ///
    /// # Errors
    /// The error of the kernel.
    pub(crate) fn output(&mut self) -> Outcome<String> {
        all(&mut self.output)
    }

    /// Ends all processes and removes all objects.
    ///
    /// # Errors
    /// The first failure.
    pub(crate) fn down(self) -> Outcome<()> {
        self.container_cgroup.kill()?;
        self.container.ended()?;
        self.container_cgroup.remove(&self.execs)?;
        if self.network == Network::Bridge {
            self.base.nftables.run("remove the rule", Batch::remove_rules(&self.base.name))?;
            let mut batch = Batch::default();
            // The kernel removes the link with the namespace, which nothing waits for.
            batch.set_down(&self.link);
            self.base.route.run("set the link down", batch.acknowledge())?;
            umount2(&self.folder.join("netns"), MntFlags::MNT_DETACH)
                .map_err(|errno| failed("unmount the network namespace", errno))?;
        }
        self.cgroup.kill()?;
        self.sandbox.ended()?;
        self.cgroup.remove(&[])?;
        fs::remove_dir_all(&self.folder).map_err(|error| failed("remove the pod's files", error))
    }
}

fn all(mut file: impl Read) -> Outcome<String> {
    let mut text = String::new();
    file.read_to_string(&mut text).map_err(|error| failed("read output", error))?;
    Ok(text)
}

fn enter_pids(namespace: impl AsFd) -> Outcome<()> {
    setns(namespace, CloneFlags::CLONE_NEWPID).map_err(|errno| failed("enter a PID namespace", errno))
}

fn make_files(folder: &Path) -> std::io::Result<()> {
    fs::create_dir(folder)?;
    for name in ["shm", "root", "upper", "work"] {
        fs::create_dir(folder.join(name))?;
    }
    FILES.iter().try_for_each(|name| fs::write(folder.join(name), "127.0.0.1 localhost\n"))
}

/// The durable record: a new file under a temporary name, synchronized, renamed, the directory synchronized.
fn commit(folder: &Path) -> std::io::Result<()> {
    let new = folder.join("record.new");
    let mut file = File::create(&new)?;
    file.write_all(&[b'r'; RECORD_BYTES])?;
    file.sync_all()?;
    fs::rename(&new, folder.join("record"))?;
    File::open(folder)?.sync_all()
}

/// The process that holds the pod's namespaces, cloned into the pod's cgroup.
fn hold(folder: &Path, cgroup: &Cgroup, network: Network, ready: &mut Ready) -> Outcome<Infallible> {
    set_pdeathsig(Signal::SIGKILL).map_err(|errno| failed("end with the parent", errno))?;
    cgroup.enter_v1()?;
    setsid().map_err(|errno| failed("make a session", errno))?;
    unshare(shared(network) | CloneFlags::CLONE_NEWNS).map_err(|errno| failed("make namespaces", errno))?;
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_SLAVE, none)
        .map_err(|errno| failed("make mounts slaves", errno))?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    mount(Some("shm"), &folder.join("shm"), Some("tmpfs"), flags, Some("mode=1777,size=65536k"))
        .map_err(|errno| failed("mount shm", errno))?;
    if network == Network::Bridge {
        sethostname("floor").map_err(|errno| failed("set the host name", errno))?;
        for (name, value) in POD_SETTINGS {
            write(&Path::new("/proc/sys/net").join(name), value)?;
        }
    }
    ready.done();
    loop {
        pause();
    }
}

/// Connects a pod to the bridge: a veth pair, address, default route, and the rule that masquerades.
fn connect(base: &Base, folder: &Path, link: &str, sandbox: &Child) -> Outcome<()> {
    let place = folder.join("netns");
    File::create(&place).map_err(|error| failed("make a mount point", error))?;
    let source = format!("/proc/{}/ns/net", sandbox.pid);
    mount(Some(source.as_str()), &place, None::<&str>, MsFlags::MS_BIND, None::<&str>)
        .map_err(|errno| failed("mount the network namespace", errno))?;
    let namespace = File::open(&place).map_err(|error| failed("open the network namespace", error))?;
    let mut batch = Batch::default();
    batch.add_veth(link, base.bridge, namespace.as_fd());
    batch.set_hairpin(link);
    base.route.run("make links", batch.acknowledge())?;
    set(link, "accept_ra", "0")?;
    let own = File::open("/proc/self/ns/net").map_err(|error| failed("open a namespace", error))?;
    setns(&namespace, CloneFlags::CLONE_NEWNET).map_err(|errno| failed("enter the network", errno))?;
    let inside = inside();
    setns(&own, CloneFlags::CLONE_NEWNET).map_err(|errno| failed("return to the network", errno))?;
    let (index, socket) = inside?;
    let mut batch = Batch::default();
    batch.set_up(1);
    batch.add_address(index, base.address());
    batch.set_up(index);
    batch.add_default_route(index, base.gateway);
    socket.run("configure eth0", batch.acknowledge())?;
    base.nftables.run("add the rule", Batch::masquerade(&base.name, base.address()))
}

fn inside() -> Outcome<(u32, Socket)> {
    LINK_SETTINGS.iter().try_for_each(|(name, value)| set("eth0", name, value))?;
    let index = if_nametoindex("eth0").map_err(|errno| failed("find eth0", errno))?;
    Ok((index, Socket::route()?))
}

/// Sets an IPv6 setting of a link, if the kernel has IPv6.
fn set(link: &str, name: &str, value: &str) -> Outcome<()> {
    let path = Path::new("/proc/sys/net/ipv6/conf").join(link).join(name);
    if path.exists() { write(&path, value) } else { Ok(()) }
}
