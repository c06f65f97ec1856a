//! Credentials in the files of docker and podman: `config.json` or `auth.json`. Credential helpers are
//! external programs and are not executed; a log line names them.

use std::path::Path;

use coracle_job::{AuthFields, Credentials, Precedence};
use coracle_sandbox::describe_io;

use crate::file::Credential;
use crate::node_file;
use crate::url;
use coracle_yaml::{self as yaml, Node, Problem};

/// One entry of `auths`.
#[derive(Debug)]
struct Entry {
    host: String,
    /// Path of the repositories to which the entry applies (podman); empty: all.
    path: String,
    credential: Credential,
}

/// The content of a `config.json` of docker.
#[derive(Debug, Default)]
pub(crate) struct DockerConfig {
    entries: Vec<Entry>,
}

impl DockerConfig {
    /// The credentials for a repository at an endpoint's host: the entry with the longest matching path.
    pub(crate) fn find(&self, host: &str, repository: &str) -> Option<&Credential> {
        let host = one_name(host);
        let fits = |entry: &&Entry| {
            let below = repository.strip_prefix(entry.path.as_str());
            let is_below = below.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
            entry.host == host && (entry.path.is_empty() || is_below)
        };
        let found = self.entries.iter().filter(fits).max_by_key(|entry| entry.path.len());
        found.map(|entry| &entry.credential)
    }
}

/// Parses the file; the list has one line per problem. A missing file is treated as an empty one.
pub(crate) fn load(path: &Path) -> (DockerConfig, Vec<String>) {
    let name = path.display().to_string();
    match node_file::read(path) {
        Ok(bytes) => parse(&name, &String::from_utf8_lossy(&bytes)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Default::default(),
        Err(error) => (
            DockerConfig::default(),
            vec![format!("{name}: cannot be read, its credentials are ignored: {}", describe_io(&error))],
        ),
    }
}

fn parse(name: &str, text: &str) -> (DockerConfig, Vec<String>) {
    let (mut config, mut problems) = (DockerConfig::default(), Vec::new());
    // JSON is YAML except for the tabs with which docker indents it; JSON strings contain no tabs.
    if let Err(problem) = root(name, &text.replace('\t', " "), &mut config, &mut problems) {
        problems.push(problem);
    }
    let problems = problems.into_iter();
    (config, problems.map(|Problem { line, text }| format!("{name}:{line}: {text}")).collect())
}

fn root(
    name: &str,
    text: &str,
    config: &mut DockerConfig,
    problems: &mut Vec<Problem>,
) -> Result<(), Problem> {
    for (key, node) in yaml::parse(text)?.map()? {
        match key.as_str() {
            "auths" => {
                for (address, node) in node.map()? {
                    match entry(name, address, node) {
                        Ok(entry) => config.entries.extend(entry),
                        Err(Problem { line, text }) => {
                            problems.push(Problem { line, text: format!("{address}: ignored: {text}") });
                        }
                    }
                }
            }
            "credsStore" | "credHelpers" => {
                problems.push(node.problem(&format!("{key}: credential helpers are not supported")));
            }
            _ => {} // other settings of docker
        }
    }
    Ok(())
}

/// Parses one entry; `None` for an entry without credentials, which `docker login` writes if a helper stores
/// them.
fn entry(name: &str, address: &str, node: &Node) -> Result<Option<Entry>, Problem> {
    let mut fields = AuthFields::default();
    for (key, node) in node.map()? {
        if let Some(field) = fields.docker_field(key) {
            *field = node.text()?.to_owned();
        }
    }
    let credentials =
        fields.credentials(Precedence::Docker).map_err(|text| node.problem(&format!("auth: {text}")))?;
    if matches!(credentials, Credentials::None) {
        return Ok(None);
    }
    let bare = address.split_once("://").map_or(address, |(_, rest)| rest);
    let (host, path) = bare.split_once('/').unwrap_or((bare, ""));
    // docker's own addresses are API URLs: their path is a version.
    let path = if address.contains("://") { "" } else { path.trim_end_matches('/') };
    let credential = Credential { credentials, source: format!("{name}:{}", node.line) };
    Ok(Some(Entry { host: one_name(host).to_owned(), path: path.to_owned(), credential }))
}

/// The common name of a registry: all names of Docker Hub are mapped to one.
fn one_name(host: &str) -> &str {
    if url::DOCKER_HUB.contains(&host) { url::DOCKER_HUB[0] } else { host }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_found_by_host_and_path_and_helpers_are_named() {
        let text = "{\n\t\"auths\": {\n\t\t\"https://index.docker.io/v1/\": {\"auth\": \"dTpw\"},\n\
            \t\t\"reg.example:5000\": {\"identitytoken\": \"i\"},\n\
            \t\t\"quay.io\": {\"username\": \"u\", \"password\": \"p\"},\n\
            \t\t\"quay.io/org\": {\"registrytoken\": \"r\"},\n\
            \t\t\"empty.example\": {},\n\t\t\"bad.example\": {\"auth\": \"!!secret\"}\n\t},\n\
            \t\"credsStore\": \"desktop\",\n\t\"HttpHeaders\": {}\n}\n";
        let (config, problems) = parse("f", text);
        let found = |host: &str, repository: &str| {
            let found = config.find(host, repository);
            found.map_or("-".to_owned(), |found| format!("{:?} {}", found.credentials, found.source))
        };
        assert_eq!(found("registry-1.docker.io", "library/x"), "basic f:3");
        assert_eq!(found("reg.example:5000", "x"), "identity token f:4");
        assert_eq!(found("reg.example", "x"), "-");
        assert_eq!(found("quay.io", "organ/x"), "basic f:5");
        assert_eq!(found("quay.io", "org/x"), "registry token f:6");
        assert_eq!(found("empty.example", "x"), "-");
        assert_eq!(problems.len(), 2, "{problems:?}");
        assert!(problems[0].starts_with("f:8: bad.example: ignored"), "{problems:?}");
        assert!(problems[1].starts_with("f:10: credsStore"), "{problems:?}");
        assert!(!problems.concat().contains("secret"), "{problems:?}");
        let (_, problems) = parse("f", "{\"auths\": ");
        assert_eq!(problems.len(), 1);
    }
}
