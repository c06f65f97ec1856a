//! Tests of layers that neighbours have unpacked: what passes, what is blamed, and what has an end.

use std::io::Read;
use std::path::PathBuf;

use coracle_chunked::{NEIGHBOUR_EXTENTS_MAX, Wanted, index};
use coracle_job::Limits;
use sha2::{Digest as _, Sha256};

use super::*;
use crate::store::Store;

fn chunk(begin: u64, end: u64) -> Chunk {
    Chunk { begin, end, size: end - begin, digest: [1; 32] }
}

#[test]
fn chunks_are_passed_however_the_archive_is_split() {
    let archive: Vec<u8> = (0..100).collect();
    let chunks = [chunk(3, 10), chunk(10, 11), chunk(20, 50), chunk(60, 61), chunk(90, 100)];
    // The second range begins with its first chunk, as each does.
    let ranges = [3..61_usize, 90..100];
    for piece in [1, 2, 7, 30, 100] {
        let (mut from, into) = pipe().unwrap();
        let mut passing = Passing::new(chunks.into_iter(), into);
        for range in &ranges {
            passing.position = range.start as u64;
            for bytes in archive[range.clone()].chunks(piece) {
                assert!(passing.pass(bytes).is_ok());
            }
        }
        drop(passing);
        let mut passed = Vec::new();
        from.read_to_end(&mut passed).unwrap();
        let expected = chunks.map(|chunk| archive[chunk.begin as usize..chunk.end as usize].to_vec());
        assert_eq!(passed, expected.concat(), "{piece}");
    }
}

/// An archive of two files, of which the second one has two chunks, and its outline.
fn archive() -> (Vec<u8>, Vec<u8>) {
    let mut large: Vec<u8> = (0..3000_u32).map(|number| (number % 251) as u8 + 1).collect();
    large[1000..2100].fill(0);
    let mut writer = outline::Writer::new(Vec::new(), u64::MAX);
    let mut archive = Vec::new();
    for (path, content) in [(&b"small"[..], &b"hello"[..]), (b"large", &large)] {
        let (header, padding) = (vec![path[0]; 512], vec![0; 512 - content.len() % 512]);
        writer.pass(&header);
        writer.begin(path, 0, content.len() as u64);
        writer.pass(content);
        writer.end();
        writer.pass(&padding);
        archive.extend([&header, content, &padding].concat());
    }
    (archive, writer.finish().unwrap())
}

/// The archive that is made with an outline and these bytes of a neighbour, of which `send` says how many are sent.
fn made(outline: &[u8], of_neighbour: &[u8], send: usize) -> Result<Vec<u8>, Stopped> {
    let contents = outline::contents(outline).unwrap();
    let known = Wanted::new(&contents);
    let plan = Plan::new(&contents, NEIGHBOUR_EXTENTS_MAX, |index| !contents.chunks()[index].is_zeros());
    let is_fetched = |index: usize| plan.position(index).is_some();
    let layout = Layout::Outline(outline);
    let rebuild = Rebuild { contents: &contents, known: &known, donors: &[], layout: &layout };
    let (from, into) = pipe().unwrap();
    let (mut archive, made) = pipe().unwrap();
    let chunks = contents.chunks().iter().enumerate().filter(|(index, _)| is_fetched(*index));
    let mut passing = Passing::new(chunks.map(|(_, chunk)| *chunk), into);
    let has_failed = &AtomicBool::new(false);
    std::thread::scope(|scope| {
        let read = scope.spawn(move || {
            let mut bytes = Vec::new();
            archive.read_to_end(&mut bytes).map(|_| bytes).unwrap()
        });
        let fetched = Fetched::Plain { from, has_failed };
        let written = scope.spawn(move || rebuild.write(&is_fetched, fetched, made));
        for extent in plan.extents() {
            passing.position = extent.begin;
            let _ = passing.pass(&of_neighbour[extent.begin as usize..send.min(extent.end as usize)]);
        }
        drop(passing);
        written.join().unwrap().map(|()| read.join().unwrap())
    })
}

#[test]
fn an_archive_is_rebuilt_from_a_neighbour_and_wrong_chunks_are_detected() {
    let (archive, outline) = archive();
    assert!(made(&outline, &archive, archive.len()).is_ok_and(|made| made == archive));
    let content = 512 + 5 + 507 + 512;
    for (about, at, damaged) in [
        ("the first file", 514, 0),
        ("the first chunk", content + 9, 1),
        ("the last chunk", content + 2500, 3),
    ] {
        let mut wrong = archive.clone();
        wrong[at] ^= 1;
        let stopped = made(&outline, &wrong, wrong.len());
        assert!(matches!(stopped, Err(Stopped::Damaged(index)) if index == damaged), "{about}");
    }
    // Headers are not those of the neighbour.
    let mut same = archive.clone();
    same[content - 100] ^= 1;
    assert!(made(&outline, &same, same.len()).is_ok_and(|made| made == archive));
    let early = made(&outline, &archive, content + 2500);
    assert!(matches!(early, Err(Stopped::Damaged(3))), "an early end");
}

#[test]
fn an_outline_of_another_archive_gives_another_archive() {
    let (archive, outline) = archive();
    let mut other = outline.clone();
    let header = outline.windows(2).position(|bytes| bytes == b"ss").unwrap();
    other[header] = b'x';
    let made = made(&other, &archive, archive.len());
    assert!(made.is_ok_and(|made| made != archive), "the diff ID shows it");
}

#[test]
fn a_reader_that_has_ended_ends_the_ranges() {
    let (from, into) = pipe().unwrap();
    let mut passing = Passing::new([chunk(0, 5)].into_iter(), into);
    drop(from);
    assert!(matches!(passing.pass(b"12345"), Err(Cut::Closed)));
}

#[test]
fn a_slow_disk_of_this_node_is_not_blamed_on_the_neighbour() {
    let mut passing = Passing::new(std::iter::empty(), pipe().unwrap().1);
    let mut resumed = RESUMED_MAX;
    passing.position = GAIN_BYTES_MIN;
    passing.local = LOCAL_WAIT_MAX;
    assert!(passing.is_resumed(0, &mut resumed) && resumed == RESUMED_MAX);
    assert!(!passing.is_resumed(1, &mut resumed), "without progress it has an end");
    passing.local = Duration::ZERO;
    assert!(!passing.is_resumed(0, &mut resumed), "too often");
    resumed = 0;
    assert!(passing.is_resumed(0, &mut resumed) && resumed == 1);
}

#[test]
fn a_neighbour_may_be_slow_for_a_while_only() {
    let passing = || Passing::new(std::iter::empty(), pipe().unwrap().1);
    let (seconds, second) = (Duration::from_secs, RATE_MIN as usize);
    let mut slow = passing();
    assert!(slow.waited_for(seconds(29), 0).is_ok());
    assert!(slow.waited_for(seconds(10), 10 * second).is_ok(), "as fast as it has to be");
    assert!(matches!(slow.waited_for(seconds(2), 0), Err(Cut::Slow)));
    let mut fast_first = passing();
    assert!(fast_first.waited_for(seconds(1), 1000 * second).is_ok());
    assert!(matches!(fast_first.waited_for(seconds(31), 0), Err(Cut::Slow)), "nothing is saved for later");
    let mut half = passing();
    let ended = (0..1000).find(|_| half.waited_for(seconds(1), second / 2).is_err());
    assert!(ended.is_some_and(|ended| (58..=62).contains(&ended)), "{ended:?}");
}

/// A hundred bytes would fill the disk with zeros.
#[test]
fn an_outline_of_an_archive_that_is_too_long_for_its_blob_is_not_used() {
    let mut writer = outline::Writer::new(Vec::new(), u64::MAX);
    writer.begin(b"zeros", 0, 17 << 20);
    for _ in 0..(17 << 20) / 65_536 {
        writer.pass(&[0; 65_536]);
    }
    let outline = writer.finish().unwrap();
    assert!(outline.len() < 100);
    let max = |size| limits_of(&Limits::default(), size).layer_bytes_max;
    assert_eq!(archive_bytes(&outline), 17 << 20);
    assert!(archive_bytes(&outline) > max(1 << 10));
    assert!(archive_bytes(&outline) <= max(2 << 20));
    assert_eq!(max(u64::MAX), Limits::default().layer_bytes_max);
    assert_eq!(archive_bytes(b"short"), u64::MAX);
    let failure = Failure::invalid(format!("entry \"hole\": {TOO_LONG}"));
    assert!(matches!(Left::from(Stopped::Failed(failure)), Left::There(_)), "of a sparse file");
}

#[test]
fn a_neighbour_is_blamed_for_what_it_sent_only() {
    let failed = |kind| RequestFailure::from(Failure::new(kind, "x"));
    let busy = RequestFailure { pause: Some(Duration::from_secs(1)), ..failed(FailureKind::Unavailable) };
    let stopped = |kind| Left::from(Stopped::Failed(Failure::new(kind, "x")));
    assert!(matches!(Left::from(failed(FailureKind::Invalid)), Left::Wrong(_)));
    assert!(matches!(Left::from(failed(FailureKind::NotFound)), Left::There(_)), "removed meanwhile");
    assert!(matches!(Left::from(failed(FailureKind::Unavailable)), Left::Failed(_)));
    assert!(matches!(Left::from(busy), Left::There(_)));
    assert!(matches!(stopped(FailureKind::Invalid), Left::Wrong(_)), "the diff ID");
    assert!(matches!(stopped(FailureKind::NoSpace), Left::Here(_)), "what it sent may have filled it");
    assert!(matches!(stopped(FailureKind::Internal), Left::Here(_)));
    assert!(matches!(Left::from(Stopped::Damaged(3)), Left::Wrong(_)));
    assert!(
        matches!(Left::from(cut_of_body(failed(FailureKind::Unavailable))), Left::There(_)),
        "an early end"
    );
    assert!(matches!(Left::from(cut_of_body(failed(FailureKind::Invalid))), Left::Wrong(_)));
    assert!(matches!(Left::from(Cut::Slow), Left::Unpacked(_)));
    let lost = RequestFailure { ends_pull: true, ..failed(FailureKind::Unavailable) };
    assert!(matches!(Left::from(lost), Left::Pull(_)));
}

/// Zeros and files of the node are not copied on for a neighbour that has failed.
#[test]
fn after_a_failure_no_local_chunks_are_copied() {
    // A file of 2^56 zeros.
    let mut outline = outline::MAGIC.to_vec();
    outline.extend([2, 0, 1, b'f', 0, 1]);
    outline.extend([0; 32]);
    outline.extend([0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 1]);
    outline.push(0);
    outline.extend((1_u64 << 56).to_le_bytes());
    let contents = outline::contents(&outline[..]).unwrap();
    let known = Wanted::new(&contents);
    let rebuild =
        Rebuild { contents: &contents, known: &known, donors: &[], layout: &Layout::Outline(&outline) };
    let ((from, _into), (mut archive, made)) = (pipe().unwrap(), pipe().unwrap());
    let has_failed = &AtomicBool::new(false);
    std::thread::scope(|scope| {
        let written = scope.spawn(|| rebuild.write(&|_| false, Fetched::Plain { from, has_failed }, made));
        archive.read_exact(&mut [1; 1000]).unwrap();
        has_failed.store(true, Ordering::Relaxed);
        std::io::copy(&mut archive, &mut std::io::sink()).unwrap();
        assert!(matches!(written.join().unwrap(), Err(Stopped::Closed)));
    });
}

/// A store with a layer that has this content in the file `f`, and the layer as a donor.
fn donor(about: &str, content: &[u8]) -> (PathBuf, Vec<donors::Layer>) {
    let root = std::env::temp_dir().join(format!("coracle-donor-{about}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&root);
    let store = Store::open(&root).unwrap();
    std::fs::create_dir_all(store.layer("layer")).unwrap();
    std::fs::write(store.layer("layer").join("f"), content).unwrap();
    let layer = donors::Layer::open(&store, "layer".to_owned(), true).unwrap();
    (root, vec![layer])
}

/// Only the first bytes of a digest are in an index. Who knows them could let this node log damage that there is not.
#[test]
fn a_digest_with_only_a_matching_prefix_is_blamed_on_the_neighbour() {
    let digest = <[u8; 32]>::from(Sha256::digest(b"content"));
    let mut forged = digest;
    forged[31] ^= 1;
    for (about, in_outline, on_disk, is_wrong) in [
        ("forged", forged, &b"content"[..], true),
        ("damaged", digest, b"damaged", false),
        ("shorter", digest, b"con", false),
    ] {
        let outline =
            [&outline::MAGIC[..], &[2, 0, 1, b'f', 0, 1][..], &in_outline, &[7, 0, 7], &[0; 7]].concat();
        let contents = outline::contents(&outline[..]).unwrap();
        let mut known = Wanted::new(&contents);
        let found = index::Found { path: b"f", offset: 0, size: 7, prefix: index::prefix(&digest) };
        known.hear(0, &found).unwrap();
        let (root, donors) = donor(about, on_disk);
        let layout = Layout::Outline(&outline);
        let rebuild = Rebuild { contents: &contents, known: &known, donors: &donors, layout: &layout };
        let ((from, _into), (_archive, made)) = (pipe().unwrap(), pipe().unwrap());
        let has_failed = &AtomicBool::new(false);
        let stopped = rebuild.write(&|_| false, Fetched::Plain { from, has_failed }, made).unwrap_err();
        match is_wrong {
            true => {
                assert!(matches!(Left::from(stopped), Left::Wrong(why) if why.contains("outline")), "{about}")
            }
            false => assert!(matches!(stopped, Stopped::Damaged(0)), "{about}"),
        }
        std::fs::remove_dir_all(root).unwrap();
    }
}

#[test]
fn a_slow_neighbour_is_still_asked_for_blobs() {
    let peer = Peer::new("192.0.2.1:5000".parse().unwrap());
    assert!(peer.may_send_unpacked());
    assert!(Left::Unpacked("slow".to_owned()).blame(&peer).is_ok());
    assert!(!peer.may_send_unpacked() && !peer.is_refused());
    let wrong = Peer::new("192.0.2.2:5000".parse().unwrap());
    assert!(Left::Wrong("lies".to_owned()).blame(&wrong).is_ok());
    assert!(!wrong.may_send_unpacked() && wrong.is_refused());
}
