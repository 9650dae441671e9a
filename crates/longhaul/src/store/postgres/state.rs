//! What belongs to a task beside its row and its log: the agent's state and checkpoints. Whoever
//! writes here has the task's row locked.

use std::collections::BTreeMap;

use uuid::Uuid;

use super::connect::Tx;
use super::rows::{get_json, get_u64, to_i64, to_json};
use crate::record::Record;
use crate::state::AgentState;
use crate::store::clock::micros;
use crate::store::{Commit, StoreError};
use crate::task::NewTask;

/// States by task, each with its version.
pub(super) type States = BTreeMap<Uuid, (u64, AgentState)>;

/// The states of these tasks; those without one are missing.
pub(super) async fn read(tx: &Tx, tasks: &[Uuid]) -> Result<States, StoreError> {
    let rows = tx.rows(include_str!("sql/state_read.sql"), &[&tasks]).await?;
    rows.iter()
        .map(|row| Ok((row.try_get(0)?, (get_u64(row, 1)?, get_json(row, 2)?.unwrap_or_default()))))
        .collect()
}

pub(super) async fn save(tx: &Tx, states: &States) -> Result<(), StoreError> {
    write(tx, include_str!("sql/state_save.sql"), states).await
}

/// The states that tasks begin with which take over what another recorded.
pub(super) async fn begin(tx: &Tx, tasks: impl Iterator<Item = &NewTask>) -> Result<(), StoreError> {
    let mut states = States::new();
    for task in tasks {
        for change in task.inherited().filter_map(Record::state_change) {
            let (version, state) = states.entry(task.id.0).or_default();
            state.change(&change);
            *version += 1;
        }
    }
    if states.is_empty() { Ok(()) } else { write(tx, include_str!("sql/state_begin.sql"), &states).await }
}

async fn write(tx: &Tx, sql: &str, states: &States) -> Result<(), StoreError> {
    let tasks: Vec<Uuid> = states.keys().copied().collect();
    let versions: Vec<i64> = states.values().map(|(version, _)| to_i64(*version)).collect();
    let texts: Vec<Option<String>> = states.values().map(|(_, state)| to_json(Some(state))).collect();
    tx.execute(sql, &[&tasks, &versions, &texts]).await?;
    Ok(())
}

/// Applies the patches of accepted commits.
pub(super) async fn patch(tx: &Tx, accepted: &[(&Commit, u64, i64)]) -> Result<(), StoreError> {
    let patched: Vec<&Commit> =
        accepted.iter().map(|(commit, ..)| *commit).filter(|commit| !commit.patches.is_empty()).collect();
    if patched.is_empty() {
        return Ok(());
    }
    let tasks: Vec<Uuid> = patched.iter().map(|commit| commit.task.0).collect();
    let mut states = read(tx, &tasks).await?;
    for commit in patched {
        let (version, state) = states.entry(commit.task.0).or_default();
        for change in &commit.patches {
            state.change(change);
            *version += 1;
        }
    }
    save(tx, &states).await
}

/// Saves the checkpoints of accepted commits, and lets go of those that are too many or too old.
pub(super) async fn save_checkpoints(tx: &Tx, accepted: &[(&Commit, u64, i64)]) -> Result<(), StoreError> {
    let (mut tasks, mut seqs, mut versions, mut iterations) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let (mut checksums, mut data, mut keep, mut since) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut created_at = 0;
    for &(commit, last_seq, now) in accepted {
        let Some(checkpoint) = &commit.checkpoint else { continue };
        created_at = now;
        tasks.push(commit.task.0);
        seqs.push(to_i64(last_seq));
        versions.push(i64::from(checkpoint.version));
        iterations.push(i64::from(checkpoint.iteration));
        checksums.push(i64::from(crc32fast::hash(checkpoint.data.as_bytes())));
        data.push(checkpoint.data.as_str());
        keep.push(i64::from(checkpoint.max_count.max(1)));
        since.push(now - micros(checkpoint.max_age));
    }
    if tasks.is_empty() {
        return Ok(());
    }
    tx.execute(
        include_str!("sql/checkpoint_save.sql"),
        &[&created_at, &tasks, &seqs, &versions, &iterations, &checksums, &data],
    )
    .await?;
    tx.execute(include_str!("sql/checkpoint_rotate.sql"), &[&tasks, &seqs, &keep, &since]).await?;
    Ok(())
}

/// Removes tasks and everything that belongs to them. Their rows are locked.
pub(super) async fn remove(tx: &Tx, tasks: &[Uuid]) -> Result<(), StoreError> {
    tx.execute(include_str!("sql/task_remove.sql"), &[&tasks]).await?;
    Ok(())
}
