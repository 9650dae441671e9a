//! PostgreSQL stopped and started under load: everything settles, nothing accepted is lost.

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::Bed;
use longhaul::store::StoreError;
use longhaul::{Error, NewTask, State};
use serde_json::json;

/// A PostgreSQL server of this test's own; stopped with this value.
struct Server {
    bin: PathBuf,
    folder: tempfile::TempDir,
    port: u16,
}

impl Server {
    /// `None`, with one line that says so, where there is no PostgreSQL.
    fn start() -> Option<Self> {
        let Some(bin) = std::env::var_os("LONGHAUL_TEST_PG_BIN").map(PathBuf::from) else {
            eprintln!("skipped: needs PostgreSQL's programs; set LONGHAUL_TEST_PG_BIN or use ./dev test");
            return None;
        };
        let folder = tempfile::tempdir_in("/tmp").expect("a temporary folder");
        let port =
            std::net::TcpListener::bind("127.0.0.1:0").expect("a free port").local_addr().expect("bound").port();
        let server = Self { bin, folder, port };
        if is_root() {
            let owned =
                Command::new("chown").arg("postgres").arg(server.folder.path()).status().expect("chown runs");
            assert!(owned.success(), "the folder is postgres'");
        }
        server.call("initdb", &["-U", "postgres", "-A", "trust", "--no-sync", "-D", "DATA"]);
        server.up();
        Some(server)
    }

    fn up(&self) {
        let options = format!(
            "-p {} -c listen_addresses=127.0.0.1 -c unix_socket_directories={}",
            self.port,
            self.folder.path().display()
        );
        self.call("pg_ctl", &["-D", "DATA", "-l", "LOG", "-s", "-w", "-o", &options, "start"]);
    }

    fn down(&self, mode: &str) {
        self.call("pg_ctl", &["-D", "DATA", "-s", "-w", "-m", mode, "stop"]);
    }

    /// Runs one of PostgreSQL's programs, as the user postgres when this is root.
    fn call(&self, program: &str, words: &[&str]) {
        let place = |name: &str| self.folder.path().join(name).display().to_string();
        let words = words.iter().map(|word| match *word {
            "DATA" => place("data"),
            "LOG" => place("log"),
            word => word.to_owned(),
        });
        let program = self.bin.join(program);
        let mut command = if is_root() {
            let mut command = Command::new("runuser");
            command.args(["-u", "postgres", "--"]).arg(&program);
            command
        } else {
            Command::new(&program)
        };
        let ran = command.args(words).current_dir("/").stdout(std::process::Stdio::null()).status();
        assert!(ran.expect("it runs").success(), "{} failed", program.display());
    }

    fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.folder.path().join("data/postmaster.pid").exists() {
            self.down("immediate");
        }
    }
}

fn is_root() -> bool {
    Path::new("/proc/self").exists()
        && std::fs::read_to_string("/proc/self/status")
            .is_ok_and(|status| status.lines().any(|line| line.starts_with("Uid:\t0\t")))
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_when_postgres_is_stopped_and_started_ten_times_under_load() {
    let Some(server) = Server::start() else { return };
    let bed = Bed::open(server.url(), tempfile::tempdir().expect("a temporary folder")).await;
    let workers = [bed.worker(16, 3.0), bed.worker(16, 3.0)];
    let stop = Arc::new(AtomicBool::new(false));
    let callers: Vec<_> = (0..4)
        .map(|_| {
            let (client, stop) = (bed.client.clone(), Arc::clone(&stop));
            tokio::spawn(async move {
                let (mut accepted, mut refused) = (Vec::new(), 0);
                while !stop.load(Ordering::SeqCst) {
                    let task = NewTask::new("ledger", &json!({"steps": 3, "step_ms": 5}));
                    match client.submit(task).await {
                        Ok(answer) => accepted.push(answer.id),
                        Err(Error::Store(error @ StoreError::Unavailable(_))) => {
                            assert!(error.to_string().contains("try again"), "{error}");
                            refused += 1;
                        }
                        Err(other) => panic!("a submit failed in another way: {other}"),
                    }
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                (accepted, refused)
            })
        })
        .collect();
    for round in 0..10 {
        let effects = bed.ledger().effects();
        bed.until("work between outages", |ledger| ledger.effects() > effects + 20).await;
        server.down(if round % 2 == 0 { "immediate" } else { "fast" });
        // Long enough for callers to be told, and in some rounds for leases to run out.
        tokio::time::sleep(Duration::from_millis(if round % 3 == 0 { 4_000 } else { 300 })).await;
        server.up();
    }
    stop.store(true, Ordering::SeqCst);
    let (mut ids, mut refused) = (Vec::new(), 0);
    for caller in callers {
        let (accepted, told) = caller.await.expect("no panic");
        ids.extend(accepted);
        refused += told;
    }
    assert!(refused > 0, "callers were told to try again");
    for &id in &ids {
        let task = bed.ended(id).await;
        assert_eq!((task.state, task.attempts), (State::Completed, 0), "task {id}: {:?}", task.error);
    }
    let recorded = bed.recorded(&ids).await;
    assert_eq!(recorded.len(), ids.len() * 3, "every step is on record, once");
    bed.ledger().check_no_recorded_step_ran_again(&recorded);
    bed.check_histories(&ids).await;
    drop(workers);
}
