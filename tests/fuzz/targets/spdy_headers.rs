//! SPDY header blocks: untrusted compressed bytes, one after the other with a common window.
#![no_main]
#![allow(dead_code)]

mod stream;

use libfuzzer_sys::fuzz_target;
use stream::event::Event;
use stream::spdy::Session;

/// zlib header with the dictionary of SPDY/3, so that the fuzz engine need not find it.
const HEAD: [u8; 6] = [0x78, 0x20, 0xe3, 0xc6, 0xa7, 0xc2];

fuzz_target!(|bytes: &[u8]| {
    let mut session = Session::new();
    let mut stream = 1_u32;
    // Each block is preceded by a byte with its length.
    let mut rest = bytes;
    while let Some((length, more)) = rest.split_first() {
        let (block, more) = more.split_at(usize::from(*length).min(more.len()));
        rest = more;
        let head: &[u8] = if stream == 1 { &HEAD } else { &[] };
        let length = (10 + head.len() + block.len()) as u32;
        let frame = [
            &[0x80, 3, 0, 1, 0][..],
            &length.to_be_bytes()[1..],
            &stream.to_be_bytes(),
            &[0; 6],
            head,
            block,
        ]
        .concat();
        stream += 2;
        let mut input = &frame[..];
        loop {
            match session.next(&mut input) {
                Ok(Some(Event::Opened { headers, .. })) => {
                    assert!(headers.iter().all(|(name, _)| !name.is_empty()));
                    assert!(headers.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>() <= 64 << 10);
                }
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(_) => return,
            }
        }
    }
});
