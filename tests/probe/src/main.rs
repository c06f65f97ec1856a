//! The program in the fixture images. It is the only executable of an image, so tests need neither a shell
//! nor downloads: the first argument selects the action, and the output shows what a container can see. It
//! depends on no code of coracle: its output is based on the kernel only.
#![deny(unsafe_code)]

mod act;
mod attack;
mod play;
mod report;
mod see;
mod spy;

use std::process::ExitCode;

/// Exit code for invalid arguments, as in shells.
const MISUSE: u8 = 2;

fn main() -> ExitCode {
    let mut arguments = std::env::args();
    let name = arguments.next().unwrap_or_default();
    let arguments: Vec<String> = arguments.collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = play::program(&name, &words).unwrap_or_else(|| act(&words));
    match done {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("probe: {error}");
            ExitCode::from(MISUSE)
        }
    }
}

fn act(words: &[&str]) -> see::Outcome {
    match words {
        ["see", what @ ..] => see::all(what),
        ["report", what @ ..] => report::all(what),
        ["then-sleep", "report", what @ ..] => report::all(what).and_then(|_| {
            println!("end of report");
            act::sleep_forever()
        }),
        ["report-call", number] => report::call(number),
        ["cat", path] => see::cat(path),
        ["hash", path] => see::hash(path),
        ["ls", path] => see::list(path),
        ["stat", path] => see::stat(path),
        ["attack", words @ ..] => attack::run(words),
        ["true"] => Ok(0),
        ["exit", code] => act::number(code).map(|code| code as u8),
        ["sleep", "forever"] => act::sleep_forever(),
        ["sleep", seconds] => act::number(seconds).map(act::sleep),
        ["print", words @ ..] => act::print(words),
        ["lines", count, bytes] => act::lines(count, bytes),
        ["chatter", mebibytes] => act::chatter(mebibytes),
        ["raw", text] => act::raw(text),
        ["half", text] => act::half(text),
        ["both"] => act::both(),
        ["ticks", milliseconds] => act::ticks(milliseconds),
        ["trap", code] => act::trap(code),
        ["stubborn"] => act::stubborn(),
        ["raise", signal] => act::raise(signal),
        ["traced", code] => spy::traced(code),
        ["kill", pid, signal] => act::kill(pid, signal),
        ["mount", kind, target] => act::mount(kind, target),
        ["orphan", seconds] => act::orphan(seconds),
        ["late", milliseconds] => act::late(milliseconds),
        ["after", milliseconds, text] => act::after(milliseconds, text),
        ["tree", seconds] => act::tree(seconds),
        ["burn", mebibytes] => act::burn(mebibytes),
        ["hungry-child", mebibytes, code] => act::hungry_child(mebibytes, code),
        ["spin", milliseconds] => act::spin(milliseconds),
        ["fill", path, mebibytes] => act::fill(path, mebibytes),
        ["write", path, text] => act::write(path, text),
        ["swap", one, other] => act::swap(one, other),
        ["serve", port] => act::serve(port),
        ["echo", address] => act::echo(address),
        ["blast", bytes] => act::blast(bytes),
        ["flood", bytes] => act::flood(bytes),
        ["sink"] => act::sink(),
        ["mirror"] => act::mirror(),
        ["size", last] => act::size(last),
        ["connect", address] => act::connect(address),
        ["seize", milliseconds] => spy::seize(milliseconds),
        ["describe", pid] => act::number(pid).map(|pid| {
            spy::describe(pid as i32);
            0
        }),
        ["signal", pid, signal] => spy::signal(pid, signal),
        ["apart"] => spy::apart(),
        _ => Err(format!("what is {words:?}?")),
    }
}
