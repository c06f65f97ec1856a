//! Collects the files and environment variables of the node that a fetcher needs.

use std::path::Path;

use coracle_job::{Failure, FailureKind, Timeouts};
use coracle_sandbox::describe_io;

use super::protocol::{ClientPem, Pem, Remote, Setup};
use coracle_registries::node_file;
use coracle_registries::{Endpoint, Environment, Tls};

/// Paths of the root certificate bundles of distributions; the first existing one is used.
const ROOTS: &[&str] = &[
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/cert.pem",
    "/etc/ssl/ca-bundle.pem",
];

/// Collects all settings that the fetcher needs for these endpoints.
pub(super) fn gather(endpoints: &[Endpoint], registry: &str, timeouts: Timeouts) -> Setup {
    Setup {
        registry: registry.to_owned(),
        remotes: endpoints.iter().map(remote).collect(),
        timeouts,
        environment: Environment::read(),
        system_roots: system_roots(),
    }
}

fn remote(endpoint: &Endpoint) -> Remote {
    Remote {
        url: endpoint.url.clone(),
        repository: endpoint.repository.clone(),
        credentials: endpoint.credentials.clone(),
        headers: endpoint.headers.clone(),
        is_mirror: endpoint.is_mirror,
        plain: endpoint.plain(),
        insecure_skip_verify: endpoint.tls.insecure_skip_verify,
        tls: pem(&endpoint.tls),
    }
}

fn pem(tls: &Tls) -> Result<Pem, Failure> {
    // PEM text; other content is ignored.
    let read = |path: &Path| {
        let unreadable = |error| format!("read {}: {}", path.display(), describe_io(&error));
        let bytes =
            node_file::read(path).map_err(|error| Failure::new(FailureKind::Internal, unreadable(error)))?;
        Ok::<_, Failure>(String::from_utf8_lossy(&bytes).into_owned())
    };
    let roots = tls.ca_files.iter().map(|path| read(path)).collect::<Result<_, _>>()?;
    let client = |(certificate, key): &(std::path::PathBuf, std::path::PathBuf)| {
        let (key_path, key) = (key.display().to_string(), read(key)?);
        Ok::<_, Failure>(ClientPem { certificate: read(certificate)?, key, key_path })
    };
    Ok(Pem { roots, client: tls.client.as_ref().map(client).transpose()? })
}

fn system_roots() -> String {
    let configured = std::env::var_os("SSL_CERT_FILE").map(std::path::PathBuf::from);
    let mut files = configured.into_iter().chain(ROOTS.iter().map(std::path::PathBuf::from));
    let bytes = files.find_map(|path| node_file::read(&path).ok()).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}
