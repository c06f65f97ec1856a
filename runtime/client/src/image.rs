//! `coracle image …`: sends a request to the running daemon and prints its answers. The command is a separate
//! process, so it may block.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use coracle_base::collect;
use coracle_base::error::describe_io;
use coracle_base::text::Escaped;
use coracle_control::{Answer, Request, socket};

use crate::ask::{converse_patiently, exchange};
use crate::list::json_text;
use crate::progress::{self, Shown};
use crate::stream::Stream;
use crate::{EXIT_USAGE, Typed, take_over};

/// Number of printed digits of an ID, as in crictl.
const ID_DIGITS: usize = 13;

/// The format in which answers are printed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    /// A table of images.
    Table,
    /// A line for each answer; the value is the verb for the operation on an image.
    Lines(&'static str),
    /// Names of images, one per line.
    Names,
    /// One JSON array.
    Json,
}

/// Executes a command of `coracle image`. Exit code 1: a part of the request failed; 2: invalid arguments.
pub fn run(state: &Path, command: &Typed) -> ExitCode {
    let (request, form) = match request(command).and_then(|request| Ok((request, form(command)?))) {
        Ok(asked) => asked,
        Err(text) => {
            complain(&text);
            return ExitCode::from(EXIT_USAGE);
        }
    };
    match ask_with_streams(state, request, form) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            complain(&crate::ask::unanswered(&socket(state), &error));
            ExitCode::FAILURE
        }
    }
}

fn form(command: &Typed) -> Result<Form, String> {
    match command.value("--output") {
        Some("json") if command.name != "export" => Ok(Form::Json),
        Some(other) if command.name != "export" && other != "text" => {
            Err(format!("--output {other}: text or json"))
        }
        _ if command.flags.contains(&"--quiet") => Ok(Form::Names),
        _ if command.name == "list" && !command.flags.contains(&"--pulling") => Ok(Form::Table),
        _ => Ok(Form::Lines(match command.name {
            "pull" => "pulled",
            "tag" => "tagged",
            _ => "imported",
        })),
    }
}

fn request(command: &Typed) -> Result<Request, String> {
    let names = command.arguments.clone();
    let is_set = |flag: &str| command.flags.contains(&flag);
    let wanted = match command.name {
        "list" | "check" | "df" | "prune" | "take-over" => 0..=0,
        "tag" => 2..=2,
        _ => 1..=usize::MAX,
    };
    if !wanted.contains(&names.len()) {
        let what =
            if names.len() < *wanted.start() { "an argument is missing" } else { "nothing more is expected" };
        return Err(format!("image {}: {what}; `coracle image {0} --help` says more", command.name));
    }
    Ok(match command.name {
        "import" if names.iter().filter(|name| *name == "-").count() > 1 => {
            return Err("image import: standard input can be read once".to_owned());
        }
        "import" => {
            // The daemon has another working directory.
            let files = names.iter().map(|name| match name.as_str() {
                "-" => Ok(PathBuf::from("-")),
                name => absolute("import", name),
            });
            Request::Import { files: files.collect::<Result<_, String>>()? }
        }
        "export" => match command.value("--output") {
            None => return Err("image export: -o FILE is missing".to_owned()),
            Some("-") if io::stdout().is_terminal() => {
                return Err("image export: an archive is not written to a terminal: -o FILE".to_owned());
            }
            Some("-") => Request::Export { names, file: "-".into() },
            Some(file) => Request::Export { names, file: absolute("export", file)? },
        },
        "take-over" => take_over::request(command)?,
        "list" if is_set("--pulling") => Request::Pulling {},
        "list" => Request::List {},
        "check" if is_set("--policy") && is_set("--repair") => {
            return Err("image check: --policy repairs nothing; it goes without --repair".to_owned());
        }
        "check" if is_set("--policy") => Request::Judge {},
        "check" => Request::Check { repair: is_set("--repair") },
        "df" => Request::Usage {},
        "prune" => Request::Prune {},
        "pull" => Request::Pull { names },
        "tag" => {
            let mut names = names.into_iter();
            Request::Tag { name: names.next().unwrap_or_default(), tag: names.next().unwrap_or_default() }
        }
        "explain" => Request::Explain { names },
        "pin" => Request::Pin { names },
        "unpin" => Request::Unpin { names },
        _ => Request::Remove { names, force: is_set("--force") },
    })
}

/// Sends a request like [`ask`]; the file name `-` means standard input or output of this process.
fn ask_with_streams(state: &Path, request: Request, form: Form) -> io::Result<bool> {
    let socket = socket(state);
    match request {
        Request::Export { names, file } if file == Path::new("-") => {
            let stream = Stream::to_stdout(state)?;
            let asked = exchange(&socket, &Request::Export { names, file: stream.path().to_owned() });
            match asked.map(|answers| print_failures(&answers)) {
                Ok(true) => stream.finish().map(|_| true),
                refused => {
                    stream.abandon();
                    refused
                }
            }
        }
        Request::Import { mut files } if files.iter().any(|file| file == Path::new("-")) => {
            let stream = Stream::from_stdin(state)?;
            for file in files.iter_mut().filter(|file| *file == Path::new("-")) {
                stream.path().clone_into(file);
            }
            // A worker that has read the archive to its end does not read what follows it.
            let asked = ask(&socket, &Request::Import { files }, form);
            stream.abandon();
            asked
        }
        request => ask(&socket, &request, form),
    }
}

/// Sends the request and prints the answers. Returns whether all parts of the request succeeded.
fn ask(socket: &Path, request: &Request, form: Form) -> io::Result<bool> {
    let mut out = io::stdout().lock();
    match form {
        Form::Lines(verb) => {
            let mut is_fine = true;
            let shown = Shown::new(request);
            let idle = || shown.update(socket);
            converse_patiently(socket, request, progress::INTERVAL, idle, |answer| {
                shown.clear();
                if let Answer::Failed { message } = &answer {
                    complain(message);
                    is_fine = false;
                }
                write!(out, "{}", Escaped(&lines_of(answer, verb)))
            })?;
            Ok(is_fine)
        }
        Form::Table | Form::Names | Form::Json => {
            let answers = exchange(socket, request)?;
            let is_fine = print_failures(&answers);
            match form {
                Form::Json => writeln!(out, "{}", json_text(&array(&answers), false))?,
                _ => write!(out, "{}", Escaped(&table(&answers, form == Form::Table)))?,
            }
            Ok(is_fine)
        }
    }
}

/// Prints failures; returns whether there were none.
fn print_failures(answers: &[Answer]) -> bool {
    let failed = answers.iter().filter_map(|answer| match answer {
        Answer::Failed { message } => Some(message),
        _ => None,
    });
    failed.map(|message| complain(message)).count() == 0
}

/// Formats answers as one JSON array; the member `type` of each is its kind.
fn array(answers: &[Answer]) -> serde_json::Value {
    let object = |answer: &Answer| {
        let Ok(serde_json::Value::Object(tagged)) = serde_json::to_value(answer) else {
            return serde_json::Value::Null;
        };
        let (kind, mut members) = tagged.into_iter().next().unwrap_or_default();
        members["type"] = kind.into();
        members
    };
    answers.iter().map(object).collect()
}

/// Formats images as a table, sorted by their names.
fn table(answers: &[Answer], is_wide: bool) -> String {
    let mut rows = Vec::new();
    for answer in answers {
        let Answer::Image { id, tags, digests, size_bytes, pinned, user: _ } = answer else { continue };
        let names = if tags.is_empty() { digests } else { tags };
        let none = ["<none>".to_owned()];
        for name in if names.is_empty() { none.as_slice() } else { names } {
            let mark = if *pinned { "pinned" } else { "" };
            let name = if name == "<none>" && !is_wide { id } else { name };
            rows.push((
                name.clone(),
                if is_wide { row(name, short(id), &size(*size_bytes), mark) } else { name.clone() },
            ));
        }
    }
    collect::sort(&mut rows);
    let head = is_wide.then(|| row("NAME", "ID", "SIZE", "PINNED"));
    head.into_iter()
        .chain(rows.into_iter().map(|(_, row)| row))
        .fold(String::new(), |text, row| text + &row + "\n")
}

/// The line for an image without remaining defects.
fn whole(name: &str, repaired: &[String], not_compared: u32) -> String {
    match (repaired, not_compared) {
        ([], 0) => format!("whole {name}"),
        ([], count) => {
            format!("readable {name}: {count} layers not compared: they have neither list nor blob")
        }
        (repaired, _) => format!("repaired {name}: {}", repaired.join("; ")),
    }
}

/// Formats an answer as lines of text, without failures, which are printed separately. `verb` describes the
/// operation on an image.
fn lines_of(answer: Answer, verb: &str) -> String {
    match answer {
        Answer::Image { id, tags, .. } => format!("{verb} {} {}\n", short(&id), tags.join(" ")),
        Answer::Found { id, names, size_bytes, known } => {
            let (verb, size) =
                if known { ("present", String::new()) } else { ("would import", size(size_bytes)) };
            format!("{verb} {} {} {size}", short(&id), names_of(&id, &names).join(" ")).trim_end().to_owned()
                + "\n"
        }
        Answer::Exported { file } => format!("exported {}\n", file.display()),
        Answer::Removed { name } => format!("removed {name}\n"),
        Answer::Pinned { name } => format!("pinned {name}\n"),
        Answer::Unpinned { name } => format!("unpinned {name}\n"),
        Answer::Whole { name, repaired, not_compared } => whole(&name, &repaired, not_compared) + "\n",
        Answer::Usage { used_bytes, free_bytes, images, directory } => {
            let free = free_bytes.map_or_else(|| "unknown".to_owned(), size);
            format!("{images} images use {} in {}; {free} free\n", size(used_bytes), directory.display())
        }
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
        Answer::Moved { bytes_total, reused, neighbours, registry } => format!(
            "  {}: {} were on the node, {} from neighbours, {} from the registry\n",
            size(bytes_total),
            size(reused),
            size(neighbours),
            size(registry)
        ),
        Answer::Explained { name } => format!("{name}\n"),
        Answer::Rule { text } => format!("  policy  {text}\n"),
        Answer::Accepted { name, signed } if signed.is_empty() => format!("accepted {name}\n"),
        Answer::Accepted { name, signed } => format!("accepted {name}: {}\n", signed.join("; ")),
        Answer::Endpoint { url, source, credentials, tls, proxy } => {
            let proxy = if proxy.is_empty() { proxy } else { format!("    proxy        {proxy}\n") };
            format!(
                "  {url}\n    from         {source}\n    credentials  {credentials}\n    tls          {tls}\n{proxy}"
            )
        }
        Answer::Pod(_)
        | Answer::Container(_)
        | Answer::Stats(_)
        | Answer::Event(_)
        | Answer::Started {}
        | Answer::Exited { .. }
        | Answer::Wait { .. }
        | Answer::Condition { .. }
        | Answer::Metrics { .. }
        | Answer::Failed { .. }
        | Answer::Configuration(_)
        | Answer::End {} => String::new(),
    }
}

/// The tags of an image of a containerd; without tags its names with digests. The CRI's name for the ID is left out.
fn names_of<'a>(id: &str, names: &'a [String]) -> Vec<&'a str> {
    let names = || names.iter().map(String::as_str).filter(|name| *name != id);
    let tags: Vec<&str> = names().filter(|name| !name.contains('@')).collect();
    if tags.is_empty() { names().collect() } else { tags }
}

fn row(name: &str, id: &str, size: &str, mark: &str) -> String {
    format!("{name:<60} {id:<ID_DIGITS$} {size:>9} {mark}").trim_end().to_owned()
}

fn short(id: &str) -> &str {
    let hex = id.strip_prefix("sha256:").unwrap_or(id);
    hex.get(..ID_DIGITS).unwrap_or(hex)
}

/// Formats a size as crictl does: powers of 1000, three digits.
pub(crate) fn size(bytes: u64) -> String {
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
    crate::complain([text]);
}

/// The absolute path of a file that a user named. `command` is the name of the command, for messages.
///
/// # Errors
/// A relative path in a process whose working directory was removed, or is not in its mount namespace.
pub(crate) fn absolute(command: &str, file: &str) -> Result<PathBuf, String> {
    let path = std::path::absolute(file);
    path.map_err(|error| format!("{command}: {file}: the working directory: {}", describe_io(&error)))
}

#[cfg(test)]
mod tests {
    use super::{Answer, array, lines_of, request, size, table};
    use crate::Typed;
    use coracle_control::Request;

    /// Parses a command line with the parser of the program.
    fn command(line: &'static str) -> Typed {
        let mut words = line.split_whitespace();
        let mut command = Typed { name: words.next().unwrap(), ..Typed::default() };
        while let Some(word) = words.next() {
            match word {
                "-o" => command.values.push(("--output", words.next().unwrap().to_owned())),
                "-" => command.arguments.push(word.to_owned()),
                flag if flag.starts_with('-') => command.flags.push(flag),
                _ => command.arguments.push(word.to_owned()),
            }
        }
        command
    }

    fn words(line: &str) -> Vec<String> {
        line.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn arguments_become_requests() {
        let request = |line: &'static str| request(&command(line));
        assert_eq!(request("list"), Ok(Request::List {}));
        assert_eq!(request("list --pulling"), Ok(Request::Pulling {}));
        assert_eq!(request("check"), Ok(Request::Check { repair: false }));
        assert_eq!(request("check --repair"), Ok(Request::Check { repair: true }));
        assert_eq!(request("remove a b"), Ok(Request::Remove { names: words("a b"), force: false }));
        assert_eq!(request("remove a --force"), Ok(Request::Remove { names: words("a"), force: true }));
        let Ok(Request::Export { names, file }) = request("export -o c.tar a b") else { panic!("export") };
        assert!(names == words("a b") && file.is_absolute());
        assert_eq!(request("pin a"), Ok(Request::Pin { names: words("a") }));
        assert_eq!(request("unpin a"), Ok(Request::Unpin { names: words("a") }));
        assert_eq!(request("tag a b"), Ok(Request::Tag { name: "a".into(), tag: "b".into() }));
        let Ok(Request::Import { files }) = request("import /a.tar b.tar -") else { panic!("import") };
        assert!(files[0] == std::path::Path::new("/a.tar") && files[1].is_absolute());
        for line in
            ["import", "remove", "list x", "export x", "export -o x", "check x", "pin", "tag a", "tag a b c"]
        {
            let error = request(line).unwrap_err();
            assert!(error.starts_with("image "), "{line}: {error}");
        }
    }

    fn image(name: &str, pinned: bool) -> Answer {
        Answer::Image {
            id: "sha256:0123456789abcdef".into(),
            tags: vec![name.into()],
            digests: vec![],
            size_bytes: 1_500_000,
            pinned,
            user: String::new(),
        }
    }

    #[test]
    fn images_are_sorted_in_a_table_and_as_they_come_in_json() {
        let answers = [image("b:1", true), image("a:1", false)];
        let text = table(&answers, true);
        let lines: Vec<_> = text.lines().map(|line| words(line).join(" ")).collect();
        assert_eq!(
            lines,
            ["NAME ID SIZE PINNED", "a:1 0123456789abc 1.5MB", "b:1 0123456789abc 1.5MB pinned"]
        );
        assert_eq!(table(&answers, false), "a:1\nb:1\n");
        let json = array(&answers);
        assert_eq!(
            (&json[0]["type"], &json[0]["tags"][0], &json[1]["pinned"]),
            (&"image".into(), &"b:1".into(), &false.into())
        );
        assert_eq!(lines_of(Answer::Removed { name: "x".into() }, ""), "removed x\n");
        let found = |known| Answer::Found {
            id: "sha256:0123456789abcdef".into(),
            names: words("sha256:0123456789abcdef a/b:1 a/b@sha256:01"),
            size_bytes: 1_500_000,
            known,
        };
        assert_eq!(lines_of(found(false), ""), "would import 0123456789abc a/b:1 1.5MB\n");
        assert_eq!(lines_of(found(true), ""), "present 0123456789abc a/b:1\n");
        let readable = lines_of(Answer::Whole { name: "x".into(), repaired: vec![], not_compared: 2 }, "");
        assert!(readable.starts_with("readable x: 2 layers"), "{readable}");
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
