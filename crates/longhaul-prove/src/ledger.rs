//! The ledger: what really happened, noted outside of the product. Each line is one write to a file that is
//! only appended to, so lines of several processes never mix. A kill can cut one off: it begins a line of its own, and
//! what is not whole is passed over when the file is read.
//!
//! The [`World`] is what effects change: a small file for each idempotency key, made once.
//!
//! A simulation has both in memory, and its own time in them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use longhaul::TaskId;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// One line of the ledger.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// When, by the host's boot clock, microseconds: comparable between processes.
    pub at: i64,
    /// What.
    #[serde(flatten)]
    pub what: What,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum What {
    /// A step's function was called.
    Begin(Call),
    /// It failed, as its program says, and nothing happened.
    Failed(Call),
    /// Its effect happened.
    Did(Call),
    /// It was asked whether the effect had happened.
    Verified {
        /// By which call.
        #[serde(flatten)]
        call: Call,
        /// The answer.
        happened: bool,
    },
    /// A step's undo was called.
    UndoBegin(Call),
    /// The undo failed, as its program says.
    UndoFailed(Call),
    /// It was undone.
    Undid(Call),
    /// The handler was given a step's result.
    Given {
        /// The task.
        task: TaskId,
        /// The run's fence.
        fence: u64,
        /// The step.
        step: String,
        /// The result.
        result: u64,
    },
    /// A subscriber was given an event.
    Heard {
        /// The task.
        task: TaskId,
        /// The event's number.
        seq: u64,
        /// What it said, as [`digest`] has it.
        digest: u64,
    },
    /// The handler has a lock for a step.
    Locked {
        /// The task.
        task: TaskId,
        /// The run's fence.
        fence: u64,
        /// The step that is done under it.
        step: String,
        /// The lock's name.
        lock: String,
        /// Its token.
        token: u64,
    },
    /// The handler gave a lock back.
    Released {
        /// The task.
        task: TaskId,
        /// The lock's name.
        lock: String,
        /// Whether it had it until then.
        held: bool,
    },
    /// The receiver of webhooks was called.
    Hooked {
        /// The task that it was told of.
        task: TaskId,
        /// The id of the message.
        message: String,
        /// The type of the event.
        kind: String,
        /// The time of the event, microseconds.
        time: i64,
        /// Whether the signature was right.
        signed: bool,
        /// Whether the receiver took it: not when it failed on purpose before it had.
        taken: bool,
    },
    /// An event arrived at the broker.
    Arrived {
        /// The task.
        task: TaskId,
        /// The event's number.
        seq: u64,
        /// What it said, as [`digest`] has it.
        digest: u64,
    },
}

/// A call to the outside.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Call {
    /// The task.
    pub task: TaskId,
    /// The step.
    pub step: String,
    /// The idempotency key.
    pub key: String,
    /// The try.
    pub attempt: u32,
    /// The run's fence.
    pub fence: u64,
    /// The approval it is made with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub approval: Option<String>,
}

/// A number that stands for a text.
pub fn digest(text: &str) -> u64 {
    let hash = Sha256::digest(text.as_bytes());
    let mut first = [0; 8];
    first.copy_from_slice(&hash[..8]);
    u64::from_be_bytes(first)
}

/// The host's boot clock, microseconds; that of the simulation where there is one.
pub fn boot_micros() -> i64 {
    if let Some(simulated) = longhaul::faults::simulated_boot() {
        return simulated;
    }
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    time.tv_sec * 1_000_000 + time.tv_nsec / 1_000
}

/// Where lines are appended by several processes.
#[derive(Clone, Debug)]
pub enum Appended {
    /// A file.
    File(Arc<File>),
    /// Memory, for simulated processes; clones are the same.
    Memory(Arc<Mutex<Vec<u8>>>),
}

impl Appended {
    /// Opens or creates it.
    pub fn open(path: &Path) -> std::io::Result<Self> {
        Ok(Self::File(Arc::new(File::options().create(true).append(true).open(path)?)))
    }

    /// Appends a line, in one write.
    pub fn append(&self, line: &impl Serialize) -> std::io::Result<()> {
        let mut text = vec![b'\n'];
        serde_json::to_writer(&mut text, line)?;
        text.push(b'\n');
        match self {
            Self::File(file) => (&**file).write_all(&text),
            Self::Memory(memory) => {
                memory.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(&text);
                Ok(())
            }
        }
    }

    /// The lines in memory so far; none of a file.
    pub fn lines<T: DeserializeOwned>(&self) -> Vec<T> {
        match self {
            Self::File(_) => Vec::new(),
            Self::Memory(memory) => whole_lines(&memory.lock().unwrap_or_else(PoisonError::into_inner)),
        }
    }

    /// The whole lines of a file; none when there is no file.
    pub fn read<T: DeserializeOwned>(path: &Path) -> std::io::Result<Vec<T>> {
        let text = match std::fs::read(path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        Ok(whole_lines(&text))
    }
}

fn whole_lines<T: DeserializeOwned>(text: &[u8]) -> Vec<T> {
    let lines = text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    lines.filter_map(|line| serde_json::from_slice(line).ok()).collect()
}

/// The ledger of a process.
#[derive(Clone, Debug)]
pub struct Ledger(Appended);

impl Ledger {
    /// A ledger in memory; clones are the same.
    pub fn in_memory() -> Self {
        Self(Appended::Memory(Arc::default()))
    }

    /// The lines in memory so far.
    pub fn lines(&self) -> Vec<Line> {
        self.0.lines()
    }

    /// Opens or creates the ledger of a folder.
    pub fn open(folder: &Path) -> std::io::Result<Self> {
        Ok(Self(Appended::open(&folder.join("ledger"))?))
    }

    /// Notes what happened.
    pub fn note(&self, what: What) -> std::io::Result<()> {
        self.0.append(&Line { at: boot_micros(), what })
    }

    /// All lines, in the order in which they were written.
    pub fn read(folder: &Path) -> std::io::Result<Vec<Line>> {
        Appended::read(&folder.join("ledger"))
    }
}

/// Who waits for things that a ledger tells of, while it is written.
pub struct Arrivals<T> {
    file: File,
    /// What was read of a line that is not whole yet.
    rest: Vec<u8>,
    seen: BTreeSet<T>,
    newest: Instant,
}

impl<T: Ord> Arrivals<T> {
    /// Of the ledger in a folder, from its beginning.
    pub fn of(folder: &Path) -> std::io::Result<Self> {
        Ledger::open(folder)?;
        let file = File::open(folder.join("ledger"))?;
        Ok(Self { file, rest: Vec::new(), seen: BTreeSet::new(), newest: Instant::now() })
    }

    /// Reads what is new; gives how many different things it told of until now.
    pub fn look(&mut self, thing: impl Fn(What) -> Option<T>) -> std::io::Result<u64> {
        self.file.read_to_end(&mut self.rest)?;
        let whole = self.rest.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
        let lines: Vec<Line> = whole_lines(&self.rest[..whole]);
        self.rest.drain(..whole);
        for thing in lines.into_iter().filter_map(|line| thing(line.what)) {
            if self.seen.insert(thing) {
                self.newest = Instant::now();
            }
        }
        Ok(self.seen.len() as u64)
    }

    /// For how long nothing came.
    pub fn quiet(&self) -> Duration {
        self.newest.elapsed()
    }
}

/// What effects change.
#[derive(Clone, Debug)]
pub enum World {
    /// Files of a folder.
    Folder(PathBuf),
    /// Memory; clones are the same.
    Memory(Arc<Mutex<BTreeMap<String, u64>>>),
}

impl World {
    /// The world of a folder.
    pub fn open(folder: &Path) -> std::io::Result<Self> {
        let path = folder.join("world");
        std::fs::create_dir_all(&path)?;
        Ok(Self::Folder(path))
    }

    /// A world in memory.
    pub fn in_memory() -> Self {
        Self::Memory(Arc::default())
    }

    /// Makes what stands for a key; one that is there already stays as it is. Gives its result.
    pub fn make(&self, key: &str, result: u64) -> std::io::Result<u64> {
        let folder = match self {
            Self::Folder(folder) => folder,
            Self::Memory(made) => {
                let mut made = made.lock().unwrap_or_else(PoisonError::into_inner);
                return Ok(*made.entry(key.to_owned()).or_insert(result));
            }
        };
        let place = place(folder, key);
        let draft = folder.join(format!("{:016x}.{}.{result:016x}", digest(key), std::process::id()));
        std::fs::write(&draft, result.to_string())?;
        // Whole or not at all, and only if there is none.
        let made = std::fs::hard_link(&draft, &place);
        std::fs::remove_file(&draft)?;
        match made {
            Ok(()) => Ok(result),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                self.find(key)?.ok_or_else(|| std::io::Error::other("it is there and cannot be read"))
            }
            Err(error) => Err(error),
        }
    }

    /// The result that stands for a key, if its effect happened.
    pub fn find(&self, key: &str) -> std::io::Result<Option<u64>> {
        let folder = match self {
            Self::Folder(folder) => folder,
            Self::Memory(made) => {
                return Ok(made.lock().unwrap_or_else(PoisonError::into_inner).get(key).copied());
            }
        };
        match std::fs::read_to_string(place(folder, key)) {
            Ok(text) => text.trim().parse().map(Some).map_err(std::io::Error::other),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}

fn place(folder: &Path, key: &str) -> PathBuf {
    folder.join(format!("{:016x}", digest(key)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_was_cut_off_is_passed_over_and_the_next_is_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let ledger = Ledger::open(folder.path()).expect("opens");
        let heard = |seq| What::Heard { task: TaskId::new(), seq, digest: 1 };
        ledger.note(heard(1)).expect("written");
        let mut file = File::options().append(true).open(folder.path().join("ledger")).expect("opens");
        file.write_all(b"\n{\"at\": 5, \"what\": \"he").expect("written");
        ledger.note(heard(2)).expect("written");
        let seqs: Vec<u64> = Ledger::read(folder.path())
            .expect("reads")
            .into_iter()
            .map(|line| match line.what {
                What::Heard { seq, .. } => seq,
                _ => 0,
            })
            .collect();
        assert_eq!(seqs, [1, 2]);
    }

    #[test]
    fn who_waits_for_arrivals_counts_each_once_when_its_line_is_whole() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut arrivals = Arrivals::of(folder.path()).expect("opens");
        let ledger = Ledger::open(folder.path()).expect("opens");
        let mut look = || {
            let seq = |what| if let What::Heard { seq, .. } = what { Some(seq) } else { None };
            arrivals.look(seq).expect("reads")
        };
        let heard = |seq| What::Heard { task: TaskId::new(), seq, digest: 1 };
        assert_eq!(look(), 0);
        ledger.note(heard(1)).expect("written");
        ledger.note(heard(2)).expect("written");
        assert_eq!(look(), 2);
        let line = serde_json::to_vec(&Line { at: 1, what: heard(3) }).expect("a line");
        let mut file = File::options().append(true).open(folder.path().join("ledger")).expect("opens");
        file.write_all(&line[..20]).expect("written");
        assert_eq!(look(), 2);
        file.write_all(&line[20..]).expect("written");
        file.write_all(b"\n").expect("written");
        ledger.note(heard(2)).expect("written");
        assert_eq!(look(), 3, "the one that was whole later, and none twice");
    }

    #[test]
    fn what_is_made_twice_is_made_once() {
        let folder = tempfile::tempdir().expect("a folder");
        for world in [World::open(folder.path()).expect("opens"), World::in_memory()] {
            assert_eq!(world.find("a/b").expect("looks"), None);
            assert_eq!(world.make("a/b", 7).expect("made"), 7);
            assert_eq!(world.clone().make("a/b", 8).expect("there"), 7);
            assert_eq!(world.find("a/b").expect("looks"), Some(7));
        }
    }
}
