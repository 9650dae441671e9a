//! Natural batching: while a transaction is in flight, requests queue; the next transaction
//! takes all of them. No timers: an idle system adds no latency, a loaded one shares each fsync
//! between hundreds of tasks. Another one begins beside it only when plenty is queued ([`Lanes`]).
//!
//! One bad entry hurts only itself: a batch the store refuses is tried again by halves. A batch
//! whose answer was lost is simply repeated, because every entry is idempotent.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::{Mutex, Notify, mpsc, oneshot};
use tokio::time::Instant;
use uuid::Uuid;

use super::{Accepted, Commit, CommitRefused, Committed, Lanes, Store, StoreError, SubmitRefused};
use crate::faults;
use crate::meter::{Batch, Meter};
use crate::task::NewTask;

/// The most entries of one transaction.
const MAX_ENTRIES: usize = 1_000;
/// The most bytes of one transaction.
const MAX_BYTES: usize = 4 * 1024 * 1024;
/// How many requests may wait; callers wait for a place beyond that.
const MAX_WAITING: usize = 4_096;

/// Where batches of one kind go.
#[async_trait]
pub(crate) trait Sink: Send + Sync + 'static {
    type Entry: Send + Sync + 'static;
    type Answer: Send + 'static;
    /// How long an unreachable store is tried again before callers are told.
    const PATIENCE: Duration;

    async fn write(&self, batch: &[Self::Entry]) -> Result<Vec<Self::Answer>, StoreError>;
    fn bytes(entry: &Self::Entry) -> usize;
    /// Entries with the same key do not share a transaction.
    fn key(entry: &Self::Entry) -> Uuid;
}

type Reply<A> = oneshot::Sender<Vec<Result<A, StoreError>>>;

struct Request<S: Sink> {
    entries: Vec<S::Entry>,
    reply: Reply<S::Answer>,
}

/// Gathers requests into transactions. Dropping it lets what is queued finish and then stops.
pub(crate) struct Batcher<S: Sink> {
    queue: mpsc::Sender<Request<S>>,
    shared: Arc<Shared<S>>,
}

/// What lanes share.
struct Shared<S: Sink> {
    sink: S,
    requests: Mutex<mpsc::Receiver<Request<S>>>,
    under_way: AtomicUsize,
    /// So many waiting requests are enough for one more transaction.
    plenty: usize,
    /// Told when a transaction has ended, and when plenty is queued.
    look: Notify,
}

/// A transaction that is under way.
struct UnderWay<'a, S: Sink>(&'a Shared<S>);

impl<S: Sink> Shared<S> {
    fn begin(&self) -> UnderWay<'_, S> {
        self.under_way.fetch_add(1, Ordering::Relaxed);
        UnderWay(self)
    }
}

impl<S: Sink> Drop for UnderWay<'_, S> {
    fn drop(&mut self) {
        self.0.under_way.fetch_sub(1, Ordering::Relaxed);
        self.0.look.notify_one();
    }
}

impl<S: Sink> Batcher<S> {
    /// Starts the lanes: loops, each with one transaction in flight at a time.
    pub(crate) fn start(sink: S, lanes: Lanes) -> Self {
        let (queue, requests) = mpsc::channel(MAX_WAITING);
        let (under_way, look) = (AtomicUsize::new(0), Notify::new());
        let shared = Shared { sink, requests: Mutex::new(requests), under_way, plenty: lanes.plenty, look };
        let shared = Arc::new(shared);
        for _ in 0..lanes.most {
            tokio::spawn(faults::of_process(lane(Arc::clone(&shared))));
        }
        Self { queue, shared }
    }

    /// Writes one entry and gives its answer once it is on disk.
    pub(crate) async fn one(&self, entry: S::Entry) -> Result<S::Answer, StoreError> {
        let answers = self.many(vec![entry]).await?;
        answers.into_iter().next().ok_or_else(stopped)?
    }

    /// Writes entries, in transactions of up to [`MAX_ENTRIES`], and gives their answers in order.
    pub(crate) async fn many(
        &self,
        entries: Vec<S::Entry>,
    ) -> Result<Vec<Result<S::Answer, StoreError>>, StoreError> {
        let (reply, answers) = oneshot::channel();
        self.queue.send(Request { entries, reply }).await.map_err(|_| stopped())?;
        if self.queue.max_capacity() - self.queue.capacity() >= self.shared.plenty {
            self.shared.look.notify_one();
        }
        answers.await.map_err(|_| stopped())
    }
}

fn stopped() -> StoreError {
    StoreError::Unavailable("the process is stopping".to_owned())
}

async fn lane<S: Sink>(shared: Arc<Shared<S>>) {
    let mut postponed: VecDeque<Request<S>> = VecDeque::new();
    loop {
        let (batch, _under_way) = match postponed.pop_front() {
            // Another lane that waits for requests holds the lock; what is postponed goes alone then.
            Some(first) => {
                let mut requests = shared.requests.try_lock().ok();
                (gather(first, &mut postponed, requests.as_deref_mut()), shared.begin())
            }
            None => {
                let mut requests = shared.requests.lock().await;
                while shared.under_way.load(Ordering::Relaxed) > 0 && requests.len() < shared.plenty {
                    shared.look.notified().await;
                }
                let Some(first) = requests.recv().await else { return };
                (gather(first, &mut postponed, Some(&mut requests)), shared.begin())
            }
        };
        write_requests(&shared.sink, batch).await;
    }
}

/// Takes what is queued and fits with `first` into one transaction; what clashes waits.
fn gather<S: Sink>(
    first: Request<S>,
    postponed: &mut VecDeque<Request<S>>,
    mut queue: Option<&mut mpsc::Receiver<Request<S>>>,
) -> Vec<Request<S>> {
    let mut keys: HashSet<Uuid> = first.entries.iter().map(S::key).collect();
    let mut entries = first.entries.len();
    let mut bytes: usize = first.entries.iter().map(S::bytes).sum();
    let mut batch = vec![first];
    let mut waiting: VecDeque<Request<S>> = std::mem::take(postponed);
    while entries < MAX_ENTRIES && bytes < MAX_BYTES {
        let next = waiting.pop_front().or_else(|| queue.as_mut()?.try_recv().ok());
        let Some(request) = next else { break };
        let size: usize = request.entries.iter().map(S::bytes).sum();
        let clashes = request.entries.iter().any(|entry| keys.contains(&S::key(entry)));
        if clashes || entries + request.entries.len() > MAX_ENTRIES || bytes + size > MAX_BYTES {
            postponed.push_back(request);
            break;
        }
        keys.extend(request.entries.iter().map(S::key));
        entries += request.entries.len();
        bytes += size;
        batch.push(request);
    }
    postponed.extend(waiting);
    batch
}

async fn write_requests<S: Sink>(sink: &S, requests: Vec<Request<S>>) {
    let mut entries = Vec::new();
    let mut callers = Vec::with_capacity(requests.len());
    for mut request in requests {
        callers.push((request.entries.len(), request.reply));
        entries.append(&mut request.entries);
    }
    let mut answers = Vec::with_capacity(entries.len());
    for chunk in entries.chunks(MAX_ENTRIES) {
        write_by_halves(sink, chunk, &mut answers).await;
    }
    let mut answers = answers.into_iter();
    for (count, reply) in callers {
        // A caller that gave up waiting is no reason to stop.
        let _ = reply.send(answers.by_ref().take(count).collect());
    }
}

async fn write_by_halves<S: Sink>(
    sink: &S,
    entries: &[S::Entry],
    answers: &mut Vec<Result<S::Answer, StoreError>>,
) {
    match write_patiently(sink, entries).await {
        Ok(written) => answers.extend(written.into_iter().map(Ok)),
        Err(error) if error.is_unavailable() || entries.len() == 1 => {
            answers.extend(entries.iter().map(|_| Err(error.clone())));
        }
        Err(_) => {
            let (left, right) = entries.split_at(entries.len() / 2);
            Box::pin(write_by_halves(sink, left, answers)).await;
            Box::pin(write_by_halves(sink, right, answers)).await;
        }
    }
}

async fn write_patiently<S: Sink>(sink: &S, entries: &[S::Entry]) -> Result<Vec<S::Answer>, StoreError> {
    let give_up = Instant::now() + S::PATIENCE;
    let mut pause = Duration::from_millis(20);
    loop {
        match sink.write(entries).await {
            Err(error) if error.is_unavailable() && Instant::now() + pause < give_up => {
                tracing::debug!(%error, entries = entries.len(), "repeating a batch");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(Duration::from_millis(500));
            }
            other => return other,
        }
    }
}

/// Submits.
pub(crate) struct Submits(pub(crate) Arc<dyn Store>, pub(crate) Arc<Meter>);

#[async_trait]
impl Sink for Submits {
    type Entry = NewTask;
    type Answer = Result<Accepted, SubmitRefused>;
    /// A client is waiting: it hears soon that it should try again.
    const PATIENCE: Duration = Duration::from_secs(2);

    async fn write(&self, batch: &[NewTask]) -> Result<Vec<Self::Answer>, StoreError> {
        let begun = Instant::now();
        let answers = self.0.submit(batch).await;
        self.1.batch(Batch::Submit, batch.len(), begun.elapsed());
        for answer in answers.iter().flatten() {
            self.1.submitted(answer);
        }
        answers
    }
    fn bytes(task: &NewTask) -> usize {
        512 + task.input.get().len()
    }
    fn key(task: &NewTask) -> Uuid {
        task.id.0
    }
}

/// Commits of runs.
pub(crate) struct Commits(pub(crate) Arc<dyn Store>, pub(crate) Arc<Meter>);

#[async_trait]
impl Sink for Commits {
    type Entry = Commit;
    type Answer = Result<Committed, CommitRefused>;
    /// The run asks again for as long as it has its lease; this only bounds one batch.
    const PATIENCE: Duration = Duration::from_secs(2);

    async fn write(&self, batch: &[Commit]) -> Result<Vec<Self::Answer>, StoreError> {
        let begun = Instant::now();
        let answers = self.0.commit(batch).await;
        self.1.batch(Batch::Commit, batch.len(), begun.elapsed());
        answers
    }
    fn bytes(commit: &Commit) -> usize {
        commit.bytes()
    }
    fn key(commit: &Commit) -> Uuid {
        commit.task.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex as StdMutex;
    use tokio::sync::Semaphore;

    /// Keeps every batch it was given; refuses batches with a negative entry; waits for a permit
    /// before each write.
    struct Recorder {
        batches: Arc<StdMutex<Vec<Vec<i64>>>>,
        permits: Arc<Semaphore>,
        lost_answers: StdMutex<u32>,
    }

    #[async_trait]
    impl Sink for Recorder {
        type Entry = i64;
        type Answer = i64;
        const PATIENCE: Duration = Duration::from_secs(1);
        async fn write(&self, batch: &[i64]) -> Result<Vec<i64>, StoreError> {
            self.permits.acquire().await.expect("never closed").forget();
            self.batches.lock().expect("not poisoned").push(batch.to_vec());
            let mut lost = self.lost_answers.lock().expect("not poisoned");
            if *lost > 0 {
                *lost -= 1;
                return Err(StoreError::Unavailable("cut".into()));
            }
            if batch.iter().any(|&entry| entry < 0) {
                return Err(StoreError::Failed("negative".into()));
            }
            Ok(batch.iter().map(|entry| entry * 10).collect())
        }
        fn bytes(_: &i64) -> usize {
            1
        }
        fn key(entry: &i64) -> Uuid {
            Uuid::from_u128(entry.unsigned_abs().into())
        }
    }

    type Batches = Arc<StdMutex<Vec<Vec<i64>>>>;

    fn recorder(lost_answers: u32) -> (Batcher<Recorder>, Batches, Arc<Semaphore>) {
        recorder_with(lost_answers, Lanes::ONE)
    }

    fn recorder_with(lost_answers: u32, lanes: Lanes) -> (Batcher<Recorder>, Batches, Arc<Semaphore>) {
        let (batches, permits) = (Batches::default(), Arc::new(Semaphore::new(0)));
        let sink =
            Recorder { batches: batches.clone(), permits: permits.clone(), lost_answers: lost_answers.into() };
        (Batcher::start(sink, lanes), batches, permits)
    }

    #[tokio::test]
    async fn what_queues_during_a_transaction_shares_the_next_one() {
        let (batcher, batches, permits) = recorder(0);
        let batcher = Arc::new(batcher);
        let call = |entry| {
            let batcher = Arc::clone(&batcher);
            tokio::spawn(async move { batcher.one(entry).await })
        };
        let mut calls = vec![call(1)];
        permits.add_permits(1);
        while batches.lock().expect("not poisoned").is_empty() {
            tokio::task::yield_now().await;
        }
        // From here on every write waits for a permit: the second is in flight when the rest queue.
        calls.push(call(2));
        while batcher.queue.capacity() < MAX_WAITING || permits.available_permits() > 0 {
            tokio::task::yield_now().await;
        }
        tokio::task::yield_now().await;
        calls.extend((3..=9).map(call));
        while batcher.queue.capacity() > MAX_WAITING - 7 {
            tokio::task::yield_now().await;
        }
        permits.add_permits(100);
        for (entry, call) in (1..=9).zip(calls) {
            assert_eq!(call.await.expect("no panic").expect("written"), entry * 10);
        }
        assert_eq!(*batches.lock().expect("not poisoned"), [vec![1], vec![2], vec![3, 4, 5, 6, 7, 8, 9]]);
    }

    #[tokio::test]
    async fn another_transaction_begins_when_plenty_is_queued() {
        let (batcher, batches, permits) = recorder_with(0, Lanes { most: 2, plenty: 3 });
        let batcher = Arc::new(batcher);
        let call = |entry| {
            let batcher = Arc::clone(&batcher);
            tokio::spawn(async move { batcher.one(entry).await })
        };
        let queued = || MAX_WAITING - batcher.queue.capacity();
        let under_way = || batcher.shared.under_way.load(Ordering::Relaxed);
        let mut calls = vec![call(1)];
        while under_way() < 1 {
            tokio::task::yield_now().await;
        }
        calls.extend([call(2), call(3)]);
        while queued() < 2 {
            tokio::task::yield_now().await;
        }
        for _ in 0..100 {
            tokio::task::yield_now().await;
            assert_eq!((queued(), under_way()), (2, 1), "two are not plenty");
        }
        calls.push(call(4));
        while under_way() < 2 {
            tokio::task::yield_now().await;
        }
        assert_eq!(queued(), 0);
        permits.add_permits(100);
        for (entry, call) in (1..=4).zip(calls) {
            assert_eq!(call.await.expect("no panic").expect("written"), entry * 10);
        }
        assert_eq!(*batches.lock().expect("not poisoned"), [vec![1], vec![2, 3, 4]]);
    }

    #[tokio::test]
    async fn one_bad_entry_hurts_only_itself() {
        let (batcher, _, permits) = recorder(0);
        permits.add_permits(100);
        let (good, bad, also_good) = tokio::join!(batcher.one(1), batcher.one(-2), batcher.one(3));
        assert_eq!((good.expect("written"), also_good.expect("written")), (10, 30));
        assert!(bad.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_batch_whose_answer_was_lost_is_repeated() {
        let (batcher, batches, permits) = recorder(2);
        permits.add_permits(100);
        assert_eq!(batcher.one(4).await.expect("written at last"), 40);
        assert_eq!(*batches.lock().expect("not poisoned"), [[4], [4], [4]]);
    }

    #[tokio::test(start_paused = true)]
    async fn callers_are_told_when_the_store_stays_away() {
        let (batcher, _, permits) = recorder(u32::MAX);
        permits.add_permits(1_000);
        assert!(batcher.one(4).await.expect_err("unreachable").is_unavailable());
    }

    #[tokio::test]
    async fn entries_for_the_same_task_do_not_share_a_transaction() {
        let (batcher, batches, permits) = recorder(0);
        permits.add_permits(100);
        let (a, b) = tokio::join!(batcher.one(7), batcher.one(7));
        assert_eq!((a.expect("written"), b.expect("written")), (70, 70));
        assert_eq!(*batches.lock().expect("not poisoned"), [[7], [7]]);
    }
}
