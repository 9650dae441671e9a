//! The scenarios.

use std::collections::BTreeMap;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use longhaul::{Client, NewTask, QueueSettings, Run, Settings, TaskError, TaskId, Worker};
use tokio::process::{Child, Command};
use tokio::sync::mpsc;

use super::{Measured, Progress, WhileWaiting, rss_mb};
use crate::args::BenchArgs;
use crate::bench_worker::{LedgerInput, noop, steps as ten_steps};
use crate::exit::Failure;

/// Callers of `submit`.
pub(super) const CALLERS: usize = 64;
/// Tasks of `steps` that run at once.
const AT_ONCE: usize = 128;
const STEPS: usize = 10;
/// The longest a scenario may take.
pub(super) const PATIENCE: Duration = Duration::from_secs(600);

pub(super) async fn floor(client: &Client) -> Result<Measured, Failure> {
    let started = Instant::now();
    let floor = client.floor(4.0).await?;
    Ok(Measured {
        seconds: started.elapsed().as_secs_f64(),
        per_second: floor.rows_per_second,
        commits_per_second: Some(floor.commits_per_second),
        ..Measured::default()
    })
}

pub(super) async fn submit(client: &Client, args: &BenchArgs, progress: &Progress) -> Result<Measured, Failure> {
    let batch = args.batch.max(1);
    let callers = if batch == 1 { CALLERS } else { 4 };
    let total = args.tasks.unwrap_or(if batch == 1 { 50_000 } else { 200_000 });
    open_gates(client, &["noop"]).await?;
    progress.phase("submitting", total);
    let left = Arc::new(AtomicUsize::new(total.div_ceil(batch)));
    let started = Instant::now();
    let calls: Vec<_> = (0..callers)
        .map(|_| {
            let (client, left) = (client.clone(), Arc::clone(&left));
            tokio::spawn(async move {
                let (mut times, mut errors) = (Vec::new(), 0);
                while take_one(&left) {
                    let tasks: Vec<NewTask> = (0..batch).map(|_| NewTask::new("noop", &())).collect();
                    let asked = Instant::now();
                    errors += match client.submit_many(tasks).await {
                        Ok(answers) => answers.iter().filter(|answer| answer.is_err()).count(),
                        Err(_) => batch,
                    };
                    times.push(asked.elapsed());
                }
                (times, errors)
            })
        })
        .collect();
    let (mut times, mut errors) = (Vec::new(), 0);
    for call in calls {
        let (some, failed) = call.await.map_err(|error| Failure::internal(error.to_string()))?;
        times.extend(some);
        errors += failed;
    }
    let seconds = started.elapsed().as_secs_f64();
    let tasks = times.len() * batch;
    Ok(Measured { tasks, seconds, per_second: tasks as f64 / seconds, errors, ..percentiles(times) })
}

pub(super) fn take_one(left: &AtomicUsize) -> bool {
    left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
}

pub(super) async fn drain(client: &Client, args: &BenchArgs, progress: &Progress) -> Result<Measured, Failure> {
    let total = args.tasks.unwrap_or(100_000);
    open_gates(client, &["noop"]).await?;
    // The backlog stands behind what is drained, in the same queue, and stays there.
    fill(client, "noop", &(), args.backlog, 4, progress).await?;
    fill(client, "noop", &(), total, 9, progress).await?;
    progress.phase("draining", total);
    let (tally, mut tallied) = Tally::of(total);
    let started = Instant::now();
    let worker = Worker::new(client)
        .slots(args.workers)
        .handler("noop", move |run: Run, input: ()| {
            let tally = tally.clone();
            async move {
                let id = run.id();
                noop(run, input).await?;
                tally.count(id);
                Ok::<_, TaskError>(())
            }
        })
        .start()
        .await?;
    let last = tallied.all(progress).await?;
    if args.backlog > 0 {
        // The worker goes on with the backlog; what counts is the time until the last of the others
        // is on disk as completed.
        client.wait(last, PATIENCE).await?;
        let seconds = started.elapsed().as_secs_f64();
        worker.stop().await;
        return Ok(Measured { tasks: total, seconds, per_second: total as f64 / seconds, ..Measured::default() });
    }
    // All have been run; wait until the last ones are on disk as completed.
    until_none(client, total, progress, |queue| queue.pending + queue.running).await?;
    let seconds = started.elapsed().as_secs_f64();
    worker.stop().await;
    Ok(Measured { tasks: total, seconds, per_second: total as f64 / seconds, ..Measured::default() })
}

/// Counts what handlers did, without asking the store, which would take its time away from them.
#[derive(Clone)]
struct Tally {
    done: Arc<AtomicUsize>,
    total: usize,
    last: mpsc::Sender<TaskId>,
}

/// The other end of a tally.
struct Tallied {
    done: Arc<AtomicUsize>,
    total: usize,
    last: mpsc::Receiver<TaskId>,
}

impl Tally {
    fn of(total: usize) -> (Self, Tallied) {
        let (done, (sender, receiver)) = (Arc::new(AtomicUsize::new(0)), mpsc::channel(1));
        (Self { done: Arc::clone(&done), total, last: sender }, Tallied { done, total, last: receiver })
    }

    fn count(&self, task: TaskId) {
        if self.done.fetch_add(1, Ordering::Relaxed) + 1 == self.total {
            // Of use to nobody once the scenario has given up.
            let _ = self.last.try_send(task);
        }
    }
}

impl Tallied {
    /// Waits until all were counted; gives the last.
    async fn all(&mut self, progress: &Progress) -> Result<TaskId, Failure> {
        let done = || self.done.load(Ordering::Relaxed);
        let watch = tokio::time::timeout(PATIENCE, async {
            loop {
                tokio::select! {
                    last = self.last.recv() => return last,
                    () = tokio::time::sleep(Duration::from_millis(100)) => progress.at(done()),
                }
            }
        });
        match watch.await {
            Ok(Some(last)) => Ok(last),
            _ => Err(Failure::found(format!("only {} of {} tasks were run", done(), self.total))),
        }
    }
}

pub(super) async fn latency(client: &Client, args: &BenchArgs, progress: &Progress) -> Result<Measured, Failure> {
    let total = args.tasks.unwrap_or(1_000);
    let (starts, mut started_at) = mpsc::channel(16);
    let worker = Worker::new(client)
        .handler("touch", move |_run: Run, (): ()| {
            let starts = starts.clone();
            let now = Instant::now();
            async move { starts.send(now).await.map_err(TaskError::from) }
        })
        .start()
        .await?;
    progress.phase("one at a time", total);
    let began = Instant::now();
    let mut times = Vec::with_capacity(total);
    for number in 0..total {
        let asked = Instant::now();
        let id = client.submit(NewTask::new("touch", &())).await?.id;
        let start = started_at.recv().await.ok_or_else(|| Failure::internal("the worker stopped"))?;
        times.push(start.duration_since(asked));
        client.wait(id, PATIENCE).await?;
        progress.at(number);
    }
    let seconds = began.elapsed().as_secs_f64();
    worker.stop().await;
    Ok(Measured { tasks: total, seconds, per_second: total as f64 / seconds, ..percentiles(times) })
}

pub(super) async fn steps(client: &Client, args: &BenchArgs, progress: &Progress) -> Result<Measured, Failure> {
    let total = args.tasks.unwrap_or(5_000);
    open_gates(client, &["steps"]).await?;
    fill(client, "steps", &STEPS, total, 5, progress).await?;
    progress.phase("steps", total);
    let done = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&done);
    let started = Instant::now();
    let worker = Worker::new(client)
        .slots(AT_ONCE)
        .handler("steps", move |run: Run, count: u32| {
            let counted = Arc::clone(&counted);
            async move {
                let result = ten_steps(run, count).await?;
                counted.fetch_add(1, Ordering::Relaxed);
                Ok::<_, TaskError>(result)
            }
        })
        .start()
        .await?;
    while done.load(Ordering::Relaxed) < total {
        if started.elapsed() > PATIENCE {
            return Err(Failure::found("the steps do not come to an end"));
        }
        progress.at(done.load(Ordering::Relaxed));
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let seconds = started.elapsed().as_secs_f64();
    progress.phase("one task alone", 100);
    let mut times = Vec::new();
    for number in 0..100 {
        let asked = Instant::now();
        let id = client.submit(NewTask::new("steps", &STEPS)).await?.id;
        client.wait(id, PATIENCE).await?;
        times.push(asked.elapsed());
        progress.at(number);
    }
    worker.stop().await;
    let per_second = (total * STEPS) as f64 / seconds;
    Ok(Measured { tasks: total, seconds, per_second, ..percentiles(times) })
}

pub(super) async fn waiting(client: &Client, args: &BenchArgs, progress: &Progress) -> Result<Measured, Failure> {
    let total = args.tasks.unwrap_or(100_000);
    let wakes = total.min(200);
    open_gates(client, &["wait"]).await?;
    let (starts, mut woken_at) = mpsc::channel(1_024);
    let (tally, mut tallied) = Tally::of(total - wakes);
    let worker = || {
        let (starts, tally) = (starts.clone(), tally.clone());
        Worker::new(client).handler("wait", move |run: Run, (): ()| {
            let (starts, tally) = (starts.clone(), tally.clone());
            async move {
                let timed: bool = run.signal("go").await?;
                if timed {
                    starts.send(Instant::now()).await?;
                } else {
                    tally.count(run.id());
                }
                Ok::<_, TaskError>(())
            }
        })
    };
    fill(client, "wait", &(), total, 5, progress).await?;
    let mut ids = Vec::with_capacity(total);
    loop {
        let after = ids.last().copied();
        let filter = longhaul::Filter { limit: 1_000, oldest_first: true, after, ..Default::default() };
        let page = client.list(&filter).await?;
        if page.is_empty() {
            break;
        }
        ids.extend(page.into_iter().map(|task| task.id));
    }
    // A run stays in memory for a moment before it is suspended, so many slots are used for that.
    progress.phase("suspending", total);
    let suspending = worker().slots(1_000).start().await?;
    until_none(client, total, progress, |queue| queue.pending + queue.running).await?;
    suspending.stop().await;

    let waiter = worker().slots(args.workers).start().await?;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let (cpu, since) = (cpu_seconds(), Instant::now());
    tokio::time::sleep(Duration::from_secs(5)).await;
    let cpu_percent = (cpu_seconds() - cpu) / since.elapsed().as_secs_f64() * 100.0;
    let waiting = Some(WhileWaiting { rss_mb: rss_mb(), cpu_percent });

    progress.phase("waking one at a time", wakes);
    let mut times = Vec::with_capacity(wakes);
    for (number, &id) in ids.iter().take(wakes).enumerate() {
        let asked = Instant::now();
        client.signal(id, "go", &true).await?;
        let woken = woken_at.recv().await.ok_or_else(|| Failure::internal("the worker stopped"))?;
        times.push(woken.duration_since(asked));
        client.wait(id, PATIENCE).await?;
        progress.at(number);
    }
    waiter.stop().await;

    let rest = &ids[wakes..];
    progress.phase("waking all", rest.len());
    for answer in client.signal_many(rest, "go", &false).await? {
        answer.map_err(longhaul::Error::from)?;
    }
    let started = Instant::now();
    let draining = worker().slots(args.workers).start().await?;
    if !rest.is_empty() {
        tallied.all(progress).await?;
    }
    until_none(client, rest.len(), progress, |queue| queue.pending + queue.running).await?;
    let seconds = started.elapsed().as_secs_f64();
    draining.stop().await;
    let per_second = rest.len() as f64 / seconds;
    Ok(Measured { tasks: total, seconds, per_second, waiting, ..percentiles(times) })
}

/// Waits until a count of all queues is 0.
pub(super) async fn until_none(
    client: &Client,
    total: usize,
    progress: &Progress,
    count: impl Fn(&longhaul::store::QueueInfo) -> u64,
) -> Result<(), Failure> {
    let asked = Instant::now();
    loop {
        let left: u64 = client.queues().await?.iter().map(&count).sum();
        if left == 0 {
            return Ok(());
        }
        if asked.elapsed() > PATIENCE {
            return Err(Failure::found(format!("{left} of {total} tasks do not get there")));
        }
        progress.at(total.saturating_sub(usize::try_from(left).unwrap_or(0)));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The processor time this process has used.
pub(super) fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

pub(super) async fn resume(
    client: &Client,
    store: &str,
    args: &BenchArgs,
    progress: &Progress,
) -> Result<Measured, Failure> {
    if store == "memory:" {
        return Err(Failure::usage("resume kills a worker process; a store in memory cannot be shared with one"));
    }
    let total = args.tasks.unwrap_or(100);
    let folder = tempfile::tempdir().map_err(|error| Failure::internal(error.to_string()))?;
    let ledger = folder.path().join("ledger");
    open_gates(client, &["ledger"]).await?;
    let input = LedgerInput { steps: 2, hang: Some("in_step".to_owned()), hang_step: 1, ..LedgerInput::default() };
    fill(client, "ledger", &input, total, 5, progress).await?;
    let mut first = spawn_worker(store, &ledger, total)?;
    progress.phase("running", total);
    let hanging = || {
        let text = std::fs::read_to_string(&ledger).unwrap_or_default();
        text.lines().filter(|line| line.starts_with("hang ")).count()
    };
    let asked = Instant::now();
    while hanging() < total {
        if asked.elapsed() > PATIENCE {
            return Err(Failure::found("the first worker did not take all tasks"));
        }
        progress.at(hanging());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let mut second = spawn_worker(store, &ledger, total)?;
    let killed = Instant::now();
    first.kill().await.map_err(|error| Failure::internal(format!("cannot kill the worker: {error}")))?;
    progress.phase("taken over", total);
    let mut times = Vec::with_capacity(total);
    let mut errors = 0;
    let ids: Vec<_> = client.list(&longhaul::Filter { limit: 1_000, ..Default::default() }).await?;
    for (number, task) in ids.iter().enumerate() {
        let ended = client.wait(task.id, PATIENCE).await?;
        errors += usize::from(ended.state != longhaul::State::Completed);
        times.push(killed.elapsed());
        progress.at(number);
    }
    let seconds = killed.elapsed().as_secs_f64();
    second.kill().await.map_err(|error| Failure::internal(format!("cannot stop the worker: {error}")))?;
    Ok(Measured { tasks: total, seconds, per_second: total as f64 / seconds, errors, ..percentiles(times) })
}

fn spawn_worker(store: &str, ledger: &std::path::Path, slots: usize) -> Result<Child, Failure> {
    let program = std::env::current_exe().map_err(|error| Failure::internal(error.to_string()))?;
    Command::new(program)
        .args(["bench-worker", "--store", store, "--slots", &slots.to_string(), "--ledger"])
        .arg(ledger)
        .stdout(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| Failure::internal(format!("cannot start a worker: {error}")))
}

/// Lets any number of tasks in, for handlers that no worker has yet.
pub(super) async fn open_gates(client: &Client, handlers: &[&str]) -> Result<(), Failure> {
    let queue = QueueSettings { max_pending: u64::from(u32::MAX), ..QueueSettings::default() };
    let queues = BTreeMap::from([("default".to_owned(), queue)]);
    client.configure(&Settings { queues, ..Settings::default() }).await?;
    Ok(client.announce(handlers).await?)
}

pub(super) async fn fill(
    client: &Client,
    handler: &str,
    input: &impl serde::Serialize,
    total: usize,
    priority: u8,
    progress: &Progress,
) -> Result<(), Failure> {
    progress.phase("filling the queue", total);
    let mut filled = 0;
    while filled < total {
        let count = (total - filled).min(1_000);
        let tasks = (0..count).map(|_| NewTask::new(handler, input).priority(priority)).collect();
        for answer in client.submit_many(tasks).await? {
            answer?;
        }
        filled += count;
        progress.at(filled);
    }
    Ok(())
}

pub(super) fn percentiles(mut times: Vec<Duration>) -> Measured {
    times.sort_unstable();
    let at = |share: f64| {
        let index = ((times.len() as f64 * share) as usize).min(times.len().saturating_sub(1));
        times.get(index).map(|time| time.as_secs_f64() * 1e3)
    };
    Measured { p50_ms: at(0.5), p99_ms: at(0.99), ..Measured::default() }
}
