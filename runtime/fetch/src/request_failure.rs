//! The reason why a request to an endpoint failed, and whether a retry may succeed.

use std::time::Duration;

use coracle_job::{Failure, FailureKind};
use serde::{Deserialize, Serialize};

/// Maximum pause that a registry may request; a longer one makes the request fail at once.
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// The failure of one request.
#[derive(Debug, Serialize, Deserialize)]
pub struct RequestFailure {
    /// Kind and text of the failure.
    pub failure: Failure,
    /// Minimum delay before a retry; `None`: a retry cannot succeed.
    pub pause: Option<Duration>,
    /// Status of the response, if the registry sent one.
    pub status: Option<u16>,
    /// The nonce with which a neighbour requires a proof; empty: none.
    pub nonce: String,
    /// Whether the pull ends, because other endpoints cannot be used, either.
    pub ends_pull: bool,
}

impl From<Failure> for RequestFailure {
    /// Failures of kind `Unavailable` may be temporary; all others are permanent.
    fn from(failure: Failure) -> Self {
        let is_passing = matches!(
            failure.kind,
            FailureKind::Unavailable | FailureKind::RateLimited | FailureKind::NameResolution
        );
        let pause = is_passing.then_some(Duration::ZERO);
        Self { failure, pause, status: None, nonce: String::new(), ends_pull: false }
    }
}

impl RequestFailure {
    /// The endpoint answered with an HTML page. Other endpoints are tried; a retry at this one is useless
    /// until a user has logged in.
    pub fn of_page(what: &str) -> Self {
        let text = format!(
            "{what}: it answered with a web page (HTML): a captive portal or a proxy answers in place of the registry; \
             log in there, or correct the address"
        );
        Self::lasting(Failure::new(FailureKind::Unavailable, text))
    }

    /// A permanent failure: a retry cannot succeed.
    pub(super) fn lasting(failure: Failure) -> Self {
        Self { failure, pause: None, status: None, nonce: String::new(), ends_pull: false }
    }

    /// A failure of the fetcher itself, which ends the pull.
    pub(super) fn of_pull(failure: Failure) -> Self {
        Self { failure, pause: None, status: None, nonce: String::new(), ends_pull: true }
    }

    /// Restricts a failure that the fetcher reported: it must not report disk errors, end the pull, or
    /// request a long delay.
    pub(super) fn of_peer(self) -> Self {
        let mut failure = self.failure.clone();
        if matches!(failure.kind, FailureKind::NoSpace | FailureKind::Plugin) {
            failure.kind = FailureKind::Internal;
        }
        let pause = self.pause.map(|pause| pause.min(PAUSE_MAX));
        Self { failure, pause, ends_pull: false, ..self }
    }

    /// Whether the registry answered, and refused this request: too many requests are no statement about this one.
    pub fn is_refusal(&self) -> bool {
        self.status.is_some_and(|status| status != 429)
    }

    /// Applies the `Retry-After` of a response in seconds; a date, which registries do not send, is ignored.
    pub(super) fn after(mut self, retry_after: Option<&str>) -> Self {
        let asked = retry_after.and_then(|text| text.trim().parse().ok()).map(Duration::from_secs);
        if let (Some(_), Some(asked)) = (self.pause, asked) {
            self.pause = (asked <= PAUSE_MAX).then_some(asked);
            self.failure.message.push_str(&format!(", it asks to wait for {} s", asked.as_secs()));
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_temporary_failures_have_a_bounded_retry_delay() {
        let failed =
            |kind, retry_after| RequestFailure::from(Failure::new(kind, "x")).after(retry_after).pause;
        let unavailable = FailureKind::Unavailable;
        assert_eq!(failed(unavailable, None), Some(Duration::ZERO));
        assert_eq!(failed(unavailable, Some(" 7 ")), Some(Duration::from_secs(7)));
        assert_eq!(failed(unavailable, Some("3600")), None);
        assert_eq!(failed(unavailable, Some("Fri, 31 Dec 1999 23:59:59 GMT")), Some(Duration::ZERO));
        assert_eq!(failed(FailureKind::Denied, Some("7")), None);
    }

    /// Only the worker may report a full disk or end the pull.
    #[test]
    fn a_fetcher_can_only_report_failures_of_its_endpoint() {
        let said = RequestFailure {
            failure: Failure::new(FailureKind::NoSpace, "x"),
            pause: Some(Duration::MAX),
            status: None,
            nonce: String::new(),
            ends_pull: true,
        };
        let heard = said.of_peer();
        assert_eq!((heard.failure.kind, heard.ends_pull), (FailureKind::Internal, false));
        assert_eq!(heard.pause, Some(PAUSE_MAX));
    }
}
