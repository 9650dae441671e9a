//! Writing what runs have done.
//!
//! One statement writes the whole batch: it locks the rows in id order, checks them as
//! `rules::check_commit` does, and feeds the log. What it did not return is then read to say why. Where nothing
//! else is to be written, that statement is the transaction, in one round trip.

use std::collections::{BTreeMap, HashMap};

use futures_util::future::join;
use tokio_postgres::{Row, Statement};
use uuid::Uuid;

use super::connect::Tx;
use super::limits::{self, Counts};
use super::rows::{get_state, get_u32, get_u64, to_i32, to_i64, to_json};
use super::{PostgresStore, Told, state};
use crate::faults;
use crate::record::UndoOn;
use crate::store::clock::micros;
use crate::store::rules::{self, CommitCheck, Verdict};
use crate::store::{AskChange, Commit, CommitRefused, Committed, Outcome, StoreError};
use crate::task::{State, Waiting};

type Answer = Result<Committed, CommitRefused>;

pub(super) async fn commit(store: &PostgresStore, batch: &[Commit]) -> Result<Vec<Answer>, StoreError> {
    if let Some(commit) = batch.iter().find(|commit| commit.entry.count == 0 && commit.entry.records.is_some()) {
        // Such a row would have no number of its own.
        return Err(StoreError::Failed(format!("a commit for {} has records but no event", commit.task)));
    }
    let mut order: Vec<&Commit> = batch.iter().collect();
    order.sort_by_key(|commit| commit.task);
    let answers = if order.iter().all(|commit| commit.outcome.is_none() && only_tells(commit)) {
        let tx = store.tx().await?;
        faults::committing().await?;
        let written = records(store, &tx, &order).await?;
        let answers = answer(store, &tx, &order, written).await?;
        tx.end();
        answers
    } else if !store.holds_expected() && order.iter().all(|commit| only_tells(commit) && leaves_line_alone(commit))
    {
        ends(store, order.clone()).await?
    } else {
        whole(store, store.tx().await?, &order).await?
    };
    store.tell(told(&order, &answers));
    // Every entry has an answer: no two entries are for the same task.
    let lost = |commit: &Commit| Err(CommitRefused::Fenced { held: commit.fence });
    Ok(batch.iter().map(|commit| answers.get(&commit.task.0).cloned().unwrap_or_else(|| lost(commit))).collect())
}

/// Whether everything of a commit is in the task's row and its log.
fn only_tells(commit: &Commit) -> bool {
    commit.patches.is_empty() && commit.checkpoint.is_none() && commit.asks.is_empty()
}

/// Whether a commit does not put its task back in line, where it would have to be counted.
fn leaves_line_alone(commit: &Commit) -> bool {
    !matches!(commit.outcome, Some(Outcome::Released | Outcome::Retry { .. }))
}

/// What to hint at, except for limits that got room.
fn told(order: &[&Commit], answers: &HashMap<Uuid, Answer>) -> Told {
    let mut told = Told::default();
    for commit in order.iter().filter(|commit| matches!(answers.get(&commit.task.0), Some(Ok(_)))) {
        if commit.entry.count > 0 {
            told.tell(commit.task, commit.outcome.as_ref().map_or(State::Running, Outcome::state));
        }
        told.ready |= match &commit.outcome {
            Some(Outcome::Released) => true,
            Some(Outcome::Retry { after, .. }) => after.is_zero(),
            _ => false,
        };
    }
    told
}

/// What the statement says of a row it wrote.
struct Written {
    last_seq: u64,
    now: i64,
    /// The queue it went back to.
    queue: Option<String>,
    /// The limits it counted in until now.
    holds: Option<String>,
    /// It ended, and has a parent that waits to be told.
    untold: bool,
}

type Rows = HashMap<Uuid, Written>;

/// A batch in which runs only go on: one statement, a transaction by itself.
async fn records(store: &PostgresStore, tx: &Tx, order: &[&Commit]) -> Result<Rows, StoreError> {
    let statement = tx.prepare(include_str!("sql/commit_record.sql")).await?;
    let (offset, c) = (store.clock.offset(), Columns::new(order));
    let rows = tx
        .query(
            &statement,
            &[
                &offset,
                &c.ids,
                &c.fences,
                &c.numbers,
                &c.forwards,
                &c.recorded,
                &c.known_seqs,
                &c.counts,
                &c.events,
                &c.records,
                &c.progress,
                &c.undoable,
                &c.phases,
                &c.usage,
                &c.undo_on,
            ],
        )
        .await?;
    rows.iter().map(|row| written(row, false)).collect()
}

fn written(row: &Row, ended: bool) -> Result<(Uuid, Written), StoreError> {
    let (queue, holds, untold) =
        if ended { (row.try_get(3)?, row.try_get(4)?, row.try_get(5)?) } else { (None, None, false) };
    Ok((row.try_get(0)?, Written { last_seq: get_u64(row, 1)?, now: row.try_get(2)?, queue, holds, untold }))
}

/// A batch in which runs end, or go on: one statement, a transaction by itself. Of tasks that count in limits it
/// leaves those that end as they are; they, and what was refused, go on to `whole`.
async fn ends(store: &PostgresStore, mut order: Vec<&Commit>) -> Result<HashMap<Uuid, Answer>, StoreError> {
    let tx = store.tx().await?;
    let statement = tx.prepare(include_str!("sql/commit_outcome.sql")).await?;
    faults::committing().await?;
    let rows = outcomes(store, &tx, &statement, &order, false).await?;
    store.tell(Told { due: rows.values().any(|row| row.untold), ..Told::default() });
    let left: Vec<&Commit> = order.extract_if(.., |commit| !rows.contains_key(&commit.task.0)).collect();
    let mut answers = answer(store, &tx, &order, rows).await?;
    tx.end();
    if !left.is_empty() {
        answers.extend(whole(store, store.tx().await?, &left).await?);
    }
    Ok(answers)
}

/// Writes the tasks' rows and their log. `holding`: also where limits must be freed afterwards.
async fn outcomes(
    store: &PostgresStore,
    tx: &Tx,
    statement: &Statement,
    order: &[&Commit],
    holding: bool,
) -> Result<Rows, StoreError> {
    let (offset, c, o) = (store.clock.offset(), Columns::new(order), Outcomes::new(order));
    let params: super::connect::Params<'_> = &[
        &offset,
        &c.ids,
        &c.fences,
        &c.numbers,
        &c.forwards,
        &c.recorded,
        &c.known_seqs,
        &c.counts,
        &c.events,
        &c.records,
        &c.progress,
        &o.states,
        &o.afters,
        &o.attempts,
        &o.waiting,
        &o.results,
        &o.errors,
        &c.undoable,
        &c.phases,
        &o.uses,
        &c.usage,
        &c.undo_on,
        &holding,
    ];
    tx.query(statement, params).await?.iter().map(|row| written(row, true)).collect()
}

/// A batch with patches, checkpoints, questions, or tasks that count in limits or go back in line.
async fn whole(store: &PostgresStore, tx: Tx, order: &[&Commit]) -> Result<HashMap<Uuid, Answer>, StoreError> {
    let statement = tx.prepare(include_str!("sql/commit_outcome.sql")).await?;
    let (begun, rows) = join(tx.begin(), outcomes(store, &tx, &statement, order, true)).await;
    begun?;
    let rows = rows?;

    let (mut depths, mut freed, mut holders) = (Counts::new(), Counts::new(), Vec::new());
    for (&id, row) in &rows {
        if let Some(queue) = &row.queue {
            limits::count(&mut depths, queue, 1);
        }
        if let Some(holds) = &row.holds {
            limits::count_freed(&mut freed, holds);
            holders.push(id);
        }
    }
    let accepted: Vec<(&Commit, u64, i64)> = order
        .iter()
        .filter_map(|&commit| rows.get(&commit.task.0).map(|row| (commit, row.last_seq, row.now)))
        .collect();
    state::patch(&tx, &accepted).await?;
    state::save_checkpoints(&tx, &accepted).await?;
    super::asks::write(&tx, &accepted).await?;
    store.expect_holds(!holders.is_empty());
    if !holders.is_empty() {
        tx.execute("UPDATE tasks SET holds = NULL WHERE id = ANY ($1::uuid[])", &[&holders]).await?;
    }
    let due = rows.values().any(|row| row.untold);
    let readied = limits::free(&tx, &freed).await?;
    limits::add_depths(&tx, store.depth_shard(false), &depths).await?;
    let answers = answer(store, &tx, order, rows).await?;
    tx.commit().await?;
    store.tell(Told { ready: readied, due, ..Told::default() });
    Ok(answers)
}

/// The answers, by task.
async fn answer(
    store: &PostgresStore,
    tx: &Tx,
    order: &[&Commit],
    rows: Rows,
) -> Result<HashMap<Uuid, Answer>, StoreError> {
    let mut answers = HashMap::with_capacity(order.len());
    let mut missing: BTreeMap<Uuid, &Commit> = BTreeMap::new();
    for &commit in order {
        match rows.get(&commit.task.0) {
            Some(row) => {
                let first_seq = (row.last_seq + 1).saturating_sub(commit.entry.count.into());
                answers.insert(commit.task.0, Ok(Committed { first_seq, last_seq: row.last_seq }));
            }
            None => {
                missing.insert(commit.task.0, commit);
            }
        }
    }
    if !missing.is_empty() {
        explain(store, tx, &missing, &mut answers).await?;
    }
    Ok(answers)
}

/// Says why commits were not written.
async fn explain(
    store: &PostgresStore,
    tx: &Tx,
    missing: &BTreeMap<Uuid, &Commit>,
    answers: &mut HashMap<Uuid, Answer>,
) -> Result<(), StoreError> {
    let ids: Vec<Uuid> = missing.keys().copied().collect();
    let fences: Vec<i64> = missing.values().map(|commit| to_i64(commit.fence)).collect();
    let offset = store.clock.offset();
    let rows = tx.rows(include_str!("sql/commit_check.sql"), &[&ids, &fences, &offset]).await?;
    let mut expired = super::asks::expired(tx, missing.values().copied(), offset).await?;
    for (id, commit) in missing {
        let row = find(&rows, *id)?;
        let (check, now) = match row {
            Some(row) => (Some(check(row, expired.remove(id))?), row.try_get(9)?),
            None => (None, 0),
        };
        let answer = match (rules::check_commit(check.as_ref(), commit, now), row, &check) {
            (Verdict::Refuse(refused), ..) => Err(refused),
            (Verdict::Known, Some(row), Some(check)) => Ok(known(commit, check, row)?),
            // The row changed between the two statements: the whole batch is to be sent again, in
            // which what was written is known.
            _ => return Err(StoreError::Unavailable(format!("task {id} changed at this moment"))),
        };
        answers.insert(*id, answer);
    }
    Ok(())
}

fn find(rows: &[Row], id: Uuid) -> Result<Option<&Row>, StoreError> {
    for row in rows {
        if row.try_get::<_, Uuid>(0)? == id {
            return Ok(Some(row));
        }
    }
    Ok(None)
}

fn check(row: &Row, expired: Option<String>) -> Result<CommitCheck, StoreError> {
    Ok(CommitCheck {
        state: get_state(row, 1)?,
        fence: get_u64(row, 2)?,
        commit_no: u32::try_from(row.try_get::<_, i64>(3)?).unwrap_or(u32::MAX),
        last_seq: get_u64(row, 4)?,
        cancelled: row.try_get(5)?,
        deadline: row.try_get(6)?,
        expired,
    })
}

/// Where a commit was written before: in the newest row of its run, if it was the run's newest.
fn known(commit: &Commit, check: &CommitCheck, row: &Row) -> Result<Committed, StoreError> {
    let newest = row.try_get::<_, Option<i64>>(7)?.is_some() && commit.number == check.commit_no;
    if newest && commit.entry.count > 0 {
        let (first_seq, count) = (get_u64(row, 7)?, u64::from(get_u32(row, 8)?));
        return Ok(Committed { first_seq, last_seq: (first_seq + count).saturating_sub(1) });
    }
    Ok(Committed { first_seq: check.last_seq, last_seq: check.last_seq })
}

/// The entries as columns.
struct Columns<'a> {
    ids: Vec<Uuid>,
    fences: Vec<i64>,
    numbers: Vec<i64>,
    forwards: Vec<bool>,
    recorded: Vec<bool>,
    known_seqs: Vec<Option<i64>>,
    counts: Vec<i32>,
    events: Vec<&'a str>,
    records: Vec<Option<&'a str>>,
    progress: Vec<Option<&'a str>>,
    undoable: Vec<bool>,
    phases: Vec<Option<i16>>,
    usage: Vec<Option<&'a str>>,
    undo_on: Vec<Option<i16>>,
}

impl<'a> Columns<'a> {
    fn new(order: &[&'a Commit]) -> Self {
        Self {
            ids: order.iter().map(|commit| commit.task.0).collect(),
            fences: order.iter().map(|commit| to_i64(commit.fence)).collect(),
            numbers: order.iter().map(|commit| commit.number.into()).collect(),
            forwards: order.iter().map(|commit| commit.forward).collect(),
            recorded: order.iter().map(|commit| commit.recorded).collect(),
            known_seqs: order.iter().map(|commit| commit.known_seq.map(to_i64)).collect(),
            counts: order.iter().map(|commit| to_i32(commit.entry.count)).collect(),
            events: order.iter().map(|commit| commit.entry.events.as_str()).collect(),
            records: order.iter().map(|commit| commit.entry.records.as_deref()).collect(),
            progress: order.iter().map(|commit| commit.progress.as_deref()).collect(),
            undoable: order.iter().map(|commit| commit.undoable).collect(),
            phases: order.iter().map(|commit| commit.phase.map(|phase| phase as i16)).collect(),
            usage: order.iter().map(|commit| commit.usage.as_deref()).collect(),
            undo_on: order.iter().map(|commit| commit.undo_on.map(UndoOn::code)).collect(),
        }
    }
}

/// How the runs of the batch end, as columns; all empty for one that goes on.
#[derive(Default)]
struct Outcomes<'a> {
    states: Vec<Option<i16>>,
    /// The pause before a retry, the longest wait.
    afters: Vec<Option<i64>>,
    attempts: Vec<i32>,
    waiting: Vec<Option<String>>,
    results: Vec<Option<&'a str>>,
    errors: Vec<Option<String>>,
    /// The approvals that are used; ids have no commas.
    uses: Vec<Option<String>>,
}

impl<'a> Outcomes<'a> {
    fn new(order: &[&'a Commit]) -> Self {
        let mut columns = Self::default();
        for commit in order {
            let (mut after, mut attempts, mut waiting, mut result, mut error) = (None, 0, None, None, None);
            match &commit.outcome {
                None | Some(Outcome::Released) => {}
                Some(Outcome::Completed { result: value }) => result = Some(value.get()),
                Some(Outcome::Failed { error: why, attempt }) => {
                    error = Some(why);
                    attempts = i32::from(*attempt);
                }
                Some(Outcome::Cancelled { error: why }) => error = Some(why),
                Some(Outcome::Suspended { waiting: what, wake_after }) => {
                    // The statement adds the times, by the store's clock.
                    waiting = Some(Waiting { since: None, until: None, ..what.clone() });
                    after = wake_after.map(micros);
                }
                Some(Outcome::Retry { error: why, after: pause, attempt }) => {
                    error = Some(why);
                    attempts = i32::from(*attempt);
                    // Without a pause it is ready at once.
                    after = Some(micros(*pause)).filter(|&pause| pause > 0);
                }
            }
            columns.states.push(commit.outcome.as_ref().map(|outcome| outcome.state().code()));
            columns.afters.push(after);
            columns.attempts.push(attempts);
            columns.waiting.push(to_json(waiting.as_ref()));
            columns.results.push(result);
            columns.errors.push(to_json(error));
            let used: Vec<&str> = commit.asks.iter().filter_map(AskChange::used).collect();
            columns.uses.push((!used.is_empty()).then(|| used.join(",")));
        }
        columns
    }
}
