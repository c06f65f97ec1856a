//! The check of layers in the background (`image.check_interval`): a worker checks one layer at a time and says when the next one is due;
//! damage is reported in Status and repaired if that is possible.

use std::collections::BTreeSet;
use std::rc::{Rc, Weak};
use std::time::{Duration, Instant};

use coracle_base::error::Error;
use coracle_base::{counters, log, reactor};
use coracle_job::{CheckLayerJob, CheckedLayer, CheckedParts, Job, Outcome};

use super::index::LayerName;
use super::{ImageId, Images, unexpected};

/// Time from the daemon's start to the first check, so that the start of a node, and daemons that end soon, are not slowed down.
const FIRST_PAUSE: Duration = Duration::from_secs(600);
/// Longest time after which a worker looks again whether a layer is due: there may be more layers then.
const PAUSE_MAX: Duration = Duration::from_secs(3600);
/// Pause after a failure or before another attempt to repair a layer; each further one is twice the previous one, up to the maximum.
const RETRY_PAUSE: Duration = Duration::from_secs(60);
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(6 * 3600);
/// Number of digits of a layer's name in texts, as in other programs.
const NAME_DIGITS: usize = 12;
/// Maximum number of a layer's images in texts.
const IMAGES_MAX: usize = 3;

impl Images {
    /// Checks each layer once per interval from now on; a time of zero ends the checks.
    pub fn check_every(self: &Rc<Self>, interval: Duration) {
        let task = (!interval.is_zero()).then(|| reactor::spawn(check_layers(Rc::downgrade(self), interval)));
        // The task before is cancelled, and its worker is ended.
        self.measured.checking.replace(task);
    }

    /// Number of layers with damage that is not repaired, and a description of the first: the layer, its images, the file.
    pub fn damaged(&self) -> (usize, Option<String>) {
        let index = self.index.borrow();
        // Others are removed by the next sweep.
        let mut damaged = index.damage.keys().filter(|layer| index.is_needed(layer)).peekable();
        let first = damaged.peek().map(|layer| self.describe(layer));
        (damaged.count(), first)
    }

    fn describe(&self, layer: &LayerName) -> String {
        let index = self.index.borrow();
        let damage = index.damage.get(layer).map_or("", String::as_str);
        let images = index.iter().filter(|entry| entry.layers.contains(layer)).take(IMAGES_MAX);
        let names = images.map(|entry| entry.name()).collect::<Vec<_>>().join(", ");
        let of = if names.is_empty() { "a removed image" } else { &names };
        format!("layer {:.NAME_DIGITS$} of {of}: {damage}", layer.to_string())
    }

    /// Takes the result of the check of a layer; returns whether it has damage that was not known.
    pub(super) fn hear(&self, layer: LayerName, damage: Option<String>) -> bool {
        let is_damaged = damage.is_some();
        let mut index = self.index.borrow_mut();
        // It may have been removed meanwhile.
        let is_news = index.is_needed(&layer) && index.note_damage(layer, damage);
        drop(index);
        match is_damaged {
            _ if !is_news => {}
            true => {
                let command = "coracle image check --repair";
                log::warn!("layer is damaged"; damage = self.describe(&layer), command = command);
            }
            false => log::info!("layer is no longer damaged"; layer = layer),
        }
        is_news && is_damaged
    }

    /// Repairs the damaged layers, image by image.
    async fn repair_damaged(self: &Rc<Self>) {
        if self.garbage.keeps_everything.get() || self.garbage.cannot_exchange.get() {
            return;
        }
        let images: Vec<ImageId> = self.index.borrow().iter().map(|entry| entry.id).collect();
        let mut tried = BTreeSet::new();
        for id in images {
            // Together, because a layer may need those below it. One of several images is pulled by the names of all of them.
            let damaged = self.damaged_of(&id);
            if damaged.iter().all(|layer| tried.contains(layer)) {
                continue;
            }
            tried.extend(damaged.iter().cloned());
            if let Err(error) = self.check_parts(&id, CheckedParts::Layers(damaged), true).await {
                log::warn!("damaged layers are not repaired, will retry"; image = id, error = error);
            }
            counters::repair(self.damaged_of(&id).is_empty());
        }
    }

    /// Names of the image's damaged layers, without those of additional stores.
    fn damaged_of(&self, id: &ImageId) -> Vec<String> {
        let index = self.index.borrow();
        let layers = index.get(id).into_iter().flat_map(|entry| &entry.layers);
        let is_ours =
            |layer: &&LayerName| index.damage.contains_key(layer) && self.disk.link(layer).is_none();
        layers.filter(is_ours).map(ToString::to_string).collect()
    }
}

async fn check_layers(images: Weak<Images>, interval: Duration) {
    let (mut after, mut pause) = (String::new(), interval.min(FIRST_PAUSE));
    let (mut failure_pause, mut repair_pause) = (RETRY_PAUSE, RETRY_PAUSE);
    let mut repair_at = Instant::now();
    loop {
        reactor::sleep(pause).await;
        let Some(images) = images.upgrade() else { return };
        match images.check_next(&after, interval).await {
            Ok(checked) => {
                failure_pause = RETRY_PAUSE;
                pause = Duration::from_secs(checked.pause_s).min(PAUSE_MAX);
                if let Ok(layer) = checked.layer.parse() {
                    counters::checked(checked.bytes);
                    if images.hear(layer, checked.damage) {
                        (repair_at, repair_pause) = (Instant::now(), RETRY_PAUSE);
                    }
                    after = checked.layer;
                }
            }
            Err(error) => {
                log::warn!("layers are not checked, will retry"; error = error);
                (pause, failure_pause) = (failure_pause, (failure_pause * 2).min(RETRY_PAUSE_MAX));
            }
        }
        if images.index.borrow().damage.is_empty() {
            continue;
        }
        if repair_at <= Instant::now() {
            images.repair_damaged().await;
            repair_at = Instant::now() + repair_pause;
            repair_pause = (repair_pause * 2).min(RETRY_PAUSE_MAX);
        }
        if !images.index.borrow().damage.is_empty() {
            pause = pause.min(repair_at.saturating_duration_since(Instant::now()));
        }
    }
}

impl Images {
    /// Has a worker check the layer that follows `after`, if it is due.
    async fn check_next(&self, after: &str, interval: Duration) -> Result<CheckedLayer, Error> {
        let job = CheckLayerJob {
            root: self.disk.root().to_owned(),
            after: after.to_owned(),
            interval_s: interval.as_secs(),
        };
        match self.workers.run(Job::CheckLayer(job)).await? {
            Outcome::LayerChecked(checked) => Ok(checked),
            _ => Err(unexpected()),
        }
    }
}
