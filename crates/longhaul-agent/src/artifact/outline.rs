//! What is told of an artifact in place of its content: a summary and an excerpt, made while it is written.
//!
//! The excerpt has the first lines, the last lines, and lines that tell of trouble, with their numbers, so that
//! the rest can be asked for.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write;
use std::sync::LazyLock;

use regex::bytes::Regex;
use serde::{Deserialize, Serialize};

use super::pieces::{Piece, Shown, Splitter, cut_to, grouped};

/// The longest excerpt.
pub const EXCERPT_BYTES: usize = 3_000;
/// What the first lines, the last lines and the telling ones may take of it, each.
const SHARE_BYTES: usize = EXCERPT_BYTES / 3;
/// What a line costs beside its text: its number, and a note of what was left out before it.
const LINE_COST: usize = 64;
/// What is shown of a line, of its beginning and of its end.
const BEGIN_BYTES: usize = 240;
const END_BYTES: usize = 80;
/// How much of the beginning decides by a single NUL.
const SAMPLE_BYTES: u64 = 8 * 1024;

// A constant pattern: that it is one is tested.
static TROUBLE: LazyLock<Option<Regex>> =
    LazyLock::new(|| Regex::new("(?i-u)error|warn|fail|fatal|panic|denied").ok());

/// An artifact that was stored, and what is told of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stored {
    /// `sha256-` and the digest of its bytes.
    pub artifact_id: String,
    /// How large it is.
    pub bytes: u64,
    /// Whether it is no text.
    pub binary: bool,
    /// How many lines it has; 0 when it is no text.
    pub lines: u64,
    /// One sentence: `48.2 KB of text, 1,204 lines, begins with "…"`.
    pub summary: String,
    /// First lines, last lines, lines that tell of trouble; at most [`EXCERPT_BYTES`].
    pub excerpt: String,
}

/// Whether these bytes, the beginning of something, are no text.
pub fn is_binary(sample: &[u8]) -> bool {
    let mut nature = Nature::default();
    nature.feed(sample);
    // A character that the sample cuts in two is not wrong.
    nature.carry.clear();
    nature.is_binary()
}

/// A numbered line.
#[derive(Debug)]
struct Line {
    number: u64,
    text: String,
}

impl Line {
    fn cost(&self) -> usize {
        self.text.len() + LINE_COST
    }
}

/// Looks at the bytes of an artifact as they pass.
#[derive(Debug, Default)]
pub(super) struct Outline {
    nature: Nature,
    /// The first bytes, for those of no text.
    magic: Vec<u8>,
    splitter: Splitter,
    lines: Gathered,
}

/// Lines that may be shown; each list takes a bounded number of bytes.
#[derive(Debug)]
struct Gathered {
    current: Shown,
    /// Something in the current line tells of trouble.
    telling: bool,
    first: Vec<Line>,
    first_bytes: usize,
    first_telling: Vec<Line>,
    first_telling_bytes: usize,
    last_telling: Recent,
    last: Recent,
}

impl Default for Gathered {
    fn default() -> Self {
        Self {
            current: Shown::new(BEGIN_BYTES, END_BYTES),
            telling: false,
            first: Vec::new(),
            first_bytes: 0,
            first_telling: Vec::new(),
            first_telling_bytes: 0,
            last_telling: Recent { lines: VecDeque::new(), bytes: 0, max: SHARE_BYTES / 2 },
            last: Recent { lines: VecDeque::new(), bytes: 0, max: SHARE_BYTES },
        }
    }
}

impl Outline {
    pub(super) fn feed(&mut self, bytes: &[u8]) {
        self.nature.feed(bytes);
        let room = 16 - self.magic.len();
        self.magic.extend_from_slice(&bytes[..bytes.len().min(room)]);
        let lines = &mut self.lines;
        self.splitter.feed(bytes, &mut |piece| lines.take(&piece));
    }

    pub(super) fn stored(mut self, artifact_id: String) -> Stored {
        let lines = &mut self.lines;
        self.splitter.end(&mut |piece| lines.take(&piece));
        self.nature.end();
        let bytes = self.nature.bytes;
        let binary = self.nature.is_binary();
        if binary {
            let magic = self.magic.iter().fold(String::new(), |text, byte| format!("{text} {byte:02x}"));
            let summary = format!("{} of binary data, begins with the bytes{magic}", size(bytes));
            return Stored { artifact_id, bytes, binary, lines: 0, excerpt: summary.clone(), summary };
        }
        let count = self.splitter.lines();
        let noun = if count == 1 { "line" } else { "lines" };
        let mut summary = format!("{} of text, {} {noun}", size(bytes), grouped(count));
        let begins = self.lines.first.iter().map(|line| line.text.trim()).find(|text| !text.is_empty());
        if let Some(begins) = begins {
            let cut = cut_to(begins, 100);
            let more = if cut.len() < begins.len() { "…" } else { "" };
            // A string takes everything.
            let _ = write!(summary, ", begins with \"{cut}{more}\"");
        }
        Stored { artifact_id, bytes, binary, lines: count, summary, excerpt: self.lines.excerpt(count) }
    }
}

impl Gathered {
    fn take(&mut self, piece: &Piece<'_>) {
        if piece.first {
            self.current = Shown::new(BEGIN_BYTES, END_BYTES);
            self.telling = false;
        }
        self.current.add(piece.bytes);
        self.telling = self.telling || TROUBLE.as_ref().is_some_and(|trouble| trouble.is_match(piece.bytes));
        if !piece.last {
            return;
        }
        let line = || Line { number: piece.line, text: self.current.text() };
        // A text that is short enough is shown whole, so more than a share of the first lines is kept.
        if self.first_bytes <= EXCERPT_BYTES {
            let line = line();
            self.first_bytes += line.cost();
            self.first.push(line);
        }
        if self.telling {
            if self.first_telling_bytes <= SHARE_BYTES / 2 {
                let line = line();
                self.first_telling_bytes += line.cost();
                self.first_telling.push(line);
            } else {
                self.last_telling.push(line());
            }
        }
        self.last.push(line());
    }

    /// The lines in their order, those that matter most as long as there is room.
    fn excerpt(self, count: u64) -> String {
        let all = if self.first_bytes <= EXCERPT_BYTES { EXCERPT_BYTES } else { SHARE_BYTES };
        let shares = [
            (Box::new(self.first.into_iter()) as Box<dyn Iterator<Item = Line>>, all),
            (Box::new(self.last.lines.into_iter().rev()), SHARE_BYTES),
            (Box::new(self.first_telling.into_iter()), SHARE_BYTES / 2),
            (Box::new(self.last_telling.lines.into_iter().rev()), SHARE_BYTES / 2),
        ];
        let mut shown = BTreeMap::new();
        for (lines, mut room) in shares {
            for line in lines {
                if shown.contains_key(&line.number) {
                    continue;
                }
                let Some(left) = room.checked_sub(line.cost()) else { break };
                room = left;
                shown.insert(line.number, line.text);
            }
        }
        let mut text = String::new();
        let mut next = 1;
        // A string takes everything.
        for (number, line) in shown {
            if number > next {
                let _ = writeln!(text, "… {} left out …", some_lines(number - next));
            }
            let _ = writeln!(text, "{number}: {line}");
            next = number + 1;
        }
        if next <= count {
            let _ = writeln!(text, "… {} left out …", some_lines(count + 1 - next));
        }
        text
    }
}

fn some_lines(count: u64) -> String {
    format!("{} line{}", grouped(count), if count == 1 { "" } else { "s" })
}

/// The last lines that fit.
#[derive(Debug)]
struct Recent {
    lines: VecDeque<Line>,
    bytes: usize,
    max: usize,
}

impl Recent {
    fn push(&mut self, line: Line) {
        self.bytes += line.cost();
        self.lines.push_back(line);
        while self.bytes > self.max && self.lines.len() > 1 {
            self.bytes -= self.lines.pop_front().map_or(0, |line| line.cost());
        }
    }
}

/// Text or not: by NULs at the beginning, or by how much is neither UTF-8 nor meant to be.
#[derive(Debug, Default)]
struct Nature {
    bytes: u64,
    early_nul: bool,
    /// NULs, and bytes that are not UTF-8.
    wrong: u64,
    /// The beginning of a character whose end has not come.
    carry: Vec<u8>,
}

impl Nature {
    fn feed(&mut self, bytes: &[u8]) {
        let nuls = bytes.iter().filter(|byte| **byte == 0).count() as u64;
        let early = SAMPLE_BYTES.saturating_sub(self.bytes).min(bytes.len() as u64) as usize;
        self.early_nul = self.early_nul || bytes[..early].contains(&0);
        self.bytes += bytes.len() as u64;
        self.wrong += nuls;
        if self.carry.is_empty() {
            self.look(bytes);
        } else {
            let joined = [std::mem::take(&mut self.carry).as_slice(), bytes].concat();
            self.look(&joined);
        }
    }

    fn look(&mut self, mut bytes: &[u8]) {
        while let Err(error) = std::str::from_utf8(bytes) {
            let rest = &bytes[error.valid_up_to()..];
            let Some(wrong) = error.error_len() else {
                self.carry = rest.to_vec();
                return;
            };
            self.wrong += wrong as u64;
            bytes = &rest[wrong..];
        }
    }

    fn end(&mut self) {
        self.wrong += self.carry.len() as u64;
        self.carry.clear();
    }

    fn is_binary(&self) -> bool {
        self.early_nul || self.wrong * 10 > self.bytes
    }
}

/// `48.2 KB`.
fn size(bytes: u64) -> String {
    let units = ["KB", "MB", "GB"];
    if bytes < 1_000 {
        return format!("{bytes} byte{}", if bytes == 1 { "" } else { "s" });
    }
    let mut value = bytes as f64 / 1_000.0;
    let mut unit = 0;
    // What would be shown as 1000.0 is 1.0 of the next.
    while value >= 999.95 && unit + 1 < units.len() {
        value /= 1_000.0;
        unit += 1;
    }
    format!("{value:.1} {}", units[unit])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn outline(bytes: &[u8]) -> Stored {
        let mut outline = Outline::default();
        for chunk in bytes.chunks(777) {
            outline.feed(chunk);
        }
        outline.stored("id".to_owned())
    }

    #[test]
    fn a_short_text_is_shown_whole() {
        let stored = outline("Filesystem  Use%\n/dev/sda1   97 %\r\nüber".as_bytes());
        assert_eq!(stored.summary, "40 bytes of text, 3 lines, begins with \"Filesystem  Use%\"");
        assert_eq!(stored.excerpt, "1: Filesystem  Use%\n2: /dev/sda1   97 %\n3: über\n");
        assert_eq!((stored.lines, stored.binary), (3, false));
        assert_eq!(outline(b"").summary, "0 bytes of text, 0 lines");
    }

    #[test]
    fn the_excerpt_has_the_first_the_last_and_the_telling_lines() {
        assert!(TROUBLE.is_some());
        let text: String = (1..=1204)
            .map(|n| match n {
                600 => "FATAL: out of memory\n".to_owned(),
                900 => "permission denied\n".to_owned(),
                n => format!("line {n} of the log\n"),
            })
            .collect();
        let stored = outline(text.as_bytes());
        assert!(stored.summary.ends_with("of text, 1,204 lines, begins with \"line 1 of the log\""));
        for shown in
            ["1: line 1 of", "600: FATAL: out of", "900: permission", "1204: line 1204", "299 lines left out"]
        {
            assert!(stored.excerpt.contains(shown), "{shown} is not in {}", stored.excerpt);
        }
    }

    #[test]
    fn trouble_at_both_ends_of_a_long_log_is_shown() {
        let text: String = (1..=5000).map(|n| format!("error number {n}\n")).collect();
        let excerpt = outline(text.as_bytes()).excerpt;
        assert!(excerpt.contains("1: error number 1\n"), "{excerpt}");
        assert!(excerpt.contains("5000: error number 5000\n"), "{excerpt}");
    }

    #[test]
    fn one_endless_line_is_shown_by_its_two_ends() {
        let mut text = b"{\"begin\": [".to_vec();
        text.extend(std::iter::repeat_n(b'7', 300_000));
        text.extend(b"], \"end\": true}");
        let stored = outline(&text);
        assert_eq!(stored.lines, 1);
        assert!(stored.excerpt.starts_with("1: {\"begin\": [777"), "{}", stored.excerpt);
        assert!(stored.excerpt.ends_with("777], \"end\": true}\n"), "{}", stored.excerpt);
    }

    #[test]
    fn what_is_no_text_is_recognised() {
        let png = outline(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR");
        assert!(png.binary);
        assert!(png.summary.starts_with("16 bytes of binary data, begins with the bytes 89 50 4e 47"));
        let noise: Vec<u8> = (0..5_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8 | 1).collect();
        assert!(outline(&noise).binary);
        // A single wrong byte, a character over a boundary, and ANSI colours do not make a log binary.
        let log = [b"\x1b[31mred\x1b[0m \xff ".as_slice(), "ä".repeat(2000).as_bytes()].concat();
        let log = outline(&log);
        assert!(!log.binary);
        assert!(!log.excerpt.contains('\x1b'));
        assert!(!is_binary(&"äöü".as_bytes()[..5]));
    }

    #[test]
    fn sizes_are_for_people() {
        assert_eq!(
            [1, 999, 1_000, 48_213, 999_960, 52_428_800].map(size),
            ["1 byte", "999 bytes", "1.0 KB", "48.2 KB", "1.0 MB", "52.4 MB"]
        );
    }

    proptest! {
        #[test]
        fn an_excerpt_is_never_too_long_and_has_no_control_characters(
            lines in proptest::collection::vec("[a-zäß€😀\\x00\\x1b]{0,40}|error.{0,500}|x{300,900}", 0..400),
        ) {
            let stored = outline(lines.join("\n").as_bytes());
            prop_assert!(stored.excerpt.len() <= EXCERPT_BYTES, "{} bytes", stored.excerpt.len());
            prop_assert!(stored.summary.len() <= 300);
            prop_assert!(!stored.excerpt.contains(|c: char| c.is_control() && c != '\t' && c != '\n'));
        }
    }
}
