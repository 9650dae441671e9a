//! What a claim costs: as many rows are visited with many pending tasks as with few.

use rusqlite::{Connection, OpenFlags, StatementStatus};
use serde_json::Value;
use tokio_postgres::NoTls;

use super::bed::{Bed, on_postgres, on_sqlite};
use crate::store::QueueSettings;

const WANTED: i64 = 200;
const FEW: usize = 1_000;
const MANY: usize = 20_000;

async fn fill(bed: &Bed, tasks: usize) {
    for _ in 0..tasks / FEW {
        bed.submit_many(FEW).await;
    }
}

async fn open_gates(bed: &Bed) {
    bed.configure_queue("default", QueueSettings { max_pending: 1_000_000, ..QueueSettings::default() }).await;
}

/// How many steps SQLite's machine takes to find the candidates of a claim.
fn steps_on_sqlite(url: &str) -> i32 {
    let path = url.strip_prefix("sqlite:").expect("a file");
    let connection = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_ONLY).expect("it opens");
    let mut select =
        connection.prepare(include_str!("../sqlite/sql/claim_candidates.sql")).expect("the statement is one");
    let found = select
        .query_map(("default", "h", 0, u32::MAX, WANTED), |_| Ok(()))
        .expect("it runs")
        .filter(Result::is_ok)
        .count();
    assert_eq!(found, WANTED as usize);
    select.get_status(StatementStatus::VmStep)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_visits_as_many_rows_with_many_pending_as_with_few_on_sqlite() {
    on_sqlite(|bed| async move {
        open_gates(&bed).await;
        fill(&bed, FEW).await;
        let few = steps_on_sqlite(&bed.url);
        fill(&bed, MANY).await;
        assert_eq!(steps_on_sqlite(&bed.url), few);
    })
    .await;
}

/// How many rows PostgreSQL visits, and how many pages it touches, to find and lock the candidates of a
/// claim.
async fn cost_on_postgres(url: &str) -> (u64, u64) {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.expect("the test server answers");
    tokio::spawn(connection);
    client
        .batch_execute(
            "SET plan_cache_mode = force_generic_plan; SET enable_seqscan = off; SET enable_bitmapscan = off; BEGIN",
        )
        .await
        .expect("settings as the store's");
    let select = include_str!("../postgres/sql/claim_candidates.sql");
    let prepare = format!("PREPARE candidates (bigint, text, text, bigint, integer) AS {select}");
    client.batch_execute(&prepare).await.expect("the statement is one");
    let explain = format!(
        "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE candidates (0, 'default', 'h', {WANTED}, {})",
        i32::MAX
    );
    let messages = client.simple_query(&explain).await.expect("it runs");
    let text: String = messages
        .iter()
        .filter_map(|message| match message {
            tokio_postgres::SimpleQueryMessage::Row(row) => row.get(0),
            _ => None,
        })
        .collect();
    let plan: Value = serde_json::from_str(&text).expect("a plan as JSON");
    let plan = &plan[0]["Plan"];
    assert_eq!(plan["Actual Rows"], WANTED);
    let pages = ["Shared Hit Blocks", "Shared Read Blocks"].iter().filter_map(|name| plan[name].as_u64()).sum();
    (rows_visited(plan), pages)
}

/// The rows that the scans of a plan looked at, wanted or not.
fn rows_visited(plan: &Value) -> u64 {
    let counts = ["Actual Rows", "Rows Removed by Filter", "Rows Removed by Index Recheck"];
    let own = match plan["Relation Name"].as_str() {
        Some(_) => counts.iter().filter_map(|name| plan[name].as_f64()).sum::<f64>() as u64,
        None => 0,
    };
    own + plan["Plans"].as_array().into_iter().flatten().map(rows_visited).sum::<u64>()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_visits_as_many_rows_with_many_pending_as_with_few_on_postgres() {
    on_postgres(|bed| async move {
        open_gates(&bed).await;
        fill(&bed, FEW).await;
        let (few_rows, few) = cost_on_postgres(&bed.url).await;
        fill(&bed, MANY).await;
        let (many_rows, many) = cost_on_postgres(&bed.url).await;
        assert_eq!((few_rows, many_rows), (WANTED as u64, WANTED as u64));
        // A taller index costs a page or two more. The server may have vacuumed meanwhile: then to lock a
        // row costs one page more, whatever is pending.
        assert!(many <= few + WANTED as u64 + few / 5 + 4, "{many} pages with many pending tasks, {few} with few");
    })
    .await;
}
