//! What is asked of people. Whoever writes here has the task's row locked.

use std::collections::HashMap;

use tokio_postgres::Row;
use uuid::Uuid;

use super::connect::Tx;
use super::rows::{get_id, get_json};
use crate::store::{Ask, AskChange, AskKind, AskStatus, Commit, StoreError};

/// Opens and closes what accepted commits say.
pub(super) async fn write(tx: &Tx, accepted: &[(&Commit, u64, i64)]) -> Result<(), StoreError> {
    let (mut opened, mut closed) = (Opened::default(), Closed::default());
    let mut now = 0;
    for &(commit, _, at) in accepted {
        now = at;
        for change in &commit.asks {
            match change {
                AskChange::Open(ask) => {
                    opened.tasks.push(commit.task.0);
                    opened.ids.push(&ask.id);
                    opened.kinds.push(ask.kind as i16);
                    opened.steps.push(&ask.step);
                    opened.texts.push(&ask.text);
                    opened.subjects.push(&ask.subject);
                    opened.digests.push(&ask.digest);
                    opened.expire.push(ask.expires_at);
                }
                AskChange::Use { id, .. } => closed.push(commit, id, AskStatus::Used),
                AskChange::Expire { id } => closed.push(commit, id, AskStatus::Expired),
            }
        }
    }
    if !opened.ids.is_empty() {
        let o = &opened;
        tx.execute(
            include_str!("sql/ask_open.sql"),
            &[&now, &o.tasks, &o.ids, &o.kinds, &o.steps, &o.texts, &o.subjects, &o.digests, &o.expire],
        )
        .await?;
    }
    if !closed.ids.is_empty() {
        let c = &closed;
        tx.execute(include_str!("sql/ask_close.sql"), &[&c.tasks, &c.ids, &c.statuses, &now]).await?;
    }
    Ok(())
}

#[derive(Default)]
struct Opened<'a> {
    tasks: Vec<Uuid>,
    ids: Vec<&'a str>,
    kinds: Vec<i16>,
    steps: Vec<&'a str>,
    texts: Vec<&'a str>,
    subjects: Vec<&'a str>,
    digests: Vec<&'a str>,
    expire: Vec<Option<i64>>,
}

#[derive(Default)]
struct Closed<'a> {
    tasks: Vec<Uuid>,
    ids: Vec<&'a str>,
    statuses: Vec<i16>,
}

impl<'a> Closed<'a> {
    fn push(&mut self, commit: &Commit, id: &'a str, status: AskStatus) {
        self.tasks.push(commit.task.0);
        self.ids.push(id);
        self.statuses.push(status as i16);
    }
}

/// Approvals that these commits use and that have expired, by task.
pub(super) async fn expired<'a>(
    tx: &Tx,
    commits: impl Iterator<Item = &'a Commit>,
    offset: i64,
) -> Result<HashMap<Uuid, String>, StoreError> {
    let used = |commit: &'a Commit| commit.asks.iter().filter_map(|ask| Some((commit.task.0, ask.used()?)));
    let (tasks, ids): (Vec<Uuid>, Vec<&str>) = commits.flat_map(used).unzip();
    if tasks.is_empty() {
        return Ok(HashMap::new());
    }
    let rows = tx.rows(include_str!("sql/ask_expired.sql"), &[&tasks, &ids, &offset]).await?;
    rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect()
}

/// Those of these tasks, oldest first.
pub(super) async fn of_tasks(tx: &Tx, tasks: &[Uuid]) -> Result<Vec<Ask>, StoreError> {
    let rows = tx.rows(include_str!("sql/asks.sql"), &[&tasks]).await?;
    rows.iter().map(ask).collect()
}

/// Notes what was decided.
pub(super) async fn decide(tx: &Tx, decided: &[Ask]) -> Result<(), StoreError> {
    let now = decided.iter().filter_map(|ask| ask.decided_at).max().unwrap_or(0);
    let tasks: Vec<Uuid> = decided.iter().map(|ask| ask.task_id.0).collect();
    let ids: Vec<&str> = decided.iter().map(|ask| ask.id.as_str()).collect();
    let statuses: Vec<i16> = decided.iter().map(|ask| ask.status as i16).collect();
    let by: Vec<Option<&str>> = decided.iter().map(|ask| ask.decided_by.as_deref()).collect();
    let reasons: Vec<Option<&str>> = decided.iter().map(|ask| ask.reason.as_deref()).collect();
    tx.execute(include_str!("sql/ask_decide.sql"), &[&now, &tasks, &ids, &statuses, &by, &reasons]).await?;
    Ok(())
}

pub(super) fn ask(row: &Row) -> Result<Ask, StoreError> {
    let kind =
        if row.try_get::<_, i16>(2)? == AskKind::Approval as i16 { AskKind::Approval } else { AskKind::Question };
    let status: i16 = row.try_get(3)?;
    Ok(Ask {
        id: row.try_get(0)?,
        task_id: get_id(row, 1)?,
        kind,
        status: AskStatus::from_code(status).ok_or_else(|| {
            StoreError::Incompatible(format!(
                "a question has status number {status}, unknown here; use a newer longhaul"
            ))
        })?,
        step: row.try_get(4)?,
        text: row.try_get(5)?,
        subject: get_json(row, 6)?.unwrap_or_default(),
        digest: row.try_get(7)?,
        requested_at: row.try_get(8)?,
        expires_at: row.try_get(9)?,
        decided_by: row.try_get(10)?,
        decided_at: row.try_get(11)?,
        reason: row.try_get(12)?,
    })
}
