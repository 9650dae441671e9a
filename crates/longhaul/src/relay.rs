//! The relay: hints and live text between processes, over whatever carries small messages between them.
//!
//! The engine says what to broadcast ([`Relay::next`]) and is told what others broadcast ([`Relay::hear`]).
//! Nothing depends on it: a message that is lost costs a moment of waiting, or a piece of text that its
//! listener sees missing. So it is bounded and lossy: hints are gathered, text that nobody takes is dropped, oldest
//! first. Text leaves only for tasks that someone listens to elsewhere: who listens says so now and then.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use tokio::time::Instant;
use uuid::Uuid;

use crate::client::Client;
use crate::engine::Engine;
use crate::live::{Key, LiveText};
use crate::store::news::News;
use crate::task::TaskId;

/// The least time between two messages.
const SPACING: Duration = Duration::from_millis(5);
/// How often who listens says so, and after which time it is taken to have left.
const ANNOUNCE_EVERY: Duration = Duration::from_secs(5);
const FORGET_AFTER: Duration = Duration::from_secs(15);
/// How many tasks one process says it listens to, and how many all others together may.
const MAX_LISTENED: usize = 64;
const MAX_INTERESTS: usize = 10_000;
/// How much text waits to be taken, in pieces and in bytes.
const MAX_PIECES: usize = 1_024;
const MAX_WAITING: usize = 256 * 1024;
/// How much text one message has, and the largest message that is read.
const MAX_TEXT: usize = 12 * 1024;
const MAX_HEARD: usize = 256 * 1024;

/// A piece of text of a task.
#[derive(Debug, Serialize, Deserialize)]
struct Piece {
    tenant: Arc<str>,
    task: TaskId,
    #[serde(flatten)]
    text: LiveText,
    /// About how many bytes of a message it takes.
    #[serde(skip)]
    size: usize,
}

impl Piece {
    fn new((tenant, task): Key, text: LiveText) -> Self {
        // As it is written, with what has to be escaped.
        let written = serde_json::to_string(&text).map_or(usize::MAX / 2, |written| written.len());
        Self { size: written + tenant.len() + 64, tenant, task, text }
    }

    /// Takes up what directly follows it; gives it back when it does not.
    fn join(&mut self, next: Piece) -> Option<Piece> {
        let (one, other) = (&self.text, &next.text);
        let follows = (&self.tenant, self.task, one.run, &one.step, one.attempt)
            == (&next.tenant, next.task, other.run, &other.step, other.attempt)
            && other.after == one.after + one.text.chars().count() as u64
            && self.size + next.size <= MAX_TEXT;
        if !follows {
            return Some(next);
        }
        self.text.text.push_str(&next.text.text);
        self.size += next.size;
        None
    }
}

/// What is broadcast.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Message {
    from: Uuid,
    #[serde(skip_serializing_if = "News::is_empty")]
    news: News,
    /// What is listened to there.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    listens: Vec<(Arc<str>, TaskId)>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    live: Vec<Piece>,
}

/// Joins this process with others; see the module. Clones are the same relay; it ends with the last of them.
///
/// ```
/// use longhaul::Client;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let client = Client::open("memory:").await?;
/// let relay = client.relay();
/// let speaker = relay.clone();
/// let speaking = tokio::spawn(async move {
///     loop {
///         let message = speaker.next().await;
///         // broadcast(message)
///         # drop(message);
///     }
/// });
/// // for each message of another process: relay.hear(&message)
/// # relay.hear(b"{}");
/// # speaking.abort();
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Relay {
    engine: Arc<Engine>,
    outbound: Arc<Outbound>,
}

impl Client {
    /// The relay of this process: hints and live text to and from other processes on the same store, over a
    /// way of the caller's.
    pub fn relay(&self) -> Relay {
        Relay { engine: Arc::clone(&self.engine), outbound: self.engine.hints.relayed().join() }
    }
}

impl Relay {
    /// What to broadcast next; waits until there is something. At most 32 KiB of JSON. What is not taken in
    /// time is gathered or lost, never piled up. For one caller at a time.
    pub async fn next(&self) -> Vec<u8> {
        loop {
            let due = self.outbound.next_announcement();
            // Either way it is time to look.
            let _ = tokio::time::timeout_at(due, self.outbound.wake.notified()).await;
            // What comes together goes together.
            tokio::time::sleep(SPACING).await;
            if let Some(message) = self.outbound.take(&self.engine) {
                return message;
            }
        }
    }

    /// Something that another process broadcast. What this process said itself, and what cannot be read, is
    /// passed over.
    pub fn hear(&self, message: &[u8]) {
        if message.len() > MAX_HEARD {
            return;
        }
        let Ok(message) = serde_json::from_slice::<Message>(message) else {
            // From a version that says it differently: something has changed.
            self.engine.hints.tell_anything();
            return;
        };
        if message.from == self.outbound.me {
            return;
        }
        message.news.pass_on(&self.engine.hints);
        self.outbound.listened_to(message.listens);
        for Piece { tenant, task, text, .. } in message.live {
            self.engine.lives.hear(&(tenant, task), text);
        }
    }

    /// On PostgreSQL, this process sends no NOTIFY as long as the relay lives. For when all processes on the
    /// store are joined by relays; one that is not hears of what happens here when it looks, within a second.
    pub fn instead_of_notify(self) -> Self {
        self.outbound.instead_of_notify.store(true, Ordering::Relaxed);
        self
    }
}

/// Where the stores and the runs of a process find its relay, if it has one.
#[derive(Debug, Default)]
pub(crate) struct Relayed {
    /// Whether there may be one: known without the lock.
    on: AtomicBool,
    outbound: Mutex<Weak<Outbound>>,
}

impl Relayed {
    pub(crate) fn get(&self) -> Option<Arc<Outbound>> {
        if !self.on.load(Ordering::Relaxed) {
            return None;
        }
        let outbound = self.lock().upgrade();
        if outbound.is_none() {
            self.on.store(false, Ordering::Relaxed);
        }
        outbound
    }

    /// The relay there is, or a new one.
    fn join(&self) -> Arc<Outbound> {
        let mut known = self.lock();
        let outbound = known.upgrade().unwrap_or_else(|| {
            let outbound = Arc::new(Outbound { me: Uuid::now_v7(), ..Outbound::default() });
            *known = Arc::downgrade(&outbound);
            outbound
        });
        self.on.store(true, Ordering::Relaxed);
        outbound
    }

    fn lock(&self) -> MutexGuard<'_, Weak<Outbound>> {
        // Every change is one assignment.
        self.outbound.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What waits to be broadcast.
#[derive(Debug, Default)]
pub(crate) struct Outbound {
    me: Uuid,
    waiting: Mutex<Waiting>,
    wake: Notify,
    instead_of_notify: AtomicBool,
    /// What is listened to elsewhere, and when that was last said.
    interests: Mutex<HashMap<Key, Instant>>,
    /// How many those are: known without the lock.
    listened: AtomicUsize,
}

#[derive(Debug, Default)]
struct Waiting {
    news: News,
    live: VecDeque<Piece>,
    bytes: usize,
    /// When what is listened to here was last said; at once when not known.
    announced: Option<Instant>,
}

impl Outbound {
    /// These hints are for others.
    pub(crate) fn tell(&self, ready: bool, changed: &[TaskId], ended: &[TaskId], controlled: &[TaskId]) {
        self.waiting().news.add(ready, changed, ended, controlled);
        self.wake.notify_one();
    }

    pub(crate) fn is_instead_of_notify(&self) -> bool {
        self.instead_of_notify.load(Ordering::Relaxed)
    }

    /// Whether anyone elsewhere listens to anything.
    pub(crate) fn anyone_listens(&self) -> bool {
        self.listened.load(Ordering::Relaxed) > 0
    }

    pub(crate) fn someone_listens_to(&self, key: &Key) -> bool {
        let mut interests = self.interests();
        let alive = interests.get(key).map(|said| said.elapsed() < FORGET_AFTER);
        if alive == Some(false) {
            interests.remove(key);
            self.listened.store(interests.len(), Ordering::Relaxed);
        }
        alive == Some(true)
    }

    /// This text is for others.
    pub(crate) fn tell_live(&self, key: Key, text: LiveText) {
        let piece = Piece::new(key, text);
        if piece.size > MAX_TEXT {
            // The listener sees by the next piece that some is missing.
            return;
        }
        let mut waiting = self.waiting();
        waiting.bytes += piece.size;
        let alone = match waiting.live.back_mut() {
            Some(last) => last.join(piece),
            None => Some(piece),
        };
        waiting.live.extend(alone);
        while waiting.live.len() > MAX_PIECES || waiting.bytes > MAX_WAITING {
            let Some(oldest) = waiting.live.pop_front() else { break };
            waiting.bytes -= oldest.size;
        }
        drop(waiting);
        self.wake.notify_one();
    }

    /// Someone began to listen here: others are told at once.
    pub(crate) fn announce(&self) {
        self.waiting().announced = None;
        self.wake.notify_one();
    }

    fn next_announcement(&self) -> Instant {
        self.waiting().announced.map_or_else(Instant::now, |said| said + ANNOUNCE_EVERY)
    }

    /// These are listened to elsewhere.
    fn listened_to(&self, keys: Vec<Key>) {
        if keys.is_empty() {
            return;
        }
        let mut interests = self.interests();
        if interests.len() + keys.len() > MAX_INTERESTS {
            interests.retain(|_, said| said.elapsed() < FORGET_AFTER);
        }
        let room = MAX_INTERESTS.saturating_sub(interests.len());
        let now = Instant::now();
        interests.extend(keys.into_iter().take(room).map(|key| (key, now)));
        self.listened.store(interests.len(), Ordering::Relaxed);
    }

    /// The next message, if there is something to say.
    fn take(&self, engine: &Engine) -> Option<Vec<u8>> {
        let mut waiting = self.waiting();
        let mut message = Message { from: self.me, news: std::mem::take(&mut waiting.news), ..Message::default() };
        if waiting.announced.is_none_or(|said| said.elapsed() >= ANNOUNCE_EVERY) {
            waiting.announced = Some(Instant::now());
            message.listens = engine.lives.listened(MAX_LISTENED);
        }
        let mut bytes = 0;
        while let Some(piece) = waiting.live.front() {
            bytes += piece.size;
            if bytes > MAX_TEXT {
                // The rest goes with the next one.
                self.wake.notify_one();
                break;
            }
            waiting.bytes -= piece.size;
            message.live.extend(waiting.live.pop_front());
        }
        drop(waiting);
        if message.news.is_empty() && message.listens.is_empty() && message.live.is_empty() {
            return None;
        }
        // Made of types that always serialise.
        serde_json::to_vec(&message).ok()
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        // A panic while the lock was held leaves usable news: at worst some are missing.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn interests(&self) -> MutexGuard<'_, HashMap<Key, Instant>> {
        self.interests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(after: u64, text: &str) -> LiveText {
        LiveText { run: 1, step: "think".into(), attempt: 1, after, text: text.into() }
    }

    async fn spoken(relay: &Relay) -> Message {
        let message =
            tokio::time::timeout(Duration::from_secs(10), relay.next()).await.expect("something is said");
        assert!(message.len() <= 32 * 1024, "{} bytes", message.len());
        serde_json::from_slice(&message).expect("it is read back")
    }

    #[tokio::test]
    async fn text_that_follows_text_is_joined_and_what_is_too_much_is_lost_oldest_first() {
        let relay = Client::open("memory:").await.expect("a store").relay();
        let key: Key = ("default".into(), TaskId::new());
        for (after, word) in [(0, "Hel"), (3, "lo"), (5, " you")] {
            relay.outbound.tell_live(key.clone(), text(after, word));
        }
        let said = spoken(&relay).await;
        assert_eq!((said.live.len(), said.live[0].text.text.as_str()), (1, "Hello you"));
        let page = "x".repeat(MAX_TEXT - 500);
        for number in 0..100 {
            // With gaps in between.
            relay.outbound.tell_live(key.clone(), text(number * 1_000_000, &page));
        }
        assert!(relay.outbound.waiting().bytes <= MAX_WAITING);
        let first = spoken(&relay).await.live.remove(0).text.after;
        assert!(first > 0, "the oldest is gone");
        assert!(spoken(&relay).await.live[0].text.after > first);
    }

    #[tokio::test]
    async fn a_message_is_small_however_much_there_is_to_say() {
        let client = Client::open("memory:").await.expect("a store");
        let relay = client.relay();
        let lives: Vec<_> = (0..1_000).map(|_| client.live(TaskId::new())).collect();
        let ids: Vec<TaskId> = (0..10_000).map(|_| TaskId::new()).collect();
        relay.outbound.tell(true, &ids, &ids[..50], &ids[..60]);
        relay.outbound.tell_live(("t".into(), ids[0]), text(0, &"\u{1}".repeat(1_000)));
        let said = spoken(&relay).await;
        assert!(said.news.many && said.news.ready && said.listens.len() == MAX_LISTENED);
        drop(lives);
    }

    #[tokio::test]
    async fn nonsense_and_its_own_words_are_passed_over() {
        let client = Client::open("memory:").await.expect("a store");
        let relay = client.relay();
        let task = TaskId::new();
        let mut live = client.live(task);
        let piece = |from| Message {
            from,
            live: vec![Piece::new(("default".into(), task), text(0, "hi"))],
            ..Message::default()
        };
        relay.hear(b"nonsense");
        relay.hear(&vec![b' '; MAX_HEARD + 1]);
        relay.hear(&serde_json::to_vec(&piece(relay.outbound.me)).expect("written"));
        assert!(tokio::time::timeout(Duration::from_millis(1), live.next()).await.is_err());
        relay.hear(&serde_json::to_vec(&piece(Uuid::now_v7())).expect("written"));
        assert_eq!(live.next().await.expect("it comes").text, "hi");
    }

    #[tokio::test]
    async fn text_is_relayed_only_for_who_listens_and_nothing_without_a_relay() {
        let client = Client::open("memory:").await.expect("a store");
        let lives = &client.engine.lives;
        let unheard = || panic!("nobody listens");
        let task = TaskId::new();
        let relay = client.relay();
        lives.tell("default", task, unheard);
        let listens =
            Message { from: Uuid::now_v7(), listens: vec![("default".into(), task)], ..Message::default() };
        relay.hear(&serde_json::to_vec(&listens).expect("written"));
        lives.tell("acme", task, unheard);
        lives.tell("default", task, || text(0, "hi"));
        assert_eq!(spoken(&relay).await.live[0].text.text, "hi");
        drop(relay);
        lives.tell("default", task, unheard);
    }
}
