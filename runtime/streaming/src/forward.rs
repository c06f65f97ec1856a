//! Port-forward: TCP connections into one pod over one connection of a client (streaming 6.6, §6.8). Each TCP
//! connection uses two streams, one for data and one for an error message.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use coracle_base::error::describe_io;
use coracle_base::reactor::{self, Task};
use coracle_engine::Pod;

use super::connection::{Connection, EndReason, Incoming, Receiver};
use super::queue::Queue;

/// Maximum number of bytes that a client may send before the server in the pod reads them. Each of up to 512
/// connections may use this number.
const QUEUE_BYTES_MAX: usize = 64 << 10;
/// Time limit for the second stream of a pair after the first one was opened.
const PAIR_LIMIT: Duration = Duration::from_secs(30);
/// Time for which a client may continue to send after the server's end of file. All clients end their half at
/// once.
const LINGER: Duration = Duration::from_secs(60);

/// One port-forward session.
pub(super) struct Forward {
    connection: Rc<Connection>,
    pod: Rc<Pod>,
    /// TCP connections by the number of their data stream. Dropping a pair closes its TCP connection.
    pairs: Rc<RefCell<BTreeMap<u32, Pair>>>,
    /// Streams whose pair is not complete, by the client's request number.
    halves: RefCell<BTreeMap<u32, Half>>,
}

/// A TCP connection with its two streams.
struct Pair {
    error: u32,
    queue: Rc<Queue>,
    _task: Task<()>,
}

/// A stream whose pair is not complete.
struct Half {
    stream: u32,
    is_error: bool,
    _expires: Task<()>,
}

/// The headers of a stream.
#[derive(Debug, PartialEq, Eq)]
struct StreamHeaders {
    is_error: bool,
    port: u16,
    /// The client's request number, which the two streams of a pair share.
    number: u32,
}

impl StreamHeaders {
    fn parse(stream: u32, headers: &[(String, String)]) -> Option<StreamHeaders> {
        let value =
            |name: &str| headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str());
        let is_error = match value("streamtype")? {
            "error" => true,
            "data" => false,
            _ => return None,
        };
        let port = value("port")?.parse().ok().filter(|port| *port > 0)?;
        let number = match value("requestid") {
            Some(number) => number.parse().ok()?,
            // Old clients send no request number: they open the error stream first and the data stream next.
            None if is_error => stream,
            None => stream.checked_sub(2)?,
        };
        Some(StreamHeaders { is_error, port, number })
    }
}

impl Forward {
    pub(super) fn new(connection: Rc<Connection>, pod: Rc<Pod>) -> Forward {
        Forward { connection, pod, pairs: Rc::default(), halves: RefCell::default() }
    }

    /// Serves the client until the connection ends. `ports` contains the ports of the request; a WebSocket
    /// client cannot name ports later.
    pub(super) async fn run(&self, mut receiver: Receiver, ports: &[u16]) -> EndReason {
        let is_spdy = self.connection.update(|peer| peer.spdy().is_some());
        if !is_spdy {
            for (index, port) in (0..).zip(ports) {
                let (data, error) = (2 * index, 2 * index + 1);
                self.connection.update(|peer| {
                    peer.send(data, &port.to_le_bytes());
                    peer.send(error, &port.to_le_bytes());
                });
                self.start(*port, data, error);
            }
        }
        let receive = async {
            loop {
                match receiver.next(&self.connection).await {
                    Err(lost) => return lost,
                    Ok(Incoming::Opened { stream, headers }) => self.opened(stream, &headers),
                    Ok(Incoming::Data { stream }) => {
                        let queue = self.pairs.borrow().get(&stream).map(|pair| Rc::clone(&pair.queue));
                        if let Some(queue) = queue {
                            queue.push(receiver.bytes()).await;
                        }
                    }
                    Ok(Incoming::Ended { stream }) => {
                        if let Some(pair) = self.pairs.borrow().get(&stream) {
                            pair.queue.end();
                        }
                    }
                    Ok(Incoming::Reset { stream }) => self.reset(stream),
                }
            }
        };
        smol::future::or(receive, self.connection.transmit()).await
    }

    fn opened(&self, stream: u32, headers: &[(String, String)]) {
        let Some(StreamHeaders { is_error, port, number }) = StreamHeaders::parse(stream, headers) else {
            self.connection.update(|peer| peer.spdy().map(|session| session.refuse(stream)));
            return;
        };
        self.connection.update(|peer| peer.spdy().map(|session| session.reply(stream)));
        let other = self.halves.borrow_mut().remove(&number);
        match other {
            Some(other) if other.is_error == is_error => {
                let text = format!("error: {number}: a second stream of the same type");
                say(&self.connection, if is_error { stream } else { other.stream }, &text);
                self.connection.update(|peer| peer.spdy().map(|session| session.refuse(stream)));
            }
            Some(other) if is_error => self.start(port, other.stream, stream),
            Some(other) => self.start(port, stream, other.stream),
            None => {
                let connection = Rc::clone(&self.connection);
                let expires = reactor::spawn(async move {
                    reactor::sleep(PAIR_LIMIT).await;
                    if is_error {
                        say(&connection, stream, "error: timed out waiting for its data stream");
                    }
                    connection.update(|peer| peer.spdy().map(|session| session.reset(stream)));
                });
                let half = Half { stream, is_error, _expires: expires };
                self.halves.borrow_mut().insert(number, half);
            }
        }
    }

    fn start(&self, port: u16, data: u32, error: u32) {
        let queue = Rc::new(Queue::new(QUEUE_BYTES_MAX));
        let (connection, pod) = (Rc::clone(&self.connection), Rc::clone(&self.pod));
        // A weak reference, because the table owns the task.
        let (from_client, pairs) = (Rc::clone(&queue), Rc::downgrade(&self.pairs));
        let task = reactor::spawn(async move {
            forward(&connection, &pod, port, (data, error), &from_client).await;
            if let Some(pairs) = pairs.upgrade() {
                // Dropping the pair also drops the handle of this task, which has completed.
                pairs.borrow_mut().remove(&data);
            }
        });
        self.pairs.borrow_mut().insert(data, Pair { error, queue, _task: task });
    }

    /// Closes a TCP connection that the client has reset, and ends its error stream.
    fn reset(&self, stream: u32) {
        let pair = self.pairs.borrow_mut().remove(&stream);
        if let Some(pair) = pair {
            pair.queue.close();
            self.connection.update(|peer| peer.finish(pair.error));
        }
        self.halves.borrow_mut().retain(|_, half| half.stream != stream);
    }
}

async fn forward(
    connection: &Connection,
    pod: &Pod,
    port: u16,
    (data, error): (u32, u32),
    from_client: &Queue,
) {
    let socket = match pod.connect(port).await {
        Ok(socket) => Rc::new(socket),
        Err(why) => {
            from_client.close();
            // The text before the cause is the same as that of other runtimes, which clients print.
            let text = format!(
                "error forwarding port {port} to pod {}, uid : failed to connect to localhost:{port} inside its network \
                 namespace: {why}",
                pod.id
            );
            say(connection, error, &text);
            connection.update(|peer| peer.spdy().map(|session| session.reset(data)));
            return;
        }
    };
    let mut up = pin!(from_client.drain_to_socket(&socket));
    let has_sent = Cell::new(false);
    let sending = async {
        up.as_mut().await;
        has_sent.set(true);
        std::future::pending().await
    };
    // A response may take long after the client's last byte, but a client that has received the complete
    // response must end its half soon.
    let copied = smol::future::or(connection.copy(&socket, data), sending).await;
    if let Err(broken) = copied {
        from_client.close();
        return say(
            connection,
            error,
            &format!("error forwarding port {port} to pod {}: {}", pod.id, describe_io(&broken)),
        );
    }
    if !has_sent.get() {
        // After the limit, data that the client still sends is lost.
        let _ = reactor::deadline(LINGER, up).await;
    }
    from_client.close();
    connection.update(|peer| {
        peer.finish(error);
        peer.finish(data);
    });
}

/// Writes a text to an error stream and ends the stream.
fn say(connection: &Connection, error: u32, text: &str) {
    connection.update(|peer| {
        peer.send(error, text.as_bytes());
        peer.finish(error);
    });
}

#[cfg(test)]
mod tests {
    use super::StreamHeaders;

    #[test]
    fn stream_headers_are_parsed() {
        let asked = |stream, headers: &[(&str, &str)]| {
            let headers: Vec<_> =
                headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
            StreamHeaders::parse(stream, &headers)
        };
        let data = asked(7, &[("streamtype", "data"), ("port", "80"), ("requestid", "3")]);
        assert_eq!(data, Some(StreamHeaders { is_error: false, port: 80, number: 3 }));
        let ancient = [5, 7].map(|stream| {
            let kind = if stream == 5 { "error" } else { "data" };
            asked(stream, &[("streamtype", kind), ("port", "80")]).unwrap().number
        });
        assert_eq!(ancient, [5, 5]);
        for headers in [
            &[("port", "80")][..],
            &[("streamtype", "data")],
            &[("streamtype", "data"), ("port", "0")],
            &[("streamtype", "data"), ("port", "65536")],
            &[("streamtype", "stdin"), ("port", "80")],
            &[("streamtype", "data"), ("port", "80"), ("requestid", "x")],
        ] {
            assert_eq!(asked(7, headers), None, "{headers:?}");
        }
    }
}
