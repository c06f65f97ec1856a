//! A minimal registry: serves the files that the harness put into `/opt/cargo`, over HTTP on the loopback
//! interface. A guest with 128 MB has not enough memory for a real registry, and pushes nothing.

use std::io::{BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;

use coracle_tests::http::read_head;
use coracle_tests::image::MANIFEST;

/// The registry's address: the same at every boot, because it is part of image names.
pub(crate) const ADDRESS: &str = "127.0.0.1:5000";

/// Serves until the process ends.
pub(crate) fn serve() {
    let listener = TcpListener::bind(ADDRESS).expect("the port is free");
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            // A client that disconnects is one whose daemon was killed.
            std::thread::spawn(move || answer(stream));
        }
    });
}

fn answer(mut stream: TcpStream) -> std::io::Result<()> {
    let head = read_head(&mut BufReader::new(stream.try_clone()?))?;
    let path = head.second();
    let (kind, file) = match path.rsplit_once('/') {
        Some((rest, name)) if rest.ends_with("/manifests") => (MANIFEST, format!("manifests/{name}")),
        Some((rest, name)) if rest.ends_with("/blobs") => {
            ("application/octet-stream", format!("blobs/{name}"))
        }
        _ if path == "/v2/" => return stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
        _ => ("", "none".to_owned()),
    };
    let Ok(body) = std::fs::read(PathBuf::from("/opt/cargo").join(file)) else {
        return stream.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n");
    };
    // A pull that was interrupted resumes: `Range: bytes=N-`.
    let range =
        head.get("range").and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok());
    let start: usize = range.filter(|start| *start < body.len()).unwrap_or(0);
    let (whole, rest) = (body.len(), &body[start..]);
    let status = match start {
        0 => "200 OK\r\n".to_owned(),
        _ => format!("206 Partial Content\r\nContent-Range: bytes {start}-{}/{whole}\r\n", whole - 1),
    };
    let lines =
        format!("Content-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", rest.len());
    stream.write_all(format!("HTTP/1.1 {status}{lines}").as_bytes())?;
    if head.first.starts_with("HEAD ") {
        return Ok(());
    }
    stream.write_all(rest)
}
