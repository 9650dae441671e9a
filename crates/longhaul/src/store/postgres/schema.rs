//! Bringing the database up to date, and refusing one that cannot be trusted.

use super::connect::Tx;
use crate::faults;
use crate::store::clock::wall_micros;
use crate::store::{StoreError, migrate};

/// The oldest server whose behaviour the statements rely on.
const OLDEST_SERVER: i32 = 130_000;
/// Everyone who migrates takes this lock first. Any number will do; it only has to stay the same.
const MIGRATION_LOCK: i64 = 0x6c6f_6e67_6861_756c;

/// The version from which on everything is there that has numbers of transactions. A process that the fault suite lets know
/// older ones only has nothing to number anew.
const NUMBERED: i64 = 8;

/// Applies what is missing, all in one transaction, and gives the channel for hints: one per schema,
/// so that two installations in one database do not hear each other.
pub(super) async fn prepare(tx: Tx) -> Result<String, StoreError> {
    let server = tx
        .rows(
            "SELECT current_setting('server_version_num')::integer, current_setting('server_version'),
                    (SELECT oid::bigint FROM pg_namespace WHERE nspname = current_schema())",
            &[],
        )
        .await?;
    let server =
        server.first().ok_or_else(|| StoreError::Failed("the server says nothing of itself".to_owned()))?;
    let (number, version): (i32, String) = (server.try_get(0)?, server.try_get(1)?);
    if number < OLDEST_SERVER {
        return Err(StoreError::Incompatible(format!(
            "the server is PostgreSQL {version}; version 13 or newer is needed"
        )));
    }
    let Some(schema) = server.try_get::<_, Option<i64>>(2)? else {
        return Err(StoreError::Incompatible(
            "no schema of the connection's search_path exists; create one, or change search_path".to_owned(),
        ));
    };
    tx.begin().await?;
    tx.rows("SELECT pg_advisory_xact_lock($1)", &[&MIGRATION_LOCK]).await?;
    let known = tx.rows("SELECT to_regclass('longhaul_migrations') IS NOT NULL", &[]).await?;
    // Asked first, because a role that may not create tables may still use those that are there.
    if !known.first().map_or(Ok(false), |row| row.try_get(0))? {
        tx.batch(
            "CREATE TABLE longhaul_migrations (
                 version bigint PRIMARY KEY, name text NOT NULL, applied_at bigint NOT NULL)",
        )
        .await?;
    }
    let found = tx.rows("SELECT coalesce(max(version), 0) FROM longhaul_migrations", &[]).await?;
    let found: i64 = found.first().map_or(Ok(0), |row| row.try_get(0))?;
    for migration in migrate::missing(found)? {
        tx.batch(migration.postgres).await?;
        tx.execute(
            "INSERT INTO longhaul_migrations (version, name, applied_at) VALUES ($1, $2, $3)",
            &[&migration.version, &migration.name, &wall_micros()],
        )
        .await?;
    }
    if faults::newest_schema() >= NUMBERED {
        renumber(&tx).await?;
    }
    tx.commit().await?;
    Ok(format!("longhaul_{schema}"))
}

/// The server's name and the schema's version, 0 when there is none; only looks.
pub(super) async fn inspect(tx: Tx) -> Result<(String, i64), StoreError> {
    let found = tx
        .rows("SELECT current_setting('server_version'), to_regclass('longhaul_migrations') IS NOT NULL", &[])
        .await?;
    let found = found.first().ok_or_else(|| StoreError::Failed("the server says nothing of itself".to_owned()))?;
    let engine = format!("PostgreSQL {}", found.try_get::<_, String>(0)?);
    let schema = if found.try_get::<_, bool>(1)? {
        let newest = tx.rows("SELECT coalesce(max(version), 0) FROM longhaul_migrations", &[]).await?;
        newest.first().map_or(Ok(0), |row| row.try_get(0))?
    } else {
        0
    };
    tx.end();
    Ok((engine, schema))
}

/// A backup restored on another server has numbers of transactions that are still to come there. Those rows
/// are from before everything, so that readers of all events are given what is new.
async fn renumber(tx: &Tx) -> Result<(), StoreError> {
    // By the BRIN index, see `feed.rs`; and for as long as it takes.
    tx.batch(
        "SET LOCAL enable_bitmapscan = on; SET LOCAL enable_indexscan = off; SET LOCAL statement_timeout = 0",
    )
    .await?;
    tx.batch(include_str!("sql/renumber.sql")).await
}
