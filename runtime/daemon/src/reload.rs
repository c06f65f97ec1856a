//! Reloads of the configuration on SIGHUP. The outcome of the last one, and which files were read, are kept for Status, for
//! `coracle config status` and for the metrics, because a signal has no answer.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{SystemTime, UNIX_EPOCH};

use coracle_base::log;
use coracle_control::Configuration;
use coracle_sandbox::collect::ordered;

use crate::daemon::{Daemon, image_policy};
use crate::mirror::MirrorServer;
use coracle_config::{self as config, Config, RuntimeHandlers, Sources};
use coracle_preflight as preflight;

/// Maximum number of mistakes that are kept; the log has all of them.
const MISTAKES_MAX: usize = 16;

/// Parts of the configuration that a reload replaces, and its outcome.
#[derive(Default)]
pub(crate) struct Reloadable {
    /// Runtime handlers in addition to the empty name, and their defaults.
    pub(crate) runtime_handlers: RefCell<RuntimeHandlers>,
    /// The configuration in force and the outcome of the last reload.
    pub(crate) loaded: RefCell<Configuration>,
}

/// Configuration files, and the times of their last change in nanoseconds since 1970.
pub(crate) type FileTimes = BTreeMap<PathBuf, i64>;

/// The files of a configuration. To be called before they are read, so that a file that changes meanwhile counts as changed
/// since.
pub(crate) fn files(sources: &Sources) -> FileTimes {
    let changed = |path: &PathBuf| path.metadata().and_then(|about| about.modified()).map_or(0, nanoseconds);
    ordered(config::files(sources).into_iter().map(|path| (path.clone(), changed(&path))))
}

fn nanoseconds(time: SystemTime) -> i64 {
    time.duration_since(UNIX_EPOCH).ok().and_then(|since| i64::try_from(since.as_nanos()).ok()).unwrap_or(0)
}

/// Applies reloads to a running daemon.
pub(crate) struct Reloads<'a> {
    sources: &'a Sources,
    /// The configuration at the start: keys that need a restart still have its values.
    started: Config,
    /// The configuration of the last successful reload.
    current: Config,
    mirror: Rc<MirrorServer>,
}

impl<'a> Reloads<'a> {
    /// Begins with the configuration with which the daemon was started.
    pub(crate) fn new(
        sources: &'a Sources,
        started: Config,
        read: FileTimes,
        daemon: &Daemon,
        mirror: Rc<MirrorServer>,
    ) -> Self {
        let mut loaded = daemon.reloadable.loaded.borrow_mut();
        loaded.file = sources.file.clone().unwrap_or_else(|| config::DEFAULT_FILE.into());
        (loaded.read, loaded.at_ns) = (read, nanoseconds(SystemTime::now()));
        Reloads { sources, current: started.clone(), started, mirror }
    }

    /// Loads the configuration again and applies the reloadable keys; an invalid configuration changes nothing.
    pub(crate) fn reload(&mut self, daemon: &Daemon) {
        let (at_ns, read) = (nanoseconds(SystemTime::now()), files(self.sources));
        let outcome = self.apply(daemon);
        let mut loaded = daemon.reloadable.loaded.borrow_mut();
        match outcome {
            Ok(needs_restart) => {
                let needs_restart = needs_restart.into_iter().map(str::to_owned).collect();
                let file = std::mem::take(&mut loaded.file);
                *loaded = Configuration {
                    file,
                    read,
                    at_ns,
                    is_reload: true,
                    needs_restart,
                    ..Configuration::default()
                };
            }
            Err(mistakes) => {
                report(&mistakes);
                log::error!("reload failed, keeping the old configuration"; problems = mistakes.len());
                (loaded.refused_at_ns, loaded.mistakes_count) = (at_ns, mistakes.len());
                loaded.mistakes = mistakes.into_iter().take(MISTAKES_MAX).collect();
            }
        }
    }

    /// Returns the keys that need a restart, or all mistakes.
    fn apply(&mut self, daemon: &Daemon) -> Result<Vec<&'static str>, Vec<String>> {
        let mut new = config::load(self.sources)
            .map_err(|problems| problems.iter().map(ToString::to_string).collect::<Vec<_>>())?;
        let mistakes = preflight::mistakes(&new);
        if !mistakes.is_empty() {
            return Err(mistakes);
        }
        let needs_restart = config::changes(&self.started, &new).needs_restart;
        new.mirror = new.mirror.reloaded(&self.started.mirror).map_err(|mistake| vec![mistake])?;
        (daemon.images.configure(&new.pinned_images, new.sandbox_image.as_deref()))
            .map_err(|error| vec![error.to_string()])?;
        daemon.images.keep_blobs(new.image.keep_blobs);
        daemon.images.partial_pulls(new.image.partial_pulls);
        if new.image.import_dirs != self.current.image.import_dirs {
            daemon.images.import_from(new.import_directories());
        }
        if new.image.check_interval != self.current.image.check_interval {
            daemon.images.check_every(new.image.check_interval);
        }
        daemon.images.set_registries(new.registries());
        daemon.images.set_policy(image_policy(&new));
        self.mirror.configure(&new.mirror);
        log::set_level(new.log_level);
        log::set_format(new.log_format);
        daemon.nri_bridge.configure(&new.nri);
        daemon.reloadable.runtime_handlers.borrow_mut().clone_from(&new.runtime_handlers);
        if !needs_restart.is_empty() {
            log::warn!("reload: these keys take effect after a restart"; keys = needs_restart.join(","));
        }
        let applied = config::changes(&self.current, &new).reloadable;
        log::info!("reload: configuration applied"; keys = applied.join(","));
        self.current = new;
        Ok(needs_restart)
    }
}

/// Logs every problem of a configuration, one message each.
pub(crate) fn report(problems: &[impl Display]) {
    for problem in problems {
        log::error!("invalid configuration"; problem = problem);
    }
}
