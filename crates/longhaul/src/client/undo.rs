//! Undo by request: the task that undoes another, made from what that one recorded.

use super::{Client, Error, REPEATS};
use crate::error::TaskError;
use crate::run::journal::to_undo;
use crate::store::{Accepted, ControlRefused, SubmitRefused, UNDO_OF};
use crate::task::{Invalid, NewTask, State, Task, TaskId, UndoOf};

/// Whether what a task did can be undone now.
enum Undoable {
    /// By this task.
    By(Box<NewTask>),
    /// It has not ended.
    NotEnded(State),
    /// It is itself the undo of this one.
    IsUndo(TaskId),
    /// This one is at it.
    UnderWay(TaskId),
    /// This one did it.
    Undone(TaskId),
    /// This one did it and was removed.
    Unknown(TaskId),
    /// No step was completed that says how.
    Nothing,
}

/// How the undo of a child stands.
pub(crate) enum ChildUndo {
    /// There is nothing of it any more.
    Done,
    /// This task has to end first.
    Waits(TaskId),
    /// It failed.
    Failed(TaskError),
}

impl Client {
    /// Undoes what a task did that has ended, as a saga undoes it: every completed step that can be
    /// undone and was not, the last completed first. That is a new task, whose `undo_of` is this one's
    /// id: it replays the handler from what was recorded and ends `completed` with the names of the
    /// steps as `{"undone": […]}`, beside `not_undoable` if something was completed that may not happen twice and that
    /// nothing says how to undo, or `failed` with `compensation_failed`; then the undo can be asked
    /// for again. What children did that were made with
    /// [`Run::spawn_with_undo`](crate::Run::spawn_with_undo) is undone too, in its place. Refused with the reason when the task has not ended, when nothing is left to undo, or
    /// when another undo has begun. A task that was undone cannot be resumed.
    pub async fn undo(&self, id: TaskId, reason: Option<&str>) -> Result<Accepted, Error> {
        let refused = |why: String| Err(Error::from(ControlRefused::WrongState(why)));
        for _ in 0..REPEATS {
            match self.undoable(id, reason).await? {
                Undoable::By(undo) => match self.submit(*undo).await {
                    Err(error) if must_look_again(&error) => {}
                    answer => return answer,
                },
                Undoable::NotEnded(state) => {
                    return refused(format!("the task is {state}; cancel it, or undo it when it has ended"));
                }
                Undoable::IsUndo(other) => return refused(format!("it is itself the undo of task {other}")),
                Undoable::UnderWay(before) => return refused(format!("task {before} is undoing it")),
                Undoable::Undone(before) => return refused(format!("it was undone by task {before}")),
                Undoable::Unknown(before) => {
                    return refused(format!("task {before} undid it and is gone, and with it what was undone"));
                }
                Undoable::Nothing => {
                    return refused("nothing is left to undo: no step was completed that says how".to_owned());
                }
            }
        }
        refused("others open or undo the task at this very moment; try again".to_owned())
    }

    /// Sees to it that what a child did is undone, by a task with this id unless another is at it already.
    /// Can be asked again and again.
    pub(crate) async fn undo_child(&self, child: TaskId, own: TaskId, reason: &str) -> Result<ChildUndo, Error> {
        for _ in 0..REPEATS {
            if let Some(undo) = self.engine.store.task(&self.tenant, own).await? {
                return Ok(match undo.state {
                    State::Completed => ChildUndo::Done,
                    State::Failed | State::Cancelled => ChildUndo::Failed(why_not(undo)),
                    _ => ChildUndo::Waits(own),
                });
            }
            let mut undo = match self.undoable(child, Some(reason)).await {
                Ok(Undoable::By(undo)) => undo,
                Ok(Undoable::NotEnded(_)) => return Ok(ChildUndo::Waits(child)),
                Ok(Undoable::UnderWay(before)) => return Ok(ChildUndo::Waits(before)),
                Ok(Undoable::Undone(_) | Undoable::Nothing) => return Ok(ChildUndo::Done),
                Ok(Undoable::IsUndo(_) | Undoable::Unknown(_)) | Err(Error::NotFound(_)) => {
                    let message = format!("child {child} was removed, and what it did is no longer known");
                    return Ok(ChildUndo::Failed(TaskError::fatal("child_gone", message)));
                }
                Err(error) => return Err(error),
            };
            undo.id = own;
            match self.submit(*undo).await {
                Ok(_) => return Ok(ChildUndo::Waits(own)),
                Err(error) if must_look_again(&error) => {}
                Err(error) => return Err(error),
            }
        }
        // Others are quicker: look again in a while.
        Ok(ChildUndo::Waits(child))
    }

    /// The task that undoes what this one took over, if it is a fork: of the one it was made of, or of one before that.
    pub(super) async fn undo_of_what_it_took_over(&self, fork: &Task) -> Result<Option<TaskId>, Error> {
        let mut origin = fork.fork_of;
        while let Some(id) = origin {
            // Of one that was removed nothing is known any more.
            let Some(task) = self.engine.store.task(&self.tenant, id).await? else { break };
            if task.undone_by.is_some() {
                return Ok(task.undone_by);
            }
            origin = task.fork_of;
        }
        Ok(None)
    }

    /// Refuses to go on with a fork whose beginning is no longer done.
    pub(super) async fn check_what_it_took_over(&self, fork: &Task) -> Result<(), Error> {
        match self.undo_of_what_it_took_over(fork).await? {
            Some(undo) => {
                let why = format!("task {undo} undoes what it took over as a fork; submit it anew");
                Err(ControlRefused::WrongState(why).into())
            }
            None => Ok(()),
        }
    }

    /// How an undo of the task stands, and what would begin one.
    async fn undoable(&self, id: TaskId, reason: Option<&str>) -> Result<Undoable, Error> {
        let task = self.task(id).await?;
        let Some(finished_at) = task.finished_at.filter(|_| task.state.is_final()) else {
            return Ok(Undoable::NotEnded(task.state));
        };
        if let Some(other) = task.undo_of {
            return Ok(Undoable::IsUndo(other));
        }
        let mut known = id;
        if let Some(before) = task.undone_by {
            match self.engine.store.task(&self.tenant, before).await?.map(|undo| undo.state) {
                // What that one undid is undone; the rest is tried again.
                Some(State::Failed) => known = before,
                Some(State::Completed) => return Ok(Undoable::Undone(before)),
                Some(_) => return Ok(Undoable::UnderWay(before)),
                None => return Ok(Undoable::Unknown(before)),
            }
        }
        let why = match reason {
            Some(reason) => format!("undone by request of {}: {reason}", self.actor),
            None => format!("undone by request of {}", self.actor),
        };
        let why = TaskError::fatal("undo_requested", why);
        let refused = |error: TaskError| Error::from(ControlRefused::WrongState(error.message));
        let records = to_undo(&self.whole_log(known).await?, id, why).map_err(refused)?;
        let Some(records) = records else { return Ok(Undoable::Nothing) };
        let mut undo = NewTask::with_raw(task.handler, task.input);
        (undo.queue, undo.priority, undo.tags) = (task.queue, task.priority.get(), task.tags);
        (undo.concurrency_key, undo.max_attempts) = (task.concurrency_key, task.max_attempts);
        let finished_at = finished_at.as_microsecond();
        undo.undo = Some(UndoOf { task: id, finished_at, before: task.undone_by, records });
        Ok(Undoable::By(Box::new(undo)))
    }
}

/// It was opened again, or someone else was quicker.
fn must_look_again(error: &Error) -> bool {
    matches!(error, Error::Refused(SubmitRefused::Invalid(Invalid { field: UNDO_OF, .. })))
}

fn why_not(undo: Task) -> TaskError {
    let message = format!("task {}, which was to undo it, has {}", undo.id, undo.state);
    let error = TaskError::fatal("child_not_undone", message).detail("undo", undo.id.to_string());
    match undo.error {
        Some(cause) => error.caused_by(cause),
        None => error,
    }
}
