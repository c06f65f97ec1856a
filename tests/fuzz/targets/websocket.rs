//! WebSocket messages of each form, split anywhere.
#![no_main]
#![allow(dead_code)]

mod stream;

use libfuzzer_sys::fuzz_target;
use stream::event::Event;
use stream::websocket::{Form, Session};

const FORMS: [Form; 4] = [
    Form::Binary { has_close_signal: false },
    Form::Binary { has_close_signal: true },
    Form::Base64,
    Form::Raw,
];

fuzz_target!(|bytes: &[u8]| {
    let [form, cut, bytes @ ..] = bytes else { return };
    let mut session = Session::new(FORMS[usize::from(*form) % 4]);
    for part in bytes.chunks(usize::from(*cut).max(1)) {
        let mut rest = part;
        let mut channel = None;
        loop {
            match session.next(&mut rest) {
                Ok(Some(Event::Data { stream, bytes })) => {
                    assert!(bytes.len() <= 1 << 20);
                    channel = Some(stream);
                }
                Ok(Some(Event::Closed)) | Err(_) => return,
                Ok(Some(_)) => {}
                Ok(None) => break,
            }
            if let Some(channel) = channel.take() {
                session.send(channel % 10, b"answer");
                session.output().clear();
            }
        }
        assert!(rest.is_empty());
    }
});
