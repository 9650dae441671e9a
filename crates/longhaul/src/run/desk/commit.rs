//! What the desk gathered, on its way to the disk: made into commits, and what their answers mean.

use super::{Desk, Outgoing};
use crate::error::TaskError;
use crate::event::{LogEntry, LogRow, NewEvent};
use crate::record::{Op, Record};
use crate::store::{AskChange, Commit, Committed, Outcome};
use crate::task::Phase;

impl Desk {
    /// Makes a commit of what was gathered. While closing, only records of effects that were
    /// begun before are in it, and it is not a step forward.
    pub(in crate::run) fn take_commit(&mut self) -> Commit {
        self.make_commit(!self.ended, None, None, None)
    }

    /// Makes the commit that ends the run, with everything that was gathered before it.
    pub(in crate::run) fn end_commit(
        &mut self,
        forward: bool,
        event: Option<NewEvent>,
        record: Option<Record>,
        outcome: Outcome,
    ) -> Commit {
        self.make_commit(forward, event, record, Some(outcome))
    }

    fn make_commit(
        &mut self,
        forward: bool,
        event: Option<NewEvent>,
        record: Option<Record>,
        outcome: Option<Outcome>,
    ) -> Commit {
        let mut outgoing = std::mem::take(&mut self.outgoing);
        if !forward && !self.undoing {
            outgoing.keep_settled(self.ended);
        }
        self.number_patches(&mut outgoing);
        for record in &mut outgoing.records {
            if let Record::Checkpoint { kept, .. } = record {
                *kept = self.journal.kept();
            }
        }
        self.commits += 1;
        self.batch += 1;
        self.commit_under_way = true;
        self.suspending = matches!(outcome, Some(Outcome::Suspended { .. }));
        // A patch carries the version it makes, a checkpoint what was not given to the handler, and a
        // suspend must not miss a wake-up: all are made from the newest of the log.
        let from_newest = self.suspending || !outgoing.patches.is_empty() || outgoing.checkpoint.is_some();
        let recorded = outgoing.records.iter().any(|record| matches!(record.plain(), Record::Done { .. }));
        let undoable = outgoing.records.iter().any(|record| {
            matches!(record.plain(), Record::Done { undoable: true, .. } | Record::Intent { undoable: true, .. })
        });
        let mut all = outgoing.records.iter().chain(&record);
        let undoing = all.any(|record| matches!(record, Record::Undoing { .. }));
        let phase = undoing.then_some(Phase::Compensating);
        let events: Vec<&NewEvent> = outgoing.events.iter().chain(&event).collect();
        let records: Vec<&Record> = outgoing.records.iter().chain(&record).collect();
        let commit = Commit {
            task: self.task,
            fence: self.fence,
            number: self.commits,
            forward,
            recorded,
            undoable,
            phase,
            known_seq: from_newest.then(|| self.journal.seen()),
            entry: LogEntry::new(&events, &records),
            progress: outgoing.progress.clone(),
            usage: outgoing.usage.clone(),
            undo_on: outgoing.undo_on,
            patches: outgoing.patches.clone(),
            checkpoint: outgoing.checkpoint.clone(),
            asks: outgoing.asks.clone(),
            outcome,
        };
        self.committing = outgoing;
        commit
    }

    /// Gives patches the versions they will make.
    fn number_patches(&self, outgoing: &mut Outgoing) {
        let first = self.journal.next_state_version();
        let patched = outgoing.records.iter_mut().filter_map(|record| match record {
            Record::Patched { version, .. } | Record::StateBegun { version, .. } => Some(version),
            _ => None,
        });
        for (version, next) in patched.zip(first..) {
            *version = next;
        }
        let told = outgoing.events.iter_mut().filter(|event| event.kind == "state.patched");
        for (event, next) in told.zip(first..) {
            event.data["version"] = next.into();
        }
    }

    /// The commit is on disk, after `others`, which were written by others since the last one.
    pub(in crate::run) fn committed(&mut self, others: &[LogRow], committed: Committed) -> Result<(), TaskError> {
        self.commit_under_way = false;
        let records = std::mem::take(&mut self.committing).records;
        if self.loaded {
            self.journal.read(others)?;
            self.journal.take_read();
            // Deferred ones were taken in when they were gathered.
            for record in records.into_iter().filter(|record| record.given_after().is_none()) {
                let order = self.journal.take(committed.first_seq, record);
                if self.live {
                    self.journal.show_patches(order);
                }
            }
            self.journal.saw(committed.last_seq);
        }
        self.all_on_disk();
        Ok(())
    }

    /// Nothing is on its way: whoever waits for what was gathered before goes on.
    fn all_on_disk(&mut self) {
        self.batches_done = self.batch - 1;
        let done = self.batches_done;
        for (_, waker) in self.waiting_for_disk.extract_if(.., |(batch, _)| *batch <= done) {
            waker.wake();
        }
    }

    /// A commit was refused because an approval has expired: its use is not written, everything else
    /// is.
    pub(in crate::run) fn without_use(&mut self, id: &str) {
        let Outgoing { asks, records, events, .. } = &mut self.outgoing;
        for used in asks.extract_if(.., |change| change.used() == Some(id)) {
            let AskChange::Use { id, step } = used else { continue };
            records.retain(
                |record| !matches!(record.plain(), Record::Done { op: Op::Approval, step: of, .. } if *of == step),
            );
            events.retain(|event| event.kind != "step.completed" || event.step.as_ref() != Some(&step));
            self.expired.insert(id);
        }
        for (_, waker) in std::mem::take(&mut self.waiting_for_disk) {
            waker.wake();
        }
    }

    /// Nothing of the commit was or can be written, nor anything that was gathered since.
    pub(in crate::run) fn discard(&mut self) {
        self.not_committed();
        self.outgoing = Outgoing::default();
    }

    /// Whether the commit under way suspends the run.
    pub(in crate::run) fn is_suspending(&self) -> bool {
        self.suspending
    }

    /// Nothing of the commit was written: what was gathered for it waits for the next one, and
    /// its number is free again.
    pub(in crate::run) fn not_committed(&mut self) {
        self.commit_under_way = false;
        self.suspending = false;
        self.commits -= 1;
        let newer = std::mem::replace(&mut self.outgoing, std::mem::take(&mut self.committing));
        self.outgoing.add(newer);
        if self.outgoing.is_empty() {
            // It would only have suspended the run.
            self.all_on_disk();
        }
    }
}
