//! Who is told when a task's state changes, whichever machine changed it.
//!
//! Each watched task has one follower in this process, whatever the number of those who watch; it reads the task's
//! log and ends with the last watcher. What it tells goes through a bounded channel: who is too slow for it misses
//! the older changes and hears of the newer ones, so nothing waits for anyone and nobody is told what never was.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use longhaul::{Client, Event, Events, TaskId};
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;
use tokio_util::task::AbortOnDropHandle;

use crate::problem::Problem;

/// How many changes are kept for a watcher that is busy.
const KEPT: usize = 64;
/// How many tasks are watched at once in this process.
const MAX_WATCHED: usize = 10_000;
/// The pause after which a store that did not answer is asked again.
const PAUSE: Duration = Duration::from_secs(1);

/// How what a watcher sees has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// The agent's state has this version now.
    Patched(u64),
    /// The task itself went on: it started, waits, ended, …
    Moved,
    /// The task was removed; nothing more will come.
    Removed,
}

impl Change {
    fn of(event: &Event) -> Option<Self> {
        if event.kind == "state.patched" {
            return event.data["version"].as_u64().map(Self::Patched);
        }
        event.kind.starts_with("task.").then_some(Self::Moved)
    }
}

/// The followers of this process.
#[derive(Default)]
pub(crate) struct Watchers(Mutex<HashMap<TaskId, Weak<Watched>>>);

struct Watched {
    changes: broadcast::Sender<Change>,
    _follower: AbortOnDropHandle<()>,
}

impl Watchers {
    /// Watches a task of the client's tenant from now on.
    pub(super) async fn watch(&self, client: &Client, task: TaskId) -> Result<Watch, Problem> {
        let newest = client.task(task).await?.last_seq;
        if let Some(watched) = self.lock().get(&task).and_then(Weak::upgrade) {
            return Ok(Watch::new(watched));
        }
        let events = client.events(task, newest).await?.endless();
        let mut all = self.lock();
        if let Some(watched) = all.get(&task).and_then(Weak::upgrade) {
            return Ok(Watch::new(watched));
        }
        all.retain(|_, watched| watched.strong_count() > 0);
        if all.len() >= MAX_WATCHED {
            let detail = format!("{MAX_WATCHED} tasks are watched here already; try again later");
            return Err(Problem::new("overloaded", detail).retry_after(Duration::from_secs(10)));
        }
        let changes = broadcast::Sender::new(KEPT);
        let follower = tokio::spawn(follow(events, changes.clone()));
        let watched = Arc::new(Watched { changes, _follower: AbortOnDropHandle::new(follower) });
        all.insert(task, Arc::downgrade(&watched));
        Ok(Watch::new(watched))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<TaskId, Weak<Watched>>> {
        // Every change is one call: a panic leaves a usable map.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn follow(mut events: Events, changes: broadcast::Sender<Change>) {
    loop {
        let change = match events.next().await {
            Ok(Some(event)) => Change::of(&event),
            Ok(None) => Some(Change::Removed),
            Err(error) => {
                // It keeps its place.
                tracing::debug!(%error, "cannot read what changed; trying again");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        if let Some(change) = change {
            // Nobody listening any more: this is ended at once.
            let _ = changes.send(change);
        }
        if change == Some(Change::Removed) {
            return;
        }
    }
}

/// The changes of one task, for one who watches.
pub(super) struct Watch {
    changes: broadcast::Receiver<Change>,
    /// The newest version told; an older one is not told after it.
    told: u64,
    _watched: Arc<Watched>,
}

impl Watch {
    fn new(watched: Arc<Watched>) -> Self {
        Self { changes: watched.changes.subscribe(), told: 0, _watched: watched }
    }

    /// Versions up to this one are known already.
    pub(super) fn knows(&mut self, version: u64) {
        self.told = self.told.max(version);
    }

    /// The next change; `None` after [`Change::Removed`].
    pub(super) async fn next(&mut self) -> Option<Change> {
        loop {
            match self.changes.recv().await {
                Ok(Change::Patched(version)) if version <= self.told => {}
                Ok(Change::Patched(version)) => {
                    self.told = version;
                    return Some(Change::Patched(version));
                }
                Ok(change) => return Some(change),
                // What was missed is older than what comes next.
                Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => return None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use longhaul::{NewTask, State};
    use serde_json::json;

    use super::*;

    async fn task(client: &Client) -> TaskId {
        client.announce(&["h"]).await.expect("announced");
        client.submit(NewTask::new("h", &1)).await.expect("accepted").id
    }

    async fn patch(client: &Client, task: TaskId) -> u64 {
        let patch = serde_json::from_value(json!({"set_goal": "g"})).expect("a patch");
        client.patch_state(task, patch, None).await.expect("patched")
    }

    #[tokio::test]
    async fn one_follower_serves_all_who_watch_and_ends_with_the_last() {
        let client = Client::open("memory:").await.expect("a store");
        let (watchers, task) = (Watchers::default(), task(&client).await);
        let mut first = watchers.watch(&client, task).await.expect("watched");
        let mut second = watchers.watch(&client, task).await.expect("watched");
        assert!(Arc::ptr_eq(&first._watched, &second._watched));
        for version in 1..=3 {
            assert_eq!(patch(&client, task).await, version);
            assert_eq!(first.next().await, Some(Change::Patched(version)));
            assert_eq!(second.next().await, Some(Change::Patched(version)));
        }
        drop((first, second));
        assert_eq!(watchers.lock()[&task].strong_count(), 0);
    }

    #[tokio::test]
    async fn who_is_too_slow_misses_the_older_changes_and_hears_of_the_last() {
        let client = Client::open("memory:").await.expect("a store");
        let (watchers, task) = (Watchers::default(), task(&client).await);
        let mut slow = watchers.watch(&client, task).await.expect("watched");
        let mut quick = watchers.watch(&client, task).await.expect("watched");
        let many = KEPT as u64 * 3;
        for _ in 0..many {
            patch(&client, task).await;
        }
        while quick.next().await != Some(Change::Patched(many)) {}
        let mut heard = Vec::new();
        while heard.last() != Some(&many) {
            let Some(Change::Patched(version)) = slow.next().await else { panic!("only patches were made") };
            heard.push(version);
        }
        assert!(heard.is_sorted() && heard.len() <= KEPT, "{heard:?}");
    }

    #[tokio::test]
    async fn a_task_that_has_ended_is_watched_until_it_is_removed() {
        let client = Client::open("memory:").await.expect("a store");
        let (watchers, task) = (Watchers::default(), task(&client).await);
        let mut watch = watchers.watch(&client, task).await.expect("watched");
        client.cancel(task, None).await.expect("cancelled");
        while client.task(task).await.expect("there").state != State::Cancelled {
            watch.next().await;
        }
        while watch.changes.try_recv().is_ok() {}
        client.delete(task).await.expect("removed");
        while watch.next().await != Some(Change::Removed) {}
        assert!(watchers.watch(&client, task).await.is_err(), "there is nothing to watch");
    }
}
