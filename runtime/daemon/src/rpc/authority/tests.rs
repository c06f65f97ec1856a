//! Tests streams of real clients, divided at every byte, and random streams.

use super::*;

/// Passes `stream` to the rewriter in pieces of the given sizes; returns the bytes that h2 receives.
fn passed(stream: &[u8], mut sizes: impl FnMut() -> usize) -> Vec<u8> {
    let mut rewriter = Rewriter::new();
    let mut passed = Vec::new();
    let mut rest = stream;
    while !rest.is_empty() {
        let (now, later) = rest.split_at(sizes().clamp(1, rest.len()));
        let mut bytes: Vec<u8> = rewriter.held().into_iter().collect();
        let known = bytes.len();
        bytes.extend_from_slice(now);
        let ready = rewriter.rewrite(&mut bytes, known);
        passed.extend_from_slice(&bytes[..ready]);
        rest = later;
    }
    passed.extend(rewriter.held());
    passed
}

fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    [&length[1..], &[kind, flags, 0, 0, 0, 1], payload].concat()
}

/// A connection with one SETTINGS frame and one HEADERS frame.
fn stream(block: &[u8]) -> Vec<u8> {
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    [preface, frame(4, 0, &[]), frame(HEADERS, FLAG_END_HEADERS, block)].concat()
}

fn plain(value: &str) -> Vec<u8> {
    [&[value.len() as u8], value.as_bytes()].concat()
}

/// Huffman codes of the characters in these tests, with their numbers of bits, from RFC 7541, appendix B.
const CODES: [(char, u32, u32); 22] = [
    ('%', 0x15, 6),
    ('-', 0x16, 6),
    ('.', 0x17, 6),
    ('/', 0x18, 6),
    ('1', 0x1, 5),
    ('2', 0x2, 5),
    (':', 0x5c, 7),
    ('F', 0x62, 7),
    ('[', 0x1ffb, 13),
    (']', 0x1ffd, 13),
    ('a', 0x3, 5),
    ('c', 0x4, 5),
    ('k', 0x75, 7),
    ('l', 0x28, 6),
    ('n', 0x2a, 6),
    ('o', 0x7, 5),
    ('r', 0x2c, 6),
    ('s', 0x8, 5),
    ('i', 0x6, 5),
    ('u', 0x2d, 6),
    ('x', 0x79, 7),
    ('z', 0x7b, 7),
];

fn huffman(value: &str) -> Vec<u8> {
    let mut bits = String::new();
    for character in value.chars() {
        let (_, code, length) = CODES.iter().find(|(of, ..)| *of == character).expect("a code in the table");
        bits += &format!("{code:0length$b}", length = *length as usize);
    }
    bits += &"1".repeat(bits.len().next_multiple_of(8) - bits.len());
    let bytes = bits.as_bytes().chunks(8).map(|byte| byte.iter().fold(0, |byte, bit| byte << 1 | (bit & 1)));
    let bytes: Vec<u8> = bytes.collect();
    [&[0x80 | bytes.len() as u8], bytes.as_slice()].concat()
}

const VALUES: [(&str, &str, &str); 8] = [
    ("localhost", "localhost", ""),
    ("/run/cos.sock", "-run-cos.sock", ""),
    ("%2Frun%2Fcos.sock", "-2Frun-2Fcos.sock", ""),
    ("unix:///run/cos.sock", "unix:---run-cos.sock", ""),
    ("a:1", "a:1", ""),
    ("a:1:2/c:s", "a:1-2-c-s", "a:1z2-czs"),
    ("[::1]:22", "[::1]:22", ""),
    ("", "", ""),
];

#[test]
fn values_become_authorities_of_the_same_length_wherever_a_read_ends() {
    for (value, expected, expected_huffman) in VALUES {
        let expected_huffman = if expected_huffman.is_empty() { expected } else { expected_huffman };
        let mut strings = vec![(plain(value), plain(expected))];
        if value.chars().all(|character| CODES.iter().any(|(of, ..)| *of == character)) {
            strings.push((huffman(value), huffman(expected_huffman)));
        }
        // Indexed, not indexed, never indexed, and with the name spelled out, as Go, others and gRPC's C core do.
        let heads = [
            vec![LITERAL_AUTHORITY],
            vec![AUTHORITY],
            vec![0x10 | AUTHORITY],
            [&[0x40], plain(":authority").as_slice()].concat(),
            [&[0x40, 0x88], NAME_HUFFMAN].concat(),
        ];
        for (string, changed) in strings {
            for head in &heads {
                let block = |head: &[u8], string: &[u8]| {
                    // :method POST, a path, and a field after.
                    let path = [&[0x45], plain("/a%b:c:d").as_slice()].concat();
                    [&[0x83], path.as_slice(), head, string, &[0x5f, 1, b'/']].concat()
                };
                let given = stream(&block(head, &string));
                let is_renamed = value.is_empty() && head.as_slice() == [LITERAL_AUTHORITY];
                let head_after = if is_renamed { &[LITERAL_USER_AGENT] } else { head.as_slice() };
                let wanted = stream(&block(head_after, &changed));
                for cut in 1..given.len() {
                    let mut sizes = [cut, usize::MAX].into_iter();
                    let got = passed(&given, || sizes.next().unwrap_or(usize::MAX));
                    assert_eq!(got, wanted, "{value:?} as {string:x?} after {head:x?}, cut at {cut}");
                }
                assert_eq!(passed(&given, || 1), wanted, "{value:?}, byte by byte");
            }
        }
    }
}

#[test]
fn an_empty_authority_of_the_static_table_becomes_a_user_agent() {
    let block = |field| [0x83, 0x87, field, 0x40, 1, 0x81, 1, 0x81];
    let (given, wanted) = (stream(&block(INDEXED_AUTHORITY)), stream(&block(INDEXED_USER_AGENT)));
    assert_eq!(passed(&given, || usize::MAX), wanted, "neither in names nor in values");
    assert_eq!(passed(&given, || 1), wanted);
}

#[test]
fn blocks_in_several_frames_with_padding_and_priority_are_followed() {
    let block = [&[0x83, LITERAL_AUTHORITY], plain("/run/a").as_slice(), &[0x84]].concat();
    let changed = [&[0x83, LITERAL_AUTHORITY], plain("-run-a").as_slice(), &[0x84]].concat();
    for cut in 0..=block.len() {
        let frames = |block: &[u8]| {
            let (first, second) = block.split_at(cut);
            // Padding and priority look like fields on purpose.
            let padded = [&[4, 0, 0, 0, 1, 0x41], first, &[0x41, 1, b'/', 0]].concat();
            [
                stream(&[0x82]),
                frame(HEADERS, FLAG_PADDED | FLAG_PRIORITY, &padded),
                frame(CONTINUATION, 0, &[]),
                frame(CONTINUATION, FLAG_END_HEADERS, second),
                frame(0, 0, &[0x41, 1, b'/']),
                frame(HEADERS, FLAG_END_HEADERS, block),
            ]
            .concat()
        };
        assert_eq!(passed(&frames(&block), || usize::MAX), frames(&changed), "cut at {cut}");
    }
}

#[test]
fn numbers_of_several_bytes_and_long_values_are_followed() {
    let long = |character: &str| format!("a{}", character.repeat(300));
    let block = |value: &str| {
        // A size of the table, an indexed field, a name by a large index with a long value, and the authority.
        let other =
            [&[0x3f, 0xe1, 0x1f, 0xff, 0x00, 0x7f, 0x05, 0x7f, 0x80, 0x01], &[b'/'; 255][..]].concat();
        [other.as_slice(), &[LITERAL_AUTHORITY, 0x7f, 0xae, 0x01], value.as_bytes()].concat()
    };
    for size in [1, 2, 7, 100, usize::MAX] {
        assert_eq!(passed(&stream(&block(&long("/"))), || size), stream(&block(&long("-"))), "by {size}");
    }
}

#[test]
fn after_a_number_without_end_nothing_is_changed() {
    let block =
        [&[0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01, LITERAL_AUTHORITY], plain("/a").as_slice()].concat();
    let given = [stream(&block), frame(HEADERS, FLAG_END_HEADERS, &block[7..])].concat();
    assert_eq!(passed(&given, || 3), given);
}

#[test]
fn random_streams_keep_their_length_and_do_not_depend_on_where_reads_end() {
    // xorshift64*: the same numbers in each run.
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move |below: u64| {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % below
    };
    // Bytes that begin fields, strings and frames more often than others.
    let likely = [0x41, 0x01, 0x40, 0x00, 0x80, 0x81, 0x88, 0x0a, 0xff, 0x7f, b'/', b'%', b':', b'['];
    for _ in 0..3000 {
        let mut given = stream(&[]);
        for _ in 0..random(5) {
            let payload: Vec<u8> = (0..random(60))
                .map(|_| match random(2) {
                    0 => likely[random(likely.len() as u64) as usize],
                    _ => random(256) as u8,
                })
                .collect();
            let kind = [HEADERS, CONTINUATION, 0][random(3) as usize];
            given.extend(frame(kind, random(256) as u8, &payload));
        }
        given.extend((0..random(20)).map(|_| random(256) as u8));
        let whole = passed(&given, || usize::MAX);
        assert_eq!(whole.len(), given.len());
        assert_eq!(passed(&given, || 1 + random(20) as usize), whole, "{given:x?}");
        assert_eq!(passed(&given, || 1), whole, "{given:x?}");
        assert_eq!(passed(&whole, || usize::MAX), whole, "a second time: {given:x?}");
    }
}

#[test]
fn every_huffman_code_has_its_length() {
    // The first and last codes of each length, from RFC 7541, appendix B.
    let ends = [
        (5, 0x0, 0x9),
        (6, 0x14, 0x2d),
        (7, 0x5c, 0x7b),
        (8, 0xf8, 0xfd),
        (10, 0x3f8, 0x3fc),
        (11, 0x7fa, 0x7fc),
        (12, 0xffa, 0xffb),
        (13, 0x1ff8, 0x1ffd),
        (14, 0x3ffc, 0x3ffd),
        (15, 0x7ffc, 0x7ffe),
        (19, 0x7fff0, 0x7fff2),
        (20, 0xfffe6, 0xfffed),
        (21, 0x1f_ffdc, 0x1f_ffe8),
        (22, 0x3f_ffd2, 0x3f_ffeb),
        (23, 0x7f_ffd8, 0x7f_fff4),
        (24, 0xff_ffea, 0xff_fff5),
        (25, 0x1ff_ffec, 0x1ff_ffef),
        (26, 0x3ff_ffe0, 0x3ff_ffee),
        (27, 0x7ff_ffde, 0x7ff_fff0),
        (28, 0xfff_ffe2, 0xfff_fffe),
        (30, 0x3fff_fffc, 0x3fff_ffff),
    ];
    for (bits, first, last) in ends {
        for expected in first..=last {
            let mut code = Code::default();
            let mut found = None;
            for below in (0..bits).rev() {
                assert_eq!(found, None, "{expected:x} of {bits} bits ends early");
                found = code.push((expected >> below & 1) as u8);
            }
            assert_eq!(found, Some((expected, bits)));
        }
    }
}
