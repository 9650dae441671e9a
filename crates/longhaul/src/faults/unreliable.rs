//! A database in memory that several simulated processes share, and the store that each of them has of it: the real one,
//! behind a [`Way`].

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use async_trait::async_trait;
use rusqlite::Connection;
use tokio::time::sleep;
use uuid::Uuid;

use super::way::{Kind, Way};
use crate::client::Client;
use crate::engine::Engine;
use crate::event::LogRow;
use crate::schedule::Schedule;
use crate::state::AgentState;
use crate::store::feed::{FeedPage, Place};
use crate::store::sqlite::SqliteStore;
use crate::store::subscribers::{MoveSubscriber, NewSubscriber, Take, TakeSubscriber};
use crate::store::*;
use crate::task::{Invalid, NewTask, Task, TaskId};

mod straight;

/// See the module. Clones are the same database, which ends with the last of them.
#[derive(Clone)]
pub struct Database {
    connection: Arc<Mutex<Connection>>,
    /// Whoever is to be told that another wrote something.
    ears: Arc<Mutex<Vec<Ear>>>,
}

/// A process that hears of what others write.
#[derive(Clone)]
struct Ear {
    hints: Weak<Hints>,
    way: Way,
    /// A hint is on its way; one is enough.
    told: Arc<AtomicBool>,
}

impl Database {
    /// An empty one.
    pub fn new() -> Result<Self, StoreError> {
        Ok(Self { connection: SqliteStore::shared_memory()?, ears: Arc::default() })
    }

    /// A client, with an engine of its own, that gets to the database by this way. What it starts belongs to the simulated
    /// process in which this is called.
    pub fn connect(&self, way: &Way) -> Client {
        let hints = Arc::new(Hints::default());
        let ear = Ear { hints: Arc::downgrade(&hints), way: way.clone(), told: Arc::default() };
        let mut ears = self.ears.lock().unwrap_or_else(PoisonError::into_inner);
        ears.retain(|ear| ear.hints.strong_count() > 0);
        ears.push(ear);
        drop(ears);
        let store = Arc::new(SqliteStore::on(Arc::clone(&self.connection), Arc::clone(&hints)));
        let unreliable = Unreliable { store, way: way.clone(), database: self.clone(), hints: Arc::clone(&hints) };
        Client::of_engine(Engine::over(Arc::new(unreliable), hints))
    }

    /// How many rows were changed since it was made.
    fn changes(&self) -> u64 {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner).total_changes()
    }

    /// Someone wrote: everyone else may hear of it.
    fn wrote(&self, writer: &Arc<Hints>) {
        let ears: Vec<Ear> = self.ears.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for ear in ears {
            let own = std::ptr::eq(ear.hints.as_ptr(), Arc::as_ptr(writer));
            if own || ear.told.swap(true, Ordering::Relaxed) {
                continue;
            }
            match ear.way.hint() {
                Some(after) => {
                    tokio::spawn(async move {
                        sleep(after).await;
                        ear.told.store(false, Ordering::Relaxed);
                        if let Some(hints) = ear.hints.upgrade() {
                            hints.tell_anything();
                        }
                    });
                }
                None => ear.told.store(false, Ordering::Relaxed),
            }
        }
    }
}

/// The store that one simulated process has.
struct Unreliable {
    store: Arc<SqliteStore>,
    way: Way,
    database: Database,
    hints: Arc<Hints>,
}

impl Unreliable {
    /// Asks by the way.
    async fn ask<T, F, Fut>(&self, kind: Kind, ask: F) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: Fn(Arc<SqliteStore>) -> Fut + Send + 'static,
        Fut: Future<Output = Result<T, StoreError>> + Send + 'static,
    {
        let (store, database, hints) = (Arc::clone(&self.store), self.database.clone(), Arc::clone(&self.hints));
        let call = move || {
            let (asking, database, hints) = (ask(Arc::clone(&store)), database.clone(), Arc::clone(&hints));
            async move {
                let before = database.changes();
                let answer = asking.await;
                if database.changes() != before {
                    database.wrote(&hints);
                }
                answer
            }
        };
        self.way.call(kind, call).await
    }
}

/// Asks by the way: references first, then values. All of it is taken along, because the call may be made later, or twice.
macro_rules! ask {
    ($self:ident, $kind:ident, $method:ident($(&$given:ident),* $(; $($value:ident),*)?)) => {{
        $(let $given = $given.to_owned();)*
        let asking = move |store: Arc<SqliteStore>| {
            $(let $given = $given.clone();)*
            async move { store.$method($(&$given,)* $($($value),*)?).await }
        };
        $self.ask(Kind::$kind, asking).await
    }};
}

#[async_trait]
impl Store for Unreliable {
    async fn submit(&self, batch: &[NewTask]) -> Result<Vec<Result<Accepted, SubmitRefused>>, StoreError> {
        ask!(self, Write, submit(&batch))
    }

    async fn claim(&self, ask: &Claim) -> Result<Claimed, StoreError> {
        ask!(self, Write, claim(&ask))
    }

    async fn commit(&self, batch: &[Commit]) -> Result<Vec<Result<Committed, CommitRefused>>, StoreError> {
        ask!(self, Write, commit(&batch))
    }

    async fn heartbeat(&self, beat: &Heartbeat) -> Result<Beats, StoreError> {
        ask!(self, Write, heartbeat(&beat))
    }

    async fn control(&self, batch: &[Control]) -> Result<Vec<Result<Controlled, ControlRefused>>, StoreError> {
        ask!(self, Once, control(&batch))
    }

    async fn lock(&self, change: &LockChange) -> Result<Result<Locked, CommitRefused>, StoreError> {
        ask!(self, Write, lock(&change))
    }

    async fn let_go(&self, tasks: &[TaskId]) -> Result<(), StoreError> {
        ask!(self, Write, let_go(&tasks))
    }

    async fn sweep(&self, limit: usize, ticks: bool) -> Result<Swept, StoreError> {
        ask!(self, Write, sweep(; limit, ticks))
    }

    async fn register(&self, worker: &WorkerInfo) -> Result<(), StoreError> {
        ask!(self, Write, register(&worker))
    }

    async fn retire(&self, worker: Uuid) -> Result<(), StoreError> {
        ask!(self, Write, retire(; worker))
    }

    async fn configure(&self, settings: &Settings) -> Result<(), StoreError> {
        ask!(self, Write, configure(&settings))
    }

    async fn task(&self, tenant: &str, id: TaskId) -> Result<Option<Task>, StoreError> {
        ask!(self, Read, task(&tenant; id))
    }

    async fn list(&self, tenant: &str, filter: &Filter) -> Result<Page, StoreError> {
        ask!(self, Read, list(&tenant, &filter))
    }

    async fn log(&self, task: TaskId, after: u64, bytes: usize) -> Result<Vec<LogRow>, StoreError> {
        ask!(self, Read, log(; task, after, bytes))
    }

    async fn advanced(&self, known: &[(TaskId, u64)]) -> Result<Vec<(TaskId, u64)>, StoreError> {
        ask!(self, Read, advanced(&known))
    }

    async fn state(&self, task: TaskId) -> Result<Option<(u64, AgentState)>, StoreError> {
        ask!(self, Read, state(; task))
    }

    async fn checkpoints(&self, task: TaskId) -> Result<Vec<Checkpoint>, StoreError> {
        ask!(self, Read, checkpoints(; task))
    }

    async fn asks(&self, tenant: &str, task: Option<TaskId>) -> Result<Vec<Ask>, StoreError> {
        ask!(self, Read, asks(&tenant; task))
    }

    async fn queues(&self) -> Result<Vec<QueueInfo>, StoreError> {
        ask!(self, Read, queues())
    }

    async fn workers(&self) -> Result<Vec<WorkerInfo>, StoreError> {
        ask!(self, Read, workers())
    }

    async fn save_schedule(&self, schedule: &Schedule) -> Result<Result<Schedule, Invalid>, StoreError> {
        ask!(self, Once, save_schedule(&schedule))
    }

    async fn pause_schedule(&self, tenant: &str, name: &str, pause: bool) -> Result<Option<Schedule>, StoreError> {
        ask!(self, Once, pause_schedule(&tenant, &name; pause))
    }

    async fn remove_schedule(&self, tenant: &str, name: &str) -> Result<bool, StoreError> {
        ask!(self, Once, remove_schedule(&tenant, &name))
    }

    async fn schedules(&self, tenant: &str) -> Result<Vec<Schedule>, StoreError> {
        ask!(self, Read, schedules(&tenant))
    }

    fn clock(&self) -> &Clock {
        self.store.clock()
    }

    fn lanes(&self) -> Lanes {
        self.store.lanes()
    }

    async fn floor(&self, seconds: f64) -> Result<Floor, StoreError> {
        self.store.floor(seconds).await
    }
}

#[async_trait]
impl FeedStore for Unreliable {
    async fn feed_now(&self) -> Result<Place, StoreError> {
        ask!(self, Read, feed_now())
    }

    async fn feed(&self, from: Place, span: i64, most: usize) -> Result<FeedPage, StoreError> {
        ask!(self, Read, feed(; from, span, most))
    }

    fn feed_kind(&self) -> char {
        self.store.feed_kind()
    }
}

#[async_trait]
impl SubscriberStore for Unreliable {
    async fn begin_subscriber(&self, new: &NewSubscriber) -> Result<Result<(), Invalid>, StoreError> {
        ask!(self, Write, begin_subscriber(&new))
    }

    async fn take_subscriber(&self, ask: &TakeSubscriber) -> Result<Take, StoreError> {
        ask!(self, Once, take_subscriber(&ask))
    }

    async fn move_subscriber(&self, step: &MoveSubscriber) -> Result<bool, StoreError> {
        ask!(self, Write, move_subscriber(&step))
    }

    async fn subscribers(&self) -> Result<Vec<SubscriberInfo>, StoreError> {
        ask!(self, Read, subscribers())
    }

    async fn remove_subscriber(&self, name: &str) -> Result<bool, StoreError> {
        ask!(self, Once, remove_subscriber(&name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::faults::{Fault, Odds, Process, Simulation};
    use crate::run::Run;
    use crate::{State, TaskError, Worker};
    use std::sync::atomic::AtomicU64;
    use std::time::Duration;

    async fn twice(run: Run, count: Arc<AtomicU64>) -> Result<u64, TaskError> {
        let one = run.step("one", async || Ok::<_, TaskError>(count.fetch_add(1, Ordering::Relaxed))).await?;
        run.sleep(Duration::from_secs(3_600)).await?;
        let two = run.step("two", async || Ok::<_, TaskError>(count.fetch_add(1, Ordering::Relaxed))).await?;
        Ok(one + 10 * two)
    }

    fn worker(database: &Database, way: &Way, count: &Arc<AtomicU64>) -> Process {
        let (process, database, way, count) = (Process::new(), database.clone(), way.clone(), Arc::clone(count));
        process.spawn(async move {
            let client = database.connect(&way);
            let handler = move |run: Run, _: ()| twice(run, Arc::clone(&count));
            let worker = Worker::new(&client).lease(Duration::from_secs(3)).handler("twice", handler);
            worker.run(std::future::pending()).await
        });
        process
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_of_an_hour_goes_on_in_another_process_after_a_crash_in_no_time() {
        let begun = std::time::Instant::now();
        let _simulation = Simulation::begin(1, None);
        let (database, way, count) = (Database::new().expect("made"), Way::new(1), Arc::new(AtomicU64::new(0)));
        let client = database.connect(&way);
        client.announce(&["twice"]).await.expect("the store answers");
        let first = worker(&database, &way, &count);
        let id = client.submit(NewTask::new("twice", &())).await.expect("accepted").id;
        while client.task(id).await.expect("it is there").state != State::Waiting {
            sleep(Duration::from_millis(10)).await;
        }
        first.kill();
        let _second = worker(&database, &way, &count);
        let task = client.wait(id, Duration::from_secs(7_200)).await.expect("it ends");
        assert_eq!(task.result.expect("a result").get(), "10");
        let took = task.finished_at.expect("over").duration_since(task.created_at).as_secs();
        assert!((3_600..3_610).contains(&took), "{took} s by the store's clock");
        assert!(begun.elapsed() < Duration::from_secs(60), "{:?} by the real one", begun.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_frozen_worker_loses_its_lease_to_another_and_writes_nothing_more() {
        let _simulation = Simulation::begin(2, None);
        let (database, way) = (Database::new().expect("made"), Way::new(2));
        let client = database.connect(&way);
        client.announce(&["slow"]).await.expect("the store answers");
        let start = |name: &'static str| {
            let (process, database, way) = (Process::new(), database.clone(), way.clone());
            process.spawn(async move {
                let handler = move |run: Run, _: ()| async move {
                    run.step("slow", async || {
                        sleep(Duration::from_secs(5)).await;
                        Ok::<_, TaskError>(name.to_owned())
                    })
                    .await
                };
                let client = database.connect(&way);
                let worker = Worker::new(&client).lease(Duration::from_secs(3)).handler("slow", handler);
                worker.run(std::future::pending()).await
            });
            process
        };
        let first = start("first");
        let id = client.submit(NewTask::new("slow", &())).await.expect("accepted").id;
        sleep(Duration::from_secs(2)).await;
        first.freeze();
        let _second = start("second");
        sleep(Duration::from_secs(6)).await;
        first.thaw();
        let task = client.wait(id, Duration::from_secs(60)).await.expect("it ends");
        assert_eq!(task.result.expect("a result").get(), r#""second""#);
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_is_kept_although_another_task_of_the_worker_is_asked_something_all_the_time() {
        let _simulation = Simulation::begin(6, None);
        let (database, slow) = (Database::new().expect("made"), Way::new(6));
        let client = database.connect(&slow);
        client.announce(&["long"]).await.expect("the store answers");
        let mut ids = Vec::new();
        for _ in 0..2 {
            ids.push(client.submit(NewTask::new("long", &())).await.expect("accepted").id);
        }
        slow.set(Odds { delayed: 1_000, longest: Duration::from_millis(400), ..Odds::CALM });
        let handler = |run: Run, _: ()| async move {
            let fence = run.fence();
            run.step("long", async || {
                sleep(Duration::from_secs(12)).await;
                Ok::<_, TaskError>(fence)
            })
            .await
        };
        let worker = Worker::new(&client).lease(Duration::from_secs(3)).handler("long", handler);
        let process = Process::new();
        process.spawn(async move { worker.run(std::future::pending()).await });
        for _ in 0..8 {
            let (client, asked) = (client.clone(), ids[0]);
            process.spawn(async move { while client.signal(asked, "news", &()).await.is_ok() {} });
        }
        for id in ids {
            let task = client.wait(id, Duration::from_secs(60)).await.expect("it ends");
            assert_eq!(task.result.expect("a result").get(), "1", "no lease was lost");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn calls_go_wrong_on_the_way_and_hints_get_lost() {
        let _simulation = Simulation::begin(3, None);
        let (database, way, count) = (Database::new().expect("made"), Way::new(3), Arc::new(AtomicU64::new(0)));
        let calm = Way::new(4);
        let client = database.connect(&calm);
        client.announce(&["twice"]).await.expect("the store answers");
        let often = Odds {
            lost: 100,
            unanswered: 100,
            delayed: 100,
            repeated: 100,
            late: 100,
            unheard: 500,
            ..Odds::CALM
        };
        way.set(Odds { longest: Duration::from_millis(400), ..often });
        let (_one, _two) = (worker(&database, &way, &count), worker(&database, &way, &count));
        let mut ids = Vec::new();
        for _ in 0..20 {
            ids.push(client.submit(NewTask::new("twice", &())).await.expect("accepted").id);
        }
        for id in ids {
            let task = client.wait(id, Duration::from_secs(7_200)).await.expect("it ends");
            assert_eq!(task.state, State::Completed, "{:?}", task.error);
        }
        let fired = way.fired();
        assert!(Fault::ALL.iter().all(|fault| fired.get(fault).is_some_and(|count| *count > 0)), "{fired:?}");
        assert!(calm.fired().keys().all(|fault| *fault == Fault::Overtaken), "{:?}", calm.fired());
    }

    #[tokio::test(start_paused = true)]
    async fn a_way_that_is_cut_lets_nothing_through() {
        let _simulation = Simulation::begin(5, None);
        let (database, way) = (Database::new().expect("made"), Way::new(5));
        let client = database.connect(&way);
        way.set(Odds::CUT);
        assert!(client.announce(&["twice"]).await.is_err());
        way.set(Odds::CALM);
        client.announce(&["twice"]).await.expect("the store answers again");
    }
}
