//! What the steps of the demo run: the DNS service, the certificate authority, the cluster and the load balancer of the
//! sandbox. Each call really changes a file, and is witnessed in the ledger.
//!
//! It runs in the folder of the manifests, as commands of manifests do, and knows nothing of the store.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::{getpid, getppid};

use super::ledger::{self, Line, Mark, What, append, now};
use super::world::{BROKEN, PLACES, RESTARTS, Thing};
use crate::args::DemoEffectArgs;

/// Does it; what is wrong is for stderr, and the exit code is 1 then.
pub(crate) fn run(args: &DemoEffectArgs) -> Result<(), String> {
    let variable = |name: &str| {
        std::env::var(name).map_err(|_| format!("{name} is not set: this is for the steps of 'longhaul demo'"))
    };
    // The engine's input is not needed; one who writes it must not meet a closed pipe.
    let _ = io::stdin().take(1 << 20).read_to_end(&mut Vec::new());
    if args.app.is_empty() || !args.app.chars().all(|c| c.is_ascii_alphanumeric() || c == '-') {
        return Err(format!("'{}' is no app: letters, digits and - only", args.app.escape_debug()));
    }
    let step = variable("LONGHAUL_STEP")?;
    let fence = variable("LONGHAUL_FENCE")?;
    let effect = Effect {
        args,
        sandbox: PathBuf::from("../sandbox"),
        line: Line {
            task: variable("LONGHAUL_TASK_ID")?,
            step: step.strip_prefix("undo ").unwrap_or(&step).to_owned(),
            key: variable("LONGHAUL_IDEMPOTENCY_KEY")?,
            fence: fence.parse().map_err(|_| format!("LONGHAUL_FENCE is '{fence}', which is no number"))?,
            worker: id(getppid()),
            process: id(Some(getpid())),
            what: args.what,
            mark: Mark::Begin,
            at: 0,
        },
    };
    let path = Path::new("..").join(ledger::FILE);
    let mut ledger = File::options()
        .append(true)
        .open(&path)
        .map_err(|error| format!("cannot open the ledger {}: {error}", path.display()))?;
    let mut witness = |mark| {
        let line = Line { mark, at: now(), ..effect.line.clone() };
        append(&mut ledger, &line).map_err(|error| format!("cannot write to the ledger: {error}"))
    };
    witness(Mark::Begin)?;
    match effect.perform() {
        Ok(said) => {
            witness(Mark::Done)?;
            println!("{said}");
            Ok(())
        }
        Err(why) => {
            witness(Mark::Failed)?;
            Err(why)
        }
    }
}

fn id(pid: Option<rustix::process::Pid>) -> u32 {
    pid.map_or(0, |pid| pid.as_raw_pid().unsigned_abs())
}

struct Effect<'a> {
    args: &'a DemoEffectArgs,
    sandbox: PathBuf,
    line: Line,
}

impl Effect<'_> {
    fn perform(&self) -> Result<String, String> {
        // Half of the work before the change and half after it, so that a kill can fall on either side.
        let work = || std::thread::sleep(Duration::from_millis(self.args.work_ms) / 2);
        work();
        let said = match self.args.what {
            What::Do => self.make(&self.args.place),
            What::Undo => self.take_back(),
            What::Call if self.args.place == "restart" => self.make(RESTARTS),
            What::Call => return self.look(),
        };
        let said = said.map_err(|error| error.to_string())?;
        work();
        Ok(said)
    }

    fn file(&self, place: &str) -> PathBuf {
        self.sandbox.join(place).join(&self.args.app)
    }

    /// Makes a thing, all of it or nothing. The same call again makes the same thing.
    fn make(&self, place: &str) -> io::Result<String> {
        let DemoEffectArgs { app, release: version, .. } = self.args;
        let task = &self.line.task;
        if place == "live" && !read(&self.file("container"))?.is_some_and(|container| container.healthy) {
            return Err(io::Error::other(format!("{app} {version} does not pass its health check")));
        }
        let healthy = version != BROKEN;
        let thing = Thing { app: app.clone(), version: version.clone(), task: task.clone(), healthy };
        if let Some(other) = read(&self.file(place))?.filter(|there| there.task != *task) {
            return Err(io::Error::other(format!("{place}/{app} is there already, made by task {}", other.task)));
        }
        let unnamed = self.sandbox.join(place).join(format!(".{app}.{}", self.line.process));
        fs::write(&unnamed, serde_json::to_vec(&thing)?)?;
        fs::rename(&unnamed, self.file(place))?;
        Ok(format!("{place}/{app} {version}"))
    }

    /// Takes the thing away; one that is gone already is gone.
    fn take_back(&self) -> io::Result<String> {
        match fs::remove_file(self.file(&self.args.place)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(format!("{}/{} removed", self.args.place, self.args.app)),
        }
    }

    fn look(&self) -> Result<String, String> {
        let there = |place: &&str| matches!(read(&self.file(place)), Ok(Some(_)));
        let found: Vec<&str> = PLACES.iter().map(|(_, place)| *place).filter(there).collect();
        Ok(format!(
            "{} has {}",
            self.args.app,
            if found.is_empty() { "nothing yet".to_owned() } else { found.join(", ") }
        ))
    }
}

fn read(path: &Path) -> io::Result<Option<Thing>> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes)?)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}
