//! What images use of their file system (ImageFsInfo, CRI 2.32): measured by a worker's walk, never in the event
//! loop. A layer does not change, so it is walked once in a daemon's life; what does change is small. Nobody who does not
//! ask pays, and nothing is walked anew while nothing has come or gone.

use std::os::unix::fs::MetadataExt;
use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime};

use coracle_base::{log, reactor};
use coracle_job::{Job, Outcome, TreeUsage};

use super::Images;
use super::disk::list;
use super::index::LayerName;
use super::measured::{Moment, Usage, Walk};

/// What who asks waits for a walk at most; after that the last one is the answer.
const PATIENCE: Duration = Duration::from_millis(500);
/// From one walk to the next while something is under way; a kubelet asks every 10 s.
const PAUSE: Duration = Duration::from_secs(2);
/// Blocks are counted in these whatever the file system's are (stat(2)).
const BLOCK_BYTES: u64 = 512;

impl Images {
    /// What images use of the disk. The first answer after a start may be that of their records, where a walk takes long.
    pub async fn usage(self: &Rc<Self>) -> Usage {
        if self.is_stale() && !self.measured.is_walking.replace(true) {
            let (done, is_done) = smol::channel::bounded::<()>(1);
            let images = Rc::clone(self);
            reactor::spawn(async move {
                images.walk().await;
                images.measured.is_walking.set(false);
                drop(done);
            })
            .detach();
            // Late is no error: the next who asks gets it.
            let _ = reactor::deadline(PATIENCE, is_done.recv()).await;
        }
        let directory = self.disk.images();
        match &*self.measured.last.borrow() {
            Some(Walk { at, total, .. }) => {
                Usage { directory, at: *at, used_bytes: total.bytes, inodes_used: total.inodes }
            }
            None => {
                let index = self.index.borrow();
                let used_bytes = index.iter().fold(0_u64, |sum, entry| sum.saturating_add(entry.size_bytes));
                // The record, the config and one manifest, and each layer's directory.
                let inodes_used = index.iter().map(|entry| 3 + entry.layers.len() as u64).sum();
                Usage { directory, at: SystemTime::now(), used_bytes, inodes_used }
            }
        }
    }

    fn moment(&self) -> Moment {
        Moment { published: self.sequence.get(), disposed: self.trash.disposed(), filled: self.filled.get() }
    }

    fn is_stale(&self) -> bool {
        match &*self.measured.last.borrow() {
            None => true,
            Some(last) => {
                let is_moving = self.fills.get() > 0 || last.moment != self.moment();
                is_moving && last.begun.elapsed() >= PAUSE
            }
        }
    }

    async fn walk(&self) {
        let (moment, begun) = (self.moment(), Instant::now());
        let names = list(&self.disk.layers());
        self.measured.layers.borrow_mut().retain(|name, _| names.contains(name));
        let is_known = |name: &String| self.measured.layers.borrow().contains_key(name);
        let new: Vec<String> = names.into_iter().filter(|name| !is_known(name)).collect();
        let layers = new.iter().map(|name| self.disk.layers().join(name));
        let paths = std::iter::once(self.disk.images()).chain(layers).collect();
        let usages = match self.workers.run(Job::MeasureTrees { paths }, |_, _| {}).await {
            Ok(Outcome::Measured(usages)) => usages,
            Ok(_) => return log::error!("images not measured"; error = "the worker did another job"),
            Err(error) => return log::warn!("images not measured"; error = error),
        };
        let own = std::fs::symlink_metadata(self.disk.layers());
        let own = own.map_or_else(
            |_| TreeUsage::default(),
            |about| TreeUsage { bytes: about.blocks() * BLOCK_BYTES, inodes: 1 },
        );
        let mut usages = usages.into_iter();
        let mut total = sum(own, usages.next().unwrap_or_default());
        for (name, usage) in new.into_iter().zip(usages) {
            // What has no layer's name is unfinished or garbage: there for now, and another thing at the next look.
            match name.parse::<LayerName>() {
                Ok(_) => drop(self.measured.layers.borrow_mut().insert(name, usage)),
                Err(_) => total = sum(total, usage),
            }
        }
        total = self.measured.layers.borrow().values().fold(total, |total, usage| sum(total, *usage));
        *self.measured.last.borrow_mut() = Some(Walk { moment, at: SystemTime::now(), begun, total });
    }
}

fn sum(one: TreeUsage, other: TreeUsage) -> TreeUsage {
    TreeUsage {
        bytes: one.bytes.saturating_add(other.bytes),
        inodes: one.inodes.saturating_add(other.inodes),
    }
}
