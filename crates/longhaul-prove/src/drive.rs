//! The driver: runs the tasks of a seed on a store while faults happen, waits until everything has settled, and checks.
//!
//! Workers are killed, frozen past their leases and given failpoints; so are listeners (who run the subscriber) and
//! clients; the server is stopped and started; clocks are wrong; disk and network are bad ([`DiskFaults`], [`NetworkFaults`]). A
//! run whose faults did not happen is an error, not a success.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::time::Duration;

use longhaul::faults::{Mutant, POINTS};
use tokio::time::{Instant, sleep};

use crate::Anyhow;
use crate::bed::{Bed, Kind};
use crate::broker::{keep_place, read_all};
use crate::chance::Chance;
use crate::check::{Violation, check};
use crate::history::{History, Setup, list};
use crate::ledger::{Arrivals, What, boot_micros};
use crate::process::Process;
use crate::program::{KEYS, TENANTS};
use crate::serve::Wires;
use crate::{happened, hooks, ticks};

mod disk;
mod host;
mod network;
mod trouble;

pub use disk::DiskFaults;
use host::Host;
pub use network::NetworkFaults;
use trouble::Storm;

/// What is done.
#[derive(Clone, Debug)]
pub struct Drive {
    /// On which store.
    pub kind: Kind,
    /// The seed of tasks and faults.
    pub seed: u64,
    /// How many tasks are submitted.
    pub tasks: u64,
    /// The time between submits.
    pub every: Duration,
    /// How many workers there are.
    pub workers: usize,
    /// Their lease.
    pub lease: Duration,
    /// The faults.
    pub faults: Faults,
    /// How many tasks out of a hundred share a limit.
    pub limited: u64,
    /// A defect, which must be found.
    pub mutant: Option<Mutant>,
    /// How long everything may take to settle when the faults are over.
    pub bound: Duration,
}

/// What goes wrong.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// So many processes are killed.
    pub kills: u32,
    /// So many are frozen past their leases.
    pub freezes: u32,
    /// The server is stopped and started so many times.
    pub restarts: u32,
    /// The time between kills and freezes.
    pub every: Duration,
    /// Every failpoint fires, in every way.
    pub points: bool,
    /// The clocks of two workers are an hour off.
    pub clocks: bool,
    /// So many servers answer over HTTP and deliver webhooks; they are killed and frozen like all others.
    pub servers: usize,
    /// The disk is bad.
    pub disk: DiskFaults,
    /// The network is bad, or the server in trouble.
    pub network: NetworkFaults,
    /// The broker that events are published to is killed so many times.
    pub broker: u32,
}

impl Faults {
    /// Whether a process, its way to the store, or the server itself may be stopped in the middle of a transaction.
    fn stop_transactions(&self) -> bool {
        let Self { kills, freezes, restarts, points, network, .. } = self;
        let of_network =
            network.cuts + network.holds + network.lost_answers + network.locked + network.server_full;
        *points || kills + freezes + restarts + of_network > 0
    }
}

/// What came of it.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// What did not hold.
    pub violations: Vec<Violation>,
    /// What happened, by name.
    pub counts: BTreeMap<&'static str, u64>,
    /// Faults that were to fire and did not.
    pub not_fired: Vec<String>,
    /// How long it took, seconds.
    pub seconds: f64,
}

impl Outcome {
    /// Whether everything held, and everything that was to go wrong did.
    pub fn is_clean(&self) -> bool {
        self.violations.is_empty() && self.not_fired.is_empty()
    }
}

/// For how long after its server started the store takes no lease back, microseconds (`store/postgres/sweep.rs`).
const START_GRACE: i64 = 15_000_000;
/// Within which time a worker that hears of nothing finds a task, microseconds: it looks every second.
const TO_BE_LOOKED_FOR: i64 = 6_000_000;
/// How many tasks one client process submits, at least and at most: with failpoints few, because many processes are wanted.
const SLICE: (u64, u64) = (50, 1_000);
/// So many clients may be at work when others begin: a store that is slower than the pace makes it slower.
const MOST_CLIENTS: usize = 8;
/// How many clients submit each slice.
const CLIENTS: u64 = 2;
/// How often a failpoint is tried in another process before it counts as one that cannot be reached.
const MOST_TRIES: u32 = 8;
/// How long a process has to get to its failpoint.
const TO_FIRE: Duration = Duration::from_secs(6);
/// How long PostgreSQL lets a transaction be that does nothing, or that waits, microseconds.
const TRANSACTION: i64 = 30_000_000;
/// How long it is left alone afterwards: longer than the longest delay.
const TO_RECOVER: Duration = Duration::from_millis(1_800);

/// A failpoint to be reached.
#[derive(Clone, Debug)]
struct Planned {
    point: &'static str,
    kind: &'static str,
    /// What `LONGHAUL_FAULTS` says.
    spec: String,
    tries: u32,
}

impl Planned {
    fn variable(&self) -> (String, String) {
        ("LONGHAUL_FAULTS".to_owned(), self.spec.clone())
    }
}

/// Who gets to a point: those of submits and requests are the clients', those of the subscriber the listeners', all others the
/// workers'.
fn role_of(point: &str) -> &'static str {
    match point.split('.').next() {
        Some("submit" | "control") => "client",
        Some("move" | "subscriber") => "listener",
        _ => "worker",
    }
}

/// Every point in every way, for a role.
fn planned(role: &str, chance: &mut Chance) -> VecDeque<Planned> {
    let points = POINTS.iter().filter(|point| role_of(point) == role);
    points
        .flat_map(|&point| ["abort", "error", "delay"].map(|kind| (point, kind)))
        .map(|(point, kind)| {
            // Whatever is reached seldom fires the first time.
            let seldom = role != "worker" || point.starts_with("undo") || point.starts_with("sweep");
            let turn = if seldom { 1 } else { chance.between(1, 4) };
            let how =
                if kind == "delay" { format!("delay:{}", chance.between(50, 1_500)) } else { kind.to_owned() };
            Planned { point, kind, spec: format!("{point}={how}@{turn}"), tries: 0 }
        })
        .collect()
}

/// A process that is kept running: when it ends, or is killed, another takes its place.
struct Post {
    role: &'static str,
    words: Vec<String>,
    variables: Vec<(String, String)>,
    process: Process,
    /// The failpoint it has, and since when.
    planned: Option<(Planned, Instant)>,
    /// Until when it has time to recover from one that fired.
    recovering: Option<Instant>,
}

impl Post {
    fn start(
        bed: &Bed,
        role: &'static str,
        words: Vec<String>,
        variables: Vec<(String, String)>,
    ) -> Result<Self, Anyhow> {
        let process = bed.start(role, &words, &variables)?;
        Ok(Self { role, words, variables, process, planned: None, recovering: None })
    }

    /// A new process instead of the old one, which is killed if it still runs.
    fn replace(&mut self, bed: &Bed, planned: Option<Planned>) -> Result<(), Anyhow> {
        let mut variables = self.variables.clone();
        variables.extend(planned.as_ref().map(Planned::variable));
        self.process = bed.start(self.role, &self.words, &variables)?;
        self.planned = planned.map(|planned| (planned, Instant::now()));
        self.recovering = None;
        Ok(())
    }
}

/// Runs it. `None`: the store cannot be had here. `program` is what processes run. When something did not hold, the folder
/// with ledger and records is kept, and said.
pub async fn drive(drive: &Drive, program: &Path) -> Result<Option<Outcome>, Anyhow> {
    let Some(mut bed) = Bed::make_for(drive, program).await? else { return Ok(None) };
    let begun = Instant::now();
    let mut outcome = Driver::new(drive, &bed).run().await?;
    outcome.seconds = begun.elapsed().as_secs_f64();
    if !outcome.is_clean() && drive.mutant.is_none() {
        eprintln!("prove: seed {}: what was recorded is kept in {}", drive.seed, bed.keep().display());
    }
    Ok(Some(outcome))
}

struct Driver<'a> {
    drive: &'a Drive,
    bed: &'a Bed,
    chance: Chance,
    counts: BTreeMap<&'static str, u64>,
    not_fired: Vec<String>,
    people: Option<Process>,
}

/// The clients of a run, as they are started and end.
#[derive(Default)]
struct Clients {
    slices: u64,
    running: Vec<(Process, Option<Planned>)>,
}

impl<'a> Driver<'a> {
    fn new(drive: &'a Drive, bed: &'a Bed) -> Self {
        let chance = Chance::of(drive.seed, u64::MAX);
        Self { drive, bed, chance, counts: BTreeMap::new(), not_fired: Vec::new(), people: None }
    }

    fn count(&mut self, what: &'static str, by: u64) {
        *self.counts.entry(what).or_default() += by;
    }

    async fn run(mut self) -> Result<Outcome, Anyhow> {
        let (bed, drive) = (self.bed, self.drive);
        let host = Host::watch(bed.folder().join("host"), drive.lease / 4);
        let wires = match drive.faults.servers {
            0 => None,
            servers => Some(Wires::lay(bed.client().await?, bed.folder(), servers).await?),
        };
        let receiver = wires.as_ref().map(|_| bed.start("receiver", &[], &[])).transpose()?;
        // On a disk that loses power the store must not be asked before the last loss.
        let ticks = match bed.disk {
            Some(_) => BTreeMap::new(),
            None => ticks::begin(bed.client().await?).await?,
        };
        self.people = Some(bed.start("people", &[], &self.mutant())?);
        if bed.broker.is_some() {
            keep_place(bed.client().await?).await?;
        }
        let mut posts = self.posts()?;
        for server in wires.iter().flat_map(|wires| &wires.servers) {
            let words = vec!["--listen".to_owned(), server.to_string()];
            posts.push(Post::start(bed, "server", words, self.mutant())?);
        }
        let mut clients = Clients::default();
        let calm_at = self.go_wrong(&mut posts, &mut clients).await?;
        let client = bed.client().await?;
        if !ticks.is_empty() {
            ticks::end(client).await?;
        }
        let settled = self.settle(&mut posts, &mut clients).await?;
        if let Some(mut people) = self.people.take() {
            if let Some(status) = people.ended()? {
                return Err(format!("people went home with {status}").into());
            }
            people.kill()?;
        }
        let heard = self.hear_all(&mut posts).await?;
        if receiver.is_some() {
            hooks::told_all(client, bed.folder(), drive.bound).await?;
        }
        drop(receiver);
        let arrived = self.read_broker().await?;
        for post in &posts {
            post.process.terminate()?;
        }
        let limits = KEYS.into_iter().map(|(key, max)| (key.to_owned(), max)).collect();
        let lease = i64::try_from(drive.lease.as_micros())?;
        let restarted = drive.faults.restarts > 0 || drive.faults.network.server_full > 0;
        let grace = if restarted { START_GRACE } else { 0 };
        let slow = host.slow();
        let slow_for: i64 = slow.iter().map(|(from, to)| to - from).sum();
        self.count("seconds of a slow host", slow_for.unsigned_abs() / 1_000_000);
        let network = &drive.faults.network;
        let setup = Setup {
            lease,
            calm_at,
            grace,
            slow,
            settled,
            limits,
            heard: true,
            hooked: wires.is_some(),
            ticks,
            arrives: bed.broker.is_some(),
            held: if drive.faults.stop_transactions() && drive.kind == Kind::Postgres { TRANSACTION } else { 0 },
            starts_within: (network.deaf > 0 && network.exhausted == 0).then_some(TO_BE_LOOKED_FOR),
        };
        let history = History::gather(client, bed.folder(), setup).await?;
        self.count("tasks", history.tasks.len() as u64);
        self.count("events", history.tasks.values().map(|task| task.last_seq).sum());
        self.count("streams read", history.streams.len() as u64);
        self.count("events delivered", heard);
        self.count("events published", arrived);
        let effects = history.ledger.iter().filter(|line| matches!(line.what, What::Did(_) | What::Undid(_)));
        self.count("effects", effects.count() as u64);
        self.count("failpoints fired", bed.fired().len() as u64);
        let happened = happened::counts(&history);
        if drive.mutant.is_none() {
            self.not_fired.extend(happened::missing(&happened, drive.tasks, wires.is_some(), bed.disk.is_none()));
        }
        self.counts.extend(happened);
        let violations = check(&history);
        Ok(Outcome { violations, counts: self.counts, not_fired: self.not_fired, seconds: 0.0 })
    }

    /// How many tasks one client process submits.
    fn slice(&self) -> u64 {
        if self.drive.faults.points { SLICE.0 } else { (self.drive.tasks / 20).clamp(SLICE.0, SLICE.1) }
    }

    /// What tells a process that it has the defect.
    fn mutant(&self) -> Vec<(String, String)> {
        let mutant = self.drive.mutant.map(|mutant| ("LONGHAUL_MUTANT".to_owned(), mutant.name().to_owned()));
        mutant.into_iter().collect()
    }

    /// Starts workers and listeners.
    fn posts(&mut self) -> Result<Vec<Post>, Anyhow> {
        let lease = self.drive.lease.as_millis().to_string();
        let mutant = self.mutant();
        let mut posts = Vec::new();
        for number in 0..self.drive.workers {
            let mut variables = mutant.clone();
            if self.drive.faults.clocks && number < 2 {
                let off = if number == 0 { "3600" } else { "-3600" };
                variables.push(("LONGHAUL_FAULTS_CLOCK".to_owned(), off.to_owned()));
                self.count("clocks an hour off", 1);
            }
            let words = ["--slots", "32", "--lease-ms", &lease].map(str::to_owned).to_vec();
            posts.push(Post::start(self.bed, "worker", words, variables)?);
        }
        // One of them has the subscriber, and gets to its failpoints; the other waits for it to die. A short lease: with
        // failpoints, one dies after the other.
        let lease = (self.drive.lease / 3).as_millis().to_string();
        for _ in 0..if self.drive.faults.points { 1 } else { 2 } {
            let words = ["--lease-ms", &lease].map(str::to_owned).to_vec();
            posts.push(Post::start(self.bed, "listener", words, mutant.clone())?);
        }
        if self.drive.faults.network.locked > 0 {
            posts.push(Post::start(self.bed, "crowd", Vec::new(), mutant.clone())?);
        }
        if let Some(broker) = &self.bed.broker {
            posts.push(Post::start(self.bed, "publisher", vec!["--bus".to_owned(), broker.url()], mutant)?);
        }
        Ok(posts)
    }

    /// Submits, and lets things go wrong, until both are done; gives when the last fault was over.
    async fn go_wrong(&mut self, posts: &mut [Post], clients: &mut Clients) -> Result<i64, Anyhow> {
        let faults = self.drive.faults.clone();
        let mut plans: BTreeMap<&str, VecDeque<Planned>> = BTreeMap::new();
        if faults.points {
            for role in ["worker", "listener", "client"] {
                plans.insert(role, planned(role, &mut self.chance));
            }
        }
        let mut frozen: Vec<(usize, Instant)> = Vec::new();
        let (mut kills, mut freezes, mut restarts) = (0, 0, 0);
        let mut storm = Storm::plan(&faults, &mut self.chance);
        let old_transaction = self.hold_back().await?;
        let begin = Instant::now();
        let mut next = begin + Duration::from_millis(500);
        loop {
            self.watch(&mut storm).await?;
            self.submit_on(begin, clients, &mut plans, posts, &storm)?;
            self.look_after(posts, &mut plans)?;
            let now = Instant::now();
            frozen.retain(|(number, until)| {
                // One that was killed meanwhile has a new process, which was never frozen.
                *until > now || posts[*number].process.thaw().is_err()
            });
            let points_left = points_left(&plans, posts);
            let clients_left = clients.running.iter().any(|(_, planned)| planned.is_some());
            let processes = kills < faults.kills || freezes < faults.freezes || restarts < faults.restarts;
            let left = processes || storm.goes_on();
            let submitted = clients.slices * self.slice();
            let submitting = submitted < self.drive.tasks;
            // Until the end, also when the store is slower than the pace.
            let early = submitting && u64::from(kills) * self.drive.tasks > submitted * u64::from(faults.kills);
            if !left && !points_left && !clients_left && !submitting && frozen.is_empty() {
                break;
            }
            if left && !early && now >= next {
                next = now + faults.every;
                // Evenly among the kills.
                let turn = kills >= faults.kills || restarts * (faults.kills + 1) <= kills * faults.restarts;
                let share = if processes { f64::from(kills) / f64::from(faults.kills.max(1)) } else { 1.0 };
                if storm.is_next(share) {
                    self.befall(&mut storm, posts, clients).await?;
                } else if restarts < faults.restarts && turn {
                    self.restart(restarts).await?;
                    restarts += 1;
                } else {
                    // Not one that is frozen, which is to come back, and not the crowd, which is there to be seen waiting.
                    let number = self.chance.between(0, posts.len() as u64 - 1) as usize;
                    if posts[number].role != "crowd" && frozen.iter().all(|(other, _)| *other != number) {
                        if freezes < faults.freezes && (kills >= faults.kills || self.chance.percent(25)) {
                            posts[number].process.freeze()?;
                            frozen.push((number, now + self.drive.lease.mul_f64(1.6)));
                            freezes += 1;
                        } else if kills < faults.kills {
                            posts[number].process.kill()?;
                            posts[number].replace(self.bed, None)?;
                            kills += 1;
                        }
                    }
                }
            }
            sleep(Duration::from_millis(5)).await;
        }
        self.count("kills", kills.into());
        self.count("freezes", freezes.into());
        self.count("server restarts", restarts.into());
        self.tell_of(&faults)?;
        self.let_go(old_transaction).await?;
        Ok(self.bed.now())
    }

    /// Stops the server and starts it again.
    async fn restart(&mut self, number: u32) -> Result<(), Anyhow> {
        let Some(server) = &self.bed.server else { return Ok(()) };
        server.down(if number.is_multiple_of(2) { "immediate" } else { "fast" })?;
        // Now and then for longer than a lease.
        let time =
            if number.is_multiple_of(5) { self.drive.lease.mul_f64(1.5) } else { Duration::from_millis(100) };
        sleep(time).await;
        server.up()
    }

    /// Starts the clients whose time has come, and sees to those that ended.
    fn submit_on(
        &mut self,
        begin: Instant,
        clients: &mut Clients,
        plans: &mut BTreeMap<&str, VecDeque<Planned>>,
        posts: &[Post],
        storm: &Storm,
    ) -> Result<(), Anyhow> {
        let due = self.drive.every * u32::try_from(clients.slices * self.slice())?;
        // Failpoints are reached, and troubles show, only while there is work.
        let faults_left = points_left(plans, posts) || storm.goes_on();
        let more = clients.slices * self.slice() < self.drive.tasks || faults_left;
        // A moment earlier, so that those of a slice begin together.
        let free = clients.running.len() < MOST_CLIENTS;
        if more && free && begin.elapsed() + Duration::from_millis(300) >= due {
            let (from, to) = (clients.slices * self.slice(), (clients.slices + 1) * self.slice());
            let to = if faults_left { to } else { to.min(self.drive.tasks) };
            let begin_at = boot_micros() + 300_000;
            for number in 0..CLIENTS {
                let words = [
                    ("--seed", self.drive.seed.to_string()),
                    ("--client", number.to_string()),
                    ("--clients", CLIENTS.to_string()),
                    ("--from", from.to_string()),
                    ("--tasks", to.to_string()),
                    ("--limited", self.drive.limited.to_string()),
                    ("--every-us", self.drive.every.as_micros().to_string()),
                    ("--begin-at", begin_at.to_string()),
                ];
                let mut words: Vec<String> =
                    words.into_iter().flat_map(|(name, value)| [name.to_owned(), value]).collect();
                // The last one asks servers, all others the store itself.
                if number + 1 == CLIENTS && self.drive.faults.servers > 0 {
                    words.push("--http".to_owned());
                }
                let planned = plans.get_mut("client").and_then(VecDeque::pop_front);
                let mut variables: Vec<_> = planned.as_ref().map(Planned::variable).into_iter().collect();
                variables.extend(self.mutant());
                clients.running.push((self.bed.start("client", &words, &variables)?, planned));
            }
            clients.slices += 1;
        }
        let fired = self.bed.fired();
        let mut going_on = Vec::new();
        for (mut process, planned) in std::mem::take(&mut clients.running) {
            let has_fired = planned.as_ref().is_some_and(|planned| fired_in(&fired, planned, &process));
            match (process.ended()?, planned) {
                (None, planned) => going_on.push((process, planned.filter(|_| !has_fired))),
                (Some(status), None) if !status.success() && !self.drive.faults.points => {
                    return Err(format!("a client ended with {status}").into());
                }
                (Some(_), Some(planned)) if !has_fired => self.plan_again(planned, plans),
                _ => {}
            }
        }
        clients.running = going_on;
        Ok(())
    }

    /// Replaces processes that ended, and gives failpoints to those that have none.
    fn look_after(
        &mut self,
        posts: &mut [Post],
        plans: &mut BTreeMap<&str, VecDeque<Planned>>,
    ) -> Result<(), Anyhow> {
        let fired = if self.drive.faults.points { self.bed.fired() } else { Vec::new() };
        for post in posts.iter_mut() {
            let ended = post.process.ended()?.is_some();
            let has_fired =
                post.planned.as_ref().is_some_and(|(planned, _)| fired_in(&fired, planned, &post.process));
            if has_fired && let Some((planned, _)) = post.planned.take() {
                // An abort ends it by itself, a moment later; after anything else it has some time to recover.
                let time = if planned.kind == "abort" { TO_FIRE } else { TO_RECOVER };
                post.recovering = Some(Instant::now() + time);
            }
            if !ended && post.recovering.is_some_and(|until| Instant::now() < until) {
                continue;
            }
            post.recovering = None;
            match post.planned.take() {
                Some((planned, since)) if ended || since.elapsed() > TO_FIRE => self.plan_again(planned, plans),
                Some(waiting) => {
                    post.planned = Some(waiting);
                    continue;
                }
                None if !ended && plans.get(post.role).is_none_or(VecDeque::is_empty) => continue,
                None => {}
            }
            let next = plans.get_mut(post.role).and_then(VecDeque::pop_front);
            if ended || next.is_some() {
                post.replace(self.bed, next)?;
            }
        }
        Ok(())
    }

    /// A failpoint that was not reached is given to another process, for a while.
    fn plan_again(&mut self, mut planned: Planned, plans: &mut BTreeMap<&str, VecDeque<Planned>>) {
        planned.tries += 1;
        if planned.tries >= MOST_TRIES {
            self.not_fired.push(planned.spec);
        } else if let Some(plan) = plans.get_mut(role_of(planned.point)) {
            plan.push_back(planned);
        }
    }

    /// Waits until all tasks have ended and all clients have read what they read; whether that was within the bound.
    async fn settle(&mut self, posts: &mut [Post], clients: &mut Clients) -> Result<bool, Anyhow> {
        let until = Instant::now() + self.drive.bound;
        let mut none = BTreeMap::new();
        loop {
            self.look_after(posts, &mut none)?;
            clients.running.retain_mut(|(process, _)| matches!(process.ended(), Ok(None)));
            let mut open = 0;
            for tenant in TENANTS {
                let client = self.bed.client().await?.for_tenant(tenant);
                for state in longhaul::State::ALL.into_iter().filter(|state| !state.is_final()) {
                    open += list(&client, Some(state)).await?.len();
                }
            }
            if open == 0 && clients.running.is_empty() && self.all_ended().await? {
                return Ok(true);
            }
            if Instant::now() > until {
                return Ok(false);
            }
            sleep(Duration::from_millis(100)).await;
        }
    }

    /// Whether all tasks have ended. One that changed its state between two lists was in neither; in this one each is seen
    /// once, and children after those who wait for them.
    async fn all_ended(&self) -> Result<bool, Anyhow> {
        for tenant in TENANTS {
            let tasks = list(&self.bed.client().await?.for_tenant(tenant), None).await?;
            if tasks.iter().any(|task| !task.state.is_final()) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// How many events all tasks have told.
    async fn told(&self) -> Result<u64, Anyhow> {
        let mut told = 0;
        for tenant in TENANTS {
            let tasks = list(&self.bed.client().await?.for_tenant(tenant), None).await?;
            told += tasks.iter().map(|task| task.last_seq).sum::<u64>();
        }
        Ok(told)
    }

    /// Waits until everything arrived at the broker, or for a while; gives how many events that were.
    async fn read_broker(&self) -> Result<u64, Anyhow> {
        let Some(broker) = &self.bed.broker else { return Ok(0) };
        read_all(&broker.url(), self.bed.folder(), self.told().await?, self.drive.bound).await
    }

    /// Waits until the subscriber was given everything, or nothing for a while; gives how many events that were.
    async fn hear_all(&mut self, posts: &mut [Post]) -> Result<u64, Anyhow> {
        let told = self.told().await?;
        let mut events = Arrivals::of(self.bed.folder())?;
        loop {
            self.look_after(posts, &mut BTreeMap::new())?;
            let heard = events.look(|what| match what {
                What::Heard { task, seq, .. } => Some((task, seq)),
                _ => None,
            })?;
            if heard >= told || events.quiet() > self.drive.bound {
                return Ok(heard);
            }
            sleep(Duration::from_millis(500)).await;
        }
    }
}

/// Whether there are failpoints that have not fired, or processes that recover from one.
fn points_left(plans: &BTreeMap<&str, VecDeque<Planned>>, posts: &[Post]) -> bool {
    plans.values().any(|left| !left.is_empty())
        || posts.iter().any(|post| post.planned.is_some() || post.recovering.is_some())
}

fn fired_in(fired: &[(String, String, u32)], planned: &Planned, process: &Process) -> bool {
    fired.iter().any(|(point, _, pid)| point == planned.point && *pid == process.id())
}
