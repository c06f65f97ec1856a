//! The server of the control socket. Each connection has one request; length, duration and number of requests
//! are limited. A client that does not read its answers gives way to others.

use std::cell::Cell;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::{Rc, Weak};
use std::time::Duration;

use coracle_base::clients::{Client, Clients};
use coracle_base::error::{Error, Kind, describe_io};
use coracle_base::listen::Listener;
use coracle_base::log;
use coracle_base::reactor::{self, Watched};
use coracle_control::{Answer, LINE_BYTES_MAX, Request};
use coracle_images::{Auth, Checked, ImageId, Images, Pulling};
use coracle_job::Progress;
use smol::channel::Sender;

use super::answers::{failed, image, queue};
use super::events::Watchers;
use super::{exec, node, rules, take_over};
use crate::daemon::{Daemon, free_bytes};

/// Maximum number of concurrent requests, except for those with a limit of their own; the oldest is closed for a further one.
const REQUESTS_MAX: usize = 16;

/// Maximum number of connections without a complete request; the oldest is closed for a further one.
const WAITING_MAX: usize = 16;

/// Maximum number of requests that last as long as their clients, so that other requests can always be served.
const ENDLESS_MAX: usize = 8;

/// Maximum number of concurrent operations on images, which continue without their clients.
const OPERATIONS_MAX: usize = 8;

/// Maximum number of operations that wait until their clients read; the oldest of these clients is closed for a further one.
const UNREAD_OPERATIONS_MAX: usize = OPERATIONS_MAX / 2;

/// Time limit for a client to send its request, and to read an answer.
const CLIENT_PATIENCE: Duration = Duration::from_secs(30);

/// Maximum number of queued answers; with a queue, an import continues while its client prints.
const ANSWERS_MAX: usize = 16;

/// Pause before the next accept when there are no free descriptors, and before the next read after an error.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// The listening socket, and the parts of the daemon that requests use.
pub(crate) struct Server {
    listener: Listener,
    served: Served,
    /// Connections that have not sent their request.
    waiting: Rc<Clients>,
}

/// The parts of the daemon that requests read and change.
#[derive(Clone)]
struct Served {
    images: Rc<Images>,
    /// Weak, so that a client that waits for a pull does not keep the daemon alive.
    daemon: Weak<Daemon>,
    watchers: Rc<Watchers>,
    /// Number of requests in progress that last as long as their clients.
    endless: Rc<Cell<usize>>,
    /// Number of operations on images in progress.
    operations: Rc<Cell<usize>>,
    /// Connections with a request that has no limit of its own.
    requesting: Rc<Clients>,
    /// Connections of operations on images between two answers, as many as there are operations.
    operating: Rc<Clients>,
    /// Connections of operations on images whose answer is being sent.
    unread_operations: Rc<Clients>,
}

/// A request that counts against the limit of its kind until the value is dropped.
struct Permit(Rc<Cell<usize>>);

impl Permit {
    /// Counts a request of a kind.
    ///
    /// # Errors
    /// `ResourceExhausted` if `max` requests of this kind are in progress.
    fn take(taken: &Rc<Cell<usize>>, max: usize) -> Result<Permit, Error> {
        let count = taken.get();
        if count >= max {
            return Err(Error::new(
                Kind::ResourceExhausted,
                "too many requests of this kind at once: try again",
            ));
        }
        taken.set(count + 1);
        Ok(Permit(Rc::clone(taken)))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

impl Server {
    /// Creates the socket.
    ///
    /// # Errors
    /// Those of [`Listener::bind`].
    pub(crate) fn bind(socket: &Path, images: Rc<Images>, daemon: Weak<Daemon>) -> Result<Server, Error> {
        // A client that can import an image determines which programs run.
        let listener = Listener::bind_for_root(socket)?;
        let served = Served {
            images,
            daemon,
            watchers: Rc::default(),
            endless: Rc::default(),
            operations: Rc::default(),
            requesting: Clients::new(REQUESTS_MAX),
            operating: Clients::new(usize::MAX),
            unread_operations: Clients::new(UNREAD_OPERATIONS_MAX),
        };
        Ok(Server { listener, served, waiting: Clients::new(WAITING_MAX) })
    }

    /// Accepts and serves connections until the daemon ends.
    pub(crate) async fn run(self) {
        loop {
            match self.listener.accept().await {
                Ok(stream) => self.take(stream),
                Err(error) => {
                    log::warn!("cannot accept a control connection"; error = describe_io(&error));
                    reactor::sleep(RETRY_PAUSE).await;
                }
            }
        }
    }

    fn take(&self, stream: Watched) {
        let served = self.served.clone();
        self.waiting.serve(move |place| async move {
            match read_request(&stream).await {
                Ok(request @ (Request::Events {} | Request::Exec { .. })) => {
                    drop(place);
                    let _ = endless(&stream, request, &served).await;
                }
                Ok(request) => {
                    smol::future::or(converse(&stream, request, served, place), disconnected(&stream)).await;
                }
                // A request that is too long is not read to its end, so the client counts as connected here.
                Err(error) => {
                    let _place = place.pass_to(&served.requesting);
                    if send(&stream, &failed(&error)).await.is_ok() {
                        let _ = send(&stream, &Answer::End {}).await;
                    }
                }
            }
        });
    }
}

/// Executes the request in a separate task, which continues without a client, and sends the answers. The client's place becomes the
/// newest of its table with each answer, so that the oldest is the one that has not read for longest.
async fn converse(stream: &Watched, request: Request, served: Served, mut place: Client) {
    let (sender, answers) = smol::channel::bounded(ANSWERS_MAX);
    let permit = is_operation(&request).then(|| Permit::take(&served.operations, OPERATIONS_MAX));
    let (working, sending) = match &permit {
        Some(Ok(_)) => (Rc::clone(&served.operating), Rc::clone(&served.unread_operations)),
        Some(Err(_)) | None => (Rc::clone(&served.requesting), Rc::clone(&served.requesting)),
    };
    place = place.pass_to(&working);
    reactor::spawn(async move {
        match permit.transpose() {
            Ok(_permit) => carry_out(request, &served, &sender).await,
            Err(error) => queue(&sender, failed(&error)).await,
        }
        queue(&sender, Answer::End {}).await;
    })
    .detach();
    while let Ok(answer) = answers.recv().await {
        place = place.pass_to(&sending);
        if send(stream, &answer).await.is_err() {
            return;
        }
        place = place.pass_to(&working);
    }
}

/// Whether a request is an operation on images, which may wait for a registry, a file or a worker.
fn is_operation(request: &Request) -> bool {
    matches!(
        request,
        Request::Import { .. }
            | Request::TakeOver { .. }
            | Request::Pull { .. }
            | Request::Explain { .. }
            | Request::Check { .. }
            | Request::Judge {}
            | Request::Tag { .. }
            | Request::Export { .. }
    )
}

/// Serves a request that lasts as long as its client: sends its answers, an error if there is one, and the end.
///
/// # Errors
/// The client has disconnected or does not read. No further answer may be sent then, because the last line may be incomplete.
async fn endless(stream: &Watched, request: Request, served: &Served) -> Result<(), Error> {
    let last = match begin_endless(served) {
        Err(error) => Some(failed(&error)),
        Ok((_permit, daemon)) => match request {
            Request::Exec { container, command, stdin, tty } => {
                let command = exec::Command { container, words: command, stdin, tty };
                run_command(stream, daemon, command).await
            }
            _ => tell_events(stream, daemon, &served.watchers).await?,
        },
    };
    if let Some(answer) = last {
        send(stream, &answer).await?;
    }
    send(stream, &Answer::End {}).await
}

/// Counts a request that lasts as long as its client.
///
/// # Errors
/// `ResourceExhausted` if there are too many such requests; `Unavailable` if the daemon is ending.
fn begin_endless(served: &Served) -> Result<(Permit, Rc<Daemon>), Error> {
    let permit = Permit::take(&served.endless, ENDLESS_MAX)?;
    let daemon = served.daemon.upgrade();
    Ok((permit, daemon.ok_or_else(|| Error::new(Kind::Unavailable, "the daemon is ending"))?))
}

/// Runs a command in a container. Returns the last answer; `None` if the client has disconnected.
async fn run_command(stream: &Watched, daemon: Rc<Daemon>, command: exec::Command) -> Option<Answer> {
    match exec::start(&daemon, stream, command).await {
        Ok(started) => {
            drop(daemon);
            exec::exit(started, stream).await
        }
        Err(error) => Some(failed(&error)),
    }
}

/// Sends events until the client disconnects (`None`), or until events are lost (the last answer).
///
/// # Errors
/// The client does not read.
async fn tell_events(
    stream: &Watched,
    daemon: Rc<Daemon>,
    watchers: &Rc<Watchers>,
) -> Result<Option<Answer>, Error> {
    let events = watchers.add(&daemon.pods);
    drop(daemon);
    let gone = async {
        disconnected(stream).await;
        Ok(None)
    };
    let told = async {
        while let Ok(event) = events.recv().await {
            send(stream, &Answer::Event(event)).await?;
        }
        Ok(Some(Answer::Failed { message: "more events wait than are kept, or the daemon is ending".into() }))
    };
    smol::future::or(gone, told).await
}

/// Waits until the client has closed its end. A client that sends more than its request has violated the protocol, and counts
/// as disconnected; one from whom the kernel cannot read for lack of memory does not.
pub(super) async fn disconnected(stream: &Watched) {
    while let Err(error) = stream.read(&mut [0]).await {
        if matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe) {
            return;
        }
        log::warn!("cannot read from a control connection"; error = describe_io(&error));
        reactor::sleep(RETRY_PAUSE).await;
    }
}

/// Sends one answer.
///
/// # Errors
/// The client has disconnected or does not read.
async fn send(stream: &Watched, answer: &Answer) -> Result<(), Error> {
    // All types are strings and numbers, so the conversion does not fail.
    let mut line = serde_json::to_vec(answer).unwrap_or_default();
    line.push(b'\n');
    let sent = reactor::deadline(CLIENT_PATIENCE, stream.write_all(&line)).await;
    sent.map_err(|_| Error::new(Kind::DeadlineExceeded, "the client does not read"))??;
    Ok(())
}

async fn read_request(stream: &Watched) -> Result<Request, Error> {
    let line = reactor::deadline(CLIENT_PATIENCE, read_line(stream));
    let line = line.await.map_err(|_| Error::new(Kind::DeadlineExceeded, "no request came"))??;
    serde_json::from_slice(&line)
        .map_err(|error| Error::new(Kind::InvalidArgument, format!("not a request of this coracle: {error}")))
}

async fn read_line(stream: &Watched) -> Result<Vec<u8>, Error> {
    let mut line = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let count = stream.read(&mut buffer).await?;
        let read = &buffer[..count];
        let end = read.iter().position(|byte| *byte == b'\n');
        line.extend_from_slice(&read[..end.unwrap_or(count)]);
        if line.len() > LINE_BYTES_MAX {
            let text = format!("a request of more than {LINE_BYTES_MAX} bytes");
            return Err(Error::new(Kind::ResourceExhausted, text));
        }
        if end.is_some() || count == 0 {
            return Ok(line);
        }
    }
}

async fn carry_out(request: Request, served: &Served, answers: &Sender<Answer>) {
    if let Some(found) = about_node(&request, &served.daemon).await {
        for answer in found {
            queue(answers, answer).await;
        }
    } else {
        about_images(request, &served.images, answers).await;
    }
}

async fn about_images(request: Request, images: &Rc<Images>, answers: &Sender<Answer>) {
    match request {
        Request::Import { files } => {
            for file in files {
                import(&file, images, answers).await;
            }
        }
        Request::TakeOver { store, namespace, dry_run } => {
            take_over::run(&store, &namespace, dry_run, images, answers).await;
        }
        Request::List {} => {
            for view in images.list() {
                queue(answers, image(view)).await;
            }
        }
        Request::Pulling {} => {
            for pulling in images.pulling() {
                queue(answers, under_way(pulling)).await;
            }
        }
        Request::Pull { names } => {
            for name in names {
                pull(&name, images, answers).await;
            }
        }
        Request::Tag { name, tag } => {
            let tagged = images.tag(&name, &tag).await.map(image);
            queue(answers, or_failed(tagged)).await;
        }
        Request::Prune {} => {
            for (id, name) in images.unused() {
                if let Some(answer) = prune(id, name, images) {
                    queue(answers, answer).await;
                }
            }
        }
        Request::Usage {} => queue(answers, usage(images).await).await,
        Request::Explain { names } => {
            for name in names {
                rules::explain(&name, images, answers).await;
            }
        }
        Request::Remove { names, force } => {
            for name in names {
                queue(answers, removed(&name, name.clone(), force, images)).await;
            }
        }
        Request::Check { repair } => {
            for (id, name) in images.checkable() {
                queue(answers, check(id, name, repair, images).await).await;
            }
        }
        Request::Judge {} => rules::judge(images, answers).await,
        Request::Export { names, file } => queue(answers, export(&names, file, images).await).await,
        Request::Pin { names } => {
            for name in names {
                let pinned = images.pin(&name).map(|_| Answer::Pinned { name });
                queue(answers, or_failed(pinned)).await;
            }
        }
        Request::Unpin { names } => {
            for name in names {
                let unpinned = images.unpin(&name).map(|()| Answer::Unpinned { name });
                queue(answers, or_failed(unpinned)).await;
            }
        }
        // Those about pods, of a daemon that is ending.
        _ => {}
    }
}

/// The answers to a request about pods or the daemon itself; `None` for a request about images.
async fn about_node(request: &Request, daemon: &Weak<Daemon>) -> Option<Vec<Answer>> {
    let daemon = daemon.upgrade()?;
    let answers = match request {
        Request::Pods {} => node::pods(&daemon).await,
        Request::Containers {} => node::containers(&daemon).await,
        Request::Stats {} => node::stats(&daemon).await,
        Request::Waits {} => node::waits(),
        Request::Conditions {} => {
            node::conditions(&daemon).await.unwrap_or_else(|error| vec![failed(&error)])
        }
        Request::Configuration {} => vec![Answer::Configuration(daemon.reloadable.loaded.borrow().clone())],
        Request::Metrics {} => vec![node::metrics(&daemon).await],
        _ => return None,
    };
    Some(answers)
}

async fn usage(images: &Rc<Images>) -> Answer {
    let usage = images.usage().await;
    Answer::Usage {
        used_bytes: usage.used_bytes,
        free_bytes: free_bytes(&usage.directory),
        images: images.list().len(),
        directory: usage.directory,
    }
}

async fn pull(name: &str, images: &Rc<Images>, answers: &Sender<Answer>) {
    let pulled = images.pull_counted(name, Auth::default()).await;
    let pulled = pulled.and_then(|(id, moved)| Ok((images.resolve(&id.to_string())?, moved)));
    if let Err(error) = &pulled {
        log::warn!("image not pulled"; image = name, error = error);
    }
    let moved = pulled.as_ref().ok().map(|(_, moved)| *moved).filter(|moved| moved.bytes_total > 0);
    queue(answers, or_failed(pulled.map(|(view, _)| image(view)))).await;
    if let Some(Progress { bytes_total, bytes_fetched, bytes_from_neighbours, bytes_reused, .. }) = moved {
        // Of layers that were there already nothing is fetched nor taken from others.
        let reused = bytes_reused.max(bytes_total.saturating_sub(bytes_fetched));
        let registry = bytes_fetched.saturating_sub(bytes_from_neighbours);
        queue(answers, Answer::Moved { bytes_total, reused, neighbours: bytes_from_neighbours, registry })
            .await;
    }
}

async fn check(id: ImageId, name: String, repair: bool, images: &Rc<Images>) -> Answer {
    let message = match images.check(&id, repair).await {
        Ok(Checked::Whole { repaired, not_compared }) => {
            return Answer::Whole { name, repaired, not_compared };
        }
        Ok(Checked::Broken(findings)) => format!("image {name}: is damaged: {}", findings.join("; ")),
        Ok(Checked::Dropped(findings)) => {
            format!(
                "image {name}: was damaged and has been removed: pull or import it again: {}",
                findings.join("; ")
            )
        }
        Err(error) => format!("image {name}: not checked: {error}"),
    };
    Answer::Failed { message }
}

async fn import(file: &Path, images: &Images, answers: &Sender<Answer>) {
    let imported = if file.is_absolute() {
        images.import(file).await
    } else {
        let text = format!("import {}: not an absolute path", file.display());
        Err(Error::new(Kind::InvalidArgument, text))
    };
    match imported {
        Ok((views, rest)) => {
            for view in views {
                queue(answers, image(view)).await;
            }
            if let Err(error) = rest {
                log::warn!("image not imported"; error = error);
                queue(answers, failed(&error)).await;
            }
        }
        Err(error) => {
            log::warn!("image not imported"; error = error);
            queue(answers, failed(&error)).await;
        }
    }
}

fn under_way(pulling: Pulling) -> Answer {
    let Pulling { name, progress, rate, left, since } = pulling;
    Answer::Pulling {
        name,
        bytes_done: progress.bytes_done,
        bytes_total: progress.bytes_total,
        layers_done: progress.layers_done,
        layers_total: progress.layers_total,
        rate,
        left_s: left.map(|left| left.as_secs()),
        since_s: since.as_secs(),
    }
}

fn or_failed(answer: Result<Answer, Error>) -> Answer {
    answer.unwrap_or_else(|error| failed(&error))
}

/// Removes an image. Unlike in the CRI, a missing image is an error, and so is a pinned one unless `is_forced` is set.
async fn export(names: &[String], file: PathBuf, images: &Rc<Images>) -> Answer {
    or_failed(images.export(names, &file).await.map(|()| Answer::Exported { file }))
}

/// Removes an image that was unused when the client's list was made; `None` if a container uses it now.
fn prune(id: ImageId, name: String, images: &Images) -> Option<Answer> {
    let is_unused = images.unused().iter().any(|(unused, _)| *unused == id);
    is_unused.then(|| removed(&id.to_string(), name, false, images))
}

/// Removes the image `image`, an ID or a name, which the answer calls `name`.
fn removed(image: &str, name: String, is_forced: bool, images: &Images) -> Answer {
    or_failed(remove(image, is_forced, images).map(|()| Answer::Removed { name }))
}

fn remove(name: &str, is_forced: bool, images: &Images) -> Result<(), Error> {
    let view = images.resolve(name)?;
    if view.pinned && !is_forced {
        let text = format!("image {name}: is pinned: use --force");
        return Err(Error::new(Kind::FailedPrecondition, text));
    }
    images.remove(name)?;
    match images.find(&view.id.to_string())? {
        None => Ok(()),
        Some(_) => Err(Error::new(Kind::FailedPrecondition, format!("image {name}: is built in"))),
    }
}

#[cfg(test)]
mod tests {
    use super::{CLIENT_PATIENCE, LINE_BYTES_MAX, Server};
    use coracle_base::reactor::{self, Watched};
    use coracle_base::testdir::TestDir;
    use coracle_base::workers::Workers;
    use coracle_images::{Images, Options};
    use coracle_job::Limits;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixStream;
    use std::path::{Path, PathBuf};
    use std::rc::Weak;
    use std::time::Duration;

    /// Sends `request` and returns all answers.
    async fn ask(socket: &Path, request: &[u8]) -> String {
        let stream = Watched::new(UnixStream::connect(socket).unwrap()).unwrap();
        // The daemon may close the connection before the whole request was sent.
        let _ = stream.write_all(request).await;
        let mut text = Vec::new();
        let mut buffer = [0; 4096];
        while let Ok(count @ 1..) = stream.read(&mut buffer).await {
            text.extend_from_slice(&buffer[..count]);
        }
        String::from_utf8(text).unwrap()
    }

    /// Serves on a socket, with workers that fail.
    fn serve(dir: &TestDir) -> PathBuf {
        let socket = dir.path().join("control.sock");
        let workers = Workers::new(dir.script("worker", "cat > /dev/null; exit 7"));
        let options = Options {
            root: dir.path().join("root"),
            additional_stores: Vec::new(),
            keep_blobs: true,
            partial_pulls: true,
            limits: Limits::default(),
            registries: coracle_job::Registries::default(),
        };
        let server = Server::bind(&socket, Images::open(options, workers).unwrap(), Weak::new()).unwrap();
        reactor::spawn(server.run()).detach();
        socket
    }

    /// Regression: sixteen such clients, or eight with operations, had all others refused for half a minute.
    #[test]
    fn clients_that_do_not_read_their_answers_keep_no_other_away() {
        let dir = TestDir::new("control-unread");
        reactor::run(async {
            let socket = serve(&dir);
            let many = vec!["\"app\""; 600].join(",");
            let cases = [
                ("pin", "names", 40, "image app: not found"),
                ("import", "files", 12, "not an absolute path"),
            ];
            for (name, field, clients, expected) in cases {
                let request = format!("{{\"{name}\":{{\"{field}\":[{many}]}}}}\n");
                let mut unread = Vec::new();
                for _ in 0..clients {
                    let stream = Watched::new(UnixStream::connect(&socket).unwrap()).unwrap();
                    stream.write_all(request.as_bytes()).await.unwrap();
                    unread.push(stream);
                    reactor::sleep(Duration::from_millis(20)).await;
                }
                let request = format!("{{\"{name}\":{{\"{field}\":[\"app\"]}}}}\n");
                let answered = async {
                    // Operations whose clients were disconnected continue for a moment.
                    while !ask(&socket, request.as_bytes()).await.contains(expected) {
                        reactor::sleep(Duration::from_millis(20)).await;
                    }
                };
                reactor::deadline(CLIENT_PATIENCE / 2, answered).await.unwrap();
            }
        });
    }

    #[test]
    fn requests_are_answered_and_malformed_ones_refused() {
        let dir = TestDir::new("control");
        reactor::run(async {
            let socket = serve(&dir);
            assert_eq!(std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
            let ended = "import /a.tar: the worker exited without an answer: exit status: 7";
            let long = vec![b' '; LINE_BYTES_MAX + 1];
            let cases: [(&[u8], &str); 8] = [
                (b"{\"list\":{}}\n", "\"tags\":[\"coracle.local/sandbox:v1\"]"),
                (b"{\"remove\":{\"names\":[\"app\",\"A\"]}}\n", "image app: not found"),
                (b"{\"remove\":{\"names\":[\"coracle.local/sandbox:v1\"],\"force\":true}}\n", "is built in"),
                (b"{\"import\":{\"files\":[\"/a.tar\"]}}\n", ended),
                (b"{\"import\":{\"files\":[\"a.tar\"]}}\n", "not an absolute path"),
                (b"{\"take_over\":{\"store\":\"a\",\"namespace\":\"b\"}}\n", "not an absolute path"),
                (b"nonsense\n", "not a request of this coracle"),
                (&long, "a request of more than 1048576 bytes"),
            ];
            for (request, expected) in cases {
                let answers = ask(&socket, request).await;
                let shown = String::from_utf8_lossy(&request[..request.len().min(100)]);
                assert!(
                    answers.contains(expected) && answers.ends_with("{\"end\":{}}\n"),
                    "{shown}: {answers}"
                );
            }
        });
    }
}
