//! What a run has gathered for its next commit. No I/O.

use crate::event::NewEvent;
use crate::record::{Op, Record};
use crate::state::StatePatch;
use crate::store::{AskChange, NewCheckpoint};

/// What was gathered for the next commit.
#[derive(Default)]
pub(super) struct Outgoing {
    pub(super) events: Vec<NewEvent>,
    pub(super) records: Vec<Record>,
    pub(super) patches: Vec<StatePatch>,
    pub(super) checkpoint: Option<NewCheckpoint>,
    pub(super) asks: Vec<AskChange>,
    pub(super) progress: Option<String>,
    /// Someone waits for it; otherwise it may go with the next one.
    pub(super) urgent: bool,
}

impl Outgoing {
    /// Keeps only what settles effects that were begun before, and what is told of those.
    pub(super) fn keep_settled(&mut self) {
        self.records.retain(settles);
        let settled: Vec<&str> = self.records.iter().filter_map(Record::step).collect();
        self.events.retain(|event| event.step.as_deref().is_some_and(|step| settled.contains(&step)));
        self.patches.clear();
        self.checkpoint = None;
        self.asks.clear();
        self.progress = None;
    }

    pub(super) fn add(&mut self, newer: Outgoing) {
        self.events.extend(newer.events);
        self.records.extend(newer.records);
        self.patches.extend(newer.patches);
        self.checkpoint = newer.checkpoint.or(self.checkpoint.take());
        self.asks.extend(newer.asks);
        self.progress = newer.progress.or(self.progress.take());
        self.urgent |= newer.urgent;
    }
}

/// Whether a record only settles an effect whose start was recorded before.
fn settles(record: &Record) -> bool {
    match record {
        Record::Done { effect, op: Op::Step, undoable, .. } => effect.needs_intent() || *undoable,
        Record::Failed { effect, .. } | Record::InDoubt { effect, .. } => effect.needs_intent(),
        _ => false,
    }
}
