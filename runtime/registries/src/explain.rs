//! Describes the endpoints of a reference as text, to show administrators which line of which file applies.

use coracle_job::{Credentials, ExplainJob, ExplainedEndpoint};
use ureq::http::Uri;

use crate::proxy::Proxy;
use crate::{Endpoint, Environment, Plain};

/// The endpoints in the order of a pull. Problems of the files are logged, as in a pull.
pub fn explain(job: &ExplainJob) -> Vec<ExplainedEndpoint> {
    let environment = Environment::read();
    let endpoints =
        super::endpoints(&job.registries, &job.root, &job.registry, &job.repository, &Credentials::None);
    endpoints.iter().map(|endpoint| explained(endpoint, &environment)).collect()
}

fn explained(endpoint: &Endpoint, environment: &Environment) -> ExplainedEndpoint {
    let use_of_it = match (endpoint.can_resolve, endpoint.can_pull) {
        (true, true) => "",
        (true, false) => ", for tags only",
        (false, true) => ", for digests only",
        (false, false) => ", without capabilities",
    };
    let headers: Vec<&str> = endpoint.headers.iter().map(|(name, _)| name.as_str()).collect();
    let headers = match headers.is_empty() {
        true => String::new(),
        false => format!(", with {}", headers.join(" and ")),
    };
    let credentials = match endpoint.credentials {
        Credentials::None if endpoint.takes_asked => "only those of the request".to_owned(),
        Credentials::None => "none".to_owned(),
        ref known => format!("{known:?} of {}", endpoint.credentials_source),
    };
    let url: Option<Uri> = endpoint.url.parse().ok();
    let proxy = url.as_ref().and_then(|url| environment.proxy_for(url)).map(Proxy::shown);
    ExplainedEndpoint {
        url: format!("{}/{}", endpoint.url, endpoint.repository),
        source: format!("{}{use_of_it}{headers}", endpoint.source),
        credentials,
        tls: tls(endpoint),
        proxy: proxy.unwrap_or_default(),
    }
}

fn tls(endpoint: &Endpoint) -> String {
    match endpoint.plain() {
        Plain::Only if !endpoint.url.starts_with("https:") => return "none, plain http".to_owned(),
        Plain::BeforeTls => return "none, plain http; not verified if it has TLS".to_owned(),
        Plain::Only | Plain::AfterTls => {}
    }
    let mut text = match endpoint.tls.insecure_skip_verify {
        true => "not verified".to_owned(),
        false => "verified by the system's root certificates".to_owned(),
    };
    if !endpoint.tls.insecure_skip_verify {
        for path in &endpoint.tls.ca_files {
            text.push_str(&format!(" and {}", path.display()));
        }
    }
    if let Some((certificate, _)) = &endpoint.tls.client {
        text.push_str(&format!(", with the client certificate {}", certificate.display()));
    }
    if endpoint.plain() == Plain::AfterTls {
        text.push_str(", or plain http if it has no TLS");
    }
    text
}
