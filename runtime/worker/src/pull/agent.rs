//! HTTP to one endpoint: its TLS, its proxy, and a limit of its own for each step of making a connection.

use std::sync::Arc;
use std::time::Duration;

use coracle_job::{Failure, Patience};
use ureq::tls::{Certificate, ClientCert, PemItem, PrivateKey, RootCerts, TlsConfig, TlsProvider, parse_pem};
use ureq::unversioned::resolver::DefaultResolver;
use ureq::unversioned::transport::time::Duration as Limit;
use ureq::unversioned::transport::{
    ConnectProxyConnector, ConnectionDetails, Connector, NextTimeout, RustlsConnector, TcpConnector,
    Transport,
};
use ureq::{Agent, Proxy};

use crate::failure::{invalid, io_failure};
use crate::registries::Endpoint;

/// Bytes of a connection's buffers: a blob's body is read through the first.
const INPUT_BYTES: usize = 64 << 10;
const OUTPUT_BYTES: usize = 8 << 10;

/// Bundles of trusted roots, as distributions place them; the first that is there counts.
const ROOTS: &[&str] = &[
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/cert.pem",
    "/etc/ssl/ca-bundle.pem",
];

/// Makes the agent; the proxy's URL is from the environment.
pub(super) fn agent(
    endpoint: &Endpoint,
    patience: &Patience,
    is_tls: bool,
    proxy: Option<&str>,
) -> Result<Agent, Failure> {
    let proxy = match proxy {
        // Its text may hold a password.
        Some(url) => {
            Some(Proxy::new(url).map_err(|_| invalid("the proxy of the environment: not a proxy's URL"))?)
        }
        None => None,
    };
    let [connect, tls, first_byte, silence] =
        [patience.connect_ms, patience.tls_ms, patience.first_byte_ms, patience.rate_window_ms]
            .map(Duration::from_millis);
    let config = Agent::config_builder()
        .tls_config(tls_config(endpoint, is_tls)?)
        .proxy(proxy)
        .http_status_as_error(false)
        .max_redirects(0)
        .max_redirects_will_error(false)
        .user_agent(concat!("coracle/", env!("CARGO_PKG_VERSION")))
        .input_buffer_size(INPUT_BYTES)
        .output_buffer_size(OUTPUT_BYTES)
        .timeout_recv_response(Some(first_byte))
        .timeout_per_read(Some(silence))
        .build();
    let connector =
        ().chain(ConnectProxyConnector::default())
            .chain(Limited { step: TcpConnector::default(), limit: connect, what: "connection" })
            .chain(Limited { step: RustlsConnector::default(), limit: tls, what: "TLS" });
    Ok(Agent::with_parts(config, connector, DefaultResolver::default()))
}

/// One step of making a connection, with a limit that starts with it.
#[derive(Debug)]
struct Limited<C> {
    step: C,
    limit: Duration,
    what: &'static str,
}

impl<In: Transport, C: Connector<In>> Connector<In> for Limited<C> {
    type Out = C::Out;

    fn connect(
        &self,
        details: &ConnectionDetails<'_>,
        chained: Option<In>,
    ) -> Result<Option<Self::Out>, ureq::Error> {
        let timeout =
            NextTimeout { after: Limit::from_millis(self.limit.as_millis() as u64), ..details.timeout };
        let details = ConnectionDetails {
            uri: details.uri,
            addrs: details.addrs.clone(),
            config: details.config,
            request_level: details.request_level,
            resolver: details.resolver,
            now: (details.current_time)(),
            timeout,
            current_time: details.current_time.clone(),
            run_connector: details.run_connector.clone(),
            register_shutdown: details.register_shutdown.clone(),
        };
        self.step.connect(&details, chained).map_err(|error| match error {
            ureq::Error::Timeout(_) => {
                let text = format!("no {} within {:?}", self.what, self.limit);
                ureq::Error::Io(std::io::Error::new(std::io::ErrorKind::TimedOut, text))
            }
            error => error,
        })
    }
}

fn tls_config(endpoint: &Endpoint, is_tls: bool) -> Result<TlsConfig, Failure> {
    let tls = &endpoint.tls;
    let mut builder = TlsConfig::builder()
        .provider(TlsProvider::Rustls)
        .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .disable_verification(tls.insecure_skip_verify);
    if !is_tls {
        return Ok(builder.build());
    }
    let read = |path: &std::path::Path| std::fs::read(path).map_err(|error| io_failure("read", path, &error));
    let mut roots = system_roots();
    for path in &tls.ca_files {
        roots.extend(certificates(&read(path)?));
    }
    builder = builder.root_certs(RootCerts::new_with_certs(&roots));
    if let Some((cert, key)) = &tls.client {
        let key_pem = PrivateKey::from_pem(&read(key)?);
        let key = key_pem.map_err(|error| invalid(format!("key {}: {error}", key.display())))?;
        builder = builder.client_cert(Some(ClientCert::new_with_certs(&certificates(&read(cert)?), key)));
    }
    Ok(builder.build())
}

fn system_roots() -> Vec<Certificate<'static>> {
    let configured = std::env::var_os("SSL_CERT_FILE").map(std::path::PathBuf::from);
    let mut files = configured.into_iter().chain(ROOTS.iter().map(std::path::PathBuf::from));
    files.find_map(|path| std::fs::read(path).ok()).map(|pem| certificates(&pem)).unwrap_or_default()
}

/// The certificates of a PEM file; what is something else, or broken, is left out.
fn certificates(pem: &[u8]) -> Vec<Certificate<'static>> {
    let items = parse_pem(pem).filter_map(Result::ok);
    items
        .filter_map(
            |item| if let PemItem::Certificate(certificate) = item { Some(certificate) } else { None },
        )
        .collect()
}
