//! One plugin: its identity and subscriptions, and the delivery of one event at a time.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

use prost::Message;

use crate::api::{self, Event};
use crate::bound::{self, FromPlugin};
use crate::connection::{Connection, Outcome};
use crate::message::{Code, get_status, has_code};
use crate::report::Tally;
use crate::semaphore::FifoSemaphore;

/// Number of consecutive undecodable answers after which a plugin is disconnected (NRI-R8).
const UNDECODABLE_MAX: u32 = 3;

/// A plugin that has registered.
pub(crate) struct Plugin {
    /// Index of the plugin, two digits.
    pub(crate) index: String,
    pub(crate) name: String,
    pub(crate) connection: Rc<Connection>,
    /// Subscribed events: bit n-1 is event n.
    pub(crate) events: Cell<i32>,
    /// Limits the number of concurrent event calls.
    slot: Rc<FifoSemaphore>,
    /// Whether the plugin was built before v0.12 and receives nine events as StateChange (NRI 3.4).
    is_legacy: Cell<bool>,
    undecodable: Cell<u32>,
    pub(crate) tally: RefCell<Tally>,
}

/// The message of one event, which is encoded once for all plugins.
pub(crate) struct Told<'a> {
    pub(crate) event: Event,
    pub(crate) payload: Vec<u8>,
    pub(crate) pod: &'a api::PodSandbox,
    pub(crate) container: Option<&'a api::Container>,
}

impl Plugin {
    pub(crate) fn new(
        index: String,
        name: String,
        connection: Rc<Connection>,
        max_inflight: usize,
    ) -> Rc<Self> {
        connection.set_registered();
        Rc::new(Self {
            index,
            name,
            connection,
            events: Cell::new(0),
            slot: FifoSemaphore::new(max_inflight.max(1)),
            is_legacy: Cell::new(false),
            undecodable: Cell::new(0),
            tally: RefCell::default(),
        })
    }

    /// Index and name, `10-name`: identifies the plugin as an owner and in messages.
    pub(crate) fn title(&self) -> String {
        format!("{}-{}", self.index, self.name)
    }

    pub(crate) fn is_called(&self, name: &str) -> bool {
        self.name == name || self.title() == name
    }

    pub(crate) fn wants(&self, event: Event) -> bool {
        self.connection.is_open() && self.events.get() & bit(event) != 0
    }

    /// Sends an event and decodes the answer. The wait for a free slot has no timeout, because each call that holds a
    /// slot has one.
    pub(crate) async fn ask<T: FromPlugin>(&self, told: &Told<'_>, limit: Duration) -> Outcome<T> {
        let slot = smol::future::or(async { Some(self.slot.shared().await) }, async {
            self.connection.ended().await;
            None
        });
        let Some(_slot) = slot.await else { return Outcome::Lost };
        let begun = Instant::now();
        let outcome = self.call(told, limit, begun).await;
        let outcome = self.decode(outcome);
        self.tally.borrow_mut().add(told.event, &outcome, begun.elapsed());
        outcome
    }

    async fn call(&self, told: &Told<'_>, limit: Duration, begun: Instant) -> Outcome<Vec<u8>> {
        let method = method(told.event);
        if self.is_legacy.get() && has_legacy(told.event) {
            return self.connection.call(STATE_CHANGE, &told.state_change(), limit).await;
        }
        match self.connection.call(method, &told.payload, limit).await {
            Outcome::Refused(status) if has_code(&status, Code::UNIMPLEMENTED) && has_legacy(told.event) => {
                self.is_legacy.set(true);
                // Both attempts share one limit.
                let left = limit.saturating_sub(begun.elapsed());
                self.connection.call(STATE_CHANGE, &told.state_change(), left).await
            }
            outcome => outcome,
        }
    }

    fn decode<T: FromPlugin>(&self, outcome: Outcome<Vec<u8>>) -> Outcome<T> {
        let payload = match outcome {
            Outcome::Ok(payload) => payload,
            Outcome::Refused(status) => return Outcome::Refused(status),
            Outcome::TimedOut => return Outcome::TimedOut,
            Outcome::Lost => return Outcome::Lost,
        };
        let why = match bound::decode(&payload) {
            Ok(answer) => {
                self.undecodable.set(0);
                return Outcome::Ok(answer);
            }
            Err(why) => why,
        };
        self.undecodable.set(self.undecodable.get() + 1);
        if self.undecodable.get() >= UNDECODABLE_MAX {
            self.connection.close("its answers cannot be decoded");
        }
        Outcome::Refused(get_status(Code::INTERNAL, format!("its answer {why}")))
    }

    /// Whether the plugin's answers have shown that it was built before v0.12.
    pub(crate) fn is_legacy(&self) -> bool {
        self.is_legacy.get()
    }
}

impl Told<'_> {
    fn state_change(&self) -> Vec<u8> {
        let event = api::StateChangeEvent {
            event: self.event.into(),
            pod: Some(self.pod.clone()),
            container: self.container.cloned(),
        };
        event.encode_to_vec()
    }
}

const STATE_CHANGE: &str = "StateChange";

/// The subscription bit of an event.
pub(crate) fn bit(event: Event) -> i32 {
    1 << (i32::from(event) - 1)
}

/// Name of the method that delivers an event.
pub(crate) fn method(event: Event) -> &'static str {
    match event {
        Event::Unknown => "",
        Event::RunPodSandbox => "RunPodSandbox",
        Event::StopPodSandbox => "StopPodSandbox",
        Event::RemovePodSandbox => "RemovePodSandbox",
        Event::CreateContainer => "CreateContainer",
        Event::PostCreateContainer => "PostCreateContainer",
        Event::StartContainer => "StartContainer",
        Event::PostStartContainer => "PostStartContainer",
        Event::UpdateContainer => "UpdateContainer",
        Event::PostUpdateContainer => "PostUpdateContainer",
        Event::StopContainer => "StopContainer",
        Event::RemoveContainer => "RemoveContainer",
        Event::UpdatePodSandbox => "UpdatePodSandbox",
        Event::PostUpdatePodSandbox => "PostUpdatePodSandbox",
        Event::ValidateContainerAdjustment => "ValidateContainerAdjustment",
    }
}

/// Whether plugins built before v0.12 receive the event as StateChange.
fn has_legacy(event: Event) -> bool {
    matches!(
        event,
        Event::RunPodSandbox
            | Event::PostUpdatePodSandbox
            | Event::StopPodSandbox
            | Event::RemovePodSandbox
            | Event::PostCreateContainer
            | Event::StartContainer
            | Event::PostStartContainer
            | Event::PostUpdateContainer
            | Event::RemoveContainer
    )
}
