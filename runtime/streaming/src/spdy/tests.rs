//! Tests SPDY sessions in memory. The client's frames are literals, so that they do not depend on the tested
//! encoder.

use super::super::event::{Broken, Event};
use super::*;
use crate::damage::{corpus, damaged};

/// Three header blocks of one stream, compressed by zlib 1.2 at level 9: `streamtype: error`, `stdin`,
/// `stdout`, each with `accept-charset: utf-8`, which is in the dictionary.
const BLOCKS: [&str; 3] = [
    "78f9e3c6a7c202e50e703a2b294a4dcc851625aca9a080c65ad4b2824d05000000ffff",
    "c2aeabb8049893f0e802000000ffff",
    "c2aa0b983b52f24b4bf06803000000ffff",
];

fn bytes(hex: &str) -> Vec<u8> {
    let digit = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
    (0..hex.len()).step_by(2).map(digit).collect()
}

fn control(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    [&[0x80, 3, 0, kind, flags], &length[1..], payload].concat()
}

fn syn_stream(stream: u32, flags: u8, block: &[u8]) -> Vec<u8> {
    control(1, flags, &[&stream.to_be_bytes()[..], &[0; 6], block].concat())
}

fn data(stream: u32, flags: u8, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    [&stream.to_be_bytes()[..], &[flags], &length[1..], payload].concat()
}

/// All events of `input` as text; the last one may be an error.
fn events(session: &mut Session, input: &[u8]) -> Vec<String> {
    let mut seen = Vec::new();
    let mut rest = input;
    loop {
        match session.next(&mut rest) {
            Ok(None) => return seen,
            Ok(Some(Event::Opened { stream, headers })) => {
                session.reply(stream);
                seen.push(format!("{stream} opened {}", headers[0].1));
            }
            Ok(Some(Event::Data { stream, bytes })) => match seen.last_mut() {
                // Data may arrive in several events, depending on how the input is split.
                Some(last) if last.starts_with(&format!("{stream} data ")) => {
                    last.push_str(&String::from_utf8_lossy(bytes));
                }
                _ => seen.push(format!("{stream} data {}", String::from_utf8_lossy(bytes))),
            },
            Ok(Some(Event::Ended { stream })) => seen.push(format!("{stream} ended")),
            Ok(Some(Event::Reset { stream })) => seen.push(format!("{stream} reset")),
            Ok(Some(Event::Closed)) => seen.push("closed".into()),
            Err(Broken(why)) => {
                seen.push(why.into());
                return seen;
            }
        }
    }
}

/// The frames of a complete exec session with input.
fn exchange() -> Vec<u8> {
    let blocks = BLOCKS.map(bytes);
    [
        syn_stream(1, 0, &blocks[0]),
        syn_stream(3, 0, &blocks[1]),
        control(6, 0, &[0, 0, 0, 1]),
        syn_stream(5, 1, &blocks[2]),
        control(4, 0, &[0, 0, 0, 1, 0, 0, 0, 7, 0, 1, 0, 0]),
        control(9, 0, &[0, 0, 0, 3, 0, 0, 0, 9]),
        control(77, 0, b"what we do not know"),
        data(3, 0, b"hello "),
        data(3, 0, b""),
        data(3, 0, b"world"),
        data(3, 1, b"!"),
        data(3, 0, b"too late"),
        data(99, 1, b"nobody's"),
        control(3, 0, &[0, 0, 0, 1, 0, 0, 0, 5]),
        control(7, 0, &[0; 8]),
    ]
    .concat()
}

const EXCHANGE: [&str; 8] = [
    "1 opened error",
    "3 opened stdin",
    "5 opened stdout",
    "5 ended",
    "3 data hello world!",
    "3 ended",
    "1 reset",
    "closed",
];

#[test]
fn events_do_not_depend_on_how_the_input_is_split() {
    let input = exchange();
    let whole = events(&mut Session::new(), &input);
    assert_eq!(whole, EXCHANGE);
    for cut in 0..input.len() {
        let mut session = Session::new();
        let mut seen = events(&mut session, &input[..cut]);
        for event in events(&mut session, &input[cut..]) {
            match (seen.last_mut(), event.strip_prefix("3 data ")) {
                (Some(last), Some(more)) if last.starts_with("3 data ") => last.push_str(more),
                _ => seen.push(event),
            }
        }
        assert_eq!(seen, whole, "cut at {cut}");
    }
}

#[test]
fn sent_frames_have_the_format_that_clients_expect() {
    let mut session = Session::new();
    let blocks = BLOCKS.map(bytes);
    events(&mut session, &[syn_stream(1, 0, &blocks[0]), syn_stream(3, 0, &blocks[1])].concat());
    session.send(1, b"out");
    session.send(1, &[b'x'; DATA_BYTES_MAX + 1]);
    session.finish(1);
    session.send(1, b"after the end");
    session.reset(3);
    session.send(3, b"after the reset");
    session.close();
    let first = [&1_u32.to_be_bytes()[..], headers::empty_block(true)].concat();
    let second = [&3_u32.to_be_bytes()[..], headers::empty_block(false)].concat();
    let expected = [
        control(2, 0, &first),
        control(2, 0, &second),
        data(1, 0, b"out"),
        data(1, 0, &[b'x'; DATA_BYTES_MAX]),
        data(1, 0, b"x"),
        data(1, 1, b""),
        control(3, 0, &[0, 0, 0, 3, 0, 0, 0, 5]),
        control(3, 0, &[0, 0, 0, 1, 0, 0, 0, 5]),
        control(7, 0, &[0, 0, 0, 3, 0, 0, 0, 0]),
    ];
    assert_eq!(*session.output(), expected.concat());
}

#[test]
fn streams_are_removed_when_both_halves_have_ended() {
    let mut session = Session::new();
    let blocks = BLOCKS.map(bytes);
    events(&mut session, &syn_stream(1, 1, &blocks[0]));
    assert_eq!(session.streams(), 1);
    session.finish(1);
    assert_eq!(session.streams(), 0);
    events(&mut session, &syn_stream(3, 0, &blocks[1]));
    session.finish(3);
    events(&mut session, &data(3, 1, b""));
    assert_eq!(session.streams(), 0);
}

#[test]
fn stream_ids_must_be_odd_and_increasing() {
    for (streams, refused) in [([2, 3, 5], 2), ([0, 3, 5], 0), ([5, 5, 7], 5), ([5, 3, 7], 3)] {
        let mut session = Session::new();
        let frames = streams.iter().zip(BLOCKS).map(|(stream, block)| syn_stream(*stream, 0, &bytes(block)));
        let seen = events(&mut session, &frames.collect::<Vec<_>>().concat());
        assert_eq!(seen.len(), 2, "{streams:?}: {seen:?}");
        let refusal = control(3, 0, &[&(refused as u32).to_be_bytes()[..], &[0, 0, 0, 1]].concat());
        let output = session.output().clone();
        assert!(output.windows(refusal.len()).any(|window| window == refusal), "{streams:?}");
    }
}

#[test]
fn protocol_violations_end_the_connection() {
    let block = bytes(BLOCKS[0]);
    let other_dictionary = [&[0x78, 0xf9, 1, 2, 3, 4], &block[6..]].concat();
    for (input, why) in [
        (control(1, 0, &[0; 9]), "wrong length"),
        (control(3, 0, &[0; 7]), "wrong length"),
        (control(4, 0, &[0xff; 4]), "wrong length"),
        (control(6, 0, &[0; 4]), "PING without an ID"),
        (control(6, 1, &[0, 0, 0, 1]), "PING without an ID"),
        (control(2, 0, &[0; 9]), "SYN_REPLY"),
        (vec![0x80, 2, 0, 1, 0, 0, 0, 0], "version other than 3"),
        (vec![0x80, 3, 0, 1, 0, 0xff, 0xff, 0xff], "above the maximum length"),
        (syn_stream(1, 0, &other_dictionary), "dictionary"),
        (syn_stream(1, 0, &[&block[..6], &[0, 4, 0, 0, 0]].concat()), "cannot be decompressed"),
    ] {
        let seen = events(&mut Session::new(), &input);
        assert!(seen.last().is_some_and(|last| last.contains(why)), "{why}: {seen:?}");
    }
}

/// One block with 60 kB of zeros in 60 bytes is accepted as malformed headers; a block with a thousand times
/// this size is too large.
#[test]
fn a_decompression_bomb_ends_the_connection() {
    // A stored block has a length field: twice 64 KiB is above the limit of one header block.
    let stored = |bytes: &[u8]| {
        let length = bytes.len() as u16;
        [&[0][..], &length.to_le_bytes(), &(!length).to_le_bytes(), bytes].concat()
    };
    let head = bytes(&BLOCKS[0][..12]);
    let mut session = Session::new();
    assert!(
        events(&mut session, &syn_stream(1, 0, &[&head[..], &stored(&[0xff; 60_000])].concat())).is_empty()
    );
    // Runs of 258 bytes in a few bits each, as deflate encodes zeros.
    let mut bomb = Vec::new();
    let mut packer = flate2::Compress::new(flate2::Compression::best(), false);
    bomb.resize(4096, 0);
    packer.compress(&vec![0; 1 << 20], &mut bomb, flate2::FlushCompress::Sync).unwrap();
    bomb.truncate(packer.total_out() as usize);
    let seen = events(&mut Session::new(), &syn_stream(1, 0, &[&head[..], &bomb].concat()));
    assert_eq!(seen, ["a header block above the maximum decompressed size"]);
}

#[test]
fn floods_end_the_connection() {
    let mut session = Session::new();
    let head = bytes(&BLOCKS[0][..12]);
    // A stored block without headers; the server decides whether it refuses such a stream.
    let block = [0, 4, 0, 0xfb, 0xff, 0, 0, 0, 0];
    let mut why = String::new();
    'flood: for number in 0..10_000_u32 {
        let block = if number == 0 { [&head[..], &block].concat() } else { block.to_vec() };
        let frame = syn_stream(2 * number + 1, 0, &block);
        let mut rest = &frame[..];
        loop {
            match session.next(&mut rest) {
                Ok(None) => break,
                Ok(Some(_)) => {}
                Err(broken) => {
                    why = broken.to_string();
                    break 'flood;
                }
            }
        }
    }
    assert_eq!(why, "it opens too many streams");
    let mut session = Session::new();
    let pings = control(6, 0, &[0, 0, 0, 1]).repeat(30_000);
    assert_eq!(events(&mut session, &pings), ["it does not read the replies to its frames"]);
}

/// Any input, however it is split, results in an event, an error or no event, but never in a panic or
/// unbounded memory.
#[test]
fn damaged_input_causes_no_panic() {
    damaged(&exchange(), 7, |_, first, second| {
        let mut session = Session::new();
        events(&mut session, first);
        events(&mut session, second);
        assert!(session.output().len() < 4096);
    });
}

/// Runs the seeds and findings of the fuzz targets.
#[test]
fn the_corpora_of_the_fuzz_targets_cause_no_panic() {
    let inputs = corpus("spdy_session");
    assert!(inputs.len() >= 2);
    for input in inputs {
        let (cut, input) = input.split_first().expect("the first byte says how to cut");
        let mut session = Session::new();
        for part in input.chunks(usize::from(*cut).max(1)) {
            events(&mut session, part);
        }
    }
}
