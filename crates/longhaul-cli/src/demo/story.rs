//! The Friday evening: 200 deployments at once, a hotfix that must not wait, a worker that is killed, another that falls
//! asleep and wakes up too late.
//!
//! Nothing happens by the clock: each turn waits for what the ledger or the events show.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use reqwest::Method;
use reqwest::header::HeaderName;
use serde_json::{Value, json};

use super::board::Watched;
use super::judge::{Accepted, Evidence, Judgement, Killed, Kind, Overtaking, Paused, judge};
use super::ledger::{self, Line, Mark, Reader, What};
use super::model::ScriptedModel;
use super::people::Person;
use super::plan::{AGAIN_EVERY, DEPLOYS, Plan, Submit};
use super::pool::Pool;
use super::view::{Doing, Picture, Tone, View, WorkerPicture};
use super::world::World;
use crate::commands::list;
use crate::exit::Failure;
use crate::http::{Path, Server};
use crate::out;

/// Between two looks at the ledger.
const LOOK: Duration = Duration::from_millis(30);
/// A demo in which nothing happens for so long does not go on.
const STANDSTILL: Duration = Duration::from_secs(30);
/// Nor does one in which all tasks have ended.
const ALL_OVER: Duration = Duration::from_secs(3);
/// A worker is worth killing when it is in the middle of so many steps.
const WORTH: usize = 2;
/// How long a worker is looked for that runs an agent too.
const CHOOSY: Duration = Duration::from_secs(3);
/// A worker that is stopped inside a transaction holds the lock of the SQLite file, and nobody could take over. Others
/// write at least this often, otherwise.
const OTHERS_WRITE: Duration = Duration::from_millis(1_200);

/// See the module.
pub(super) struct Story<'a> {
    plan: Plan,
    world: &'a World,
    pool: &'a mut Pool,
    model: &'a ScriptedModel,
    view: &'a mut View,
    server: Server,
    board: Watched,
    ledger: Reader,
    person: Person,
    accepted: Vec<Accepted>,
    submitted: usize,
    again: (usize, usize),
    overtaking: Option<Overtaking>,
    killed: Option<Killed>,
    paused: Option<Paused>,
    /// The worker that is stopped now.
    stopped: Option<u32>,
    /// Process ids by the ids that workers have in the store.
    processes: BTreeMap<String, u32>,
    /// The app of each task.
    apps: BTreeMap<String, String>,
    /// When something was last seen to happen, and how much had.
    moved: (Instant, usize),
    /// What did not happen although it should have.
    missed: Vec<String>,
    /// The rollbacks that were told.
    rollbacks: BTreeSet<String>,
}

impl<'a> Story<'a> {
    pub(super) fn new(
        plan: Plan,
        ask: bool,
        world: &'a World,
        pool: &'a mut Pool,
        model: &'a ScriptedModel,
        view: &'a mut View,
    ) -> Result<Self, Failure> {
        let server = Server::with_token(&pool.url, None)?;
        Ok(Self {
            board: Watched::start(&server),
            ledger: Reader::open(&world.ledger()).map_err(|error| unreadable(&error))?,
            person: Person::new(&server, ask, plan.approve_after),
            plan,
            world,
            pool,
            model,
            view,
            server,
            accepted: Vec::new(),
            submitted: 0,
            again: (0, 0),
            overtaking: None,
            killed: None,
            paused: None,
            stopped: None,
            processes: BTreeMap::new(),
            apps: BTreeMap::new(),
            moved: (Instant::now(), 0),
            missed: Vec::new(),
            rollbacks: BTreeSet::new(),
        })
    }

    /// Lets it happen.
    pub(super) async fn happen(&mut self) -> Result<(), Failure> {
        self.meet_workers().await?;
        self.submit_all().await?;
        let after = self.plan.hotfix_after;
        self.until("enough deployments begin", |story| story.begun().len() >= after).await?;
        self.submit_hotfix().await?;
        self.kill_a_worker().await?;
        self.stop_a_worker().await?;
        self.until("all tasks end", |story| story.all_ended()).await?;
        self.view.draw(&self.picture());
        Ok(())
    }

    /// Judges what happened; the workers are to have ended, or have nothing left to do.
    pub(super) fn judged(&mut self) -> Result<Judgement, Failure> {
        self.ledger.read().map_err(|error| unreadable(&error))?;
        let sandbox = self.world.read_sandbox().map_err(|error| unreadable(&error))?;
        let board = self.board.now();
        let mut judgement = judge(&Evidence {
            submitted: self.submitted,
            accepted: &self.accepted,
            again: self.again,
            ledger: self.ledger.lines(),
            sandbox: &sandbox,
            told: &board.told,
            ended: &board.ended,
            calls: &self.model.calls(),
            killed: self.killed,
            paused: self.paused,
            decided: self.person.decided.clone(),
            overtaking: self.overtaking,
        });
        judgement.faults.append(&mut self.missed);
        Ok(judgement)
    }

    /// Ends the workers, so that nothing can happen any more.
    pub(super) async fn end_workers(&mut self) {
        self.pool.end_workers().await;
    }

    // ------------------------------------------------------------------ waiting

    /// Waits until something holds. What does not come to hold is kept as a fault, and the story goes on.
    async fn until(&mut self, what: &str, mut holds: impl FnMut(&mut Self) -> bool) -> Result<bool, Failure> {
        self.moved.0 = Instant::now();
        loop {
            self.look().await?;
            if holds(self) {
                return Ok(true);
            }
            let patience = if self.all_ended() { ALL_OVER } else { STANDSTILL };
            if self.moved.0.elapsed() > patience && !self.person.is_waited_for() {
                let seconds = patience.as_secs();
                self.missed.push(format!("nothing happened for {seconds} s while this was waited for: {what}"));
                return Ok(false);
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// A process that has ended although nobody wanted it to.
    fn gone(&mut self) -> Option<Failure> {
        let (name, status) = self.pool.ended()?;
        let log = std::fs::read_to_string(self.world.log(&name)).unwrap_or_default();
        let last = out::short(log.lines().last().unwrap_or("nothing"), 500);
        Some(Failure::internal(format!("the {name} of the demo ended ({status}); its last words: {last}")))
    }

    fn all_ended(&self) -> bool {
        let board = self.board.now();
        self.accepted.iter().all(|task| board.ended.contains_key(&task.id))
    }

    /// Looks at everything once: the ledger, the processes, the people, and shows it.
    async fn look(&mut self) -> Result<(), Failure> {
        self.ledger.read().map_err(|error| unreadable(&error))?;
        let happened = self.ledger.lines().len() + self.board.now().events;
        if happened != self.moved.1 {
            self.moved = (Instant::now(), happened);
        }
        if let Some(gone) = self.gone() {
            return Err(gone);
        }
        self.tell_rollbacks();
        self.person.look(self.ledger.lines().len(), self.view).await?;
        let picture = self.picture();
        self.view.draw(&picture);
        Ok(())
    }

    /// Says what became of deployments that failed, as the ledger has it.
    fn tell_rollbacks(&mut self) {
        let failed: Vec<(String, String)> = {
            let board = self.board.now();
            let failed = |task: &&Accepted| board.ended.get(&task.id).is_some_and(|ended| ended.state == "failed");
            let new = self.accepted.iter().filter(failed).filter(|task| !self.rollbacks.contains(&task.id));
            new.map(|task| (task.id.clone(), task.app.clone())).collect()
        };
        for (id, app) in failed {
            let undone = self
                .ledger
                .lines()
                .iter()
                .filter(|line| line.task == id && line.what == What::Undo && line.mark == Mark::Done);
            let undone: Vec<&str> = undone.map(|line| line.step.as_str()).collect();
            self.view.say(
                Tone::Plain,
                format!("{app} failed at its last step and was rolled back: {}", undone.join(", ")),
            );
            self.rollbacks.insert(id);
        }
    }

    fn picture(&self) -> Picture {
        let board = self.board.now();
        let ended =
            |task: &&Accepted| !matches!(task.kind, Kind::Agent { .. }) && board.ended.contains_key(&task.id);
        let open = self.open_by_worker();
        let ids: BTreeMap<u32, &str> = self.processes.iter().map(|(id, pid)| (*pid, id.as_str())).collect();
        let workers = self.pool.workers.iter().map(|worker| {
            let doing = match () {
                () if self.killed.is_some_and(|killed| killed.worker == worker.pid) => Doing::Killed,
                () if self.stopped == Some(worker.pid) => Doing::Paused,
                () => {
                    let steps = open.get(&worker.pid).into_iter().flatten();
                    let steps = steps.filter(|line| line.what != What::Call).map(|line| self.doing(line));
                    let held = ids.get(&worker.pid).map(|id| board.held_by(id));
                    let thinks = |(id, message): (&str, &str)| {
                        let agent = |task: &&Accepted| task.id == id && matches!(task.kind, Kind::Agent { .. });
                        let agent = self.accepted.iter().find(agent)?;
                        // What a tool is called with is of no interest here.
                        let does = message.split('{').next().unwrap_or_default().trim().to_lowercase();
                        Some(format!("{} oncall: {does}", agent.app))
                    };
                    Doing::Working(steps.chain(held.into_iter().flatten().filter_map(thinks)).collect())
                }
            };
            WorkerPicture { name: worker.name.clone(), process: worker.pid, doing }
        });
        Picture {
            done: self.accepted.iter().filter(ended).count(),
            total: self.accepted.iter().filter(|task| !matches!(task.kind, Kind::Agent { .. })).count(),
            counts: board.counts(),
            workers: workers.collect(),
        }
    }

    fn doing(&self, line: &Line) -> String {
        let app = self.apps.get(&line.task).map_or("?", String::as_str);
        match line.what {
            What::Undo => format!("{app} undo {}", line.step),
            _ => format!("{app} {}", line.step),
        }
    }

    fn name_of(&self, pid: u32) -> String {
        let worker = self.pool.workers.iter().find(|worker| worker.pid == pid);
        worker.map_or_else(|| format!("process {pid}"), |worker| format!("{} (process {pid})", worker.name))
    }

    // ------------------------------------------------------------------ what the ledger shows

    /// The deployments that have begun.
    fn begun(&self) -> BTreeSet<&str> {
        let deploys: BTreeSet<&str> = self
            .accepted
            .iter()
            .filter(|task| matches!(task.kind, Kind::Deploy { .. }))
            .map(|task| task.id.as_str())
            .collect();
        self.ledger.lines().iter().map(|line| line.task.as_str()).filter(|task| deploys.contains(task)).collect()
    }

    /// The steps under way, by worker: begun, and nothing later is known of their task.
    fn open_by_worker(&self) -> BTreeMap<u32, Vec<&Line>> {
        let mut newest: BTreeMap<&str, &Line> = BTreeMap::new();
        for line in self.ledger.lines() {
            newest.insert(&line.task, line);
        }
        let mut open: BTreeMap<u32, Vec<&Line>> = BTreeMap::new();
        for line in newest.into_values().filter(|line| line.mark == Mark::Begin) {
            open.entry(line.worker).or_default().push(line);
        }
        open
    }

    /// The worker that is in the middle of the most steps, all of which have a good part of their work before them. An
    /// agent should run there too, unless that is too much to ask.
    fn victim(&self, choosy: bool) -> Option<(u32, Vec<Line>)> {
        let fresh = ledger::now() - i64::try_from(self.plan.work_ms).unwrap_or(0) * 1_000 / 2;
        let board = self.board.now();
        let has_agent = |pid: u32| {
            let id = self.processes.iter().find(|(_, process)| **process == pid).map(|(id, _)| id.as_str());
            let agents: BTreeSet<&str> = self
                .accepted
                .iter()
                .filter(|task| matches!(task.kind, Kind::Agent { .. }))
                .map(|task| task.id.as_str())
                .collect();
            id.is_some_and(|id| board.held_by(id).any(|(task, _)| agents.contains(task)))
        };
        let gone = self.killed.map(|killed| killed.worker);
        let candidates = self.open_by_worker().into_iter().filter(|(pid, open)| {
            let steps = open.iter().filter(|line| line.what != What::Call);
            Some(*pid) != gone
                && steps.clone().all(|line| line.at > fresh)
                && steps.count() >= WORTH
                && (!choosy || has_agent(*pid))
        });
        let best = candidates.max_by_key(|(_, open)| open.len());
        best.map(|(pid, open)| (pid, open.into_iter().cloned().collect()))
    }

    /// Waits for a worker that is in the middle of something; for so long for one that runs an agent too.
    async fn find_victim(&mut self, after: usize, choosy: Duration) -> Result<Option<(u32, Vec<Line>)>, Failure> {
        let mut since = None;
        let mut found = None;
        self.until("a worker is in the middle of several steps", |story| {
            if story.begun().len() < after {
                return false;
            }
            let since: &Instant = since.get_or_insert_with(Instant::now);
            found = story.victim(since.elapsed() < choosy);
            found.is_some()
        })
        .await?;
        Ok(found)
    }

    // ------------------------------------------------------------------ what happens

    /// Waits until every worker is on the list, and notes which process each is.
    async fn meet_workers(&mut self) -> Result<(), Failure> {
        let begun = Instant::now();
        loop {
            let answer = self.server.get(&Path::new(&["v1", "workers"])).await?.json()?;
            for worker in list(&answer, "workers")? {
                let name = worker["name"].as_str().unwrap_or_default();
                let pid = name.rsplit_once(':').and_then(|(_, pid)| pid.parse().ok());
                if let (Some(id), Some(pid)) = (worker["id"].as_str(), pid) {
                    self.processes.insert(id.to_owned(), pid);
                }
            }
            if self.processes.len() >= self.plan.workers {
                return Ok(());
            }
            if let Some(gone) = self.gone() {
                return Err(gone);
            }
            if begun.elapsed() > STANDSTILL {
                return Err(Failure::internal("the workers of the demo do not start"));
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    async fn submit_all(&mut self) -> Result<(), Failure> {
        let line = self.plan.line();
        for task in submit_batch(&self.server, &line).await? {
            self.accept(task);
        }
        let agents = self.accepted.len() - DEPLOYS;
        self.view.say(Tone::Plain, format!("Friday evening: {DEPLOYS} deployments and {agents} agent runs are submitted; each is on disk and has its id"));
        let known: BTreeSet<String> = self.accepted.iter().map(|task| task.id.clone()).collect();
        let mut again = Vec::new();
        for impatient in line.into_iter().step_by(AGAIN_EVERY) {
            again.push(submit(&self.server, impatient).await?);
        }
        let new = again.iter().filter(|task| !known.contains(&task.id)).count();
        self.again = (again.len(), new);
        self.view.say(
            Tone::Plain,
            format!("{} impatient users sent the same again, with the same key: {new} new tasks", again.len()),
        );
        Ok(())
    }

    fn accept(&mut self, task: Accepted) {
        self.submitted += 1;
        self.apps.insert(task.id.clone(), task.app.clone());
        self.accepted.push(task);
    }

    async fn submit_hotfix(&mut self) -> Result<(), Failure> {
        let hotfix = submit(&self.server, self.plan.hotfix()).await?;
        let id = hotfix.id.clone();
        self.accept(hotfix);
        self.ledger.read().map_err(|error| unreadable(&error))?;
        let begun = self.begun().len();
        // What workers hold has a place before it; twice that, because a process takes a moment to begin.
        self.overtaking = Some(Overtaking { begun, room: 2 * self.plan.workers * self.plan.slots });
        self.view.say(
            Tone::Loud,
            format!("a hotfix is submitted with priority 9, behind {} deployments that wait", DEPLOYS - begun),
        );
        let first = |story: &mut Self| story.ledger.lines().iter().any(|line| line.task == id);
        if self.until("the hotfix begins", first).await? {
            let before = self.begun().len();
            self.view.say(
                Tone::Good,
                format!(
                    "the hotfix runs: it began when {before} of {DEPLOYS} had, and passed the other {}",
                    DEPLOYS - before
                ),
            );
        }
        Ok(())
    }

    async fn kill_a_worker(&mut self) -> Result<(), Failure> {
        let Some((pid, open)) = self.find_victim(self.plan.kill_after, CHOOSY).await? else { return Ok(()) };
        let at = ledger::now();
        if let Some(worker) = self.pool.worker(pid) {
            worker.kill().await?;
        }
        let lines = self.ledger.read().map_err(|error| unreadable(&error))?.len();
        self.killed = Some(Killed { worker: pid, at, lines });
        let doing: Vec<String> = open.iter().map(|line| self.doing(line)).collect();
        self.view.say(
            Tone::Bad,
            format!("KILLED {} with SIGKILL, in the middle of {}", self.name_of(pid), doing.join(", ")),
        );
        let mut left: BTreeSet<String> =
            open.iter().filter(|line| line.what != What::Call).map(|line| line.task.clone()).collect();
        self.until("the tasks of the killed worker are resumed", |story| {
            let taken: Vec<Line> = story.ledger.lines()[lines..]
                .iter()
                .filter(|line| line.worker != pid && line.mark == Mark::Begin)
                .cloned()
                .collect();
            for line in taken {
                if left.remove(&line.task) {
                    let seconds = (line.at - at) as f64 / 1e6;
                    let (who, what) = (story.name_of(line.worker), story.doing(&line));
                    story.view.say(Tone::Good, format!("{what} goes on in {who}, {seconds:.1} s after the kill"));
                }
            }
            left.is_empty()
        })
        .await?;
        Ok(())
    }

    /// A worker is stopped for longer than its leases, and continued when others have its tasks: what it then wants to
    /// write must be refused.
    async fn stop_a_worker(&mut self) -> Result<(), Failure> {
        let Some((pid, held)) = self.stopped_worker().await? else { return Ok(()) };
        let doing: Vec<String> = held.iter().map(|line| self.doing(line)).collect();
        self.view.say(
            Tone::Bad,
            format!("STOPPED {} with SIGSTOP, in the middle of {}", self.name_of(pid), doing.join(", ")),
        );
        self.until("another worker takes over from the one that is stopped", |story| {
            let mut begun = story.ledger.lines().iter().filter(|line| line.mark == Mark::Begin);
            begun.any(|line| held.iter().any(|old| old.task == line.task && line.fence > old.fence))
        })
        .await?;
        let name = self.pool.workers.iter().find(|worker| worker.pid == pid).map(|worker| worker.name.clone());
        let log = self.world.log(&name.unwrap_or_default());
        // A machine that is slow enough takes tasks from workers before this, too.
        let before = runs_lost(&log);
        self.with_worker(pid, |worker| worker.go_on())?;
        self.stopped = None;
        self.view.say(
            Tone::Loud,
            format!("others have its tasks now: {} is continued and does not know it", self.name_of(pid)),
        );
        self.until("the worker that came back is refused", |_| runs_lost(&log) > before).await?;
        let refused = runs_lost(&log) - before;
        self.paused = Some(Paused { refused });
        if refused > 0 {
            self.view.say(Tone::Good, "what it wanted to write was refused: its fences are old");
        }
        Ok(())
    }

    /// Stops a worker in the middle of its steps, at a moment at which others can go on.
    async fn stopped_worker(&mut self) -> Result<Option<(u32, Vec<Line>)>, Failure> {
        for _ in 0..20 {
            let Some((pid, held)) = self.find_victim(self.plan.pause_after, Duration::ZERO).await? else {
                return Ok(None);
            };
            let held: Vec<Line> = held.into_iter().filter(|line| line.what != What::Call).collect();
            let at = Timestamp::now();
            self.with_worker(pid, |worker| worker.pause())?;
            self.stopped = Some(pid);
            let asked = Instant::now();
            let mut others_write = false;
            self.until("others go on", |story| {
                others_write = story.board.now().newest > at;
                others_write || asked.elapsed() > OTHERS_WRITE
            })
            .await?;
            if others_write {
                return Ok(Some((pid, held)));
            }
            self.with_worker(pid, |worker| worker.go_on())?;
            self.stopped = None;
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        self.missed.push("no worker could be stopped without holding up the others".to_owned());
        Ok(None)
    }

    fn with_worker(
        &mut self,
        pid: u32,
        act: impl FnOnce(&mut super::pool::Process) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        match self.pool.worker(pid) {
            Some(worker) => act(worker),
            None => Err(Failure::internal(format!("there is no worker with process id {pid}"))),
        }
    }
}

/// Submits all of them in one request; each is accepted or refused on its own.
async fn submit_batch(server: &Server, line: &[Submit]) -> Result<Vec<Accepted>, Failure> {
    let with_key = |submit: &Submit| {
        let mut body = submit.body.clone();
        body["key"] = json!(submit.key);
        body
    };
    let tasks: Vec<Value> = line.iter().map(with_key).collect();
    let answer = server.post(&Path::new(&["v1", "tasks:batch"]), &json!({"tasks": tasks})).await?.json()?;
    let results = list(&answer, "results")?;
    results.iter().zip(line.iter().cloned()).map(|(result, submit)| accepted(&result["task"], submit)).collect()
}

async fn submit(server: &Server, submit: Submit) -> Result<Accepted, Failure> {
    let call = server.request(Method::POST, &Path::new(&["v1", "tasks"]));
    let call = call.header(HeaderName::from_static("idempotency-key"), &submit.key);
    let task = call.json(&submit.body).send().await?.json()?;
    accepted(&task, submit)
}

fn accepted(task: &Value, submit: Submit) -> Result<Accepted, Failure> {
    let Submit { app, kind, .. } = submit;
    let id = task["id"].as_str().map(str::to_owned);
    let id = id.ok_or_else(|| Failure::internal(format!("the server did not accept the task for {app}")))?;
    Ok(Accepted { id, app, kind })
}

/// How many runs of a worker ended because a write of theirs was refused, as its log says.
fn runs_lost(log: &std::path::Path) -> usize {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lost = |line: &&str| serde_json::from_str(line).is_ok_and(|line: Value| line["outcome"] == "lost");
    text.lines().filter(lost).count()
}

fn unreadable(error: &io::Error) -> Failure {
    Failure::internal(format!("the folder of the demo cannot be read: {error}"))
}
