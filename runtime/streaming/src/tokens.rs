//! Tokens: what Exec, Attach and PortForward answer, and whoever fetches the URL shows. Unguessable, good once, and not
//! for long (streaming 6.2).

use std::cell::RefCell;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

use coracle_base::error::Error;
use data_encoding::BASE64URL_NOPAD;

/// How long a token is good.
const LIFE: Duration = Duration::from_secs(60);
/// Unspent ones at once.
const TOKENS_MAX: usize = 1000;
/// 128 bits; the URL is 22 characters longer for it.
const TOKEN_BYTES: usize = 16;

/// Requests that wait for their client.
pub(super) struct Tokens<T> {
    /// Oldest first.
    waiting: RefCell<VecDeque<(String, Instant, T)>>,
}

impl<T> Tokens<T> {
    pub(super) fn new() -> Tokens<T> {
        Tokens { waiting: RefCell::default() }
    }

    /// Keeps `request` and gives its token. Where too many are unspent the oldest is void from now on: a client fetches
    /// its URL at once, so the oldest is the least likely to be missed, and nobody can lock the others out.
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

    /// Spends a token.
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
    fn a_token_is_good_once_and_for_a_minute() {
        let tokens = Tokens::new();
        let now = Instant::now();
        let (first, second) = (tokens.insert(1, now).unwrap(), tokens.insert(2, now).unwrap());
        assert!(first != second && first.len() == 22);
        assert_eq!(tokens.take(&first, now), Some(1));
        assert_eq!(tokens.take(&first, now), None);
        assert_eq!(tokens.take("", now), None);
        assert_eq!(tokens.take(&second, now + LIFE), None);
    }

    /// Before, the 1001st was refused for a minute.
    #[test]
    fn a_token_too_many_takes_the_place_of_the_oldest() {
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
