//! The HTTP client for one endpoint: its TLS settings, its proxy, and a separate time limit for each step of
//! a connection.

use std::time::Duration;

use coracle_job::{Failure, Timeouts};
use ureq::config::ConfigBuilder;
use ureq::http::Uri;
use ureq::typestate::AgentScope;
use ureq::unversioned::transport::time::Duration as Limit;
use ureq::unversioned::transport::{
    ConnectProxyConnector, ConnectionDetails, Connector, NextTimeout, SocksConnector, TcpConnector, Transport,
};
use ureq::{Agent, Proxy, ProxyProtocol};

use super::absolute::{AbsoluteForm, ProxyResolver};
use super::endpoint::basic;
use super::protocol::Remote;
use super::tls::{self, TlsConnector};

/// Size of a connection's buffers in bytes; bodies are read through the input buffer.
const INPUT_BYTES: usize = 64 << 10;
const OUTPUT_BYTES: usize = 8 << 10;
/// Maximum number of idle connections to a host that are kept for further requests: those of a layer's ranges, and of other layers.
const KEPT_MAX: usize = 10;
/// Hosts of an endpoint: the registry, its token service, and the blob store to which it redirects.
const HOSTS_MAX: usize = 3;

/// The settings that all HTTP clients share: the caller checks the status and follows redirects.
pub(super) fn settings() -> ConfigBuilder<AgentScope> {
    Agent::config_builder()
        .http_status_as_error(false)
        .max_redirects(0)
        .max_redirects_will_error(false)
        // Without the field a server may use any coding (RFC 9110, section 12.5.3).
        .accept_encoding("identity")
        .user_agent(concat!("coracle/", env!("CARGO_PKG_VERSION")))
        .input_buffer_size(INPUT_BYTES)
        .output_buffer_size(OUTPUT_BYTES)
}

/// Creates the HTTP client of an endpoint; `proxy` is the proxy's URL from the environment. Plain HTTP through an HTTP proxy
/// has requests with whole URLs, anything else a connection that the proxy makes.
pub(super) fn agent(
    remote: &Remote,
    system_roots: &str,
    timeouts: &Timeouts,
    security: Security,
    proxy: Option<&str>,
) -> Result<Agent, Failure> {
    let proxy = match proxy {
        // The URL may contain a password, so the error text does not contain it. The scheme is one of those that the
        // connectors below act upon.
        Some(url) => Some(
            Proxy::new(url).map_err(|_| Failure::invalid("the proxy URL in the environment is invalid"))?,
        ),
        None => None,
    };
    let [connect, tls, first_byte, silence] =
        [timeouts.connect_ms, timeouts.tls_ms, timeouts.first_byte_ms, timeouts.rate_window_ms]
            .map(Duration::from_millis);
    // Of an endpoint that speaks plain HTTP nothing is read.
    let tls_config = match security {
        Security::Plain => None,
        Security::Tls => Some(tls::config(remote, system_roots, remote.insecure_skip_verify)?),
        Security::Unverified => Some(tls::config(remote, system_roots, true)?),
    };
    let is_tls_proxy = proxy.as_ref().is_some_and(|proxy| proxy.protocol() == ProxyProtocol::Https);
    let proxy_tls = if is_tls_proxy { Some(tls::proxy_config(remote, system_roots)?) } else { None };
    let is_http = |proxy: &&Proxy| matches!(proxy.protocol(), ProxyProtocol::Http | ProxyProtocol::Https);
    let whole = proxy.as_ref().filter(|proxy| security == Security::Plain && is_http(proxy));
    let authorization = match whole.map(|proxy| (proxy.username(), proxy.password())) {
        None | Some((None, None)) => String::new(),
        Some((user, password)) => basic(user.unwrap_or_default(), password.unwrap_or_default()),
    };
    let form = AbsoluteForm { authorization, is_used: whole.is_some() };
    let whole: Option<Uri> = whole.map(|proxy| proxy.uri().clone());
    let config = settings()
        .proxy(proxy.filter(|_| whole.is_none()))
        .max_idle_connections(HOSTS_MAX * KEPT_MAX)
        .max_idle_connections_per_host(KEPT_MAX)
        .timeout_recv_response(Some(first_byte))
        .timeout_per_read(Some(silence))
        .build();
    let connector = ()
        .chain(Limited { step: SocksConnector::default(), limit: connect, what: "connection by the proxy" })
        .chain(ConnectProxyConnector::default())
        .chain(Limited { step: TcpConnector::default(), limit: connect, what: "connection" })
        .chain(Limited {
            step: TlsConnector { host: tls_config, proxy: proxy_tls, whole: whole.clone() },
            limit: tls,
            what: "TLS",
        })
        .chain(form);
    let resolver = ProxyResolver { proxy: whole, ..ProxyResolver::default() };
    Ok(Agent::with_parts(config, connector, resolver))
}

/// Protection of the connections of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Security {
    /// Plain HTTP.
    Plain,
    /// TLS with the settings of the endpoint.
    Tls,
    /// TLS without verification of the certificate.
    Unverified,
}

/// A connector for one step of a connection, with its own time limit.
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
