//! Keyrings of the kernel: keys that one container adds and another finds.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::Command;

use super::raw;
use crate::see::Outcome;

/// `keyctl(2)`: KEY_SPEC_SESSION_KEYRING.
const SESSION: i32 = -3;
/// `keyctl(2)`: KEY_SPEC_USER_SESSION_KEYRING.
const USER_SESSION: i32 = -5;
/// `keyctl(2)`: KEY_SPEC_PROCESS_KEYRING.
const PROCESS: i32 = -2;

/// Adds a key to the session keyring, prints the keyring's serial, and sleeps.
pub(crate) fn add(name: &str, text: &str) -> Outcome {
    let key = raw::add_key(name, text, SESSION).map_err(|errno| format!("add_key: {errno}"))?;
    let ring = raw::ring_id(SESSION).map_err(|errno| format!("session ring: {errno}"))?;
    println!("saw ring {ring} key {key}");
    crate::act::sleep_forever()
}

/// Adds keys to the session keyring until the kernel refuses one, prints their number, and sleeps.
pub(crate) fn fill() -> Outcome {
    /// More than a user other than the node's root may have (`kernel.keys.maxkeys`), by default.
    const ENOUGH: u64 = 10_000;
    for made in 0..ENOUGH {
        if let Err(errno) = raw::add_key(&format!("key{made}"), "x", SESSION) {
            println!("saw keys {made}: {errno}");
            break;
        }
    }
    crate::act::sleep_forever()
}

/// Executes a program with a new session keyring, as systemd does for each unit.
pub(crate) fn exec(program: &str, words: &[&str]) -> Outcome {
    raw::new_session().map_err(|errno| format!("a session ring: {errno}"))?;
    Err(format!("exec {program}: {}", Command::new(program).args(words).exec()))
}

/// Searches for a key: in its own keyrings, in all keyrings of /proc/keys, in keyrings with these serials,
/// and in session keyrings with these names, which it joins one after the other.
pub(crate) fn find(name: &str, rings: &[&str]) -> Outcome {
    println!(
        "saw ring {}",
        raw::ring_id(SESSION).map_or_else(|errno| errno.to_string(), |id| id.to_string())
    );
    // A process without a session keyring uses the user session keyring: that of the node's uid 0.
    for ring in [SESSION, USER_SESSION] {
        look(&format!("ring {ring}"), i64::from(ring), name);
    }
    let listed = fs::read_to_string("/proc/keys").unwrap_or_default();
    let listed = listed.lines().filter_map(|line| i64::from_str_radix(line.split(' ').next()?, 16).ok());
    let named = rings.iter().filter_map(|ring| ring.parse().ok());
    for serial in named.chain(listed) {
        look(&format!("serial {serial}"), serial, name);
        read(&format!("serial {serial}"), serial);
        // A keyring that is linked to a keyring of this process is possessed.
        if raw::link_key(serial, PROCESS).is_ok() {
            look(&format!("linked {serial}"), i64::from(PROCESS), name);
            read(&format!("linked {serial}"), serial);
        }
    }
    for ring in rings.iter().filter(|ring| ring.parse::<i64>().is_err()) {
        match raw::join_session(ring) {
            Ok(_) => look(&format!("ring named {ring}"), i64::from(SESSION), name),
            Err(errno) => println!("held ring named {ring}: {errno}"),
        }
    }
    Ok(0)
}

fn look(place: &str, ring: i64, name: &str) {
    match raw::search(ring, name) {
        Ok(key) => match raw::read_key(key) {
            Ok(bytes) => println!("GOT key {name} in {place}: {}", String::from_utf8_lossy(&bytes)),
            Err(errno) => println!("GOT key {name} in {place}, not its content: {errno}"),
        },
        Err(errno) => println!("held {place}: {errno}"),
    }
}

/// Reads a key by its serial; the content of a keyring are serials.
fn read(place: &str, key: i64) {
    match raw::read_key(key) {
        Ok(bytes) => println!("saw content of {place}: {}", String::from_utf8_lossy(&bytes)),
        Err(errno) => println!("held content of {place}: {errno}"),
    }
}
