//! `coracle serve`, from its flags to its end: configuration, loop, daemon, socket, READY, signals, drain.

use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;

use coracle_base::error::{Context, Error};
use coracle_base::listen::Listener;
use coracle_base::log;
use coracle_base::reactor::{self, Signals};
use coracle_sandbox::{sched, umask};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::Signal;
use smol::stream::StreamExt;

use crate::config::{self, Config, Problem, Sources};
use crate::daemon::Daemon;
use crate::notify::{Notifier, READY, STOPPING};
use crate::rpc::{Server, Service};
use crate::{cli, containerd, metrics, settle};

/// How long calls may go on after SIGTERM. A fast restart serves a kubelet better than a long goodbye: it retries.
const DRAIN: Duration = Duration::from_secs(10);

/// Runs the daemon until SIGTERM or SIGINT. Exit code 2: the configuration is wrong; 1: the daemon could not start.
pub(crate) fn run(sources: &Sources) -> ExitCode {
    let config = match config::load(sources) {
        Ok(config) => config,
        Err(problems) => {
            report(&problems);
            return ExitCode::from(cli::EXIT_USAGE);
        }
    };
    log::set_level(config.log_level);
    umask::keep_private();
    raise_descriptor_limit();
    if let Err(error) = sched::set_short_slice() {
        log::warn!("answers wait while other programs compute"; error = error);
    }
    match reactor::run(serve(sources, config)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log::error!("serve"; error = error);
            ExitCode::FAILURE
        }
    }
}

/// A soft limit is often 1024 for the sake of `select`; a full node with its streams needs more. Where it stays, an
/// accept or an open says so when it comes to that.
fn raise_descriptor_limit() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(errno) = raised {
        log::warn!("the limit of open files stays low"; error = errno);
    }
}

/// Every problem of a configuration, one log line each.
pub(crate) fn report(problems: &[Problem]) {
    for problem in problems {
        log::error!("configuration"; problem = problem);
    }
}

async fn serve(sources: &Sources, mut config: Config) -> Result<(), Error> {
    // First of all, so that a signal during the start waits instead of killing.
    let mut signals = Signals::new(&[Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGUSR1])
        .context(|| "watch for signals")?;
    let notifier = Notifier::from_environment();
    let daemon = Daemon::start(&config).await?;
    let _metrics = match &config.metrics_address {
        Some(address) => Some(metrics::Server::start(address, Rc::clone(&daemon))?),
        None => None,
    };
    let listener = Listener::bind(&config.listen)?;
    let server = Server::start(listener, Service::new(Rc::clone(&daemon)));
    let _containerd = serve_containerd(&config, &daemon);
    notifier.tell(READY);
    notifier.clone().keep_telling();
    log::info!("serving"; version = env!("CARGO_PKG_VERSION"), listen = config.listen.display());
    daemon.images.look_at_registries();
    settle::after_work();
    while let Some(signal) = signals.next().await {
        match signal {
            Signal::SIGHUP => reload(sources, &mut config, &daemon),
            Signal::SIGUSR1 => dump(&server),
            _ => {
                log::info!("stopping"; signal = signal, calls = server.counts().calls);
                break;
            }
        }
    }
    notifier.tell(STOPPING);
    // Streams of events have no end of their own, and would be waited for.
    daemon.pods.end_listening();
    // Operations whose clients have gone are under way without a call. What does not end is taken up by the next
    // daemon, as after a crash.
    let operations = reactor::deadline(DRAIN, daemon.pods.operations.none_left());
    let (cut_off, ended) = smol::future::zip(server.drain(DRAIN), operations).await;
    if ended.is_err() {
        log::warn!("operations of pods are cut off");
    }
    daemon.plugins.stop().await;
    if let Err(error) = daemon.pods.release_cgroup_parent() {
        log::warn!("the cgroup of all pods stays"; error = error);
    }
    log::info!("stopped"; calls_cut_off = cut_off);
    Ok(())
}

/// What the kubelet's cAdvisor asks of containerd, where that is wanted and nobody else answers.
fn serve_containerd(config: &Config, daemon: &Rc<Daemon>) -> Option<Server> {
    let path = config.containerd_socket.as_deref()?;
    match Listener::bind(path) {
        Ok(listener) => Some(Server::start_other(listener, containerd::service(Rc::clone(daemon)))),
        Err(error) => {
            log::warn!("containerd's calls are not served"; error = error);
            None
        }
    }
}

/// Takes over what a running daemon can; a configuration with a mistake changes nothing.
fn reload(sources: &Sources, config: &mut Config, daemon: &Daemon) {
    let new = match config::load(sources) {
        Ok(new) => new,
        Err(problems) => {
            report(&problems);
            return log::error!("reload: the old configuration stays"; problems = problems.len());
        }
    };
    let changes = config::changes(config, &new);
    if let Err(error) = daemon.images.configure(&new.pinned_images, new.sandbox_image.as_deref()) {
        return log::error!("reload: the old configuration stays"; error = error);
    }
    daemon.images.keep_blobs(new.image.keep_blobs);
    if new.image.import_dirs != config.image.import_dirs {
        daemon.images.import_from(new.import_directories());
    }
    daemon.images.set_registries(new.registry.for_workers());
    log::set_level(new.log_level);
    daemon.plugins.configure(&new.nri);
    if !changes.needs_restart.is_empty() {
        log::warn!("reload: needs a restart"; keys = changes.needs_restart.join(","));
    }
    log::info!("reload"; keys = changes.reloadable.join(","));
    *config = new;
}

/// What the daemon holds, on SIGUSR1.
fn dump(server: &Server) {
    let (held, counts) = (reactor::stats(), server.counts());
    log::info!(
        "dump";
        tasks = held.tasks,
        descriptors = held.descriptors,
        timers = held.timers,
        turns = held.turns,
        connections = counts.connections,
        connections_refused = counts.refused,
        calls = counts.calls,
        calls_max = counts.calls_max,
        calls_total = counts.calls_total
    );
}
