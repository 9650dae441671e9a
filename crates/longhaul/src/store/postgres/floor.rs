//! What the server itself can do here, for `longhaul bench floor`.

use std::time::{Duration, Instant};

use uuid::Uuid;

use super::PostgresStore;
use super::connect::Tx;
use crate::store::{Floor, StoreError};

const ROWS: usize = 1_000;

/// Measures on a table of its own, named so that two who measure do not meet.
pub(super) async fn floor(store: &PostgresStore, seconds: f64) -> Result<Floor, StoreError> {
    let tx = store.tx().await?;
    let table = format!("longhaul_floor_{}", Uuid::now_v7().simple());
    tx.batch(&format!("CREATE TABLE {table} (k uuid PRIMARY KEY, v bytea NOT NULL)")).await?;
    let measured = measure_both(&tx, &table, Duration::from_secs_f64((seconds / 2.0).max(0.05))).await;
    tx.batch(&format!("DROP TABLE {table}")).await?;
    tx.end();
    measured
}

async fn measure_both(tx: &Tx, table: &str, half: Duration) -> Result<Floor, StoreError> {
    // Not a caller's text: the name was made above.
    let insert = format!("INSERT INTO {table} (k, v) SELECT * FROM unnest($1::uuid[], $2::bytea[])");
    let insert = tx.prepare(&insert).await?;
    let rows_per_second = measure(tx, &insert, half, ROWS).await? * ROWS as f64;
    let commits_per_second = measure(tx, &insert, half, 1).await?;
    Ok(Floor { rows_per_second, commits_per_second })
}

/// How many durable transactions of `rows` rows are done per second, each one statement.
async fn measure(
    tx: &Tx,
    insert: &tokio_postgres::Statement,
    time: Duration,
    rows: usize,
) -> Result<f64, StoreError> {
    let value = vec![[b'x'; 200].as_slice(); rows];
    let (mut started, mut done) = (Instant::now(), 0_u32);
    loop {
        let keys: Vec<Uuid> = (0..rows).map(|_| Uuid::now_v7()).collect();
        tx.query(insert, &[&keys, &value]).await?;
        if done == 0 {
            // The first one warms up.
            started = Instant::now();
        }
        done += 1;
        if started.elapsed() >= time {
            return Ok(f64::from(done - 1) / started.elapsed().as_secs_f64());
        }
    }
}
