//! Writing what runs have done.

use rusqlite::{CachedStatement, OptionalExtension, Statement};

use super::rows::{self, Id, Teller};
use super::{Tx, store_error};
use crate::record::UndoOn;
use crate::state::{AgentState, StateChange};
use crate::store::clock::micros;
use crate::store::rules::{self, CommitCheck, Verdict};
use crate::store::{Commit, CommitRefused, Committed, NewCheckpoint, Outcome, StoreError};
use crate::task::{Phase, State, TaskId, timestamp};

type Answer = Result<Committed, CommitRefused>;

pub(super) fn commit(tx: &mut Tx<'_>, batch: &[Commit]) -> Result<Vec<Answer>, StoreError> {
    let mut sql = Statements::prepare(tx).map_err(store_error)?;
    batch.iter().map(|commit| one(tx, &mut sql, commit)).collect()
}

/// What nearly every commit of a batch executes, looked up once.
struct Statements<'a> {
    check: CachedStatement<'a>,
    record: CachedStatement<'a>,
    outcome: CachedStatement<'a>,
}

impl<'a> Statements<'a> {
    fn prepare(tx: &Tx<'a>) -> rusqlite::Result<Self> {
        Ok(Self {
            check: tx.sql.prepare_cached(include_str!("sql/commit_check.sql"))?,
            record: tx.sql.prepare_cached(include_str!("sql/commit_record.sql"))?,
            outcome: tx.sql.prepare_cached(include_str!("sql/commit_outcome.sql"))?,
        })
    }
}

/// What the row says about the commit's task.
struct Current {
    rowid: i64,
    check: CommitCheck,
    queue: String,
    phase: Phase,
    has_parent: bool,
    holds: Option<String>,
    hooked: bool,
}

fn one(tx: &mut Tx<'_>, sql: &mut Statements<'_>, commit: &Commit) -> Result<Answer, StoreError> {
    let current = current(tx, &mut sql.check, commit)?;
    match rules::check_commit(current.as_ref().map(|current| &current.check), commit, tx.now) {
        Verdict::Refuse(refused) => return Ok(Err(refused)),
        Verdict::Known => return written_before(tx, commit).map(Ok),
        Verdict::Write => {}
    }
    // `Write` is the verdict on a row that was found.
    let Some(current) = current else { return Ok(Err(CommitRefused::Fenced { held: commit.fence })) };
    let first_seq = current.check.last_seq + 1;
    let last_seq = current.check.last_seq + u64::from(commit.entry.count);
    if commit.entry.count > 0 {
        let state = commit.outcome.as_ref().map_or(State::Running, Outcome::state);
        let teller = Teller { task: commit.task, run: commit.fence, state, hooked: current.hooked };
        tx.append(&teller, first_seq, &commit.entry)?;
        tx.told.tell(commit.task, state);
    }
    for change in &commit.patches {
        tx.change_state(commit.task, change)?;
    }
    if let Some(checkpoint) = &commit.checkpoint {
        save_checkpoint(tx, commit.task, last_seq, checkpoint)?;
    }
    super::asks::write(tx, commit)?;
    match &commit.outcome {
        None => record(tx, &mut sql.record, commit, current.rowid, last_seq)?,
        Some(outcome) => end_run(tx, &mut sql.outcome, commit, outcome, &current, last_seq)?,
    }
    Ok(Ok(Committed { first_seq, last_seq }))
}

fn current(tx: &Tx<'_>, select: &mut Statement<'_>, commit: &Commit) -> Result<Option<Current>, StoreError> {
    let expired = super::asks::expired(tx, commit)?;
    select
        .query_row([Id::from(commit.task)], |row| {
            Ok(Current {
                rowid: row.get(8)?,
                check: CommitCheck {
                    state: rows::state(row, 0)?,
                    fence: row.get(1)?,
                    commit_no: row.get(2)?,
                    last_seq: row.get(3)?,
                    cancelled: row.get(4)?,
                    deadline: row.get(5)?,
                    expired,
                },
                queue: row.get(6)?,
                holds: row.get(7)?,
                phase: rows::phase(row, 9)?,
                has_parent: row.get(10)?,
                hooked: row.get(11)?,
            })
        })
        .optional()
        .map_err(store_error)
}

/// Where a commit that was written before stands: its run's newest row, because a run has no
/// second commit under way.
fn written_before(tx: &Tx<'_>, commit: &Commit) -> Result<Committed, StoreError> {
    tx.sql
        .prepare_cached(include_str!("sql/commit_known.sql"))
        .and_then(|mut select| {
            select.query_row((Id::from(commit.task), commit.fence), |row| {
                Ok(Committed { first_seq: row.get(0)?, last_seq: row.get(1)? })
            })
        })
        .map_err(store_error)
}

/// The run goes on: no index is touched.
fn record(
    tx: &Tx<'_>,
    update: &mut Statement<'_>,
    commit: &Commit,
    rowid: i64,
    last_seq: u64,
) -> Result<(), StoreError> {
    update
        .execute((
            rowid,
            commit.number,
            last_seq,
            commit.recorded,
            &commit.progress,
            tx.now,
            commit.undoable,
            commit.phase.map(|phase| phase as i16),
            &commit.usage,
            commit.undo_on.map(UndoOn::code),
        ))
        .map_err(store_error)?;
    Ok(())
}

fn end_run(
    tx: &mut Tx<'_>,
    update: &mut Statement<'_>,
    commit: &Commit,
    outcome: &Outcome,
    current: &Current,
    last_seq: u64,
) -> Result<(), StoreError> {
    let state = outcome.state();
    let phase = commit.phase.unwrap_or(current.phase);
    let (now, deadline) = (tx.now, rules::deadline_in(phase, current.check.deadline));
    // A task that ended is in no phase.
    let phase = if state.is_final() { Phase::Forward } else { phase };
    let (mut run_at, mut due_at) = (None, None);
    let (mut result, mut error, mut waiting, mut attempts) = (None, None, None, 0);
    match outcome {
        Outcome::Completed { result: value } => result = Some(value.get()),
        Outcome::Failed { error: why, attempt } => {
            error = Some(why);
            attempts = i32::from(*attempt);
        }
        Outcome::Cancelled { error: why } => error = Some(why),
        Outcome::Suspended { waiting: what, wake_after } => {
            let until = wake_after.map(|after| now + micros(after));
            let mut what = what.clone();
            what.since = Some(timestamp(now));
            what.until = until.map(timestamp);
            waiting = Some(what);
            due_at = rules::earliest(until, deadline);
        }
        Outcome::Retry { error: why, after, attempt } => {
            error = Some(why);
            attempts = i32::from(*attempt);
            run_at = Some(now + micros(*after)).filter(|&at| at > now);
            due_at = rules::pending_due(run_at, deadline);
        }
        Outcome::Released => due_at = rules::pending_due(None, deadline),
    }
    let ready = state == State::Pending && run_at.is_none();
    update
        .execute(rusqlite::params![
            current.rowid,
            commit.number,
            last_seq,
            commit.recorded,
            commit.progress,
            now,
            state.code(),
            ready,
            due_at,
            run_at,
            rows::to_json(waiting.as_ref()),
            result,
            rows::to_json(error),
            attempts,
            state.is_final().then_some(now),
            commit.undoable,
            phase as i16,
            commit.usage,
            commit.undo_on.map(UndoOn::code),
        ])
        .map_err(store_error)?;
    if state == State::Pending {
        tx.count_pending(&current.queue, 1);
    }
    tx.told.ready |= ready;
    tx.told.due |= state.is_final() && current.has_parent;
    if let Some(holds) = &current.holds {
        tx.free(holds)?;
    }
    Ok(())
}

impl Tx<'_> {
    /// Changes the task's state and gives the new version.
    pub(super) fn change_state(&self, task: TaskId, change: &StateChange) -> Result<u64, StoreError> {
        let (version, mut state) = self.agent_state(task)?.unwrap_or_default();
        state.change(change);
        let text = rows::to_json(Some(&state));
        self.sql
            .prepare_cached(include_str!("sql/state_save.sql"))
            .and_then(|mut save| save.execute((Id::from(task), version + 1, text)))
            .map_err(store_error)?;
        Ok(version + 1)
    }

    pub(super) fn agent_state(&self, task: TaskId) -> Result<Option<(u64, AgentState)>, StoreError> {
        super::read::state(self.sql, task).map_err(store_error)
    }
}

fn save_checkpoint(tx: &Tx<'_>, task: TaskId, seq: u64, checkpoint: &NewCheckpoint) -> Result<(), StoreError> {
    let checksum = crc32fast::hash(checkpoint.data.as_bytes());
    tx.sql
        .prepare_cached(include_str!("sql/checkpoint_save.sql"))
        .and_then(|mut insert| {
            insert.execute((
                Id::from(task),
                seq,
                checkpoint.version,
                checkpoint.iteration,
                checksum,
                &checkpoint.data,
                tx.now,
            ))
        })
        .map_err(store_error)?;
    tx.sql
        .prepare_cached(include_str!("sql/checkpoint_rotate.sql"))
        .and_then(|mut delete| {
            delete.execute((Id::from(task), seq, checkpoint.max_count.max(1), tx.now - micros(checkpoint.max_age)))
        })
        .map_err(store_error)?;
    Ok(())
}
