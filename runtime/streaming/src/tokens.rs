//! Tokens in the URLs of Exec, Attach and PortForward. A token is random, valid for one use, and expires soon
//! (streaming 6.2).

use std::cell::RefCell;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

use coracle_base::error::Error;
use data_encoding::BASE64URL_NOPAD;

/// Time for which a token is valid.
const LIFE: Duration = Duration::from_secs(60);
/// Maximum number of unused tokens.
const TOKENS_MAX: usize = 1000;
/// Number of random bytes in a token: 128 bits, which add 22 characters to the URL.
const TOKEN_BYTES: usize = 16;

/// Requests whose client has not connected yet, with their tokens.
pub(super) struct Tokens<T> {
    /// Token, expiry time and request of each entry, oldest first.
    waiting: RefCell<VecDeque<(String, Instant, T)>>,
}

impl<T> Tokens<T> {
    pub(super) fn new() -> Tokens<T> {
        Tokens { waiting: RefCell::default() }
    }

    /// Stores `request` and returns its token. If there are too many unused tokens, the oldest becomes
    /// invalid: it is the least likely to be needed, because clients use their URL at once, and no client can
    /// block others.
    pub(super) fn insert(&self, request: T, now: Instant) -> Result<String, Error> {
        self.drop_expired(now);
        let token = BASE64URL_NOPAD.encode(&coracle_sandbox::random_id()?[..TOKEN_BYTES]);
        let mut waiting = self.waiting.borrow_mut();
        if waiting.len() >= TOKENS_MAX {
            waiting.pop_front();
        }
        waiting.push_back((token.clone(), now, request));
        Ok(token)
    }

    /// Returns the request of a token, which becomes invalid; `None` if the token is unknown or has expired.
    pub(super) fn take(&self, token: &str, now: Instant) -> Option<T> {
        self.drop_expired(now);
        let mut waiting = self.waiting.borrow_mut();
        let index = waiting.iter().position(|(known, _, _)| known == token)?;
        waiting.remove(index).map(|(_, _, request)| request)
    }

    fn drop_expired(&self, now: Instant) {
        let mut waiting = self.waiting.borrow_mut();
        while waiting.front().is_some_and(|(_, since, _)| now.saturating_duration_since(*since) >= LIFE) {
            waiting.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_valid_once_and_for_a_minute() {
        let tokens = Tokens::new();
        let now = Instant::now();
        let (first, second) = (tokens.insert(1, now).unwrap(), tokens.insert(2, now).unwrap());
        assert!(first != second && first.len() == 22);
        assert_eq!(tokens.take(&first, now), Some(1));
        assert_eq!(tokens.take(&first, now), None);
        assert_eq!(tokens.take("", now), None);
        assert_eq!(tokens.take(&second, now + LIFE), None);
    }

    /// Regression: the 1001st token was refused for a minute.
    #[test]
    fn a_token_above_the_limit_replaces_the_oldest() {
        let tokens = Tokens::new();
        let now = Instant::now();
        let all: Vec<String> = (0..=TOKENS_MAX).map(|number| tokens.insert(number, now).unwrap()).collect();
        assert_eq!(tokens.waiting.borrow().len(), TOKENS_MAX);
        assert_eq!(tokens.take(&all[0], now), None);
        assert_eq!(tokens.take(&all[1], now), Some(1));
        assert_eq!(tokens.take(&all[TOKENS_MAX], now), Some(TOKENS_MAX));
        tokens.insert(0, now + LIFE).unwrap();
        assert_eq!(tokens.waiting.borrow().len(), 1);
    }
}
