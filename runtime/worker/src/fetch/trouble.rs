//! Why an endpoint did not give what was asked, and whether it may give it the next time.

use std::time::Duration;

use coracle_job::{Failure, FailureKind};
use serde::{Deserialize, Serialize};

/// Longest pause that a registry may ask for; one that wants more is an error now.
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// A failure of one request.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Trouble {
    /// For people.
    pub(crate) failure: Failure,
    /// How long to wait at least before it is asked again; `None`: it would say the same.
    pub(crate) pause: Option<Duration>,
    /// No other endpoint can be asked any more, either.
    pub(crate) ends_pull: bool,
}

impl From<Failure> for Trouble {
    /// What is unavailable may be there in a moment; the rest stays as it is.
    fn from(failure: Failure) -> Self {
        let is_passing = failure.kind == FailureKind::Unavailable;
        Self { failure, pause: is_passing.then_some(Duration::ZERO), ends_pull: false }
    }
}

impl Trouble {
    /// Asking again is of no use.
    pub(super) fn lasting(failure: Failure) -> Self {
        Self { failure, pause: None, ends_pull: false }
    }

    /// The fetcher cannot be asked any more.
    pub(super) fn of_pull(failure: Failure) -> Self {
        Self { failure, pause: None, ends_pull: true }
    }

    /// What a fetcher says, as far as it may: it knows nothing of disks, and decides neither over other endpoints nor over long
    /// pauses.
    pub(super) fn of_peer(self) -> Self {
        let mut failure = self.failure;
        if matches!(failure.kind, FailureKind::NoSpace | FailureKind::Plugin) {
            failure.kind = FailureKind::Internal;
        }
        Self { failure, pause: self.pause.map(|pause| pause.min(PAUSE_MAX)), ends_pull: false }
    }

    /// Takes the `Retry-After` of an answer into account: seconds, as registries send it (a date is not looked at).
    pub(super) fn after(mut self, retry_after: Option<&str>) -> Self {
        let asked = retry_after.and_then(|text| text.trim().parse().ok()).map(Duration::from_secs);
        if let (Some(_), Some(asked)) = (self.pause, asked) {
            self.pause = (asked <= PAUSE_MAX).then_some(asked);
            self.failure.message.push_str(&format!(", it asks for {} s of patience", asked.as_secs()));
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::failure;

    #[test]
    fn only_what_may_pass_is_waited_for_and_not_for_ever() {
        let trouble = |kind, retry_after| Trouble::from(failure(kind, "x")).after(retry_after).pause;
        let unavailable = FailureKind::Unavailable;
        assert_eq!(trouble(unavailable, None), Some(Duration::ZERO));
        assert_eq!(trouble(unavailable, Some(" 7 ")), Some(Duration::from_secs(7)));
        assert_eq!(trouble(unavailable, Some("3600")), None);
        assert_eq!(trouble(unavailable, Some("Fri, 31 Dec 1999 23:59:59 GMT")), Some(Duration::ZERO));
        assert_eq!(trouble(FailureKind::Denied, Some("7")), None);
    }

    /// A full disk, and an end of the whole pull, are the worker's own to say.
    #[test]
    fn a_fetcher_speaks_for_its_endpoint_only() {
        let said = Trouble {
            failure: failure(FailureKind::NoSpace, "x"),
            pause: Some(Duration::MAX),
            ends_pull: true,
        };
        let heard = said.of_peer();
        assert_eq!((heard.failure.kind, heard.ends_pull), (FailureKind::Internal, false));
        assert_eq!(heard.pause, Some(PAUSE_MAX));
    }
}
