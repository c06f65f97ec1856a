//! The endpoints of an image, computed from the node's registry configuration.
//!
//! ```text
//! certs.d/HOST/hosts.toml, else registries.yaml ─► mirrors, rewrites, TLS, headers ─┐
//! registries.yaml, docker's config.json ─► credentials by host ─────────────────────┤
//! registry of the reference ────────────────────────────────────────────────────────┴─► endpoints in order
//! ```
//! The files are read for each job, so changes need no restart, and the daemon contains no parser for them. An invalid entry
//! is ignored with a log line that names file and line; the other entries apply. Rules: CRI 8.1, REG-1 to REG-10;
//! containerd/docs/hosts.md.
#![forbid(unsafe_code)]

mod docker;
mod explain;
mod file;
mod hosts;
mod last;
pub mod node_file;
mod proxy;
mod tls;
mod toml_tree;
mod url;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use coracle_job::{Credentials, Registries as Files};
use serde::{Deserialize, Serialize};

use docker::DockerConfig;
use file::{Credential, Registries};
use hosts::HostEntry;
use last::text_of;
pub use tls::{Tls, certificates, private_key};

pub use explain::explain;
pub use proxy::{Environment, Proxy};

/// The subcommand of the worker for `coracle check`: `check-registries FILE [CERTS_DIR [DOCKER_CONFIG]]` prints one line, and
/// exits with 1, for each mistake in these files and each unusable certificate that they name.
pub const SUBCOMMAND: &str = "check-registries";

/// Executes the subcommand [`SUBCOMMAND`].
pub fn check(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let Some(file) = arguments.next().map(PathBuf::from) else { return ExitCode::FAILURE };
    let mut problems = Vec::new();
    if let Some(text) = text_of(&file, &mut problems) {
        let (registries, more) = file::parse(&file.to_string_lossy(), &text);
        problems.extend(more);
        for (name, host) in &registries.hosts {
            problems.extend(host.tls.mistakes(&format!("{}: {name}", file.display())));
        }
    }
    if let Some(folder) = arguments.next() {
        problems.extend(hosts::mistakes(Path::new(&folder)));
    }
    if let Some(docker_config) = arguments.next() {
        problems.extend(docker::load(Path::new(&docker_config)).1);
    }
    problems.iter().for_each(|problem| println!("{problem}"));
    if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// An endpoint that serves a registry's images.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// URL with scheme and prefix, without a trailing slash: `https://registry-1.docker.io/v2`.
    pub url: String,
    /// Repository path at this endpoint.
    pub repository: String,
    /// Credentials, sent only to this endpoint and the token service that it names.
    pub credentials: Credentials,
    /// Source of the credentials, as text for users.
    credentials_source: String,
    /// TLS settings of the endpoint.
    pub tls: Tls,
    /// Whether `hosts.toml` has TLS settings for the endpoint, also with the values of their defaults.
    has_tls_keys: bool,
    /// Additional headers of each request.
    pub headers: Vec<(String, String)>,
    /// Whether the endpoint is a mirror, whose requests have the parameter `ns=HOST` (REG-8).
    pub is_mirror: bool,
    /// Whether the credentials of a request are for this endpoint.
    takes_asked: bool,
    /// Whether no file has the URL: it follows from the name of the registry.
    is_default: bool,
    /// Whether the endpoint may resolve tags.
    pub can_resolve: bool,
    /// Whether the endpoint may serve content by digest.
    pub can_pull: bool,
    /// The reason why the endpoint is used, as text for users.
    source: String,
}

/// Whether an endpoint with `http://` may have TLS. containerd tries TLS first for the same endpoints (`ConfigureHosts` in
/// core/remotes/docker/config/hosts.go), but never for port 80.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Plain {
    /// The scheme of its URL is the only one.
    Only,
    /// TLS is tried first, because the configuration has TLS settings for it, or headers, which may be secrets.
    AfterTls,
    /// TLS is tried if it does not speak plain HTTP, without verifying its certificate: nothing names the scheme of a registry on
    /// this machine.
    BeforeTls,
}

impl Endpoint {
    /// Whether the endpoint may have TLS although its URL has `http://`.
    pub fn plain(&self) -> Plain {
        // Without a URL in the file, containerd takes no notice of skip_verify for a registry on this machine.
        let is_named = match self.is_default {
            true => !self.headers.is_empty(),
            false => self.has_tls_keys,
        };
        let has_settings = is_named || self.tls != Tls::default();
        match self.url.starts_with("http:") && !url::host(&self.url).ends_with(":80") {
            true if has_settings => Plain::AfterTls,
            true if self.is_default => Plain::BeforeTls,
            _ => Plain::Only,
        }
    }
}

/// The endpoints for an image, in the order in which a pull tries them.
pub fn endpoints(
    files: &Files,
    root: &Path,
    registry: &str,
    repository: &str,
    asked: &Credentials,
) -> Vec<Endpoint> {
    let copies = root.join("images");
    let (registries, problems) = file::load_or_last(&files.config, &copies);
    let (hosts, more) = hosts::load(&files.certs_dir, registry, &copies);
    let mut problems = [problems.lines, more.lines].concat();
    let (docker, more) = files.docker_config.as_deref().map(docker::load).unwrap_or_default();
    problems.extend(more);
    for problem in problems {
        eprintln!("{problem}");
    }
    let asks_default = files.has_default_endpoint;
    Known { registries, hosts, docker, asks_default }.order(registry, repository, asked)
}

/// The files that are ignored, or replaced by their last valid version: one line each.
pub fn broken(files: &Files, root: &Path) -> Vec<String> {
    let copies = root.join("images");
    let (_, problems) = file::load_or_last(&files.config, &copies);
    let first = problems.lines.into_iter().next().filter(|_| problems.is_broken);
    first.into_iter().chain(hosts::broken(&files.certs_dir, &copies)).collect()
}

/// The content of the configuration files.
#[derive(Default)]
struct Known {
    registries: Registries,
    /// Content of the registry's hosts.toml; `None` if there is none.
    hosts: Option<hosts::Hosts>,
    docker: DockerConfig,
    asks_default: bool, // after its mirrors
}

impl Known {
    fn order(&self, registry: &str, repository: &str, asked: &Credentials) -> Vec<Endpoint> {
        let has_tls =
            (self.registries.hosts.get(registry)).is_some_and(|config| config.tls != Tls::default());
        let own = url::default_url(registry, has_tls);
        let mut endpoints: Vec<Endpoint> = Vec::new();
        let candidates = self.candidates(registry, repository, &own);
        // Not that of all registries, which would get the secrets of each.
        let has_own_file = self.hosts.as_ref().is_some_and(|hosts| !hosts.is_default);
        let server = candidates.iter().find(|(entry, _)| entry.is_server && has_own_file);
        let server = server.map(|(entry, _)| entry.url.clone());
        for (entry, repository) in candidates {
            if endpoints.iter().any(|endpoint| endpoint.url == entry.url) {
                continue;
            }
            // The registry's own host, whatever scheme and path the file gives.
            let is_own = url::host(&entry.url) == url::host(&own);
            let config = match is_own && registry == url::DOCKER_HUB[0] {
                false => self.registries.hosts.get(url::host(&entry.url)),
                true => url::DOCKER_HUB.iter().find_map(|name| self.registries.hosts.get(*name)),
            };
            // The client's credentials are for the registry itself, or its server, never for a mirror (REG-7).
            let takes_asked = is_own || server.as_deref().map(url::host) == Some(url::host(&entry.url));
            let configured = config.and_then(|config| config.credential.as_ref());
            let configured = configured.or_else(|| self.docker.find(url::host(&entry.url), &repository));
            let (credentials, credentials_source) = match (asked, configured) {
                (asked, _) if takes_asked && !matches!(asked, Credentials::None) => {
                    (asked.clone(), "the request".to_owned())
                }
                (_, Some(Credential { credentials, source })) => (credentials.clone(), source.clone()),
                (_, None) => (Credentials::None, String::new()),
            };
            let tls = match entry.tls == Tls::default() {
                true => config.map(|config| config.tls.clone()).unwrap_or_default(),
                false => entry.tls,
            };
            endpoints.push(Endpoint {
                repository,
                credentials,
                credentials_source,
                tls,
                has_tls_keys: entry.has_tls_keys,
                headers: entry.headers,
                is_mirror: !is_own,
                takes_asked,
                is_default: entry.source == hosts::REGISTRY_ITSELF,
                can_resolve: entry.can_resolve,
                can_pull: entry.can_pull,
                source: entry.source,
                url: entry.url,
            });
        }
        endpoints
    }

    /// The endpoints with the repository's path at each. The registry's own endpoint is last and has no
    /// rewrites, unless a file lists it (REG-3, REG-5) or names another server.
    fn candidates(&self, registry: &str, repository: &str, own: &str) -> Vec<(HostEntry, String)> {
        let exact = self.registries.mirrors.get(registry);
        // The registry's own configuration has precedence over the default one.
        if let Some(hosts) = self.hosts.as_ref().filter(|hosts| !hosts.is_default || exact.is_none()) {
            return hosts.entries.iter().map(|entry| (entry.clone(), repository.to_owned())).collect();
        }
        let mirror = exact.or_else(|| self.registries.mirrors.get("*"));
        let is_asked = self.asks_default || mirror.is_none_or(|mirror| mirror.endpoints.is_empty());
        let mirrors = mirror.into_iter().flat_map(|mirror| {
            let repository = mirror.rewrite(repository);
            mirror
                .endpoints
                .iter()
                .map(move |(url, source)| (HostEntry::plain(url.clone(), source.clone()), repository.clone()))
        });
        let own = HostEntry::plain(own.to_owned(), hosts::REGISTRY_ITSELF.to_owned());
        mirrors.chain(is_asked.then(|| (own, repository.to_owned()))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order_of(text: &str, registry: &str, asked: &Credentials) -> Vec<String> {
        let (registries, problems) = file::parse("registries.yaml", text);
        assert_eq!(problems, Vec::<String>::new());
        Known { registries, asks_default: true, ..Known::default() }
            .order(registry, "library/busybox", asked)
            .iter()
            .map(|endpoint| {
                let tls = &endpoint.tls;
                format!(
                    "{} {} {:?}{}{}{}",
                    endpoint.url,
                    endpoint.repository,
                    endpoint.credentials,
                    if endpoint.is_mirror { " mirror" } else { "" },
                    if !tls.ca_files.is_empty() { " ca" } else { "" },
                    if tls.insecure_skip_verify { " insecure" } else { "" },
                )
            })
            .collect()
    }

    const FILE: &str = r#"
mirrors:
  docker.io:
    endpoint: ["https://reg.example:5000", "http://10.0.0.2:5000/v2/proxy", "reg.example:5000"]
    rewrite:
      "^library/(.*)": "hub/$1"
      "busybox": "never/reached"
  quay.io:
    endpoint: ["https://quay.io"]
    rewrite: {"busybox": "${0}x"}
  "*":
    endpoint: [http://localhost:5001]
configs:
  reg.example:5000:
    auth: {username: u, password: 0123}
    tls: {ca_file: /ca.pem}
  index.docker.io:
    auth: {identity_token: t}
    tls: {insecure_skip_verify: true}
"#;

    #[test]
    fn endpoints_that_may_have_either_scheme_are_those_of_containerd() {
        let yaml = "mirrors: {a: {endpoint: [http://b:5000, http://b:80, http://b, http://c:5000, https://b:5000]}}\n\
                    configs: {\"b:5000\": {tls: {insecure_skip_verify: true}}, \"b:80\": {tls: {ca_file: x}}, b: {tls: {ca_file: x}}}\n";
        let of = |registry: &str| -> Vec<Plain> {
            let (registries, _) = file::parse("registries.yaml", yaml);
            let known = Known { registries, asks_default: true, ..Known::default() };
            known.order(registry, "x", &Credentials::None).iter().map(Endpoint::plain).collect()
        };
        use Plain::{AfterTls, BeforeTls, Only};
        assert_eq!(of("a"), [AfterTls, Only, AfterTls, Only, Only, Only]);
        assert_eq!(of("localhost:5000"), [BeforeTls]);
        let written = HostEntry::plain("http://localhost:5000/v2".into(), "hosts.toml:1".into());
        let hosts = Some(hosts::Hosts { entries: vec![written], is_default: false });
        let known = Known { hosts, ..Known::default() };
        assert_eq!(known.order("localhost:5000", "x", &Credentials::None)[0].plain(), Only, "a file says so");
        assert_eq!(of("localhost:80"), [Only]);
        assert_eq!(of("localhost:443"), [Only]);
    }

    #[test]
    fn a_registry_with_mirrors_may_be_left_out() {
        let (registries, _) = file::parse("registries.yaml", FILE);
        let known = Known { registries, ..Known::default() };
        let urls = |registry: &str| -> Vec<String> {
            let endpoints = known.order(registry, "busybox", &Credentials::None);
            endpoints.into_iter().map(|endpoint| endpoint.url).collect()
        };
        assert_eq!(urls("docker.io"), ["https://reg.example:5000/v2", "http://10.0.0.2:5000/v2/proxy"]);
        assert_eq!(urls("gcr.io"), ["http://localhost:5001/v2"], "by the mirrors of all registries");
        assert_eq!(urls("quay.io"), ["https://quay.io/v2"], "it is listed as its own mirror");
        let without_mirrors = Known::default().order("gcr.io", "busybox", &Credentials::None);
        assert_eq!(without_mirrors.len(), 1, "without a mirror nothing else could be asked");
    }

    #[test]
    fn the_server_of_a_registry_gets_the_credentials_of_the_request_and_its_mirrors_do_not() {
        let plain = |url: &str| HostEntry::plain(url.to_owned(), String::new());
        let server = HostEntry { is_server: true, ..plain("https://cache/v2") };
        // The settings of the server may be those of a host.
        let entries = vec![plain("https://mirror/v2"), plain("https://cache/v2"), server];
        let hosts = hosts::Hosts { entries, is_default: false };
        let known = Known { hosts: Some(hosts), ..Known::default() };
        let asked = Credentials::Bearer("asked".into());
        let endpoints = known.order("gcr.io", "a", &asked);
        let given: Vec<bool> =
            endpoints.iter().map(|endpoint| matches!(endpoint.credentials, Credentials::Bearer(_))).collect();
        assert_eq!(given, [false, true]);
    }

    #[test]
    fn mirrors_are_tried_first_and_the_registry_itself_last() {
        let asked = Credentials::Bearer("asked".into());
        assert_eq!(
            order_of(FILE, "docker.io", &Credentials::None),
            [
                "https://reg.example:5000/v2 hub/busybox basic mirror ca",
                "http://10.0.0.2:5000/v2/proxy hub/busybox none mirror",
                "https://registry-1.docker.io/v2 library/busybox identity token insecure",
            ]
        );
        assert_eq!(
            order_of(FILE, "docker.io", &asked)[2],
            "https://registry-1.docker.io/v2 library/busybox registry token insecure",
            "the client's credentials go to the registry itself only"
        );
        assert_eq!(order_of(FILE, "docker.io", &asked)[0].split(' ').nth(2), Some("basic"));
        assert_eq!(
            order_of(FILE, "quay.io", &asked),
            ["https://quay.io/v2 library/busyboxx registry token"],
            "listed explicitly: rewritten, once"
        );
        assert_eq!(
            order_of(FILE, "gcr.io", &asked),
            [
                "http://localhost:5001/v2 library/busybox none mirror",
                "https://gcr.io/v2 library/busybox registry token",
            ]
        );
        let local = "configs:\n  localhost:5443:\n    tls: {ca_file: /ca.pem}\n  localhost:5000:\n    auth: {username: u, password: p}\n";
        for (registry, expected) in [
            ("localhost:5443", "https://localhost:5443/v2 library/busybox none ca"),
            ("localhost:5000", "http://localhost:5000/v2 library/busybox basic"),
        ] {
            assert_eq!(order_of(local, registry, &Credentials::None), [expected], "TLS settings mean TLS");
        }
        assert_eq!(order_of("", "gcr.io", &asked), ["https://gcr.io/v2 library/busybox registry token"]);
    }
}
