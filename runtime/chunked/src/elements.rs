//! Reads a JSON object of which one member is a long list of objects: object by object, so that a list of a hundred thousand needs no
//! more memory than one of them.

use std::io::{self, BufRead};

/// Maximum length in bytes of one object of the list, and of all that is around the list.
const TEXT_BYTES_MAX: usize = 256 << 10;
/// Maximum depth of braces and brackets.
const DEPTH_MAX: u32 = 64;

/// Reads the elements of a JSON list one by one.
pub(crate) struct Elements<'a, R> {
    from: R,
    /// Name of the member with the list.
    list: &'a str,
    /// Number of bytes that may still be read.
    left: u64,
    depth: u32,
    is_in_list: bool,
    is_in_string: bool,
    is_escaped: bool,
    /// The text around the list, in which the list is empty.
    around: Vec<u8>,
    element: Vec<u8>,
}

impl<'a, R: BufRead> Elements<'a, R> {
    /// A reader of an object of at most `bytes_max` bytes with the member `list`.
    pub(crate) fn new(from: R, list: &'a str, bytes_max: u64) -> Self {
        let (around, element) = (Vec::new(), Vec::new());
        Self {
            from,
            list,
            left: bytes_max,
            depth: 0,
            is_in_list: false,
            is_in_string: false,
            is_escaped: false,
            around,
            element,
        }
    }

    /// The text of the next object of the list; `None` at the end.
    ///
    /// # Errors
    /// Errors of the input; [`io::ErrorKind::FileTooLarge`] if the input, an object or the text around the list is too long.
    pub(crate) fn next(&mut self) -> io::Result<Option<&[u8]>> {
        self.element.clear();
        loop {
            let buffer = self.from.fill_buf()?;
            let Some(byte) = buffer.first().copied() else { return Ok(None) };
            self.from.consume(1);
            self.left = self.left.checked_sub(1).ok_or_else(too_long)?;
            if self.pass(byte)? {
                return Ok(Some(&self.element));
            }
        }
    }

    /// The text around the list, after the end.
    pub(crate) fn around(&self) -> &[u8] {
        &self.around
    }

    /// Adds a byte; returns whether it ends an object of the list.
    fn pass(&mut self, byte: u8) -> io::Result<bool> {
        /// Depth of the list in the outer object.
        const LIST_DEPTH: u32 = 2;
        let was_in_string = self.is_in_string;
        match byte {
            _ if self.is_escaped => self.is_escaped = false,
            b'\\' if was_in_string => self.is_escaped = true,
            b'"' => self.is_in_string = !was_in_string,
            _ if was_in_string => {}
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' => self.depth = self.depth.saturating_sub(1),
            _ => {}
        }
        if self.is_in_list && self.depth < LIST_DEPTH {
            self.is_in_list = false;
        }
        let is_between = self.depth == LIST_DEPTH && !was_in_string && matches!(byte, b',' | b' ' | b'\n');
        let text = if self.is_in_list { &mut self.element } else { &mut self.around };
        if !(self.is_in_list && is_between) {
            text.push(byte);
        }
        if text.len() > TEXT_BYTES_MAX || self.depth > DEPTH_MAX {
            return Err(too_long());
        }
        if byte == b'[' && self.depth == LIST_DEPTH && !was_in_string && !self.is_in_list {
            let name = self.around.strip_suffix(b"[").map(<[u8]>::trim_ascii_end);
            let name = name.and_then(|text| text.strip_suffix(b":")).map(<[u8]>::trim_ascii_end);
            self.is_in_list =
                name.is_some_and(|text| text.ends_with(format!("\"{}\"", self.list).as_bytes()));
        }
        Ok(self.is_in_list && byte == b'}' && self.depth == LIST_DEPTH && !was_in_string)
    }
}

fn too_long() -> io::Error {
    io::Error::new(io::ErrorKind::FileTooLarge, "it is too long, or has a value that is")
}
