//! What SQLite itself can do here, for `longhaul bench floor`.

use std::time::{Duration, Instant};

use rusqlite::{Connection, TransactionBehavior};
use uuid::Uuid;

use super::rows::Id;
use crate::store::Floor;

const ROWS: usize = 1_000;

pub(super) fn floor(connection: &mut Connection, seconds: f64) -> rusqlite::Result<Floor> {
    connection.execute_batch(
        "DROP TABLE IF EXISTS longhaul_floor;
         CREATE TABLE longhaul_floor (k BLOB PRIMARY KEY, v BLOB NOT NULL) WITHOUT ROWID;",
    )?;
    let half = Duration::from_secs_f64((seconds / 2.0).max(0.05));
    let rows = measure(half, || insert(connection, ROWS))? * ROWS as f64;
    let commits = measure(half, || insert(connection, 1))?;
    connection.execute_batch("DROP TABLE longhaul_floor")?;
    Ok(Floor { rows_per_second: rows, commits_per_second: commits })
}

/// One durable transaction of `rows` rows by one prepared statement.
fn insert(connection: &mut Connection, rows: usize) -> rusqlite::Result<()> {
    let values = vec!["(?, ?)"; rows].join(", ");
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    {
        let mut insert =
            transaction.prepare_cached(&format!("INSERT INTO longhaul_floor (k, v) VALUES {values}"))?;
        for row in 0..rows {
            insert.raw_bind_parameter(row * 2 + 1, Id(Uuid::now_v7()))?;
            insert.raw_bind_parameter(row * 2 + 2, [b'x'; 200])?;
        }
        insert.raw_execute()?;
    }
    transaction.commit()
}

/// How often `work` can be done per second.
fn measure(time: Duration, mut work: impl FnMut() -> rusqlite::Result<()>) -> rusqlite::Result<f64> {
    work()?;
    let (started, mut done) = (Instant::now(), 0u32);
    while started.elapsed() < time {
        work()?;
        done += 1;
    }
    Ok(f64::from(done) / started.elapsed().as_secs_f64())
}
