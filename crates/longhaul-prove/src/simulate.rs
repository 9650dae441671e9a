//! Simulation: the tasks of a seed on simulated processes, which share a database in memory and the clock of one thread. Ways
//! to the store lose, delay and repeat calls; processes die, are frozen past their leases and cut off; all of that is
//! drawn from the seed, so that the same seed does the same again, and takes milliseconds.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::time::Duration;

use longhaul::Client;
use longhaul::faults::{Database, Fault, Mutant, Odds, Process, Simulation, Way};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until};

use crate::Anyhow;
use crate::bed::make_ready;
use crate::chance::Chance;
use crate::check::{Violation, check};
use crate::handler::Outside;
use crate::history::{History, Setup, list};
use crate::ledger::{Appended, Ledger, What, digest};
use crate::people::help;
use crate::process::{listen, one_task, worker_of};
use crate::program::{KEYS, Plan, Same, TENANTS};
use crate::records::Records;
use crate::via::Via;

mod many;

pub use many::{Seeds, simulate_many};

/// How many out of a hundred tasks share a limit.
const LIMITED: u64 = 25;
/// How many client processes there are.
const CLIENTS: u64 = 2;
/// How long everything may take to settle when the faults are over, and how long the subscriber may take after that.
const BOUND: Duration = Duration::from_secs(120);
/// How often it is looked whether something is to go wrong, or has settled.
const TICK: Duration = Duration::from_millis(25);
/// The pause of people between two rounds.
const PEOPLE_PAUSE: Duration = Duration::from_millis(200);

/// What came of a seed.
#[derive(Debug)]
pub struct Simulated {
    /// The seed.
    pub seed: u64,
    /// What did not hold.
    pub violations: Vec<Violation>,
    /// What happened, by name.
    pub counts: BTreeMap<&'static str, u64>,
    /// All that is known afterwards.
    pub history: History,
}

impl Simulated {
    /// A number that stands for everything that happened: the same for the same seed.
    pub fn digest(&self) -> u64 {
        digest(&format!("{:?}", self.history))
    }
}

/// Everything that can go wrong, as it is counted.
pub fn faults() -> impl Iterator<Item = &'static str> {
    [KILLS, FREEZES, CUTS].into_iter().chain(Fault::ALL.into_iter().map(Fault::name))
}

const KILLS: &str = "simulated kills";
const FREEZES: &str = "simulated freezes";
const CUTS: &str = "processes cut off";

/// Simulates a seed, on this thread.
pub fn simulate(seed: u64, mutant: Option<Mutant>) -> Result<Simulated, Anyhow> {
    let panics = panics();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build()?;
    let simulated = runtime.block_on(async {
        let _simulation = Simulation::begin(seed, mutant);
        Simulator::new(seed)?.run().await
    });
    drop(runtime);
    // Those of tasks that nobody waits for would go unnoticed.
    match self::panics() - panics {
        0 => simulated,
        count => Err(format!("seed {seed}: {count} panics").into()),
    }
}

/// How many panics there were on this thread since this was first asked.
fn panics() -> u64 {
    thread_local! {
        static PANICS: Cell<u64> = const { Cell::new(0) };
    }
    static COUNTED: Once = Once::new();
    COUNTED.call_once(|| {
        let tell = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            PANICS.set(PANICS.get() + 1);
            tell(panic);
        }));
    });
    PANICS.get()
}

/// What a simulated process is there for.
#[derive(Clone)]
enum Role {
    Worker { slots: usize },
    Listener,
    Client { plans: Plans },
    People,
}

/// What a client has still to submit, and when.
type Plans = Arc<Mutex<VecDeque<(Instant, Plan)>>>;

/// A simulated process that is kept running: when it is killed, another takes its place.
struct Post {
    role: Role,
    way: Way,
    /// What goes wrong on its way while nothing else does.
    odds: Odds,
    process: Process,
    starts: u32,
    done: Option<JoinHandle<Result<(), Anyhow>>>,
    /// Until when it is frozen, or cut off.
    away: Option<(Instant, Away)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Away {
    Frozen,
    Cut,
}

impl Post {
    fn come_back(&mut self, odds: Odds) {
        match self.away.take() {
            Some((_, Away::Frozen)) => self.process.thaw(),
            Some((_, Away::Cut)) => self.way.set(odds),
            None => {}
        }
    }
}

struct Simulator {
    seed: u64,
    chance: Chance,
    database: Database,
    outside: Arc<Outside>,
    records: Appended,
    lease: Duration,
    /// The store as the one who looks on sees it.
    client: Client,
    posts: Vec<Post>,
    counts: BTreeMap<&'static str, u64>,
}

impl Simulator {
    fn new(seed: u64) -> Result<Self, Anyhow> {
        let mut chance = Chance::of(seed, u64::MAX);
        let database = Database::new()?;
        let lease = Duration::from_millis(*chance.one_of(&[600, 1_000, 2_000]));
        let client = database.connect(&Way::new(chance.draw()));
        let mut simulator = Self {
            seed,
            chance,
            database,
            outside: Arc::new(Outside::in_memory()),
            records: Appended::Memory(Arc::default()),
            lease,
            client,
            posts: Vec::new(),
            counts: faults().map(|fault| (fault, 0)).collect(),
        };
        simulator.staff();
        Ok(simulator)
    }

    /// Draws who is there, and what each of them has to do.
    fn staff(&mut self) {
        let workers = self.chance.between(2, 3);
        let mut roles: Vec<Role> =
            (0..workers).map(|_| Role::Worker { slots: self.chance.between(1, 8) as usize }).collect();
        roles.extend((0..self.chance.between(1, 2)).map(|_| Role::Listener));
        roles.extend(self.plans().into_iter().map(|plans| Role::Client { plans }));
        roles.push(Role::People);
        for role in roles {
            let (way, odds) = (Way::new(self.chance.draw()), self.odds());
            let process = Process::new();
            self.posts.push(Post { role, way, odds, process, starts: 0, done: None, away: None });
        }
    }

    /// The tasks of the seed, for each client. One that is to be recognised (by a key, or as equal) is submitted by all of
    /// them, at the same moment.
    fn plans(&mut self) -> Vec<Plans> {
        let mut plans = vec![VecDeque::new(); CLIENTS as usize];
        let mut at = Instant::now();
        for number in 0..self.chance.between(3, 12) {
            at += Duration::from_millis(self.chance.between(0, 400));
            let plan = Plan::draw(self.seed, number, LIMITED);
            for (client, plans) in (0_u64..).zip(&mut plans) {
                if plan.same != Same::Nothing || number % CLIENTS == client {
                    plans.push_back((at, plan.clone()));
                }
            }
        }
        plans.into_iter().map(|plans| Arc::new(Mutex::new(plans))).collect()
    }

    /// What goes wrong on one way; some are better than others.
    fn odds(&mut self) -> Odds {
        let most = *self.chance.one_of(&[0, 20, 60, 120]);
        let mut often = || self.chance.between(0, most);
        let (lost, unanswered, delayed, repeated, late) = (often(), often(), often(), often(), often());
        let lease = self.lease.as_millis() as u64;
        let longest = Duration::from_millis(self.chance.between(20, lease));
        Odds { lost, unanswered, delayed, repeated, late, unheard: self.chance.between(0, 500), longest }
    }

    fn count(&mut self, what: &'static str, by: u64) {
        *self.counts.entry(what).or_default() += by;
    }

    /// The store's time, microseconds.
    fn now(&self) -> i64 {
        self.client.clock().now().as_microsecond()
    }

    async fn run(mut self) -> Result<Simulated, Anyhow> {
        make_ready(&self.client).await?;
        for number in 0..self.posts.len() {
            self.start(number);
        }
        self.go_wrong().await?;
        let calm_at = self.calm();
        let settled = self.settle().await?;
        let heard = self.hear_all().await?;
        self.nobody_left()?;
        let setup = Setup {
            lease: i64::try_from(self.lease.as_micros())?,
            calm_at,
            settled,
            limits: KEYS.into_iter().map(|(key, max)| (key.to_owned(), max)).collect(),
            heard: true,
            ..Setup::default()
        };
        let (asked, streams) = Records::read_memory(&self.records);
        let history = History { setup, asked, streams, ledger: self.outside.ledger.lines(), ..History::default() };
        let history = history.with_tasks(&self.client).await?;
        self.count("tasks", history.tasks.len() as u64);
        self.count("events", history.tasks.values().map(|task| task.last_seq).sum());
        self.count("events delivered", heard);
        self.count("streams read", history.streams.len() as u64);
        let effects = history.ledger.iter().filter(|line| matches!(line.what, What::Did(_) | What::Undid(_)));
        self.count("effects", effects.count() as u64);
        for fired in self.posts.iter().map(|post| post.way.fired()).collect::<Vec<_>>() {
            for (fault, count) in fired {
                self.count(fault.name(), count);
            }
        }
        let violations = check(&history);
        Ok(Simulated { seed: self.seed, violations, counts: self.counts, history })
    }

    /// Starts a process at a post.
    fn start(&mut self, number: usize) {
        let (database, outside, lease) = (self.database.clone(), Arc::clone(&self.outside), self.lease);
        let post = &mut self.posts[number];
        post.starts += 1;
        post.process = Process::new();
        let (way, process) = (post.way.clone(), post.process.clone());
        let records = Arc::new(Records::in_memory(&self.records, &format!("{number}/{}", post.starts)));
        post.done = Some(match post.role.clone() {
            Role::Worker { slots } => {
                post.process.spawn(async move { work(database.connect(&way), outside, slots, lease).await })
            }
            Role::Listener => {
                let ledger = outside.ledger.clone();
                post.process.spawn(async move { hear(database.connect(&way), ledger, lease).await })
            }
            Role::Client { plans } => post
                .process
                .spawn(async move { submit_all(&process, database.connect(&way), records, plans).await }),
            Role::People => {
                let world = outside.world.clone();
                post.process
                    .spawn(async move { help(database.connect(&way), world, records, None, PEOPLE_PAUSE).await })
            }
        });
    }

    /// Lets things go wrong for some seconds.
    async fn go_wrong(&mut self) -> Result<(), Anyhow> {
        for post in &self.posts {
            post.way.set(post.odds);
        }
        let pace = self.chance.between(150, 1_500);
        // In some seeds nothing goes wrong at all: then no lease may be lost either.
        let time = if self.chance.percent(5) { 0 } else { self.chance.between(2_000, 8_000) };
        let until = Instant::now() + Duration::from_millis(time);
        let mut next = Instant::now() + Duration::from_millis(self.chance.between(0, pace));
        while Instant::now() < until {
            sleep(TICK).await;
            let now = Instant::now();
            for post in self.posts.iter_mut().filter(|post| post.away.is_some_and(|(until, _)| until <= now)) {
                post.come_back(post.odds);
            }
            if now >= next {
                next = now + Duration::from_millis(self.chance.between(0, pace));
                self.hurt();
            }
        }
        Ok(())
    }

    /// Does something to one of the processes that are there.
    fn hurt(&mut self) {
        let number = self.chance.between(0, self.posts.len() as u64 - 1) as usize;
        let (what, time) =
            (self.chance.between(1, 3), self.lease.mul_f64(self.chance.between(2, 22) as f64 / 10.0));
        // One that is away is to come back; people are not killed: what they did not write down nobody knows.
        let post = &mut self.posts[number];
        if post.away.is_some() {
            return;
        }
        let until = Instant::now() + time;
        match what {
            1 if !matches!(post.role, Role::People) => {
                post.process.kill();
                self.count(KILLS, 1);
                self.start(number);
            }
            2 => {
                post.process.freeze();
                post.away = Some((until, Away::Frozen));
                self.count(FREEZES, 1);
            }
            3 => {
                post.way.set(Odds::CUT);
                post.away = Some((until, Away::Cut));
                self.count(CUTS, 1);
            }
            _ => {}
        }
    }

    /// Nothing goes wrong any more; gives when that was.
    fn calm(&mut self) -> i64 {
        for post in &mut self.posts {
            post.come_back(Odds::CALM);
            post.way.set(Odds::CALM);
        }
        self.now()
    }

    /// Waits until all tasks have ended and all clients have read what they read; whether that was within the bound.
    async fn settle(&mut self) -> Result<bool, Anyhow> {
        let until = Instant::now() + BOUND;
        // Calls that are late come within a lease: one that resumes a task would begin it again.
        sleep(self.lease).await;
        loop {
            let busy = |post: &Post| {
                matches!(post.role, Role::Client { .. })
                    && post.done.as_ref().is_some_and(|done| !done.is_finished())
            };
            let mut open = self.posts.iter().any(busy);
            for tenant in TENANTS {
                // All at once: between two questions a task can go from one state to another.
                let tasks = list(&self.client.for_tenant(tenant), None).await?;
                open = open || tasks.iter().any(|task| !task.state.is_final());
            }
            if !open {
                return Ok(true);
            }
            if Instant::now() > until {
                return Ok(false);
            }
            sleep(TICK * 4).await;
        }
    }

    /// Waits until the subscriber was given everything, or for a while; gives how many events that were.
    async fn hear_all(&mut self) -> Result<u64, Anyhow> {
        let mut told = 0;
        for tenant in TENANTS {
            let tasks = list(&self.client.for_tenant(tenant), None).await?;
            told += tasks.iter().map(|task| task.last_seq).sum::<u64>();
        }
        let until = Instant::now() + BOUND;
        loop {
            let lines = self.outside.ledger.lines();
            let heard: BTreeSet<_> = lines
                .iter()
                .filter_map(|line| match &line.what {
                    What::Heard { task, seq, .. } => Some((*task, *seq)),
                    _ => None,
                })
                .collect();
            if heard.len() as u64 >= told || Instant::now() > until {
                return Ok(heard.len() as u64);
            }
            sleep(TICK * 10).await;
        }
    }

    /// A process of the suite that ended by itself is a mistake of the suite's.
    fn nobody_left(&self) -> Result<(), Anyhow> {
        let ended = |post: &&Post| {
            !matches!(post.role, Role::Client { .. }) && post.done.as_ref().is_some_and(JoinHandle::is_finished)
        };
        match self.posts.iter().position(|post| ended(&post)) {
            Some(number) => Err(format!("seed {}: process {number} ended by itself", self.seed).into()),
            None => Ok(()),
        }
    }
}

/// Whether it may help to ask again.
fn may_help(error: &longhaul::Error) -> bool {
    matches!(error, longhaul::Error::Store(error) if error.is_unavailable())
}

/// Runs programs until it is killed.
async fn work(client: Client, outside: Arc<Outside>, slots: usize, lease: Duration) -> Result<(), Anyhow> {
    loop {
        let worker = worker_of(&client, Arc::clone(&outside), slots, lease);
        match worker.run(std::future::pending()).await {
            Err(error) if may_help(&error) => sleep(Duration::from_millis(100)).await,
            ended => return Ok(ended?),
        }
    }
}

/// Hears every event until it is killed.
async fn hear(client: Client, ledger: Ledger, lease: Duration) -> Result<(), Anyhow> {
    loop {
        match listen(&client, ledger.clone(), lease).await {
            Ok(_listening) => return std::future::pending().await,
            Err(error) if may_help(&error) => sleep(Duration::from_millis(100)).await,
            Err(error) => return Err(error.into()),
        }
    }
}

/// Submits what is left, each at its time, and waits until it has been told everything.
async fn submit_all(process: &Process, client: Client, records: Arc<Records>, plans: Plans) -> Result<(), Anyhow> {
    let mut tasks = Vec::new();
    let lock = || plans.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        let Some(at) = lock().front().map(|(at, _)| *at) else { break };
        sleep_until(at).await;
        // Once begun it is not begun again: nobody knows what came of it when this process dies.
        let Some((_, plan)) = lock().pop_front() else { break };
        tasks.push(process.spawn(one_task(
            Via::Library(client.for_tenant(plan.tenant)),
            Arc::clone(&records),
            plan,
            None,
        )));
    }
    for task in tasks {
        task.await??;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_does_the_same_again_and_another_something_else() {
        let digests = |seed| {
            let (one, two) = (simulate(seed, None).expect("simulated"), simulate(seed, None).expect("simulated"));
            assert_eq!(one.counts, two.counts, "seed {seed}");
            assert_eq!(one.digest(), two.digest(), "seed {seed}");
            one.digest()
        };
        let all: BTreeSet<u64> = (1..=8).map(digests).collect();
        assert_eq!(all.len(), 8);
    }

    #[test]
    fn a_panic_of_a_task_that_nobody_waits_for_is_counted() {
        let before = panics();
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        runtime.block_on(async {
            let task = tokio::spawn(async { panic!("on purpose") });
            let _ = task.await;
        });
        assert_eq!(panics() - before, 1);
    }
}
