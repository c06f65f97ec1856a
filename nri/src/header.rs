//! The header of fixed length in front of each frame of the multiplexer and of each ttrpc message, collected as its bytes
//! arrive.

/// A header of `N` bytes.
pub(crate) struct Header<const N: usize> {
    bytes: [u8; N],
    /// Number of bytes that have arrived.
    filled: usize,
}

impl<const N: usize> Default for Header<N> {
    fn default() -> Self {
        Self { bytes: [0; N], filled: 0 }
    }
}

impl<const N: usize> Header<N> {
    /// Moves missing bytes from the front of `input` into the header. Returns the header if this has completed it.
    pub(crate) fn complete(&mut self, input: &mut &[u8]) -> Option<[u8; N]> {
        let count = input.len().min(N - self.filled);
        let (start, rest) = input.split_at(count);
        self.bytes[self.filled..self.filled + count].copy_from_slice(start);
        self.filled += count;
        *input = rest;
        self.is_complete().then_some(self.bytes)
    }

    /// Whether all bytes have arrived.
    pub(crate) fn is_complete(&self) -> bool {
        self.filled == N
    }

    /// The bytes of a complete header.
    pub(crate) fn bytes(&self) -> [u8; N] {
        self.bytes
    }

    /// Begins with the next header.
    pub(crate) fn clear(&mut self) {
        self.filled = 0;
    }
}
