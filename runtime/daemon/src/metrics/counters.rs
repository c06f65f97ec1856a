//! Exports the counters of `coracle_base::counters` with their public names.

use coracle_base::counters::{self, Counters, RPC_BOUNDS, STEP_BOUNDS, WORKER_BOUNDS};

use super::text::{Kind, Text};

/// Appends the counters of RPCs, steps, workers, pulls and OOM kills.
pub(super) fn render(text: &mut Text) {
    counters::read(|counters| {
        text.family("coracle_rpc_requests_total", "RPCs by method and code", Kind::Counter);
        for ((method, code), count) in &counters.rpc_codes {
            text.value("coracle_rpc_requests_total", &[("method", method), ("code", code)], count);
        }
        text.family("coracle_rpc_duration_seconds", "How long RPCs took", Kind::Histogram);
        for (method, times) in &counters.rpc {
            let labels = [("method", *method)];
            text.histogram(
                "coracle_rpc_duration_seconds",
                &labels,
                &RPC_BOUNDS,
                &times.histogram,
                times.total,
            );
        }
        text.family("coracle_step_seconds", "How long the steps of the set-up of pods took", Kind::Histogram);
        for (step, times) in &counters.steps {
            let labels = [("step", *step)];
            text.histogram("coracle_step_seconds", &labels, &STEP_BOUNDS, &times.histogram, times.total);
        }
        text.family("coracle_worker_runs_total", "Worker processes by job and outcome", Kind::Counter);
        for ((job, outcome), count) in &counters.worker_outcomes {
            text.value("coracle_worker_runs_total", &[("job", job), ("outcome", outcome)], count);
        }
        text.family("coracle_worker_seconds", "How long worker processes ran", Kind::Histogram);
        for (job, times) in &counters.workers {
            let labels = [("job", *job)];
            text.histogram("coracle_worker_seconds", &labels, &WORKER_BOUNDS, &times.histogram, times.total);
        }
        text.family("coracle_image_pulls_total", "Image pulls by outcome", Kind::Counter);
        for (outcome, count) in &counters.pulls {
            text.value("coracle_image_pulls_total", &[("outcome", outcome)], count);
        }
        text.family(
            "coracle_image_pull_bytes_total",
            "Bytes that pulls brought over the network",
            Kind::Counter,
        );
        text.value("coracle_image_pull_bytes_total", &[], counters.pulled_bytes);
        text.family(
            "coracle_image_neighbour_bytes_total",
            "Part of these bytes that came from other nodes of the site",
            Kind::Counter,
        );
        text.value("coracle_image_neighbour_bytes_total", &[], counters.neighbour_bytes);
        text.family(
            "coracle_image_reused_bytes_total",
            "Bytes of layers that pulls took from other layers of the node",
            Kind::Counter,
        );
        text.value("coracle_image_reused_bytes_total", &[], counters.reused_bytes);
        checks(text, counters);
        text.family(
            "coracle_oom_kills_total",
            "Containers that ended because of a lack of memory",
            Kind::Counter,
        );
        text.value("coracle_oom_kills_total", &[], counters.oom_kills);
    });
}

/// Appends the counters of the check of layers in the background.
fn checks(text: &mut Text, counters: &Counters) {
    text.family(
        "coracle_store_checked_bytes_total",
        "Bytes of layers that the check in the background has read",
        Kind::Counter,
    );
    text.value("coracle_store_checked_bytes_total", &[], counters.checked_bytes);
    text.family("coracle_store_repairs_total", "Repairs of damaged layers by outcome", Kind::Counter);
    for (outcome, count) in &counters.repairs {
        text.value("coracle_store_repairs_total", &[("outcome", outcome)], count);
    }
}
