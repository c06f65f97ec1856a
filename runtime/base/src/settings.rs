//! Settings that the configuration reads and crates above this one take, so that neither depends on the other.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::error::{Error, Kind};

/// Setting: whether containers get SELinux labels.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Selinux {
    /// Labels are used if the kernel has SELinux and its policy has types for containers.
    #[default]
    Auto,
    /// Required: no container runs without a label.
    Required,
    /// Containers get no labels; requested labels are ignored.
    Off,
}

/// Configuration of the streaming server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Streaming {
    /// The address on which the server listens.
    pub address: IpAddr,
    /// TCP port; 0: an ephemeral port.
    pub port: u16,
    /// PEM certificate file for TLS, requires `key`; `None`: no TLS.
    pub certificate: Option<PathBuf>,
    /// PEM key file for TLS, requires `certificate`; `None`: no TLS.
    pub key: Option<PathBuf>,
    /// Maximum time without data in a session; zero: no limit.
    pub idle_timeout: Duration,
    /// Time limit from the connection to the start of the session.
    pub creation_timeout: Duration,
    /// Maximum number of concurrent sessions.
    pub sessions_max: usize,
}

impl Streaming {
    /// Checks that certificate and key are given together.
    ///
    /// # Errors
    /// `InvalidArgument`: a certificate without a key, or a key without a certificate.
    pub fn check(&self) -> Result<(), Error> {
        if self.certificate.is_some() == self.key.is_some() {
            return Ok(());
        }
        Err(Error::new(Kind::InvalidArgument, "[streaming]: tls_cert_file and tls_key_file go together"))
    }
}

impl Default for Streaming {
    fn default() -> Streaming {
        Streaming {
            address: IpAddr::from([127, 0, 0, 1]),
            port: 0,
            certificate: None,
            key: None,
            idle_timeout: Duration::ZERO,
            creation_timeout: Duration::ZERO,
            sessions_max: 0,
        }
    }
}
