//! What is wrong with a manifest, where, and what to do about it.

use std::cell::RefCell;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::{Serialize, Serializer};

/// Something that must be mended before a manifest can be used. Shown as `file:line: message`
/// with the remedy on a line of its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// The file, or the folder when it is about that.
    #[serde(serialize_with = "as_text")]
    pub file: PathBuf,
    /// The line, from 1; none when it is about the whole file.
    pub line: Option<usize>,
    /// The column in characters, from 1.
    pub column: Option<usize>,
    /// What is wrong.
    pub message: String,
    /// What to do about it.
    pub remedy: String,
}

/// A path need not be UTF-8; JSON must.
fn as_text<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&path.display())
}

impl Problem {
    /// A problem of a whole file or folder.
    pub fn of_file(file: &Path, message: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { file: file.to_owned(), line: None, column: None, message: message.into(), remedy: remedy.into() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.file.display())?;
        if let Some(line) = self.line {
            write!(f, "{line}:")?;
        }
        write!(f, " {}\n    {}", self.message, self.remedy)
    }
}

/// Collects the problems of one TOML file, each at its place.
pub struct Report<'t> {
    file: &'t Path,
    text: &'t str,
    problems: RefCell<Vec<Problem>>,
}

impl<'t> Report<'t> {
    /// Nothing is wrong so far with this file, which has this text.
    pub fn new(file: &'t Path, text: &'t str) -> Self {
        Self { file, text, problems: RefCell::default() }
    }

    /// The file.
    pub fn file(&self) -> &'t Path {
        self.file
    }

    /// Its text.
    pub fn text(&self) -> &'t str {
        self.text
    }

    /// Something is wrong at these bytes.
    pub fn problem(&self, at: Range<usize>, message: impl Into<String>, remedy: impl Into<String>) {
        let line = self.line(at.start);
        let before = &self.text[..self.floor(at.start)];
        let column = before.rsplit('\n').next().map_or(0, |line| line.chars().count()) + 1;
        self.problems.borrow_mut().push(Problem {
            line: Some(line),
            column: Some(column),
            ..Problem::of_file(self.file, message, remedy)
        });
    }

    /// The line of a byte, from 1.
    pub fn line(&self, byte: usize) -> usize {
        self.text[..self.floor(byte)].matches('\n').count() + 1
    }

    /// `file:line`, to be named in a problem elsewhere.
    pub fn place(&self, at: &Range<usize>) -> String {
        format!("{}:{}", self.file.display(), self.line(at.start))
    }

    /// Whether nothing is wrong so far.
    pub(super) fn is_clean(&self) -> bool {
        self.problems.borrow().is_empty()
    }

    /// In the order of the file.
    pub fn into_problems(self) -> Vec<Problem> {
        let mut problems = self.problems.into_inner();
        problems.sort_by_key(|problem| (problem.line, problem.column));
        problems
    }

    /// Spans come from a parser and are at characters; nothing may depend on that.
    fn floor(&self, byte: usize) -> usize {
        self.text.floor_char_boundary(byte)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_is_shown_with_file_line_and_remedy() {
        let report = Report::new(Path::new("a.toml"), "[saga]\näö = 1\n");
        report.problem(11..12, "bad", "do this");
        let problems = report.into_problems();
        assert_eq!((problems[0].line, problems[0].column), (Some(2), Some(3)));
        assert_eq!(problems[0].to_string(), "a.toml:2: bad\n    do this");
        assert_eq!(Problem::of_file(Path::new("dir"), "gone", "look").to_string(), "dir: gone\n    look");
    }
}
