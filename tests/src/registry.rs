//! A registry on the loopback interface: Debian's docker-registry as a child process, and optionally a proxy
//! that requires credentials, counts requests, or modifies answers.

use std::collections::BTreeMap;
use std::io::{BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};

use crate::host::wait_within;
use crate::http::{self, Head};
use crate::image::{self, INDEX, Image, MANIFEST};
use crate::layer::digest;

/// Name of the program; `make test` unpacks Debian's package if it is not installed.
const PROGRAM: &str = "docker-registry";

/// A running registry; ended on drop.
pub struct Registry {
    child: Child,
    folder: PathBuf,
    address: SocketAddr,
}

impl Registry {
    /// Starts a registry with its storage in `folder/registry`.
    pub fn start(folder: &Path) -> Registry {
        /// Maximum number of attempts: a port that was free may be in use when the registry starts.
        const TRIES: usize = 3;
        let folder = folder.join("registry");
        let answering = (0..TRIES).find_map(|_| {
            let registry = Self::launch(&folder);
            let asks = || http::request(registry.address, "GET", "/v2/", "", b"").ok();
            wait_within(Duration::from_secs(10), asks).is_some().then_some(registry)
        });
        answering.unwrap_or_else(|| panic!("no registry answers: {}", folder.display()))
    }

    fn launch(folder: &Path) -> Registry {
        std::fs::create_dir_all(folder).expect("a folder for the registry");
        let address = free_address();
        let config = folder.join("config.yml");
        let text = format!(
            "version: 0.1\nlog:\n  level: warn\nstorage:\n  filesystem:\n    rootdirectory: {}\nhttp:\n  addr: {address}\n",
            folder.join("data").display()
        );
        std::fs::write(&config, text).expect("the registry's configuration");
        let log = std::fs::File::create(folder.join("log")).expect("the registry's log");
        let child = Command::new(std::env::var("CORACLE_DOCKER_REGISTRY").unwrap_or(PROGRAM.into()))
            .arg("serve")
            .arg(&config)
            .env("OTEL_TRACES_EXPORTER", "none")
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a second handle"))
            .stderr(log)
            .spawn()
            .unwrap_or_else(|error| panic!("{PROGRAM}: {error}; tests/tools/install brings it"));
        Registry { child, folder: folder.to_owned(), address }
    }

    /// The address on which the registry listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The image name `HOST:PORT/REPO:TAG` in this registry.
    pub fn name(&self, repository: &str, tag: &str) -> String {
        format!("{}/{repository}:{tag}", self.address)
    }

    /// Pushes an image; returns the digest of its manifest.
    pub fn push(&self, image: &Image, repository: &str, tag: &str) -> String {
        self.push_blob(repository, &image.config_blob());
        for layer in &image.layers {
            self.push_blob(repository, &layer.blob);
        }
        self.push_manifest(repository, tag, MANIFEST, &image.manifest())
    }

    /// Pushes an index of images in this order; returns its digest.
    pub fn push_index(&self, images: &[Image], repository: &str, tag: &str) -> String {
        let manifests: Vec<Value> = images
            .iter()
            .map(|image| {
                let manifest = image.manifest();
                let own = digest(&manifest);
                self.push(image, repository, &own.replace(':', "-")[..20]);
                json!({
                    "mediaType": MANIFEST, "digest": own, "size": manifest.len(),
                    "platform": { "os": "linux", "architecture": image.architecture },
                })
            })
            .collect();
        let index = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": manifests }).to_string();
        self.push_manifest(repository, tag, INDEX, index.as_bytes())
    }

    /// Pushes all images of an archive of `docker save` under their names without the registry's. Each has one name.
    pub fn push_archive(&self, archive: &Path) {
        // Images share layers: each file is pushed once, and the other repositories get it from this one.
        const FIRST: &str = "archive";
        let mut tar = tar::Archive::new(std::fs::File::open(archive).expect("an archive"));
        let (mut list, mut descriptors) = (Vec::new(), BTreeMap::new());
        for entry in tar.entries().expect("a tar archive") {
            let mut entry = entry.expect("a tar archive");
            let path = entry.path().expect("a path").to_string_lossy().trim_start_matches("./").to_owned();
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes).expect("a whole archive");
            let kind = match path.rsplit_once('.') {
                _ if path == "manifest.json" => {
                    list = serde_json::from_slice::<Vec<Value>>(&bytes).expect("a list of images");
                    continue;
                }
                Some((_, "json")) => "application/vnd.oci.image.config.v1+json",
                Some((_, "tar")) => "application/vnd.oci.image.layer.v1.tar",
                _ => continue,
            };
            self.push_blob(FIRST, &bytes);
            descriptors.insert(path, image::descriptor(kind, &bytes));
        }
        for image in list {
            let name = image["RepoTags"][0].as_str().expect("a name");
            let (repository, tag) = name.rsplit_once(':').expect("a tag");
            let repository = repository.split_once('/').expect("a registry's name").1;
            let descriptor = |file: &Value| &descriptors[file.as_str().expect("a file's name")];
            let config = descriptor(&image["Config"]);
            let layers: Vec<&Value> =
                image["Layers"].as_array().expect("layers").iter().map(descriptor).collect();
            for blob in layers.iter().chain([&config]) {
                self.mount_blob(repository, FIRST, blob["digest"].as_str().expect("a digest"));
            }
            let manifest =
                json!({ "schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers });
            self.push_manifest(repository, tag, MANIFEST, manifest.to_string().as_bytes());
        }
    }

    /// Gives a repository a blob that another one has.
    fn mount_blob(&self, repository: &str, other: &str, digest: &str) {
        let path = format!("/v2/{repository}/blobs/uploads/?mount={digest}&from={other}");
        let (head, answer) =
            http::request(self.address, "POST", &path, "", b"").expect("the registry mounts blobs");
        assert_eq!(head.second(), "201", "{}", String::from_utf8_lossy(&answer));
    }

    /// Pushes one blob in one request.
    pub fn push_blob(&self, repository: &str, blob: &[u8]) {
        let start = format!("/v2/{repository}/blobs/uploads/");
        let (head, _) =
            http::request(self.address, "POST", &start, "", b"").expect("the registry takes uploads");
        let place = head.get("location").expect("an upload has a place").to_owned();
        let path =
            place.split_once("/v2/").map(|(_, rest)| format!("/v2/{rest}")).expect("a path of the registry");
        let joint = if path.contains('?') { '&' } else { '?' };
        let path = format!("{path}{joint}digest={}", digest(blob));
        let (head, answer) = http::request(self.address, "PUT", &path, "application/octet-stream", blob)
            .expect("the registry takes the blob");
        assert_eq!(head.second(), "201", "{}", String::from_utf8_lossy(&answer));
    }

    /// Pushes a manifest whose blobs exist in the registry; returns its digest.
    pub fn push_manifest(&self, repository: &str, tag: &str, media_type: &str, manifest: &[u8]) -> String {
        let path = format!("/v2/{repository}/manifests/{tag}");
        let (head, answer) = http::request(self.address, "PUT", &path, media_type, manifest)
            .expect("the registry takes manifests");
        assert_eq!(head.second(), "201", "{}", String::from_utf8_lossy(&answer));
        digest(manifest)
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        // Both fail only if it has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// The authentication that the proxy requires.
#[derive(Debug, Clone)]
pub enum Demand {
    /// No authentication is required.
    Nothing,
    /// Basic authentication with this `USER:PASSWORD` in base64.
    Basic(String),
    /// A token of the proxy's own `/token`, for which these credentials are required; `None`: no credentials.
    Bearer(Option<String>),
    /// A token of the proxy's own `/token`, for which this refresh token is required in a form.
    Refresh(String),
    /// A token of the proxy's own `/token`, for which this user and password are required in a form; a GET is answered with 405.
    Password(&'static str, &'static str),
}

/// The modification of answers by the proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lie {
    /// Answers are not modified.
    None,
    /// Changes a byte in the middle of every blob.
    Flip,
    /// Disconnects in the middle of every blob, although the header has the full length.
    Cut,
    /// Sends half of every blob and then no more bytes until the client disconnects.
    Stall,
    /// Answers all requests with 503.
    Down,
}

/// The token of [`Demand::Bearer`].
const TOKEN: &str = "let-me-in";

/// A proxy of a registry. Its thread ends with the process, its connections with their clients.
pub struct Proxy {
    address: SocketAddr,
    seen: Arc<Mutex<Vec<String>>>,
}

impl Proxy {
    /// Starts a proxy in front of `upstream`.
    pub fn start(upstream: SocketAddr, demand: Demand, lie: Lie) -> Proxy {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let address = listener.local_addr().expect("a bound address");
        let seen = Arc::new(Mutex::new(Vec::new()));
        let log = seen.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (demand, log) = (demand.clone(), log.clone());
                std::thread::spawn(move || {
                    let mut between = Between { upstream, address, demand, lie, log };
                    // A client that disconnects is part of the test.
                    let _ = between.serve(stream);
                });
            }
        });
        Proxy { address, seen }
    }

    /// The image name `HOST:PORT/REPO:TAG` at this proxy.
    pub fn name(&self, repository: &str, tag: &str) -> String {
        format!("{}/{repository}:{tag}", self.address)
    }

    /// The address on which the proxy listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// First lines of all requests so far.
    pub fn seen(&self) -> Vec<String> {
        self.seen.lock().expect("no thread panics with it").clone()
    }
}

/// One connection through the proxy.
struct Between {
    upstream: SocketAddr,
    address: SocketAddr,
    demand: Demand,
    lie: Lie,
    log: Arc<Mutex<Vec<String>>>,
}

impl Between {
    fn serve(&mut self, mut stream: TcpStream) -> std::io::Result<()> {
        let mut reader = BufReader::new(stream.try_clone()?);
        let head = http::read_head(&mut reader)?;
        self.log.lock().expect("no thread panics with it").push(head.first.clone());
        if self.lie == Lie::Down {
            return answer(&mut stream, "503 Service Unavailable", "", b"{}");
        }
        if head.second().starts_with("/token") {
            let mut form = String::new();
            reader.take(head.length()).read_to_string(&mut form)?;
            return self.token(&mut stream, &head, &form);
        }
        if let Some(challenge) = self.challenge(&head) {
            let header = format!("WWW-Authenticate: {challenge}\r\n");
            let text = br#"{"errors":[{"code":"UNAUTHORIZED","message":"who are you"}]}"#;
            return answer(&mut stream, "401 Unauthorized", &header, text);
        }
        self.forward(&mut stream, &head)
    }

    /// The challenge for a request without valid credentials; `None` if it is authorised.
    fn challenge(&self, head: &Head) -> Option<String> {
        let given = head.get("authorization").unwrap_or("");
        match &self.demand {
            Demand::Nothing => None,
            Demand::Basic(credentials) => {
                (given != format!("Basic {credentials}")).then(|| r#"Basic realm="boat""#.to_owned())
            }
            Demand::Bearer(_) | Demand::Refresh(_) | Demand::Password(..) => {
                (given != format!("Bearer {TOKEN}")).then(|| {
                    format!(
                        r#"Bearer realm="http://{}/token",service="boat",scope="repository:x:pull""#,
                        self.address
                    )
                })
            }
        }
    }

    /// Serves the token endpoint.
    fn token(&self, stream: &mut TcpStream, head: &Head, form: &str) -> std::io::Result<()> {
        let given = head.get("authorization").unwrap_or("");
        let fits = match &self.demand {
            Demand::Bearer(Some(credentials)) => given == format!("Basic {credentials}"),
            Demand::Bearer(None) => true,
            Demand::Refresh(token) => {
                head.first.starts_with("POST")
                    && form.contains("grant_type=refresh_token")
                    && form.contains(&format!("refresh_token={token}"))
            }
            Demand::Password(user, password) => {
                head.first.starts_with("POST")
                    && form.contains("grant_type=password")
                    && form.contains(&format!("username={user}&password={password}"))
            }
            Demand::Nothing | Demand::Basic(_) => false,
        };
        if matches!(self.demand, Demand::Password(..)) && head.first.starts_with("GET") {
            answer(stream, "405 Method Not Allowed", "", b"{}")
        } else if fits {
            let text = json!({ "token": TOKEN, "access_token": TOKEN, "expires_in": 300 }).to_string();
            answer(stream, "200 OK", "", text.as_bytes())
        } else {
            answer(stream, "401 Unauthorized", "", b"{}")
        }
    }

    /// Forwards the request to the registry and sends the answer, modified or not.
    fn forward(&self, stream: &mut TcpStream, head: &Head) -> std::io::Result<()> {
        let (reply, mut body) = http::pass_on(self.upstream, head)?;
        write!(stream, "{}\r\n", reply.first)?;
        for (name, value) in reply.headers.iter().filter(|(name, _)| name != "connection") {
            write!(stream, "{name}: {value}\r\n")?;
        }
        write!(stream, "connection: close\r\n\r\n")?;
        let middle = body.len() / 2;
        if head.second().contains("/blobs/") && !body.is_empty() {
            match self.lie {
                Lie::Flip => body[middle] ^= 1,
                Lie::Cut => body.truncate(middle),
                Lie::Stall => {
                    stream.write_all(&body[..middle])?;
                    // The client sends nothing more; the read ends when it disconnects, or after a timeout.
                    stream.set_read_timeout(Some(Duration::from_secs(120)))?;
                    let _ = stream.read(&mut [0]);
                    return Ok(());
                }
                Lie::None | Lie::Down => {}
            }
        }
        stream.write_all(&body)
    }
}

fn answer(stream: &mut TcpStream, status: &str, header: &str, body: &[u8]) -> std::io::Result<()> {
    write!(
        stream,
        "HTTP/1.1 {status}\r\n{header}Content-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    )?;
    stream.write_all(body)
}

/// A loopback address with a port that was free when the function checked it.
pub fn free_address() -> SocketAddr {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .and_then(|listener| listener.local_addr())
        .expect("loopback has free ports")
}

/// A port for a host port of a pod, which had no listener when the function checked it. The kernel gives none of these ports to a socket
/// that asks for any (`net.ipv4.ip_local_port_range`): connections to the server of another test would lead to the pod.
pub fn free_host_port() -> u16 {
    const PORTS: std::ops::Range<u32> = 10_000..32_000;
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let is_free = |port: &u16| TcpListener::bind((Ipv4Addr::UNSPECIFIED, *port)).is_ok();
    // Processes of one run have neighbouring numbers.
    let mut ports = std::iter::repeat_with(|| {
        let number = std::process::id().wrapping_mul(1009).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        (PORTS.start + number % (PORTS.end - PORTS.start)) as u16
    });
    ports.find(is_free).expect("there is no last one")
}
