//! Simulated processes: tasks of one runtime that are frozen, and die, together.
//!
//! What a process spawns belongs to it, and so does what that spawns. A frozen process is not polled; what happened
//! meanwhile it sees all at once when it is let go. A killed one is dropped where it stands, and never polled again.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use tokio::task::JoinHandle;

thread_local! {
    /// The process whose task is being polled.
    static CURRENT: RefCell<Option<Process>> = const { RefCell::new(None) };
}

/// See the module.
#[derive(Clone, Default)]
pub struct Process(Arc<Mutex<Tasks>>);

#[derive(Default)]
struct Tasks {
    condition: Condition,
    /// Who wakes each of its tasks, by their numbers: the same order every time.
    wakers: BTreeMap<u64, Option<Waker>>,
    next: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Condition {
    #[default]
    Alive,
    Frozen,
    Dead,
}

impl Process {
    /// A process without tasks.
    pub fn new() -> Self {
        Self::default()
    }

    /// Starts something in it.
    pub fn spawn<F>(&self, future: F) -> JoinHandle<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        tokio::spawn(OfProcess::new(Some(self.clone()), future))
    }

    /// Stops it where it is. One that is dead stays so.
    pub fn freeze(&self) {
        let mut tasks = self.tasks();
        if tasks.condition == Condition::Alive {
            tasks.condition = Condition::Frozen;
        }
    }

    /// Lets a frozen one go on.
    pub fn thaw(&self) {
        self.turn(Condition::Frozen, Condition::Alive);
    }

    /// Ends it where it is, as `kill -9` does.
    pub fn kill(&self) {
        self.turn(Condition::Alive, Condition::Dead);
        self.turn(Condition::Frozen, Condition::Dead);
    }

    fn turn(&self, from: Condition, to: Condition) {
        let wakers: Vec<Waker> = {
            let mut tasks = self.tasks();
            if tasks.condition != from {
                return;
            }
            tasks.condition = to;
            tasks.wakers.values().flatten().cloned().collect()
        };
        wakers.iter().for_each(Waker::wake_by_ref);
    }

    fn tasks(&self) -> MutexGuard<'_, Tasks> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A future that belongs to the process whose task is being polled now, if there is one.
pub(crate) fn of_process<F: Future>(future: F) -> OfProcess<F> {
    OfProcess::new(CURRENT.with_borrow(Clone::clone), future)
}

/// See [`of_process`].
pub(crate) struct OfProcess<F> {
    /// The process, and which of its tasks this is.
    process: Option<(Process, u64)>,
    /// Gone when the process is dead.
    future: Option<Pin<Box<F>>>,
}

impl<F> OfProcess<F> {
    fn new(process: Option<Process>, future: F) -> Self {
        let process = process.map(|process| {
            let number = {
                let mut tasks = process.tasks();
                tasks.next += 1;
                let number = tasks.next;
                tasks.wakers.insert(number, None);
                number
            };
            (process, number)
        });
        Self { process, future: Some(Box::pin(future)) }
    }
}

impl<F: Future> Future for OfProcess<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let Some((process, number)) = self.process.clone() else {
            return match &mut self.future {
                Some(future) => future.as_mut().poll(cx),
                None => Poll::Pending,
            };
        };
        let condition = {
            let mut tasks = process.tasks();
            let waker = tasks.wakers.entry(number).or_default();
            if !waker.as_ref().is_some_and(|known| known.will_wake(cx.waker())) {
                *waker = Some(cx.waker().clone());
            }
            tasks.condition
        };
        match condition {
            Condition::Frozen => Poll::Pending,
            Condition::Dead => {
                // What it had is dropped; whoever waits for it is of the same process, and dead too.
                self.future = None;
                Poll::Pending
            }
            Condition::Alive => {
                let _inside = Inside(CURRENT.replace(Some(process)));
                match &mut self.future {
                    Some(future) => future.as_mut().poll(cx),
                    None => Poll::Pending,
                }
            }
        }
    }
}

impl<F> Drop for OfProcess<F> {
    fn drop(&mut self) {
        if let Some((process, number)) = &self.process {
            process.tasks().wakers.remove(number);
        }
    }
}

/// Puts back who was polled before, also after a panic.
struct Inside(Option<Process>);

impl Drop for Inside {
    fn drop(&mut self) {
        CURRENT.set(self.0.take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;
    use tokio::time::{Instant, sleep};

    /// Counts seconds, in a task of a task.
    fn counting(process: &Process) -> Arc<AtomicU64> {
        let count = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&count);
        process.spawn(async move {
            let inner = tokio::spawn(of_process(async move {
                loop {
                    sleep(Duration::from_secs(1)).await;
                    counted.fetch_add(1, Ordering::Relaxed);
                }
            }));
            let _ = inner.await;
        });
        count
    }

    #[tokio::test(start_paused = true)]
    async fn a_frozen_process_stands_still_and_sees_afterwards_that_time_has_passed() {
        let process = Process::new();
        let count = counting(&process);
        let seen = Arc::new(Mutex::new(None));
        let (noted, begun) = (Arc::clone(&seen), Instant::now());
        process.spawn(async move {
            sleep(Duration::from_millis(3_000)).await;
            *noted.lock().expect("not poisoned") = Some(begun.elapsed());
        });
        sleep(Duration::from_millis(2_500)).await;
        assert_eq!(count.load(Ordering::Relaxed), 2);
        process.freeze();
        sleep(Duration::from_millis(10_000)).await;
        assert_eq!(count.load(Ordering::Relaxed), 2);
        assert_eq!(*seen.lock().expect("not poisoned"), None);
        process.thaw();
        sleep(Duration::from_millis(10)).await;
        assert_eq!(count.load(Ordering::Relaxed), 3);
        assert!(seen.lock().expect("not poisoned").is_some_and(|at| at >= Duration::from_millis(12_500)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_killed_process_is_dropped_with_all_that_it_spawned() {
        let (process, other) = (Process::new(), Process::new());
        let (count, others) = (counting(&process), counting(&other));
        sleep(Duration::from_millis(1_500)).await;
        assert_eq!(Arc::strong_count(&count), 2);
        process.freeze();
        process.kill();
        process.thaw();
        sleep(Duration::from_millis(5_000)).await;
        assert_eq!((count.load(Ordering::Relaxed), others.load(Ordering::Relaxed)), (1, 6));
        assert_eq!(Arc::strong_count(&count), 1, "nothing of it is left");
    }
}
