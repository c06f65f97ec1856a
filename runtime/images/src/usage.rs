//! Disk usage of images (ImageFsInfo, CRI 2.32), measured by a worker and never in the event loop. Layers do
//! not change, so each is measured once in the lifetime of a daemon; all other data is small. The usage is
//! measured only on request, and only after a change.

use std::os::unix::fs::MetadataExt;
use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime};

use coracle_base::{log, reactor};
use coracle_job::{Job, Outcome, TreeUsage};

use super::Images;
use super::disk::list;
use super::index::LayerName;
use super::measurement::{Moment, Usage, Walk};

/// Time limit of a request's wait for a measurement, after which the request returns the previous
/// measurement.
const MEASURE_WAIT: Duration = Duration::from_millis(500);
/// Minimum interval between two measurements while the store changes; the kubelet's requests are 10 s apart.
const PAUSE: Duration = Duration::from_secs(2);
/// Size of a block in stat(2), independent of the file system.
const BLOCK_BYTES: u64 = 512;

impl Images {
    /// Returns the disk usage of images. If the first measurement after a start takes long, the answer is
    /// computed from the records.
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
            // On timeout the next request gets the result.
            let _ = reactor::deadline(MEASURE_WAIT, is_done.recv()).await;
        }
        let directory = self.disk.images();
        match &*self.measured.last.borrow() {
            Some(Walk { at, total, .. }) => {
                Usage { directory, at: *at, used_bytes: total.bytes, inodes_used: total.inodes }
            }
            None => {
                let index = self.index.borrow();
                let used_bytes = index.iter().fold(0_u64, |sum, entry| sum.saturating_add(entry.size_bytes));
                // Estimate: the record, the config, one manifest, and one directory per layer.
                let inodes_used = index.iter().map(|entry| 3 + entry.layers.len() as u64).sum();
                Usage { directory, at: SystemTime::now(), used_bytes, inodes_used }
            }
        }
    }

    fn moment(&self) -> Moment {
        Moment {
            published: self.index.borrow().sequence(),
            disposed: self.garbage.trash.disposed(),
            filled: self.measured.filled.get(),
        }
    }

    fn is_stale(&self) -> bool {
        match &*self.measured.last.borrow() {
            None => true,
            Some(last) => {
                let is_moving = self.measured.fills.get() > 0 || last.moment != self.moment();
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
        let usages = match self.workers.run(Job::MeasureTrees { paths }).await {
            Ok(Outcome::Measured(usages)) => usages,
            Ok(_) => {
                return log::error!("cannot measure the images, earlier sizes are reported"; error = "unexpected answer of the worker");
            }
            Err(error) => {
                return log::warn!("cannot measure the images, earlier sizes are reported"; error = error);
            }
        };
        let own = std::fs::symlink_metadata(self.disk.layers());
        let own = own.map_or_else(
            |_| TreeUsage::default(),
            |about| TreeUsage { bytes: about.blocks() * BLOCK_BYTES, inodes: 1 },
        );
        let mut usages = usages.into_iter();
        let mut total = sum(own, usages.next().unwrap_or_default());
        for (name, usage) in new.into_iter().zip(usages) {
            // Entries without a layer's name are incomplete or unused, and are measured each time.
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
