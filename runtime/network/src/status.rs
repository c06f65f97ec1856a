//! The health of the network from the plugins' answers to STATUS. The module does no I/O. A plugin that is
//! being restarted must not make the node NotReady, so a single failure after a success is tolerated. Rules:
//! CRI 5.7.

use super::conf::List;

/// Number of consecutive failures after which a ready network becomes not ready.
const FAILURES_MAX: u32 = 2;

/// Health of the active network.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Health {
    /// The list's version has no STATUS: a valid list is ready.
    #[default]
    Assumed,
    /// STATUS has not completed yet.
    Unknown,
    /// STATUS succeeded, followed by this number of failures.
    Good {
        /// Number of failures since the success, less than [`FAILURES_MAX`].
        failures: u32,
    },
    /// STATUS failed with this message.
    Bad(String),
}

impl Health {
    /// Initial health of a list; `None`: there is no list.
    pub(super) fn of(list: Option<&List>) -> Health {
        if list.is_some_and(List::has_status) { Health::Unknown } else { Health::Assumed }
    }

    /// Updates the health with the result of one STATUS.
    pub(super) fn update(&mut self, answer: Result<(), String>) {
        *self = match (&*self, answer) {
            (Health::Assumed, _) => Health::Assumed,
            (Health::Unknown | Health::Good { .. } | Health::Bad(_), Ok(())) => Health::Good { failures: 0 },
            (Health::Good { failures }, Err(_)) if failures + 1 < FAILURES_MAX => {
                Health::Good { failures: failures + 1 }
            }
            (Health::Unknown | Health::Good { .. } | Health::Bad(_), Err(why)) => Health::Bad(why),
        };
    }

    /// Whether pods can be attached; the error is the reason why not.
    pub(super) fn ready(&self) -> Result<(), String> {
        match self {
            Health::Assumed | Health::Good { .. } => Ok(()),
            Health::Unknown => Err("waiting for the first STATUS of its plugins".to_owned()),
            Health::Bad(why) => Err(why.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Health;

    #[test]
    fn a_single_status_failure_is_tolerated() {
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
            answers.iter().for_each(|answer| health.update(answer.clone()));
            assert_eq!(health.ready().is_ok(), expected, "{start:?} after {answers:?}");
        }
    }
}
