//! Actions of a container: sleep, write, ignore signals, leave orphans, use memory, serve.

use std::fs;
use std::hint::black_box;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{SigSet, Signal};
use nix::sys::time::TimeValLike;

use crate::see::Outcome;

/// Parses an integer argument.
pub(crate) fn number(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("{text:?} is no number"))
}

/// Sleeps, then succeeds.
pub(crate) fn sleep(seconds: u64) -> u8 {
    std::thread::sleep(Duration::from_secs(seconds));
    0
}

/// Sleeps until a signal ends it.
pub(crate) fn sleep_forever() -> Outcome {
    loop {
        sleep(3600);
    }
}

/// Prints the arguments on one line.
pub(crate) fn print(words: &[&str]) -> Outcome {
    println!("{}", words.join(" "));
    Ok(0)
}

/// Prints `count` lines of `bytes` bytes each without the newline; each line starts with its number.
pub(crate) fn lines(count: &str, bytes: &str) -> Outcome {
    let (count, bytes) = (number(count)?, number(bytes)? as usize);
    let mut out = std::io::stdout().lock();
    for line in 0..count {
        let text = format!("{line:08} {}\n", "x".repeat(bytes.saturating_sub(9)));
        out.write_all(text.as_bytes()).map_err(|error| format!("write: {error}"))?;
    }
    Ok(0)
}

/// Writes this many mebibytes in lines of 100 bytes including newlines, 64 KiB at a time, as fast as the reader accepts them.
pub(crate) fn chatter(mebibytes: &str) -> Outcome {
    let mut out = std::io::stdout().lock();
    let mut left = number(mebibytes)? << 20;
    let lines = [[b'x'; 99].as_slice(), b"\n"].concat().repeat(655);
    while left > 0 {
        let block = &lines[..lines.len().min(left as usize)];
        out.write_all(block).map_err(|error| format!("write: {error}"))?;
        left -= block.len() as u64;
    }
    Ok(0)
}

/// Text without a newline.
pub(crate) fn raw(text: &str) -> Outcome {
    let mut out = std::io::stdout();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|error| format!("write: {error}"))?;
    Ok(0)
}

/// Prints text without a newline, and then sleeps.
pub(crate) fn half(text: &str) -> Outcome {
    raw(text)?;
    sleep_forever()
}

/// Prints one line on each stream.
pub(crate) fn both() -> Outcome {
    println!("to stdout");
    eprintln!("to stderr");
    Ok(0)
}

/// Prints increasing numbers until it is ended, so that tests detect lost and repeated lines.
pub(crate) fn ticks(milliseconds: &str) -> Outcome {
    let pause = Duration::from_millis(number(milliseconds)?);
    for tick in 0u64.. {
        println!("tick {tick}");
        std::thread::sleep(pause);
    }
    Ok(0)
}

/// Waits for one of several signals, prints its name, and exits with `code`.
pub(crate) fn trap(code: &str) -> Outcome {
    let code = number(code)? as u8;
    let mut set = SigSet::empty();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGUSR1, Signal::SIGHUP] {
        set.add(signal);
    }
    set.thread_block().map_err(|error| format!("block signals: {error}"))?;
    println!("trapping");
    let signal = set.wait().map_err(|error| format!("wait: {error}"))?;
    println!("got {}", signal.as_str());
    Ok(code)
}

/// Blocks every signal, and sleeps: only SIGKILL ends it.
pub(crate) fn stubborn() -> Outcome {
    SigSet::all().thread_block().map_err(|error| format!("block signals: {error}"))?;
    println!("stubborn");
    sleep_forever()
}

/// Ends itself by a signal. If it is PID 1 of a namespace, the kernel ignores the signal and it exits with 3.
pub(crate) fn raise(signal: &str) -> Outcome {
    let signal: Signal = signal.parse().map_err(|_| format!("{signal:?} is no signal"))?;
    nix::sys::signal::raise(signal).map_err(|error| format!("raise: {error}"))?;
    Ok(3)
}

/// Sends a signal to a process.
pub(crate) fn kill(pid: &str, signal: &str) -> Outcome {
    let signal: Signal = signal.parse().map_err(|_| format!("{signal:?} is no signal"))?;
    let process = nix::unistd::Pid::from_raw(pid.parse().map_err(|_| format!("{pid:?} is no process"))?);
    nix::sys::signal::kill(process, signal).map_err(|errno| format!("kill {pid}: {errno}"))?;
    Ok(0)
}

/// Mounts a new file system of this type.
pub(crate) fn mount(kind: &str, target: &str) -> Outcome {
    let flags = nix::mount::MsFlags::empty();
    let mounted = nix::mount::mount(Some(kind), target, Some(kind), flags, None::<&str>);
    mounted.map_err(|errno| format!("mount {target}: {errno}"))?;
    Ok(0)
}

/// Leaves a child process behind that keeps standard output open, and exits at once.
pub(crate) fn orphan(seconds: &str) -> Outcome {
    spawn(&["sleep", seconds])?;
    println!("orphaned");
    Ok(0)
}

/// Leaves a child behind that writes to the same output after some time, and exits at once.
pub(crate) fn late(milliseconds: &str) -> Outcome {
    println!("now");
    spawn(&["after", milliseconds, "late"])?;
    Ok(0)
}

/// Prints a text after some time.
pub(crate) fn after(milliseconds: &str, text: &str) -> Outcome {
    std::thread::sleep(Duration::from_millis(number(milliseconds)?));
    println!("{text}");
    Ok(0)
}

/// Sleeps with a child and a grandchild that sleep too.
pub(crate) fn tree(seconds: &str) -> Outcome {
    let depth = std::env::var("PROBE_DEPTH").ok().and_then(|text| text.parse().ok()).unwrap_or(2u32);
    if depth > 0 {
        Command::new("/proc/self/exe")
            .args(["tree", seconds])
            .env("PROBE_DEPTH", (depth - 1).to_string())
            .spawn()
            .map_err(|error| format!("spawn: {error}"))?;
    }
    number(seconds).map(sleep)
}

/// Allocates memory, a mebibyte at a time, then sleeps.
pub(crate) fn burn(mebibytes: &str) -> Outcome {
    const MIB: usize = 1 << 20;
    let mut kept = Vec::new();
    for _ in 0..number(mebibytes)? {
        kept.push(black_box(vec![1u8; MIB]));
    }
    println!("burnt {}", kept.len());
    sleep_forever()
}

/// Starts a child that allocates memory, waits for its end, and exits with `code`.
pub(crate) fn hungry_child(mebibytes: &str, code: &str) -> Outcome {
    let ended = Command::new("/proc/self/exe").args(["burn", mebibytes]).status();
    println!("{}", ended.map_err(|error| format!("spawn: {error}"))?);
    number(code).map(|code| code as u8)
}

/// Uses this much CPU time, then sleeps.
pub(crate) fn spin(milliseconds: &str) -> Outcome {
    let wanted = Duration::from_millis(number(milliseconds)?);
    let used = || {
        let usage = nix::sys::resource::getrusage(nix::sys::resource::UsageWho::RUSAGE_SELF);
        usage
            .map(|usage| usage.user_time() + usage.system_time())
            .map_err(|error| format!("getrusage: {error}"))
    };
    while used()?.num_milliseconds() < wanted.as_millis() as i64 {
        black_box((0..100_000_u64).fold(0, |sum, number| black_box(sum ^ number)));
    }
    println!("spun");
    sleep_forever()
}

/// Writes a file of this many mebibytes, then sleeps.
pub(crate) fn fill(path: &str, mebibytes: &str) -> Outcome {
    let bytes = vec![1; (number(mebibytes)? << 20) as usize];
    fs::write(path, bytes).map_err(|error| format!("write {path}: {error}"))?;
    println!("filled");
    sleep_forever()
}

/// Writes a file.
pub(crate) fn write(path: &str, text: &str) -> Outcome {
    fs::write(path, text).map_err(|error| format!("write {path}: {error}"))?;
    Ok(0)
}

/// Exchanges two names as fast as possible without end.
pub(crate) fn swap(one: &str, other: &str) -> Outcome {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    loop {
        let swapped = renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE);
        swapped.map_err(|errno| format!("exchange {one} and {other}: {errno}"))?;
    }
}

/// Answers each connection with the host name, without end.
pub(crate) fn serve(port: &str) -> Outcome {
    let listener = TcpListener::bind(("0.0.0.0", number(port)? as u16))
        .map_err(|error| format!("bind {port}: {error}"))?;
    println!("serving");
    let name = nix::unistd::gethostname().map_err(|error| format!("gethostname: {error}"))?;
    for mut stream in listener.incoming().flatten() {
        // Fails if the client has disconnected.
        let _ = writeln!(stream, "hello from {}", name.to_string_lossy());
    }
    Ok(0)
}

/// Returns all received data on each connection until its end.
pub(crate) fn echo(address: &str) -> Outcome {
    let listener = TcpListener::bind(address).map_err(|error| format!("bind {address}: {error}"))?;
    // The standard library's backlog of 128 is too small for a test with a thousand concurrent connections.
    rustix::net::listen(&listener, 4096).map_err(|error| format!("listen {address}: {error}"))?;
    println!("serving");
    for stream in listener.incoming() {
        let stream = stream.map_err(|error| format!("accept: {error}"))?;
        let serve = move || {
            // Fails if the client has disconnected.
            let _ = std::io::copy(&mut &stream, &mut &stream);
            let _ = stream.shutdown(std::net::Shutdown::Write);
        };
        std::thread::Builder::new().spawn(serve).map_err(|error| format!("thread: {error}"))?;
    }
    Ok(0)
}

/// Writes this many bytes; the value of each is the low byte of its offset divided by 1024.
pub(crate) fn blast(bytes: &str) -> Outcome {
    let count = number(bytes)?;
    let mut out = std::io::stdout().lock();
    let mut block = vec![0; 1 << 16];
    let mut done = 0;
    while done < count {
        for (index, kibibyte) in block.chunks_mut(1024).enumerate() {
            kibibyte.fill((done / 1024 + index as u64) as u8);
        }
        let part = block.len().min((count - done) as usize);
        out.write_all(&block[..part]).map_err(|error| format!("write: {error}"))?;
        done += part as u64;
    }
    Ok(0)
}

/// Writes this many bytes to each of stdout and stderr, alternating.
pub(crate) fn flood(bytes: &str) -> Outcome {
    let count = number(bytes)?;
    let (mut out, mut err) = (std::io::stdout().lock(), std::io::stderr().lock());
    let (ones, twos) = (vec![b'1'; 1 << 16], vec![b'2'; 1 << 16]);
    let mut done = 0;
    while done < count {
        let part = ones.len().min((count - done) as usize);
        let written = out.write_all(&ones[..part]).and_then(|()| err.write_all(&twos[..part]));
        written.and_then(|()| out.flush()).map_err(|error| format!("write: {error}"))?;
        done += part as u64;
    }
    Ok(7)
}

/// Reads stdin to its end and prints the number of bytes.
pub(crate) fn sink() -> Outcome {
    let count = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
    println!("read {}", count.map_err(|error| format!("read: {error}"))?);
    Ok(0)
}

/// Copies stdin to stdout, as `cat` does.
pub(crate) fn mirror() -> Outcome {
    let (mut from, mut to) = (std::io::stdin().lock(), std::io::stdout().lock());
    let mut buffer = [0; 1 << 15];
    loop {
        match from.read(&mut buffer).map_err(|error| format!("read: {error}"))? {
            0 => return Ok(0),
            count => to
                .write_all(&buffer[..count])
                .and_then(|()| to.flush())
                .map_err(|error| format!("write: {error}"))?,
        }
    }
}

/// Prints the size of the terminal at each change, until it is `last`.
pub(crate) fn size(last: &str) -> Outcome {
    let mut known = String::new();
    loop {
        let size =
            rustix::termios::tcgetwinsize(std::io::stdin()).map_err(|error| format!("size: {error}"))?;
        let size = format!("{}x{}", size.ws_col, size.ws_row);
        if size != known {
            println!("{size}");
            known = size;
        }
        if known == last {
            return Ok(0);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Connects to an address and prints the received data.
pub(crate) fn connect(address: &str) -> Outcome {
    let mut stream = TcpStream::connect(address).map_err(|error| format!("connect {address}: {error}"))?;
    let mut text = String::new();
    stream.read_to_string(&mut text).map_err(|error| format!("read {address}: {error}"))?;
    print!("{text}");
    Ok(0)
}

/// Starts this program again with the same standard output and error.
fn spawn(arguments: &[&str]) -> Result<(), String> {
    Command::new("/proc/self/exe")
        .args(arguments)
        .stdin(Stdio::null())
        .spawn()
        .map(drop)
        .map_err(|error| format!("spawn: {error}"))
}
