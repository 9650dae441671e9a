//! What people and other programs ask of tasks, and what workers say of themselves.

use rusqlite::OptionalExtension;
use serde_json::json;
use uuid::Uuid;

use super::rows::Id;
use super::{Tx, store_error};
use crate::event::{LogEntry, NewEvent};
use crate::record::Record;
use crate::state::StatePatch;
use crate::store::clock::micros;
use crate::store::locks::key;
use crate::store::rules::{self, Change, Head};
use crate::store::{Action, Control, ControlRefused, Controlled, QueueSettings, StoreError, WorkerInfo};
use crate::task::TaskId;

type Answer = Result<Controlled, ControlRefused>;

pub(super) fn control(tx: &mut Tx<'_>, control: &Control) -> Result<Answer, StoreError> {
    let head = tx.head(control.task)?.filter(|head| head.tenant == control.tenant);
    let Some(head) = head else { return Ok(Err(ControlRefused::NotFound)) };
    if let Action::Signal { id, again: true, .. } = control.action
        && has_arrived(tx, head.id, id)?
    {
        return Ok(Ok(Controlled { state: head.state, changed: false, version: 0 }));
    }
    let ageing = ageing(tx, &head.queue)?;
    let change = match &control.action {
        Action::Answer { .. } | Action::Approve { .. } => super::asks::decide(tx, &head, control)?.map(Some),
        _ => rules::control(&head, control, ageing, tx.now),
    };
    let change = match change {
        Ok(change) => change,
        Err(refused) => return Ok(Err(refused)),
    };
    let Some(change) = change else {
        return Ok(Ok(Controlled { state: head.state, changed: false, version: 0 }));
    };
    tx.told.controlled.push(head.id);
    let (state, mut version) = (change.head.state, 0);
    match &control.action {
        Action::Patch { patch, version: expected, under } => {
            if let Some(lock) = under
                && !super::sessions::is_held(tx, &key(&head.tenant, &lock.name), lock)?
            {
                return Ok(Err(lock.lost()));
            }
            match patch_state(tx, &head, control, patch, *expected)? {
                Ok(now_at) => version = now_at,
                Err(refused) => return Ok(Err(refused)),
            }
        }
        Action::Delete => {
            super::locks::let_go(tx, head.id)?;
            super::sweep::remove(tx, head.id)?;
        }
        _ => {
            if head.state.is_final() {
                // Whoever is opened again holds no lock from before.
                super::locks::let_go(tx, head.id)?;
            }
            tx.apply(&head, change)?;
            if matches!(control.action, Action::Resume) {
                open_again(tx, &head)?;
            }
            if state.is_final() {
                super::locks::let_go(tx, head.id)?;
            }
        }
    }
    Ok(Ok(Controlled { state, changed: true, version }))
}

/// Whether a signal of this id is in the task's log.
fn has_arrived(tx: &Tx<'_>, task: TaskId, id: Uuid) -> Result<bool, StoreError> {
    let mut select = tx.sql.prepare_cached(include_str!("sql/log_naming.sql")).map_err(store_error)?;
    let rows = select.query_map((Id::from(task), id.to_string()), |row| row.get::<_, String>(0));
    for records in rows.map_err(store_error)? {
        if rules::has_arrived(&records.map_err(store_error)?, id) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// What a resumed task needs beside its row: what was asked before counts no longer, what its
/// children came to is told again, and no snapshot tells of what was undone.
fn open_again(tx: &mut Tx<'_>, head: &Head) -> Result<(), StoreError> {
    let mut statements = vec![include_str!("sql/resume_asks.sql"), include_str!("sql/resume_children.sql")];
    if head.may_be_undone() {
        statements.push("DELETE FROM checkpoints WHERE task = ?1");
    }
    for statement in statements {
        tx.sql
            .prepare_cached(statement)
            .and_then(|mut update| update.execute([Id::from(head.id)]))
            .map_err(store_error)?;
    }
    tx.told.due = true;
    Ok(())
}

fn patch_state(
    tx: &mut Tx<'_>,
    head: &Head,
    control: &Control,
    patch: &StatePatch,
    expected: Option<u64>,
) -> Result<Result<u64, ControlRefused>, StoreError> {
    let current = tx.agent_state(head.id)?.map_or(0, |(version, _)| version);
    if expected.is_some_and(|expected| expected != current) {
        return Ok(Err(ControlRefused::VersionConflict { current }));
    }
    let version = tx.change_state(head.id, &patch.clone().into())?;
    let event = NewEvent::new("state.patched", json!({"version": version, "patch": patch, "by": control.by}));
    let entry = LogEntry::new(&[event], &[Record::Patched { patch: patch.clone(), version }]);
    tx.apply(head, Change { head: head.clone(), entry })?;
    Ok(Ok(version))
}

fn ageing(tx: &Tx<'_>, queue: &str) -> Result<i64, StoreError> {
    let set = tx
        .sql
        .prepare_cached("SELECT ageing FROM queues WHERE name = ?")
        .and_then(|mut select| select.query_row([queue], |row| row.get(0)).optional())
        .map_err(store_error)?;
    Ok(set.unwrap_or_else(|| micros(QueueSettings::default().ageing)))
}

pub(super) fn register(tx: &mut Tx<'_>, worker: &WorkerInfo) -> Result<(), StoreError> {
    tx.sql
        .execute(
            include_str!("sql/worker_save.sql"),
            (
                Id(worker.id),
                &worker.name,
                json!(worker.handlers).to_string(),
                json!(worker.queues).to_string(),
                worker.slots,
                tx.now,
            ),
        )
        .map_err(store_error)?;
    for handler in &worker.handlers {
        tx.sql
            .execute(
                "INSERT INTO handlers (name, first_seen) VALUES (?1, ?2) ON CONFLICT (name) DO NOTHING",
                (handler, tx.now),
            )
            .map_err(store_error)?;
    }
    Ok(())
}
