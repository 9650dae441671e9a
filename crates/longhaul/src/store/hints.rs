//! Hints: "something may have changed, look". They only save waiting; whoever listens also looks
//! by itself from time to time, so a lost hint costs latency, never correctness.
//!
//! The stores give hints after each transaction, and pass on those of other processes.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::{broadcast, watch};

use crate::relay::Relayed;
use crate::task::TaskId;

/// The hints of one process.
#[derive(Debug)]
pub struct Hints {
    /// Bumped when a task may have become ready.
    ready: watch::Sender<u64>,
    /// Bumped when the keeper has something to do at once.
    due: watch::Sender<u64>,
    /// Bumped when someone must turn to the lock service.
    sessions: watch::Sender<u64>,
    /// Bumped when other processes changed something, it is not known what.
    anything: watch::Sender<u64>,
    /// Bumped when any task may have new events.
    told: watch::Sender<u64>,
    /// Tasks that someone in this process follows.
    followed: Mutex<HashMap<TaskId, Followed>>,
    /// Tasks that someone asked something of.
    controlled: broadcast::Sender<TaskId>,
    /// Whoever passes hints on to other processes.
    relayed: Arc<Relayed>,
}

#[derive(Debug)]
struct Followed {
    changes: watch::Sender<u64>,
    /// Bumped when the task ended, or when it is not known what changed.
    ends: watch::Sender<u64>,
    followers: usize,
    seen: u64,
}

impl Followed {
    fn tell_all(&self) {
        self.changes.send_modify(|count| *count += 1);
        self.ends.send_modify(|count| *count += 1);
    }
}

impl Default for Hints {
    fn default() -> Self {
        Self {
            ready: watch::Sender::new(0),
            due: watch::Sender::new(0),
            sessions: watch::Sender::new(0),
            anything: watch::Sender::new(0),
            told: watch::Sender::new(0),
            followed: Mutex::default(),
            controlled: broadcast::Sender::new(1_024),
            relayed: Arc::default(),
        }
    }
}

impl Hints {
    /// A task may have become ready.
    pub fn tell_ready(&self) {
        self.tell_events();
        self.ready.send_modify(|count| *count += 1);
    }

    /// The keeper has something to do.
    pub fn tell_due(&self) {
        self.due.send_modify(|count| *count += 1);
    }

    /// Someone must turn to the lock service.
    pub fn tell_sessions(&self) {
        self.sessions.send_modify(|count| *count += 1);
    }

    /// Something changed elsewhere: a task may be ready, any followed task may have events.
    pub fn tell_anything(&self) {
        self.tell_ready();
        self.anything.send_modify(|count| *count += 1);
    }

    /// These tasks have new events.
    pub fn tell_changed(&self, tasks: impl IntoIterator<Item = TaskId>) {
        let mut tasks = tasks.into_iter().peekable();
        if tasks.peek().is_none() {
            return;
        }
        self.tell_events();
        let followed = self.lock();
        if followed.is_empty() {
            return;
        }
        for task in tasks {
            if let Some(entry) = followed.get(&task) {
                entry.changes.send_modify(|count| *count += 1);
            }
        }
    }

    /// These tasks have new events and have ended.
    pub fn tell_finished(&self, tasks: impl IntoIterator<Item = TaskId>) {
        let mut tasks = tasks.into_iter().peekable();
        if tasks.peek().is_none() {
            return;
        }
        self.tell_events();
        let followed = self.lock();
        if followed.is_empty() {
            return;
        }
        for task in tasks {
            if let Some(entry) = followed.get(&task) {
                entry.tell_all();
            }
        }
    }

    /// Someone asked something of this task.
    pub fn tell_controlled(&self, task: TaskId) {
        self.tell_finished([task]);
        // Nobody listening is fine: then no worker runs here.
        let _ = self.controlled.send(task);
    }

    /// Any task may have new events, or something else may be to be sent. Costs nothing while nobody
    /// listens.
    pub fn tell_events(&self) {
        if self.told.receiver_count() > 0 {
            self.told.send_modify(|count| *count += 1);
        }
    }

    pub(crate) fn relayed(&self) -> &Arc<Relayed> {
        &self.relayed
    }

    pub(crate) fn on_told(&self) -> watch::Receiver<u64> {
        self.told.subscribe()
    }

    pub(crate) fn on_ready(&self) -> watch::Receiver<u64> {
        self.ready.subscribe()
    }

    pub(crate) fn on_due(&self) -> watch::Receiver<u64> {
        self.due.subscribe()
    }

    pub(crate) fn on_sessions(&self) -> watch::Receiver<u64> {
        self.sessions.subscribe()
    }

    pub(crate) fn on_anything(&self) -> watch::Receiver<u64> {
        self.anything.subscribe()
    }

    pub(crate) fn on_controlled(&self) -> broadcast::Receiver<TaskId> {
        self.controlled.subscribe()
    }

    /// Follows one task until the returned value is dropped.
    pub(crate) fn follow(self: &Arc<Self>, task: TaskId) -> Follow {
        let mut followed = self.lock();
        let entry = followed.entry(task).or_insert_with(|| Followed {
            changes: watch::Sender::new(0),
            ends: watch::Sender::new(0),
            followers: 0,
            seen: 0,
        });
        entry.followers += 1;
        Follow { changes: entry.changes.subscribe(), ends: entry.ends.subscribe(), hints: Arc::clone(self), task }
    }

    /// Every followed task and the newest number known of it, by id.
    pub(crate) fn followed(&self) -> Vec<(TaskId, u64)> {
        let mut followed: Vec<(TaskId, u64)> =
            self.lock().iter().map(|(task, entry)| (*task, entry.seen)).collect();
        followed.sort_unstable();
        followed
    }

    /// A followed task was found to have events up to `seq` (0: it is gone).
    pub(crate) fn tell_advanced(&self, task: TaskId, seq: u64) {
        if let Some(entry) = self.lock().get_mut(&task) {
            entry.seen = seq;
            entry.tell_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<TaskId, Followed>> {
        // A panic while the lock was held leaves a usable map: every change to it is one call.
        self.followed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A subscription to one task's changes.
#[derive(Debug)]
pub(crate) struct Follow {
    changes: watch::Receiver<u64>,
    ends: watch::Receiver<u64>,
    hints: Arc<Hints>,
    task: TaskId,
}

impl Follow {
    /// Returns when the task may have changed since the last call.
    pub(crate) async fn changed(&mut self) {
        // The sender lives in `hints` for as long as this value does.
        let _ = self.changes.changed().await;
    }

    /// Returns when the task may have ended since the last call.
    pub(crate) async fn ended(&mut self) {
        let _ = self.ends.changed().await;
    }
}

impl Drop for Follow {
    fn drop(&mut self) {
        let mut followed = self.hints.lock();
        if let Some(entry) = followed.get_mut(&self.task) {
            entry.followers -= 1;
            if entry.followers == 0 {
                followed.remove(&self.task);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_follower_hears_of_its_task_and_is_forgotten_when_dropped() {
        let hints = Arc::new(Hints::default());
        let task = TaskId::new();
        let mut follow = hints.follow(task);
        hints.tell_changed([TaskId::new(), task]);
        follow.changed().await;
        drop(follow);
        assert!(hints.followed().is_empty());
    }
}
