//! A registry that serves the bytes it was given, right or wrong: a real one checks what is pushed, and takes longer.

use std::collections::BTreeMap;
use std::io::{self, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use coracle_tests::http::{self, Head};
use coracle_tests::layer::digest;

/// Media type and content by path.
type Files = Arc<Mutex<BTreeMap<String, (String, Vec<u8>)>>>;

/// The registry. Its thread ends with the process, its connections with their clients.
pub(crate) struct Server {
    address: SocketAddr,
    files: Files,
}

impl Server {
    /// Starts an empty registry.
    pub(crate) fn start() -> Server {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let address = listener.local_addr().expect("a bound address");
        let files = Files::default();
        let served = files.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let served = served.clone();
                // A client that goes away ends its connection.
                std::thread::spawn(move || serve(stream, &served));
            }
        });
        Server { address, files }
    }

    /// The image name `HOST:PORT/REPOSITORY:TAG`.
    pub(crate) fn name(&self, repository: &str, tag: &str) -> String {
        format!("{}/{repository}:{tag}", self.address)
    }

    /// Adds a blob under its own digest.
    pub(crate) fn add_blob(&self, repository: &str, bytes: &[u8]) {
        self.add_blob_as(repository, &digest(bytes), bytes);
    }

    /// Adds a blob under any digest.
    pub(crate) fn add_blob_as(&self, repository: &str, digest: &str, bytes: &[u8]) {
        let path = format!("/v2/{repository}/blobs/{digest}");
        self.add(path, "application/octet-stream", bytes);
    }

    /// Adds a manifest or an index under its digest and, if it is not empty, a tag.
    pub(crate) fn add_manifest(&self, repository: &str, tag: &str, media_type: &str, bytes: &[u8]) {
        self.add(format!("/v2/{repository}/manifests/{}", digest(bytes)), media_type, bytes);
        if !tag.is_empty() {
            self.add(format!("/v2/{repository}/manifests/{tag}"), media_type, bytes);
        }
    }

    /// Removes everything.
    pub(crate) fn clear(&self) {
        self.files.lock().expect("no thread panics with it").clear();
    }

    fn add(&self, path: String, media_type: &str, bytes: &[u8]) {
        let file = (media_type.to_owned(), bytes.to_vec());
        self.files.lock().expect("no thread panics with it").insert(path, file);
    }
}

fn serve(stream: TcpStream, files: &Files) -> io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    loop {
        let head = match http::read_head(&mut reader) {
            Ok(head) => head,
            // A client that tried TLS first gets the answer of Go's server: this is no TLS.
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                return (&stream).write_all(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n");
            }
            Err(error) => return Err(error),
        };
        if head.first.is_empty() {
            return Ok(());
        }
        answer(&stream, &head, files)?;
    }
}

fn answer(mut stream: &TcpStream, head: &Head, files: &Files) -> io::Result<()> {
    let path = head.second().split('?').next().unwrap_or_default();
    let found = files.lock().expect("no thread panics with it").get(path).cloned();
    let (status, (media_type, bytes)) = match found {
        Some(file) => ("200 OK", file),
        None if path == "/v2/" => ("200 OK", ("application/json".to_owned(), b"{}".to_vec())),
        None => ("404 Not Found", ("application/json".to_owned(), br#"{"errors":[]}"#.to_vec())),
    };
    let mut text = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n", bytes.len());
    if !media_type.is_empty() {
        text.push_str(&format!("Content-Type: {media_type}\r\n"));
    }
    if path.contains("/manifests/") && status.starts_with("200") {
        text.push_str(&format!("Docker-Content-Digest: {}\r\n", digest(&bytes)));
    }
    let mut answer = text.into_bytes();
    answer.extend_from_slice(b"\r\n");
    if !head.first.starts_with("HEAD") {
        answer.extend_from_slice(&bytes);
    }
    stream.write_all(&answer)
}
