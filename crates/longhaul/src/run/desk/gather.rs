//! What operations give the desk to be written: gathered here, and made into commits in `commit.rs`.

use std::task::{Context, Poll};

use serde_json::json;

use super::Desk;
use crate::error::TaskError;
use crate::event::NewEvent;
use crate::record::{Record, UndoOn};
use crate::state::StateChange;
use crate::store::{AskChange, NewCheckpoint};

/// How many bytes of deferred results are gathered before they are written without a reason of
/// their own: what a crash loses, and what is held in memory, stays small.
const DEFERRED_BYTES: usize = 256 * 1024;

impl Desk {
    /// Gathers what must be on disk before the operation goes on; gives the batch to wait for.
    pub(in crate::run) fn record(&mut self, record: Record, events: impl IntoIterator<Item = NewEvent>) -> u64 {
        self.outgoing.events.extend(events);
        self.outgoing.records.push(record);
        self.outgoing.urgent = true;
        self.batch
    }

    /// A record of an operation in this part of the journal, to be written now.
    pub(in crate::run) fn of_part(&self, part: u32, record: Record) -> Record {
        if part < self.journal.newest_part() { Record::Earlier { part, record: Box::new(record) } } else { record }
    }

    /// Gathers the outcome of a step, to be given in its turn before it is on disk. A `deferred` one may be
    /// lost, and is written with whatever comes next; any other is written at once, and nothing that could act on it
    /// starts before. A batch to wait for is given instead when it is not of the newest part of the journal, when a
    /// checkpoint is on its way, or when the handler also waits for others: what they said meanwhile comes first then.
    pub(in crate::run) fn give(
        &mut self,
        part: u32,
        mut record: Record,
        events: impl IntoIterator<Item = NewEvent>,
        deferred: bool,
    ) -> Option<u64> {
        let on_its_way = self.outgoing.checkpoint.is_some() || self.committing.checkpoint.is_some();
        let hears_others = !deferred && self.line.is_waiting();
        if on_its_way || hears_others || part != self.journal.newest_part() {
            let record = self.of_part(part, record);
            return Some(self.record(record, events));
        }
        let known = self.journal.seen();
        if let Record::Done { given_after, result, .. } = &mut record {
            *given_after = Some(known);
            if deferred {
                self.outgoing.deferred_bytes += result.get().len() + 256;
            }
        }
        if deferred {
            self.outgoing.soon |= self.outgoing.deferred_bytes > DEFERRED_BYTES;
        } else {
            self.outgoing.urgent = true;
            self.given = self.batch;
        }
        self.outgoing.events.extend(events);
        self.outgoing.records.push(record.clone());
        self.journal.take(known, record);
        None
    }

    /// Gathers a record that can wait for the next commit.
    pub(in crate::run) fn note(&mut self, record: Record, event: NewEvent) {
        self.outgoing.records.push(record);
        self.tell(event);
    }

    /// Gathers an event that is told soon.
    pub(in crate::run) fn tell(&mut self, event: NewEvent) {
        self.outgoing.events.push(event);
        self.outgoing.soon = true;
    }

    /// Gathers an event that can wait for whatever is written next.
    pub(in crate::run) fn tell_later(&mut self, event: NewEvent) {
        self.outgoing.events.push(event);
    }

    /// Gathers progress; dropped while the past is being replayed.
    pub(in crate::run) fn progress(&mut self, event: NewEvent) {
        if !self.loaded {
            // Whether it is new is not known yet.
            self.wants_journal = true;
            self.early.push(event);
            return;
        }
        if !self.live || (!self.begun && self.journal.told_before(&event.data)) {
            return;
        }
        self.outgoing.progress = Some(event.data.to_string());
        self.tell(event);
    }

    /// Gathers what the task has used so far.
    pub(in crate::run) fn used(&mut self, usage: String) {
        self.outgoing.usage = Some(usage);
    }

    /// Forgets what a handler said of the usage that was replayed only to learn its undos, and saw less than was used.
    pub(in crate::run) fn forget_usage(&mut self) {
        self.outgoing.usage = None;
    }

    /// Gathers when the task undoes what it did without a request.
    pub(in crate::run) fn set_undo_on(&mut self, undo_on: UndoOn) {
        if self.undo_on != undo_on {
            self.undo_on = undo_on;
            self.outgoing.undo_on = Some(undo_on);
        }
    }

    /// Gathers a question or approval that is opened or closed.
    pub(in crate::run) fn ask_changed(&mut self, change: AskChange) {
        self.outgoing.asks.push(change);
    }

    /// Gathers a change of the task's state; it gets its version when it is written.
    pub(in crate::run) fn change_state(&mut self, change: StateChange) {
        self.outgoing.records.push(Record::of_state(change.clone(), 0));
        self.outgoing.patches.push(change);
    }

    /// Gathers a snapshot. It begins a new part of the journal; what is recorded already in
    /// replay is not written again.
    pub(in crate::run) fn checkpoint(&mut self, checkpoint: NewCheckpoint) -> Result<Option<u64>, TaskError> {
        if self.undoing {
            let why = "what the task did is being undone; nothing goes on from here";
            return Err(TaskError::fatal("checkpoint_refused", why));
        }
        if let Some((_, name)) = self.tickets.keys().next() {
            return Err(TaskError::fatal(
                "checkpoint_in_flight",
                format!("'{name}' is under way; take a checkpoint when nothing else is"),
            ));
        }
        self.take_back();
        let part = self.part + 1;
        self.part = part;
        self.counts.clear();
        self.journal.skip_to(part);
        if part <= self.journal.newest_part() {
            return Ok(None);
        }
        self.outgoing.checkpoint = Some(checkpoint);
        Ok(Some(self.record(
            // What is kept is known when it is written.
            Record::Checkpoint { part, kept: Vec::new() },
            [NewEvent::new("checkpoint.saved", json!({"part": part}))],
        )))
    }

    /// Has everything written that was gathered; gives the batch to wait for.
    pub(in crate::run) fn flush(&mut self) -> u64 {
        if self.outgoing.is_empty() {
            // What is on its way, if anything is.
            return self.batch - 1;
        }
        self.outgoing.urgent = true;
        self.batch
    }

    /// Waits until what was gathered as `batch` is on disk.
    pub(in crate::run) fn poll_disk(&mut self, batch: u64, cx: &mut Context<'_>) -> Poll<()> {
        if self.batches_done >= batch {
            return Poll::Ready(());
        }
        self.waiting_for_disk.push((batch, cx.waker().clone()));
        Poll::Pending
    }

    /// Waits until the use of an approval, gathered as `batch`, is on disk; `false` when the store says
    /// that it has expired.
    pub(in crate::run) fn poll_used(&mut self, batch: u64, id: &str, cx: &mut Context<'_>) -> Poll<bool> {
        if self.expired.remove(id) {
            return Poll::Ready(false);
        }
        self.poll_disk(batch, cx).map(|()| true)
    }
}
