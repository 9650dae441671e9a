//! What clients and people were told: one record when they ask, one when they have an answer. A record without an
//! answer is a question whose answer is unknown.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use longhaul::TaskId;
use serde::{Deserialize, Serialize};

use crate::ledger::{Appended, boot_micros};

/// What was asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "snake_case")]
pub enum Ask {
    /// A submit.
    Submit {
        /// The id that the task is to have.
        id: TaskId,
        /// Its owner.
        tenant: String,
        /// Its key.
        key: Option<String>,
        /// What makes equal submits equal, where that was asked for.
        equal: Option<u64>,
    },
    /// A cancel.
    Cancel {
        /// Which task.
        task: TaskId,
    },
    /// An approval.
    Approve {
        /// Whose.
        task: TaskId,
        /// Which.
        approval: String,
        /// Whether what the approver saw is what was asked for.
        right: bool,
    },
    /// A submit over HTTP: the server makes the id.
    Post {
        /// The number of the program.
        number: u64,
        /// Its owner.
        tenant: String,
        /// The header `Idempotency-Key`.
        key: Option<String>,
        /// What makes equal submits equal, where that was asked for.
        equal: Option<u64>,
    },
    /// A task that ended is to be opened again.
    Resume {
        /// Which task.
        task: TaskId,
    },
    /// What a task did is to be undone, by a task of its own; the answer names that one.
    Undo {
        /// Which task.
        task: TaskId,
    },
    /// A fork; the answer names it.
    Fork {
        /// Of which task.
        task: TaskId,
        /// From which step on.
        from: String,
    },
    /// The state's goal, a number, is to be this one, if the state still has the version that was read.
    Patch {
        /// Of which task.
        task: TaskId,
        /// The version that was read.
        version: u64,
        /// The number.
        goal: u64,
    },
    /// Anything else: a signal, an answer, a denial, a decision.
    Other {
        /// Which task.
        task: TaskId,
        /// What.
        what: String,
    },
}

/// What the answer was.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub enum Answer {
    /// It is done.
    Done {
        /// The task that is meant.
        task: TaskId,
        /// Its state then, where the answer says so.
        state: Option<longhaul::State>,
    },
    /// It was refused.
    Refused {
        /// Why.
        why: String,
    },
    /// Nobody knows.
    Unknown {
        /// Why.
        why: String,
    },
}

/// A question and its answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Asked {
    /// What.
    pub ask: Ask,
    /// The answer; [`Answer::Unknown`] when there was none.
    pub answer: Answer,
    /// When it was asked, by the host's boot clock, microseconds.
    pub began: i64,
    /// When it was answered, if it was.
    pub ended: Option<i64>,
}

/// What a reader was given of a task's events, from one connect to the next.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stream {
    /// The task.
    pub task: TaskId,
    /// It asked for what comes after this number.
    pub after: u64,
    /// Number and content, as [`crate::ledger::digest`] has it.
    pub events: Vec<(u64, u64)>,
    /// Whether the end was reached.
    pub ended: bool,
    /// Who read it, if that one read from the first event to the end; the streams of one reader follow each other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reader: Option<u64>,
}

/// What someone was shown over HTTP.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sight {
    /// Whose token it was.
    pub tenant: String,
    /// What was asked for.
    pub what: String,
    /// The status of the answer.
    pub status: u16,
    /// Whether it was another tenant's, asked for on purpose.
    pub foreign: bool,
    /// The tenants whose markers the answer carries.
    pub carries: Vec<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(tag = "record", rename_all = "snake_case")]
enum Record {
    Asked { number: u64, who: String, at: i64, what: Ask },
    Answered { number: u64, who: String, at: i64, what: Answer },
    Read { what: Stream },
    Saw { what: Sight },
}

/// The records of one client.
#[derive(Debug)]
pub struct Records {
    file: Appended,
    who: String,
    next: AtomicU64,
}

/// The number of a question.
#[derive(Clone, Copy, Debug)]
pub struct Open(u64);

impl Records {
    /// Opens or creates the records of a folder, for someone of this name.
    pub fn open(folder: &Path, who: &str) -> std::io::Result<Self> {
        // Another one of the same name, after a crash, must not answer the questions of the first.
        let who = format!("{who}/{}", std::process::id());
        Ok(Self { file: Appended::open(&folder.join("records"))?, who, next: AtomicU64::new(0) })
    }

    /// Records in memory, where they are appended to those of others. No two have the same name.
    pub fn in_memory(file: &Appended, who: &str) -> Self {
        Self { file: file.clone(), who: who.to_owned(), next: AtomicU64::new(0) }
    }

    /// Notes a question, before it is asked.
    pub fn ask(&self, what: Ask) -> std::io::Result<Open> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.file.append(&Record::Asked { number, who: self.who.clone(), at: boot_micros(), what })?;
        Ok(Open(number))
    }

    /// Notes its answer.
    pub fn answer(&self, Open(number): Open, what: Answer) -> std::io::Result<()> {
        self.file.append(&Record::Answered { number, who: self.who.clone(), at: boot_micros(), what })
    }

    /// Notes what was read.
    pub fn read_events(&self, what: Stream) -> std::io::Result<()> {
        self.file.append(&Record::Read { what })
    }

    /// Notes what was shown.
    pub fn saw(&self, what: Sight) -> std::io::Result<()> {
        self.file.append(&Record::Saw { what })
    }

    /// What was shown over HTTP.
    pub fn sights(folder: &Path) -> std::io::Result<Vec<Sight>> {
        let records = Appended::read::<Record>(&folder.join("records"))?.into_iter();
        Ok(records
            .filter_map(|record| if let Record::Saw { what } = record { Some(what) } else { None })
            .collect())
    }

    /// All records of a folder.
    pub fn read(folder: &Path) -> std::io::Result<(Vec<Asked>, Vec<Stream>)> {
        Ok(gathered(Appended::read::<Record>(&folder.join("records"))?))
    }

    /// All records of a memory.
    pub fn read_memory(file: &Appended) -> (Vec<Asked>, Vec<Stream>) {
        gathered(file.lines())
    }
}

fn gathered(records: Vec<Record>) -> (Vec<Asked>, Vec<Stream>) {
    let (mut asked, mut places, mut streams) = (Vec::new(), BTreeMap::new(), Vec::new());
    for record in records {
        match record {
            Record::Asked { number, who, at, what } => {
                places.insert((who, number), asked.len());
                let answer = Answer::Unknown { why: "no answer".to_owned() };
                asked.push(Asked { ask: what, answer, began: at, ended: None });
            }
            Record::Answered { number, who, at, what } => {
                if let Some(&place) = places.get(&(who, number)) {
                    let asked: &mut Asked = &mut asked[place];
                    (asked.answer, asked.ended) = (what, Some(at));
                }
            }
            Record::Read { what } => streams.push(what),
            Record::Saw { .. } => {}
        }
    }
    (asked, streams)
}

/// What an answer of the engine means for the one who asked.
pub fn answer_of(task: TaskId, answer: Result<(TaskId, Option<longhaul::State>), longhaul::Error>) -> Answer {
    match answer {
        Ok((task, state)) => Answer::Done { task, state },
        Err(longhaul::Error::Store(error)) => Answer::Unknown { why: error.to_string() },
        Err(error) => Answer::Refused { why: format!("{task}: {error}") },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_without_an_answer_is_unknown() {
        let folder = tempfile::tempdir().expect("a folder");
        let records = Records::open(folder.path(), "ann").expect("opens");
        let task = TaskId::new();
        let first = records.ask(Ask::Cancel { task }).expect("noted");
        records.ask(Ask::Cancel { task }).expect("noted");
        records.answer(first, Answer::Done { task, state: None }).expect("noted");
        let (asked, _) = Records::read(folder.path()).expect("reads");
        assert!(matches!(asked[0].answer, Answer::Done { .. }));
        assert!(matches!(asked[1].answer, Answer::Unknown { .. }) && asked[1].ended.is_none());
    }
}
