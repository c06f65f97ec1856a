//! Verifies images in the store, and makes damaged layers again of kept blobs.
//!
//! | part | is intact if | is repaired by |
//! |---|---|---|
//! | manifest, config, kept blob of a layer | its digest equals its name | nothing: it is removed, and the image must be pulled again |
//! | unpacked layer with a list | it is what its list says ([`coracle_filelist`]) | unpacking its blob, if that is intact |
//! | unpacked layer with a damaged list, or without one (of a build before 0.1.0) | it is what the list of its newly unpacked blob says; without a blob this is not known, if every file can be read | the same |
//! | layer of an additional store | it has the digest that the store's index says | nothing: the store is only read |
//! | copies of /etc/passwd and /etc/group | they equal the files in the layers | new copies |
//!
//! A layer is made again beside the damaged one; the daemon exchanges the two, because it knows the containers that use the layer. A layer
//! that has no blob is made again by a pull ([`coracle_job::Remake`]). Damage is noted in the store until then, also if the list is lost.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use coracle_filelist::{Reader, Verdict};
use coracle_job::{
    CheckJob, CheckLayerJob, CheckedLayer, CheckedParts, Failure, Finding, Layer, Remake, Severity,
};
use coracle_manifest::{self as manifest, Document, digest_of};

use crate::failure::io_failure;
use crate::import::{self, digest_of_file};
use crate::report::Report;
use crate::store::Store;
use crate::unpack::Aside;
use crate::users;

/// Maximum rate of the check in the background in bytes per second: a small part of what the slowest flash reads.
const BACKGROUND_RATE: u64 = 8 << 20;

/// Checks the parts of the image; calls `pulse` repeatedly during the check. Returns the findings, and the
/// number of layers that could be read but not compared.
pub(crate) fn run(
    job: &CheckJob,
    pulse: &mut (dyn FnMut(u64) + Send),
) -> Result<(Vec<Finding>, u32), Failure> {
    let store = Store::open(&job.root)?;
    let mut check = Check {
        job,
        store,
        findings: Vec::new(),
        good: BTreeSet::new(),
        not_compared: 0,
        damaged: Vec::new(),
    };
    if job.parts == CheckedParts::All {
        for digest in &job.image.blobs {
            check.blob(digest, pulse)?;
        }
    }
    let blobs = check.layer_blobs();
    for (number, layer) in job.image.layers.iter().enumerate() {
        if job.parts.have(&layer.name)
            && let Err(failure) = check.layer(number, layer, blobs.get(number), pulse)
        {
            // The others are checked all the same.
            let what = format!("not checked: {}", failure.message);
            check.found(&layer.name, what, Severity::NotChecked, false);
        }
    }
    if !matches!(job.parts, CheckedParts::Layers(_)) {
        check.users()?;
    }
    Ok((check.findings, check.not_compared))
}

struct Check<'a> {
    job: &'a CheckJob,
    store: Store,
    findings: Vec<Finding>,
    /// Digests of blobs that are intact.
    good: BTreeSet<String>,
    /// Number of layers without a list in which no damage was found.
    not_compared: u32,
    /// Names of the damaged layers, which are no part of another layer that is made again.
    damaged: Vec<String>,
}

impl Check<'_> {
    /// Notes what is wrong with a layer, or with another part if its name is empty.
    fn found(&mut self, layer: &str, what: String, severity: Severity, is_repaired: bool) {
        self.findings.push(Finding { what, layer: layer.to_owned(), severity, is_repaired });
    }

    fn blob(&mut self, digest: &str, pulse: &mut dyn FnMut(u64)) -> Result<(), Failure> {
        let path = self.store.blob(digest)?;
        let why = match digest_of_file(&path, pulse) {
            Ok(found) if found == digest => {
                self.good.insert(digest.to_owned());
                return Ok(());
            }
            Ok(found) => format!("its content has digest {found}"),
            Err(failure) => failure.message,
        };
        self.found("", format!("blob {digest}: {why}"), Severity::Damaged, false);
        if self.job.repair {
            coracle_trees::remove::run(&[path])?;
        }
        Ok(())
    }

    /// Whether the blob was kept and is intact.
    fn is_good(&self, digest: &str, pulse: &mut dyn FnMut(u64)) -> bool {
        let mut found = || digest_of_file(&self.store.blob(digest)?, pulse);
        self.good.contains(digest) || found().is_ok_and(|found| found == digest)
    }

    /// Digests of the layers' blobs from the image's manifest, lowest first; none if the manifest is damaged.
    fn layer_blobs(&self) -> Vec<String> {
        let image = &self.job.image;
        let document = |digest: &String| self.store.document(digest).ok().flatten();
        let read = |digest: &String| document(digest).filter(|bytes| digest_of(bytes) == *digest);
        let parsed = image.blobs.iter().filter_map(|digest| manifest::parse(&read(digest)?).ok());
        let layers = parsed.filter_map(|document| match document {
            Document::Manifest { config, layers } if config.digest == image.id => Some(layers),
            Document::Manifest { .. } | Document::Index(_) => None,
        });
        let layers = layers.into_iter().find(|layers| layers.len() == image.layers.len());
        layers.into_iter().flatten().map(|layer| layer.digest).collect()
    }

    fn layer(
        &mut self,
        number: usize,
        layer: &Layer,
        blob: Option<&String>,
        pulse: &mut (dyn FnMut(u64) + Send),
    ) -> Result<(), Failure> {
        let blob =
            blob.filter(|digest| !self.store.layer(&layer.name).is_symlink() && self.is_good(digest, pulse));
        let mut found = verdict(&self.store, &layer.name, 0, &mut || pulse(0))?;
        let mut is_remade = false;
        if found.severity() == Severity::MayBeWhole
            && let Some(blob) = blob
        {
            // It gives the layer a list.
            is_remade = self.remake(number, blob, pulse);
            found = verdict(&self.store, &layer.name, 0, &mut || pulse(0))?;
        }
        self.not_compared += u32::from(found.verdict == Verdict::Readable);
        let (severity, has_list) = (found.severity(), found.has_list);
        let why = found.damage().or_else(|| {
            // It was removed, or another program has put something else in its place.
            let is_there = self.store.layer(&layer.name).is_dir();
            (!is_there).then(|| "no such file or directory".to_owned())
        });
        note(&self.store, &layer.name, why.as_deref(), has_list);
        if let Some(why) = why {
            self.damaged.push(layer.name.clone());
            let is_repaired = match blob {
                Some(blob) if self.job.repair && !is_remade => self.remake(number, blob, pulse),
                _ => self.job.repair && is_remade,
            };
            let what = format!("layer {}: {why}", layer.name);
            self.found(&layer.name, what, severity, is_repaired);
        } else if is_remade {
            coracle_trees::remove::run(&[self.job.into.join(&layer.name)])?;
        }
        Ok(())
    }

    /// Unpacks the layer with its list into the directory of the job; returns whether this was possible without the damaged layers. A failure
    /// is logged, because the other layers are to be checked, too.
    fn remake(&self, number: usize, blob: &str, pulse: &mut (dyn FnMut(u64) + Send)) -> bool {
        self.try_to_remake(number, blob, pulse).unwrap_or_else(|failure| {
            eprintln!("layer {} is not made again: {}", self.job.image.layers[number].name, failure.message);
            false
        })
    }

    fn try_to_remake(
        &self,
        number: usize,
        blob: &str,
        pulse: &mut (dyn FnMut(u64) + Send),
    ) -> Result<bool, Failure> {
        let image = &self.job.image;
        let layers = self.damaged.iter().chain([&image.layers[number].name]).cloned().collect();
        let store = self.store.remaking(Some(Remake { layers, into: self.job.into.clone() }))?;
        let mut aside = Aside::new(&store, &image.layers, &self.job.limits);
        let unpacked = aside.unpack(number, &store.blob(blob)?, pulse);
        unpacked.map_err(|failure| store.explain(failure))?;
        let ready = aside.complete()?;
        aside.publish(&ready, [])?;
        Ok(aside.has(number) && !ready.is_empty())
    }

    /// Checks the copies of the user files. Called after the check of the layers, with which they are
    /// compared.
    fn users(&mut self) -> Result<(), Failure> {
        let are_repaired = self.findings.iter().all(|finding| finding.is_repaired);
        let remake = || Remake { layers: self.damaged.clone(), into: self.job.into.clone() };
        let store = match are_repaired && !self.damaged.is_empty() {
            true => self.store.remaking(Some(remake()))?,
            false => self.store.clone(),
        };
        let layers = self.job.image.layers.iter().rev();
        let layers: Vec<PathBuf> = layers.map(|layer| store.layer(&layer.name)).collect();
        let id = &self.job.image.id;
        let is_repairable = are_repaired && layers.iter().all(|layer| layer.is_dir());
        let good = is_repairable.then_some(&layers[..]);
        let Some(why) = users::damage(&self.store, id, good)? else { return Ok(()) };
        if self.job.repair && is_repairable {
            users::repair(&self.store, id, &layers)?;
        }
        // CreateContainer makes them again, so that they are no reason to remove the image.
        let what = format!("names of users: {why}");
        self.found("", what, Severity::MayBeWhole, self.job.repair && is_repairable);
        Ok(())
    }
}

/// The result of the check of a layer.
#[derive(Debug)]
struct Found {
    verdict: Verdict,
    /// Whether the layer was compared with a list, or the digest of its store.
    has_list: bool,
    /// Whether the damage is known from an earlier check, and the layer has no list now.
    is_noted: bool,
    /// Number of bytes that were read.
    bytes: u64,
}

impl Found {
    fn severity(&self) -> Severity {
        match self.verdict {
            Verdict::Readable | Verdict::ListDamaged(_) => Severity::MayBeWhole,
            _ if self.is_noted => Severity::MayBeWhole,
            _ => Severity::Damaged,
        }
    }

    /// The text about damage; `None` if there is none.
    fn damage(self) -> Option<String> {
        match self.verdict {
            Verdict::Whole | Verdict::Readable | Verdict::Gone => None,
            Verdict::Damaged(why) => Some(why),
            Verdict::ListDamaged(why) => Some(format!("its list of files is damaged: {why}")),
        }
    }
}

/// Checks a layer at a rate in bytes per second (0: without a limit).
fn verdict(store: &Store, name: &str, rate: u64, pulse: &mut dyn FnMut()) -> Result<Found, Failure> {
    let (layer, mut reader) = (store.layer(name), Reader::new(rate, pulse));
    let (verdict, has_list) = match import::check_additional(store, name, &mut reader)? {
        Some(verdict) => (verdict, true),
        None => {
            let list = store.list(name);
            let verdict = coracle_filelist::check(&layer, &list, &mut reader);
            (verdict.map_err(|error| io_failure("check", &layer, &error))?, list.symlink_metadata().is_ok())
        }
    };
    let (verdict, is_noted) = match (verdict, fs::read_to_string(store.damage(name))) {
        // Without its list nothing shows that the damage is gone.
        (Verdict::Readable, Ok(known)) => (Verdict::Damaged(known), true),
        (verdict, _) => (verdict, false),
    };
    Ok(Found { verdict, has_list, is_noted, bytes: reader.bytes() })
}

/// Notes damage of a layer, or that there is none, so that the next daemon knows it. An error of reading a layer that never had a list is
/// not noted: nothing would end the note but another list.
fn note(store: &Store, name: &str, why: Option<&str>, has_list: bool) {
    let place = store.damage(name);
    let noted = match why {
        Some(_) if !has_list => Ok(()),
        Some(why) if fs::read(&place).is_ok_and(|known| known == why.as_bytes()) => Ok(()),
        Some(why) => store.aside_of_layer(&digest_of(name.as_bytes()), "damage").and_then(|aside| {
            fs::write(&aside, why).map_err(|error| io_failure("write", &aside, &error))?;
            store.publish(&aside, &Store::place(place))
        }),
        None => coracle_trees::remove::run(&[place]),
    };
    if let Err(failure) = noted {
        eprintln!("damage of layer {name} is not noted: {}", failure.message);
    }
}

/// Checks the next layer, if it is due: the layers take turns in the order of their names, at equal times within the interval. The file
/// `images/checked` has the name of the last one, and the boot and the time since then at which its check began. The check of a layer is
/// not tried again at once if it is interrupted: it could be what interrupts it. The wall clock does not matter, because it may be wrong.
pub(crate) fn next_layer(job: &CheckLayerJob, report: &Report) -> Result<CheckedLayer, Failure> {
    let (store, begun) = (Store::open(&job.root)?, Instant::now());
    let names = store.layers().map_err(|error| io_failure("list", &job.root.join("layers"), &error))?;
    let gap = Duration::from_secs(job.interval_s) / (names.len() as u32).max(1);
    let seconds = |pause: Duration| pause.as_secs().max(1);
    let checked = fs::read_to_string(store.checked()).unwrap_or_default();
    let mut checked = checked.split_ascii_whitespace();
    let (last, boot, at) =
        (checked.next(), checked.next(), checked.next().and_then(|at| at.parse::<u64>().ok()));
    let this_boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let uptime = fs::read_to_string("/proc/uptime").unwrap_or_default();
    let now = uptime.split('.').next().and_then(|seconds| seconds.parse::<u64>().ok()).unwrap_or_default();
    let since = at.filter(|_| boot == Some(this_boot.trim())).and_then(|at| now.checked_sub(at));
    let since = since.map(Duration::from_secs).filter(|since| *since < gap);
    let following = |last: &str| names.range(format!("{last}\0")..).next().or_else(|| names.first());
    let (None, Some(mut name)) = (since, following(last.unwrap_or_default())) else {
        let pause_s = seconds(gap.saturating_sub(since.unwrap_or_default()));
        return Ok(CheckedLayer { pause_s, ..CheckedLayer::default() });
    };
    let new = store.checked().with_extension("new");
    // Durable before the layer is read: that may be what resets the node.
    let written = fs::write(&new, format!("{name} {} {now}\n", this_boot.trim()))
        .and_then(|()| fs::File::open(&new)?.sync_all())
        .and_then(|()| fs::rename(&new, store.checked()))
        .and_then(|()| store.checked().parent().map_or(Ok(()), coracle_sandbox::disk::sync_dir));
    // On a read-only disk the daemon remembers the name.
    if written.is_err() && !job.after.is_empty() {
        name = following(&job.after).unwrap_or(name);
    }
    let found = verdict(&store, name, BACKGROUND_RATE, &mut || report.pulse());
    let pause_s = seconds(gap.saturating_sub(begun.elapsed()));
    // It was removed meanwhile, or its additional store.
    if !store.layer(name).is_dir() {
        return Ok(CheckedLayer { pause_s, ..CheckedLayer::default() });
    }
    let found = found?;
    let (bytes, has_list) = (found.bytes, found.has_list);
    if found.verdict == Verdict::Gone {
        return Ok(CheckedLayer { bytes, pause_s, ..CheckedLayer::default() });
    }
    let damage = found.damage();
    note(&store, name, damage.as_deref(), has_list);
    Ok(CheckedLayer { layer: name.clone(), damage, bytes, pause_s })
}

#[cfg(test)]
mod tests {
    use coracle_job::{ImageConfig, ImageRecord, Limits};

    use super::*;

    /// A store with three layers; removed on drop.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let root = std::env::temp_dir().join(format!("coracle-check-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&root);
            for digit in ["a", "b", "c"] {
                fs::create_dir_all(root.join("layers").join(digit.repeat(64))).unwrap();
            }
            fs::create_dir_all(root.join("layers/tmp-1")).unwrap();
            Self(root)
        }

        /// The first digit of the layer that is checked after this one, and the pause.
        fn next(&self, after: &str, interval_s: u64) -> (String, u64) {
            let job = CheckLayerJob { root: self.0.clone(), after: after.to_owned(), interval_s };
            let checked = next_layer(&job, &Report::default()).unwrap();
            assert_eq!(checked.damage, None);
            (checked.layer.chars().take(1).collect(), checked.pause_s)
        }

        fn checked(&self) -> String {
            fs::read_to_string(self.0.join("images/checked")).unwrap()
        }

        fn set_checked(&self, text: &str) {
            fs::write(self.0.join("images/checked"), text).unwrap();
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn layers_take_turns_within_the_interval_as_root() {
        let store = Scratch::new("turns");
        let (layer, pause) = store.next("", 3000);
        assert!(layer == "a" && (990..=1000).contains(&pause), "{layer} {pause}");
        // A daemon that is started again and again does not check more, and one whose disk is read-only remembers the layer.
        for after in ["", &"a".repeat(64)] {
            let (layer, pause) = store.next(after, 3000);
            assert!(layer.is_empty() && (990..=1000).contains(&pause), "{layer} {pause}");
        }
        let this = store.checked();
        let words: Vec<&str> = this.split_ascii_whitespace().collect();
        let [name, boot, at] = words[..] else { panic!("{this}") };
        let at: u64 = at.parse().unwrap();
        let past = |name: &str| format!("{name} {boot} {}", at.saturating_sub(1000));
        // The last one is followed by the first one, also if it was removed meanwhile.
        for (last, next) in [("a", "b"), ("b", "c"), ("c", "a"), ("bb", "c"), ("0", "a")] {
            store.set_checked(&format!("{} other-boot 5", last.repeat(64)));
            assert_eq!(store.next("", 3000).0, next, "another boot");
            if at >= 1000 {
                store.set_checked(&past(&last.repeat(64)));
                assert_eq!(store.next("", 3000).0, next, "its time has passed");
            }
        }
        // What a power cut leaves, a boot time that lies ahead, and a clock cannot stop the checks or repeat them.
        for text in ["", "\0\0\0\0", "x", &format!("{name} {boot}"), &format!("{name} {boot} {}", at + 5000)]
        {
            store.set_checked(text);
            assert!(!store.next("", 3000).0.is_empty(), "{text:?}");
            assert_eq!(store.next("", 3000).0, "", "{text:?}");
        }
        // The daemon's memory counts only if nothing can be written: the check that was interrupted is not tried again at once.
        store.set_checked(&format!("{} other-boot 5", "a".repeat(64)));
        assert_eq!(store.next(&"c".repeat(64), 3000).0, "b");
        fs::remove_file(store.0.join("images/checked")).unwrap();
        fs::create_dir(store.0.join("images/checked")).unwrap();
        for (after, next) in [("", "a"), ("a", "b"), ("c", "a")] {
            assert_eq!(store.next(&after.repeat(64), 3000).0, next, "after {after:?}");
        }
        fs::remove_dir(store.0.join("images/checked")).unwrap();
        // More layers than seconds.
        store.set_checked("");
        assert_eq!(store.next("", 1).1, 1);
    }

    #[test]
    fn an_empty_store_has_nothing_to_check_as_root() {
        let store = Scratch::new("empty");
        fs::remove_dir_all(store.0.join("layers")).unwrap();
        assert_eq!(store.next("", 3000).0, "");
    }

    #[test]
    fn damage_is_noted_until_the_layer_is_whole_or_new_as_root() {
        let root = Scratch::new("noted");
        let store = Store::open(&root.0).unwrap();
        let name = "a".repeat(64);
        let noted = || fs::read_to_string(store.damage(&name)).ok();
        for why in [Some("/x: has other content"), Some("/y: has other content"), None, None] {
            note(&store, &name, why, true);
            assert_eq!(noted().as_deref(), why);
        }
        // A lost list does not make it whole.
        note(&store, &name, Some("/x: has other content"), true);
        let job = CheckLayerJob { root: root.0.clone(), after: String::new(), interval_s: 1 };
        let checked = next_layer(&job, &Report::default()).unwrap();
        assert_eq!((checked.layer, checked.damage), (name.clone(), noted()));
        // Another worker makes it anew.
        fs::remove_dir(store.layer(&name)).unwrap();
        let new = store.new_layer().unwrap();
        store.publish(&new, &store.layer(&name)).unwrap();
        assert_eq!(noted(), None);
    }

    #[test]
    fn a_layer_of_an_absent_store_is_not_damaged_as_root() {
        let root = Scratch::new("absent");
        let store = Store::open(&root.0).unwrap();
        let name = "a".repeat(64);
        fs::remove_dir(store.layer(&name)).unwrap();
        std::os::unix::fs::symlink(root.0.join("absent/layers").join(&name), store.layer(&name)).unwrap();
        assert_eq!(root.next("", 3000).0, "b", "it is left out");
        let failure = verdict(&store, &name, 0, &mut || ()).unwrap_err();
        assert!(failure.message.contains("additional store") && failure.message.contains("is not there"));
    }

    #[test]
    fn a_layer_that_cannot_be_checked_keeps_no_other_from_its_check_as_root() {
        let root = Scratch::new("unchecked");
        let store = Store::open(&root.0).unwrap();
        let layers = ["a", "b"].map(|digit| Layer {
            diff_id: String::new(),
            chain_id: String::new(),
            name: digit.repeat(64),
        });
        for layer in &layers {
            fs::remove_dir(store.layer(&layer.name)).unwrap();
        }
        std::os::unix::fs::symlink(root.0.join("absent/layers/a"), store.layer(&layers[0].name)).unwrap();
        let image = ImageRecord {
            id: digest_of(b"config"),
            tags: Vec::new(),
            digests: Vec::new(),
            size_bytes: 1,
            layers: layers.to_vec(),
            blobs: Vec::new(),
            config: ImageConfig::default(),
        };
        let parts = CheckedParts::Layers(layers.iter().map(|layer| layer.name.clone()).collect());
        let into = root.0.join("layers/tmp-new");
        let job =
            CheckJob { root: root.0.clone(), image, limits: Limits::default(), parts, repair: true, into };
        let (findings, _) = run(&job, &mut |_| ()).unwrap();
        let found: Vec<_> = findings.iter().map(|found| (found.severity, found.layer.clone())).collect();
        let [a, b] = layers.map(|layer| layer.name);
        assert_eq!(found, [(Severity::NotChecked, a), (Severity::Damaged, b)], "{findings:?}");
    }
}
