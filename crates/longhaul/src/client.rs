//! The client: how tasks are submitted, followed and steered from a program.

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};
use uuid::Uuid;

use crate::engine::Engine;
use crate::faults;
use crate::feed::{AllEvents, Cursor, Events};
use crate::live::Live;
use crate::outbox::ReplyRule;
use crate::record::Decision;
use crate::run::journal::prefix;
use crate::schedule::Schedule;
use crate::state::{AgentState, StatePatch};
use crate::store::{
    Accepted, Action, Ask, AskStatus, Clock, Control, ControlRefused, Controlled, Filter, Floor, Page, QueueInfo,
    Settings, StoreError, SubmitRefused, WorkerInfo,
};
use crate::task::{DEFAULT_TENANT, Deadline, Invalid, NewTask, Phase, State, Task, TaskId};

mod access;
mod history;
mod locks;
mod overview;
mod reasons;
pub(crate) mod undo;

pub use history::{CheckpointInfo, Export, ExportedState};

/// How often a request is repeated that can be, and the pause before that.
const REPEATS: usize = 3;
const PAUSE: Duration = Duration::from_millis(200);

/// What can go wrong for a client.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The store could not do it.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The task was not accepted.
    #[error(transparent)]
    Refused(#[from] SubmitRefused),
    /// What was asked of the task is not possible.
    #[error(transparent)]
    Control(#[from] ControlRefused),
    /// There is no such task.
    #[error("there is no task {0}")]
    NotFound(TaskId),
    /// The request itself is wrong.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// There is no such schedule.
    #[error("there is no schedule '{0}'")]
    NoSchedule(String),
    /// There is no such endpoint.
    #[error("there is no endpoint '{0}'")]
    NoEndpoint(String),
    /// There is no such delivery.
    #[error("task {task} has no delivery {delivery}")]
    NoDelivery {
        /// The task.
        task: TaskId,
        /// What was asked for.
        delivery: Uuid,
    },
    /// The task did not end in time; it goes on.
    #[error("task {task} has not ended after {waited:?}; it is {state}")]
    TimedOut {
        /// The task.
        task: TaskId,
        /// How long was waited.
        waited: Duration,
        /// Where it stands.
        state: crate::task::State,
    },
}

fn message_of(message: &impl Serialize) -> Result<Box<RawValue>, ControlRefused> {
    to_raw_value(message)
        .map_err(|error| Invalid::new("message", format!("cannot be written as JSON: {error}")).into())
}

/// A handle to a store and the tasks in it. Cheap to clone; clones share one connection to the
/// store and its batches.
#[derive(Clone)]
pub struct Client {
    pub(crate) engine: Arc<Engine>,
    pub(crate) tenant: Arc<str>,
    actor: Arc<str>,
}

impl Client {
    /// Opens the store at `url`: `sqlite:PATH`, `postgres://USER@HOST/DATABASE` or `memory:`. A
    /// store that does not exist yet is created.
    pub async fn open(url: &str) -> Result<Self, Error> {
        Ok(Self::of_engine(Engine::open(url).await?))
    }

    pub(crate) fn of_engine(engine: Arc<Engine>) -> Self {
        Self { engine, tenant: DEFAULT_TENANT.into(), actor: "client".into() }
    }

    /// For a run of a tenant's task.
    pub(crate) fn of_run(engine: &Arc<Engine>, tenant: &str, actor: &str) -> Self {
        Self { engine: Arc::clone(engine), tenant: tenant.into(), actor: actor.into() }
    }

    /// The same store as seen by another tenant.
    pub fn for_tenant(&self, tenant: &str) -> Self {
        Self { tenant: tenant.into(), ..self.clone() }
    }

    /// The same client under the name of a person or program; it stands in events and audits.
    pub fn acting_as(&self, actor: &str) -> Self {
        Self { actor: actor.into(), ..self.clone() }
    }

    /// Submits a task. When this returns, the task is on disk.
    pub async fn submit(&self, task: NewTask) -> Result<Accepted, Error> {
        let task = self.own(task);
        if let Err(invalid) = task.validate().and_then(|()| self.check_reply(&task)) {
            let refused = Err(SubmitRefused::from(invalid));
            self.engine.meter.submitted(&refused);
            return Ok(refused?);
        }
        Ok(self.engine.submits.one(task).await??)
    }

    /// Submits many tasks, each on its own: one that is refused does not hurt the others. The
    /// answers are in the order of the tasks.
    pub async fn submit_many(&self, tasks: Vec<NewTask>) -> Result<Vec<Result<Accepted, Error>>, Error> {
        let checked: Vec<Result<(), Invalid>> = tasks.iter().map(|task| self.check_reply(task)).collect();
        let sound = tasks.into_iter().zip(&checked).filter(|(_, checked)| checked.is_ok());
        let sound = sound.map(|(task, _)| self.own(task)).collect();
        let mut answers = self.engine.submits.many(sound).await?.into_iter();
        let answer = |checked: Result<(), Invalid>| match checked {
            Ok(()) => answers.next().map(|answer| Ok(answer??)),
            Err(invalid) => {
                let refused = Err(SubmitRefused::from(invalid));
                self.engine.meter.submitted(&refused);
                Some(refused.map_err(Error::from))
            }
        };
        Ok(checked.into_iter().filter_map(answer).collect())
    }

    /// Lets submits of this process be refused whose [`NewTask::reply`](crate::NewTask::reply) this says is wrong, instead of
    /// finding that out when the result is there. The first rule stays.
    pub fn check_replies(&self, rule: ReplyRule) {
        let _ = self.engine.reply_rule.set(rule);
    }

    fn check_reply(&self, task: &NewTask) -> Result<(), Invalid> {
        match (&task.reply, self.engine.reply_rule.get()) {
            (Some(reply), Some(rule)) => rule(&reply.to).map_err(|problem| Invalid::new("reply", problem)),
            _ => Ok(()),
        }
    }

    fn own(&self, mut task: NewTask) -> NewTask {
        if *self.tenant != *task.tenant {
            task.tenant = self.tenant.to_string();
        }
        task
    }

    /// A task as it stands.
    pub async fn task(&self, id: TaskId) -> Result<Task, Error> {
        self.engine.store.task(&self.tenant, id).await?.ok_or(Error::NotFound(id))
    }

    /// Tasks, newest first unless the filter says otherwise.
    pub async fn list(&self, filter: &Filter) -> Result<Vec<Task>, Error> {
        Ok(self.page(filter).await?.tasks)
    }

    /// The same, with where to go on: a search looks at a bounded number of tasks at a time, so a page can
    /// be short and have a next one.
    pub async fn page(&self, filter: &Filter) -> Result<Page, Error> {
        filter.validate()?;
        Ok(self.engine.store.list(&self.tenant, filter).await?)
    }

    /// Waits until the task has ended, at most `timeout`.
    pub async fn wait(&self, id: TaskId, timeout: Duration) -> Result<Task, Error> {
        let mut follow = self.engine.hints.follow(id);
        let until = tokio::time::Instant::now() + timeout;
        loop {
            let task = self.task(id).await?;
            if task.state.is_final() {
                return Ok(task);
            }
            if tokio::time::timeout_at(until, follow.ended()).await.is_err() {
                let task = self.task(id).await?;
                if task.state.is_final() {
                    return Ok(task);
                }
                return Err(Error::TimedOut { task: id, waited: timeout, state: task.state });
            }
        }
    }

    /// The task's events after number `after` (0: from the first).
    pub async fn events(&self, id: TaskId, after: u64) -> Result<Events, Error> {
        // A number that was never given is as the newest one: what comes is what is new.
        let newest = self.task(id).await?.last_seq;
        Ok(Events::new(Arc::clone(&self.engine), id, after.min(newest)))
    }

    /// The events of all tasks of this tenant, after a place: `None` for what happens from now on,
    /// [`Cursor::START`] for everything that is kept.
    pub async fn all_events(&self, after: Option<&Cursor>) -> Result<AllEvents, Error> {
        AllEvents::start(Arc::clone(&self.engine), Arc::clone(&self.tenant), after).await
    }

    /// Text of the task as it comes, from runs in this process and in those that a [`Relay`](crate::Relay)
    /// joins with it; of a task of another tenant there is none.
    /// What comes before this is called, or faster than it is taken, is lost; the finished text is in the
    /// step's result.
    pub fn live(&self, id: TaskId) -> Live {
        self.engine.lives.listen(Arc::clone(&self.tenant), id)
    }

    /// The task's agent state and its version, if it has one.
    pub async fn state(&self, id: TaskId) -> Result<Option<(u64, AgentState)>, Error> {
        self.task(id).await?;
        Ok(self.engine.store.state(id).await?)
    }

    /// Changes the task's agent state; with `version`, only when it is still the current one.
    pub async fn patch_state(&self, id: TaskId, patch: StatePatch, version: Option<u64>) -> Result<u64, Error> {
        Ok(self.control(id, Action::Patch { patch, version, under: None }).await?.version)
    }

    /// Ends the task. A running one is told to stop and has a moment to record an effect that is
    /// under way; nothing new is accepted of it from now on.
    pub async fn cancel(&self, id: TaskId, reason: Option<&str>) -> Result<Controlled, Error> {
        self.control(id, Action::Cancel { undo: false, reason: reason.map(str::to_owned) }).await
    }

    /// As [`Client::cancel`], and asks to undo what was done also where that is not done anyway: by default
    /// it is, unless the handler says otherwise with [`Run::undo_on`](crate::Run::undo_on).
    pub async fn cancel_with_undo(&self, id: TaskId, reason: Option<&str>) -> Result<Controlled, Error> {
        self.control(id, Action::Cancel { undo: true, reason: reason.map(str::to_owned) }).await
    }

    /// Opens a failed or cancelled task again, under the same id: what was recorded stays, what
    /// failed is tried again. One that never began still waits for its `run_at`. Refused while a task is being
    /// cancelled or undone; nothing happens to any other task.
    pub async fn resume(&self, id: TaskId) -> Result<Controlled, Error> {
        let task = self.engine.store.task(&self.tenant, id).await?;
        if let Some(task) = task.filter(|task| matches!(task.state, State::Failed | State::Cancelled)) {
            self.check_what_it_took_over(&task).await?;
        }
        self.control(id, Action::Resume).await
    }

    /// Submits a new task that shares the recorded prefix of one that has ended: everything up to
    /// the step `from_step` (its name as in the events) is taken over and not run again, from there
    /// on it goes its own way, with other `input` if given. It has the queue, priority, tags,
    /// concurrency key and attempts of the original, and as much time as that had from its submit on. It
    /// never undoes what it took over, and takes over no approval. A task that was undone by request
    /// ([`Client::undo`]) has nothing that could be taken over, and is refused; so is the task that undid it.
    pub async fn fork(
        &self,
        id: TaskId,
        from_step: &str,
        input: Option<Box<RawValue>>,
    ) -> Result<Accepted, Error> {
        let task = self.task(id).await?;
        if !task.state.is_final() {
            let why = format!("the task is {}; only one that has ended can be forked", task.state);
            return Err(ControlRefused::WrongState(why).into());
        }
        if let Some(other) = task.undo_of {
            let why = format!("it only undoes what task {other} did, and has no steps of its own to go on from");
            return Err(ControlRefused::WrongState(why).into());
        }
        if let Some(undo) = task.undone_by {
            let why = format!(
                "task {undo} undoes what it did, so a fork would take over what is no longer done; submit it anew"
            );
            return Err(ControlRefused::WrongState(why).into());
        }
        self.check_what_it_took_over(&task).await?;
        let log = self.whole_log(id).await?;
        let prefix = prefix(&log, from_step).map_err(|error| ControlRefused::WrongState(error.message))?;
        let Some(prefix) = prefix else {
            let why = format!("the task has no step '{from_step}'; its events name those it has");
            return Err(ControlRefused::WrongState(why).into());
        };
        let mut fork = NewTask::with_raw(task.handler, input.unwrap_or(task.input));
        (fork.queue, fork.priority, fork.tags) = (task.queue, task.priority.get(), task.tags);
        (fork.concurrency_key, fork.max_attempts) = (task.concurrency_key, task.max_attempts);
        fork.deadline = task.deadline.map(|deadline| {
            let time = deadline.duration_since(task.created_at).unsigned_abs();
            Deadline::After(time)
        });
        fork.fork = Some((id, prefix));
        self.submit(fork).await
    }

    /// Changes the priority (0 to 9) and with it the place in line.
    pub async fn reprioritise(&self, id: TaskId, priority: u8) -> Result<Controlled, Error> {
        self.control(id, Action::Priority(priority)).await
    }

    /// Says what became of a step in doubt.
    pub async fn decide(
        &self,
        id: TaskId,
        step: &str,
        decision: Decision,
        reason: Option<&str>,
    ) -> Result<Controlled, Error> {
        let (step, reason) = (step.to_owned(), reason.map(str::to_owned));
        self.control(id, Action::Decide { step, decision, reason }).await
    }

    /// Sends the task a signal: a named message that its handler waits for, now or later. After an
    /// error that says "try again" it may have been delivered; [`Client::signal_once`] can be repeated.
    pub async fn signal(&self, id: TaskId, name: &str, message: &impl Serialize) -> Result<Controlled, Error> {
        let (name, message) = (name.to_owned(), message_of(message)?);
        self.control(id, Action::Signal { name, message, id: faults::now_v7(), again: false }).await
    }

    /// As [`Client::signal`], under an id of the caller's: however often it is sent, the task gets it once,
    /// and the answer to the others is that nothing was changed, also after the task has ended.
    pub async fn signal_once(
        &self,
        id: TaskId,
        name: &str,
        message: &impl Serialize,
        signal: Uuid,
    ) -> Result<Controlled, Error> {
        let (name, message) = (name.to_owned(), message_of(message)?);
        self.control(id, Action::Signal { name, message, id: signal, again: true }).await
    }

    /// Sends many tasks the same signal, a transaction for each thousand. The answers are in the
    /// order of the tasks; one that is refused does not hurt the others.
    pub async fn signal_many(
        &self,
        ids: &[TaskId],
        name: &str,
        message: &impl Serialize,
    ) -> Result<Vec<Result<Controlled, ControlRefused>>, Error> {
        let message = message_of(message)?;
        let mut answers = Vec::with_capacity(ids.len());
        for ids in ids.chunks(1_000) {
            let control = |&task: &TaskId| Control {
                tenant: self.tenant.to_string(),
                task,
                by: self.actor.to_string(),
                action: Action::Signal {
                    name: name.to_owned(),
                    message: message.clone(),
                    id: faults::now_v7(),
                    again: false,
                },
            };
            let controls: Vec<Control> = ids.iter().map(control).collect();
            answers.extend(self.deliver(&controls).await?);
        }
        Ok(answers)
    }

    /// Answers a question of the task: the one with this id, or the only open one.
    pub async fn answer(&self, id: TaskId, question: Option<&str>, answer: &str) -> Result<Controlled, Error> {
        let (question, answer) = (question.map(str::to_owned), answer.to_owned());
        self.control(id, Action::Answer { id: question, answer }).await
    }

    /// Approves what the task asks for: the approval with this id, or the only open one. With
    /// `digest`, only when it is still for what the one who decides saw.
    pub async fn approve(
        &self,
        id: TaskId,
        approval: Option<&str>,
        reason: Option<&str>,
        digest: Option<&str>,
    ) -> Result<Controlled, Error> {
        self.decide_approval(id, approval, true, reason, digest).await
    }

    /// Denies what the task asks for.
    pub async fn deny(
        &self,
        id: TaskId,
        approval: Option<&str>,
        reason: Option<&str>,
    ) -> Result<Controlled, Error> {
        self.decide_approval(id, approval, false, reason, None).await
    }

    async fn decide_approval(
        &self,
        id: TaskId,
        approval: Option<&str>,
        approve: bool,
        reason: Option<&str>,
        digest: Option<&str>,
    ) -> Result<Controlled, Error> {
        let own = |text: Option<&str>| text.map(str::to_owned);
        self.control(id, Action::Approve { id: own(approval), approve, reason: own(reason), digest: own(digest) })
            .await
    }

    /// The task's questions and approvals, oldest first. What was still open when the task ended, or began to undo
    /// what it did, has expired: nobody can answer it any more.
    pub async fn asks(&self, id: TaskId) -> Result<Vec<Ask>, Error> {
        let task = self.task(id).await?;
        let mut asks = self.engine.store.asks(&self.tenant, Some(id)).await?;
        if task.state.is_final() || task.phase == Phase::Compensating {
            for ask in asks.iter_mut().filter(|ask| ask.status == AskStatus::Pending) {
                ask.status = AskStatus::Expired;
            }
        }
        Ok(asks)
    }

    /// Everything that waits for a person, oldest first.
    pub async fn open_asks(&self) -> Result<Vec<Ask>, Error> {
        Ok(self.engine.store.asks(&self.tenant, None).await?)
    }

    /// Removes a task that has ended, with its log.
    pub async fn delete(&self, id: TaskId) -> Result<Controlled, Error> {
        self.control(id, Action::Delete).await
    }

    async fn control(&self, task: TaskId, action: Action) -> Result<Controlled, Error> {
        let control = Control { tenant: self.tenant.to_string(), task, by: self.actor.to_string(), action };
        let mut answers = self.deliver(&[control]).await?;
        let answer = answers.pop().ok_or_else(|| StoreError::Failed("the store gave no answer".to_owned()))?;
        match answer {
            Err(ControlRefused::NotFound) => Err(Error::NotFound(task)),
            other => Ok(other?),
        }
    }

    /// Asks the store; signals, which can be repeated under their ids, more than once when it does not
    /// answer.
    async fn deliver(&self, controls: &[Control]) -> Result<Vec<Result<Controlled, ControlRefused>>, StoreError> {
        let repeatable = controls.iter().all(|control| matches!(control.action, Action::Signal { .. }));
        let answer = self.engine.store.control(controls).await;
        if !repeatable || !answer.as_ref().is_err_and(StoreError::is_unavailable) {
            return answer;
        }
        let mut controls = controls.to_vec();
        for control in &mut controls {
            if let Action::Signal { again, .. } = &mut control.action {
                *again = true;
            }
        }
        for _ in 1..REPEATS {
            tokio::time::sleep(PAUSE).await;
            match self.engine.store.control(&controls).await {
                Err(error) if error.is_unavailable() => {}
                answer => return answer,
            }
        }
        tokio::time::sleep(PAUSE).await;
        self.engine.store.control(&controls).await
    }

    /// Sets bounds of queues, limits and the retention; what is not named stays as it was.
    pub async fn configure(&self, settings: &Settings) -> Result<(), Error> {
        Ok(self.engine.store.configure(settings).await?)
    }

    /// Makes handlers known without a worker, so that tasks for them are accepted before the
    /// first worker that has them starts.
    pub async fn announce(&self, handlers: &[&str]) -> Result<(), Error> {
        let id = faults::now_v7();
        let now = self.engine.store.clock().now().as_microsecond();
        let info = WorkerInfo {
            id,
            name: "announcement".to_owned(),
            handlers: handlers.iter().map(|&name| name.to_owned()).collect(),
            queues: Vec::new(),
            slots: 0,
            started_at: now,
            seen_at: now,
            running: 0,
        };
        self.engine.store.register(&info).await?;
        Ok(self.engine.store.retire(id).await?)
    }

    /// Creates a schedule, or replaces the one of the same name, and gives it with its next tick. The
    /// same schedule saved again (at every start of a program, say) changes nothing; a paused one
    /// stays paused.
    ///
    /// ```
    /// # use longhaul::{Client, NewTask, Schedule};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let client = Client::open("memory:").await?;
    /// let report = NewTask::new("report", &serde_json::json!({"of": "yesterday"}));
    /// let daily = Schedule::cron("daily-report", "0 9 * * 1-5", report).time_zone("Europe/Berlin");
    /// let daily = client.schedule(daily).await?;
    /// println!("first report at {}", daily.next_at.expect("not paused"));
    ///
    /// client.pause_schedule("daily-report").await?;
    /// assert!(client.schedules().await?[0].paused);
    /// client.unschedule("daily-report").await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn schedule(&self, mut schedule: Schedule) -> Result<Schedule, Error> {
        schedule.tenant = self.tenant.to_string();
        schedule.task = self.own(schedule.task);
        schedule.validate().and_then(|()| self.check_reply(&schedule.task)).map_err(SubmitRefused::from)?;
        Ok(self.engine.store.save_schedule(&schedule).await?.map_err(SubmitRefused::from)?)
    }

    /// All schedules, by name.
    pub async fn schedules(&self) -> Result<Vec<Schedule>, Error> {
        Ok(self.engine.store.schedules(&self.tenant).await?)
    }

    /// Removes a schedule; the tasks it submitted stay.
    pub async fn unschedule(&self, name: &str) -> Result<(), Error> {
        let removed = self.engine.store.remove_schedule(&self.tenant, name).await?;
        removed.then_some(()).ok_or_else(|| Error::NoSchedule(name.to_owned()))
    }

    /// Lets a schedule rest until it is resumed.
    pub async fn pause_schedule(&self, name: &str) -> Result<Schedule, Error> {
        let paused = self.engine.store.pause_schedule(&self.tenant, name, true).await?;
        paused.ok_or_else(|| Error::NoSchedule(name.to_owned()))
    }

    /// Lets a paused schedule go on with its next tick; those that passed meanwhile are not made up.
    pub async fn resume_schedule(&self, name: &str) -> Result<Schedule, Error> {
        let resumed = self.engine.store.pause_schedule(&self.tenant, name, false).await?;
        resumed.ok_or_else(|| Error::NoSchedule(name.to_owned()))
    }

    /// All queues.
    pub async fn queues(&self) -> Result<Vec<QueueInfo>, Error> {
        Ok(self.engine.store.queues().await?)
    }

    /// All workers, of every process.
    pub async fn workers(&self) -> Result<Vec<WorkerInfo>, Error> {
        Ok(self.engine.store.workers().await?)
    }

    /// Makes what the engine of this process counts known to a registry: submits, claims, runs, steps,
    /// batches, sweeps. Clones of one client share their numbers. `docs/observability.md` lists them.
    pub fn register_metrics(&self, registry: &mut prometheus_client::registry::Registry) {
        self.engine.meter.register(registry);
    }

    /// The store's clock, as this process knows it. Tests can move it.
    pub fn clock(&self) -> &Clock {
        self.engine.store.clock()
    }

    /// Measures what the storage itself can do, without the engine, in about `seconds`.
    pub async fn floor(&self, seconds: f64) -> Result<Floor, Error> {
        Ok(self.engine.store.floor(seconds).await?)
    }
}
