//! Reading in a large text: by lines, and by a pattern. Both stream the artifact.

use std::fmt::Write;

use futures_util::TryStreamExt;
use regex::bytes::{Regex, RegexBuilder};
use serde::{Deserialize, Serialize};

use super::pieces::{Piece, Shown, Splitter, clean, cut_to};
use super::{ArtifactError, Artifacts};

/// What is shown of one line of a page, of its beginning and of its end.
const BEGIN_BYTES: usize = 2_000;
const END_BYTES: usize = 200;
/// What is shown before and after a match.
const BEFORE_BYTES: usize = 100;
const AFTER_BYTES: usize = 200;
/// The longest pattern, and what it may take when it is made ready.
const MAX_PATTERN_BYTES: usize = 1_000;
const PATTERN_MEMORY: usize = 1024 * 1024;

/// Some lines of an artifact.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Page {
    /// The lines, each with its number before it; what is too long is cut, and says so.
    pub text: String,
    /// How many lines are here.
    pub lines: u64,
    /// The line to go on from, unless this was the end.
    pub next_line: Option<u64>,
}

/// Some text of an artifact.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Text {
    /// The text; what is no text is shown by a mark.
    pub text: String,
    /// The byte to go on from, unless this was the end.
    pub next_byte: Option<u64>,
}

/// Where a pattern was found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Matches {
    /// In the order of the artifact; one for each line.
    pub matches: Vec<Match>,
    /// Whether there are more than were asked for.
    pub more: bool,
}

/// A line with a match.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Match {
    /// The number of the line, from 1 on.
    pub line: u64,
    /// Where the match begins, in bytes from the artifact's beginning.
    pub offset: u64,
    /// The match and what stands around it in its line.
    pub text: String,
}

impl Artifacts {
    /// At most `count` lines from `from_line` on (the first is 1), in at most `max_bytes`; but always at least one
    /// line, cut if need be, so that there is a way on.
    pub async fn lines(
        &self,
        tenant: &str,
        id: &str,
        from_line: u64,
        count: u64,
        max_bytes: usize,
    ) -> Result<Page, ArtifactError> {
        let mut stream = self.stream(tenant, id, 0..u64::MAX).await?;
        let mut splitter = Splitter::default();
        let mut pager = Pager::new(from_line.max(1), count.max(1), max_bytes);
        while let Some(chunk) = stream.try_next().await? {
            splitter.feed(&chunk, &mut |piece| pager.take(&piece));
            if pager.page.next_line.is_some() {
                return Ok(pager.page);
            }
        }
        splitter.end(&mut |piece| pager.take(&piece));
        Ok(pager.page)
    }

    /// At most `max_bytes` of text from the byte `from` on, but at least one character, so that there is a way on.
    pub async fn text(&self, tenant: &str, id: &str, from: u64, max_bytes: usize) -> Result<Text, ArtifactError> {
        const LONGEST_CHARACTER: usize = 4;
        let wanted = max_bytes.max(LONGEST_CHARACTER);
        let bytes = self.read(tenant, id, from..from.saturating_add(wanted as u64)).await?;
        let is_end = bytes.len() < wanted;
        // A character that is cut at the end comes with the next page.
        let whole = match std::str::from_utf8(&bytes) {
            Err(error) if error.error_len().is_none() && !is_end => error.valid_up_to().max(1),
            _ => bytes.len(),
        };
        let next_byte = (!is_end).then_some(from + whole as u64);
        Ok(Text { text: clean(&bytes[..whole]), next_byte })
    }

    /// The lines that match a regular expression, at most `max_matches` of them in at most `max_bytes`. A line of more
    /// than 64 KiB is searched in pieces of that size.
    pub async fn search(
        &self,
        tenant: &str,
        id: &str,
        pattern: &str,
        max_matches: usize,
        max_bytes: usize,
    ) -> Result<Matches, ArtifactError> {
        let pattern = ready(pattern)?;
        let mut stream = self.stream(tenant, id, 0..u64::MAX).await?;
        let mut splitter = Splitter::default();
        let mut finder = Finder { pattern, found: Matches::default(), matched: 0, max_matches, room: max_bytes };
        while let Some(chunk) = stream.try_next().await? {
            splitter.feed(&chunk, &mut |piece| finder.take(&piece));
            if finder.found.more {
                return Ok(finder.found);
            }
        }
        splitter.end(&mut |piece| finder.take(&piece));
        Ok(finder.found)
    }
}

struct Pager {
    page: Page,
    from: u64,
    count: u64,
    max_bytes: usize,
    current: Shown,
}

impl Pager {
    fn new(from: u64, count: u64, max_bytes: usize) -> Self {
        Self { page: Page::default(), from, count, max_bytes, current: Shown::new(0, 0) }
    }

    fn take(&mut self, piece: &Piece<'_>) {
        if piece.line < self.from || self.page.next_line.is_some() {
            return;
        }
        if self.page.lines == self.count {
            self.page.next_line = Some(piece.line);
            return;
        }
        if piece.first {
            self.current = Shown::new(BEGIN_BYTES, END_BYTES);
        }
        self.current.add(piece.bytes);
        if piece.last {
            self.add(piece.line);
        }
    }

    fn add(&mut self, number: u64) {
        let mut line = String::new();
        // A string takes everything.
        let _ = writeln!(line, "{number}: {}", self.current.text());
        if self.page.text.len() + line.len() > self.max_bytes {
            if self.page.lines > 0 {
                self.page.next_line = Some(number);
                return;
            }
            line = format!("{}…\n", cut_to(&line, self.max_bytes.saturating_sub("…\n".len())));
        }
        self.page.text.push_str(&line);
        self.page.lines += 1;
    }
}

struct Finder {
    pattern: Regex,
    found: Matches,
    /// The line of the last match: it is given once.
    matched: u64,
    max_matches: usize,
    room: usize,
}

impl Finder {
    fn take(&mut self, piece: &Piece<'_>) {
        if self.found.more || self.matched == piece.line {
            return;
        }
        let line = piece.bytes.strip_suffix(b"\r").unwrap_or(piece.bytes);
        let Some(at) = self.pattern.find(line) else { return };
        self.matched = piece.line;
        let from = at.start().saturating_sub(BEFORE_BYTES);
        let to = at.end().min(at.start() + AFTER_BYTES).saturating_add(AFTER_BYTES).min(line.len());
        let begins = if piece.first && from == 0 { "" } else { "…" };
        let ends = if piece.last && to == line.len() { "" } else { "…" };
        let text = format!("{begins}{}{ends}", clean(trim_broken(&line[from..to])));
        match self.room.checked_sub(text.len()) {
            Some(room) if self.found.matches.len() < self.max_matches => {
                self.room = room;
                let offset = piece.offset + at.start() as u64;
                self.found.matches.push(Match { line: piece.line, offset, text });
            }
            _ => self.found.more = true,
        }
    }
}

/// Without halves of characters at its ends.
fn trim_broken(mut bytes: &[u8]) -> &[u8] {
    let continues = |byte: &u8| (0x80..0xc0).contains(byte);
    for _ in 0..3 {
        if let [first, rest @ ..] = bytes
            && continues(first)
        {
            bytes = rest;
        }
    }
    match std::str::from_utf8(bytes) {
        Err(error) if error.error_len().is_none() => &bytes[..error.valid_up_to()],
        _ => bytes,
    }
}

fn ready(pattern: &str) -> Result<Regex, ArtifactError> {
    if pattern.len() > MAX_PATTERN_BYTES {
        let why = format!("it has {} bytes, {MAX_PATTERN_BYTES} are allowed", pattern.len());
        return Err(ArtifactError::BadPattern(why));
    }
    let built = RegexBuilder::new(pattern).size_limit(PATTERN_MEMORY).dfa_size_limit(PATTERN_MEMORY).build();
    built.map_err(|error| {
        ArtifactError::BadPattern(match error {
            regex::Error::CompiledTooBig(_) => "it grows too large; use fewer or smaller repetitions".to_owned(),
            error => error.to_string(),
        })
    })
}
