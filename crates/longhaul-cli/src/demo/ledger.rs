//! The witness: a file outside of the product to which every effect of the demo appends a line when it begins and a line
//! when it has ended. The demo is judged by it, not by what the engine says of itself.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// The name of the file in the demo's folder.
pub(super) const FILE: &str = "ledger";

/// What an effect is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(crate) enum What {
    /// A step of a saga.
    Do,
    /// What takes a step back.
    Undo,
    /// A tool that an agent called.
    Call,
}

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Mark {
    Begin,
    Done,
    Failed,
}

/// One line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Line {
    pub(super) task: String,
    /// Without the word that the engine puts before the name of an undo.
    pub(super) step: String,
    /// The idempotency key that the engine gave.
    pub(super) key: String,
    pub(super) fence: u64,
    /// The worker process that started the effect's own process.
    pub(super) worker: u32,
    pub(super) process: u32,
    pub(super) what: What,
    pub(super) mark: Mark,
    /// Microseconds since 1970, only for showing how long something took: the order is that of the lines.
    pub(super) at: i64,
}

/// Microseconds since 1970.
pub(super) fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}

/// Appends a line, in one write: lines of several processes never mix. A kill can cut one off in the middle, so each
/// begins a line of its own.
pub(super) fn append(file: &mut File, line: &Line) -> io::Result<()> {
    let text = serde_json::to_string(line)?;
    file.write_all(format!("\n{text}\n").as_bytes())
}

/// Reads the ledger as it grows.
pub(super) struct Reader {
    file: File,
    /// What follows the last line that was whole.
    rest: Vec<u8>,
    lines: Vec<Line>,
}

impl Reader {
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let file = File::options().create(true).append(true).read(true).open(path)?;
        Ok(Self { file, rest: Vec::new(), lines: Vec::new() })
    }

    /// Reads what was appended since; gives all lines so far. One that was cut off is none.
    pub(super) fn read(&mut self) -> io::Result<&[Line]> {
        self.file.read_to_end(&mut self.rest)?;
        while let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.rest.drain(..=end).collect();
            self.lines.extend(serde_json::from_slice::<Line>(&line).ok());
        }
        Ok(&self.lines)
    }

    pub(super) fn lines(&self) -> &[Line] {
        &self.lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_as_they_come_and_one_that_was_cut_off_is_none() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join(FILE);
        let mut reader = Reader::open(&path).expect("made");
        assert!(reader.read().expect("read").is_empty());
        let line = Line {
            task: "t".to_owned(),
            step: "create_dns".to_owned(),
            key: "t/create_dns".to_owned(),
            fence: 1,
            worker: 7,
            process: 8,
            what: What::Do,
            mark: Mark::Begin,
            at: 5,
        };
        let mut file = File::options().append(true).open(&path).expect("there");
        append(&mut file, &line).expect("written");
        file.write_all(b"\n{\"task\": \"cut o").expect("written");
        assert_eq!(reader.read().expect("read"), std::slice::from_ref(&line));
        let done = Line { mark: Mark::Done, ..line.clone() };
        append(&mut file, &done).expect("written");
        assert_eq!(reader.read().expect("read"), [line, done]);
    }
}
