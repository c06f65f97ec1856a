//! TLS settings of an endpoint, as the files of the node have them.

use std::path::PathBuf;

use coracle_sandbox::describe_io;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// TLS settings of one endpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tls {
    /// PEM files of root certificates in addition to the system's.
    pub(crate) ca_files: Vec<PathBuf>,
    /// PEM files of the client's certificate and key, in this order; `None`: no client certificate.
    pub(crate) client: Option<(PathBuf, PathBuf)>,
    /// Whether the server's certificate is not verified.
    pub(crate) insecure_skip_verify: bool,
}

impl Tls {
    /// Describes the files that are not usable, one text each; each begins with `source`, which
    /// names the file of the setting.
    pub(super) fn mistakes(&self, source: &str) -> Vec<String> {
        let mut mistakes = Vec::new();
        for path in self.ca_files.iter().chain(self.client.as_ref().map(|(certificate, _)| certificate)) {
            let found = CertificateDer::pem_file_iter(path).and_then(|mut found| found.next().transpose());
            match found {
                Ok(Some(_)) => {}
                Ok(None) => mistakes.push(format!("{source}: {}: no certificate is in it", path.display())),
                Err(error) => mistakes.push(format!("{source}: {}: {}", path.display(), pem_error(&error))),
            }
        }
        if let Some((_, key)) = &self.client
            && let Err(error) = PrivateKeyDer::from_pem_file(key)
        {
            mistakes.push(format!("{source}: {}: {}", key.display(), pem_error(&error)));
        }
        mistakes
    }
}

/// Describes why a PEM file cannot be used, without the library's prefix.
pub(crate) fn pem_error(error: &rustls::pki_types::pem::Error) -> String {
    match error {
        rustls::pki_types::pem::Error::Io(error) => describe_io(error),
        error => error.to_string(),
    }
}
