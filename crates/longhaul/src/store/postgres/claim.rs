//! Leasing tasks to workers.
//!
//! A claim is one transaction of two round trips: lock candidates; lease them, count, read their
//! logs and commit. Limits cost one more. When limits held some candidates back and there is room
//! left, it goes on with the next ones in a further transaction under the same number.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use futures_util::future::{join3, join4};
use serde_json::json;
use tokio_postgres::{Row, Statement};
use uuid::Uuid;

use super::connect::Tx;
use super::limits::{self, Counts};
use super::rows::{get_id, get_json, get_phase, get_u32, get_u64, log_row, to_i32, to_i64};
use super::{PostgresStore, Told, lock};
use crate::event::{LogEntry, LogRow, NewEvent};
use crate::record::{Record, UndoOn};
use crate::store::clock::micros;
use crate::store::rules::{self, Candidate, Limit, SUSPECT_CRASHES};
use crate::store::{Claim, Claimed, LOG_WITH_CLAIM, Lease, StoreError};
use crate::task::Phase;

/// How many candidates beyond the wanted ones are looked at, in case some may not be taken.
const SPARE: usize = 8;
/// How many transactions one claim may take to get past tasks that limits hold back.
const ROUNDS: u32 = 32;
/// The most candidates of one transaction.
const MAX_CANDIDATES: usize = 1_000;

pub(super) async fn claim(store: &PostgresStore, ask: &Claim) -> Result<Claimed, StoreError> {
    // Remembered before anything is sent: whatever becomes of this call, the next one with the same
    // number is a repetition.
    let repeated = lock(&store.claims).insert(ask.worker, ask.number) == Some(ask.number);
    if repeated {
        let leases = claimed_before(store, ask).await?;
        if !leases.is_empty() {
            return Ok(Claimed { leases, suspect_waits: false });
        }
    }
    let mut claimed = Claimed::default();
    let mut spare = SPARE;
    for _ in 0..ROUNDS {
        let idle = ask.idle && claimed.leases.is_empty();
        let round = round(store, ask, ask.max - claimed.leases.len(), spare, idle).await?;
        claimed.leases.extend(round.leases);
        claimed.suspect_waits |= round.suspect_waits;
        if round.is_last || claimed.leases.len() >= ask.max {
            break;
        }
        spare = (spare * 4).min(MAX_CANDIDATES);
    }
    Ok(claimed)
}

struct Round {
    leases: Vec<Lease>,
    suspect_waits: bool,
    /// There is no use in looking further.
    is_last: bool,
}

/// One transaction of a claim. `idle`: a suspect may be taken, alone.
async fn round(
    store: &PostgresStore,
    ask: &Claim,
    max: usize,
    spare: usize,
    idle: bool,
) -> Result<Round, StoreError> {
    let tx = store.tx().await?;
    let wanted = (max + spare).min(MAX_CANDIDATES);
    let (mut found, limited) = first_candidates(store, &tx, ask, wanted).await?;
    let mut suspect_waits = false;
    if !idle && found.iter().any(|found| found.candidate.is_suspect()) {
        suspect_waits = true;
        let (select, offset) = (Select::of(ask), store.clock.offset());
        let statement = tx.prepare(select.sql()).await?;
        found = read_all(&select.query(&tx, &statement, offset, wanted, SUSPECT_CRASHES).await?)?;
    }
    if found.is_empty() {
        tx.commit().await?;
        return Ok(Round { leases: Vec::new(), suspect_waits, is_last: true });
    }
    let candidates: Vec<Candidate> = found.iter().map(|found| found.candidate.clone()).collect();
    let counted = limited || candidates.iter().any(|candidate| candidate.concurrency_key.is_some());
    let mut limits = if counted { limits::limits_of(&tx, &candidates).await? } else { BTreeMap::new() };
    let admission = rules::admit(&candidates, &mut limits, max, idle);
    if !limits.is_empty() {
        write_limits(&tx, &limits, &candidates, &admission.park).await?;
    }
    let leases = take(store, tx, ask, &found, &admission.take).await?;
    let alone = admission.take.iter().any(|(index, _)| candidates[*index].is_suspect());
    Ok(Round {
        leases,
        suspect_waits: suspect_waits || admission.suspect_waits,
        is_last: alone || admission.park.is_empty() || found.len() < wanted,
    })
}

/// The tasks a claim is for. Names that cannot be stored (with a NUL) cannot be asked for either.
enum Select<'a> {
    /// One queue and one handler, the common case.
    One(&'a str, &'a str),
    Many(Vec<&'a str>, Vec<&'a str>),
}

impl<'a> Select<'a> {
    fn of(ask: &'a Claim) -> Self {
        let distinct = |names: &'a [String]| -> Vec<&'a str> {
            let names: BTreeSet<&str> =
                names.iter().map(String::as_str).filter(|name| !name.contains('\0')).collect();
            names.into_iter().collect()
        };
        let (queues, handlers) = (distinct(&ask.queues), distinct(&ask.handlers));
        match (&queues[..], &handlers[..]) {
            (&[queue], &[handler]) => Self::One(queue, handler),
            _ => Self::Many(queues, handlers),
        }
    }

    fn sql(&self) -> &'static str {
        match self {
            Self::One(..) => include_str!("sql/claim_candidates.sql"),
            Self::Many(..) => include_str!("sql/claim_candidates_many.sql"),
        }
    }

    async fn query(
        &self,
        tx: &Tx,
        statement: &Statement,
        offset: i64,
        wanted: usize,
        below_crashes: u32,
    ) -> Result<Vec<Row>, StoreError> {
        let (wanted, crashes) = (to_i64(wanted), to_i32(below_crashes));
        match self {
            Self::One(queue, handler) => tx.query(statement, &[&offset, queue, handler, &wanted, &crashes]).await,
            Self::Many(queues, handlers) => {
                tx.query(statement, &[&offset, queues, handlers, &wanted, &crashes]).await
            }
        }
    }
}

fn read_all(rows: &[Row]) -> Result<Vec<Found>, StoreError> {
    rows.iter().map(Found::read).collect()
}

/// A locked row that may be leased.
struct Found {
    candidate: Candidate,
    handler: String,
    attempts: u32,
    max_attempts: u32,
    deadline: Option<i64>,
    last_seq: u64,
    phase: Phase,
    created_at: i64,
    traceparent: Option<String>,
    tags: BTreeMap<String, String>,
    in_line_since: Option<i64>,
    undo_on: UndoOn,
}

impl Found {
    fn read(row: &Row) -> Result<Self, StoreError> {
        Ok(Self {
            candidate: Candidate {
                id: get_id(row, 0)?,
                rank: row.try_get(1)?,
                tenant: row.try_get(2)?,
                queue: row.try_get(3)?,
                concurrency_key: row.try_get(5)?,
                crashes: get_u32(row, 8)?,
            },
            handler: row.try_get(4)?,
            attempts: get_u32(row, 6)?,
            max_attempts: get_u32(row, 7)?,
            deadline: row.try_get(9)?,
            last_seq: get_u64(row, 10)?,
            phase: get_phase(row, 11)?,
            created_at: row.try_get(12)?,
            traceparent: row.try_get(13)?,
            tags: get_json(row, 14)?.unwrap_or_default(),
            in_line_since: row.try_get(15)?,
            undo_on: UndoOn::from_code(row.try_get(16)?),
        })
    }

    /// The deadline it has, or gets by its handler's timeout.
    fn deadline(&self, ask: &Claim) -> Option<i64> {
        let timeout = ask.timeouts.get(&self.handler).map(|&timeout| self.created_at + micros(timeout));
        self.deadline.or(timeout)
    }

    fn lease(&self, deadline: Option<i64>, fence: u64, last_seq: u64, log: Vec<LogRow>) -> Lease {
        Lease {
            task: self.candidate.id,
            fence,
            tenant: self.candidate.tenant.clone(),
            handler: self.handler.clone(),
            queue: self.candidate.queue.clone(),
            tags: self.tags.clone(),
            attempts: self.attempts,
            max_attempts: self.max_attempts,
            crashes: self.candidate.crashes,
            phase: self.phase,
            undo_on: self.undo_on,
            deadline,
            traceparent: self.traceparent.clone(),
            in_line_since: self.in_line_since,
            last_seq,
            log,
        }
    }
}

/// Begins the transaction and locks ready tasks, lowest rank first. Also says whether any limit
/// exists.
async fn first_candidates(
    store: &PostgresStore,
    tx: &Tx,
    ask: &Claim,
    wanted: usize,
) -> Result<(Vec<Found>, bool), StoreError> {
    let select = Select::of(ask);
    let guard = tx.prepare(include_str!("sql/claim_guard.sql")).await?;
    let statement = tx.prepare(select.sql()).await?;
    let (worker, offset) = (claim_lock(ask.worker), store.clock.offset());
    let (begun, guarded, found) =
        join3(tx.begin(), tx.query(&guard, &[&worker]), select.query(tx, &statement, offset, wanted, u32::MAX))
            .await;
    begun?;
    let limited = guarded?.first().map_or(Ok(true), |row| row.try_get(1))?;
    Ok((read_all(&found?)?, limited))
}

/// The lock under which a worker's claims are one after the other.
fn claim_lock(worker: Uuid) -> i64 {
    worker.as_u64_pair().1.cast_signed()
}

async fn write_limits(
    tx: &Tx,
    limits: &BTreeMap<String, Limit>,
    candidates: &[Candidate],
    parked: &[(usize, String)],
) -> Result<(), StoreError> {
    if !parked.is_empty() {
        let (ids, names): (Vec<Uuid>, Vec<&str>) =
            parked.iter().map(|(index, name)| (candidates[*index].id.0, name.as_str())).unzip();
        tx.execute(include_str!("sql/claim_park.sql"), &[&ids, &names]).await?;
    }
    limits::save(tx, limits).await
}

/// Leases the chosen ones, and commits.
async fn take(
    store: &PostgresStore,
    tx: Tx,
    ask: &Claim,
    found: &[Found],
    chosen: &[(usize, Vec<String>)],
) -> Result<Vec<Lease>, StoreError> {
    if chosen.is_empty() {
        tx.commit().await?;
        return Ok(Vec::new());
    }
    let started = LogEntry::new(&[NewEvent::new("task.started", json!({"worker": ask.worker}))], &[] as &[Record]);
    let ids: Vec<Uuid> = chosen.iter().map(|(index, _)| found[*index].candidate.id.0).collect();
    let holds: Vec<Option<String>> = chosen.iter().map(|(_, names)| limits::holds(names)).collect();
    let until: Vec<i64> = chosen.iter().map(|(index, _)| log_until(found[*index].last_seq)).collect();
    let deadlines: Vec<Option<i64>> = chosen.iter().map(|(index, _)| found[*index].deadline(ask)).collect();
    let mut depths = Counts::new();
    for (index, _) in chosen {
        limits::count(&mut depths, &found[*index].candidate.queue, -1);
    }
    let (queues, counts): (Vec<String>, Vec<i64>) = depths.into_iter().unzip();

    let take = tx.prepare(include_str!("sql/claim_take.sql")).await?;
    let depth = tx.prepare(include_str!("sql/depth_add.sql")).await?;
    let read = tx.prepare(include_str!("sql/claim_log.sql")).await?;
    let (asked, lease, number) = (store.clock.ask(), micros(ask.lease), to_i64(ask.number));
    let shard = store.depth_shard(false);
    let take_params: super::connect::Params<'_> = &[
        &asked.offset,
        &ask.worker,
        &number,
        &lease,
        &rules::DEADLINE_GRACE,
        &ids,
        &holds,
        &started.events,
        &deadlines,
    ];
    let (taken, counted, logs, committed) = join4(
        tx.query(&take, take_params),
        tx.query(&depth, &[&shard, &queues, &counts]),
        tx.query(&read, &[&ids, &until]),
        tx.send_commit(),
    )
    .await;
    let taken = taken?;
    counted?;
    let mut logs = by_task(&logs?)?;
    committed?;
    tx.end();

    let mut fences: HashMap<Uuid, u64> = HashMap::with_capacity(taken.len());
    for row in &taken {
        fences.insert(row.try_get(0)?, get_u64(row, 1)?);
    }
    if let Some(row) = taken.first() {
        asked.answered(row.try_get(2)?);
    }
    let mut leases = Vec::with_capacity(chosen.len());
    for (index, _) in chosen {
        let found = &found[*index];
        // Every chosen row was locked, so it was taken.
        let Some(&fence) = fences.get(&found.candidate.id.0) else { continue };
        let log = logs.remove(&found.candidate.id.0).unwrap_or_default();
        leases.push(found.lease(found.deadline(ask), fence, found.last_seq + 1, log));
    }
    store.tell(Told { changed: leases.iter().map(|lease| lease.task).collect(), ..Told::default() });
    Ok(leases)
}

/// The leases this very claim got before, when its answer was lost.
async fn claimed_before(store: &PostgresStore, ask: &Claim) -> Result<Vec<Lease>, StoreError> {
    let tx = store.tx().await?;
    tx.begin().await?;
    tx.rows(include_str!("sql/claim_guard.sql"), &[&claim_lock(ask.worker)]).await?;
    let rows = tx.rows(include_str!("sql/claim_again.sql"), &[&ask.worker, &to_i64(ask.number)]).await?;
    let found: Vec<Found> = rows.iter().map(Found::read).collect::<Result<_, _>>()?;
    let ids: Vec<Uuid> = found.iter().map(|found| found.candidate.id.0).collect();
    let until: Vec<i64> = found.iter().map(|found| log_until(found.last_seq)).collect();
    let mut logs = by_task(&tx.rows(include_str!("sql/claim_log.sql"), &[&ids, &until]).await?)?;
    tx.commit().await?;
    let mut leases = Vec::with_capacity(found.len());
    for (found, row) in found.iter().zip(&rows) {
        let fence = get_u64(row, 17)?;
        let mut log = logs.remove(&found.candidate.id.0).unwrap_or_default();
        // As the first time: without the row of this claim's own event.
        log.retain(|row| row.run != fence);
        leases.push(found.lease(found.deadline, fence, found.last_seq, log));
    }
    Ok(leases)
}

/// How far a lease carries the log, which had `last_seq` events before the claim added its own.
fn log_until(last_seq: u64) -> i64 {
    if last_seq <= LOG_WITH_CLAIM { to_i64(last_seq) } else { 1 }
}

/// The rows of `sql/claim_log.sql` by task, each in order.
fn by_task(rows: &[Row]) -> Result<HashMap<Uuid, Vec<LogRow>>, StoreError> {
    let mut logs: HashMap<Uuid, Vec<LogRow>> = HashMap::new();
    for row in rows {
        logs.entry(row.try_get(0)?).or_default().push(log_row(row, 1)?);
    }
    for log in logs.values_mut() {
        log.sort_unstable_by_key(|row| row.seq);
    }
    Ok(logs)
}
