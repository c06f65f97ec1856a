//! Buffers for the output of ExecSync calls that has been read but not sent yet. All calls share one budget,
//! so that the memory of the daemon is limited; without it, twelve probes with large output used 185 MiB.
//!
//! ```text
//! each stream   16 KiB of its own, so that a typical probe never waits
//! common         2 MiB shared by all calls, allocated in blocks
//! large         14 MiB for one call at a time, the maximum of a call; kept until its answer is sent
//! ```
//! A call without space does not read, so its pipe fills and the kernel blocks the command. There is no
//! deadlock: the call with `large` has space for its maximum and therefore ends, and then the next call gets
//! `large`. A call that waits for another one inside the container, or for one whose output never ends, fails
//! after `STALL_LIMIT`.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use coracle_base::error::{Context, Error, Kind};
use coracle_base::reactor::{self, Watched};
use event_listener::{Event as Changed, listener};

/// Maximum number of bytes kept per stream; the rest is read and dropped, as containerd and CRI-O do after 16
/// MiB. Both streams together are below the 16 MiB that clients accept in one message.
pub(crate) const STREAM_BYTES_MAX: usize = 7 << 20;

/// Maximum number of bytes for all running ExecSync calls, in addition to [`OWN_BYTES`] per stream.
pub(crate) const BUDGET_BYTES: usize = 16 << 20;

/// Maximum number of bytes that one call may keep.
const LARGE_BYTES: usize = 2 * STREAM_BYTES_MAX;

const COMMON_BYTES: usize = BUDGET_BYTES - LARGE_BYTES;

/// Number of bytes per stream that are not counted in the budget. A kubelet uses 10 KiB of a probe's output
/// (pkg/probe/exec, maxReadLength).
const OWN_BYTES: usize = 16 << 10;

/// Size of a block of the budget in bytes. musl returns memory of this size to the kernel when it is freed
/// (MMAP_THRESHOLD).
const BLOCK_BYTES: usize = 128 << 10;

/// Size in bytes of the read that finds out whether a stream has more data, before another block is
/// requested.
const PEEK_BYTES: usize = 2 << 10;

/// Time after which a waiting call fails if no space is released.
const STALL_LIMIT: Duration = Duration::from_secs(30);

/// The output budget of the daemon.
pub(crate) struct Budget {
    common_free: Cell<usize>,
    /// Number of the call that has the large part; `None` if it is free.
    large: Cell<Option<u64>>,
    last_call: Cell<u64>,
    returned: Changed,
}

/// One call's share of the budget, until its last block is freed.
pub(crate) struct Share {
    budget: Rc<Budget>,
    call: u64,
}

/// The part of the budget in which a block is counted.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Room {
    Own,
    Common(usize),
    Large,
}

/// A block of output; dropping the block releases its space.
pub struct Block {
    /// The whole capacity; bytes after `filled` are zero.
    bytes: Vec<u8>,
    filled: usize,
    room: Room,
    share: Rc<Share>,
}

/// The output of one stream.
#[derive(Default)]
pub struct Output {
    blocks: Vec<Block>,
    bytes: usize,
    is_cut: bool,
}

impl Budget {
    pub(crate) fn new() -> Rc<Budget> {
        Rc::new(Budget {
            common_free: Cell::new(COMMON_BYTES),
            large: Cell::default(),
            last_call: Cell::default(),
            returned: Changed::new(),
        })
    }

    /// Creates the share of a new call.
    pub(crate) fn share(self: &Rc<Self>) -> Rc<Share> {
        let call = self.last_call.get() + 1;
        self.last_call.set(call);
        Rc::new(Share { budget: Rc::clone(self), call })
    }
}

impl Share {
    fn try_take(&self, bytes: usize) -> Option<Room> {
        let Budget { common_free, large, .. } = &*self.budget;
        match large.get() {
            Some(call) if call == self.call => return Some(Room::Large),
            _ if common_free.get() >= bytes => {
                common_free.set(common_free.get() - bytes);
                return Some(Room::Common(bytes));
            }
            Some(_) => return None,
            None => {}
        }
        large.set(Some(self.call));
        Some(Room::Large)
    }

    /// Waits for space in the budget.
    ///
    /// # Errors
    /// No space was released for [`STALL_LIMIT`].
    async fn take(&self, bytes: usize) -> Result<Room, Error> {
        if let Some(room) = self.try_take(bytes) {
            return Ok(room);
        }
        loop {
            listener!(self.budget.returned => returned);
            if let Some(room) = self.try_take(bytes) {
                return Ok(room);
            }
            if reactor::deadline(STALL_LIMIT, returned).await.is_err() {
                let text = format!(
                    "its output has found no room for {} s: that of other calls holds all of {} MiB",
                    STALL_LIMIT.as_secs(),
                    BUDGET_BYTES >> 20
                );
                return Err(Error::new(Kind::ResourceExhausted, text));
            }
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        if self.budget.large.get() == Some(self.call) {
            self.budget.large.set(None);
            self.budget.returned.notify(usize::MAX);
        }
    }
}

impl Block {
    fn new(bytes: usize, room: Room, share: &Rc<Share>) -> Block {
        Block { bytes: vec![0; bytes], filled: 0, room, share: Rc::clone(share) }
    }
}

impl AsRef<[u8]> for Block {
    fn as_ref(&self) -> &[u8] {
        &self.bytes[..self.filled]
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Room::Common(bytes) = self.room {
            let budget = &self.share.budget;
            budget.common_free.set(budget.common_free.get() + bytes);
            budget.returned.notify(usize::MAX);
        }
    }
}

impl Output {
    /// Reads a stream until end of file; keeps the first [`STREAM_BYTES_MAX`] bytes.
    ///
    /// # Errors
    /// A read error; no space within [`STALL_LIMIT`].
    pub(crate) async fn read_to_end(&mut self, pipe: &Watched, share: &Rc<Share>) -> Result<(), Error> {
        while self.bytes < STREAM_BYTES_MAX {
            let count = match self.blocks.last_mut().filter(|block| block.filled < block.bytes.len()) {
                Some(block) => {
                    let count = pipe.read(&mut block.bytes[block.filled..]).await;
                    let count = count.context(|| "read the command's output".to_owned())?;
                    block.filled += count;
                    count
                }
                None => self.read_into_new(pipe, share).await?,
            };
            if count == 0 {
                return Ok(());
            }
            self.bytes += count;
            // Otherwise a fast writer would occupy the event loop.
            reactor::yield_now().await;
        }
        let mut rest = vec![0; OWN_BYTES];
        while pipe.read(&mut rest).await.context(|| "read the command's output".to_owned())? > 0 {
            self.is_cut = true;
            reactor::yield_now().await;
        }
        Ok(())
    }

    /// Reads into a new block; returns the number of bytes, 0 at end of file. Space is requested only when
    /// there is data, because end of file needs none.
    async fn read_into_new(&mut self, pipe: &Watched, share: &Rc<Share>) -> Result<usize, Error> {
        let left = STREAM_BYTES_MAX - self.bytes;
        let wanted = left.min(PEEK_BYTES);
        // The buffer exists during the call only, so that a call which waits needs no memory for it.
        let first = pipe.read_with(|fd| {
            let mut buffer = [0; PEEK_BYTES];
            let count = nix::unistd::read(fd, &mut buffer[..wanted])?;
            Ok(buffer[..count].to_vec())
        });
        let first = first.await.context(|| "read the command's output".to_owned())?;
        let count = first.len();
        if count == 0 {
            return Ok(0);
        }
        let mut block = if self.blocks.is_empty() {
            Block::new(OWN_BYTES, Room::Own, share)
        } else {
            let bytes = left.min(BLOCK_BYTES);
            let room = share.take(bytes).await?;
            Block::new(bytes, room, share)
        };
        block.bytes[..count].copy_from_slice(&first);
        block.filled = count;
        self.blocks.push(block);
        Ok(count)
    }

    /// Number of bytes that were kept.
    pub fn kept_bytes(&self) -> usize {
        self.bytes
    }

    /// Whether output after the first [`STREAM_BYTES_MAX`] bytes was dropped.
    pub(crate) fn is_cut(&self) -> bool {
        self.is_cut
    }

    /// Whether the output fits into the stream's own space, which is not counted in the budget.
    pub fn is_small(&self) -> bool {
        self.blocks.len() <= 1
    }

    /// The blocks of the output in order.
    pub fn into_blocks(self) -> Vec<Block> {
        self.blocks
    }

    /// The whole output as one vector.
    pub fn into_bytes(self) -> Vec<u8> {
        self.blocks.iter().flat_map(AsRef::as_ref).copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::exec::pipe;

    /// A pipe into which a thread writes `bytes` bytes.
    #[expect(clippy::disallowed_methods, reason = "the other end of a pipe that is tested, not the daemon")]
    fn writer(bytes: usize) -> (Watched, std::thread::JoinHandle<()>) {
        let (read, write) = pipe().unwrap();
        let mut write = std::fs::File::from(write);
        let thread = std::thread::spawn(move || {
            let piece: Vec<u8> = (0..=255).cycle().take(100_000).collect();
            let mut left = bytes;
            while left > 0 {
                let count = left.min(piece.len());
                // The reader may have closed its end.
                if write.write_all(&piece[..count]).is_err() {
                    return;
                }
                left -= count;
            }
        });
        (read, thread)
    }

    fn held(budget: &Budget) -> usize {
        COMMON_BYTES - budget.common_free.get()
    }

    #[test]
    fn small_output_does_not_count_against_the_shared_budget() {
        reactor::run(async {
            let budget = Budget::new();
            for bytes in [0, 1, OWN_BYTES - 1, OWN_BYTES] {
                let share = budget.share();
                let (read, thread) = writer(bytes);
                let mut output = Output::default();
                output.read_to_end(&read, &share).await.unwrap();
                thread.join().unwrap();
                assert_eq!((output.kept_bytes(), output.is_small(), held(&budget)), (bytes, true, 0));
            }
        });
    }

    #[test]
    fn output_beyond_the_maximum_is_read_and_discarded() {
        reactor::run(async {
            let budget = Budget::new();
            let share = budget.share();
            let (read, thread) = writer(STREAM_BYTES_MAX + 1);
            let mut output = Output::default();
            output.read_to_end(&read, &share).await.unwrap();
            thread.join().unwrap();
            assert_eq!((output.kept_bytes(), output.is_cut()), (STREAM_BYTES_MAX, true));
            assert!(
                output.into_bytes().iter().enumerate().all(|(at, byte)| *byte == (at % 100_000 % 256) as u8)
            );
            drop(share);
            assert_eq!((held(&budget), budget.large.get()), (0, None));
        });
    }

    /// Concurrent calls with more output than the budget: each gets all of its output, and the budget is
    /// never exceeded. Regression: each call kept 14 MiB.
    #[test]
    fn calls_that_need_more_than_the_budget_take_turns() {
        reactor::run(async {
            let budget = Budget::new();
            let calls: Vec<_> = (0..6)
                .map(|_| {
                    let share = budget.share();
                    reactor::spawn(async move {
                        let pipes = [writer(5 << 20), writer(STREAM_BYTES_MAX)];
                        let (mut one, mut two) = (Output::default(), Output::default());
                        let (a, b) = smol::future::zip(
                            one.read_to_end(&pipes[0].0, &share),
                            two.read_to_end(&pipes[1].0, &share),
                        )
                        .await;
                        a.and(b).unwrap();
                        assert!(held(&share.budget) <= COMMON_BYTES);
                        (one.kept_bytes(), two.kept_bytes())
                    })
                })
                .collect();
            for call in calls {
                assert_eq!(call.await, (5 << 20, STREAM_BYTES_MAX));
            }
            assert_eq!((held(&budget), budget.large.get()), (0, None));
        });
    }

    /// Regression: a read error was treated as end of file, and the call succeeded with partial output.
    #[test]
    fn output_that_cannot_be_read_is_an_error() {
        reactor::run(async {
            let (_read, write) = pipe().unwrap();
            let error = Output::default()
                .read_to_end(&Watched::new(write).unwrap(), &Budget::new().share())
                .await
                .unwrap_err();
            assert!(error.to_string().contains("read the command's output"), "{error}");
        });
    }

    #[test]
    fn a_waiting_reader_continues_when_buffers_are_released() {
        reactor::run(async {
            let budget = Budget::new();
            let (first, second) = (budget.share(), budget.share());
            let mut kept: Vec<Block> = Vec::new();
            while budget.large.get().is_none() {
                let room = first.try_take(BLOCK_BYTES).unwrap();
                kept.push(Block::new(BLOCK_BYTES, room, &first));
            }
            assert!(second.try_take(BLOCK_BYTES).is_none());
            let waiting = reactor::spawn(async move { second.take(BLOCK_BYTES).await.is_ok() });
            reactor::sleep(Duration::from_millis(20)).await;
            assert!(!waiting.is_finished());
            kept.remove(0);
            assert!(waiting.await);
        });
    }
}
