//! The load of the proof in short: clients over HTTP, webhooks, locks, resumes, undos by request, forks, schedules and changes of
//! states, while servers and workers are killed; and readers of events who come back again and again.

use std::path::Path;
use std::time::Duration;

use longhaul_prove::bed::Kind;
use longhaul_prove::drive::{Drive, Faults, Outcome, drive};
use longhaul_prove::readers::run::{Reading, read_all};
use tokio::sync::Mutex;

/// Each run has a dozen processes; two at once would only slow each other down.
static ONE_AT_A_TIME: Mutex<()> = Mutex::const_new(());

fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_longhaul-prove"))
}

#[track_caller]
fn held(outcome: &Outcome) {
    let first: Vec<String> = outcome.violations.iter().take(10).map(ToString::to_string).collect();
    assert!(first.is_empty(), "{:?}\n{}", outcome.counts, first.join("\n"));
    assert_eq!(outcome.not_fired, [] as [String; 0], "everything that was planned happened: {:?}", outcome.counts);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_clients_are_told_over_http_holds_while_servers_are_killed() {
    let _turn = ONE_AT_A_TIME.lock().await;
    let faults =
        Faults { kills: 8, freezes: 1, every: Duration::from_millis(250), servers: 2, ..Faults::default() };
    let plan = Drive {
        kind: Kind::Sqlite,
        seed: 21,
        tasks: 160,
        every: Duration::from_millis(20),
        workers: 2,
        lease: Duration::from_millis(3_000),
        faults,
        limited: 8,
        mutant: None,
        bound: Duration::from_secs(120),
    };
    let outcome = drive(&plan, program()).await.expect("the suite itself works").expect("SQLite is always there");
    held(&outcome);
    assert!(outcome.counts["submits over HTTP"] > 20 && outcome.counts["webhook messages"] > 20, "{outcome:?}");
}

async fn readers(kind: Kind) -> Option<Outcome> {
    let _turn = ONE_AT_A_TIME.lock().await;
    let bound = Duration::from_secs(60);
    let plan = Reading { kind, seed: 22, readers: 20, reconnects: 8, silent: 4, faults: 3, bound };
    let outcome = read_all(&plan, program()).await.expect("the suite itself works");
    if outcome.is_none() {
        eprintln!("skipped: needs PostgreSQL's programs; set LONGHAUL_TEST_PG_BIN or use ./dev test");
    }
    outcome
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_who_come_back_read_the_log_and_nothing_else_on_sqlite() {
    let outcome = readers(Kind::Sqlite).await.expect("SQLite is always there");
    held(&outcome);
    assert_eq!(outcome.counts["silent readers cut off"], 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_who_come_back_read_the_log_and_nothing_else_on_postgres() {
    if let Some(outcome) = readers(Kind::Postgres).await {
        held(&outcome);
    }
}
