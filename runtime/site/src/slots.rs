//! Limits of the connections of other nodes. A node that has proved that it has the site's key takes one of the places; connections
//! without a proof have few places of their own, and the oldest of them is closed for a new one. Connections of pods have the address of
//! their node, so that no limit for each address could distinguish them from the node's.

use std::collections::VecDeque;
use std::net::{IpAddr, Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Maximum number of connections that are served: thirty nodes at a rollout, each downloading three layers, and some connections that
/// only ask which blobs this node has.
const SERVED_MAX: usize = 128;
/// Maximum number of connections of one address that are served: those of a pull with `[registry] connections` of 16, and some that
/// only ask which blobs this node has.
const SERVED_PER_ADDRESS_MAX: usize = 24;
/// Maximum number of connections that have not yet proved that they have the site's key.
const WAITING_MAX: usize = 32;

/// Minimum time that a connection has for its first request before it is closed for a new one.
const PROOF_MIN: Duration = Duration::from_millis(500);

/// The connections of the process.
pub struct Slots(Mutex<Now>);

struct Now {
    /// Connections without a proof, with their times, the oldest first.
    waiting: VecDeque<(Arc<TcpStream>, Instant)>,
    /// Addresses of the clients that are served.
    served: Vec<IpAddr>,
    /// Time of the last change.
    changed: Instant,
}

impl Slots {
    /// Creates the slots, all of them free.
    pub fn new() -> Arc<Self> {
        let now = Now { waiting: VecDeque::new(), served: Vec::new(), changed: Instant::now() };
        Arc::new(Self(Mutex::new(now)))
    }

    /// Whether another connection would end no one who had no time to prove anything: many may have waited for this process.
    pub fn have_room(&self) -> bool {
        let now = self.lock();
        now.waiting.len() < WAITING_MAX
            || now.waiting.front().is_some_and(|(_, since)| since.elapsed() >= PROOF_MIN)
    }

    /// Adds a connection that has proved nothing.
    pub fn admit(self: &Arc<Self>, client: TcpStream, address: IpAddr) -> Place {
        let client = Arc::new(client);
        let mut now = self.lock();
        if now.waiting.len() >= WAITING_MAX
            && let Some((oldest, _)) = now.waiting.pop_front()
        {
            // Its thread ends at its next read or write. An error means that the client has gone.
            let _ = oldest.shutdown(Shutdown::Both);
        }
        now.waiting.push_back((client.clone(), Instant::now()));
        now.changed = Instant::now();
        Place { slots: self.clone(), client, address, is_served: false }
    }

    /// Whether there was no connection for this time.
    pub fn are_idle_for(&self, time: Duration) -> bool {
        let now = self.lock();
        now.waiting.is_empty() && now.served.is_empty() && now.changed.elapsed() >= time
    }

    fn lock(&self) -> MutexGuard<'_, Now> {
        // A panic ends the process (`panic = "abort"`), so the lock cannot be poisoned.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Now {
    fn stop_waiting(&mut self, client: &Arc<TcpStream>) {
        self.waiting.retain(|(other, _)| !Arc::ptr_eq(other, client));
    }
}

/// The slot of one connection; dropping the value frees it.
pub struct Place {
    slots: Arc<Slots>,
    client: Arc<TcpStream>,
    address: IpAddr,
    is_served: bool,
}

impl Place {
    /// The connection that holds the slot.
    pub fn client(&self) -> &TcpStream {
        &self.client
    }

    /// Takes a place for a connection that has proved to be one of the site, once; whether there is one.
    pub fn serve(&mut self) -> bool {
        if self.is_served {
            return true;
        }
        let mut now = self.slots.lock();
        let own = now.served.iter().filter(|other| **other == self.address).count();
        self.is_served = now.served.len() < SERVED_MAX && own < SERVED_PER_ADDRESS_MAX;
        if self.is_served {
            now.stop_waiting(&self.client);
            now.served.push(self.address);
        }
        self.is_served
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut now = self.slots.lock();
        now.stop_waiting(&self.client);
        let own = now.served.iter().position(|other| *other == self.address);
        if let (true, Some(index)) = (self.is_served, own) {
            now.served.swap_remove(index);
        }
        now.changed = Instant::now();
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::TcpListener;

    use super::*;

    /// The two ends of a connection.
    fn connection(listener: &TcpListener) -> (TcpStream, TcpStream) {
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        client.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        (client, listener.accept().unwrap().0)
    }

    fn is_closed(client: &TcpStream) -> bool {
        matches!((&mut &*client).read(&mut [0]), Ok(0))
    }

    #[test]
    fn connections_without_a_proof_take_no_place_of_those_that_are_served() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (slots, node) = (Slots::new(), IpAddr::from([10, 0, 0, 2]));
        let (served_end, served) = connection(&listener);
        let mut served = slots.admit(served, node);
        assert!(served.serve() && served.serve());
        let (ends, places): (Vec<_>, Vec<_>) = (0..=WAITING_MAX)
            .map(|_| connection(&listener))
            .map(|(end, client)| (end, slots.admit(client, node)))
            .unzip();
        assert!(is_closed(&ends[0]), "the oldest");
        assert!(!is_closed(&ends[1]) && !is_closed(&served_end));
        assert!(!slots.are_idle_for(Duration::ZERO));
        assert!(!slots.have_room(), "the others had no time for a request");
        std::thread::sleep(PROOF_MIN);
        assert!(slots.have_room());
        drop((places, served));
        assert!(slots.are_idle_for(Duration::ZERO) && !slots.are_idle_for(Duration::from_secs(60)));
    }

    #[test]
    fn an_address_has_a_part_of_the_places() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let slots = Slots::new();
        let mut places: Vec<Place> = Vec::new();
        let mut take = |last| {
            let mut place = slots.admit(connection(&listener).1, IpAddr::from([10, 0, 0, last]));
            let is_served = place.serve();
            places.push(place);
            is_served
        };
        assert_eq!((0..=SERVED_PER_ADDRESS_MAX).filter(|_| take(1)).count(), SERVED_PER_ADDRESS_MAX);
        assert_eq!((0..SERVED_MAX).filter(|index| take(2 + *index as u8)).count(), SERVED_MAX - 24);
        places.pop();
        places.remove(0);
    }
}
