//! Text as it comes (a model's tokens), for who watches at this very moment. Never stored, and never in the
//! way of a run: nobody listening costs nothing, and a listener that is too slow loses text. Within this
//! process, and to those that a relay joins with it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;

use crate::relay::Relayed;
use crate::task::TaskId;

/// How many pieces a listener may be behind before it loses the oldest.
const BEHIND: usize = 256;

/// A piece of text that a step is producing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveText {
    /// The fence of the run.
    pub run: u64,
    /// The step.
    pub step: String,
    /// The try. The text of a new one replaces that of the one before.
    pub attempt: u32,
    /// How many characters of this try's text were told before: a gap says that some were lost.
    pub after: u64,
    /// The text.
    pub text: String,
}

/// Whose task, and which.
pub(crate) type Key = (Arc<str>, TaskId);

/// Who listens to which task of this process.
#[derive(Default)]
pub(crate) struct Lives {
    tasks: Mutex<HashMap<Key, broadcast::Sender<LiveText>>>,
    /// How many tasks are listened to: known without the lock.
    count: AtomicUsize,
    /// Whoever passes text on to other processes.
    relayed: Arc<Relayed>,
}

impl Lives {
    /// With whoever passes text on.
    pub(crate) fn relayed_by(relayed: &Arc<Relayed>) -> Self {
        Self { relayed: Arc::clone(relayed), ..Self::default() }
    }

    /// Tells who listens to the task, here or elsewhere; `text` is only made when someone does.
    pub(crate) fn tell(&self, tenant: &str, task: TaskId, text: impl FnOnce() -> LiveText) {
        let here = self.count.load(Ordering::Relaxed) > 0;
        let relay = self.relayed.get().filter(|relay| relay.anyone_listens());
        if !here && relay.is_none() {
            return;
        }
        let key: Key = (Arc::from(tenant), task);
        let sender = here.then(|| self.tasks().get(&key).cloned()).flatten();
        let relay = relay.filter(|relay| relay.someone_listens_to(&key));
        if sender.is_none() && relay.is_none() {
            return;
        }
        let text = text();
        if let Some(relay) = relay {
            relay.tell_live(key, text.clone());
        }
        if let Some(sender) = sender {
            // Fails only when the last listener has just left.
            let _ = sender.send(text);
        }
    }

    /// Tells who listens here what came from another process.
    pub(crate) fn hear(&self, key: &Key, text: LiveText) {
        let sender = self.tasks().get(key).cloned();
        if let Some(sender) = sender {
            let _ = sender.send(text);
        }
    }

    /// What is listened to here, up to `most`.
    pub(crate) fn listened(&self, most: usize) -> Vec<Key> {
        self.tasks().keys().take(most).cloned().collect()
    }

    /// Listens to a task from now on.
    pub(crate) fn listen(self: &Arc<Self>, tenant: Arc<str>, task: TaskId) -> Live {
        let key = (tenant, task);
        let mut tasks = self.tasks();
        let receiver = tasks.entry(key.clone()).or_insert_with(|| broadcast::Sender::new(BEHIND)).subscribe();
        self.count.store(tasks.len(), Ordering::Relaxed);
        drop(tasks);
        if let Some(relay) = self.relayed.get() {
            relay.announce();
        }
        Live { lives: Arc::clone(self), key, receiver: Some(receiver) }
    }

    fn leave(&self, key: &Key) {
        let mut tasks = self.tasks();
        if tasks.get(key).is_some_and(|sender| sender.receiver_count() == 0) {
            tasks.remove(key);
        }
        self.count.store(tasks.len(), Ordering::Relaxed);
    }

    fn tasks(&self) -> MutexGuard<'_, HashMap<Key, broadcast::Sender<LiveText>>> {
        // Every change is complete when the lock is given up.
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The text of one task as it comes; see [`Client::live`](crate::Client::live).
pub struct Live {
    lives: Arc<Lives>,
    key: Key,
    /// Taken out to be dropped before the others are counted.
    receiver: Option<broadcast::Receiver<LiveText>>,
}

impl Live {
    /// The next piece. It does not end with the task: follow its events for that.
    pub async fn next(&mut self) -> Option<LiveText> {
        loop {
            match self.receiver.as_mut()?.recv().await {
                Ok(text) => return Some(text),
                // Too slow: the next piece says by `after` that there is a gap.
                Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => return None,
            }
        }
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        drop(self.receiver.take());
        self.lives.leave(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(number: u64) -> LiveText {
        LiveText { run: 1, step: "think".into(), attempt: 1, after: number, text: "x".into() }
    }

    #[tokio::test]
    async fn a_slow_listener_loses_the_oldest_and_nobody_waits_for_it() {
        let (lives, task) = (Arc::new(Lives::default()), TaskId::new());
        let mut live = lives.listen("default".into(), task);
        for number in 0..2 * BEHIND as u64 {
            lives.tell("default", task, || piece(number));
        }
        let first = live.next().await.expect("the oldest that is left");
        assert_eq!(first.after, BEHIND as u64);
    }

    #[tokio::test]
    async fn text_is_not_even_made_when_nobody_listens_to_the_task() {
        let (lives, task) = (Arc::new(Lives::default()), TaskId::new());
        let unheard = || panic!("nobody listens");
        lives.tell("default", task, unheard);
        let live = lives.listen("default".into(), task);
        lives.tell("default", TaskId::new(), unheard);
        lives.tell("acme", task, unheard);
        drop(live);
        lives.tell("default", task, unheard);
        assert!(lives.tasks().is_empty(), "nothing is kept for who left");
    }
}
