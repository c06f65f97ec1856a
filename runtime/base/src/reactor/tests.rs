//! Tests the reactor on the real kernel with pipes, timers and signals. The tests of `workers` cover pidfds.

use std::cell::{Cell, RefCell};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;
use nix::sys::signal::{Signal, raise};
use smol::io::{AsyncReadExt, AsyncWriteExt};

use super::timer::sleep_until;
use super::{
    Holds, Removals, Signals, Slice, Watched, arm, deadline, holds, run, sleep, spawn, stats, yield_now,
};
use crate::testdir::TestDir;

const MS: Duration = Duration::from_millis(1);

fn pipe() -> (OwnedFd, OwnedFd) {
    nix::unistd::pipe2(OFlag::O_CLOEXEC).unwrap()
}

fn watched_pipe() -> (Watched, Watched) {
    let (reader, writer) = pipe();
    (Watched::new(reader).unwrap(), Watched::new(writer).unwrap())
}

#[test]
fn main_may_borrow_and_returns_its_value() {
    let text = String::from("borrowed");
    assert_eq!(run(async { text.len() }), 8);
}

#[test]
fn an_action_before_the_sleep_is_called_once_when_no_task_is_ready() {
    thread_local!(static CALLS: Cell<u32> = const { Cell::new(0) });
    run(async {
        super::before_sleep(|| CALLS.set(CALLS.get() + 1));
        for _ in 0..10 {
            yield_now().await;
            assert_eq!(CALLS.get(), 0, "a task is ready");
        }
        sleep(MS).await;
        sleep(MS).await;
        assert_eq!(CALLS.get(), 1);
    });
}

/// A task with much to do lets events in, which a limit of polls alone would not: 64 of these take longer than the task.
#[test]
fn a_task_that_shares_its_thread_does_not_keep_others_waiting() {
    run(async {
        let (reader, writer) = watched_pipe();
        let is_read = Rc::new(Cell::new(false));
        let seen = Rc::clone(&is_read);
        let reading = spawn(async move {
            reader.read(&mut [0; 1]).await.unwrap();
            seen.set(true);
        });
        yield_now().await;
        let before = holds();
        let busy = spawn(async move {
            writer.write_all(&[1]).await.unwrap();
            let mut slice = Slice::new();
            for number in 0..30 {
                let begun = Instant::now();
                while begun.elapsed() < MS {}
                slice.share().await;
                if is_read.get() {
                    return number;
                }
            }
            panic!("the reader waited for the end");
        });
        let shares = busy.await;
        assert!(shares < 29, "{shares}");
        reading.await;
        let after = holds();
        let turns = |holds: &Holds| holds.times.histogram.iter().sum::<u64>();
        assert!(turns(&after) > turns(&before));
        assert!(after.longest >= MS && after.times.total >= before.times.total + MS, "{after:?}");
        let long = |holds: &Holds| holds.times.histogram[4..].iter().sum::<u64>();
        assert!(long(&after) > long(&before), "turns above a millisecond: {before:?} {after:?}");
    });
}

#[test]
fn more_bytes_than_a_pipe_buffer_holds_are_transferred() {
    run(async {
        let (reader, writer) = watched_pipe();
        let sent: Vec<u8> = (0..1_000_000_u32).map(|n| n as u8).collect();
        let expected = sent.clone();
        let writing = spawn(async move { writer.write_all(&sent).await });
        let mut got = Vec::new();
        let mut reader = reader;
        reader.read_to_end(&mut got).await.unwrap();
        writing.await.unwrap();
        assert!(got == expected);
        assert_eq!(stats().tasks, 0);
    });
}

#[test]
fn end_of_file_and_broken_pipe_wake_waiting_tasks() {
    run(async {
        let (reader, writer) = watched_pipe();
        let reading = spawn(async move { reader.read(&mut [0; 8]).await });
        yield_now().await;
        drop(writer);
        assert_eq!(reading.await.unwrap(), 0);

        let (reader, writer) = watched_pipe();
        let writing = spawn(async move { writer.write_all(&[0; 1 << 20]).await });
        sleep(MS).await;
        drop(reader);
        assert_eq!(writing.await.unwrap_err().kind(), std::io::ErrorKind::BrokenPipe);
    });
}

#[test]
fn readable_works_before_the_first_read_and_with_unread_bytes() {
    run(async {
        let (reader, writer) = watched_pipe();
        writer.writable().await.unwrap();
        writer.write_all(b"ab").await.unwrap();
        for expected in [b"a", b"b"] {
            deadline(Duration::from_secs(5), reader.readable()).await.unwrap().unwrap();
            let mut byte = [0];
            assert_eq!(nix::unistd::read(reader.fd(), &mut byte).unwrap(), 1);
            assert_eq!(&byte, expected);
        }
        deadline(5 * MS, reader.readable()).await.unwrap_err();
    });
}

#[test]
fn two_tasks_may_wait_for_one_descriptor() {
    run(async {
        let (reader, writer) = watched_pipe();
        let reader = Rc::new(reader);
        let waiting: Vec<_> = (0..2)
            .map(|_| {
                let reader = reader.clone();
                spawn(async move { reader.readable().await })
            })
            .collect();
        yield_now().await;
        writer.write_all(b"x").await.unwrap();
        for task in waiting {
            deadline(Duration::from_secs(5), task).await.unwrap().unwrap();
        }
    });
}

#[test]
fn a_dropped_wait_leaves_nothing_behind() {
    run(async {
        let (reader, _writer) = watched_pipe();
        let before = stats();
        for _ in 0..100 {
            deadline(Duration::ZERO, reader.readable()).await.unwrap_err();
        }
        let waker_slots = stats();
        assert_eq!((waker_slots.descriptors, waker_slots.timers), (before.descriptors, before.timers));
    });
}

#[test]
fn timers_fire_in_order_and_not_early() {
    run(async {
        let start = Instant::now();
        let order = Rc::new(RefCell::new(Vec::new()));
        let tasks: Vec<_> = [30, 10, 20, 10]
            .into_iter()
            .enumerate()
            .map(|(index, millis)| {
                let order = order.clone();
                spawn(async move {
                    sleep_until(start + millis * MS).await;
                    assert!(start.elapsed() >= millis * MS);
                    order.borrow_mut().push(index);
                })
            })
            .collect();
        for task in tasks {
            task.await;
        }
        assert_eq!(*order.borrow(), [1, 3, 2, 0]);
        assert_eq!(stats().timers, 0);
    });
}

#[test]
fn deadline_drops_the_future_on_timeout() {
    struct Flag(Rc<Cell<bool>>);
    impl Drop for Flag {
        fn drop(&mut self) {
            self.0.set(true);
        }
    }
    run(async {
        let dropped = Rc::new(Cell::new(false));
        let flag = Flag(dropped.clone());
        let never = async move {
            let _flag = flag;
            std::future::pending::<()>().await;
        };
        let elapsed = deadline(5 * MS, never).await.unwrap_err();
        assert_eq!(elapsed.to_string(), "no answer within 5 ms");
        assert!(dropped.get());
        assert_eq!(deadline(Duration::MAX, async { 7 }).await, Ok(7));
        assert_eq!(stats().timers, 0);
    });
}

#[test]
fn an_idle_loop_does_not_turn() {
    run(async {
        let before = stats().turns;
        sleep(100 * MS).await;
        assert!(stats().turns - before <= 3, "{} turns", stats().turns - before);
    });
}

/// Regression: each read of a peer was an event, so that every answer and every request to a monitor woke the
/// daemon for nothing.
#[test]
fn free_space_is_reported_to_waiting_writers_only() {
    run(async {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let (ours, theirs) = (Watched::new(ours).unwrap(), Watched::new(theirs).unwrap());
        let mut buffer = vec![0; 1 << 20];
        let before = stats().turns;
        for _ in 0..20 {
            ours.write_all(b"x").await.unwrap();
            nix::unistd::read(theirs.fd(), &mut buffer).unwrap();
            sleep(MS).await;
        }
        let turns = stats().turns - before;
        assert!(turns <= 30, "{turns} turns, one for each sleep");

        for _ in 0..3 {
            let writing = async {
                ours.write_all(&vec![0; 3 << 20]).await.unwrap();
            };
            let reading = async {
                let mut left = 3 << 20;
                while left > 0 {
                    left -= theirs.read(&mut buffer).await.unwrap();
                }
            };
            let both = deadline(Duration::from_secs(10), smol::future::zip(writing, reading));
            both.await.expect("a blocked writer continues");
        }
    });
}

#[test]
fn busy_tasks_do_not_starve_descriptors() {
    run(async {
        let (reader, writer) = watched_pipe();
        let stop = Rc::new(Cell::new(false));
        let busy: Vec<_> = (0..3 * super::TASKS_PER_TURN)
            .map(|_| {
                let stop = stop.clone();
                spawn(async move {
                    while !stop.get() {
                        yield_now().await;
                    }
                })
            })
            .collect();
        let reading = spawn(async move { reader.read(&mut [0; 1]).await });
        yield_now().await;
        writer.write_all(b"x").await.unwrap();
        assert_eq!(deadline(Duration::from_secs(5), reading).await.unwrap().unwrap(), 1);
        stop.set(true);
        for task in busy {
            task.await;
        }
    });
}

#[test]
fn slots_of_closed_descriptors_are_reused() {
    run(async {
        for _ in 0..3 {
            let pipes: Vec<_> = (0..200).map(|_| watched_pipe()).collect();
            assert_eq!(stats().descriptors, 400);
            let tasks: Vec<_> = pipes
                .into_iter()
                .map(|(reader, mut writer)| {
                    spawn(async move {
                        let mut byte = [0];
                        let reading = spawn(async move { reader.read(&mut byte).await });
                        yield_now().await;
                        AsyncWriteExt::write_all(&mut writer, b"x").await.unwrap();
                        reading.await.unwrap()
                    })
                })
                .collect();
            for task in tasks {
                assert_eq!(task.await, 1);
            }
            assert_eq!(stats().descriptors, 0);
        }
    });
}

#[test]
fn unfinished_tasks_are_dropped_with_their_descriptors() {
    let (reader, writer) = pipe();
    run(async {
        let reader = Watched::new(reader).unwrap();
        spawn(async move { reader.read(&mut [0; 1]).await }).detach();
        spawn(sleep(Duration::from_secs(3600))).detach();
        yield_now().await;
    });
    let error = nix::unistd::write(&writer, b"x").unwrap_err();
    assert_eq!(error, nix::errno::Errno::EPIPE);
}

#[test]
fn a_regular_file_is_refused() {
    run(async {
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        let error = Watched::new(file).err().unwrap();
        assert_eq!(error.raw_os_error(), Some(nix::libc::EPERM));
        assert_eq!(stats().descriptors, 0);
    });
}

#[test]
fn signals_arrive_in_order() {
    run(async {
        let mut signals = Signals::new(&[Signal::SIGUSR1, Signal::SIGHUP]).unwrap();
        assert!(deadline(MS, signals.next()).await.is_err());
        raise(Signal::SIGUSR1).unwrap();
        assert_eq!(deadline(Duration::from_secs(5), signals.next()).await, Ok(Signal::SIGUSR1));
        raise(Signal::SIGHUP).unwrap();
        assert_eq!(deadline(Duration::from_secs(5), signals.next()).await, Ok(Signal::SIGHUP));
    });
}

#[test]
fn each_watch_of_one_instance_reports_its_own_events() {
    let directory = TestDir::new("watches");
    let [removed, file] = ["removed", "file"].map(|name| directory.path().join(name));
    std::fs::write(&removed, "").unwrap();
    run(async {
        let (removals, again) = (Removals::default(), Removals::default());
        removals.watch(directory.path()).unwrap();
        again.watch(directory.path()).unwrap();
        let changes = [arm(&[directory.path().into()]).unwrap(), arm(std::slice::from_ref(&file)).unwrap()];
        let before = stats();
        // Both wait, and one of them reads what the kernel has for both.
        let seen = changes.map(|changes| spawn(async move { changes.next().await }));
        yield_now().await;
        std::fs::write(&file, "").unwrap();
        for seen in seen {
            deadline(10_000 * MS, seen).await.unwrap().unwrap();
        }
        assert!(deadline(10 * MS, removals.next()).await.is_err(), "nothing was removed");
        // The watch of the other `Changes` of this directory has ended.
        std::fs::remove_file(&removed).unwrap();
        deadline(10_000 * MS, removals.next()).await.unwrap().unwrap();
        assert_eq!(stats().descriptors, before.descriptors);
        drop(removals);
        // Reported before it waits.
        deadline(10_000 * MS, again.next()).await.unwrap().unwrap();
        // Events that only the watches wanted which have ended wake the loop once.
        again.watch(directory.path()).unwrap();
        std::fs::write(directory.path().join("other"), "").unwrap();
        deadline(10_000 * MS, again.next()).await.unwrap().unwrap();
        again.watch(directory.path()).unwrap();
        std::fs::write(directory.path().join("another"), "").unwrap();
        assert!(deadline(10 * MS, again.next()).await.is_err(), "nothing was removed");
    });
}

#[test]
fn a_directory_that_is_removed_and_made_again_is_watched_again() {
    let directory = TestDir::new("watched-again");
    let path = directory.path().join("watched");
    run(async {
        let removals = Removals::default();
        for _ in 0..3 {
            std::fs::create_dir(&path).unwrap();
            removals.watch(&path).unwrap();
            std::fs::remove_dir(&path).unwrap();
            deadline(10_000 * MS, removals.next()).await.unwrap().unwrap();
            assert!(removals.watch(&path).is_err(), "it is not there");
        }
        assert_eq!(stats().descriptors, 1);
        // More events than the kernel keeps for an instance: it reports that it has dropped some.
        std::fs::create_dir(&path).unwrap();
        removals.watch(&path).unwrap();
        let changes = arm(&[directory.path().into()]).unwrap();
        let queued: usize = std::fs::read_to_string("/proc/sys/fs/inotify/max_queued_events")
            .unwrap()
            .trim()
            .parse()
            .unwrap();
        for number in 0..=queued {
            // Two names by turns: equal events that follow each other are one.
            std::fs::write(directory.path().join(format!("{}", number % 2)), "").unwrap();
        }
        std::fs::remove_dir(&path).unwrap();
        deadline(10_000 * MS, removals.next()).await.unwrap().unwrap();
        deadline(10_000 * MS, changes.next()).await.unwrap().unwrap();
    });
}
