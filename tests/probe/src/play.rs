//! Replacements for programs in the conformance suite's images that no small package has. The image links the
//! probe under their names; `argv[0]` selects the program.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};

use crate::act::number;
use crate::see::Outcome;

/// Runs the replacement of `program` if there is one.
pub(crate) fn program(program: &str, words: &[&str]) -> Option<Outcome> {
    match (program.rsplit('/').next().unwrap_or(program), words) {
        // nginx changes its arguments; here the image's command has them.
        ("nginx", ["master process"]) => Some(web_server("80")),
        ("nginx", ["master process", port]) => Some(web_server(port)),
        ("httpd", []) => Some(web_server("80")),
        ("ipcs", ["-m"]) => Some(shared_memory()),
        ("pgrep", [pattern]) => Some(pgrep(pattern)),
        ("nonewprivs", _) => {
            println!("Effective uid: {}", nix::unistd::geteuid());
            Some(Ok(0))
        }
        _ => None,
    }
}

/// Answers every request with 200 without end.
fn web_server(port: &str) -> Outcome {
    let listener = TcpListener::bind(("::", number(port)? as u16))
        .or_else(|_| TcpListener::bind(("0.0.0.0", number(port).unwrap_or(0) as u16)))
        .map_err(|error| format!("bind {port}: {error}"))?;
    // Fails if the image has no such directory, in which case no one needs the file.
    let _ = fs::write("/var/run/nginx.pid", format!("{}\n", std::process::id()));
    eprintln!("httpd: serving port {port}");
    for stream in listener.incoming().flatten() {
        // A silent client must not block others.
        std::thread::spawn(move || answer(&stream));
    }
    Ok(0)
}

fn answer(stream: &TcpStream) {
    let mut lines = BufReader::new(stream).lines();
    while lines.next().is_some_and(|line| line.is_ok_and(|line| !line.is_empty())) {}
    // Fails if the client has disconnected.
    let _ = write!(&*stream, "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\nok\n");
    println!("httpd: answered");
}

/// `ipcs -m`: the segments of System V shared memory, with keys in the format of that program.
fn shared_memory() -> Outcome {
    let table = fs::read_to_string("/proc/sysvipc/shm").map_err(|error| format!("shm: {error}"))?;
    println!("\n------ Shared Memory Segments --------\nkey        shmid      bytes");
    for line in table.lines().skip(1) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        if let [key, shmid, _, bytes, ..] = fields[..] {
            let key = key.parse::<i32>().map_err(|error| format!("shm key {key}: {error}"))?;
            println!("{key:#010x} {shmid:<10} {bytes}");
        }
    }
    Ok(0)
}

/// `pgrep PATTERN`: processes whose name contains the text; exit code 1 if there are none.
fn pgrep(pattern: &str) -> Outcome {
    let mut code = 1;
    for entry in fs::read_dir("/proc").map_err(|error| format!("/proc: {error}"))?.flatten() {
        let pid = entry.file_name().to_string_lossy().parse::<u32>();
        let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        if let Some(pid) = pid.ok().filter(|pid| *pid != std::process::id() && name.contains(pattern)) {
            println!("{pid}");
            code = 0;
        }
    }
    Ok(code)
}
