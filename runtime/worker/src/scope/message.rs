//! D-Bus messages (D-Bus specification 1.0, "Message Protocol"), as far as asking systemd for a unit needs: little-endian
//! method calls out; replies, errors and signals in. Bytes only; who sends them is `bus`.
//!
//! ```text
//!   | l | kind | flags | 1 | body bytes | serial | fields: a(yv) | padding to 8 | body |
//! ```

/// Longest message we take: systemd announces units in a few hundred bytes each.
pub(super) const MESSAGE_BYTES_MAX: usize = 1 << 20;

/// Bytes before the fields, their length included.
pub(super) const HEAD_BYTES: usize = 16;

/// The byte that begins a little-endian message.
const LITTLE_ENDIAN: u8 = b'l';

const METHOD_CALL: u8 = 1;

/// Header fields by their codes.
const PATH: u8 = 1;
const INTERFACE: u8 = 2;
const MEMBER: u8 = 3;
const ERROR_NAME: u8 = 4;
const REPLY_SERIAL: u8 = 5;
const DESTINATION: u8 = 6;
const SIGNATURE: u8 = 8;

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A call was answered.
    Reply,
    /// A call was refused.
    Error,
    /// Something happened.
    Signal,
    /// A call to us, or what a later version of the protocol has.
    Other,
}

/// A message that came.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Message {
    pub(super) kind: Kind,
    /// Which call it answers.
    pub(super) reply_serial: u32,
    pub(super) member: String,
    pub(super) error: String,
    pub(super) signature: String,
    pub(super) body: Vec<u8>,
}

/// Writes values with their padding.
#[derive(Default)]
pub(super) struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    /// Padding, as every value stands at a multiple of its own size.
    pub(super) fn align(&mut self, to: usize) -> &mut Self {
        self.bytes.resize(self.bytes.len().next_multiple_of(to), 0);
        self
    }

    pub(super) fn byte(&mut self, value: u8) -> &mut Self {
        self.bytes.push(value);
        self
    }

    pub(super) fn u32(&mut self, value: u32) -> &mut Self {
        self.align(4).bytes.extend_from_slice(&value.to_le_bytes());
        self
    }

    pub(super) fn u64(&mut self, value: u64) -> &mut Self {
        self.align(8).bytes.extend_from_slice(&value.to_le_bytes());
        self
    }

    /// A string or an object path.
    pub(super) fn string(&mut self, value: &str) -> &mut Self {
        self.u32(value.len() as u32).bytes.extend_from_slice(value.as_bytes());
        self.byte(0)
    }

    pub(super) fn signature(&mut self, value: &str) -> &mut Self {
        self.byte(value.len() as u8).bytes.extend_from_slice(value.as_bytes());
        self.byte(0)
    }

    /// An array whose elements stand at multiples of `align`; the length does not count the padding before the first.
    pub(super) fn array(&mut self, align: usize, elements: impl FnOnce(&mut Self)) -> &mut Self {
        self.u32(0);
        let at = self.bytes.len() - 4;
        let begin = self.align(align).bytes.len();
        elements(self);
        let length = (self.bytes.len() - begin) as u32;
        self.bytes[at..at + 4].copy_from_slice(&length.to_le_bytes());
        self
    }

    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

/// The address of a method.
pub(super) struct Method<'a> {
    /// Whose; `None` where there is no bus in between.
    pub(super) destination: Option<&'a str>,
    pub(super) path: &'a str,
    pub(super) interface: &'a str,
    pub(super) member: &'a str,
}

/// A method call; `signature` is that of `body`.
pub(super) fn call(serial: u32, method: &Method<'_>, signature: &str, body: &[u8]) -> Vec<u8> {
    let mut out = Writer::default();
    out.byte(LITTLE_ENDIAN).byte(METHOD_CALL).byte(0).byte(1);
    out.u32(body.len() as u32).u32(serial);
    out.array(8, |fields| {
        let mut text = |code, kind: &str, value: &str| {
            fields.align(8).byte(code).signature(kind).string(value);
        };
        text(PATH, "o", method.path);
        text(INTERFACE, "s", method.interface);
        text(MEMBER, "s", method.member);
        if let Some(destination) = method.destination {
            text(DESTINATION, "s", destination);
        }
        if !signature.is_empty() {
            fields.align(8).byte(SIGNATURE).signature("g").signature(signature);
        }
    });
    out.align(8);
    let mut bytes = out.into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

/// How long a message with this head is in all.
///
/// # Errors
/// What is wrong with it.
pub(super) fn length(head: &[u8; HEAD_BYTES]) -> Result<usize, String> {
    if head[0] != LITTLE_ENDIAN || head[3] != 1 {
        return Err("a message of another byte order or version".into());
    }
    let number =
        |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]) as usize;
    let (body, fields) = (number(4), number(12));
    match HEAD_BYTES.saturating_add(fields).next_multiple_of(8).saturating_add(body) {
        length @ ..=MESSAGE_BYTES_MAX => Ok(length),
        length => Err(format!("a message of {length} bytes, at most {MESSAGE_BYTES_MAX}")),
    }
}

/// Reads a whole message.
///
/// # Errors
/// What is wrong with it.
pub(super) fn parse(bytes: &[u8]) -> Result<Message, String> {
    let head: &[u8; HEAD_BYTES] = bytes.first_chunk().ok_or("a message without a head")?;
    if length(head)? != bytes.len() {
        return Err("a message of another length than it says".into());
    }
    let kind = match head[1] {
        2 => Kind::Reply,
        3 => Kind::Error,
        4 => Kind::Signal,
        _ => Kind::Other,
    };
    let mut reader = Reader::new(bytes);
    reader.at = 12;
    let fields_end = HEAD_BYTES + reader.u32()? as usize;
    let empty = String::new;
    let mut message = Message {
        kind,
        reply_serial: 0,
        member: empty(),
        error: empty(),
        signature: empty(),
        body: Vec::new(),
    };
    while reader.at < fields_end {
        reader.align(8);
        let code = reader.byte()?;
        match (code, reader.signature()?.as_str()) {
            (MEMBER, "s") => message.member = reader.string()?,
            (ERROR_NAME, "s") => message.error = reader.string()?,
            (REPLY_SERIAL, "u") => message.reply_serial = reader.u32()?,
            (SIGNATURE, "g") => message.signature = reader.signature()?,
            (_, "s" | "o") => drop(reader.string()?),
            (_, "u") => drop(reader.u32()?),
            (_, "g") => drop(reader.signature()?),
            (_, other) => return Err(format!("a header field of type {other:?}")),
        }
    }
    message.body = bytes.get(fields_end.next_multiple_of(8)..).unwrap_or_default().to_vec();
    Ok(message)
}

/// Reads values with their padding.
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    fn align(&mut self, to: usize) {
        self.at = self.at.next_multiple_of(to);
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], String> {
        let taken = self.at.checked_add(count).and_then(|end| self.bytes.get(self.at..end));
        self.at = self.at.saturating_add(count);
        taken.ok_or_else(|| "a message that ends too early".to_owned())
    }

    fn byte(&mut self) -> Result<u8, String> {
        Ok(self.take(1)?[0])
    }

    pub(super) fn u32(&mut self) -> Result<u32, String> {
        self.align(4);
        let bytes = self.take(4)?;
        Ok(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }

    /// A string or an object path.
    pub(super) fn string(&mut self) -> Result<String, String> {
        let length = self.u32()? as usize;
        self.text(length)
    }

    fn signature(&mut self) -> Result<String, String> {
        let length = self.byte()?.into();
        self.text(length)
    }

    fn text(&mut self, length: usize) -> Result<String, String> {
        let bytes = self.take(length)?;
        self.take(1)?; // the NUL behind it
        String::from_utf8(bytes.to_vec()).map_err(|_| "a text that is no UTF-8".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const METHOD: Method<'_> = Method {
        destination: Some("org.freedesktop.systemd1"),
        path: "/org/freedesktop/systemd1",
        interface: "org.freedesktop.systemd1.Manager",
        member: "StopUnit",
    };

    /// Made by another implementation (jeepney 0.9).
    const CALL: &str = "6c0100016000000007000000a400000001016f00190000002f6f72672f667265656465736b746f702f73797374656d64\
        310000000000000002017300200000006f72672e667265656465736b746f702e73797374656d64312e4d616e61676572\
        0000000000000000030173000800000053746f70556e6974000000000000000006017300180000006f72672e66726565\
        6465736b746f702e73797374656d643100000000000000000801670006736128737629000000000007000000612e7363\
        6f706500500000000800000044656c656761746500016200010000000000000004000000504944730002617500000000\
        04000000070000000900000043505557656967687400017400000000000000006400000000000000";
    const ERROR: &str = "6c0300011d000000030000004f00000004017300230000006f72672e667265656465736b746f702e73797374656d6431\
        2e4e6f53756368556e69740000000000050175000900000007017300040000003a312e30000000000801670001730000\
        18000000556e697420612e73636f7065206e6f74206c6f616465642e00";

    fn bytes(hex: &str) -> Vec<u8> {
        (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
    }

    #[test]
    fn a_call_is_what_others_make_of_it() {
        let mut body = Writer::default();
        body.string("a.scope").array(8, |array| {
            array.align(8).string("Delegate").signature("b").u32(1);
            array.align(8).string("PIDs").signature("au").array(4, |pids| {
                pids.u32(7);
            });
            array.align(8).string("CPUWeight").signature("t").u64(100);
        });
        assert_eq!(call(7, &METHOD, "sa(sv)", &body.into_bytes()), bytes(CALL));
    }

    #[test]
    fn an_error_is_read() {
        let message = parse(&bytes(ERROR)).unwrap();
        assert_eq!((message.kind, message.reply_serial), (Kind::Error, 9));
        assert_eq!(
            (message.error.as_str(), message.signature.as_str()),
            ("org.freedesktop.systemd1.NoSuchUnit", "s")
        );
        assert_eq!(Reader::new(&message.body).string().unwrap(), "Unit a.scope not loaded.");
    }

    /// Whatever comes: an answer or an error, in bounded time and memory.
    #[test]
    fn damaged_messages_are_refused() {
        let whole = bytes(ERROR);
        for cut in 0..whole.len() {
            assert!(parse(&whole[..cut]).is_err(), "cut at {cut}");
        }
        for bit in 0..whole.len() * 8 {
            let mut damaged = whole.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            if let Ok(message) = parse(&damaged) {
                let _ = Reader::new(&message.body).string();
            }
        }
    }

    #[test]
    fn lengths_are_bounded() {
        let mut head = *whole_head();
        head[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(length(&head).is_err());
        head[0] = b'B';
        assert!(length(&head).is_err());
    }

    fn whole_head() -> Box<[u8; HEAD_BYTES]> {
        Box::new(*bytes(ERROR).first_chunk().unwrap())
    }
}
