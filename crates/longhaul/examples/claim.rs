//! Two workers share a queue: exercise 3 of the chapter on workflows in production.
//!
//! `cargo run -p longhaul --example claim`
//!
//! The exercise asks for a claim that never gives one task to two workers, gives tasks in the order
//! of their creation, and copes with an empty queue. A worker claims by itself; here two of them,
//! each with room for one task, work on the same file as two processes would.

use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use longhaul::{Client, NewTask, Run, State, TaskError, Worker, WorkerHandle};
use tokio::sync::Barrier;

const TASKS: usize = 10;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    run().await
}

/// Who ran which task, in the order in which they were begun.
type Notes = Arc<Mutex<Vec<(&'static str, usize)>>>;

/// Starts a worker of its own connection to the store. Its handler notes the task's number and
/// then waits at `meeting`, so that neither worker can take a second task before the other has one.
async fn start_worker(
    store: &str,
    name: &'static str,
    notes: &Notes,
    meeting: &Arc<Barrier>,
) -> Result<WorkerHandle, longhaul::Error> {
    let (notes, meeting) = (Arc::clone(notes), Arc::clone(meeting));
    let handler = move |_run: Run, number: usize| {
        let (notes, meeting) = (Arc::clone(&notes), Arc::clone(&meeting));
        async move {
            notes.lock().unwrap_or_else(PoisonError::into_inner).push((name, number));
            meeting.wait().await;
            Ok::<_, TaskError>(())
        }
    };
    let client = Client::open(store).await?;
    Worker::new(&client).name(name).slots(1).handler("note", handler).start().await
}

pub(crate) async fn run() -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let store = format!("sqlite:{}", folder.path().join("tasks.db").display());
    let (notes, meeting) = (Notes::default(), Arc::new(Barrier::new(2)));

    // The queue is empty, which is no error: the workers wait for tasks.
    let first = start_worker(&store, "first", &notes, &meeting).await?;
    let second = start_worker(&store, "second", &notes, &meeting).await?;

    let client = Client::open(&store).await?;
    let tasks = (0..TASKS).map(|number| NewTask::new("note", &number)).collect();
    for accepted in client.submit_many(tasks).await? {
        let task = client.wait(accepted?.id, Duration::from_secs(10)).await?;
        assert_eq!(task.state, State::Completed);
    }

    let notes = notes.lock().unwrap_or_else(PoisonError::into_inner).clone();
    println!("{notes:?}");
    // Two at a time, one per worker, each task exactly once.
    for pair in notes.chunks(2) {
        assert_ne!(pair[0].0, pair[1].0, "both workers have one");
    }
    let mut numbers: Vec<usize> = notes.iter().map(|(_, number)| *number).collect();
    numbers.sort_unstable();
    assert!(numbers.into_iter().eq(0..TASKS));
    assert_eq!(notes.len(), TASKS);

    // The queue is empty again; workers that wait stop at once.
    assert!(client.queues().await?.iter().all(|queue| queue.pending == 0));
    first.stop().await;
    second.stop().await;
    println!("{TASKS} tasks, each run once, in order");
    Ok(())
}
