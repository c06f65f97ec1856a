//! Registries that answer oddly: what is pulled from them. Each row of the table is one deviation from a plain registry; random
//! cases combine two. A second port of the same machine is another host, for redirects, token services and mirrors.
//!
//! Beside the comparison one fact is required of coracle alone: credentials never reach the other host, except at the token service
//! that a challenge of the registry names, and at the server that hosts.toml names in place of the registry.
//!
//! ```text
//!                          ┌──> home, other: plain HTTP ───────────┐
//!   coracle or containerd ─┼──> nginx: TLS ──> inner: plain HTTP ──┼──> rows
//!                          └──> proxy, for names that end with .invalid: GET, or CONNECT to nginx
//! ```

mod rows;
mod server;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use coracle_tests::cri::Cri;
use coracle_tests::cri::proto::{AuthConfig, PullImageRequest, RemoveImageRequest};
use coracle_tests::image::Image;
use coracle_tests::layer::{Compression, Entry, Layer};
use coracle_tests::nginx::Nginx;
use coracle_tests::request::{fresh, image_spec};

use crate::Run;

use rows::{ROWS, Row};
pub(crate) use server::Server;

/// The user and password of each pull.
const USER: &str = "user";
const PASSWORD: &str = "secret";

/// `USER:PASSWORD` in base64.
const BASIC: &str = "Basic dXNlcjpzZWNyZXQ=";

pub(crate) fn run(run: &mut Run<'_>) {
    let folders = run.pair.folders().theirs.join("certs.d");
    let folders = [run.pair.folders().ours.join("certs.d"), folders];
    let (pair, folder) = (run.pair, run.pair.folders().ours);
    let server = &pair.odd;
    let tls = ["serverAuth", "anyExtendedKeyUsage"]
        .map(|usage| Nginx::of_usage(&folder, usage, server.inner(), usage));
    server.set_tls(&tls);
    let mut different = BTreeSet::new();
    for row in ROWS {
        compare(run, server, &folders, &[row], &mut different);
    }
    run.end_table();
    while run.goes_on() {
        let is_usual = |row: &&Row| !different.contains(row.name) && row.home == "HOME";
        let rows: Vec<&Row> = ROWS.iter().filter(is_usual).collect();
        let [first, second] = [(); 2].map(|()| rows[run.random.below(rows.len() as u64) as usize]);
        let both_have_hosts = !first.hosts.is_empty() && !second.hosts.is_empty();
        // containerd asks for a token otherwise with credentials, for which the table has rows.
        let is_token = |row: &Row| row.name.starts_with("token ");
        if is_token(first) && second.has_credentials || is_token(second) && first.has_credentials {
            continue;
        }
        // What takes seconds, or makes the other without effect, is tried alone.
        if first.name == second.name || both_have_hosts || first.is_slow || second.is_slow {
            continue;
        }
        compare(run, server, &folders, &[first, second], &mut BTreeSet::new());
    }
}

/// Lets both pull one image while the server follows these rows.
fn compare(
    run: &mut Run<'_>,
    server: &Server,
    folders: &[PathBuf; 2],
    rows: &[&Row],
    different: &mut BTreeSet<&'static str>,
) {
    run.begin_case();
    let number = fresh();
    // The file says that the other host is the registry's server.
    let is_moved = rows.iter().any(|row| row.hosts.contains("server = \"http://OTHER\""));
    let both = run.pair.both();
    let mut seen =
        [both.ours, both.theirs].into_iter().zip(folders).enumerate().map(|(side, (cri, folder))| {
            // Each side pulls content of its own, so that nothing is there already.
            let image = image(&format!("{number}-{side}"), rows.iter().any(|row| row.is_big));
            let hosts = rows.iter().map(|row| row.hosts).find(|hosts| !hosts.is_empty());
            let home = server.fill(rows[0].home);
            let file = hosts.map(|hosts| write_hosts(folder, &server.fill(hosts), &home));
            server.expect(&image, rows);
            let answer = pull(cri, &format!("{home}/odd/{number}:1"), rows);
            let requests = server.finish();
            if let Some(folder) = file {
                fs::remove_dir_all(folder).expect("the directory is ours");
            }
            if side == 0 {
                for request in &requests {
                    assert!(
                        !request.is_leak(is_moved),
                        "{}: credentials reached the other host: {request:?}",
                        rows[0].name
                    );
                }
            }
            let paths: Vec<String> = requests.iter().map(server::Request::describe).collect();
            (answer, paths.join(" "))
        });
    let (ours, theirs) = (seen.next().expect("two sides"), seen.next().expect("two sides"));
    drop(seen);
    let is_damaged = rows.iter().any(|row| row.name.starts_with("damaged: "));
    assert!(!is_damaged || ours.0.is_err(), "{}: pulled", rows[0].name);
    let said = |answer: &Result<(), String>| match answer {
        Ok(()) => "pulled",
        Err(_) => "not pulled",
    };
    let words = |side: &(Result<(), String>, String)| {
        let text: String = side.0.clone().err().unwrap_or_default().chars().take(300).collect();
        format!("{text:?} after {}", side.1.chars().take(600).collect::<String>())
    };
    let input = format!("ours: {}\n                theirs: {}", words(&ours), words(&theirs));
    let names: Vec<&str> = rows.iter().map(|row| row.name).collect();
    let (ours, theirs) = (said(&ours.0), said(&theirs.0));
    run.compare(&names.join(" + "), ours, theirs, &input);
    // Also if it is known: with others it would only repeat it.
    if ours != theirs {
        different.extend(rows.iter().map(|row| row.name));
    }
}

/// Pulls and removes the image.
fn pull(cri: &Cri, name: &str, rows: &[&Row]) -> Result<(), String> {
    let auth = AuthConfig { username: USER.into(), password: PASSWORD.into(), ..Default::default() };
    let auth = rows.iter().any(|row| row.has_credentials).then_some(auth);
    let request = PullImageRequest { image: Some(image_spec(name)), auth, ..Default::default() };
    let answer =
        cri.pull_image(request).map_err(|status| format!("{:?}: {}", status.code(), status.message()))?;
    let image = image_spec(&answer.image_ref);
    cri.remove_image(RemoveImageRequest { image: Some(image) }).map_err(|status| status.to_string())?;
    Ok(())
}

/// An image of one small layer, or of one that is sent in many pieces.
fn image(marker: &str, is_big: bool) -> Image {
    const BIG_BYTES: usize = 300_000;
    let mut random = coracle_tests::random::Random::new(marker.bytes().map(u64::from).sum());
    let bytes: Vec<u8> = (0..if is_big { BIG_BYTES } else { 10 }).map(|_| random.below(256) as u8).collect();
    let entries = [Entry::file("marker", marker.as_bytes()), Entry::file("data", &bytes)];
    Image::of(vec![Layer::new(&entries, Compression::Gzip)])
}

/// Writes a hosts.toml for the registry; returns its directory.
fn write_hosts(folder: &Path, text: &str, host: &str) -> PathBuf {
    let folder = folder.join(host);
    fs::create_dir_all(&folder).expect("a directory");
    fs::write(folder.join("hosts.toml"), text).expect("a file");
    folder
}
