//! Where an image is asked for: the node's registries, as people configured them, turned into endpoints in order.
//!
//! ```text
//!   registries.yaml ─► mirrors, rewrites, credentials, TLS ─┐
//!   registry of the reference ──────────────────────────────┴─► endpoints: mirrors in order, then the registry's own
//! ```
//! Read anew for each job, so a change needs no restart, and no parser of it sits in the daemon. One bad entry disables
//! itself with a line in the log that names file and line; the rest counts. Rules: CRI facts §8.1, REG-1 to REG-10.

mod file;
mod url;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use coracle_job::{Credentials, PullJob};

use file::Registries;

/// What `coracle check` asks for: one line per mistake in FILE, on stdout; exit code 1 if there is one.
pub(crate) const SUBCOMMAND: &str = "check-registries";

/// Serves [`SUBCOMMAND`].
pub(crate) fn check(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let Some(file) = arguments.next() else { return ExitCode::FAILURE };
    let (_, problems) = file::load(Path::new(&file));
    for problem in &problems {
        println!("{problem}");
    }
    if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// One place that serves a registry's images.
#[derive(Clone, Debug)]
pub(crate) struct Endpoint {
    /// With scheme and prefix, without a trailing slash: `https://registry-1.docker.io/v2`.
    pub(crate) url: String,
    /// The repository path there.
    pub(crate) repository: String,
    /// For this endpoint and the token service it names, nobody else.
    pub(crate) credentials: Credentials,
    /// How its certificate is checked.
    pub(crate) tls: Tls,
    /// A mirror is asked with `ns=HOST` (REG-8).
    pub(crate) is_mirror: bool,
}

/// TLS of one endpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tls {
    /// PEM file of roots that are trusted beside the system's.
    pub(crate) ca_file: Option<PathBuf>,
    /// PEM file of the client's certificate.
    pub(crate) cert_file: Option<PathBuf>,
    /// PEM file of its key.
    pub(crate) key_file: Option<PathBuf>,
    /// Do not check the server's certificate.
    pub(crate) insecure_skip_verify: bool,
}

/// The endpoints for a pull, in the order to try them.
pub(crate) fn endpoints(job: &PullJob) -> Vec<Endpoint> {
    let (registries, problems) = file::load(&job.registries);
    for problem in problems {
        eprintln!("{problem}");
    }
    order(&registries, &job.registry, &job.repository, &job.credentials)
}

fn order(registries: &Registries, registry: &str, repository: &str, asked: &Credentials) -> Vec<Endpoint> {
    let own = url::default_url(registry);
    let mut endpoints: Vec<Endpoint> = Vec::new();
    let mirror = registries.mirrors.get(registry).or_else(|| registries.mirrors.get("*"));
    let mirrors = mirror.into_iter().flat_map(|mirror| {
        let repository = mirror.rewrite(repository);
        mirror.endpoints.iter().map(move |url| (url.clone(), repository.clone()))
    });
    // The registry's own comes last, and under its own name, unless the file lists it (REG-3, REG-5).
    for (url, repository) in mirrors.chain([(own.clone(), repository.to_owned())]) {
        if endpoints.iter().any(|endpoint| endpoint.url == url) {
            continue;
        }
        let is_own = url == own;
        let config = match is_own && registry == "docker.io" {
            false => registries.hosts.get(url::host(&url)),
            true => DOCKER_HUB.iter().find_map(|name| registries.hosts.get(*name)),
        };
        let configured = || config.map(|config| config.credentials.clone()).unwrap_or_default();
        endpoints.push(Endpoint {
            repository,
            // The client's are for the registry itself, never for a mirror of it (REG-7).
            credentials: match asked {
                Credentials::None => configured(),
                asked if is_own => asked.clone(),
                _ => configured(),
            },
            tls: config.map(|config| config.tls.clone()).unwrap_or_default(),
            is_mirror: !is_own,
            url,
        });
    }
    endpoints
}

/// The names people give Docker Hub in `configs`.
const DOCKER_HUB: [&str; 3] = ["registry-1.docker.io", "docker.io", "index.docker.io"];

#[cfg(test)]
mod tests {
    use super::*;

    fn order_of(text: &str, registry: &str, asked: &Credentials) -> Vec<String> {
        let (registries, problems) = file::parse("registries.yaml", text);
        assert_eq!(problems, Vec::<String>::new());
        order(&registries, registry, "library/busybox", asked)
            .iter()
            .map(|endpoint| {
                let tls = &endpoint.tls;
                format!(
                    "{} {} {:?}{}{}{}",
                    endpoint.url,
                    endpoint.repository,
                    endpoint.credentials,
                    if endpoint.is_mirror { " mirror" } else { "" },
                    if tls.ca_file.is_some() { " ca" } else { "" },
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
    fn mirrors_come_first_and_the_registry_itself_last() {
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
        assert_eq!(order_of("", "gcr.io", &asked), ["https://gcr.io/v2 library/busybox registry token"]);
    }
}
