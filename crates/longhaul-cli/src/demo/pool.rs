//! The processes of the demo: a server and a pool of workers, each a real `longhaul` of its own, on one store.
//!
//! Each has a pipe from this process as its stdin and ends when that closes (`--until-eof`), so none outlives the demo,
//! however that ends. Each is a process group of its own: Ctrl-C reaches only this process, which ends them in order.
//! One that is stopped (SIGSTOP) and loses its parent is ended by the system, as a member of an orphaned group.

use std::fs::File;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::task::JoinHandle;

use super::world::World;
use crate::exit::Failure;

/// How long a server may take until it listens.
const START: Duration = Duration::from_secs(60);
/// How long a process that was told to end may take.
const END: Duration = Duration::from_secs(5);

/// One process.
pub(super) struct Process {
    pub(super) name: String,
    pub(super) pid: u32,
    child: Child,
    /// Closed to end the process.
    lifeline: Option<ChildStdin>,
    paused: bool,
    /// Takes a copy of what a server says on stderr.
    listening: Option<JoinHandle<()>>,
}

/// See the module.
pub(super) struct Pool {
    server: Process,
    /// `http://127.0.0.1:PORT`
    pub(super) url: String,
    pub(super) workers: Vec<Process>,
}

impl Pool {
    /// Starts a server and `workers` workers, whose model is at `model`.
    pub(super) async fn start(world: &World, workers: usize, model: &str) -> Result<Self, Failure> {
        let (server, url) = start_server(world).await?;
        let mut pool = Self { server, url, workers: Vec::new() };
        for number in 1..=workers {
            let name = format!("worker-{number}");
            let log = File::create(world.log(&name)).map_err(|error| not_started(&name, &error))?;
            let mut command = longhaul(world, &["worker", "--until-eof"])?;
            command.env("OPENAI_BASE_URL", model).stderr(log);
            pool.workers.push(Process::start(&name, command)?);
        }
        Ok(pool)
    }

    /// The worker with this process id.
    pub(super) fn worker(&mut self, pid: u32) -> Option<&mut Process> {
        self.workers.iter_mut().find(|worker| worker.pid == pid)
    }

    /// Says which process has ended by itself, and how, if any has: none should.
    pub(super) fn ended(&mut self) -> Option<(String, ExitStatus)> {
        let ended = |process: &mut Process| {
            let status = process.child.try_wait().ok().flatten()?;
            (!process.killed()).then(|| (process.name.clone(), status))
        };
        std::iter::once(&mut self.server).chain(&mut self.workers).find_map(ended)
    }

    /// Ends the workers, lets them hand back what they run, and then the server.
    pub(super) async fn end(mut self) {
        self.end_workers().await;
        self.server.tell_to_end();
        self.server.gone().await;
        if let Some(listening) = self.server.listening.take() {
            listening.abort();
        }
    }

    /// Ends the workers and leaves the server.
    pub(super) async fn end_workers(&mut self) {
        for worker in &mut self.workers {
            worker.tell_to_end();
        }
        for worker in &mut self.workers {
            worker.gone().await;
        }
    }
}

impl Process {
    fn start(name: &str, mut command: Command) -> Result<Self, Failure> {
        command.stdin(Stdio::piped()).stdout(Stdio::null()).process_group(0).kill_on_drop(true);
        let mut child = command.spawn().map_err(|error| not_started(name, &error))?;
        let (lifeline, pid) = (child.stdin.take(), child.id().unwrap_or(0));
        Ok(Self { name: name.to_owned(), pid, child, lifeline, paused: false, listening: None })
    }

    /// kill -9, and waits until it is gone.
    pub(super) async fn kill(&mut self) -> Result<(), Failure> {
        self.lifeline = None;
        self.child.kill().await.map_err(|error| Failure::internal(format!("cannot kill {}: {error}", self.name)))
    }

    /// Whether it was told to end, in one way or another.
    fn killed(&self) -> bool {
        self.lifeline.is_none()
    }

    /// kill -STOP: it does nothing more, and does not know it.
    pub(super) fn pause(&mut self) -> Result<(), Failure> {
        self.signal(Signal::STOP)?;
        self.paused = true;
        Ok(())
    }

    /// kill -CONT
    pub(super) fn go_on(&mut self) -> Result<(), Failure> {
        self.signal(Signal::CONT)?;
        self.paused = false;
        Ok(())
    }

    fn signal(&self, signal: Signal) -> Result<(), Failure> {
        let failed = |why: String| Failure::internal(format!("cannot send a signal to {}: {why}", self.name));
        // As long as it was not waited for, its number is nobody else's.
        let pid = self.child.id().and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
        let pid = pid.ok_or_else(|| failed("it is gone".to_owned()))?;
        kill_process(pid, signal).map_err(|error| failed(error.to_string()))
    }

    fn tell_to_end(&mut self) {
        self.lifeline = None;
        if self.paused {
            // It may be gone; then there is nothing to wake.
            let _ = self.go_on();
        }
    }

    async fn gone(&mut self) {
        if tokio::time::timeout(END, self.child.wait()).await.is_err() {
            // It is waited for: nothing of it is left.
            let _ = self.child.kill().await;
        }
    }
}

/// What the demo's processes have of the surroundings. The last is for tests of the demo itself: only an engine with the
/// feature `faults` knows it.
const SURROUNDINGS: [&str; 5] = ["PATH", "LANG", "TZ", "TMPDIR", "LONGHAUL_MUTANT"];

/// A `longhaul` with nothing else of the surroundings: what is configured on this machine, keys included, is none of the
/// demo's.
fn longhaul(world: &World, args: &[&str]) -> Result<Command, Failure> {
    let program = std::env::current_exe().map_err(|error| Failure::internal(error.to_string()))?;
    let mut command = Command::new(program);
    command.args(args).current_dir(world.folder()).env_clear();
    for name in SURROUNDINGS {
        if let Some(value) = std::env::var_os(name) {
            command.env(name, value);
        }
    }
    command.env("HOME", world.folder()).env("LONGHAUL_CONFIG", world.config());
    Ok(command)
}

async fn start_server(world: &World) -> Result<(Process, String), Failure> {
    let name = "server";
    let mut command = longhaul(world, &["serve", "--listen", "127.0.0.1:0", "--until-eof"])?;
    command.stderr(Stdio::piped());
    let mut server = Process::start(name, command)?;
    let mut log = tokio::fs::File::create(world.log(name)).await.map_err(|error| not_started(name, &error))?;
    let Some(stderr) = server.child.stderr.take() else {
        return Err(Failure::internal("the server has no stderr"));
    };
    let mut lines = BufReader::new(stderr).lines();
    let mut said = String::new();
    let listening = async {
        while let Ok(Some(line)) = lines.next_line().await {
            if let Some(url) = line.strip_prefix("listening on ") {
                return Some(url.to_owned());
            }
            said.push_str(&line);
        }
        None
    };
    let url = tokio::time::timeout(START, listening).await.ok().flatten();
    let url = url.ok_or_else(|| Failure::internal(format!("the server did not start: {said}")))?;
    // A pipe that nobody reads would fill up in the end.
    server.listening = Some(tokio::spawn(async move {
        while let Ok(Some(line)) = lines.next_line().await {
            // A log that cannot be written is missed by nobody.
            let _ = log.write_all(format!("{line}\n").as_bytes()).await;
        }
    }));
    Ok((server, url))
}

fn not_started(name: &str, error: &std::io::Error) -> Failure {
    Failure::internal(format!("cannot start the {name} of the demo: {error}"))
}
