//! Tests the client and a fetcher in one process: a real fetcher with a small registry, and compromised
//! fetchers.

use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, Ordering};

use coracle_job::{Credentials, Registries};

use super::*;
use crate::process::{receive, serve};
use crate::protocol::Begin;

/// Timeouts that are short enough for a test.
const TIMEOUTS: Timeouts = Timeouts {
    connect_ms: 10,
    tls_ms: 10,
    first_byte_ms: 10,
    rate_bytes_min: 0,
    rate_window_ms: 100,
    connections: 2,
};

fn endpoints(registry: &str) -> Vec<Endpoint> {
    let none = Registries::default();
    coracle_registries::endpoints(&none, Path::new("/nowhere"), registry, "x", &Credentials::None)
}

/// A client with `peer` as its fetcher.
fn with(timeouts: Timeouts, peer: impl FnOnce(UnixStream) + Send + 'static) -> Arc<Fetcher> {
    let (ours, theirs) = UnixStream::pair().unwrap();
    std::thread::spawn(move || peer(theirs));
    Arc::new(Fetcher::over(ours, None, timeouts).unwrap())
}

/// A fetcher that works correctly until the first request, which `answer` handles.
fn that_answers(answer: impl Fn(File, &mut UnixStream) + Send + 'static) -> Arc<Fetcher> {
    with(TIMEOUTS, move |mut control| {
        write_message(&mut control, &Ready::Ok(())).unwrap();
        while let Ok(Some((order, pipe))) = receive(&mut control) {
            if let (Order::Get(_), Some(pipe)) = (order, pipe) {
                answer(File::from(pipe), &mut control);
            }
        }
    })
}

fn read_all(fetcher: &Arc<Fetcher>, offset: u64) -> Result<(Head, Vec<u8>), RequestFailure> {
    let (head, mut body) =
        fetcher.get(Get { what: "blobs/b".into(), accept: "*/*".into(), offset, ..Get::default() })?;
    let (mut bytes, mut buffer) = (Vec::new(), [0; 1000]);
    loop {
        match body.read(&mut buffer, "blob b")? {
            0 => return Ok((head, bytes)),
            count => bytes.extend_from_slice(&buffer[..count]),
        }
    }
}

/// Starts a registry that answers each connection with the next of these responses and closes it; returns its
/// address.
fn registry(answers: &'static [&'static str]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for (stream, answer) in listener.incoming().zip(answers) {
            let mut stream = stream.unwrap();
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte).unwrap();
                head.push(byte[0]);
            }
            stream.write_all(answer.as_bytes()).unwrap();
        }
    });
    address.to_string()
}

#[test]
fn answers_and_bodies_are_passed_on_unchanged() {
    let name = registry(&[
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello",
        "HTTP/1.1 206 Partial\r\nContent-Range: bytes 2-4/5\r\nContent-Length: 3\r\nConnection: close\r\n\r\nllo",
        "HTTP/1.1 206 Partial\r\nContent-Range: bytes 0-4/5\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello",
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhel",
        "HTTP/1.1 429 Slow\r\nRetry-After: 7\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
        "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
    ]);
    let timeouts = Timeouts::default();
    let fetcher = with(timeouts, |mut control| {
        write_message(&mut control, &Ready::Ok(())).unwrap();
        serve(control, Vec::new()).unwrap();
    });
    fetcher.set_up(&endpoints(&name), &name).unwrap();
    let head = |begin, length| Head { begin, length: Some(length), ..Head::default() };
    assert_eq!(read_all(&fetcher, 0).unwrap(), (head(Begin::First, 5), b"hello".to_vec()));
    assert_eq!(read_all(&fetcher, 2).unwrap(), (head(Begin::AsAsked, 3), b"llo".to_vec()));
    assert_eq!(read_all(&fetcher, 2).unwrap(), (head(Begin::Elsewhere, 5), b"hello".to_vec()));
    let cut = read_all(&fetcher, 0).unwrap_err();
    assert_eq!((cut.failure.kind, cut.pause), (FailureKind::Unavailable, Some(Duration::ZERO)));
    assert!(cut.failure.message.starts_with("blob b: "), "{cut:?}");
    let busy = read_all(&fetcher, 0).unwrap_err();
    assert_eq!((busy.failure.kind, busy.pause), (FailureKind::RateLimited, Some(Duration::from_secs(7))));
    let absent = read_all(&fetcher, 0).unwrap_err();
    assert_eq!((absent.failure.kind, absent.pause, absent.ends_pull), (FailureKind::NotFound, None, false));
    assert!(absent.failure.message.contains("blobs/b: not found (HTTP 404)"), "{absent:?}");
}

/// The worker does nothing before the fetcher reports that it is confined.
#[test]
fn an_incomplete_confinement_ends_the_pull_with_its_error() {
    let why = Failure::new(FailureKind::Internal, "jail: unshare: no");
    let fetcher = with(TIMEOUTS, {
        let why = why.clone();
        move |mut control| write_message(&mut control, &Ready::Err(why)).unwrap()
    });
    assert_eq!(fetcher.set_up(&endpoints("x.invalid"), "x.invalid"), Err(why));
    // It ends as soon as it is confined.
    let fetcher = with(TIMEOUTS, |mut control| write_message(&mut control, &Ready::Ok(())).unwrap());
    std::thread::sleep(Duration::from_millis(200));
    let lost = fetcher.set_up(&endpoints("x.invalid"), "x.invalid").unwrap_err();
    assert!(
        lost.kind == FailureKind::Unavailable && lost.message.contains("closed its connection"),
        "{lost:?}"
    );
    let fetcher = with(TIMEOUTS, drop);
    let lost = fetcher.set_up(&endpoints("x.invalid"), "x.invalid").unwrap_err();
    assert_eq!(lost.kind, FailureKind::Unavailable);
}

/// The beginning of an answer with a body.
fn body() -> Vec<u8> {
    let mut bytes = Vec::new();
    write_message(&mut bytes, &Answer::Body(Head::default())).unwrap();
    bytes
}

/// A server may send for ever what decodes to nothing: other requests are not affected.
#[test]
fn a_silent_body_ends_its_request_only() {
    let held = Mutex::new(Vec::new());
    let is_alive = Arc::new(AtomicBool::new(true));
    let alive = is_alive.clone();
    let fetcher = with(TIMEOUTS, move |mut control| {
        write_message(&mut control, &Ready::Ok(())).unwrap();
        while let Ok(Some((order, pipe))) = receive(&mut control) {
            let Some(mut pipe) = pipe.map(File::from) else { continue };
            match order {
                Order::Get(_) => {
                    pipe.write_all(&[&body()[..], &9_u32.to_le_bytes(), b"x"].concat()).unwrap();
                    held.lock().unwrap().push(pipe);
                }
                _ if alive.load(Ordering::Relaxed) => {
                    write_message(&mut pipe, &Vec::<Resolved>::new()).unwrap();
                }
                _ => held.lock().unwrap().push(pipe),
            }
        }
    });
    fetcher.set_up(&endpoints("x.invalid"), "x.invalid").unwrap();
    for _ in 0..2 {
        let failed = read_all(&fetcher, 0).unwrap_err();
        assert_eq!((failed.failure.kind, failed.ends_pull), (FailureKind::Unavailable, false));
        assert!(failed.failure.message.contains("no data for "), "{failed:?}");
    }
    // A process that hangs affects all of them.
    is_alive.store(false, Ordering::Relaxed);
    let failed = read_all(&fetcher, 0).unwrap_err();
    assert_eq!((failed.failure.kind, failed.ends_pull), (FailureKind::Unavailable, true));
    assert!(failed.failure.message.contains("did not respond for "), "{failed:?}");
}

/// Each misbehaviour of a fetcher has a specific error, fails all requests, and is detected within a limit.
#[test]
fn a_compromised_fetcher_can_only_cause_errors() {
    let length = |count: u32| count.to_le_bytes();
    let internal = FailureKind::Internal;
    let cases: Vec<(&str, Vec<u8>, bool, FailureKind, &str)> = vec![
        ("ends", Vec::new(), false, FailureKind::Unavailable, "closed its connection"),
        ("ends in a length", vec![1], false, FailureKind::Unavailable, "closed its connection"),
        ("says nothing", Vec::new(), true, FailureKind::Unavailable, "did not respond for "),
        ("a long answer", length(u32::MAX).to_vec(), true, internal, "sent a message of 4294967295 bytes"),
        ("no answer", [&length(3)[..], &[9, 9, 9]].concat(), true, internal, "cannot be decoded"),
        (
            "an endless chunk",
            [&body()[..], &length(70_000)].concat(),
            true,
            internal,
            "a chunk of 70000 bytes",
        ),
        (
            "half a chunk",
            [&body()[..], &length(9), b"x"].concat(),
            false,
            FailureKind::Unavailable,
            "closed its connection",
        ),
        ("no end", [&body()[..], &length(0), &length(1), &[7]].concat(), true, internal, "cannot be decoded"),
    ];
    for (what, bytes, stays, kind, words) in cases {
        let held = Mutex::new(Vec::new());
        let fetcher = that_answers(move |mut pipe, _| {
            // The worker may stop reading before the last byte.
            let _ = pipe.write_all(&bytes);
            if stays {
                held.lock().unwrap().push(pipe);
            }
        });
        fetcher.set_up(&endpoints("x.invalid"), "x.invalid").unwrap();
        let begun = Instant::now();
        let failed = read_all(&fetcher, 0).unwrap_err();
        assert!(begun.elapsed() < Duration::from_secs(5), "{what}: {:?}", begun.elapsed());
        assert_eq!((failed.failure.kind, failed.pause, failed.ends_pull), (kind, None, true), "{what}");
        assert!(failed.failure.message.contains(words), "{what}: {failed:?}");
        let again = fetcher.get(Get::default()).err().expect("the fetcher has failed");
        assert_eq!((&again.failure, again.ends_pull), (&failed.failure, true), "{what}");
    }
}

/// The end of a pull ends the fetcher, whatever the fetcher does.
#[test]
fn the_end_of_a_pull_closes_the_control_socket() {
    let (sender, ended) = std::sync::mpsc::channel();
    let fetcher = with(TIMEOUTS, move |mut control| {
        let _ = control.read_to_end(&mut Vec::new());
        sender.send(()).unwrap();
    });
    fetcher.end();
    ended.recv_timeout(Duration::from_secs(5)).unwrap();
    assert!(fetcher.get(Get::default()).is_err());
}
