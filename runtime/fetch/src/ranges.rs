//! The ranges of a blob that a part file gets, and the requests for them. The next ones are requested while one arrives: each answer takes
//! a round trip, a tenth of a second on LTE, and most ranges are short.
//!
//! The answers are read in the order of the ranges. Until then the fetcher keeps them in their pipes, so their number and their bytes are
//! limited. The first request of a download is made alone, and so are all further ones of a part after a request that was made ahead
//! has failed: a registry may refuse several at once.

use std::collections::VecDeque;
use std::ops::Range;

use super::client::{Asked, Body};
use super::protocol::{Begin, Get, Head};
use super::request_failure::RequestFailure;

/// Maximum number of requests that are made ahead: with the one whose answer is read, as many as browsers make to one host.
const ASKED_MAX: usize = 5;
/// Maximum number of ranges of a part that are downloaded at once.
pub const AT_ONCE_MAX: u64 = ASKED_MAX as u64 + 1;
/// Number of expected bytes with which no further range is requested: what arrives within a round trip of 100 ms at 40 Mbit/s. At
/// 140 kbit/s they take half a minute, in which no registry ends the answer with a long range that waits.
const EXPECTED_BYTES_MAX: u64 = 512 << 10;

/// The ranges of a part, one after the other in its file.
pub struct Ranges {
    /// The ranges, in ascending order.
    all: Vec<Range<u64>>,
    /// The requests whose answers were not read, in the order of their ranges.
    asked: VecDeque<(Range<u64>, Asked)>,
    /// The request that was made last.
    last: Get,
    /// Whether a request has failed that was made ahead.
    has_failed: bool,
}

impl Ranges {
    /// The ranges of a blob, in ascending order.
    pub fn new(all: Vec<Range<u64>>) -> Self {
        Self { all, asked: VecDeque::new(), last: Get::default(), has_failed: false }
    }

    /// Rest of the range that continues at this offset in the file, as offsets in the blob.
    pub fn rest(&self, offset: u64) -> Range<u64> {
        let mut passed = 0;
        for range in &self.all {
            let begin = range.start + (offset - passed);
            if begin < range.end {
                return begin..range.end;
            }
            passed += range.end - range.start;
        }
        0..0
    }

    /// Returns the answer to `get`, which was requested ahead or is requested `now`.
    ///
    /// # Errors
    /// The request failed that was made now.
    pub fn get(
        &mut self,
        get: Get,
        now: impl FnOnce(Get) -> Result<(Head, Body), RequestFailure>,
    ) -> Result<(Head, Body), RequestFailure> {
        let is_asked = self.asked.front().is_some_and(|(range, _)| range.start == get.offset);
        if let Some((_, asked)) = is_asked.then(|| self.asked.pop_front()).flatten() {
            match asked.answer() {
                Ok(answer) if answer.0.begin == Begin::AsAsked => return Ok(answer),
                Ok(_) => self.go_on_alone("not the range that was requested"),
                Err(failed) => {
                    self.go_on_alone(&failed.failure.message);
                    // The registry says when it may be asked again.
                    if failed.status == Some(429) && failed.pause.is_some_and(|pause| !pause.is_zero()) {
                        return Err(failed);
                    }
                }
            }
        }
        if self.asked.is_empty() {
            self.last = get.clone();
        }
        now(get)
    }

    /// Requests the next ranges by `ask`, while `left` bytes of one arrive. A request that cannot be made now is made when it is needed.
    pub fn ask(&mut self, left: u64, ask: impl Fn(Get) -> Result<Asked, RequestFailure>) {
        let Some(end) = self.last.end.filter(|_| !self.has_failed) else { return };
        let mut expected = left + self.asked.iter().map(|(range, _)| range.end - range.start).sum::<u64>();
        let next = self.all.partition_point(|range| range.start < end);
        for range in &self.all[next..] {
            if self.asked.len() >= ASKED_MAX || expected >= EXPECTED_BYTES_MAX {
                return;
            }
            let get = Get { offset: range.start, end: Some(range.end), ..self.last.clone() };
            let Ok(asked) = ask(get.clone()) else { return };
            self.asked.push_back((range.clone(), asked));
            self.last = get;
            expected += range.end - range.start;
        }
    }

    /// Requests one range after the other from now on.
    fn go_on_alone(&mut self, why: &str) {
        eprintln!("one range after the other is requested now: {why}");
        self.has_failed = true;
        self.forget();
    }

    /// Ends the requests whose answers were not read.
    pub fn forget(&mut self) {
        self.asked.clear();
    }
}
