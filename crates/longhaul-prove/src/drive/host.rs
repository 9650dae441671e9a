//! Whether the host itself stands still: then leases are lost by right.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{Instant, sleep};

/// How often it is looked.
const EVERY: Duration = Duration::from_millis(100);

/// From and to, microseconds.
type Times = Vec<(i64, i64)>;

/// Writes a small file beside the store again and again, and notes when that took too long; until this value is gone.
pub(super) struct Host {
    slow: Arc<Mutex<Times>>,
    task: JoinHandle<()>,
}

impl Host {
    /// Watches; what takes longer than `patience` is too long.
    pub(super) fn watch(path: PathBuf, patience: Duration) -> Self {
        let slow = Arc::<Mutex<Times>>::default();
        let task = tokio::spawn(watch(path, patience, Arc::clone(&slow)));
        Self { slow, task }
    }

    /// When it stood still so far.
    pub(super) fn slow(&self) -> Times {
        self.slow.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn write(path: &Path) -> std::io::Result<()> {
    let file = File::create(path)?;
    file.write_all_at(&[1; 4_096], 0)?;
    file.sync_data()
}

async fn watch(path: PathBuf, patience: Duration, slow: Arc<Mutex<Times>>) {
    // From when it is to wake up: a host without time for this has none for others either.
    let mut begun = Instant::now();
    loop {
        let path = path.clone();
        let written = spawn_blocking(move || write(&path)).await;
        let took = begun.elapsed();
        if took > patience || !matches!(written, Ok(Ok(()))) {
            let to = jiff::Timestamp::now().as_microsecond();
            let from = to.saturating_sub(i64::try_from(took.as_micros()).unwrap_or(i64::MAX));
            slow.lock().unwrap_or_else(PoisonError::into_inner).push((from, to));
        }
        begun = Instant::now() + EVERY;
        sleep(EVERY).await;
    }
}
