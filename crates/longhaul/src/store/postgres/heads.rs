//! Decisions about tasks outside of runs: heads are read and locked, `rules` decides, and
//! what changed is written at once, whatever it was.

use uuid::Uuid;

use super::connect::Tx;
use super::limits::{self, Counts};
use super::rows::{self, to_i32, to_i64, to_json};
use super::{PostgresStore, Told};
use crate::event::LogEntry;
use crate::store::rules::{Change, Head};
use crate::store::{Cancel, StoreError};
use crate::task::{State, TaskId};

/// The heads of these tasks, locked, in id order.
pub(super) async fn read(tx: &Tx, tasks: &[Uuid]) -> Result<Vec<Head>, StoreError> {
    let rows = tx.rows(include_str!("sql/head.sql"), &[&tasks]).await?;
    rows.iter().map(rows::head).collect()
}

/// The store's time.
pub(super) async fn now(store: &PostgresStore, tx: &Tx) -> Result<i64, StoreError> {
    let rows = tx.rows("SELECT lh_now($1)", &[&store.clock.offset()]).await?;
    let row = rows.first().ok_or_else(|| StoreError::Failed("the server does not tell the time".to_owned()))?;
    Ok(row.try_get(0)?)
}

/// What a transaction has decided so far.
#[derive(Default)]
pub(super) struct Decided {
    heads: Vec<Head>,
    log: Vec<(TaskId, u64, LogEntry)>,
    depths: Counts,
    freed: Counts,
    /// Tasks that were cancelled just now; so is everything below them.
    cancelled: Vec<(TaskId, Cancel)>,
    pub(super) told: Told,
}

impl Decided {
    /// Takes up a decision made from `before`; gives the head as it is from now on.
    pub(super) fn add(&mut self, before: &Head, change: Change) -> Head {
        let Change { mut head, entry } = change;
        if before.state == State::Running
            && head.state != State::Running
            && let Some(holds) = head.holds.take()
        {
            limits::count_freed(&mut self.freed, &holds);
        }
        if entry.count > 0 {
            let first_seq = head.last_seq + 1;
            head.last_seq += u64::from(entry.count);
            self.log.push((head.id, first_seq, entry));
        }
        let pending = |state| i64::from(state == State::Pending);
        limits::count(&mut self.depths, &head.queue, pending(head.state) - pending(before.state));
        self.told.ready |= head.ready;
        self.told.due |= head.state.is_final();
        self.told.tell(head.id, head.state);
        if let Some(cancel) = head.cancel.clone().filter(|_| before.cancel.is_none()) {
            self.cancelled.push((head.id, cancel));
        }
        self.heads.retain(|known| known.id != head.id);
        self.heads.push(head.clone());
        head
    }

    /// Moves the time at which a task is looked at again.
    pub(super) fn postpone(&mut self, mut head: Head, due_at: Option<i64>) {
        head.due_at = due_at;
        self.heads.push(head);
    }

    /// The task is removed: nothing of it is written any more.
    pub(super) fn forget(&mut self, task: TaskId) {
        self.heads.retain(|head| head.id != task);
        self.log.retain(|(id, ..)| *id != task);
    }

    /// Writes everything: heads and log, then limits, then depths.
    pub(super) async fn write(&mut self, store: &PostgresStore, tx: &Tx, now: i64) -> Result<(), StoreError> {
        if !self.heads.is_empty() {
            self.save_heads(tx, now).await?;
        }
        if !self.log.is_empty() {
            self.append(tx, now).await?;
        }
        if !self.cancelled.is_empty() {
            self.cancel_children(tx, now).await?;
        }
        self.told.ready |= limits::free(tx, &self.freed).await?;
        limits::add_depths(tx, store.depth_shard(false), &self.depths).await
    }

    async fn save_heads(&self, tx: &Tx, now: i64) -> Result<(), StoreError> {
        fn column<'a, T>(heads: &'a [Head], value: impl Fn(&'a Head) -> T) -> Vec<T> {
            heads.iter().map(value).collect()
        }
        let heads = &self.heads;
        tx.execute(
            include_str!("sql/head_save.sql"),
            &[
                &now,
                &column(heads, |head| head.id.0),
                &column(heads, |head| i16::from(head.priority)),
                &column(heads, |head| head.rank),
                &column(heads, |head| head.state.code()),
                &column(heads, |head| head.phase as i16),
                &column(heads, |head| head.ready),
                &column(heads, |head| head.due_at),
                &column(heads, |head| head.run_at),
                &column(heads, |head| head.parked.as_deref()),
                &column(heads, |head| head.holds.as_deref()),
                &column(heads, |head| to_i64(head.fence)),
                &column(heads, |head| to_i64(head.last_seq)),
                &column(heads, |head| to_i32(head.attempts)),
                &column(heads, |head| to_i32(head.crashes)),
                &column(heads, |head| to_json(head.cancel.as_ref())),
                &column(heads, |head| to_json(head.waiting.as_ref())),
                &column(heads, |head| to_json(head.error.as_ref())),
                &column(heads, |head| head.finished_at),
            ],
        )
        .await?;
        Ok(())
    }

    async fn cancel_children(&mut self, tx: &Tx, now: i64) -> Result<(), StoreError> {
        let ids: Vec<Uuid> = self.cancelled.iter().map(|(id, _)| id.0).collect();
        let cancels: Vec<Option<String>> =
            self.cancelled.iter().map(|(_, cancel)| to_json(Some(cancel))).collect();
        loop {
            let rows = tx.rows(include_str!("sql/cancel_children.sql"), &[&now, &ids, &cancels]).await?;
            if rows.is_empty() {
                return Ok(());
            }
            // Again, for children that one of these got while it was being locked; from now on it
            // gets none.
            self.told.due = true;
            for row in &rows {
                self.told.controlled.push(TaskId(row.try_get(0)?));
            }
        }
    }

    async fn append(&self, tx: &Tx, now: i64) -> Result<(), StoreError> {
        let tasks: Vec<Uuid> = self.log.iter().map(|(task, ..)| task.0).collect();
        let seqs: Vec<i64> = self.log.iter().map(|(_, seq, _)| to_i64(*seq)).collect();
        let counts: Vec<i32> = self.log.iter().map(|(.., entry)| to_i32(entry.count)).collect();
        let events: Vec<&str> = self.log.iter().map(|(.., entry)| entry.events.as_str()).collect();
        let records: Vec<Option<&str>> = self.log.iter().map(|(.., entry)| entry.records.as_deref()).collect();
        tx.execute(include_str!("sql/log_append.sql"), &[&now, &tasks, &seqs, &counts, &events, &records]).await?;
        Ok(())
    }
}
