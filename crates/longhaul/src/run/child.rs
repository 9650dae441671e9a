//! Children: tasks that a run makes and waits for.
//!
//! A child's id is made from its parent's and from the step that makes it, so a step that is
//! started again after a crash finds the child it made before. A child shares its parent's tenant
//! and ends no later than it must; a cancel of the parent cancels everything below it.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::json;
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};
use uuid::Uuid;

use futures_util::StreamExt;
use futures_util::stream;

use super::desk::{Address, Asking, Turn};
use super::driver::patiently;
use super::step::decode;
use super::{Operation, Run, StepContext};
use crate::error::TaskError;
use crate::event::NewEvent;
use crate::record::{Effect, Op, Record};
use crate::store::SubmitRefused;
use crate::task::{Deadline, NewTask, State, TaskId, timestamp};

/// Where the outcomes of children arrive.
pub(crate) const CHILD: &str = "child/";

/// How the names of steps that make children begin.
pub(crate) const SPAWN: &str = "spawn ";

/// A task that this run made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Child {
    /// Its id.
    pub id: TaskId,
}

/// How a child ended, as its parent is told.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ChildEnded {
    pub(crate) state: State,
    pub(crate) result: Option<Box<RawValue>>,
    pub(crate) error: Option<TaskError>,
}

impl Run {
    /// Makes a task that belongs to this one; a step named `spawn HANDLER`. It runs on its own;
    /// [`Run::join`] waits for it.
    pub async fn spawn(&self, task: NewTask) -> Result<Child, TaskError> {
        let mut children = self.spawn_all(vec![task]).await?;
        children.pop().ok_or_else(|| TaskError::fatal("bad_child", "there is no task to make"))
    }

    /// As [`Run::spawn`]; when what this task did is undone, what the child did is undone too, by a task of
    /// its own, in its place among the steps of this one. That one is waited for, and its failure is this one's.
    pub async fn spawn_with_undo(&self, task: NewTask) -> Result<Child, TaskError> {
        let name = format!("{SPAWN}{}", task.handler);
        let work = move |context| self.submit_children(context, vec![task.clone()]);
        let mut children = self.step_with(name, work).undo_children().await?;
        children.pop().ok_or_else(|| TaskError::fatal("bad_child", "there is no task to make"))
    }

    /// Makes many at once, in one step.
    pub async fn spawn_all(&self, tasks: Vec<NewTask>) -> Result<Vec<Child>, TaskError> {
        let Some(first) = tasks.first() else { return Ok(Vec::new()) };
        let name = format!("{SPAWN}{}", first.handler);
        self.step_with(name, move |context| self.submit_children(context, tasks.clone())).await
    }

    async fn submit_children(&self, context: StepContext, tasks: Vec<NewTask>) -> Result<Vec<Child>, TaskError> {
        let mut children = Vec::with_capacity(tasks.len());
        for (number, mut task) in tasks.into_iter().enumerate() {
            if task.key.is_some() || task.dedupe_window.is_some() {
                return Err(TaskError::fatal(
                    "bad_child",
                    "a child has no key and no window of its own; its step sees to it that it is made once",
                ));
            }
            task.id = child_id(self.id(), &format!("{}/{number}", context.idempotency_key));
            self.tenant().clone_into(&mut task.tenant);
            task.deadline = self.earlier_deadline(task.deadline);
            task.parent = Some(self.id());
            task.traceparent = task.traceparent.or_else(|| context.traceparent.clone());
            task.validate().map_err(|invalid| TaskError::fatal("bad_child", invalid.to_string()))?;
            children.push(task);
        }
        let ids: Vec<Child> = children.iter().map(|task| Child { id: task.id }).collect();
        let answers = self.inner.engine.submits.many(children).await;
        for answer in answers.map_err(|error| TaskError::retryable("store", error.to_string()))? {
            answer.map_err(|error| TaskError::retryable("store", error.to_string()))?.map_err(refused)?;
        }
        Ok(ids)
    }

    /// A child must be over when its parent must.
    fn earlier_deadline(&self, own: Option<Deadline>) -> Option<Deadline> {
        let Some(parents) = self.inner.lease.deadline.map(timestamp) else { return own };
        let own = match own {
            Some(Deadline::At(at)) => at,
            Some(Deadline::After(time)) => {
                timestamp(self.now_micros().saturating_add(crate::store::clock::micros(time)))
            }
            None => parents,
        };
        Some(Deadline::At(own.min(parents)))
    }

    /// Waits for a child and gives its result. One that failed is the error `child_failed`, one
    /// that was cancelled `child_cancelled`, with its own error as the cause; one that was removed
    /// before a resumed parent heard of it `child_gone`.
    pub async fn join<T: DeserializeOwned>(&self, child: Child) -> Result<T, TaskError> {
        let id = child.id.to_string();
        let title = format!("join {id}");
        let address = Some(Address::At(format!("{CHILD}{id}")));
        let operation = self.take_place(Asking { address, ..Asking::plain(&title, Op::Join) })?;
        let message = loop {
            match operation.turn().await {
                Turn::Recorded(message) => break message?,
                Turn::Start(_) if self.is_gone(child).await? => self.gone(&operation, child).await,
                Turn::Start(_) => self.desk().wait(&operation.key, operation.waiting("child", &id, None)),
            }
        };
        let ended: ChildEnded = decode(&operation.key, &message)?;
        let error = match (ended.state, ended.result) {
            (State::Completed, Some(result)) => return decode(&operation.key, &result),
            (State::Cancelled, _) => TaskError::fatal("child_cancelled", format!("child {id} was cancelled")),
            _ => TaskError::fatal("child_failed", format!("child {id} failed")),
        };
        let error = error.detail("child", id);
        Err(match ended.error {
            Some(cause) => error.caused_by(cause),
            None => error,
        })
    }

    /// Whether nobody will tell any more how the child ended: it was removed while this task had ended
    /// too, and this one was resumed since.
    async fn is_gone(&self, child: Child) -> Result<bool, TaskError> {
        if !self.desk().journal().was_resumed() {
            return Ok(false);
        }
        let asked = [(child.id, 0)];
        let known = patiently(|| self.inner.engine.store.advanced(&asked)).await;
        let known = known.map_err(|error| TaskError::retryable("store", error.to_string()))?;
        Ok(known.iter().all(|(_, newest)| *newest == 0))
    }

    async fn gone(&self, operation: &Operation, child: Child) {
        let message = format!("child {} was removed, and how it ended with it", child.id);
        let error = TaskError::fatal("child_gone", message).detail("child", child.id.to_string());
        let step = operation.key.1.clone();
        let event = NewEvent::of_step("step.failed", &step, json!({"error": error, "last": true}));
        let started = self.now_micros();
        let record = Record::Failed { step, effect: Effect::Read, attempt: 1, started, last: true, error };
        operation.record(record, [event]).await;
    }

    /// Makes these tasks and waits for all of them, at most `at_once` of them at a time. The
    /// outcomes are in the order of the tasks.
    pub async fn join_all<T: DeserializeOwned + Send>(
        &self,
        tasks: Vec<NewTask>,
        at_once: usize,
    ) -> Result<Vec<Result<T, TaskError>>, TaskError> {
        if tasks.len() <= at_once {
            let children = self.spawn_all(tasks).await?;
            return Ok(futures_util::future::join_all(children.into_iter().map(|child| self.join(child))).await);
        }
        let one = |(number, task): (usize, NewTask)| async move {
            let name = format!("{SPAWN}{}", task.handler);
            let spawned = self
                .step_with(name, move |context| self.submit_children(context, vec![task.clone()]))
                .key(number.to_string())
                .await;
            match spawned?.pop() {
                Some(child) => Ok::<_, TaskError>(self.join(child).await),
                None => Err(TaskError::fatal("bad_child", "there is no task to make")),
            }
        };
        let outcomes = stream::iter(tasks.into_iter().enumerate()).map(one).buffered(at_once.max(1));
        let outcomes: Vec<Result<Result<T, TaskError>, TaskError>> = outcomes.collect().await;
        outcomes.into_iter().collect()
    }
}

fn refused(refused: SubmitRefused) -> TaskError {
    let message = format!("a child was not accepted: {refused}");
    match refused {
        SubmitRefused::QueueFull { .. } => TaskError::retryable("queue_full", message),
        SubmitRefused::ParentEnded { .. } => TaskError::fatal("parent_ended", message),
        _ => TaskError::fatal("bad_child", message),
    }
}

/// The id of a child: the time of its parent's, and the rest from the step that makes it.
pub(super) fn child_id(parent: TaskId, step: &str) -> TaskId {
    let hash = Sha256::digest(step);
    let mut bytes = *parent.0.as_bytes();
    bytes[6..].copy_from_slice(&hash[..10]);
    // Version 7, and the variant that goes with it.
    bytes[6] = 0x70 | (bytes[6] & 0x0f);
    bytes[8] = 0x80 | (bytes[8] & 0x3f);
    TaskId(Uuid::from_bytes(bytes))
}
