//! The proof in short: every kind of fault that the suite knows, on both stores, with few tasks; and two of the mutants, so that
//! it is seen that something can be found. `./dev prove` runs all of it.

use std::path::Path;
use std::time::Duration;

use longhaul::faults::Mutant;
use longhaul_prove::bed::Kind;
use longhaul_prove::drive::{Drive, Faults, Outcome, drive};
use longhaul_prove::mutants::{breaks, run_of};
use longhaul_prove::report::tally;
use tokio::sync::Mutex;

/// Each run has a dozen processes; two at once would only slow each other down.
static ONE_AT_A_TIME: Mutex<()> = Mutex::const_new(());

/// Runs it; `None`, with one line that says so, where the store cannot be had.
async fn ran(plan: &Drive) -> Option<Outcome> {
    let _turn = ONE_AT_A_TIME.lock().await;
    let program = Path::new(env!("CARGO_BIN_EXE_longhaul-prove"));
    let outcome = drive(plan, program).await.expect("the suite itself works");
    if outcome.is_none() {
        eprintln!("skipped: needs PostgreSQL's programs; set LONGHAUL_TEST_PG_BIN or use ./dev test");
    }
    outcome
}

async fn holds(kind: Kind, seed: u64, tasks: u64, faults: Faults) -> Option<Outcome> {
    let plan = Drive {
        kind,
        seed,
        tasks,
        every: Duration::from_millis(15),
        workers: 3,
        lease: Duration::from_millis(3_000),
        faults,
        limited: 8,
        mutant: None,
        bound: Duration::from_secs(240),
    };
    let outcome = ran(&plan).await?;
    let first: Vec<String> = outcome.violations.iter().take(10).map(ToString::to_string).collect();
    assert!(first.is_empty(), "seed {seed} on {kind}:\n{}", first.join("\n"));
    assert_eq!(outcome.not_fired, [] as [String; 0], "every fault that was planned fired");
    Some(outcome)
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_holds_while_processes_are_killed_and_frozen_on_sqlite() {
    let every = Duration::from_millis(200);
    let faults = Faults { kills: 20, freezes: 3, every, ..Faults::default() };
    let outcome = holds(Kind::Sqlite, 11, 200, faults).await.expect("SQLite is always there");
    assert_eq!((outcome.counts["kills"], outcome.counts["freezes"]), (20, 3));
    assert!(outcome.counts["tasks"] >= 200 && outcome.counts["streams read"] > 0, "{:?}", outcome.counts);
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_holds_while_processes_and_the_server_come_and_go_on_postgres() {
    let every = Duration::from_millis(400);
    let faults = Faults { kills: 8, freezes: 2, restarts: 2, every, clocks: true, ..Faults::default() };
    if let Some(outcome) = holds(Kind::Postgres, 12, 120, faults).await {
        assert_eq!((outcome.counts["kills"], outcome.counts["server restarts"]), (8, 2));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_holds_at_every_failpoint_on_sqlite() {
    let faults = Faults { points: true, ..Faults::default() };
    let outcome = holds(Kind::Sqlite, 13, 150, faults).await.expect("SQLite is always there");
    assert!(outcome.counts["failpoints fired"] >= 87, "{:?}", outcome.counts);
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_holds_at_every_failpoint_on_postgres() {
    let faults = Faults { points: true, ..Faults::default() };
    holds(Kind::Postgres, 14, 150, faults).await;
}

async fn is_found(mutant: Mutant) {
    let plan = Drive { tasks: 80, bound: Duration::from_secs(30), ..run_of(mutant, 15) };
    let outcome = ran(&plan).await.expect("SQLite is always there");
    let found = tally(&outcome);
    let by = breaks(mutant);
    assert!(found.iter().any(|(invariant, _)| *invariant == by), "{mutant:?} breaks I{by}; found were {found:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_undo_in_the_wrong_order_is_found() {
    is_found(Mutant::UndoForward).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_approval_of_something_else_is_found() {
    is_found(Mutant::ApprovalUnbound).await;
}
