//! `coracle image …`: says to the running daemon what was typed, and prints what it answers. Runs without a reactor: it is a
//! process of its own, which may wait.

use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use coracle_base::error::plain;

use super::{Answer, LINE_BYTES_MAX, Request, socket};
use crate::cli::EXIT_USAGE;

/// Shown for what cannot be understood.
const USAGE: &str = "usage: coracle image check [--repair] | explain IMAGE… | export IMAGE… -o FILE | import FILE… | \
                     list [--pulling] | pin IMAGE… | remove [--force] IMAGE… | unpin IMAGE…";

/// Digits of an id that are printed, as crictl does.
const ID_DIGITS: usize = 13;

/// Carries out the words after `coracle image`. Exit code 1: something did not work; 2: the words are wrong.
pub(crate) fn run(state: &Path, words: &[String]) -> ExitCode {
    let request = match request(words) {
        Ok(request) => request,
        Err(text) => {
            complain(&text);
            return ExitCode::from(EXIT_USAGE);
        }
    };
    match ask(&socket(state), &request) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            complain(&format!("ask the daemon at {}: {}", socket(state).display(), plain(&error)));
            ExitCode::FAILURE
        }
    }
}

fn request(words: &[String]) -> Result<Request, String> {
    match words.split_first() {
        Some((word, files)) if word == "import" && !files.is_empty() => {
            // The daemon has another working directory.
            let files = files.iter().map(std::path::absolute).collect::<io::Result<Vec<PathBuf>>>();
            files.map(|files| Request::Import { files }).map_err(|error| format!("import: {}", plain(&error)))
        }
        Some((word, [])) if word == "list" => Ok(Request::List {}),
        Some((word, [])) if word == "check" => Ok(Request::Check { repair: false }),
        Some((word, [flag])) if word == "check" && flag == "--repair" => Ok(Request::Check { repair: true }),
        Some((word, [flag])) if word == "list" && flag == "--pulling" => Ok(Request::Pulling {}),
        Some((word, rest)) if ["explain", "pin", "remove", "unpin"].contains(&word.as_str()) => {
            let force = word == "remove" && rest.first().is_some_and(|first| first == "--force");
            let names = rest[usize::from(force)..].to_vec();
            match word.as_str() {
                _ if names.is_empty() || names.iter().any(|name| name.starts_with('-')) => Err(USAGE.into()),
                "explain" => Ok(Request::Explain { names }),
                "pin" => Ok(Request::Pin { names }),
                "unpin" => Ok(Request::Unpin { names }),
                _ => Ok(Request::Remove { names, force }),
            }
        }
        Some((word, [names @ .., flag, file])) if word == "export" && flag == "-o" && !names.is_empty() => {
            let file = std::path::absolute(file).map_err(|error| format!("export: {}", plain(&error)))?;
            match names.iter().any(|name| name.starts_with('-')) {
                true => Err(USAGE.into()),
                false => Ok(Request::Export { names: names.to_vec(), file }),
            }
        }
        _ => Err(USAGE.into()),
    }
}

/// Sends the request and prints the answers. Gives whether all of it worked.
fn ask(socket: &Path, request: &Request) -> io::Result<bool> {
    let mut stream = UnixStream::connect(socket)?;
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    stream.write_all(&line)?;
    print_answers(&mut BufReader::new(stream), matches!(request, Request::List {}), &mut io::stdout().lock())
}

fn print_answers(from: &mut impl BufRead, is_list: bool, out: &mut impl Write) -> io::Result<bool> {
    let mut is_fine = true;
    if is_list {
        writeln!(out, "{}", row("NAME", "ID", "SIZE", ""))?;
    }
    loop {
        let mut line = Vec::new();
        from.by_ref().take(LINE_BYTES_MAX as u64).read_until(b'\n', &mut line)?;
        if line.is_empty() {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the daemon ended before it was done"));
        }
        let answer: Answer = serde_json::from_slice(&line)?;
        match answer {
            Answer::Image { id, tags, digests, size_bytes, pinned } if is_list => {
                let names = if tags.is_empty() { digests } else { tags };
                let names = if names.is_empty() { vec!["<none>".into()] } else { names };
                for name in names {
                    let mark = if pinned { "pinned" } else { "" };
                    writeln!(out, "{}", row(&name, short(&id), &size(size_bytes), mark))?;
                }
            }
            Answer::Image { id, tags, .. } => writeln!(out, "imported {} {}", short(&id), tags.join(" "))?,
            Answer::Exported { file } => writeln!(out, "exported {}", file.display())?,
            Answer::Pulling { .. } | Answer::Explained { .. } | Answer::Endpoint { .. } => {
                write!(out, "{}", told(answer))?;
            }
            Answer::Removed { name } => writeln!(out, "removed {name}")?,
            Answer::Pinned { name } => writeln!(out, "pinned {name}")?,
            Answer::Unpinned { name } => writeln!(out, "unpinned {name}")?,
            Answer::Whole { name, mended } if mended.is_empty() => writeln!(out, "whole {name}")?,
            Answer::Whole { name, mended } => writeln!(out, "mended {name}: {}", mended.join("; "))?,
            Answer::Failed { message } => {
                complain(&message);
                is_fine = false;
            }
            Answer::End {} => return Ok(is_fine),
        }
    }
}

/// Lines of a pull under way, or of an explanation.
fn told(answer: Answer) -> String {
    match answer {
        Answer::Pulling {
            name,
            bytes_done,
            bytes_total,
            layers_done,
            layers_total,
            rate,
            left_s,
            since_s,
        } => {
            let left = left_s.map_or_else(String::new, |seconds| format!(", {seconds} s left"));
            format!(
                "{name} {} of {}, {layers_done} of {layers_total} layers, {}/s, for {since_s} s{left}\n",
                size(bytes_done),
                size(bytes_total),
                size(rate)
            )
        }
        Answer::Explained { name } => format!("{name}\n"),
        Answer::Endpoint { url, source, credentials, tls, proxy } => {
            let proxy = if proxy.is_empty() { proxy } else { format!("    proxy        {proxy}\n") };
            format!(
                "  {url}\n    from         {source}\n    credentials  {credentials}\n    tls          {tls}\n{proxy}"
            )
        }
        _ => String::new(),
    }
}

fn row(name: &str, id: &str, size: &str, mark: &str) -> String {
    format!("{name:<60} {id:<ID_DIGITS$} {size:>9} {mark}").trim_end().to_owned()
}

fn short(id: &str) -> &str {
    let hex = id.strip_prefix("sha256:").unwrap_or(id);
    hex.get(..ID_DIGITS).unwrap_or(hex)
}

/// As crictl prints sizes: powers of 1000, three digits.
fn size(bytes: u64) -> String {
    let mut value = bytes as f64;
    let mut unit = "B";
    for next in ["kB", "MB", "GB", "TB"] {
        if value < 1000.0 {
            break;
        }
        value /= 1000.0;
        unit = next;
    }
    let digits = if unit == "B" || value >= 100.0 { 0 } else { 1 };
    let mut text = String::new();
    // Writing to a String cannot fail.
    let _ = write!(text, "{value:.digits$}{unit}");
    text
}

fn complain(text: &str) {
    // Without a stderr there is nobody to tell.
    let _ = writeln!(io::stderr(), "coracle: {text}");
}

#[cfg(test)]
mod tests {
    use super::{print_answers, request, size};
    use crate::control::Request;

    fn words(line: &str) -> Vec<String> {
        line.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn words_become_requests() {
        assert_eq!(request(&words("list")), Ok(Request::List {}));
        assert_eq!(request(&words("check")), Ok(Request::Check { repair: false }));
        assert_eq!(request(&words("check --repair")), Ok(Request::Check { repair: true }));
        assert_eq!(request(&words("remove a b")), Ok(Request::Remove { names: words("a b"), force: false }));
        assert_eq!(
            request(&words("remove --force a")),
            Ok(Request::Remove { names: words("a"), force: true })
        );
        let Ok(Request::Export { names, file }) = request(&words("export a b -o c.tar")) else {
            panic!("export")
        };
        assert!(names == words("a b") && file.is_absolute());
        assert_eq!(request(&words("pin a")), Ok(Request::Pin { names: words("a") }));
        assert_eq!(request(&words("unpin a")), Ok(Request::Unpin { names: words("a") }));
        let Ok(Request::Import { files }) = request(&words("import /a.tar b.tar")) else { panic!("import") };
        assert!(files[0] == std::path::Path::new("/a.tar") && files[1].is_absolute());
        for line in [
            "",
            "import",
            "remove",
            "list x",
            "frobnicate",
            "export x",
            "export -o x",
            "check x",
            "pin",
            "unpin --force x",
        ] {
            let error = request(&words(line)).unwrap_err();
            assert!(error.contains("usage"), "{line}: {error}");
        }
    }

    #[test]
    fn answers_become_text() {
        let answers = br#"{"image":{"id":"sha256:0123456789abcdef","tags":["a:1","b:1"],"digests":[],"size_bytes":1500000,"pinned":true}}
{"end":{}}
"#;
        let mut out = Vec::new();
        assert!(print_answers(&mut answers.as_slice(), true, &mut out).unwrap());
        let text = String::from_utf8(out).unwrap();
        let lines: Vec<_> = text.lines().map(|line| words(line).join(" ")).collect();
        assert_eq!(
            lines,
            ["NAME ID SIZE", "a:1 0123456789abc 1.5MB pinned", "b:1 0123456789abc 1.5MB pinned"]
        );
        let mut out = Vec::new();
        let failed = b"{\"failed\":{\"message\":\"test of complaints\"}}\n{\"removed\":{\"name\":\"x\"}}\n{\"end\":{}}\n";
        assert!(!print_answers(&mut failed.as_slice(), false, &mut out).unwrap());
        assert_eq!(out, b"removed x\n");
        assert!(print_answers(&mut b"".as_slice(), false, &mut Vec::new()).is_err(), "no end");
    }

    #[test]
    fn sizes_read_as_in_crictl() {
        for (bytes, expected) in
            [(0, "0B"), (999, "999B"), (1000, "1.0kB"), (123_456, "123kB"), (4_500_000_000, "4.5GB")]
        {
            assert_eq!(size(bytes), expected);
        }
    }
}
