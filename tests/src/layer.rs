//! Layers in each compression: [`coracle_node::layer`], and zstd beside it. Its library is in C, and compiling it would be a fifth
//! of what `make demo` builds for its client.

pub use coracle_node::layer::{Compression, Entry, Layer, digest, noise, pax_of};

/// [`Layer::new`] in each compression.
pub fn packed(entries: &[Entry], compression: Compression) -> Layer {
    match compression {
        Compression::Plain | Compression::Gzip => Layer::new(entries, compression),
        Compression::Zstd => {
            let plain = Layer::new(entries, Compression::Plain);
            Layer { blob: pack(&plain.blob, compression), compression, ..plain }
        }
    }
}

/// Compresses bytes.
pub fn pack(bytes: &[u8], compression: Compression) -> Vec<u8> {
    match compression {
        Compression::Plain | Compression::Gzip => coracle_node::layer::pack(bytes, compression),
        Compression::Zstd => zstd::encode_all(bytes, 1).expect("memory takes it"),
    }
}
