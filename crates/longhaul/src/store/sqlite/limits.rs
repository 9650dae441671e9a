//! Bounds on running tasks: counter rows, and the tasks parked until one has room again.

use std::collections::BTreeMap;

use rusqlite::OptionalExtension;

use super::{Tx, store_error};
use crate::store::clock::micros;
use crate::store::rules::{self, Candidate, Limit};
use crate::store::{Settings, StoreError};
use crate::task::State;

impl Tx<'_> {
    /// Every limit these candidates count in. A concurrency key has one, even when no row exists.
    pub(super) fn limits_of(&self, candidates: &[Candidate]) -> Result<BTreeMap<String, Limit>, StoreError> {
        let mut limits = BTreeMap::new();
        let mut seen: Vec<String> = Vec::new();
        let mut select =
            self.sql.prepare_cached("SELECT max, running FROM limits WHERE name = ?").map_err(store_error)?;
        for candidate in candidates {
            for name in candidate.limits() {
                if seen.contains(&name) {
                    continue;
                }
                let found = select
                    .query_row([&name], |row| Ok(Limit { max: row.get(0)?, running: row.get(1)? }))
                    .optional()
                    .map_err(store_error)?;
                let limit = match (found, &candidate.concurrency_key) {
                    (Some(limit), _) => Some(limit),
                    (None, Some(key)) if name == rules::key_limit(&candidate.tenant, key) => {
                        Some(Limit { max: self.key_max(key)?, running: 0 })
                    }
                    _ => None,
                };
                if let Some(limit) = limit {
                    limits.insert(name.clone(), limit);
                }
                seen.push(name);
            }
        }
        Ok(limits)
    }

    /// How many tasks with this concurrency key may run at once: 1 unless a setting says more.
    fn key_max(&self, key: &str) -> Result<u32, StoreError> {
        let set = self
            .sql
            .prepare_cached("SELECT max FROM limits WHERE name = ?")
            .and_then(|mut select| select.query_row([format!("keymax/{key}")], |row| row.get(0)).optional())
            .map_err(store_error)?;
        Ok(set.unwrap_or(1))
    }

    /// Writes the counters a claim has raised.
    pub(super) fn save_limits(&self, limits: &BTreeMap<String, Limit>) -> Result<(), StoreError> {
        let mut save = self.sql.prepare_cached(include_str!("sql/limit_save.sql")).map_err(store_error)?;
        // A key that was only looked at has no row; one that holds something back does.
        for (name, limit) in limits.iter().filter(|(_, limit)| limit.running > 0 || limit.max == 0) {
            save.execute((name, limit.max, limit.running)).map_err(store_error)?;
        }
        Ok(())
    }

    /// A task that counted in `holds` (a JSON array of names) left `running`.
    pub(super) fn free(&mut self, holds: &str) -> Result<(), StoreError> {
        let names: Vec<String> = serde_json::from_str(holds).unwrap_or_default();
        for name in names {
            self.sql
                .prepare_cached("UPDATE limits SET running = max(running - 1, 0) WHERE name = ?")
                .and_then(|mut update| update.execute([&name]))
                .map_err(store_error)?;
            self.unpark(&name)?;
            self.sql
                .prepare_cached(include_str!("sql/limit_forget.sql"))
                .and_then(|mut delete| delete.execute([&name]))
                .map_err(store_error)?;
        }
        Ok(())
    }

    /// Readies as many of the tasks parked on a limit as it has room for, lowest rank first.
    pub(super) fn unpark(&mut self, name: &str) -> Result<(), StoreError> {
        let readied = self
            .sql
            .prepare_cached(include_str!("sql/limit_unpark.sql"))
            .and_then(|mut update| update.execute([name]))
            .map_err(store_error)?;
        self.told.ready |= readied > 0;
        Ok(())
    }
}

pub(super) fn configure(tx: &mut Tx<'_>, settings: &Settings) -> Result<(), StoreError> {
    for (name, queue) in &settings.queues {
        tx.sql
            .execute(
                include_str!("sql/queue_save.sql"),
                (name, queue.max_pending, queue.max_running, micros(queue.ageing)),
            )
            .map_err(store_error)?;
        set_limit(tx, &rules::queue_limit(name), queue.max_running, "queue", name)?;
    }
    for (name, max) in &settings.tenant_max_running {
        set_limit(tx, &rules::tenant_limit(name), Some(*max), "tenant", name)?;
    }
    for (key, max) in &settings.key_max_running {
        tx.sql
            .execute(include_str!("sql/limit_set.sql"), (format!("keymax/{key}"), max, 0))
            .map_err(store_error)?;
        tx.sql.execute(include_str!("sql/limit_key_max.sql"), (key, max)).map_err(store_error)?;
    }
    if let Some(retention) = settings.retention {
        tx.sql
            .execute(
                "INSERT INTO settings (name, value) VALUES ('retention', ?1)
                 ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                [micros(retention).to_string()],
            )
            .map_err(store_error)?;
    }
    let open: Vec<String> = tx
        .sql
        .prepare(include_str!("sql/limit_open.sql"))
        .and_then(|mut select| select.query_map((), |row| row.get(0))?.collect())
        .map_err(store_error)?;
    for name in open {
        tx.unpark(&name)?;
    }
    Ok(())
}

/// Sets or removes the limit of a queue or tenant. Tasks that run already count from now on.
fn set_limit(tx: &mut Tx<'_>, limit: &str, max: Option<u32>, column: &str, value: &str) -> Result<(), StoreError> {
    // `column` is one of two words of this file, never a caller's.
    let running: Vec<(i64, Option<String>)> = tx
        .sql
        .prepare(&format!(
            "SELECT rowid, holds FROM tasks WHERE state = {} AND {column} = ?",
            State::Running.code()
        ))
        .and_then(|mut select| select.query_map([value], |row| Ok((row.get(0)?, row.get(1)?)))?.collect())
        .map_err(store_error)?;
    let mut counted = 0;
    for (rowid, holds) in running {
        let mut names: Vec<String> = holds.and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default();
        names.retain(|name| name != limit);
        if max.is_some() {
            names.push(limit.to_owned());
            counted += 1;
        }
        let holds = (!names.is_empty()).then(|| serde_json::json!(names).to_string());
        tx.sql.execute("UPDATE tasks SET holds = ?2 WHERE rowid = ?1", (rowid, holds)).map_err(store_error)?;
    }
    match max {
        Some(max) => tx.sql.execute(include_str!("sql/limit_set.sql"), (limit, max, counted)),
        None => {
            tx.sql
                .execute("UPDATE tasks SET ready = 1, parked = NULL WHERE parked = ?", [limit])
                .map_err(store_error)?;
            tx.sql.execute("DELETE FROM limits WHERE name = ?", [limit])
        }
    }
    .map_err(store_error)?;
    Ok(())
}
