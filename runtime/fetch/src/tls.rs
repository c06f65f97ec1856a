//! TLS of a fetcher's connections: rustls behind ureq's traits, with the node's root certificates. ureq's own
//! TLS is not used because a server may present the certificate of an authority (CA:TRUE) as its own:
//! `openssl req -x509` creates such certificates, and Docker's guide for a private registry uses one. Go
//! clients accept such a certificate; webpki refuses it, so this module decides that case.
//!
//! Such a certificate is accepted if it equals, byte for byte, one that the node trusts, or is signed by one, is valid
//! now, and has the server's name; the handshake is verified as usual. Other certificates signed by it do not become
//! trusted.

use std::fmt;
use std::io::{Read, Write};
use std::sync::Arc;

use coracle_job::Failure;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{WantsClientCert, WebPkiServerVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{
    AlertDescription, CertificateError, ClientConfig, ClientConnection, ConfigBuilder, DigitallySignedStruct,
    OtherError, RootCertStore, SignatureScheme, StreamOwned,
};
use ureq::http::Uri;
use ureq::unversioned::transport::{
    Buffers, ConnectionDetails, Connector, Either, LazyBuffers, NextTimeout, Transport, TransportAdapter,
};
use webpki::{EndEntityCert, KeyUsage};

use super::certificate::{self, Certificate};
use super::elliptic;
use super::protocol::Remote;

/// Builds the TLS configuration of an endpoint's connections.
///
/// # Errors
/// A file that the registry's configuration names could not be read; the client's key is invalid.
pub(super) fn config(
    remote: &Remote,
    system_roots: &str,
    is_unverified: bool,
) -> Result<Arc<ClientConfig>, Failure> {
    let pem = remote.tls.as_ref().map_err(Failure::clone)?;
    let builder = build(is_unverified, system_roots, &pem.roots)?;
    let config = match &pem.client {
        None => builder.with_no_client_auth(),
        Some(client) => {
            let key = PrivateKeyDer::from_pem_slice(client.key.as_bytes());
            let key = key.map_err(|error| Failure::invalid(format!("key {}: {error}", client.key_path)))?;
            let chain = certificates(&client.certificate).collect();
            let taken = builder.with_client_auth_cert(chain, key);
            taken.map_err(|error| Failure::invalid(format!("key {}: {error}", client.key_path)))?
        }
    };
    Ok(Arc::new(config))
}

/// A configuration that trusts these roots, without a decision about client certificates.
fn build(
    is_unverified: bool,
    system_roots: &str,
    roots: &[String],
) -> Result<ConfigBuilder<ClientConfig, WantsClientCert>, Failure> {
    let provider = Arc::new(elliptic::provider());
    let verifier: Arc<dyn ServerCertVerifier> = match is_unverified {
        true => Arc::new(Unverified(Arc::clone(&provider))),
        false => {
            let texts = std::iter::once(system_roots).chain(roots.iter().map(String::as_str));
            Arc::new(Verifier::new(texts.flat_map(certificates).collect(), Arc::clone(&provider)))
        }
    };
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| Failure::invalid(format!("TLS: {error}")))?;
    Ok(builder.dangerous().with_custom_certificate_verifier(verifier))
}

/// Builds the TLS configuration of the connections to a proxy: the same certificates are trusted as for the endpoint, but
/// verification cannot be off, and no client certificate is sent, because these settings are for the endpoint.
///
/// # Errors
/// A file that the registry's configuration names could not be read.
pub(super) fn proxy_config(remote: &Remote, system_roots: &str) -> Result<Arc<ClientConfig>, Failure> {
    let roots = remote.tls.as_ref().map_err(Failure::clone)?.roots.clone();
    Ok(Arc::new(build(false, system_roots, &roots)?.with_no_client_auth()))
}

/// The certificates of a PEM file; other or malformed items are ignored.
fn certificates(pem: &str) -> impl Iterator<Item = CertificateDer<'static>> {
    let found: Vec<_> = CertificateDer::pem_slice_iter(pem.as_bytes()).filter_map(Result::ok).collect();
    found.into_iter()
}

/// The offered protocols and ciphers, for the error text if a server accepts none of them.
const OFFERED: &str = "no protocol in common: TLS 1.3, or TLS 1.2 with ECDHE and AES-GCM or ChaCha20-Poly1305; \
                       X25519, P-256, P-384, P-521; certificates with RSA from 2048 bits, ECDSA or Ed25519";

/// Explains why a certificate or a handshake was refused; `None` for errors that do not concern a certificate.
pub(super) fn explain(error: &rustls::Error) -> Option<String> {
    let why = match error {
        rustls::Error::InvalidCertificate(why) => why,
        rustls::Error::NoCertificatesPresented => return Some("it presented no certificate".to_owned()),
        rustls::Error::AlertReceived(AlertDescription::HandshakeFailure)
        | rustls::Error::PeerIncompatible(_) => {
            return Some(format!("{error}: {OFFERED}"));
        }
        _ => return None,
    };
    const TRUST: &str =
        "add it to ca_file of the registry (registries.yaml) or to ca of hosts.toml, if it is right";
    Some(match why {
        CertificateError::UnknownIssuer => {
            format!("invalid peer certificate: signed by an authority that this node does not trust: {TRUST}")
        }
        CertificateError::Other(other) if is_authority(other) => {
            format!(
                "invalid peer certificate: it signed itself, or an authority that this node does not trust signed it: \
                 {TRUST}"
            )
        }
        CertificateError::UnsupportedSignatureAlgorithmContext {
            signature_algorithm_id: signature, ..
        } => {
            format!(
                "invalid peer certificate: it is signed with {}, which is not supported",
                certificate::algorithm_name(signature)
            )
        }
        CertificateError::UnsupportedSignatureAlgorithmForPublicKeyContext {
            signature_algorithm_id: signature,
            public_key_algorithm_id: key,
        } => format!(
            "invalid peer certificate: {} with a key of type {} is not supported",
            certificate::algorithm_name(signature),
            certificate::algorithm_name(key)
        ),
        CertificateError::BadSignature => format!("{error}: RSA keys need 2048 to 8192 bits"),
        _ => error.to_string(),
    })
}

/// Whether webpki refused a certificate because it is the certificate of an authority.
fn is_authority(error: &OtherError) -> bool {
    error.0.downcast_ref::<webpki::Error>() == Some(&webpki::Error::CaUsedAsEndEntity)
}

/// Verifies certificates with the trusted roots, and accepts a root itself as a server's self-signed
/// certificate.
#[derive(Debug)]
struct Verifier {
    /// The verifier with the roots; `None` without any root: no certificate is trusted.
    by_roots: Option<Arc<WebPkiServerVerifier>>,
    roots: Arc<RootCertStore>,
    trusted: Vec<CertificateDer<'static>>,
    provider: Arc<CryptoProvider>,
}

impl Verifier {
    fn new(trusted: Vec<CertificateDer<'static>>, provider: Arc<CryptoProvider>) -> Verifier {
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(trusted.iter().cloned());
        let roots = Arc::new(roots);
        let by_roots = WebPkiServerVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider));
        Verifier { by_roots: by_roots.build().ok(), roots, trusted, provider }
    }

    /// Whether a trusted root signed the certificate for any purpose (anyExtendedKeyUsage), which webpki does not take as that of
    /// servers.
    fn is_for_any(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> bool {
        let algorithms = self.provider.signature_verification_algorithms.all;
        let any = KeyUsage::required_if_present(certificate::ANY_USAGE.as_bytes());
        let roots = &self.roots.roots;
        EndEntityCert::try_from(end_entity).is_ok_and(|certificate| {
            certificate.verify_for_usage(algorithms, roots, intermediates, now, any, None, None).is_ok()
        })
    }

    /// Whether the certificate of an authority is trusted as that of a server: it is trusted itself, or a trusted one
    /// signed it.
    fn is_trusted(&self, end_entity: &CertificateDer<'_>) -> bool {
        let algorithms = self.provider.signature_verification_algorithms.all;
        let signed = Certificate::parse(end_entity).filter(Certificate::is_for_servers);
        self.trusted.iter().any(|trusted| {
            trusted == end_entity
                || signed.as_ref().is_some_and(|signed| signed.is_signed_by(trusted, algorithms))
        })
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let Some(by_roots) = &self.by_roots else { return Err(CertificateError::UnknownIssuer.into()) };
        let verified =
            by_roots.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now);
        let is_named = || {
            let parsed = ParsedCertificate::try_from(end_entity)?;
            rustls::client::verify_server_name(&parsed, server_name)?;
            Ok(ServerCertVerified::assertion())
        };
        match verified {
            Err(rustls::Error::InvalidCertificate(
                CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. },
            )) if self.is_for_any(end_entity, intermediates, now) => is_named(),
            // webpki checks the validity period before the purpose of a certificate: an expired one has another error.
            Err(rustls::Error::InvalidCertificate(CertificateError::Other(why)))
                if is_authority(&why) && self.is_trusted(end_entity) =>
            {
                is_named()
            }
            verified => verified,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signed, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signed, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Verifier for `insecure_skip_verify`: accepts any certificate of any server.
#[derive(Debug)]
struct Unverified(Arc<CryptoProvider>);

impl ServerCertVerifier for Unverified {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// The step of establishing a connection that begins TLS.
#[derive(Debug)]
pub(super) struct TlsConnector {
    /// For the host of the URL; `None`: without TLS.
    pub(super) host: Option<Arc<ClientConfig>>,
    /// For a proxy that is contacted with TLS, through which the connection to the host is made.
    pub(super) proxy: Option<Arc<ClientConfig>>,
    /// URL of the proxy, if it gets the requests themselves.
    pub(super) whole: Option<Uri>,
}

impl<In: Transport> Connector<In> for TlsConnector {
    type Out = Either<In, TlsTransport>;

    fn connect(
        &self,
        details: &ConnectionDetails<'_>,
        chained: Option<In>,
    ) -> Result<Option<Self::Out>, ureq::Error> {
        let Some(transport) = chained else { return Ok(None) };
        // ureq connects to a proxy with a configuration that has no proxy.
        let is_proxy = self.proxy.is_some() && details.config.proxy().is_none();
        let needs_tls = details.needs_tls() || self.whole.is_some();
        let config = match if is_proxy { &self.proxy } else { &self.host } {
            Some(config) if needs_tls && !transport.is_tls() => Arc::clone(config),
            Some(_) | None => return Ok(Some(Either::A(transport))),
        };
        let host = self.whole.as_ref().unwrap_or(details.uri).host().unwrap_or_default();
        // An IPv6 address stands in brackets.
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let name = ServerName::try_from(host.to_owned())
            .map_err(|_| ureq::Error::Tls("the host of the URL is neither a name nor an address"))?;
        let mut connection = ClientConnection::new(config, name)?;
        let mut socket = TransportAdapter::new(transport.boxed(), details.current_time.clone());
        socket.set_timeout(details.timeout);
        connection.complete_io(&mut socket)?;
        let stream = StreamOwned::new(connection, socket);
        let buffers =
            LazyBuffers::new(details.config.input_buffer_size(), details.config.output_buffer_size());
        Ok(Some(Either::B(TlsTransport { buffers, stream })))
    }
}

/// A connection with TLS.
pub(super) struct TlsTransport {
    buffers: LazyBuffers,
    stream: StreamOwned<ClientConnection, TransportAdapter>,
}

impl fmt::Debug for TlsTransport {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("TlsTransport")
    }
}

impl Transport for TlsTransport {
    fn buffers(&mut self) -> &mut dyn Buffers {
        &mut self.buffers
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), ureq::Error> {
        self.stream.get_mut().set_timeout(timeout);
        self.stream.write_all(&self.buffers.output()[..amount])?;
        Ok(())
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, ureq::Error> {
        self.stream.get_mut().set_timeout(timeout);
        let amount = self.stream.read(self.buffers.input_append_buf())?;
        self.buffers.input_appended(amount);
        Ok(amount > 0)
    }

    fn is_open(&mut self) -> bool {
        self.stream.get_mut().get_mut().is_open()
    }

    fn is_tls(&self) -> bool {
        true
    }
}
