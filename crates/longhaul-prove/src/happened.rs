//! What happened in a run, beside faults: how often each kind of operation was done. A run in which one that was planned did not
//! happen proves nothing of it.

use std::collections::BTreeMap;

use crate::history::History;
use crate::ledger::What;
use crate::program::TENANTS;
use crate::records::{Answer, Ask};

/// So few tasks need not have one of each kind.
const FEW: u64 = 100;
/// What every run of more has.
const ALWAYS: [&str; 5] = ["forks", "locks held", "resumes", "state patches", "undos by request"];
/// What one with schedules has too.
const ON_TIME: [&str; 1] = ["schedule ticks"];
/// What one with servers has too.
const OVER_HTTP: [&str; 6] = [
    "approvals over HTTP",
    "cancels over HTTP",
    "requests for another tenant's task",
    "signals over HTTP",
    "submits over HTTP",
    "webhook messages",
];

/// Counts it.
pub fn counts(history: &History) -> BTreeMap<&'static str, u64> {
    let mut counts = BTreeMap::new();
    let mut count = |what| *counts.entry(what).or_default() += 1;
    for asked in history.asked.iter().filter(|asked| matches!(asked.answer, Answer::Done { .. })) {
        match &asked.ask {
            Ask::Post { .. } => count("submits over HTTP"),
            Ask::Resume { .. } => count("resumes"),
            Ask::Undo { .. } => count("undos by request"),
            Ask::Fork { .. } => count("forks"),
            Ask::Patch { .. } => count("state patches"),
            _ => {}
        }
    }
    for line in &history.ledger {
        match &line.what {
            What::Locked { .. } => count("locks held"),
            What::Hooked { taken: true, .. } => count("webhook messages"),
            _ => {}
        }
    }
    for sight in &history.sights {
        let path = |part: &str| sight.what.starts_with("POST") && sight.what.contains(part);
        match sight.status {
            _ if sight.foreign => count("requests for another tenant's task"),
            200..=299 if path("/cancel") => count("cancels over HTTP"),
            200..=299 if path("/approvals/") => count("approvals over HTTP"),
            200..=299 if path("/signals/") => count("signals over HTTP"),
            _ => {}
        }
    }
    let ticks = history.tasks.values().filter(|task| task.tags.contains_key("tick"));
    ticks.for_each(|_| count("schedule ticks"));
    counts
}

/// What a run of so many tasks, with servers and schedules or without, should have had, and had not.
pub fn missing(counts: &BTreeMap<&'static str, u64>, tasks: u64, servers: bool, schedules: bool) -> Vec<String> {
    if tasks < FEW {
        return Vec::new();
    }
    let wanted = ALWAYS.into_iter().chain(OVER_HTTP.into_iter().filter(|_| servers));
    let wanted = wanted.chain(ON_TIME.into_iter().filter(|_| schedules));
    let none = wanted.filter(|what| counts.get(what).is_none_or(|count| *count == 0));
    none.map(|what| format!("{what}: none in {tasks} tasks of {} tenants", TENANTS.len())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_did_not_happen_is_said_of_a_run_that_is_large_enough() {
        let mut counts: BTreeMap<&'static str, u64> = ALWAYS.into_iter().map(|what| (what, 1)).collect();
        assert_eq!(missing(&counts, 500, false, false), [] as [String; 0]);
        assert_eq!(missing(&counts, 500, true, false).len(), OVER_HTTP.len());
        assert_eq!(missing(&counts, 500, false, true).len(), ON_TIME.len());
        counts.insert("resumes", 0);
        assert_eq!(missing(&counts, 500, false, false).len(), 1);
        assert_eq!(missing(&counts, 20, false, true), [] as [String; 0]);
    }
}
