//! The other nodes of the site, and the choice of one of them for a blob, so that a site downloads an image once ([`super::shared`]).
//!
//! ```text
//! names ─► addresses (the fetcher resolves them, and says which is this node's)
//! blob ─► all are asked at once: complete │ fetching │ resuming │ waiting │ changing │ nothing
//!            complete, fetching, resuming: the blob is downloaded from there, as it grows
//!            waiting, and before this node in the order: this node waits for it
//!            changing: of a layer with a table of contents, this node waits for the unpacked layer ([`coracle_site::turn`])
//!            else: this node asks the registry, and announces it ([`Announcement`](coracle_site::announcement))
//! ```
//! | two nodes cannot wait for each other, because | |
//! |---|---|
//! | only a node that has the blob or downloads it from a registry is followed | a node that follows another one is only `waiting` |
//! | the order of two nodes is the same on both | more bytes first, then a hash of the node's name and the digest, which distributes the layers of an image |
//!
//! A node has one name for all others, whatever the addresses at which they ask it, and sends it with each answer. A node that has
//! its own name in an answer has asked itself.
//!
//! Neighbours are trusted for nothing: the digest of the blob is verified as if a registry had sent it. After a wrong one the bytes
//! of neighbours are discarded, and those who sent them are not asked again. A node that asks the registry for the rest of what
//! neighbours have sent says so (resuming), because its first bytes may be wrong through no fault of its own. Each wait for them has a
//! limit, after which the registry is asked for the bytes that are missing; and a node that makes others wait proves that it has the
//! site's key, if there is one.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use coracle_job::{Failure, FailureKind, PullJob, Timeouts};
use coracle_site::share::{Answer, State, identity, order};
use coracle_site::{Signed, SiteKey, share_text};

use coracle_fetch::{AskNeighbour, Body, Fetcher, Get, Head, RequestFailure, Resolved};

/// Time for which a neighbour that cannot be reached is not asked.
const AWAY: Duration = Duration::from_secs(10);
/// Time after which a request that fails without an answer has been accepted, which takes a second at most.
const ACCEPTED: Duration = Duration::from_secs(2);
/// Minimum rate in bytes per second of a neighbour that downloads the blob, and the longest window over which it is measured: below that of
/// a slow uplink that several layers share.
const RATE_BYTES_MIN: u64 = 4 << 10;
/// Minimum rate in bytes per second at which a neighbour sends the bytes that it has: the registry is hardly slower.
pub(super) const OWN_RATE_BYTES_MIN: u64 = 64 << 10;
const RATE_WINDOW_MS_MAX: u64 = 20_000;
/// Number of attempts at a neighbour without progress after which it is not asked in this pull.
const FRUITLESS_MAX: u32 = 2;
/// Stack size in bytes of a thread that queries one neighbour.
const STACK_BYTES: usize = 64 << 10;

/// The neighbours of this node in one pull.
pub(super) struct Neighbours {
    fetcher: Arc<Fetcher>,
    settings: coracle_job::Neighbours,
    registry: String,
    repository: String,
    key: Option<SiteKey>,
    /// The name of this node.
    id: String,
    timeouts: Timeouts,
    /// The other nodes of the site; set by the first query.
    site: OnceLock<Vec<Arc<Peer>>>,
    /// Held during a round: the number of concurrent requests is limited.
    asking: Mutex<()>,
}

/// A neighbour: a node of the site, with its state in this pull.
pub(super) struct Peer {
    pub(super) address: SocketAddr,
    state: Mutex<PeerState>,
}

#[derive(Default)]
struct PeerState {
    /// The nonce of the neighbour's last challenge; empty: none.
    nonce: String,
    /// Time until which the neighbour is not asked.
    away_until: Option<Instant>,
    /// Number of attempts without progress since the last one with it.
    fruitless: u32,
    /// Whether unpacked layers are no longer requested from the neighbour.
    is_unpacked_refused: bool,
    /// Whether the neighbour once accepted a request and did not answer in time.
    was_late: bool,
}

/// The answers of all neighbours to one concurrent query.
pub(super) struct Round {
    pub(super) begun: Instant,
    pub(super) answers: Vec<Answer>,
}

impl Neighbours {
    /// The neighbours in the configuration of a pull; `None` if there are none, or if the site's key cannot be read.
    pub(super) fn of(job: &PullJob, fetcher: &Arc<Fetcher>) -> Option<Arc<Self>> {
        let settings = &job.registries.neighbours;
        if settings.names.is_empty() {
            return None;
        }
        let key = settings.key_file.as_deref().map(SiteKey::read).transpose();
        let known = key.and_then(|key| Ok((key, identity(&job.root)?)));
        let (key, id) = known.inspect_err(|why| eprintln!("neighbours are not asked: {why}")).ok()?;
        let configured = &job.registries.timeouts;
        Some(Arc::new(Self {
            fetcher: fetcher.clone(),
            settings: settings.clone(),
            registry: job.registry.clone(),
            repository: job.repository.clone(),
            key,
            id,
            timeouts: Timeouts {
                rate_bytes_min: configured.rate_bytes_min.max(RATE_BYTES_MIN),
                rate_window_ms: configured.rate_window_ms.min(RATE_WINDOW_MS_MAX),
                ..*configured
            },
            site: OnceLock::new(),
            asking: Mutex::new(()),
        }))
    }

    /// The time limits of bodies.
    pub(super) fn timeouts(&self) -> &Timeouts {
        &self.timeouts
    }

    /// Whether manifests and configs are requested from neighbours while their registry cannot be reached.
    pub(super) fn have_documents(&self) -> bool {
        self.settings.have_documents
    }

    /// The number of this node in the order of a blob; `None` if it serves no one.
    pub(super) fn own_order(&self, digest: &str) -> Option<u64> {
        self.settings.port.map(|_| order(&self.id, digest))
    }

    /// All neighbours, without this node.
    pub(super) fn peers(&self) -> &[Arc<Peer>] {
        self.site.get_or_init(|| match self.fetcher.resolve(self.settings.names.clone()) {
            Ok(found) => {
                // Without a question this node is recognised at its own address, which saves the start of its server.
                let is_own = |one: &Resolved| {
                    one.from == Some(one.address.ip()) && self.settings.port == Some(one.address.port())
                };
                let others = found.into_iter().filter(|one| !is_own(one));
                others.map(|one| Arc::new(Peer::new(one.address))).collect()
            }
            Err(failure) => {
                eprintln!("neighbours are not asked: {}", failure.message);
                Vec::new()
            }
        })
    }

    /// Requests `get` from a neighbour.
    pub(super) fn get(&self, peer: &Peer, get: Get) -> Result<(Head, Body), RequestFailure> {
        self.request(peer, get, None)
    }

    /// Requests `get`; `question` is `None`, or the end of the query of a request of which only the head is wanted.
    fn request(&self, peer: &Peer, get: Get, question: Option<&str>) -> Result<(Head, Body), RequestFailure> {
        let is_head = question.is_some();
        let question = question.unwrap_or_default();
        let target = format!("/v2/{}/{}?ns={}{question}", self.repository, get.what, self.registry);
        let range = get.range();
        let (mut is_proven, begun) = (false, Instant::now());
        if peer.is_away() {
            let text = format!("neighbour {} could not be reached before", peer.address);
            let failed = RequestFailure::from(Failure::new(FailureKind::Unavailable, text));
            return Err(RequestFailure { pause: Some(AWAY), ..failed });
        }
        loop {
            let method = if is_head { "HEAD" } else { "GET" };
            let signed = Signed { server: peer.address, method, target: &target, range: &range };
            let nonce = peer.lock().nonce.clone();
            let authorization = match &self.key {
                Some(key) if !nonce.is_empty() => key.authorize(&nonce, signed),
                Some(_) | None => String::new(),
            };
            let asked = authorization.clone();
            let ask = AskNeighbour { address: peer.address, target: target.clone(), is_head, authorization };
            match self.fetcher.get(Get { neighbour: Some(ask), ..get.clone() }) {
                // The first question, a nonce that has expired, or a server that has ended and begun again.
                Err(failed) if !failed.nonce.is_empty() && self.key.is_some() && !is_proven => {
                    peer.lock().nonce.clone_from(&failed.nonce);
                    is_proven = true;
                }
                answer => {
                    let proven = |(head, body)| (Head { authorization: asked, ..head }, body);
                    return answer.map(proven).inspect_err(|failed| {
                        // A node that answers is there, whatever it answers; but without the site's key it will never serve
                        // this node. One that all others ask at this moment may need long to start the process that serves.
                        let mut state = peer.lock();
                        let is_late = failed.status.is_none() && begun.elapsed() >= ACCEPTED;
                        let is_excused = is_late && !std::mem::replace(&mut state.was_late, true);
                        if failed.status.is_none_or(|status| status == 401) && !is_excused {
                            state.away_until = Some(Instant::now() + AWAY);
                        }
                    });
                }
            }
        }
    }

    /// Whether a node of the site vouches for what it sends or says, of which nothing else tells that it is right: a document (`what`
    /// is its digest), or its share of a blob. Without a key every neighbour is believed.
    pub(super) fn vouch_for(&self, head: &Head, what: &str) -> bool {
        let is_vouched = |key: &SiteKey| key.is_vouched(&head.authorization, what, &head.proof);
        self.key.as_ref().is_none_or(is_vouched)
    }

    /// The neighbours that can be asked for a document.
    pub(super) fn reachable(&self) -> impl Iterator<Item = &Arc<Peer>> {
        self.peers().iter().filter(|peer| peer.may_be_asked())
    }

    /// Asks those neighbours of which `is_asked` is true how much they have of a blob, and whether they have the layer with this
    /// chain ID unpacked.
    pub(super) fn ask(
        &self,
        digest: &str,
        chain_id: Option<&str>,
        is_asked: impl Fn(usize) -> bool,
    ) -> Round {
        let begun = Instant::now();
        let question = chain_id.map(|chain_id| format!("&layer={chain_id}")).unwrap_or_default();
        let question = question.as_str();
        let _asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        let asked = self.peers().iter().enumerate();
        let asked = asked.filter(|(index, peer)| is_asked(*index) && peer.may_be_asked());
        let answers = std::thread::scope(|scope| {
            let asking: Vec<_> = asked
                .filter_map(|(index, peer)| {
                    let ask = move || self.state(index, peer, digest, question);
                    std::thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, ask).ok()
                })
                .collect();
            asking.into_iter().filter_map(|asking| asking.join().ok()).collect()
        });
        Round { begun, answers }
    }

    fn state(&self, index: usize, peer: &Peer, digest: &str, question: &str) -> Answer {
        let answer = |state, order| Answer { peer: index, state, order, outline: None };
        let get = Get { what: format!("blobs/{digest}"), accept: "*/*".to_owned(), ..Get::default() };
        match self.request(peer, get, Some(question)) {
            Ok((head, _)) => match State::parse(&head.state) {
                // This node at another address.
                Some((_, name)) if name == self.id => {
                    peer.refuse();
                    answer(State::Nothing, 0)
                }
                // Bytes that it has are verified, and must come fast; to wait for others needs more than its word.
                Some((state, _))
                    if !matches!(state, State::Complete | State::Nothing)
                        && !self.vouch_for(&head, &share_text(&head.state, &head.outline)) =>
                {
                    eprintln!("neighbour {} does not prove that it has the site's key", peer.address);
                    Answer { outline: head.outline.parse().ok(), ..answer(State::Nothing, 0) }
                }
                Some((state, name)) => {
                    Answer { outline: head.outline.parse().ok(), ..answer(state, order(name, digest)) }
                }
                None => answer(State::Nothing, 0),
            },
            // It has too many connections, or is late, and may have the blob: before any other in the order.
            Err(failed) if failed.status == Some(503) || failed.status.is_none() && !peer.is_away() => {
                answer(State::Waiting(u64::MAX), 0)
            }
            Err(failed) => {
                if failed.status == Some(401) {
                    eprintln!("{}", failed.failure.message);
                }
                answer(State::Nothing, 0)
            }
        }
    }
}

impl Peer {
    pub(super) fn new(address: SocketAddr) -> Self {
        Self { address, state: Mutex::default() }
    }

    /// Counts an attempt for any blob.
    pub(super) fn count(&self, has_progress: bool) {
        let mut state = self.lock();
        state.fruitless = if has_progress { 0 } else { state.fruitless.saturating_add(1) };
    }

    /// Ends all requests to the neighbour in this pull.
    pub(super) fn refuse(&self) {
        self.lock().fruitless = FRUITLESS_MAX;
    }

    /// Ends requests for unpacked layers to the neighbour in this pull.
    pub(super) fn refuse_unpacked(&self) {
        self.lock().is_unpacked_refused = true;
    }

    /// Whether unpacked layers are requested of the neighbour.
    pub(super) fn may_send_unpacked(&self) -> bool {
        !self.is_refused() && !self.lock().is_unpacked_refused
    }

    /// Whether the neighbour is not asked again in this pull.
    pub(super) fn is_refused(&self) -> bool {
        self.lock().fruitless >= FRUITLESS_MAX
    }

    fn may_be_asked(&self) -> bool {
        !self.is_away() && !self.is_refused()
    }

    /// Whether the neighbour could not be reached a moment ago.
    fn is_away(&self) -> bool {
        self.lock().away_until.is_some_and(|until| until > Instant::now())
    }

    fn lock(&self) -> MutexGuard<'_, PeerState> {
        // A panic ends the process (`panic = "abort"`), so the lock cannot be poisoned.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
