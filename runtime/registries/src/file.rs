//! Parses k3s' `registries.yaml`. An invalid entry affects only itself.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use coracle_job::{AuthFields, Credentials, Precedence};
use regex_lite::Regex;

use crate::last::{self, Problems};
use crate::tls::Tls;
use crate::url;
use coracle_yaml::{self as yaml, Node, Problem};

/// Maximum number of endpoints of one mirror; each may delay a pull by a timeout.
const ENDPOINTS_MAX: usize = 32;

/// The content of `registries.yaml`.
#[derive(Debug, Default)]
pub(crate) struct Registries {
    /// Mirrors by registry host of the normalised reference, or `*` (REG-1).
    pub(crate) mirrors: BTreeMap<String, Mirror>,
    /// Settings by host and port of the contacted endpoint (REG-6).
    pub(crate) hosts: BTreeMap<String, Host>,
}

/// The endpoints that are tried first for a registry.
#[derive(Debug, Default)]
pub(crate) struct Mirror {
    /// Normalised URLs, each with the file and line of its setting.
    pub(crate) endpoints: Vec<(String, String)>,
    /// Rewrites by expression, in lexical order, because a YAML mapping has no order (REG-5).
    rewrites: BTreeMap<String, (Regex, String)>,
}

/// Settings of one endpoint.
#[derive(Debug, Default)]
pub(crate) struct Host {
    pub(crate) credential: Option<Credential>,
    pub(crate) tls: Tls,
}

/// Credentials and their source.
#[derive(Clone, Debug)]
pub(crate) struct Credential {
    pub(crate) credentials: Credentials,
    /// The file and line of the setting.
    pub(crate) source: String,
}

impl Mirror {
    /// Rewrites a repository path for the mirror with the first matching expression.
    pub(crate) fn rewrite(&self, repository: &str) -> String {
        let found = self.rewrites.values().find(|(expression, _)| expression.is_match(repository));
        match found {
            Some((expression, replacement)) => {
                expression.replace(repository, replacement.as_str()).into_owned()
            }
            None => repository.to_owned(),
        }
    }
}

/// File name of the copy of the last valid file, next to the store; it has the same permissions as the file.
const LAST_GOOD: &str = "registries.last";

/// Reads the file or, if it is invalid, the copy of the last valid file in `folder`. A missing file is
/// treated as an empty one.
pub(crate) fn load_or_last(path: &Path, folder: &Path) -> (Registries, Problems) {
    let check = |text: &str| yaml::parse(text)?.map().map(drop);
    let (text, mut problems) = last::read(path, &folder.join(LAST_GOOD), check);
    let Some(text) = text else { return (Registries::default(), problems) };
    let (registries, more) = parse(&path.display().to_string(), &text);
    problems.lines.extend(more);
    (registries, problems)
}

pub(crate) fn parse(name: &str, text: &str) -> (Registries, Vec<String>) {
    let mut reader = Reader { name, registries: Registries::default(), problems: Vec::new() };
    if let Err(problem) = reader.root(text) {
        reader.problems.push(problem);
    }
    let problems = reader.problems.into_iter();
    (reader.registries, problems.map(|Problem { line, text }| format!("{name}:{line}: {text}")).collect())
}

struct Reader<'a> {
    name: &'a str,
    registries: Registries,
    problems: Vec<Problem>,
}

impl Reader<'_> {
    fn root(&mut self, text: &str) -> Result<(), Problem> {
        for (key, node) in yaml::parse(text)?.map()? {
            match key.as_str() {
                "mirrors" => self.each(node, Self::mirror),
                "configs" => self.each(node, Self::host),
                _ => self.problems.push(node.problem(&format!("{key:?} is unknown: mirrors, configs"))),
            }
        }
        Ok(())
    }

    /// Calls `read` for every entry; an invalid entry does not affect the others.
    fn each(&mut self, node: &Node, read: fn(&mut Self, &str, &Node) -> Result<(), Problem>) {
        match node.map() {
            Err(problem) => self.problems.push(problem),
            Ok(entries) => {
                for (key, node) in entries {
                    if let Err(Problem { line, text }) = read(self, key, node) {
                        self.problems.push(Problem { line, text: format!("{key}: ignored: {text}") });
                    }
                }
            }
        }
    }

    fn mirror(&mut self, registry: &str, node: &Node) -> Result<(), Problem> {
        let mut mirror = Mirror::default();
        for (key, node) in node.map()? {
            match key.as_str() {
                "endpoint" | "endpoints" => self.endpoints(&mut mirror, node)?,
                "rewrite" | "rewrites" => self.rewrites(&mut mirror, node)?,
                _ => self.problems.push(node.problem(&format!("{registry}: {key:?} is unknown"))),
            }
        }
        self.registries.mirrors.insert(registry.to_owned(), mirror);
        Ok(())
    }

    fn endpoints(&mut self, mirror: &mut Mirror, node: &Node) -> Result<(), Problem> {
        for item in node.list()? {
            match url::normalise(item.text()?) {
                Ok(url) if mirror.endpoints.len() < ENDPOINTS_MAX => {
                    mirror.endpoints.push((url, format!("{}:{}", self.name, item.line)));
                }
                Ok(_) => {
                    self.problems.push(item.problem(&format!("ignored: at most {ENDPOINTS_MAX} are allowed")))
                }
                Err(text) => self.problems.push(item.problem(&format!("ignored: {text}"))),
            }
        }
        Ok(())
    }

    fn rewrites(&mut self, mirror: &mut Mirror, node: &Node) -> Result<(), Problem> {
        for (pattern, replacement) in node.map()? {
            match Regex::new(pattern) {
                Ok(expression) => {
                    let replacement = replacement.text()?.to_owned();
                    mirror.rewrites.insert(pattern.clone(), (expression, replacement));
                }
                Err(error) => {
                    self.problems.push(replacement.problem(&format!("{pattern:?} is ignored: {error}")));
                }
            }
        }
        Ok(())
    }

    fn host(&mut self, name: &str, node: &Node) -> Result<(), Problem> {
        let mut host = Host::default();
        for (key, node) in node.map()? {
            match key.as_str() {
                "auth" => {
                    let source = format!("{}:{}", self.name, node.line);
                    let credentials = credentials(node)?;
                    let is_some = !matches!(credentials, Credentials::None);
                    host.credential = is_some.then_some(Credential { credentials, source });
                }
                "tls" => host.tls = tls(node)?,
                _ => self.problems.push(node.problem(&format!("{name}: {key:?} is unknown: auth, tls"))),
            }
        }
        self.registries.hosts.insert(name.to_owned(), host);
        Ok(())
    }
}

/// Parses the fields of the CRI's AuthConfig; fields have the same precedence as in the CRI.
fn credentials(node: &Node) -> Result<Credentials, Problem> {
    let mut fields = AuthFields::default();
    for (key, node) in node.map()? {
        let field = fields.field(key).ok_or_else(|| node.problem(&format!("auth: {key:?} is unknown")))?;
        *field = node.text()?.to_owned();
    }
    fields.credentials(Precedence::Cri).map_err(|text| node.problem(&format!("auth.auth: {text}")))
}

fn tls(node: &Node) -> Result<Tls, Problem> {
    let mut tls = Tls::default();
    let (mut cert, mut key_file) = (None, None);
    for (key, node) in node.map()? {
        let path =
            || Ok::<_, Problem>(Some(PathBuf::from(node.text()?)).filter(|path| path != Path::new("")));
        match key.as_str() {
            "ca_file" => tls.ca_files.extend(path()?),
            "cert_file" => cert = path()?,
            "key_file" => key_file = path()?,
            "insecure_skip_verify" => tls.insecure_skip_verify = node.boolean()?,
            _ => return Err(node.problem(&format!("tls: {key:?} is unknown"))),
        }
    }
    if cert.is_some() != key_file.is_some() {
        return Err(node.problem("tls: cert_file and key_file must both be set or both be empty"));
    }
    tls.client = cert.zip(key_file);
    Ok(tls)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_entry_affects_only_itself() {
        let text = "\
mirrors:
  a.example: {endpoint: [\"https://one\", \"ftp://two\", \"https://three\"]}
  b.example: [no]
  c.example:
    endpoint: [\"https://four\"]
    rewrite: {\"(\": x, \"^a\": b}
configs:
  one: {tls: {cert_file: /c}}
  two: {auth: {auth: '!!secret'}}
  three: {auth: {username: u, password: p}}
what: else
";
        let (registries, problems) = parse("f", text);
        let urls: Vec<_> = registries.mirrors["a.example"].endpoints.iter().map(|(url, _)| url).collect();
        assert_eq!(urls, ["https://one/v2", "https://three/v2"]);
        assert_eq!(registries.mirrors["c.example"].rewrite("ax"), "bx");
        assert_eq!(registries.hosts.keys().collect::<Vec<_>>(), ["three"]);
        let lines: Vec<&str> =
            problems.iter().map(|problem| problem.split(": ").next().unwrap_or_default()).collect();
        assert_eq!(lines, ["f:2", "f:3", "f:6", "f:8", "f:9", "f:11"], "{problems:#?}");
        assert!(!problems.concat().contains("secret"), "{problems:#?}");
    }

    #[test]
    fn a_file_that_is_not_yaml_has_no_mirrors() {
        let (registries, problems) = parse("f", "mirrors: [\n");
        assert!(registries.mirrors.is_empty() && problems.len() == 1, "{problems:?}");
        let (_, problems) =
            load_or_last(Path::new("/nonexistent/registries.yaml"), Path::new("/nonexistent"));
        assert!(problems.lines.is_empty());
    }
}
