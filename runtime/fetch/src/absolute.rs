//! Requests of plain HTTP through an HTTP proxy: the whole URL is in the request line (RFC 9112, section 3.2.2), as curl and
//! Go's client send it. Proxies usually permit CONNECT for the ports of TLS only (`deny CONNECT !SSL_ports` of Squid).

use ureq::config::Config;
use ureq::http::Uri;
use ureq::http::uri::Authority;
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{Buffers, ConnectionDetails, Connector, NextTimeout, Transport};

/// Resolves the name of the proxy in place of the URL's, which the proxy resolves.
#[derive(Debug, Default)]
pub(super) struct ProxyResolver {
    /// URL of the HTTP proxy for requests with the whole URL; `None`: there is none.
    pub(super) proxy: Option<Uri>,
    pub(super) usual: DefaultResolver,
}

impl Resolver for ProxyResolver {
    fn resolve(
        &self,
        uri: &Uri,
        config: &Config,
        timeout: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, ureq::Error> {
        self.usual.resolve(self.proxy.as_ref().unwrap_or(uri), config, timeout)
    }
}

/// Connector of ureq that makes requests through an HTTP proxy carry the whole URL; the last connector of the chain.
#[derive(Debug)]
pub(super) struct AbsoluteForm {
    /// Value of `Proxy-Authorization`; empty: none.
    pub(super) authorization: String,
    /// Whether requests go through an HTTP proxy that gets whole URLs; otherwise they are not changed.
    pub(super) is_used: bool,
}

impl<In: Transport> Connector<In> for AbsoluteForm {
    type Out = Box<dyn Transport>;

    fn connect(
        &self,
        details: &ConnectionDetails<'_>,
        chained: Option<In>,
    ) -> Result<Option<Self::Out>, ureq::Error> {
        let Some(transport) = chained else { return Ok(None) };
        let authority = details.uri.authority().map(Authority::as_str).filter(|_| self.is_used);
        let Some(authority) = authority else { return Ok(Some(transport.boxed())) };
        let field = match self.authorization.as_str() {
            "" => String::new(),
            value => format!("Proxy-Authorization: {value}\r\n"),
        };
        let prefix = prefix(authority);
        Ok(Some(Box::new(Rewritten { transport: transport.boxed(), prefix, field, is_first: true })))
    }
}

/// A connection whose request lines get the URL's scheme and host.
struct Rewritten {
    transport: Box<dyn Transport>,
    prefix: String,
    /// A header field with its line end.
    field: String,
    /// Whether the next bytes are the first ones of a request.
    is_first: bool,
}

impl std::fmt::Debug for Rewritten {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Rewritten") // the field has a password
    }
}

impl Transport for Rewritten {
    fn buffers(&mut self) -> &mut dyn Buffers {
        self.transport.buffers()
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), ureq::Error> {
        if !std::mem::take(&mut self.is_first) {
            return self.transport.transmit_output(amount, timeout);
        }
        let text = rewritten(&self.transport.buffers().output()[..amount], &self.prefix, &self.field);
        let mut rest = text.as_slice();
        while !rest.is_empty() {
            let output = self.transport.buffers().output();
            let (piece, more) = rest.split_at(rest.len().min(output.len()));
            output[..piece.len()].copy_from_slice(piece);
            self.transport.transmit_output(piece.len(), timeout)?;
            rest = more;
        }
        Ok(())
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, ureq::Error> {
        self.is_first = true;
        self.transport.await_input(timeout)
    }

    fn is_open(&mut self) -> bool {
        self.transport.is_open()
    }

    fn is_tls(&self) -> bool {
        self.transport.is_tls()
    }
}

/// The scheme and host of a URL in a request line, which has no user and password (RFC 9110, section 4.2.4).
fn prefix(authority: &str) -> String {
    format!("http://{}", authority.rsplit('@').next().unwrap_or_default())
}

/// The beginning of a request with `prefix` before its path and a field after its first line.
fn rewritten(request: &[u8], prefix: &str, field: &str) -> Vec<u8> {
    let after = |wanted: &[u8]| request.windows(wanted.len()).position(|found| found == wanted);
    let path = after(b" ").map_or(0, |at| at + 1);
    let line = after(b"\r\n").map_or(request.len(), |at| at + 2).max(path);
    let parts =
        [&request[..path], prefix.as_bytes(), &request[path..line], field.as_bytes(), &request[line..]];
    parts.concat()
}

#[cfg(test)]
mod tests {
    use super::{prefix, rewritten};

    #[test]
    fn the_request_line_gets_the_whole_url() {
        let text = rewritten(b"GET /v2/ HTTP/1.1\r\nhost: a:5000\r\n\r\n", "http://a:5000", "P: b\r\n");
        let expected = b"GET http://a:5000/v2/ HTTP/1.1\r\nP: b\r\nhost: a:5000\r\n\r\n";
        assert_eq!(text, expected);
        assert_eq!(prefix("a:5000"), "http://a:5000");
        assert_eq!(prefix("user:p@ss@a:5000"), "http://a:5000");
    }
}
