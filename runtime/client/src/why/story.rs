//! Reads the files of the history. Their content is not trusted: each file is read up to a maximum size and
//! only if it is regular, and lines that the daemon has not written are counted and omitted.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::Read as _;
use std::path::Path;

use coracle_base::collect;
use coracle_base::error::describe_io;
use coracle_base::history;

/// Maximum number of files that are read: many times the number that the daemon writes.
const FILES_MAX: usize = 4096;

/// The text with which each line begins.
const BEGIN: &str = "{\"time\":\"";

/// One line of the history.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Event {
    /// ID of the pod sandbox to whose file the line belongs; empty for lines that name no pod.
    pub(crate) pod_id: String,
    /// Time of the event, RFC 3339 in UTC.
    pub(crate) time: String,
    pub(crate) level: String,
    pub(crate) message: String,
    pub(crate) fields: BTreeMap<String, String>,
}

/// All lines, oldest first, and the problems of reading them.
#[derive(Debug, Default)]
pub(crate) struct Story {
    pub(crate) events: Vec<Event>,
    pub(crate) problems: Vec<String>,
}

impl Event {
    /// The value of a field; empty if the event does not have it.
    pub(crate) fn field(&self, key: &str) -> &str {
        self.fields.get(key).map_or("", String::as_str)
    }

    /// The error of the event; empty if it has none.
    pub(crate) fn error(&self) -> &str {
        match self.field("error") {
            "" => self.field("reason"),
            error => error,
        }
    }

    /// Parses a line that a daemon of any version has written; `None` if it is not such a line.
    fn parse(line: &str, pod_id: &str) -> Option<Event> {
        let serde_json::Value::Object(members) = serde_json::from_str(line).ok()? else { return None };
        let mut event = Event { pod_id: pod_id.to_owned(), ..Event::default() };
        for (key, value) in members {
            let serde_json::Value::String(value) = value else { return None };
            match key.as_str() {
                "time" => event.time = value,
                "level" => event.level = value,
                "msg" => event.message = value,
                _ => {
                    event.fields.insert(key, value);
                }
            }
        }
        (!event.time.is_empty() && !event.message.is_empty()).then_some(event)
    }
}

/// Reads the whole history of a node.
pub(crate) fn read(state: &Path) -> Story {
    let mut story = Story::default();
    story.add(&history::node(state), "", history::NODE_BYTES_MAX);
    let pods = history::pods(state);
    match fs::read_dir(&pods) {
        Ok(entries) => {
            for entry in entries.flatten().take(FILES_MAX) {
                let name = entry.file_name().to_string_lossy().into_owned();
                // A file that a daemon was writing when it was killed.
                if !name.ends_with(".new") {
                    story.add(&entry.path(), &name, history::POD_BYTES_MAX);
                }
            }
        }
        Err(error) => {
            story.problems.push(format!("no history in {}: {}", pods.display(), describe_io(&error)))
        }
    }
    // Stable: lines of one file keep their order.
    collect::sort_by(&mut story.events, |one, other| {
        (&one.time, &one.pod_id).cmp(&(&other.time, &other.pod_id))
    });
    story
}

impl Story {
    fn add(&mut self, path: &Path, pod_id: &str, bytes_max: usize) {
        let mut bytes = Vec::new();
        let opened = history::open_file(path, OpenOptions::new().read(true));
        match opened.and_then(|file| file.take(bytes_max as u64 + 1).read_to_end(&mut bytes)) {
            Ok(length) if length > bytes_max => {
                self.problems.push(format!(
                    "{}: is longer than the daemon writes it, and is left out",
                    path.display()
                ));
                return;
            }
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return,
            Err(error) => {
                self.problems.push(format!("{}: cannot be read: {}", path.display(), describe_io(&error)));
                return;
            }
        }
        let text = String::from_utf8_lossy(&bytes);
        let mut damaged = 0;
        for line in text.lines() {
            // A whole line behind one that was cut off; inside of a value the quotes have backslashes.
            let begin = line.rfind(BEGIN).unwrap_or(0);
            let event = line.get(begin..).and_then(|line| Event::parse(line, pod_id));
            damaged += usize::from(begin > 0 || event.is_none());
            self.events.extend(event);
        }
        if damaged > 0 {
            self.problems.push(format!("{}: {damaged} damaged lines are left out", path.display()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Event, read};
    use coracle_base::history;
    use coracle_base::testdir::TestDir;
    use std::fs;

    #[test]
    fn complete_lines_are_read_and_damaged_ones_reported() {
        let dir = TestDir::new("story");
        let state = dir.path();
        assert!(read(state).problems[0].contains("no history in"));
        let pods = history::pods(state);
        fs::create_dir_all(&pods).unwrap();
        let good =
            "{\"time\":\"2026-01-01T00:00:02.000Z\",\"level\":\"info\",\"msg\":\"two\",\"ctr\":\"c\"}\n";
        let node =
            "{\"time\":\"2026-01-01T00:00:01.000Z\",\"level\":\"warn\",\"msg\":\"one\",\"reason\":\"x\"}\n";
        fs::write(history::node(state), node).unwrap();
        fs::write(pods.join("a"), good).unwrap();
        let damaged = format!("{good}\0\0\0\n[1]\n{{\"time\":1}}\n{{\"msg\":\"x\"}}\n{}", &good[..20]);
        fs::write(pods.join("b"), damaged).unwrap();
        fs::write(pods.join("huge"), vec![b'x'; 1 << 20]).unwrap();
        fs::write(pods.join("bytes"), b"\xff\xfe\n").unwrap();
        fs::write(pods.join("c.new"), "half").unwrap();
        fs::write(pods.join("d"), format!("{}{good}", &good[..40])).unwrap();
        let mode = nix::sys::stat::Mode::S_IRUSR | nix::sys::stat::Mode::S_IWUSR;
        nix::unistd::mkfifo(&pods.join("fifo"), mode).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", pods.join("link")).unwrap();
        let story = read(state);
        let said: Vec<_> =
            story.events.iter().map(|event| (event.pod_id.as_str(), event.message.as_str())).collect();
        assert_eq!(said, [("", "one"), ("a", "two"), ("b", "two"), ("d", "two")]);
        assert_eq!((story.events[0].error(), story.events[1].field("ctr")), ("x", "c"));
        let problems = story.problems.join("\n");
        for expected in [
            "b: 5 damaged lines",
            "d: 1 damaged lines",
            "huge: is longer",
            "bytes: 1 damaged",
            "fifo: cannot be read: not a regular",
            "link: cannot",
        ] {
            assert!(problems.contains(expected), "{expected}: {problems}");
        }
        assert_eq!(story.problems.len(), 6, "{problems}");
        assert_eq!(Event::parse(&"[".repeat(100_000), ""), None);
    }
}
