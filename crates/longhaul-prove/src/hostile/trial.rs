//! One parser's share of the hostile inputs: what is drawn, what came of it, and what must never come of it.
//!
//! The input that is being read is written to a file before anyone reads it: it is still there when the process dies of it, and it can be
//! added to the corpus. A panic anywhere in the process, also one that some task of the server swallows, is noted by a hook. A thread
//! ends the process when an input takes too long or too much memory.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use longhaul_hostile::{Corpus, Judged, Mutator};
use serde::{Deserialize, Serialize};

/// No input may take longer, whatever it makes the process do.
const SLOW: Duration = Duration::from_secs(20);
/// The process may not take more, bytes.
const LARGE: u64 = 1_536 * 1024 * 1024;
/// How often that is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// What was done, and what came of it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Tally {
    /// Inputs drawn.
    pub inputs: u64,
    /// Those that were taken.
    pub accepted: u64,
    /// Those that were refused.
    pub refused: u64,
    /// What broke, if anything did; the input is in the file of the trial.
    pub broke: Option<String>,
    /// The most memory that the process had, bytes.
    pub memory: u64,
}

/// Something that must never happen.
#[derive(Debug)]
pub(super) struct Broke(pub(super) String);

impl<E: std::fmt::Display> From<E> for Broke {
    fn from(error: E) -> Self {
        Self(error.to_string())
    }
}

/// The panics of this process.
#[derive(Default)]
struct Panics(Mutex<Vec<String>>);

impl Panics {
    /// Notes every panic from now on, beside what was done about them before.
    fn watch() -> Arc<Self> {
        let panics = Arc::new(Self::default());
        let noted = Arc::clone(&panics);
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            noted.0.lock().unwrap_or_else(PoisonError::into_inner).push(panic.to_string());
            before(panic);
        }));
        panics
    }

    fn first(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).first().cloned()
    }
}

/// See the module.
pub(super) struct Trial<'c> {
    /// Draws inputs; its dice decide everything else too.
    pub(super) mutator: Mutator<'c>,
    tally: Tally,
    inputs: u64,
    current: File,
    panics: Arc<Panics>,
    /// When the input that is being read was drawn, milliseconds since the trial began, and 1; 0 between inputs.
    since: Arc<AtomicU64>,
    begun: Instant,
}

impl<'c> Trial<'c> {
    /// So many inputs of a seed, each written to `current` before it is used.
    pub(super) fn new(
        corpus: &'c Corpus,
        parser: &str,
        seed: u64,
        inputs: u64,
        current: &Path,
    ) -> io::Result<Self> {
        let trial = Self {
            mutator: Mutator::new(corpus, seed, parser),
            tally: Tally::default(),
            inputs,
            current: File::create(current)?,
            panics: Panics::watch(),
            since: Arc::default(),
            begun: Instant::now(),
        };
        trial.guard();
        Ok(trial)
    }

    /// Ends the process when an input takes too long or too much.
    fn guard(&self) {
        let (since, begun) = (Arc::clone(&self.since), self.begun);
        std::thread::spawn(move || {
            loop {
                std::thread::sleep(LOOK_EVERY);
                let drawn = since.load(Ordering::Relaxed);
                let now = millis(begun.elapsed());
                if drawn > 0 && now.saturating_sub(drawn) > millis(SLOW) {
                    eprintln!("hostile: an input takes more than {SLOW:?}");
                    std::process::abort();
                }
                let memory = status("VmRSS:");
                if memory > LARGE {
                    eprintln!("hostile: the process has {memory} bytes; an input takes too much memory");
                    std::process::abort();
                }
            }
        });
    }

    /// The next input; `None` when there were enough.
    pub(super) fn draw(&mut self) -> io::Result<Option<Vec<u8>>> {
        if self.tally.inputs >= self.inputs {
            return Ok(None);
        }
        let input = self.mutator.draw();
        self.begin(&input)?;
        Ok(Some(input))
    }

    /// An input that was put together elsewhere begins to be used.
    pub(super) fn begin(&mut self, input: &[u8]) -> io::Result<()> {
        self.current.set_len(0)?;
        self.current.write_all_at(input, 0)?;
        self.tally.inputs += 1;
        self.since.store(millis(self.begun.elapsed()) + 1, Ordering::Relaxed);
        Ok(())
    }

    /// How many inputs there were.
    pub(super) fn drawn(&self) -> u64 {
        self.tally.inputs
    }

    /// What came of the input. Fails if something panicked meanwhile.
    pub(super) fn judged(&mut self, judged: Judged) -> Result<(), Broke> {
        self.since.store(0, Ordering::Relaxed);
        match judged {
            Judged::Accepted => self.tally.accepted += 1,
            Judged::Refused => self.tally.refused += 1,
        }
        self.calm()
    }

    /// Fails if something panicked.
    pub(super) fn calm(&self) -> Result<(), Broke> {
        match self.panics.first() {
            Some(panic) => Err(Broke(format!("something panicked: {panic}"))),
            None => Ok(()),
        }
    }

    /// What came of it all.
    pub(super) fn finish(mut self, ended: Result<(), Broke>) -> Tally {
        self.since.store(0, Ordering::Relaxed);
        self.tally.broke = ended.and_then(|()| self.calm()).err().map(|Broke(why)| why);
        self.tally.memory = status("VmHWM:");
        self.tally
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// A line of what the system says of this process, bytes.
fn status(name: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
    line.split_whitespace().next().and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) * 1024
}
