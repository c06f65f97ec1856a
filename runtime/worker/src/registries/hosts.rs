//! containerd's `certs.d/HOST/hosts.toml`, and the certificates that Docker users put into such a folder without one.
//!
//! | key | at the top | in `[host."URL"]` |
//! |---|---|---|
//! | `server` | the registry's own endpoint, asked last | |
//! | `capabilities` | of the server | `pull`: by digest, `resolve`: tags; `push` is of no use here |
//! | `ca`, `client`, `skip_verify` | as beside | TLS; paths may be relative to the folder |
//! | `header` | as beside | a table of headers |
//! | `override_path` | as beside | the URL's path is the whole prefix |
//! | `dial_timeout` | read over: `[registry] connect_timeout` counts | the same |

use std::path::{Path, PathBuf};

use super::last::{self, Problems};
use super::{Tls, toml_tree, url};
use crate::yaml::{Node, Problem};

/// Most entries of a file; each is a wait when the uplink is down.
const HOSTS_MAX: usize = 32;

/// Most certificates that are taken from a folder without a file.
const CERTIFICATES_MAX: usize = 64;

/// The folder for registries that have none of their own.
const DEFAULT: &str = "_default";

/// The source of an endpoint that no file names.
pub(super) const REGISTRY_ITSELF: &str = "the registry itself";

/// What a folder says of a registry.
#[derive(Debug)]
pub(super) struct Hosts {
    /// In order, the server last.
    pub(super) entries: Vec<HostEntry>,
    /// It is the folder for all registries.
    pub(super) is_default: bool,
}

/// An endpoint as a file describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HostEntry {
    /// Normalised.
    pub(super) url: String,
    pub(super) can_resolve: bool,
    pub(super) can_pull: bool,
    pub(super) tls: Tls,
    pub(super) headers: Vec<(String, String)>,
    /// File and line.
    pub(super) source: String,
}

impl HostEntry {
    /// One of which nothing but the URL is said.
    pub(super) fn plain(url: String, source: String) -> Self {
        let (tls, headers) = (Tls::default(), Vec::new());
        Self { url, can_resolve: true, can_pull: true, tls, headers, source }
    }
}

/// Most folders that are looked at.
const FOLDERS_MAX: usize = 1024;

/// Reads what the folder says of `registry`. A file that is no TOML counts as it last was, by a copy in `copies`.
pub(super) fn load(folder: &Path, registry: &str, copies: &Path) -> (Option<Hosts>, Problems) {
    if folder.as_os_str().is_empty() {
        return Default::default();
    }
    // The second form is for file systems that take no colons.
    let names = [registry.to_owned(), in_file_name(registry), DEFAULT.to_owned()];
    let Some((name, folder)) =
        names.iter().map(|name| (name, folder.join(name))).find(|(_, path)| path.is_dir())
    else {
        return Default::default();
    };
    let (path, copy) = (folder.join("hosts.toml"), copies.join(format!("hosts-{name}.last")));
    let shown = path.display().to_string();
    let check = |text: &str| whole(&shown, &folder, text, registry).map(drop);
    let (text, mut problems) = last::read(&path, &copy, check);
    let entries = match text.map(|text| whole(&shown, &folder, &text, registry)) {
        Some(Ok((entries, more))) => {
            problems.lines.extend(more);
            Some(entries)
        }
        None if !problems.is_broken => certificates(&folder).map(|tls| {
            let own = HostEntry::plain(url::default_url(registry), folder.display().to_string());
            vec![HostEntry { tls, ..own }]
        }),
        None | Some(Err(_)) => None,
    };
    (entries.map(|entries| Hosts { entries, is_default: name == DEFAULT }), problems)
}

/// What is wrong with the files of all registries, as far as a file does not count for it.
pub(super) fn broken(folder: &Path, copies: &Path) -> Vec<String> {
    let names = std::fs::read_dir(folder).into_iter().flatten().flatten().take(FOLDERS_MAX);
    let names = names.filter_map(|entry| entry.file_name().into_string().ok());
    let problems = names.map(|name| load(folder, &name, copies).1).filter(|problems| problems.is_broken);
    problems.filter_map(|problems| problems.lines.into_iter().next()).collect()
}

/// `HOST_PORT_`, as containerd also looks for it.
fn in_file_name(registry: &str) -> String {
    match registry.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => format!("{host}_{port}_"),
        _ => registry.to_owned(),
    }
}

/// The entries of a text, and what is wrong with some; or with all of it.
fn whole(
    name: &str,
    folder: &Path,
    text: &str,
    registry: &str,
) -> Result<(Vec<HostEntry>, Vec<String>), Problem> {
    let mut reader = Reader { name, folder, problems: Vec::new() };
    let entries = reader.entries(&toml_tree::parse(text)?, registry)?;
    let problems = reader.problems.into_iter();
    Ok((entries, problems.map(|Problem { line, text }| format!("{name}:{line}: {text}")).collect()))
}

struct Reader<'a> {
    name: &'a str,
    folder: &'a Path,
    problems: Vec<Problem>,
}

impl Reader<'_> {
    fn entries(&mut self, root: &Node, registry: &str) -> Result<Vec<HostEntry>, Problem> {
        let mut entries = Vec::new();
        let mut server: (String, String) = (url::default_url(registry), REGISTRY_ITSELF.to_owned());
        let is_path_whole = self.is_path_whole(root);
        for (key, node) in root.map()? {
            match key.as_str() {
                "server" => match node.text().map(|text| url::normalise_host(text, is_path_whole)) {
                    Ok(Ok(url)) => server = (url, format!("{}:{}", self.name, node.line)),
                    Ok(Err(text)) => self.left_out("server", node.problem(&text)),
                    Err(problem) => self.left_out("server", problem),
                },
                "host" => {
                    for hosts in one_or_all(node)? {
                        for (written, node) in hosts.map()? {
                            for node in one_or_all(node)? {
                                self.add_host(&mut entries, written, node);
                            }
                        }
                    }
                }
                _ => {}
            }
        }
        let own = HostEntry::plain(server.0, server.1);
        match self.settings(own.clone(), root, true) {
            Ok(own) => entries.push(own),
            Err(problem) => {
                self.left_out("server", problem);
            }
        }
        Ok(entries)
    }

    fn add_host(&mut self, entries: &mut Vec<HostEntry>, written: &str, node: &Node) {
        match self.host(written, node) {
            Ok(entry) if entries.len() < HOSTS_MAX => entries.push(entry),
            Ok(_) => self.left_out(written, node.problem(&format!("{HOSTS_MAX} are enough"))),
            Err(problem) => self.left_out(written, problem),
        }
    }

    fn host(&mut self, written: &str, node: &Node) -> Result<HostEntry, Problem> {
        let url =
            url::normalise_host(written, self.is_path_whole(node)).map_err(|text| node.problem(&text))?;
        let entry = HostEntry::plain(url, format!("{}:{}", self.name, node.line));
        self.settings(entry, node, false)
    }

    fn is_path_whole(&self, node: &Node) -> bool {
        let found =
            node.map().ok().and_then(|entries| entries.iter().find(|(key, _)| key == "override_path"));
        // One that is no boolean is a problem of its entry, below.
        found.is_some_and(|(_, node)| node.boolean().unwrap_or_default())
    }

    fn settings(&mut self, mut entry: HostEntry, node: &Node, is_top: bool) -> Result<HostEntry, Problem> {
        for (key, node) in node.map()? {
            match key.as_str() {
                "capabilities" => {
                    let names = texts(node)?;
                    // None at all means that nothing is said.
                    let has = |name: &str| names.is_empty() || names.iter().any(|known| known == name);
                    (entry.can_resolve, entry.can_pull) = (has("resolve"), has("pull"));
                }
                "ca" => entry.tls.ca_files = texts(node)?.iter().map(|path| self.folder.join(path)).collect(),
                "client" => entry.tls.client = self.client(node)?,
                "skip_verify" => entry.tls.insecure_skip_verify = node.boolean()?,
                "override_path" => drop(node.boolean()?),
                "header" => {
                    for (name, node) in node.map()? {
                        let values = texts(node)?;
                        entry.headers.extend(values.into_iter().map(|value| (name.clone(), value)));
                    }
                }
                "dial_timeout" => {}
                "server" | "host" if is_top => {}
                _ => self.problems.push(node.problem(&format!("{key:?} is unknown and passed over"))),
            }
        }
        Ok(entry)
    }

    /// One file with both, `[[certificate, key], …]`, or a list of files with both; the first counts.
    fn client(&self, node: &Node) -> Result<Option<(PathBuf, PathBuf)>, Problem> {
        let first = if node.is_sequence() { node.list()?.first() } else { Some(node) };
        let Some(first) = first else { return Ok(None) };
        match texts(first)?.as_slice() {
            [both] => Ok(Some((self.folder.join(both), self.folder.join(both)))),
            [certificate, key] if key.is_empty() => {
                Ok(Some((self.folder.join(certificate), self.folder.join(certificate))))
            }
            [certificate, key] => Ok(Some((self.folder.join(certificate), self.folder.join(key)))),
            _ => Err(node.problem("client: neither a file nor a pair of a certificate and its key")),
        }
    }

    fn left_out(&mut self, what: &str, Problem { line, text }: Problem) {
        self.problems.push(Problem { line, text: format!("{what}: left out: {text}") });
    }
}

/// Every table of an array of tables (`[[host]]`, `[[host."URL"]]`) in its order, or the one table.
fn one_or_all(node: &Node) -> Result<&[Node], Problem> {
    if node.is_sequence() { node.list() } else { Ok(std::slice::from_ref(node)) }
}

/// A text, or a list of texts.
fn texts(node: &Node) -> Result<Vec<String>, Problem> {
    match node.is_sequence() {
        true => node.list()?.iter().map(|item| item.text().map(str::to_owned)).collect(),
        false => Ok(vec![node.text()?.to_owned()]),
    }
}

/// `*.crt` are roots; of `NAME.cert` and `NAME.key` the first pair is the client's.
fn certificates(folder: &Path) -> Option<Tls> {
    let entries = std::fs::read_dir(folder).ok()?;
    let mut files: Vec<PathBuf> =
        entries.take(CERTIFICATES_MAX).filter_map(|entry| Some(entry.ok()?.path())).collect();
    files.sort();
    let with = |extension: &'static str| {
        files.iter().filter(move |path| path.extension().is_some_and(|found| found == extension)).cloned()
    };
    let pair = |certificate: PathBuf| {
        let key = certificate.with_extension("key");
        key.is_file().then_some((certificate, key))
    };
    let tls = Tls { ca_files: with("crt").collect(), client: with("cert").find_map(pair), ..Tls::default() };
    (tls != Tls::default()).then_some(tls)
}

#[cfg(test)]
mod tests;
