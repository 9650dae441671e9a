//! What a run has gathered for its next commit. No I/O.

use crate::event::NewEvent;
use crate::record::{Op, Record, UndoOn};
use crate::state::StateChange;
use crate::store::{AskChange, NewCheckpoint};

/// What was gathered for the next commit.
#[derive(Default)]
pub(super) struct Outgoing {
    pub(super) events: Vec<NewEvent>,
    pub(super) records: Vec<Record>,
    pub(super) patches: Vec<StateChange>,
    pub(super) checkpoint: Option<NewCheckpoint>,
    pub(super) asks: Vec<AskChange>,
    pub(super) progress: Option<String>,
    pub(super) usage: Option<String>,
    pub(super) undo_on: Option<UndoOn>,
    /// Someone waits for it.
    pub(super) urgent: bool,
    /// It is to be written in a moment; otherwise it goes with the next one.
    pub(super) soon: bool,
    /// About how large the results of deferred records in it are.
    pub(super) deferred_bytes: usize,
}

impl Outgoing {
    /// Whether there is nothing to write.
    pub(super) fn is_empty(&self) -> bool {
        self.events.is_empty() && self.records.is_empty()
    }

    /// Keeps only what settles effects that were begun before, and what is told of those. Unless the task
    /// was `ended` by a cancel or a deadline, deferred records too: the handler had their results.
    pub(super) fn keep_settled(&mut self, ended: bool) {
        let given = |record: &Record| !ended && record.given_after().is_some();
        self.records.retain(|record| settles(record) || given(record));
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
        self.usage = newer.usage.or(self.usage.take());
        self.undo_on = newer.undo_on.or(self.undo_on);
        self.urgent |= newer.urgent;
        self.soon |= newer.soon;
        self.deferred_bytes += newer.deferred_bytes;
    }
}

/// Whether a record only settles an effect whose start was recorded before.
fn settles(record: &Record) -> bool {
    match record.plain() {
        Record::Done { effect, op: Op::Step, undoable, .. } => effect.needs_intent() || *undoable,
        Record::Failed { effect, .. } | Record::InDoubt { effect, .. } => effect.needs_intent(),
        _ => false,
    }
}
