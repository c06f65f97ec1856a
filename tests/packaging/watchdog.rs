//! systemd's watchdog (sd_notify(3)): keep-alive messages are sent while the event loop runs and only if the
//! unit requests them.

use std::os::unix::net::UnixDatagram;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use coracle_tests::host;
use coracle_tests::node::binaries;

use crate::Folder;

/// Longer than any start of a daemon.
const PATIENCE: Duration = Duration::from_secs(30);

fn start(folder: &Folder, watchdog: Option<&str>) -> (Child, UnixDatagram) {
    let manager = UnixDatagram::bind(folder.path().join("notify")).expect("a socket");
    manager.set_read_timeout(Some(PATIENCE)).expect("a limit");
    let path = folder.path().display();
    let config = format!(
        "root = \"{path}/root\"\nstate = \"{path}/state\"\nlisten = \"unix://{path}/sock\"\n\
         [cgroup]\ndriver = \"cgroupfs\"\n[cni]\nconf_dir = \"{path}/cni\"\n[nri]\nsocket_path = \"{path}/nri.sock\"\n\
         plugin_path = \"{path}/nri\"\n[image]\nimport_dir = \"{path}/import\"\n"
    );
    let mut command = Command::new(binaries().join("coracled"));
    command.arg("--config").arg(folder.write("config.toml", &config));
    command.env("NOTIFY_SOCKET", folder.path().join("notify")).env_remove("WATCHDOG_PID");
    match watchdog {
        Some(limit) => command.env("WATCHDOG_USEC", limit),
        None => command.env_remove("WATCHDOG_USEC"),
    };
    let daemon = command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().expect("the daemon");
    (daemon, manager)
}

fn hear(manager: &UnixDatagram) -> String {
    let mut word = [0; 64];
    let length = host::uninterrupted(|| manager.recv(&mut word)).expect("the daemon says something");
    String::from_utf8_lossy(&word[..length]).into_owned()
}

fn end(mut daemon: Child) {
    let pid = nix::unistd::Pid::from_raw(daemon.id() as i32);
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).expect("it is our child");
    host::wait_until("the daemon ends", || daemon.try_wait().expect("it is our child").is_some());
}

#[test]
fn the_watchdog_is_notified_where_the_unit_has_one() {
    host::require_root();
    let folder = Folder::new("watchdog");
    let (daemon, manager) = start(&folder, Some("100000"));
    assert_eq!(hear(&manager), "READY=1");
    for _ in 0..3 {
        assert_eq!(hear(&manager), "WATCHDOG=1");
    }
    end(daemon);
}

#[test]
fn without_a_watchdog_no_notification_is_sent_between_ready_and_stopping() {
    host::require_root();
    let folder = Folder::new("quiet");
    let (daemon, manager) = start(&folder, None);
    assert_eq!(hear(&manager), "READY=1");
    end(daemon);
    assert_eq!(hear(&manager), "STOPPING=1");
}
