//! The daemon's side of the control socket. Every connection is one request, with a bound on its length, its time and
//! their number.

use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use coracle_base::error::{Error, Kind, plain};
use coracle_base::listen::Listener;
use coracle_base::log;
use coracle_base::reactor::{self, Watched};
use coracle_images::{Checked, ImageId, Images, Pulling, View};
use coracle_job::ExplainedEndpoint;
use smol::channel::Sender;

use super::{Answer, LINE_BYTES_MAX, Request};

/// Requests at once; more are told to come back.
const CONNECTIONS_MAX: usize = 16;

/// How long a client may take to say what it wants, or to take an answer.
const CLIENT_PATIENCE: Duration = Duration::from_secs(30);

/// Answers made and not taken yet: lets an import get on while its client prints.
const ANSWERS_MAX: usize = 16;

/// How long to wait before the next accept when there are no descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The socket and what it works on.
pub(crate) struct Server {
    listener: Listener,
    images: Rc<Images>,
    /// Counted by its references: one for each connection beside this one.
    connections: Rc<()>,
}

impl Server {
    /// Makes the socket.
    ///
    /// # Errors
    /// As [`Listener::bind`].
    pub(crate) fn bind(socket: &Path, images: Rc<Images>) -> Result<Server, Error> {
        // Who can import an image decides what runs.
        let listener = Listener::bind_for_root(socket)?;
        Ok(Server { listener, images, connections: Rc::new(()) })
    }

    /// Serves as long as the daemon lives.
    pub(crate) async fn run(self) {
        loop {
            match self.listener.accept().await {
                Ok(stream) => self.take(stream),
                Err(error) => {
                    log::warn!("control connection not accepted"; error = plain(&error));
                    reactor::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    fn take(&self, stream: Watched) {
        let images = self.images.clone();
        let counted = self.connections.clone();
        let is_full = Rc::strong_count(&counted) > CONNECTIONS_MAX + 1;
        reactor::spawn(async move {
            let _counted = counted;
            let refusal = Error::new(Kind::ResourceExhausted, "too many clients at once: try again");
            let request = if is_full { Err(refusal) } else { read_request(&stream).await };
            converse(&stream, request, images).await;
        })
        .detach();
    }
}

/// Does what is asked in a task of its own, which goes on without a client, and passes on the answers.
async fn converse(stream: &Watched, request: Result<Request, Error>, images: Rc<Images>) {
    let (sender, answers) = smol::channel::bounded(ANSWERS_MAX);
    reactor::spawn(async move {
        match request {
            Ok(request) => carry_out(request, &images, &sender).await,
            Err(error) => say(&sender, Answer::Failed { message: error.to_string() }).await,
        }
        say(&sender, Answer::End {}).await;
    })
    .detach();
    while let Ok(answer) = answers.recv().await {
        // Its types are strings and numbers, which are always JSON.
        let Ok(mut line) = serde_json::to_vec(&answer) else { return };
        line.push(b'\n');
        match reactor::deadline(CLIENT_PATIENCE, stream.write_all(&line)).await {
            Ok(Ok(())) => {}
            // The client is gone or stuck.
            Ok(Err(_)) | Err(_) => return,
        }
    }
}

/// A client that is gone does not hear it.
async fn say(answers: &Sender<Answer>, answer: Answer) {
    let _ = answers.send(answer).await;
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

async fn carry_out(request: Request, images: &Rc<Images>, answers: &Sender<Answer>) {
    match request {
        Request::Import { files } => {
            for file in files {
                import(&file, images, answers).await;
            }
        }
        Request::List {} => {
            for view in images.list() {
                say(answers, image(view)).await;
            }
        }
        Request::Pulling {} => {
            for pulling in images.pulling() {
                say(answers, under_way(pulling)).await;
            }
        }
        Request::Explain { names } => {
            for name in names {
                explain(&name, images, answers).await;
            }
        }
        Request::Remove { names, force } => {
            for name in names {
                say(answers, remove(name, force, images)).await;
            }
        }
        Request::Check { repair } => {
            for (id, name) in images.checkable() {
                say(answers, check(id, name, repair, images).await).await;
            }
        }
        Request::Export { names, file } => {
            let exported = images.export(&names, &file).await.map(|()| Answer::Exported { file });
            say(answers, or_failed(exported)).await;
        }
        Request::Pin { names } => {
            for name in names {
                let pinned = images.pin(&name).map(|_| Answer::Pinned { name });
                say(answers, or_failed(pinned)).await;
            }
        }
        Request::Unpin { names } => {
            for name in names {
                let unpinned = images.unpin(&name).map(|()| Answer::Unpinned { name });
                say(answers, or_failed(unpinned)).await;
            }
        }
    }
}

async fn check(id: ImageId, name: String, repair: bool, images: &Rc<Images>) -> Answer {
    let message = match images.check(&id, repair).await {
        Ok(Checked::Whole(mended)) => return Answer::Whole { name, mended },
        Ok(Checked::Broken(findings)) => format!("image {name}: is broken: {}", findings.join("; ")),
        Ok(Checked::Dropped(findings)) => {
            format!("image {name}: was broken and is dropped: pull it again: {}", findings.join("; "))
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
                say(answers, image(view)).await;
            }
            if let Err(error) = rest {
                say(answers, Answer::Failed { message: error.to_string() }).await;
            }
        }
        Err(error) => say(answers, Answer::Failed { message: error.to_string() }).await,
    }
}

async fn explain(name: &str, images: &Images, answers: &Sender<Answer>) {
    match images.explain(name).await {
        Ok((name, endpoints)) => {
            say(answers, Answer::Explained { name }).await;
            for endpoint in endpoints {
                let ExplainedEndpoint { url, source, credentials, tls, proxy } = endpoint;
                say(answers, Answer::Endpoint { url, source, credentials, tls, proxy }).await;
            }
        }
        Err(error) => say(answers, Answer::Failed { message: error.to_string() }).await,
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
    answer.unwrap_or_else(|error| Answer::Failed { message: error.to_string() })
}

/// Unlike the CRI's, a removal by hand says when there was nothing to remove, and thinks twice about what is pinned.
fn remove(name: String, is_forced: bool, images: &Images) -> Answer {
    let removed = images.resolve(&name).and_then(|view| {
        if view.pinned && !is_forced {
            let text = format!("image {name}: is pinned: use --force");
            return Err(Error::new(Kind::FailedPrecondition, text));
        }
        images.remove(&name)?;
        match images.find(&view.id.to_string())? {
            None => Ok(()),
            Some(_) => Err(Error::new(Kind::FailedPrecondition, format!("image {name}: is built in"))),
        }
    });
    or_failed(removed.map(|()| Answer::Removed { name }))
}

fn image(view: View) -> Answer {
    let View { id, tags, digests, size_bytes, user: _, pinned } = view;
    Answer::Image { id: id.to_string(), tags, digests, size_bytes, pinned }
}

#[cfg(test)]
mod tests {
    use super::Server;
    use coracle_base::reactor::{self, Watched};
    use coracle_base::testdir::TestDir;
    use coracle_base::workers::Workers;
    use coracle_images::{Images, Options};
    use coracle_job::Limits;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixStream;
    use std::path::Path;

    /// Sends `request` and gives all that comes back.
    async fn ask(socket: &Path, request: &[u8]) -> String {
        let stream = Watched::new(UnixStream::connect(socket).unwrap().into()).unwrap();
        // The daemon may have heard enough before it was all said.
        let _ = stream.write_all(request).await;
        let mut text = Vec::new();
        let mut buffer = [0; 4096];
        while let Ok(count @ 1..) = stream.read(&mut buffer).await {
            text.extend_from_slice(&buffer[..count]);
        }
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn requests_are_answered_and_nonsense_is_refused() {
        let dir = TestDir::new("control");
        let socket = dir.path().join("control.sock");
        reactor::run(async {
            let program = dir.script("worker", "cat > /dev/null; exit 7");
            let workers = Workers::new(program);
            let options = Options {
                root: dir.path().join("root"),
                keep_blobs: true,
                limits: Limits::default(),
                registries: coracle_job::Registries::default(),
            };
            let server = Server::bind(&socket, Images::open(options, workers).unwrap()).unwrap();
            assert_eq!(std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
            reactor::spawn(server.run()).detach();
            let ended = "import /a.tar: the worker ended without an answer: exit status: 7";
            let cases: [(&[u8], &str); 6] = [
                (b"{\"list\":{}}\n", "\"tags\":[\"coracle.local/sandbox:v1\"]"),
                (b"{\"remove\":{\"names\":[\"app\",\"A\"]}}\n", "image app: not found"),
                (b"{\"remove\":{\"names\":[\"coracle.local/sandbox:v1\"],\"force\":true}}\n", "is built in"),
                (b"{\"import\":{\"files\":[\"/a.tar\"]}}\n", ended),
                (b"{\"import\":{\"files\":[\"a.tar\"]}}\n", "not an absolute path"),
                (b"nonsense\n", "not a request of this coracle"),
            ];
            for (request, expected) in cases {
                let answers = ask(&socket, request).await;
                let shown = String::from_utf8_lossy(request);
                assert!(
                    answers.contains(expected) && answers.ends_with("{\"end\":{}}\n"),
                    "{shown}: {answers}"
                );
            }
        });
    }
}
