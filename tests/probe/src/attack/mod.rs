//! Attacks by a malicious process in a container: one subcommand of `probe attack` per subject. Each prints
//! one line per fact, which starts with the verdict: `GOT` for a successful attack, `held` for a refused one
//! with the reason, `saw` for a fact that the test evaluates. A successful attack does not harm the node:
//! files are opened but not written, signals are sent to processes of the own PID namespace.

mod attributes;
mod calls;
mod cgroups;
mod devices;
mod files;
mod keys;
mod mounts;
mod net;
mod packets;
mod raw;
mod signals;
mod trace;
mod walk;

pub(crate) use self::raw::{call, has_own_session, socket};
use crate::act::number;
use crate::see::Outcome;

/// Runs one attack.
pub(crate) fn run(words: &[&str]) -> Outcome {
    match words {
        ["race", seconds, canaries @ ..] => trace::race(number(seconds)?, canaries),
        ["namespaces", seconds] => trace::clone_namespaces(number(seconds)?),
        ["groups", seconds] => trace::kill_groups(number(seconds)?),
        ["look", canaries @ ..] => trace::look(canaries),
        ["hunt", pid] => trace::hunt(number(pid)? as i32),
        ["disturb", way, seconds] => trace::disturb(way, number(seconds)?),
        ["enter", pid, kind] => trace::enter(pid, kind),
        ["signals"] => signals::all(),
        ["limit", pid] => signals::limit(number(pid)? as i32),
        ["orphans", count] => signals::orphans(number(count)?),
        ["zombies", count] => signals::zombies(number(count)?),
        ["crowd"] => signals::crowd(),
        ["descriptors"] => signals::descriptors(),
        ["attributes", paths @ ..] => attributes::all(paths),
        ["kernel"] => files::kernel(),
        ["masks", paths @ ..] => files::masks(paths),
        ["mounts"] => mounts::all(),
        ["unshared"] => mounts::unshared(),
        ["userns"] => mounts::user_namespace(),
        ["devices", folders @ ..] => devices::all(folders),
        ["calls"] => calls::all(),
        ["other-entries"] => calls::by_other_entries(),
        ["dumps", pids @ ..] => calls::dumps(pids),
        ["cgroups"] => cgroups::all(),
        ["keys", "add", name, text] => keys::add(name, text),
        ["keys", "fill"] => keys::fill(),
        ["keys", "exec", program, words @ ..] => keys::exec(program, words),
        ["keys", "find", name, rings @ ..] => keys::find(name, rings),
        ["sockets"] => net::sockets(),
        ["frame", source, address, port, text] => net::frame(source, address, port, text),
        ["advertise", link] => net::advertise(link),
        ["claim", link, address, mac, from, victim, tags] => {
            net::claim(link, address, mac, from, victim, tags)
        }
        ["disguise", link, from, to] => net::disguise(link, from, to),
        ["fragments", way, link, address] => packets::fragments(way, link, address),
        ["redirect", link, victim, mac, router, destination, via] => {
            packets::redirect(link, victim, mac, router, destination, via)
        }
        ["query", link, from] => packets::query(link, from),
        ["sources", link, gateway, first, count] => packets::sources(link, gateway, first, number(count)?),
        ["askers", link, gateway, first, count] => packets::askers(link, gateway, first, number(count)?),
        ["flows", address, count] => packets::flows(address, number(count)?),
        ["connections", address, count] => packets::connections(address, number(count)?),
        ["inodes", folder] => files::inodes(folder),
        ["bomb"] => signals::bomb(),
        ["walk", secret] => walk::known(secret),
        _ => Err(format!("no such attack: {words:?}")),
    }
}

/// Prints the verdict of an attack that should be refused.
fn verdict<T, E: std::fmt::Display>(what: &str, result: Result<T, E>) {
    match result {
        Ok(_) => println!("GOT {what}"),
        Err(error) => println!("held {what}: {error}"),
    }
}
