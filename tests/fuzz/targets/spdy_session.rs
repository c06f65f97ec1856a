//! Untrusted client data, split anywhere: no panic, and bounded memory.
#![no_main]
#![allow(dead_code)]

mod stream;

use libfuzzer_sys::fuzz_target;
use stream::event::Event;
use stream::spdy::Session;

/// Maximum size in bytes of pending replies to a peer that reads nothing: the session's limit and one frame.
const OUTPUT_BYTES_MAX: usize = (64 << 10) + (32 << 10) + 64;

fuzz_target!(|bytes: &[u8]| {
    let Some((cut, bytes)) = bytes.split_first() else { return };
    let mut session = Session::new();
    for part in bytes.chunks(usize::from(*cut).max(1)) {
        let mut rest = part;
        loop {
            match session.next(&mut rest) {
                Ok(Some(Event::Opened { stream, .. })) if stream % 4 == 1 => session.reply(stream),
                Ok(Some(Event::Opened { stream, .. })) => session.refuse(stream),
                Ok(Some(Event::Data { stream, bytes })) => {
                    assert!(bytes.len() <= part.len());
                    if stream % 8 == 1 {
                        session.finish(stream);
                    }
                }
                Ok(Some(Event::Closed)) => session.close(),
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(_) => return,
            }
            assert!(session.output().len() <= OUTPUT_BYTES_MAX + 12 * 1024);
        }
        assert!(rest.is_empty());
    }
});
