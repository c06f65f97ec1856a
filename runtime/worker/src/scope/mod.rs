//! Asks systemd for the scope of a container or a pod's monitor: org.freedesktop.systemd1(5). Its cgroup is there and limited
//! already, with the process in it; from then on systemd knows whose it is, and leaves its inside to us (Delegate).

mod bus;
mod message;

use std::time::Duration;

use coracle_job::{Failure, FailureKind, ScopeCommand, ScopeJob, ScopeProperty};

use self::bus::Bus;
use self::message::{Message, Reader, Writer};
use crate::failure::{Context, failure};

/// Longest wait for systemd: it may be busy with a boot; the kubelet gives a start two minutes.
const LIMIT: Duration = Duration::from_secs(60);

/// Does the job.
pub(crate) fn run(job: &ScopeJob) -> Result<(), Failure> {
    let mut bus = Bus::connect(LIMIT).context(|| "connect to systemd")?;
    carry_out(&mut bus, job).context(|| format!("systemd unit {}", job.unit))
}

/// The one property that not every systemd of these years has.
const OOM_POLICY: &str = "OOMPolicy";

fn carry_out(bus: &mut Bus, job: &ScopeJob) -> Result<(), Failure> {
    match attempt(bus, job) {
        // A systemd before 253 has no such property for scopes: the file of the cgroup is all there is.
        Err(refused) if refused.message.contains(OOM_POLICY) => {
            let mut job = job.clone();
            job.properties.retain(|(name, _)| name != OOM_POLICY);
            attempt(bus, &job)
        }
        done => done,
    }
}

fn attempt(bus: &mut Bus, job: &ScopeJob) -> Result<(), Failure> {
    match &job.command {
        ScopeCommand::Set => {
            let mut body = Writer::default();
            // Until the unit is gone: there is no file of it that a longer life could be written to.
            body.string(&job.unit).u32(1).array(8, |properties| limits(properties, &job.properties));
            bus.manager("SetUnitProperties", "sba(sv)", &body.into_bytes()).map(drop)
        }
        ScopeCommand::Stop => {
            let mut body = Writer::default();
            body.string(&job.unit).string("replace");
            bus.manager("Subscribe", "", &[])?;
            match bus.manager("StopUnit", "ss", &body.into_bytes()) {
                Ok(reply) => wait_for_job(bus, &reply).map(drop),
                Err(gone) if gone.kind == FailureKind::NotFound => Ok(()),
                Err(failure) => Err(failure),
            }
        }
        ScopeCommand::Start { slice, description, pid } => {
            bus.manager("Subscribe", "", &[])?;
            let body = start(job, slice, description, *pid);
            let reply = bus.manager("StartTransientUnit", "ssa(sv)a(sa(sv))", &body)?;
            match wait_for_job(bus, &reply)?.as_str() {
                "done" => Ok(()),
                result => Err(failure(FailureKind::Internal, format!("its start ended with {result:?}"))),
            }
        }
    }
}

/// How the job ended whose path is the answer of a call.
fn wait_for_job(bus: &mut Bus, reply: &Message) -> Result<String, Failure> {
    let path = Reader::new(&reply.body).string();
    let path = path.map_err(|why| failure(FailureKind::Internal, format!("systemd sent {why}")))?;
    bus.job_result(&path)
}

/// `StartTransientUnit(s name, s mode, a(sv) properties, a(sa(sv)) others)`
fn start(job: &ScopeJob, slice: &str, description: &str, pid: u32) -> Vec<u8> {
    let mut body = Writer::default();
    body.string(&job.unit).string("fail");
    body.array(8, |properties| {
        let mut text = |name, value| {
            properties.align(8).string(name).signature("s").string(value);
        };
        text("Description", description);
        text("Slice", slice);
        // One that failed is forgotten with its cgroup, as one that ended well.
        text("CollectMode", "inactive-or-failed");
        // Inside it is ours. Accounting switches the controllers on above it.
        for name in ["Delegate", "CPUAccounting", "MemoryAccounting", "TasksAccounting"] {
            properties.align(8).string(name).signature("b").u32(1);
        }
        // At shutdown the kubelet ends its pods first; systemd must not stop them together with ordinary units.
        properties.align(8).string("DefaultDependencies").signature("b").u32(0);
        properties.align(8).string("PIDs").signature("au").array(4, |pids| {
            pids.u32(pid);
        });
        limits(properties, &job.properties);
    });
    body.array(8, |_| ());
    body.into_bytes()
}

fn limits(array: &mut Writer, properties: &[(String, ScopeProperty)]) {
    for (name, value) in properties {
        array.align(8).string(name);
        match value {
            ScopeProperty::Number(number) => {
                array.signature("t").u64(*number);
            }
            ScopeProperty::Text(text) => {
                array.signature("s").string(text);
            }
            ScopeProperty::Mask(mask) => {
                array.signature("ay").array(1, |bytes| {
                    for byte in mask {
                        bytes.byte(*byte);
                    }
                });
            }
        }
    }
}

#[cfg(test)]
mod tests;
