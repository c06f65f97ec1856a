//! The life of the daemon: configuration, event loop, daemon, socket, READY notification, signals, drain.

use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;

use coracle_base::descriptors;
use coracle_base::error::{Context, EXIT_USAGE, Error, describe_io};
use coracle_base::listen::Listener;
use coracle_base::log;
use coracle_base::reactor::{self, Signals};
use coracle_base::waits::{self, Waiting};
use coracle_sandbox::{sched, umask};
use nix::sys::signal::Signal;

use crate::daemon::Daemon;
use crate::mirror::MirrorServer;
use crate::notify::{Notifier, READY, STOPPING};
use crate::reload::{self, Reloads};
use crate::rpc::{self, Server};
use crate::{containerd, control, metrics, reclaim};
use coracle_config::{self as config, Config, Sources};
use coracle_preflight as preflight;

/// Time limit for running calls after SIGTERM. Kubelets retry, therefore a fast restart is better than a long drain.
const DRAIN: Duration = Duration::from_secs(10);

/// Runs the daemon until SIGTERM or SIGINT. Exit code 2: invalid configuration; 1: the daemon could not
/// start.
pub(crate) fn run(sources: &Sources) -> ExitCode {
    log::detect_journal();
    let read = reload::files(sources);
    let config = match config::load(sources) {
        Ok(config) => config,
        Err(problems) => {
            reload::report(&problems);
            return ExitCode::from(EXIT_USAGE);
        }
    };
    log::set_level(config.log_level);
    log::set_format(config.log_format);
    let mistakes = preflight::mistakes(&config);
    if !mistakes.is_empty() {
        reload::report(&mistakes);
        return ExitCode::from(EXIT_USAGE);
    }
    umask::keep_private();
    if let Err(error) = descriptors::raise_limit() {
        // Later accepts or opens report the error.
        log::warn!("cannot raise the limit of open files, with many pods requests may fail"; error = describe_io(&error));
    }
    if let Err(error) = sched::set_short_slice() {
        log::warn!("cannot set a short scheduler slice, answers may be delayed"; error = error);
    }
    let served = reactor::try_run(serve(sources, config, read));
    match served.unwrap_or_else(|error| Err(Error::from(error).context("make an event loop"))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log::error!("cannot start the daemon"; error = error);
            ExitCode::FAILURE
        }
    }
}

async fn serve(sources: &Sources, config: Config, read: reload::FileTimes) -> Result<(), Error> {
    // Before anything else, so that a signal during the start is handled later and does not kill the process.
    let mut signals = Signals::new(&[Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGUSR1])
        .context(|| "watch for signals")?;
    let notifier = Notifier::from_environment();
    let daemon = Daemon::start(&config).await?;
    let (images, weak) = (Rc::clone(&daemon.images), Rc::downgrade(&daemon));
    let control = control::Server::bind(&coracle_control::socket(&config.state), images, weak)?;
    reactor::spawn(control.run()).detach();
    let _metrics = match &config.metrics_address {
        Some(address) => Some(metrics::Server::start(address, Rc::clone(&daemon))?),
        None => None,
    };
    let listener = Listener::bind(&config.listen)?;
    let server = Server::start(listener, rpc::answers(Rc::clone(&daemon)));
    let for_cadvisor = containerd::Socket::serve(&config, &daemon, &server);
    notifier.tell(READY);
    notifier.clone().keep_telling();
    log::info!("serving"; version = env!("CARGO_PKG_VERSION"), listen = config.listen.display());
    daemon.images.look_at_registries();
    daemon.images.check_every(config.image.check_interval);
    let workers = Rc::clone(&daemon.pods.node().host.workers);
    let mirror = MirrorServer::start(&config.mirror, config.root.clone(), Rc::clone(&daemon.images), workers);
    let mut reloads = Reloads::new(sources, config, read, &daemon, mirror);
    reclaim::schedule();
    loop {
        match signals.next().await {
            Signal::SIGHUP => reloads.reload(&daemon),
            Signal::SIGUSR1 => dump(&server, &daemon),
            signal => {
                log::info!("stopping"; signal = signal, calls = server.counts().calls);
                break;
            }
        }
    }
    notifier.tell(STOPPING);
    if let Some(socket) = for_cadvisor {
        socket.remove();
    }
    // Event streams do not end by themselves, so the drain would wait for them.
    daemon.pods.end_listening();
    // Operations may still run although their calls have ended. The next daemon continues unfinished ones, as
    // after a crash.
    let operations = reactor::deadline(DRAIN, daemon.pods.engine().operations.none_left());
    let (cut_off, ended) = smol::future::zip(server.drain(DRAIN), operations).await;
    if ended.is_err() {
        log::warn!("operations of pods did not complete in time, the next daemon continues them");
    }
    daemon.nri_bridge.stop().await;
    if let Err(error) = daemon.pods.release_cgroup_parent() {
        log::warn!("cannot remove the cgroup parent of pods"; error = error);
    }
    log::tell_repeats();
    log::info!("stopped"; calls_cut_off = cut_off);
    Ok(())
}

/// Logs the state of the daemon, on SIGUSR1.
fn dump(server: &Server, daemon: &Daemon) {
    let (held, counts) = (reactor::stats(), server.counts());
    log::info!(
        "dump of the daemon";
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
    for pod in daemon.pods.every_pod() {
        let own = daemon.pods.listed_containers_of(pod.id);
        let (made, running) = own
            .iter()
            .fold((0, 0), |(made, running), container| (made + 1, running + u32::from(container.pid() != 0)));
        let state = pod.record().state.name();
        log::info!("dump of a pod"; pod = pod.id, name = pod.name(), state = state, containers = made, running = running);
    }
    for Waiting { pod, name, what, since } in waits::list() {
        log::info!("dump of a wait"; pod = pod, name = name, what = what, s = since.as_secs());
    }
    for pull in daemon.images.pulling() {
        log::info!("dump of a pull"; image = pull.name, bytes = pull.progress.bytes_done, s = pull.since.as_secs());
    }
}
