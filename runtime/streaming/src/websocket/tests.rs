//! Tests WebSocket sessions in memory. The client's frames are literals, so that they do not depend on the
//! tested encoder.

use super::super::event::{Broken, Event};
use super::*;
use crate::damage::{corpus, damaged};

const V4: Form = Form::Binary { has_close_signal: false };
const V5: Form = Form::Binary { has_close_signal: true };

/// Encodes a client's frame, which must be masked.
fn frame(head: u8, payload: &[u8]) -> Vec<u8> {
    let mask = [1, 2, 3, 4];
    let length = payload.len();
    let mut frame = vec![head];
    match length {
        0..=125 => frame.push(0x80 | length as u8),
        126..=0xffff => {
            frame.push(0x80 | 126);
            frame.extend((length as u16).to_be_bytes());
        }
        _ => {
            frame.push(0x80 | 127);
            frame.extend((length as u64).to_be_bytes());
        }
    }
    frame.extend(mask);
    frame.extend(payload.iter().enumerate().map(|(index, byte)| byte ^ mask[index % 4]));
    frame
}

const TEXT: u8 = 0x81;
const BINARY: u8 = 0x82;
const BINARY_BEGINS: u8 = 0x02;
const CONTINUES: u8 = 0x80;
const CLOSE: u8 = 0x88;
const PING: u8 = 0x89;

fn events(session: &mut Session, input: &[u8]) -> Vec<String> {
    let mut seen = Vec::new();
    let mut rest = input;
    loop {
        match session.next(&mut rest) {
            Ok(None) => return seen,
            Ok(Some(Event::Data { stream, bytes })) => {
                seen.push(format!("{stream} {}", String::from_utf8_lossy(bytes)));
            }
            Ok(Some(Event::Closed)) => {
                seen.push("closed".into());
                return seen;
            }
            Ok(Some(other)) => seen.push(format!("{other:?}")),
            Err(Broken(why)) => {
                seen.push(why.into());
                return seen;
            }
        }
    }
}

fn exchange() -> Vec<u8> {
    [
        frame(BINARY, b"\0hello"),
        frame(BINARY_BEGINS, b"\0in "),
        frame(PING, b"are you there"),
        frame(CONTINUES, b"pieces"),
        frame(BINARY, b""),
        frame(BINARY, b"\x04{}"),
        frame(BINARY, b"\xff\0"),
        frame(CLOSE, &[0x03, 0xe8]),
    ]
    .concat()
}

#[test]
fn events_do_not_depend_on_how_the_input_is_split() {
    let input = exchange();
    let expected = ["0 hello", "0 in pieces", "4 {}", "Ended { stream: 0 }", "closed"];
    let mut session = Session::new(V5);
    assert_eq!(events(&mut session, &input), expected);
    assert!(session.output().starts_with(b"\x8a\x0dare you there"), "{:?}", session.output());
    for cut in 0..input.len() {
        let mut session = Session::new(V5);
        let mut seen = events(&mut session, &input[..cut]);
        seen.extend(events(&mut session, &input[cut..]));
        assert_eq!(seen, expected, "cut at {cut}");
    }
    assert_eq!(events(&mut Session::new(V4), &input)[3], "255 \0", "v4 has no such signal");
}

#[test]
fn both_websocket_forms_are_decoded_and_encoded() {
    let mut session = Session::new(Form::Base64);
    assert_eq!(events(&mut session, &frame(TEXT, b"0aGVsbG8=")), ["0 hello"]);
    session.send(1, b"hello");
    assert_eq!(*session.output(), b"\x81\x091aGVsbG8=");
    let mut session = Session::new(Form::Raw);
    assert_eq!(events(&mut session, &frame(BINARY, b"\x80\x03")), ["0 \u{fffd}\u{3}"]);
    for (form, input) in [
        (Form::Base64, frame(TEXT, b"0!!")),
        (Form::Base64, frame(TEXT, b"xaGVsbG8=")),
        (Form::Base64, frame(BINARY, b"\0x")),
        (V4, frame(TEXT, b"0aGVsbG8=")),
        (V4, b"\x82\x01x".to_vec()),
        (V4, frame(0xf2, b"x")),
        (V4, [&[BINARY, 0xff][..], &u64::MAX.to_be_bytes(), &[0; 4]].concat()),
    ] {
        assert_eq!(events(&mut Session::new(form), &input).len(), 1, "{form:?}: {input:?}");
    }
}

#[test]
fn long_output_is_split_into_messages_of_the_size_of_client_buffers() {
    let mut session = Session::new(V4);
    session.send(2, &vec![b'x'; 2 * MESSAGE_BYTES_MAX]);
    session.send(1, b"");
    let mut rest = &session.output()[..];
    let mut lengths = Vec::new();
    while let [BINARY, code, more @ ..] = rest {
        let (length, more) = match code {
            126 => (usize::from(u16::from_be_bytes([more[0], more[1]])), &more[2..]),
            _ => (usize::from(*code), more),
        };
        lengths.push((more[0], length));
        rest = &more[length..];
    }
    assert_eq!(lengths, [(2, MESSAGE_BYTES_MAX), (2, MESSAGE_BYTES_MAX), (2, 3), (1, 1)]);
    assert!(rest.is_empty());
}

#[test]
fn floods_and_oversized_messages_end_the_connection() {
    let pings = frame(PING, &[b'x'; 100]).repeat(4000);
    assert_eq!(events(&mut Session::new(V4), &pings), ["it does not read the replies to its messages"]);
    let mut pieces = frame(BINARY_BEGINS, &[0; 1 << 16]);
    for _ in 0..20 {
        pieces.extend(frame(0, &[0; 1 << 16]));
    }
    assert_eq!(events(&mut Session::new(V4), &pieces), ["a message above the maximum length"]);
}

#[test]
fn damaged_input_causes_no_panic() {
    damaged(&exchange(), 11, |round, first, second| {
        let mut session = Session::new([V4, V5, Form::Base64, Form::Raw][round % 4]);
        events(&mut session, first);
        events(&mut session, second);
    });
}

/// Runs the seeds and findings of the fuzz target.
#[test]
fn the_corpus_of_the_fuzz_target_causes_no_panic() {
    let inputs = corpus("websocket");
    assert!(inputs.len() >= 4);
    for input in inputs {
        let [form, cut, input @ ..] = &input[..] else { panic!("two bytes come first") };
        let mut session = Session::new([V4, V5, Form::Base64, Form::Raw][usize::from(*form) % 4]);
        for part in input.chunks(usize::from(*cut).max(1)) {
            events(&mut session, part);
        }
    }
}
