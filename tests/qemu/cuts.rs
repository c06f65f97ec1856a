//! Power cuts while images and pods are created and removed: `tests/inside/cuts.rs` works in the guest,
//! [`Volatile`] is its disk, and this module keeps a list of all changes. An acknowledged change must be
//! present after the cut; an unacknowledged one may be; and every object that the daemon lists is complete.
//!
//! The cut is at a random write, including those of recovery. `CORACLE_QEMU_SEED` repeats the cuts and losses
//! of an earlier run.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime};

use coracle_tests::random::Random;

use crate::cargo;
use crate::guest::{Guest, Next};
use crate::target::Arch;
use crate::volatile::Volatile;

/// A boot with its checks, and work until the cut: 15 seconds on an idle machine, three minutes on a very
/// busy one.
const LIMIT: Duration = Duration::from_secs(15 * 60);

/// Maximum number of writes of a working guest until the cut: some twenty changes of images and pods.
const WRITES_MAX: u64 = 1200;
/// Maximum number of writes of a guest during boot and verification.
const BOOT_WRITES_MAX: u64 = 60;

/// The known state of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    Present,
    /// A change was in progress at the power cut.
    Changing,
    /// A removed pod: to protect flash its removal is not synced separately, but with the next synced change.
    /// A pod that reappears is not ready, and is removed again.
    RemovedUnsynced,
}

/// The acknowledged changes and the resulting objects. Other objects must not exist.
#[derive(Default)]
struct Expected {
    known: BTreeMap<String, Known>,
    /// Objects that this boot has reported so far.
    found: BTreeSet<String>,
    /// All received lines, for the analysis of a failure.
    lines: Vec<String>,
    is_working: bool,
}

impl Expected {
    /// Evaluates a line of the guest; returns an error if it is inconsistent.
    fn read(&mut self, line: &str) -> Result<(), String> {
        if !line.is_empty() {
            self.lines.push(line.to_owned());
        }
        if let Some(thing) = line.strip_prefix("HAS ") {
            self.found.insert(thing.to_owned());
        } else if line == "CHECKED" {
            return self.compare();
        } else if line == "WORKING" {
            self.is_working = true;
        } else if let Some(change) = line.strip_prefix("DOING ") {
            self.known.insert(change[1..].to_owned(), Known::Changing);
        } else if let Some(change) = line.strip_prefix("DID ") {
            if let Some(pod) = change.strip_prefix("-pod ") {
                self.known.insert(format!("pod {pod}"), Known::RemovedUnsynced);
                return Ok(());
            }
            self.known.retain(|_, state| *state != Known::RemovedUnsynced);
            match change.split_at(1) {
                ("+", thing) => drop(self.known.insert(thing.to_owned(), Known::Present)),
                (_, thing) => drop(self.known.remove(thing)),
            }
        }
        Ok(())
    }

    fn compare(&mut self) -> Result<(), String> {
        let lost = self.known.iter().filter(|(_, state)| **state == Known::Present).map(|(thing, _)| thing);
        let lost: Vec<_> = lost.filter(|thing| !self.found.contains(*thing)).collect();
        let back: Vec<_> = self.found.iter().filter(|thing| !self.known.contains_key(*thing)).collect();
        if !lost.is_empty() || !back.is_empty() {
            return Err(format!("acknowledged and lost: {lost:?}; removed and back: {back:?}"));
        }
        self.known =
            std::mem::take(&mut self.found).into_iter().map(|thing| (thing, Known::Present)).collect();
        Ok(())
    }
}

/// Boots the guest and cuts the power.
#[track_caller]
fn cut(guest: &Guest, boot: u64, random: &mut Random, expected: &mut Expected) {
    let disk = Volatile::serve(&guest.disk(), guest.disk().with_extension("socket"));
    // Every fourth cut is during the boot.
    let is_early = boot % 4 == 3;
    let writes = 1 + random.below(if is_early { BOOT_WRITES_MAX } else { WRITES_MAX });
    if is_early {
        disk.cut_after(writes);
    }
    let (mut is_armed, mut wrong) = (is_early, None);
    expected.is_working = false;
    expected.found.clear();
    let words = format!(
        "CORACLE_SUITE=inside CORACLE_TEST_DIR=/run/tests CORACLE_TESTS=cuts::images_and_pods_are_consistent_after_each_power_cut CORACLE_BOOT={boot} CORACLE_SEED={}",
        random.below(u64::MAX >> 16)
    );
    let report = guest.boot_on(&disk.drive(), &words, LIMIT, |line| {
        if let Some(Err(text)) = line.map(|line| expected.read(line)) {
            wrong.get_or_insert(text);
        }
        if expected.is_working && !is_armed {
            disk.cut_after(writes);
            is_armed = true;
        }
        if disk.is_cut() || wrong.is_some() { Next::Cut } else { Next::Read }
    });
    let was_cut = disk.is_cut();
    // Keeps nothing of the cache, half of it, or all of it.
    let percent = 50 * random.below(3);
    let loss = disk.settle(random, percent);
    println!(
        "cut {boot} at write {writes}{} after {:?}: {} writes; of sectors not flushed {} kept, {} lost",
        if is_early { " of the boot" } else { "" },
        report.took,
        loss.writes,
        loss.kept,
        loss.lost,
    );
    assert_eq!(wrong, None, "cut {boot}:\n{}", expected.lines.join("\n"));
    assert!(was_cut, "boot {boot} ended before the power did:\n{}", expected.lines.join("\n"));
}

#[track_caller]
fn power_cuts(arch: Arch, count: u64) {
    let given = std::env::var("CORACLE_QEMU_SEED").ok().and_then(|text| text.parse().ok());
    let now = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let seed = given.unwrap_or_else(now);
    println!("{count} power cuts on {}: CORACLE_QEMU_SEED={seed}", arch.name());
    let guest = Guest::with(&format!("cuts{count}"), arch, 256, &["inside"], |tree| cargo::add(tree, arch));
    let (mut random, mut expected) = (Random::new(seed), Expected::default());
    for boot in 0..count {
        cut(&guest, boot, &mut random, &mut expected);
    }
    let mut wrong = Ok(());
    let words = "CORACLE_SUITE=inside CORACLE_TEST_DIR=/run/tests CORACLE_TESTS=cuts::images_can_be_fetched";
    let drive = format!("file={},cache=unsafe", guest.disk().display());
    let last = guest.boot_on(&drive, words, LIMIT, |line| {
        if let Some(read) = line.map(|line| expected.read(line)).filter(Result::is_err) {
            wrong = read;
        }
        Next::Read
    });
    assert_eq!(wrong, Ok(()), "seed {seed}, after the last cut:\n{}", expected.lines.join("\n"));
    last.expect_good(&format!("seed {seed}, after the last cut"));
}

#[test]
fn six_power_cuts() {
    power_cuts(Arch::X86_64, 6);
}

/// How many cuts the long tests make: `CORACLE_QEMU_CUTS`, or thirty.
fn many() -> u64 {
    std::env::var("CORACLE_QEMU_CUTS").ok().and_then(|text| text.parse().ok()).unwrap_or(30)
}

#[test]
#[ignore = "ten minutes: make power-cuts"]
fn many_power_cuts_on_x86_64() {
    power_cuts(Arch::X86_64, many());
}

#[test]
#[ignore = "ten minutes: make power-cuts"]
fn many_power_cuts_on_aarch64() {
    power_cuts(Arch::Aarch64, many());
}
