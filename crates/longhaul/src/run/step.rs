//! One step of a run: recorded once, replayed afterwards, tried again by its policy.

use std::future::{Future, IntoFuture, poll_fn};
use std::pin::Pin;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Value, json};

use super::desk::{Asking, Turn, Undo, UndoHow};
use super::journal::{Key, doubtful};
use super::told::check_event_type;
use super::{Operation, Run};
use crate::error::TaskError;
use crate::event::NewEvent;
use crate::faults;
use crate::meter::StepEnded;
use crate::record::{Effect, Op, Record};
use crate::retry::RetryPolicy;
use crate::task::{TaskId, Waiting};

type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;
type Work<'a, T> = Box<dyn FnMut(StepContext) -> BoxFuture<'a, Result<T, TaskError>> + Send + 'a>;
type Tells<'a, T> = Box<dyn FnOnce(&T) -> Vec<(String, Value)> + Send + 'a>;

/// What a step's function may want to know, to pass it on to the outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepContext {
    /// The task.
    pub task: TaskId,
    /// The step's name, unique in the task.
    pub step: String,
    /// The same for every try of this step, also after a crash: let the other side use it to
    /// recognise a repeated call.
    pub idempotency_key: String,
    /// 1 for the first try.
    pub attempt: u32,
    /// The run's fence: let the other side refuse anything smaller than the largest it has seen.
    pub fence: u64,
    /// The W3C `traceparent` for calls to the outside: that of this try when the process exports traces
    /// (see [`crate::trace`]), else the one the task was submitted with.
    pub traceparent: Option<String>,
}

/// A step that is about to run; `.await` it.
#[must_use = "a step does nothing until it is awaited"]
pub struct Step<'a, T> {
    run: &'a Run,
    name: String,
    key: Option<String>,
    effect: Effect,
    policy: RetryPolicy,
    timeout: Option<Duration>,
    work: Work<'a, T>,
    verify: Option<Work<'a, Option<T>>>,
    undo: Option<Undo>,
    undoable: bool,
    kind: Option<&'static str>,
    deferred: bool,
    tells: Option<Tells<'a, T>>,
}

impl<'a, T> Step<'a, T>
where
    T: Serialize + DeserializeOwned + Send + 'a,
{
    pub(super) fn new<F, Fut, E>(run: &'a Run, name: String, work: F) -> Self
    where
        F: FnMut(StepContext) -> Fut + Send + 'a,
        Fut: Future<Output = Result<T, E>> + Send + 'a,
        E: Into<TaskError>,
    {
        Self {
            run,
            name,
            key: None,
            effect: Effect::default(),
            policy: RetryPolicy::default(),
            timeout: None,
            work: boxed(work),
            verify: None,
            undo: None,
            undoable: false,
            kind: None,
            deferred: false,
            tells: None,
        }
    }

    /// Tells steps of the same name apart that are under way at the same time.
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// What kind of effect it has; `idempotent` by default.
    pub fn effect(mut self, effect: Effect) -> Self {
        self.effect = effect;
        self
    }

    /// What it is called among the task's steps instead of `step`: `model`, `tool`, …
    pub fn kind(mut self, kind: &'static str) -> Self {
        self.kind = Some(kind);
        self
    }

    /// Its record may wait for the run's next commit, and its result is given at once: less is written,
    /// and a crash before that runs it again, under the same idempotency key. Everything that is recorded
    /// after it is written with it or later. Only for `read` and `idempotent` steps that are not undone;
    /// of others it changes nothing.
    pub fn deferred(mut self, yes: bool) -> Self {
        self.deferred = yes;
        self
    }

    /// Events of one's own (type and data, as for [`Run::publish`]) that are told in the transaction of
    /// its record. Asked for once, when the step has a result; not in a replay, and not for a result that
    /// a person gave.
    pub fn tells(mut self, events: impl FnOnce(&T) -> Vec<(String, Value)> + Send + 'a) -> Self {
        self.tells = Some(Box::new(events));
        self
    }

    /// Tries in all, 3 by default. Failed tries are recorded, so they count over crashes too.
    pub fn attempts(mut self, attempts: u32) -> Self {
        self.policy.attempts = attempts.max(1);
        self
    }

    /// How often to try and how long to wait in between.
    pub fn retry(mut self, policy: RetryPolicy) -> Self {
        self.policy = policy;
        self
    }

    /// How long one try may take.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Finds out whether an effect in doubt happened: `Some(result)` when it did, `None` when it
    /// did not and may be tried again. Without it, the task waits for a person's decision.
    pub fn verify<F, Fut, E>(mut self, verify: F) -> Self
    where
        F: FnMut(StepContext) -> Fut + Send + 'a,
        Fut: Future<Output = Result<Option<T>, E>> + Send + 'a,
        E: Into<TaskError>,
    {
        self.verify = Some(boxed(verify));
        self
    }

    /// How to undo it. When the task fails for good, is cancelled or misses its deadline (unless
    /// [`Run::undo_on`] says otherwise), what was completed is undone, the last completed first; each undo is a step itself, tried three times
    /// unless [`Step::undo_retry`] says otherwise. After a crash the handler is replayed to get here
    /// again, so an undo may only use what it was given: the result, and what it captured.
    pub fn undo<F, Fut, E>(self, mut undo: F) -> Self
    where
        F: FnMut(T) -> Fut + Send + 'static,
        Fut: Future<Output = Result<(), E>> + Send + 'static,
        E: Into<TaskError>,
    {
        self.undo_with(move |_, result| undo(result))
    }

    /// As [`Step::undo`], for a function that wants to know its idempotency key, attempt and fence.
    pub fn undo_with<F, Fut, E>(mut self, mut undo: F) -> Self
    where
        F: FnMut(StepContext, T) -> Fut + Send + 'static,
        Fut: Future<Output = Result<(), E>> + Send + 'static,
        E: Into<TaskError>,
    {
        let name = self.name.clone();
        let work = move |context: StepContext, result: &RawValue| -> BoxFuture<'static, Result<(), TaskError>> {
            match decode(&(0, name.clone()), result) {
                Ok(result) => {
                    let undone = undo(context, result);
                    Box::pin(async move { undone.await.map_err(Into::into) })
                }
                Err(error) => Box::pin(std::future::ready(Err(error))),
            }
        };
        let known = self.undo.take();
        let (policy, timeout) = known.map_or_else(Default::default, |undo| (undo.policy, undo.timeout));
        self.undo = Some(Undo { how: UndoHow::Call(Box::new(work)), policy, timeout });
        self
    }

    /// It makes tasks, and is undone by undoing what they did.
    pub(super) fn undo_children(mut self) -> Self {
        self.undo = Some(Undo { how: UndoHow::Children, policy: RetryPolicy::default(), timeout: None });
        self
    }

    /// How often to try the undo, and how long to wait in between; to be said after the undo.
    pub fn undo_retry(mut self, policy: RetryPolicy) -> Self {
        if let Some(undo) = &mut self.undo {
            undo.policy = policy;
        }
        self
    }

    /// How often to try the undo in all; to be said after the undo.
    pub fn undo_attempts(mut self, attempts: u32) -> Self {
        if let Some(undo) = &mut self.undo {
            undo.policy.attempts = attempts.max(1);
        }
        self
    }

    /// How long one try of the undo may take; to be said after the undo.
    pub fn undo_timeout(mut self, timeout: Duration) -> Self {
        if let Some(undo) = &mut self.undo {
            undo.timeout = Some(timeout);
        }
        self
    }

    async fn perform(mut self, operation: Result<Operation, TaskError>) -> Result<T, TaskError> {
        let operation = operation?;
        loop {
            let turn = operation.turn().await;
            let unfinished = match turn {
                Turn::Recorded(outcome) => return decode(&operation.key, &outcome?),
                Turn::Start(unfinished) => unfinished,
            };
            let mut tries = unfinished.tries;
            let mut doubt = doubtful(self.effect, &unfinished);
            loop {
                if let Some(why) = doubt.take() {
                    self.run.inner.meter.step_ended(StepEnded::InDoubt);
                    match self.ask_verify(&operation, tries).await {
                        // It happened: recorded, and released like any other result.
                        Some(true) => break,
                        // It did not: a failed try like any other.
                        Some(false) if self.policy.allows(tries) => {
                            operation.rest(self.policy.delay(tries)).await;
                        }
                        Some(false) => {
                            let error = step_failed(&operation.key.1, tries, why);
                            self.run.inner.meter.step_ended(StepEnded::Failed);
                            operation.settle(self.ended(tries, self.run.now_micros()), Err(error)).await;
                            break;
                        }
                        None => {
                            operation.wait_for_decision();
                            break;
                        }
                    }
                }
                tries += 1;
                match self.try_once(&operation, tries).await {
                    Tried::Settled => break,
                    Tried::Again => {}
                    Tried::InDoubt(why) => doubt = Some(why),
                }
            }
        }
    }

    /// Asks `verify` about an effect in doubt. `None`: it could not tell, or there is none.
    async fn ask_verify(&mut self, operation: &Operation, attempt: u32) -> Option<bool> {
        let verify = self.verify.as_mut()?;
        let mut asked = self.run.try_verify(&operation.key.1, attempt);
        let context = self.run.context(&operation.key, attempt, asked.traceparent.take());
        match asked.watch(|| verify(context)).await {
            Ok(Some(result)) => {
                asked.verified(Ok(true));
                let outcome = self.outcome(operation, &result);
                operation.settle(self.ended(attempt, self.run.now_micros()), outcome).await;
                Some(true)
            }
            Ok(None) => {
                asked.verified(Ok(false));
                Some(false)
            }
            Err(error) => {
                asked.verified(Err(&error));
                None
            }
        }
    }

    /// One try: intent, effect, record.
    async fn try_once(&mut self, operation: &Operation, attempt: u32) -> Tried {
        let run = self.run;
        let name = &operation.key.1;
        let started = run.now_micros();
        let begun = NewEvent::of_step("step.started", name, self.said(json!({"attempt": attempt}))).at(started);
        run.desk().rest(&operation.key);
        run.may_start_effect().await;
        if self.effect.needs_intent() {
            operation
                .record(Record::Intent { step: name.clone(), attempt, undoable: self.undoable }, [begun])
                .await;
        } else if self.is_deferred() {
            run.desk().tell_later(begun);
        } else {
            run.desk().tell(begun);
        }
        run.may_start_effect().await;
        run.desk().work(&operation.key);
        let mut tried = run.try_step(name, attempt);
        let context = run.context(&operation.key, attempt, tried.traceparent.take());
        let work = tried.watch(|| (self.work)(context));
        let work = async {
            faults::at("effect.before").await?;
            faults::after("effect.after", work.await).await
        };
        let outcome = match self.timeout {
            None => work.await,
            Some(limit) => tokio::time::timeout(limit, work)
                .await
                .unwrap_or_else(|_| Err(TaskError::in_doubt("timeout", format!("no result after {limit:?}")))),
        };
        let error = match outcome.and_then(|value| self.outcome(operation, &value)) {
            Ok(outcome) => {
                tried.completed();
                operation.settle(self.ended(attempt, started), Ok(outcome)).await;
                return Tried::Settled;
            }
            Err(error) => error,
        };
        if error.is_in_doubt() && self.effect.needs_intent() {
            tried.in_doubt(&error);
            let event = NewEvent::of_step("step.in_doubt", name, json!({"attempt": attempt, "error": error}));
            let record =
                Record::InDoubt { step: name.clone(), effect: self.effect, attempt, error: error.clone() };
            operation.record(record, [event]).await;
            return Tried::InDoubt(error);
        }
        if !error.retryable || !self.policy.allows(attempt) {
            tried.failed(&error);
            let error = step_failed(name, attempt, error);
            operation.settle(self.ended(attempt, started), Err(error)).await;
            return Tried::Settled;
        }
        let delay = self.policy.delay(attempt);
        tried.retried(&error, delay);
        let failed = NewEvent::of_step(
            "step.failed",
            name,
            self.said(json!({"attempt": attempt, "attempts": self.policy.attempts, "error": error,
                   "retry_in_ms": u64::try_from(delay.as_millis()).unwrap_or(u64::MAX)})),
        );
        let message = format!(
            "Step {name}: attempt {attempt} of {} failed ({}); trying again in {:.1} s",
            self.policy.attempts,
            error.message,
            delay.as_secs_f64()
        );
        let progress = run.progress_event("retrying", 0, 0, None, &message);
        let effect = self.effect;
        operation
            .record(
                Record::Failed { step: name.clone(), effect, attempt, started, last: false, error },
                [failed, progress],
            )
            .await;
        operation.rest(delay).await;
        Tried::Again
    }

    /// Whether its record may wait.
    fn is_deferred(&self) -> bool {
        self.deferred && !self.effect.needs_intent() && !self.undoable
    }

    fn ended(&self, attempt: u32, started: i64) -> Ended {
        let Self { effect, undoable, kind, .. } = *self;
        Ended { effect, undoable, deferred: self.is_deferred(), kind, attempt, started }
    }

    /// The result as it is recorded, and what is told with it.
    fn outcome(&mut self, operation: &Operation, value: &T) -> Result<Outcome, TaskError> {
        let result = encode(&operation.key, value)?;
        let mut events = Vec::new();
        for (kind, data) in self.tells.take().map(|tells| tells(value)).unwrap_or_default() {
            match check_event_type(&kind) {
                Ok(()) => events.push(NewEvent::of_step(kind, &operation.key.1, data)),
                // What happened is recorded all the same.
                Err(error) => tracing::error!(step = operation.key.1, kind, %error, "an event was not told"),
            }
        }
        Ok(Outcome { result, events })
    }

    /// What an event of the step says, with its kind.
    fn said(&self, data: Value) -> Value {
        with_kind(data, self.kind)
    }
}

/// How a step ended, beside its outcome.
struct Ended {
    effect: Effect,
    undoable: bool,
    deferred: bool,
    kind: Option<&'static str>,
    attempt: u32,
    started: i64,
}

/// What a step gave.
struct Outcome {
    result: Box<RawValue>,
    /// Told with it.
    events: Vec<NewEvent>,
}

fn with_kind(mut data: Value, kind: Option<&'static str>) -> Value {
    if let Some(kind) = kind {
        data["kind"] = kind.into();
    }
    data
}

enum Tried {
    /// Its outcome is recorded.
    Settled,
    /// It failed and may be tried again.
    Again,
    /// It may have happened.
    InDoubt(TaskError),
}

impl<'a, T> IntoFuture for Step<'a, T>
where
    T: Serialize + DeserializeOwned + Send + 'a,
{
    type Output = Result<T, TaskError>;
    type IntoFuture = BoxFuture<'a, Self::Output>;

    /// The step takes its place on the desk here, so that `join!` gives names in the order of
    /// its arguments.
    fn into_future(mut self) -> Self::IntoFuture {
        let undo = self.undo.take();
        self.undoable = undo.is_some();
        let operation = self.run.take_place(Asking {
            name: &self.name,
            key: self.key.as_deref(),
            op: Op::Step,
            effect: self.effect,
            address: None,
            undo,
        });
        Box::pin(self.perform(operation))
    }
}

fn boxed<'a, T, F, Fut, E>(mut work: F) -> Work<'a, T>
where
    F: FnMut(StepContext) -> Fut + Send + 'a,
    Fut: Future<Output = Result<T, E>> + Send + 'a,
    E: Into<TaskError>,
{
    Box::new(move |context| {
        let work = work(context);
        Box::pin(async move { work.await.map_err(Into::into) })
    })
}

fn step_failed(step: &str, attempts: u32, cause: TaskError) -> TaskError {
    let times = if attempts == 1 { "1 attempt".to_owned() } else { format!("{attempts} attempts") };
    TaskError::fatal("step_failed", format!("step {step} failed after {times}: {}", cause.message))
        .detail("step", step)
        .detail("attempts", attempts)
        .caused_by(cause)
}

pub(super) fn encode<T: Serialize>(key: &Key, value: &T) -> Result<Box<RawValue>, TaskError> {
    to_raw_value(value).map_err(|error| {
        TaskError::fatal("bad_result", format!("the result of {} cannot be written as JSON: {error}", key.1))
    })
}

pub(super) fn decode<T: DeserializeOwned>(key: &Key, result: &RawValue) -> Result<T, TaskError> {
    serde_json::from_str(result.get()).map_err(|error| {
        TaskError::fatal(
            "result_changed",
            format!("the recorded result of {} is not of the type asked for: {error}", key.1),
        )
        .detail("step", key.1.clone())
    })
}

impl Operation {
    /// Waits until the operation is given its outcome or may start.
    pub(super) async fn turn(&self) -> Turn {
        poll_fn(|cx| self.run.desk().poll_turn(&self.key, cx)).await
    }

    /// Records something and waits until it is on disk.
    pub(super) async fn record(&self, record: Record, events: impl IntoIterator<Item = NewEvent>) {
        let batch = {
            let mut desk = self.run.desk();
            let record = desk.of_part(self.key.0, record);
            desk.record(record, events)
        };
        self.on_disk(batch).await;
    }

    /// Waits before the next try; a cancel need not wait for that.
    async fn rest(&self, delay: Duration) {
        self.run.desk().rest(&self.key);
        tokio::time::sleep(delay).await;
        self.run.desk().work(&self.key);
    }

    pub(super) async fn on_disk(&self, batch: u64) {
        poll_fn(|cx| self.run.desk().poll_disk(batch, cx)).await;
    }

    /// Records the outcome of the step; it is released in its turn.
    async fn settle(&self, ended: Ended, outcome: Result<Outcome, TaskError>) {
        let Ended { effect, undoable, deferred, kind, attempt, started } = ended;
        let step = self.key.1.clone();
        let outcome = match outcome {
            Ok(outcome) => outcome,
            Err(error) => {
                let said = with_kind(json!({"attempt": attempt, "error": error, "last": true}), kind);
                let event = NewEvent::of_step("step.failed", &step, said);
                return self
                    .record(Record::Failed { step, effect, attempt, started, last: true, error }, [event])
                    .await;
            }
        };
        let now = self.run.now_micros();
        let said = with_kind(json!({"attempt": attempt, "took_ms": (now - started) / 1_000}), kind);
        let event = NewEvent::of_step("step.completed", &step, said);
        let event = if deferred { event.at(now) } else { event };
        let events = outcome.events.into_iter().chain([event]);
        let result = outcome.result;
        let given_after = None;
        let record = Record::Done { step, op: Op::Step, effect, attempt, started, result, undoable, given_after };
        let batch = self.run.desk().give(self.key.0, record, events, deferred);
        if let Some(batch) = batch {
            self.on_disk(batch).await;
        }
    }

    pub(super) fn wait_for_decision(&self) {
        let waiting = Waiting { kind: "in_doubt".to_owned(), id: self.key.1.clone(), since: None, until: None };
        self.run.desk().wait(&self.key, waiting);
    }
}
