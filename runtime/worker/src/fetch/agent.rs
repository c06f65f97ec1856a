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

use super::protocol::Remote;
use crate::failure::invalid;

/// Bytes of a connection's buffers: a blob's body is read through the first.
const INPUT_BYTES: usize = 64 << 10;
const OUTPUT_BYTES: usize = 8 << 10;

/// Makes the agent; the proxy's URL is from the environment.
pub(super) fn agent(
    remote: &Remote,
    system_roots: &str,
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
        .tls_config(tls_config(remote, system_roots, is_tls)?)
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

fn tls_config(remote: &Remote, system_roots: &str, is_tls: bool) -> Result<TlsConfig, Failure> {
    let mut builder = TlsConfig::builder()
        .provider(TlsProvider::Rustls)
        .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .disable_verification(remote.insecure_skip_verify);
    if !is_tls {
        return Ok(builder.build());
    }
    let pem = remote.tls.as_ref().map_err(Failure::clone)?;
    let mut roots = certificates(system_roots);
    roots.extend(pem.roots.iter().flat_map(|pem| certificates(pem)));
    builder = builder.root_certs(RootCerts::new_with_certs(&roots));
    if let Some(client) = &pem.client {
        let key = PrivateKey::from_pem(client.key.as_bytes());
        let key = key.map_err(|error| invalid(format!("key {}: {error}", client.key_path)))?;
        let certificates = certificates(&client.certificate);
        builder = builder.client_cert(Some(ClientCert::new_with_certs(&certificates, key)));
    }
    Ok(builder.build())
}

/// The certificates of a PEM file; what is something else, or broken, is left out.
fn certificates(pem: &str) -> Vec<Certificate<'static>> {
    let items = parse_pem(pem.as_bytes()).filter_map(Result::ok);
    items
        .filter_map(
            |item| if let PemItem::Certificate(certificate) = item { Some(certificate) } else { None },
        )
        .collect()
}
