//! Prometheus' text exposition format, version 0.0.4: two comment lines for each metric family, followed by its values.

use std::fmt::{Display, Write};
use std::time::Duration;

/// Type of a metric family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Counter,
    Gauge,
    Histogram,
}

/// A text in the exposition format that is being written. Writing to memory cannot fail.
#[derive(Default)]
pub(super) struct Text(String);

impl Text {
    pub(super) fn family(&mut self, name: &str, help: &str, kind: Kind) {
        let kind = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        };
        let _ = writeln!(self.0, "# HELP {name} {help}.\n# TYPE {name} {kind}");
    }

    pub(super) fn value(&mut self, name: &str, labels: &[(&str, &str)], value: impl Display) {
        self.0.push_str(name);
        for (at, (key, label)) in labels.iter().enumerate() {
            self.0.push(if at == 0 { '{' } else { ',' });
            let _ = write!(self.0, "{key}=\"{}\"", escaped(label));
        }
        if !labels.is_empty() {
            self.0.push('}');
        }
        let _ = writeln!(self.0, " {value}");
    }

    /// Appends a histogram. `counts` has one more entry than `bounds`, for values above the last bound.
    pub(super) fn histogram(
        &mut self,
        name: &str,
        labels: &[(&str, &str)],
        bounds: &[f64],
        counts: &[u64],
        total: Duration,
    ) {
        let mut sum = 0;
        let bounds = bounds.iter().map(ToString::to_string).chain(["+Inf".to_owned()]);
        for (bound, count) in bounds.zip(counts) {
            sum += count;
            let labels: Vec<_> = labels.iter().copied().chain([("le", bound.as_str())]).collect();
            self.value(&format!("{name}_bucket"), &labels, sum);
        }
        self.value(&format!("{name}_sum"), labels, total.as_secs_f64());
        self.value(&format!("{name}_count"), labels, sum);
    }

    pub(super) fn finish(self) -> String {
        self.0
    }
}

fn escaped(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_labels_and_histograms_have_the_prometheus_format() {
        let mut text = Text::default();
        text.family("x_total", "What it is", Kind::Counter);
        text.value("x_total", &[("a", "1\"\\\n"), ("b", "2")], 7);
        text.value("y", &[], 0.5);
        text.histogram("z", &[("m", "n")], &[0.1, 1.0], &[1, 0, 2], Duration::from_millis(1500));
        let expected = "# HELP x_total What it is.\n# TYPE x_total counter\nx_total{a=\"1\\\"\\\\\\n\",b=\"2\"} 7\ny 0.5\n\
                        z_bucket{m=\"n\",le=\"0.1\"} 1\nz_bucket{m=\"n\",le=\"1\"} 1\nz_bucket{m=\"n\",le=\"+Inf\"} 3\n\
                        z_sum{m=\"n\"} 1.5\nz_count{m=\"n\"} 3\n";
        assert_eq!(text.finish(), expected);
    }
}
