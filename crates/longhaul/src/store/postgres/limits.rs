//! Counters: bounds on running tasks and the tasks parked until one has room, and the number of
//! pending tasks per queue.

use std::collections::{BTreeMap, BTreeSet};

use futures_util::future::join3;

use super::connect::Tx;
use crate::faults::{self, Mutant};
use crate::store::StoreError;
use crate::store::rules::{self, Candidate, Limit};

/// Changes of counters, by name, in the order in which their rows are locked.
pub(super) type Counts = BTreeMap<String, i64>;

/// Adds to the count of `name`.
pub(super) fn count(counts: &mut Counts, name: &str, by: i64) {
    match counts.get_mut(name) {
        Some(count) => *count += by,
        None => {
            counts.insert(name.to_owned(), by);
        }
    }
}

/// Counts the limits that a task which left `running` held (a JSON array of names).
pub(super) fn count_freed(freed: &mut Counts, holds: &str) {
    let names: Vec<String> = serde_json::from_str(holds).unwrap_or_default();
    for name in names {
        *freed.entry(name).or_default() += 1;
    }
}

/// Locks and gives every limit these candidates count in. A concurrency key has one, even when no
/// row existed.
pub(super) async fn limits_of(tx: &Tx, candidates: &[Candidate]) -> Result<BTreeMap<String, Limit>, StoreError> {
    let mut keys: BTreeMap<String, &str> = BTreeMap::new();
    let mut names: BTreeSet<String> = BTreeSet::new();
    for candidate in candidates {
        names.insert(rules::queue_limit(&candidate.queue));
        names.insert(rules::tenant_limit(&candidate.tenant));
        if let Some(key) = &candidate.concurrency_key {
            keys.insert(rules::key_limit(&candidate.tenant, key), key);
        }
    }
    let before = if faults::is(Mutant::LimitReadThenWrite) { Some(counted(tx).await?) } else { None };
    let mut found = Vec::new();
    // key/ comes before queue/ and tenant/, so rows are locked in the order of their names.
    if !keys.is_empty() {
        let (keys, values): (Vec<String>, Vec<&str>) = keys.into_iter().unzip();
        found = tx.rows(include_str!("sql/limit_key_open.sql"), &[&keys, &values]).await?;
    }
    let names: Vec<String> = names.into_iter().collect();
    found.extend(tx.rows(include_str!("sql/limit_lock.sql"), &[&names]).await?);
    let mut limits = BTreeMap::new();
    for row in found {
        let count = |column| row.try_get::<_, i64>(column).map(|value| u32::try_from(value).unwrap_or(0));
        let (name, max, mut running) = (row.try_get(0)?, count(1)?, count(2)?);
        if let Some(before) = &before {
            running = before.get(&name).copied().unwrap_or(0);
        }
        limits.insert(name, Limit { max, running });
    }
    Ok(limits)
}

/// What every limit counts, without locking it; for a mutant.
async fn counted(tx: &Tx) -> Result<BTreeMap<String, u32>, StoreError> {
    let rows = tx.rows("SELECT name, running FROM limits", &[]).await?;
    rows.iter().map(|row| Ok((row.try_get(0)?, u32::try_from(row.try_get::<_, i64>(1)?).unwrap_or(0)))).collect()
}

/// Writes the counters a claim has raised, and removes those it opened in vain. The rows are locked.
pub(super) async fn save(tx: &Tx, limits: &BTreeMap<String, Limit>) -> Result<(), StoreError> {
    let names: Vec<&str> = limits.keys().map(String::as_str).collect();
    let running: Vec<i64> = limits.values().map(|limit| limit.running.into()).collect();
    let unused: Vec<&str> =
        limits.iter().filter(|(_, limit)| limit.running == 0).map(|(name, _)| name.as_str()).collect();
    tx.execute(include_str!("sql/limit_save.sql"), &[&names, &running]).await?;
    if !unused.is_empty() {
        tx.execute(include_str!("sql/limit_forget.sql"), &[&unused]).await?;
    }
    Ok(())
}

/// Lowers counters and readies tasks parked on them; says whether there were any.
pub(super) async fn free(tx: &Tx, freed: &Counts) -> Result<bool, StoreError> {
    if freed.is_empty() {
        return Ok(false);
    }
    let names: Vec<&str> = freed.keys().map(String::as_str).collect();
    let counts: Vec<i64> = freed.values().copied().collect();
    let lock = tx.prepare(include_str!("sql/limit_lock.sql")).await?;
    let free = tx.prepare(include_str!("sql/limit_free.sql")).await?;
    let forget = tx.prepare(include_str!("sql/limit_forget.sql")).await?;
    // Three statements and not one: each must see what was committed before the locks were got.
    let (locked, readied, forgotten) =
        join3(tx.query(&lock, &[&names]), tx.query(&free, &[&names, &counts]), tx.query(&forget, &[&names])).await;
    locked?;
    let readied = readied?;
    forgotten?;
    Ok(!readied.is_empty())
}

/// Readies tasks parked on limits that have room or are gone, at most `limit` of each of at most
/// `limit` limits; says whether there were any.
pub(super) async fn unpark_open(tx: &Tx, limit: i64) -> Result<bool, StoreError> {
    let open = tx.rows(include_str!("sql/limit_open.sql"), &[&limit]).await?;
    if open.is_empty() {
        return Ok(false);
    }
    let (mut names, mut rooms) = (Vec::new(), Vec::new());
    for row in &open {
        names.push(row.try_get::<_, &str>(0)?);
        rooms.push(row.try_get::<_, i64>(1)?.min(limit));
    }
    Ok(tx.execute(include_str!("sql/limit_unpark.sql"), &[&names, &rooms]).await? > 0)
}

/// Changes the numbers of pending tasks.
pub(super) async fn add_depths(tx: &Tx, shard: i32, depths: &Counts) -> Result<(), StoreError> {
    let (queues, counts): (Vec<&str>, Vec<i64>) =
        depths.iter().filter(|&(_, &by)| by != 0).map(|(queue, &by)| (queue.as_str(), by)).unzip();
    if !queues.is_empty() {
        tx.execute(include_str!("sql/depth_add.sql"), &[&shard, &queues, &counts]).await?;
    }
    Ok(())
}

/// The holds of a task that counts in `names`.
pub(super) fn holds(names: &[String]) -> Option<String> {
    (!names.is_empty()).then(|| serde_json::Value::from(names.to_vec()).to_string())
}
