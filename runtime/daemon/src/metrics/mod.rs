//! The daemon's metrics in Prometheus text format, on a socket that is disabled by default. Updating a counter is an addition;
//! all other values are read when they are requested.

mod counters;
mod server;
mod text;

use std::rc::Rc;

use coracle_base::reactor::{self, HOLD_BOUNDS};
use coracle_base::store;
use coracle_engine::state;

use crate::cri;
use crate::daemon::{Daemon, free_bytes};
use text::{Kind, Text};

pub(crate) use server::Server;

/// All metrics in the exposition format 0.0.4.
pub(crate) async fn render(daemon: &Rc<Daemon>) -> String {
    let mut text = Text::default();
    text.family("coracle_build_info", "The version, as a label", Kind::Gauge);
    text.value("coracle_build_info", &[("version", env!("CARGO_PKG_VERSION"))], 1);
    counters::render(&mut text);
    objects(daemon, &mut text);
    conditions(daemon, &mut text).await;
    store_space(daemon, &mut text).await;
    plugins(daemon, &mut text);
    process(&mut text);
    // So that most of this request's own time is not in the next one's numbers only.
    reactor::yield_now().await;
    turns(&mut text);
    text.finish()
}

fn objects(daemon: &Daemon, text: &mut Text) {
    let pods = daemon.pods.pods();
    let ready = pods.iter().filter(|pod| pod.record().state.is_ready()).count();
    text.family("coracle_pods", "Pod sandboxes by state", Kind::Gauge);
    for (state, count) in [("ready", ready), ("not_ready", pods.len() - ready)] {
        text.value("coracle_pods", &[("state", state)], count);
    }
    let mut by_state = [("created", 0), ("running", 0), ("exited", 0)];
    for container in daemon.pods.containers() {
        let at = match container.record().state {
            state::Container::Running { .. } => 1,
            state::Container::Exited { .. } => 2,
            // Others are not listed.
            _ => 0,
        };
        by_state[at].1 += 1;
    }
    text.family("coracle_containers", "Containers by state", Kind::Gauge);
    for (state, count) in by_state {
        text.value("coracle_containers", &[("state", state)], count);
    }
    text.family("coracle_images", "Images in the store", Kind::Gauge);
    text.value("coracle_images", &[], daemon.images.list().len());
    text.family("coracle_damaged_records", "Records that were set aside as damaged", Kind::Gauge);
    text.value("coracle_damaged_records", &[], store::damaged_count());
    text.family("coracle_store_damaged_layers", "Layers with damage that is not repaired", Kind::Gauge);
    text.value("coracle_store_damaged_layers", &[], daemon.images.damaged().0);
    text.family("coracle_network_ready", "Whether pods can get a network: 1 or 0", Kind::Gauge);
    text.value("coracle_network_ready", &[], u8::from(daemon.network().ready().is_ok()));
}

/// Appends the conditions of Status, so that an alert needs no crictl on the node.
async fn conditions(daemon: &Rc<Daemon>, text: &mut Text) {
    text.family("coracle_condition", "Conditions of Status: 1 is true", Kind::Gauge);
    for (kind, is_true, ..) in cri::status::conditions(daemon).await.unwrap_or_default() {
        text.value("coracle_condition", &[("type", &kind)], u8::from(is_true));
    }
}

async fn store_space(daemon: &Daemon, text: &mut Text) {
    text.family("coracle_store_bytes", "Bytes of images on disk", Kind::Gauge);
    let usage = daemon.images.usage().await;
    text.value("coracle_store_bytes", &[], usage.used_bytes);
    if let Some(free) = free_bytes(&usage.directory) {
        text.family("coracle_store_free_bytes", "Free bytes of the file system of images", Kind::Gauge);
        text.value("coracle_store_free_bytes", &[], free);
    }
}

fn plugins(daemon: &Daemon, text: &mut Text) {
    let plugins = daemon.nri_bridge.counts();
    text.family("coracle_nri_plugins", "Active NRI plugins", Kind::Gauge);
    text.value("coracle_nri_plugins", &[], plugins.len());
    text.family(
        "coracle_nri_plugin_disconnects_total",
        "NRI plugins disconnected for a timeout",
        Kind::Counter,
    );
    text.value("coracle_nri_plugin_disconnects_total", &[], daemon.nri_bridge.kicks());
    text.family("coracle_nri_calls_total", "Calls to NRI plugins by event and outcome", Kind::Counter);
    for plugin in &plugins {
        for call in &plugin.calls {
            for (outcome, count) in
                [("ok", call.ok), ("error", call.error), ("timeout", call.timeout), ("lost", call.lost)]
            {
                let labels = [("plugin", plugin.title.as_str()), ("event", call.event), ("outcome", outcome)];
                text.value("coracle_nri_calls_total", &labels, count);
            }
        }
    }
    text.family("coracle_nri_call_seconds", "How long calls to NRI plugins took", Kind::Histogram);
    for plugin in &plugins {
        for call in &plugin.calls {
            let labels = [("plugin", plugin.title.as_str()), ("event", call.event)];
            let bounds = coracle_nri::BUCKETS_US.map(|us| us as f64 / 1e6);
            text.histogram("coracle_nri_call_seconds", &labels, &bounds, &call.histogram, call.total);
        }
    }
}

/// Appends how long the thread was held between two waits for events.
fn turns(text: &mut Text) {
    let holds = reactor::holds();
    let help = "How long one turn of the event loop held the daemon's only thread";
    text.family("coracle_loop_hold_seconds", help, Kind::Histogram);
    text.histogram("coracle_loop_hold_seconds", &[], &HOLD_BOUNDS, &holds.times.histogram, holds.times.total);
    text.family("coracle_loop_hold_longest_seconds", "The longest of these turns", Kind::Gauge);
    text.value("coracle_loop_hold_longest_seconds", &[], holds.longest.as_secs_f64());
}

/// Appends the metrics of the daemon's process with their standard names.
fn process(text: &mut Text) {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let kib = |text: &str, key: &str| -> u64 {
        let line = text.lines().find_map(|line| line.strip_prefix(key));
        line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
    };
    text.family("process_resident_memory_bytes", "Resident memory", Kind::Gauge);
    text.value("process_resident_memory_bytes", &[], kib(&read("/proc/self/status"), "VmRSS:") * 1024);
    text.family("coracle_memory_pss_bytes", "The daemon's share of the memory it has mapped", Kind::Gauge);
    text.value("coracle_memory_pss_bytes", &[], kib(&read("/proc/self/smaps_rollup"), "Pss:") * 1024);
    text.family("process_open_fds", "Open descriptors", Kind::Gauge);
    text.value("process_open_fds", &[], std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count));
    let used = nix::sys::resource::getrusage(nix::sys::resource::UsageWho::RUSAGE_SELF);
    let seconds = used.map_or(0.0, |used| {
        let seconds = |time: nix::sys::time::TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
        seconds(used.user_time()) + seconds(used.system_time())
    });
    text.family("process_cpu_seconds_total", "CPU time", Kind::Counter);
    text.value("process_cpu_seconds_total", &[], seconds);
    text.family("process_start_time_seconds", "When the daemon was started", Kind::Gauge);
    text.value("process_start_time_seconds", &[], coracle_base::counters::started_s());
}
