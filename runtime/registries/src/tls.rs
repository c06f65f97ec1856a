//! TLS settings of an endpoint, as the files of the node have them.

use std::path::{Path, PathBuf};

use coracle_sandbox::describe_io;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::node_file;

/// TLS settings of one endpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tls {
    /// PEM files of root certificates in addition to the system's.
    pub ca_files: Vec<PathBuf>,
    /// PEM files of the client's certificate and key, in this order; `None`: no client certificate.
    pub client: Option<(PathBuf, PathBuf)>,
    /// Whether the server's certificate is not verified.
    pub insecure_skip_verify: bool,
}

impl Tls {
    /// Describes the files that are not usable, one text each; each begins with `source`, which
    /// names the file of the setting.
    pub(crate) fn mistakes(&self, source: &str) -> Vec<String> {
        let mut mistakes = Vec::new();
        for path in self.ca_files.iter().chain(self.client.as_ref().map(|(certificate, _)| certificate)) {
            let first = |bytes: Vec<u8>| {
                CertificateDer::pem_slice_iter(&bytes).next().transpose().map_err(|error| error.to_string())
            };
            match pem(path).and_then(first) {
                Ok(Some(_)) => {}
                Ok(None) => mistakes.push(format!("{source}: {}: no certificate is in it", path.display())),
                Err(error) => mistakes.push(format!("{source}: {}: {error}", path.display())),
            }
        }
        if let Some((_, key)) = &self.client
            && let Err(error) = private_key(key)
        {
            mistakes.push(format!("{source}: {}: {error}", key.display()));
        }
        mistakes
    }
}

fn pem(path: &Path) -> Result<Vec<u8>, String> {
    node_file::read(path).map_err(|error| describe_io(&error))
}

/// Reads the certificates of a PEM file; the error describes why there are none, without the path.
pub fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let bytes = pem(path)?;
    CertificateDer::pem_slice_iter(&bytes).collect::<Result<_, _>>().map_err(|error| error.to_string())
}

/// Reads the private key of a PEM file; the error describes why there is none, without the path.
pub fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, String> {
    let bytes = pem(path)?;
    PrivateKeyDer::from_pem_slice(&bytes).map_err(|error| error.to_string())
}
