//! Parses containerd's `certs.d/HOST/hosts.toml`, and Docker's certificates in such a directory without that
//! file.
//!
//! | key | top level of the file | in `[host."URL"]` |
//! |---|---|---|
//! | `server` | the registry's own endpoint, tried last | not a key: ignored with a log line |
//! | `capabilities` | of the server | `pull`: by digest, `resolve`: tags; `push` has no effect |
//! | `ca`, `client`, `skip_verify` | as in a host table, for the server | TLS; paths may be relative to the folder |
//! | `header` | as in a host table, for the server | a table of headers |
//! | `override_path` | as in a host table, for the server | the URL's path is the whole prefix |
//! | `dial_timeout` | ignored: `[registry] connect_timeout` applies | ignored |

use std::path::{Path, PathBuf};

use crate::last::{self, Problems};
use crate::tls::Tls;
use crate::{toml_tree, url};
use coracle_sandbox::collect;
use coracle_yaml::{Node, Problem};

/// Maximum number of entries of a file; each may delay a pull by a timeout.
const HOSTS_MAX: usize = 32;

/// Maximum number of certificates in a directory without `hosts.toml`.
const CERTIFICATES_MAX: usize = 64;

/// Name of the directory for registries that have no directory of their own.
const DEFAULT: &str = "_default";

/// Text for the source of an endpoint that is not configured.
pub(crate) const REGISTRY_ITSELF: &str = "the registry itself";

/// The configuration of a registry.
#[derive(Debug)]
pub(crate) struct Hosts {
    /// The endpoints in order; the server is last.
    pub(crate) entries: Vec<HostEntry>,
    /// Whether the configuration is that of the default directory.
    pub(crate) is_default: bool,
}

/// A configured endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HostEntry {
    /// Normalised URL of the endpoint.
    pub(crate) url: String,
    pub(crate) can_resolve: bool,
    pub(crate) can_pull: bool,
    pub(crate) tls: Tls,
    /// Whether the entry has `ca` or `skip_verify`, whatever their values.
    pub(crate) has_tls_keys: bool,
    pub(crate) headers: Vec<(String, String)>,
    /// Whether the entry is the `server` of the file.
    pub(crate) is_server: bool,
    /// The file and line of the entry.
    pub(crate) source: String,
}

impl HostEntry {
    /// An endpoint without settings.
    pub(crate) fn plain(url: String, source: String) -> Self {
        let (tls, headers) = (Tls::default(), Vec::new());
        Self {
            url,
            can_resolve: true,
            can_pull: true,
            tls,
            has_tls_keys: false,
            headers,
            is_server: false,
            source,
        }
    }
}

/// Maximum number of directories that are read.
const FOLDERS_MAX: usize = 1024;

/// Reads the configuration of `registry`. If the file is invalid, the copy of its last valid content in
/// `copies` applies.
pub(crate) fn load(folder: &Path, registry: &str, copies: &Path) -> (Option<Hosts>, Problems) {
    if folder.as_os_str().is_empty() {
        return Default::default();
    }
    // The second form is for file systems that do not allow colons.
    let names = [registry.to_owned(), in_file_name(registry), DEFAULT.to_owned()];
    let copy_of = |name: &str| copies.join(format!("hosts-{name}.last"));
    let mut found = None;
    for name in &names {
        let folder = folder.join(name);
        if folder.is_dir() {
            found = Some((name, folder));
            break;
        }
        let _ = std::fs::remove_file(copy_of(name)); // the administrator removed the directory
    }
    let Some((name, folder)) = found else { return Default::default() };
    let (path, copy) = (folder.join("hosts.toml"), copy_of(name));
    let shown = path.display().to_string();
    let check = |text: &str| whole(&shown, &folder, text, registry).map(drop);
    let (text, mut problems) = last::read(&path, &copy, check);
    let entries = match text.map(|text| whole(&shown, &folder, &text, registry)) {
        Some(Ok((entries, more))) => {
            problems.lines.extend(more);
            Some(entries)
        }
        None if !problems.is_broken => certificates(&folder).map(|tls| {
            let own =
                HostEntry::plain(url::default_url(registry, name != DEFAULT), folder.display().to_string());
            vec![HostEntry { tls, ..own }]
        }),
        None | Some(Err(_)) => None,
    };
    (entries.map(|entries| Hosts { entries, is_default: name == DEFAULT }), problems)
}

/// The problems of all registries' files that are invalid as a whole.
pub(crate) fn broken(folder: &Path, copies: &Path) -> Vec<String> {
    let names = std::fs::read_dir(folder).into_iter().flatten().flatten().take(FOLDERS_MAX);
    let names = names.filter_map(|entry| entry.file_name().into_string().ok());
    let problems = names.map(|name| load(folder, &name, copies).1).filter(|problems| problems.is_broken);
    problems.filter_map(|problems| problems.lines.into_iter().next()).collect()
}

/// All mistakes in the files of all registries, and in the certificates that the files name. Changes no file.
pub(crate) fn mistakes(folder: &Path) -> Vec<String> {
    let names = std::fs::read_dir(folder).into_iter().flatten().flatten().take(FOLDERS_MAX);
    let mut names: Vec<String> = names.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    collect::sort(&mut names);
    let mut mistakes = Vec::new();
    for registry in names {
        let folder = folder.join(&registry);
        let path = folder.join("hosts.toml");
        let shown = path.display().to_string();
        let Some(text) = last::text_of(&path, &mut mistakes) else { continue };
        match whole(&shown, &folder, &text, &registry) {
            Ok((entries, more)) => {
                mistakes.extend(more);
                for entry in entries {
                    mistakes.extend(entry.tls.mistakes(&entry.source));
                }
            }
            Err(Problem { line, text }) => mistakes.push(format!("{shown}:{line}: {text}")),
        }
    }
    mistakes
}

/// The directory name `HOST_PORT_`, which containerd accepts, too.
fn in_file_name(registry: &str) -> String {
    match registry.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => format!("{host}_{port}_"),
        _ => registry.to_owned(),
    }
}

/// Parses a file: returns its entries and the problems of single entries; the error is a problem of the whole
/// file.
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
        let mut server: (String, String) = (url::default_url(registry, false), REGISTRY_ITSELF.to_owned());
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
        let own = HostEntry { is_server: true, ..HostEntry::plain(server.0, server.1) };
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
            Ok(_) => self.left_out(written, node.problem(&format!("at most {HOSTS_MAX} are allowed"))),
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
        // A value of another type is reported with its entry, below.
        found.is_some_and(|(_, node)| node.boolean().unwrap_or_default())
    }

    fn settings(&mut self, mut entry: HostEntry, node: &Node, is_top: bool) -> Result<HostEntry, Problem> {
        for (key, node) in node.map()? {
            entry.has_tls_keys |= matches!(key.as_str(), "ca" | "skip_verify");
            match key.as_str() {
                "capabilities" => {
                    let names = texts(node)?;
                    // Without the key, all capabilities apply.
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
                _ => self.problems.push(node.problem(&format!("{key:?} is unknown and ignored"))),
            }
        }
        Ok(entry)
    }

    /// Parses the value of `client`: one file with certificate and key, a list of pairs `[[certificate, key],
    /// …]`, or a list of files with both; only the first is used.
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
        self.problems.push(Problem { line, text: format!("{what}: ignored: {text}") });
    }
}

/// The tables of an array of tables (`[[host]]`, `[[host."URL"]]`) in order, or the single table.
fn one_or_all(node: &Node) -> Result<&[Node], Problem> {
    if node.is_sequence() { node.list() } else { Ok(std::slice::from_ref(node)) }
}

/// A string, or a list of strings.
fn texts(node: &Node) -> Result<Vec<String>, Problem> {
    match node.is_sequence() {
        true => node.list()?.iter().map(|item| item.text().map(str::to_owned)).collect(),
        false => Ok(vec![node.text()?.to_owned()]),
    }
}

/// Docker's file names: `*.crt` are root certificates; the first pair of `NAME.cert` and `NAME.key` is the
/// client's.
fn certificates(folder: &Path) -> Option<Tls> {
    let entries = std::fs::read_dir(folder).ok()?;
    let mut files: Vec<PathBuf> =
        entries.take(CERTIFICATES_MAX).filter_map(|entry| Some(entry.ok()?.path())).collect();
    collect::sort(&mut files);
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
