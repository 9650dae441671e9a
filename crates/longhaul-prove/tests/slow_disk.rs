//! The proof in short, of what goes wrong outside of our own processes: disk, network, database server, broker, and migrations
//! broken off half-way. `./dev prove` runs all of it.

use std::path::Path;
use std::time::Duration;

use longhaul_prove::bed::Kind;
use longhaul_prove::drive::{DiskFaults, Drive, Faults, NetworkFaults, Outcome, drive};
use longhaul_prove::migrations::{Plan, migrations};
use tokio::sync::Mutex;

/// Each run has a dozen processes; two at once would only slow each other down.
static ONE_AT_A_TIME: Mutex<()> = Mutex::const_new(());

fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_longhaul-prove"))
}

/// Runs it; `None`, with one line that says so, where the store cannot be had.
async fn holds(kind: Kind, seed: u64, tasks: u64, faults: Faults) -> Option<Outcome> {
    let _turn = ONE_AT_A_TIME.lock().await;
    let plan = Drive {
        kind,
        seed,
        tasks,
        every: Duration::from_millis(25),
        workers: 2,
        lease: Duration::from_millis(2_000),
        faults,
        limited: 8,
        mutant: None,
        bound: Duration::from_secs(120),
    };
    let outcome = drive(&plan, program()).await.expect("the suite itself works");
    all_held(kind, seed, outcome)
}

fn all_held(kind: Kind, seed: u64, outcome: Option<Outcome>) -> Option<Outcome> {
    let Some(outcome) = outcome else {
        eprintln!(
            "skipped: needs PostgreSQL's programs or redis-server; set LONGHAUL_TEST_PG_BIN or use ./dev test"
        );
        return None;
    };
    let first: Vec<String> = outcome.violations.iter().take(10).map(ToString::to_string).collect();
    assert!(first.is_empty(), "seed {seed} on {kind}:\n{}", first.join("\n"));
    assert_eq!(outcome.not_fired, [] as [String; 0], "every fault that was planned fired");
    eprintln!("{kind}, seed {seed}: {:?} in {:.0} s", outcome.counts, outcome.seconds);
    Some(outcome)
}

const EVERY: Duration = Duration::from_millis(700);

#[tokio::test(flavor = "multi_thread")]
async fn what_was_acknowledged_is_there_after_power_losses() {
    let disk = DiskFaults { power_losses: 6, ..DiskFaults::default() };
    let faults = Faults { every: EVERY, disk, ..Faults::default() };
    let outcome = holds(Kind::Sqlite, 21, 200, faults).await.expect("SQLite is always there");
    assert_eq!(outcome.counts["power losses"], 6);
    assert!(outcome.counts["unsynced writes dropped"] > 0, "{:?}", outcome.counts);
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_holds_on_a_disk_that_is_full_and_cannot_sync_and_loses_power() {
    let disk = DiskFaults { power_losses: 2, disk_full: 3, failed_syncs: 4 };
    let faults = Faults { every: EVERY, disk, ..Faults::default() };
    let outcome = holds(Kind::Sqlite, 22, 200, faults).await.expect("SQLite is always there");
    assert_eq!((outcome.counts["full disks"], outcome.counts["times of failing fsyncs"]), (3, 4));
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_holds_on_a_network_that_cuts_holds_back_loses_answers_and_has_no_connections_left() {
    let network = NetworkFaults {
        cuts: 15,
        holds: 3,
        lost_answers: 15,
        exhausted: 1,
        locked: 1,
        ..NetworkFaults::default()
    };
    let faults = Faults { every: Duration::from_millis(150), network, ..Faults::default() };
    if let Some(outcome) = holds(Kind::Postgres, 23, 150, faults).await {
        assert_eq!((outcome.counts["connections cut"], outcome.counts["answers of commits lost"]), (15, 15));
        assert_eq!(outcome.counts["times the tasks were locked"], 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_start_in_time_when_listen_is_lost_and_an_old_transaction_stays_open() {
    let network = NetworkFaults { deaf: 15, old_transaction: true, ..NetworkFaults::default() };
    let faults = Faults { every: Duration::from_millis(200), network, ..Faults::default() };
    if let Some(outcome) = holds(Kind::Postgres, 24, 120, faults).await {
        assert!(outcome.counts["listening connections ended"] > 15, "{:?}", outcome.counts);
        assert!(outcome.counts["tasks that ended beside an old transaction"] > 0, "{:?}", outcome.counts);
        assert!(outcome.counts["events held back by it"] > 0, "{:?}", outcome.counts);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_settles_when_the_servers_disk_has_room_again() {
    let network = NetworkFaults { server_full: 2, ..NetworkFaults::default() };
    let faults = Faults { every: EVERY, network, ..Faults::default() };
    if let Some(outcome) = holds(Kind::Postgres, 25, 100, faults).await {
        assert!(outcome.counts["answers that there is no space"] > 0, "{:?}", outcome.counts);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_event_arrives_at_a_broker_that_is_killed() {
    let faults = Faults { kills: 2, every: EVERY, broker: 3, ..Faults::default() };
    if let Some(outcome) = holds(Kind::Sqlite, 26, 100, faults).await {
        assert_eq!(outcome.counts["events published"], outcome.counts["events"]);
    }
}

async fn migrates(kind: Kind, points: u64) {
    let _turn = ONE_AT_A_TIME.lock().await;
    let plan = Plan { kind, seed: 27, points, races: 2 };
    let outcome = migrations(&plan, program()).await.expect("the suite itself works");
    all_held(kind, plan.seed, outcome);
}

#[tokio::test(flavor = "multi_thread")]
async fn migrations_that_are_killed_and_raced_work_on_sqlite() {
    migrates(Kind::Sqlite, 12).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn migrations_that_are_cut_off_and_raced_work_on_postgres() {
    migrates(Kind::Postgres, 8).await;
}
