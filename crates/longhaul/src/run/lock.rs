//! Locks: one task at a time does something, whichever machine it runs on.
//!
//! Asking for a lock and giving it back are operations of the run. The store decides, and what it
//! decides arrives in the task's log, so a replay is given the same token without asking again.

use std::fmt;
use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::time::Duration;

use jiff::Timestamp;

use super::desk::{Address, Asking, Turn};
use super::driver::patiently;
use super::journal::LOCK;
use super::step::decode;
use super::{Operation, Run};
use crate::error::TaskError;
use crate::record::Op;
use crate::store::locks::{Link, News};
use crate::store::sessions::{LockInfo, Which};
use crate::store::{LockAction, LockChange, LockToken};
use crate::task::{check_name, timestamp};

/// How long a lock is held at most, unless said otherwise.
const MAX_HOLD: Duration = Duration::from_secs(3_600);
/// How often a lock is looked at that someone wants to know the loss of, without a hint.
const LOOK_EVERY: Duration = Duration::from_secs(1);

impl Run {
    /// Asks for a lock of this name and waits for it: no other task of the tenant has it at the same
    /// time. Those who ask are served in the order in which they asked; a task that waits is suspended.
    ///
    /// The lock belongs to the task, not to the value that is returned: dropping that gives nothing
    /// back. It stays the task's while it sleeps, while it waits for a person and when its worker
    /// dies, until [`Lock::release`], the task's final state (after everything was undone), or
    /// [`Acquire::max_hold`].
    ///
    /// A task that asks for a lock it holds has it at once, with the same token; `max_hold` begins
    /// anew then. One release ends it, however often it was asked for. Tasks that wait for each
    /// other in a circle would wait for ever: the one that closes the circle fails with `deadlock`.
    ///
    /// ```
    /// # use longhaul::{Run, TaskError};
    /// # async fn switch(token: u64) -> Result<(), TaskError> { Ok(()) }
    /// async fn deploy(run: Run, host: String) -> Result<(), TaskError> {
    ///     let lock = run.lock(host).await?;
    ///     // The host refuses a token smaller than one it has seen.
    ///     let token = lock.token();
    ///     run.step("switch", async || switch(token).await).await?;
    ///     lock.release().await?;
    ///     Ok(())
    /// }
    /// ```
    pub fn lock(&self, name: impl Into<String>) -> Acquire {
        Acquire { run: self.clone(), name: name.into(), max_hold: MAX_HOLD, within: None }
    }

    /// Takes a place on the desk for something done with a lock.
    fn lock_place(&self, what: &str, name: &str) -> Result<Operation, TaskError> {
        check_name("lock", name).map_err(|invalid| TaskError::fatal("bad_lock", invalid.to_string()))?;
        let address = Some(Address::Own(LOCK));
        self.take_place(Asking { address, ..Asking::plain(&format!("{what} {name}"), Op::Lock) })
    }

    /// Lets the store do something with a lock, once, and waits for what comes of it.
    async fn change_lock(&self, operation: &Operation, name: &str, action: LockAction) -> Result<News, TaskError> {
        loop {
            match operation.turn().await {
                Turn::Recorded(news) => return decode(&operation.key, &news?),
                Turn::Start(_) => {}
            }
            let known_seq = self.desk().journal().seen();
            let change = LockChange {
                tenant: self.tenant().to_owned(),
                task: self.id(),
                fence: self.fence(),
                known_seq,
                address: operation.address(),
                name: name.to_owned(),
                action,
            };
            let answer = patiently(|| self.inner.engine.store.lock(&change))
                .await
                .map_err(|error| TaskError::retryable("store", error.to_string()))?;
            // Refused: the run is over, and hears so by itself.
            let Ok(locked) = answer else { return std::future::pending().await };
            {
                let mut desk = self.desk();
                desk.hear(locked.last_seq);
                desk.wait(&operation.key, operation.waiting("lock", name, None));
            }
            self.wake_driver();
        }
    }
}

/// A lock about to be asked for; `.await` it.
#[must_use = "a lock is not asked for until it is awaited"]
pub struct Acquire {
    run: Run,
    name: String,
    max_hold: Duration,
    within: Option<Duration>,
}

impl Acquire {
    /// How long the task may have the lock; one hour unless said otherwise. After that it goes to the
    /// next in line, whatever the task does, and the task's log says `lock.expired`. What it still
    /// does then carries a token smaller than the next holder's, by which it can be refused.
    pub fn max_hold(mut self, time: Duration) -> Self {
        self.max_hold = time;
        self
    }

    /// Waits no longer than this; without the lock by then, the error is `lock_timeout`. (A `select!`
    /// with a timer is no substitute: the task would stay in line, and be given the lock later.)
    pub fn within(mut self, time: Duration) -> Self {
        self.within = Some(time);
        self
    }
}

impl IntoFuture for Acquire {
    type Output = Result<Lock, TaskError>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        let Self { run, name, max_hold, within } = self;
        let operation = run.lock_place("lock", &name);
        Box::pin(async move {
            let operation = operation?;
            let news = run.change_lock(&operation, &name, LockAction::Acquire { max_hold, within }).await?;
            let step = operation.key.1.clone();
            match news {
                News::Granted { token, until, service: _ } => {
                    Ok(Lock { run: run.clone(), name, token, until: timestamp(until) })
                }
                News::TimedOut => {
                    let message = format!("lock '{name}' was not free within {:?}", within.unwrap_or_default());
                    Err(TaskError::retryable("lock_timeout", message).detail("step", step).detail("lock", name))
                }
                News::Deadlock { cycle } => Err(deadlock(&name, &cycle).detail("step", step)),
                News::Released { .. } => Err(TaskError::fatal(
                    "result_changed",
                    format!("what was recorded of {step} is not a lock that was asked for"),
                )),
            }
        })
    }
}

fn deadlock(name: &str, cycle: &[Link]) -> TaskError {
    let others = cycle.iter().skip(1).map(|link| format!("task {}, which waits for '{}'", link.task, link.lock));
    let others = others.collect::<Vec<_>>().join(", held by ");
    let message = format!("waiting for lock '{name}' would never end: it is held by {others}, held by this task");
    TaskError::fatal("deadlock", message).detail("lock", name).detail("cycle", serde_json::json!(cycle))
}

/// A lock that the task has; see [`Run::lock`]. Dropping it gives nothing back.
pub struct Lock {
    run: Run,
    name: String,
    token: u64,
    until: Timestamp,
}

impl Lock {
    /// The lock's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The fencing token: larger than that of everyone who had the lock before. Whatever the lock
    /// protects should refuse a token smaller than one it has seen, because no lock can stop a task
    /// that was cut off and has not noticed.
    pub fn token(&self) -> u64 {
        self.token
    }

    /// When it goes to the next in line, whatever the task does.
    pub fn until(&self) -> Timestamp {
        self.until
    }

    /// Name and token together: what [`Client::patch_state_under`](crate::Client::patch_state_under) wants.
    pub fn proof(&self) -> LockToken {
        LockToken { name: self.name.clone(), token: self.token }
    }

    /// Whether the task has it now, by the store. It can be lost the moment after: what must not happen
    /// without the lock is refused by what it protects, by the token. To be asked in a step, since the
    /// answer is another at every replay.
    pub async fn is_held(&self) -> Result<bool, TaskError> {
        let which = Which::One(self.name.clone());
        let found = patiently(|| self.run.inner.engine.store.locks(self.run.tenant(), &which)).await;
        let found = found.map_err(|error| TaskError::retryable("store", error.to_string()))?;
        let now = timestamp(self.run.now_micros());
        let held = |lock: &LockInfo| lock.token == Some(self.token) && lock.until.is_some_and(|until| until > now);
        Ok(found.iter().any(held))
    }

    /// Returns when the task has lost the lock: `max_hold` has passed, or its session at the lock service was
    /// lost. For a `select!` with long work inside of a step, which can stop then.
    pub async fn lost(&self) -> Result<(), TaskError> {
        let mut follow = self.run.inner.engine.hints.follow(self.run.id());
        while self.is_held().await? {
            // The log says so, in the moment; without a hint a look from time to time finds it.
            let _ = tokio::time::timeout(LOOK_EVERY, follow.changed()).await;
        }
        Ok(())
    }

    /// Gives the lock back, once in the task's life; the next in line has it in the same moment. Says
    /// whether the task had it until now: not if [`Acquire::max_hold`] had passed.
    pub async fn release(self) -> Result<bool, TaskError> {
        // A deferred record that were lost after this would let its step run again without the lock.
        self.run.flush().await?;
        let operation = self.run.lock_place("release", &self.name)?;
        let action = LockAction::Release { token: self.token };
        match self.run.change_lock(&operation, &self.name, action).await? {
            News::Released { held } => Ok(held),
            _ => Err(TaskError::fatal(
                "result_changed",
                format!("what was recorded of {} is not a lock that was given back", operation.key.1),
            )),
        }
    }
}

impl fmt::Debug for Lock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { run: _, name, token, until } = self;
        f.debug_struct("Lock").field("name", name).field("token", token).field("until", until).finish()
    }
}
