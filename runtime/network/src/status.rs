//! What the plugins' answers to STATUS say about the network, as a value. Pure.
//! A plugin that is being restarted must not make the node NotReady, which would evict nothing but scare everyone: one
//! failure after a good answer is ridden out. Rules: CRI 5.7.

use super::conf::List;

/// Failures in a row that make a network that was ready not ready.
const FAILURES_MAX: u32 = 2;

/// Health of the network in force.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Health {
    /// The list's version has no STATUS: a list that loads is ready.
    #[default]
    Assumed,
    /// Its plugins were not asked yet.
    Unknown,
    /// The last good answer was followed by so many failures.
    Good {
        /// Fewer than [`FAILURES_MAX`].
        failures: u32,
    },
    /// They say why not.
    Bad(String),
}

impl Health {
    /// Where a list starts.
    pub(super) fn of(list: Option<&List>) -> Health {
        if list.is_some_and(List::has_status) { Health::Unknown } else { Health::Assumed }
    }

    /// Takes an answer in.
    pub(super) fn hear(&mut self, answer: Result<(), String>) {
        *self = match (&*self, answer) {
            (Health::Assumed, _) => Health::Assumed,
            (Health::Unknown | Health::Good { .. } | Health::Bad(_), Ok(())) => Health::Good { failures: 0 },
            (Health::Good { failures }, Err(_)) if failures + 1 < FAILURES_MAX => {
                Health::Good { failures: failures + 1 }
            }
            (Health::Unknown | Health::Good { .. } | Health::Bad(_), Err(why)) => Health::Bad(why),
        };
    }

    /// Whether pods can be attached, else why not.
    pub(super) fn ready(&self) -> Result<(), String> {
        match self {
            Health::Assumed | Health::Good { .. } => Ok(()),
            Health::Unknown => Err("its plugins were not asked for their STATUS yet".to_owned()),
            Health::Bad(why) => Err(why.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Health;

    #[test]
    fn one_failure_is_ridden_out() {
        let good = || Ok(());
        let bad = || Err("no".to_owned());
        let cases = [
            (Health::Assumed, vec![bad(), bad()], true),
            (Health::Unknown, vec![], false),
            (Health::Unknown, vec![bad()], false),
            (Health::Unknown, vec![good()], true),
            (Health::Unknown, vec![good(), bad()], true),
            (Health::Unknown, vec![good(), bad(), good(), bad()], true),
            (Health::Unknown, vec![good(), bad(), bad()], false),
            (Health::Unknown, vec![bad(), good()], true),
        ];
        for (start, answers, expected) in cases {
            let mut health = start.clone();
            answers.iter().for_each(|answer| health.hear(answer.clone()));
            assert_eq!(health.ready().is_ok(), expected, "{start:?} after {answers:?}");
        }
    }
}
