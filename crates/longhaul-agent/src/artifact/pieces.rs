//! Lines of a stream of bytes, with bounded memory however long a line is.

use std::fmt::Write;

/// The longest piece of a line that is looked at in one.
pub(super) const PIECE_BYTES: usize = 64 * 1024;

/// A line, or a piece of a long one.
#[derive(Debug, PartialEq)]
pub(super) struct Piece<'a> {
    /// The number of its line, from 1 on.
    pub(super) line: u64,
    /// Where it begins in the whole.
    pub(super) offset: u64,
    pub(super) bytes: &'a [u8],
    /// It begins its line.
    pub(super) first: bool,
    /// It ends its line.
    pub(super) last: bool,
}

/// Cuts a stream into lines.
#[derive(Debug)]
pub(super) struct Splitter {
    /// What is not given yet of the current line.
    buffer: Vec<u8>,
    line: u64,
    /// Where the buffer begins.
    offset: u64,
    /// Nothing of the current line was given yet.
    first: bool,
}

impl Default for Splitter {
    fn default() -> Self {
        Self { buffer: Vec::new(), line: 1, offset: 0, first: true }
    }
}

impl Splitter {
    /// Gives `each` the lines that end in `chunk`, and pieces of those that are too long to wait for their end.
    pub(super) fn feed(&mut self, mut chunk: &[u8], each: &mut impl FnMut(Piece<'_>)) {
        while !chunk.is_empty() {
            let room = PIECE_BYTES - self.buffer.len();
            let seen = &chunk[..chunk.len().min(room + 1)];
            match seen.iter().position(|byte| *byte == b'\n') {
                Some(end) if self.buffer.is_empty() => {
                    self.give(&chunk[..end], true, each);
                    self.next_line();
                    chunk = &chunk[end + 1..];
                }
                Some(end) => {
                    self.buffer.extend_from_slice(&chunk[..end]);
                    self.give_buffer(true, each);
                    self.next_line();
                    chunk = &chunk[end + 1..];
                }
                None => {
                    let taken = chunk.len().min(room);
                    self.buffer.extend_from_slice(&chunk[..taken]);
                    chunk = &chunk[taken..];
                    if self.buffer.len() == PIECE_BYTES {
                        self.give_buffer(false, each);
                    }
                }
            }
        }
    }

    /// Gives the last line, when nothing ended it.
    pub(super) fn end(&mut self, each: &mut impl FnMut(Piece<'_>)) {
        if !self.buffer.is_empty() || !self.first {
            self.give_buffer(true, each);
            self.next_line();
        }
    }

    /// How many lines there were, after the end.
    pub(super) fn lines(&self) -> u64 {
        self.line - 1
    }

    fn give_buffer(&mut self, last: bool, each: &mut impl FnMut(Piece<'_>)) {
        let mut buffer = std::mem::take(&mut self.buffer);
        self.give(&buffer, last, each);
        buffer.clear();
        self.buffer = buffer;
    }

    fn give(&mut self, bytes: &[u8], last: bool, each: &mut impl FnMut(Piece<'_>)) {
        each(Piece { line: self.line, offset: self.offset, bytes, first: self.first, last });
        self.offset += bytes.len() as u64;
        self.first = false;
    }

    fn next_line(&mut self) {
        // The line break.
        self.offset += 1;
        self.line += 1;
        self.first = true;
    }
}

/// A line as it is shown: its beginning, and its end when it is too long to be shown whole.
#[derive(Debug)]
pub(super) struct Shown {
    begin: Vec<u8>,
    end: Vec<u8>,
    bytes: u64,
    max_begin: usize,
    max_end: usize,
}

impl Shown {
    /// One that takes up to `max_begin` and `max_end` bytes from the two ends of a line.
    pub(super) fn new(max_begin: usize, max_end: usize) -> Self {
        Self { begin: Vec::new(), end: Vec::new(), bytes: 0, max_begin, max_end }
    }

    pub(super) fn add(&mut self, bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        let (begin, rest) = bytes.split_at(bytes.len().min(self.max_begin - self.begin.len()));
        self.begin.extend_from_slice(begin);
        let rest = &rest[rest.len().saturating_sub(self.max_end)..];
        let kept = self.max_end - rest.len();
        self.end.drain(..self.end.len().saturating_sub(kept));
        self.end.extend_from_slice(rest);
    }

    /// The text, without what is no text.
    pub(super) fn text(&self) -> String {
        let left_out = self.bytes - (self.begin.len() + self.end.len()) as u64;
        if left_out == 0 {
            let line = [self.begin.as_slice(), &self.end].concat();
            return clean(line.strip_suffix(b"\r").unwrap_or(&line));
        }
        let mut text = clean(whole_characters(&self.begin));
        // A string takes everything.
        let _ = write!(text, " … [{} bytes] … ", grouped(left_out));
        text + &clean(self.end.trim_ascii_end())
    }
}

/// Text for people and models: what is not UTF-8 is replaced, control characters are left out.
pub(super) fn clean(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.chars().filter(|c| !c.is_control() || *c == '\t').collect()
}

/// Without the beginning of a character at its end.
fn whole_characters(bytes: &[u8]) -> &[u8] {
    match std::str::from_utf8(bytes) {
        Err(error) if error.error_len().is_none() => &bytes[..error.valid_up_to()],
        _ => bytes,
    }
}

/// The beginning of a text, at most `max` bytes, whole characters only.
pub(crate) fn cut_to(text: &str, max: usize) -> &str {
    &text[..text.floor_char_boundary(max)]
}

/// `1204` as `1,204`.
pub(super) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn split(chunks: &[&[u8]]) -> Vec<(u64, u64, Vec<u8>, bool, bool)> {
        let mut splitter = Splitter::default();
        let mut pieces = Vec::new();
        let mut each = |piece: Piece<'_>| {
            pieces.push((piece.line, piece.offset, piece.bytes.to_vec(), piece.first, piece.last));
        };
        for chunk in chunks {
            splitter.feed(chunk, &mut each);
        }
        splitter.end(&mut each);
        pieces
    }

    #[test]
    fn a_line_without_end_is_a_line_and_nothing_is_none() {
        assert_eq!(split(&[]), []);
        assert_eq!(split(&[b"one"]), [(1, 0, b"one".to_vec(), true, true)]);
        assert_eq!(split(&[b"o", b"ne\n"]), [(1, 0, b"one".to_vec(), true, true)]);
        let lines = split(&[b"\n\nx"]);
        assert_eq!(lines.iter().map(|line| (line.0, line.1)).collect::<Vec<_>>(), [(1, 0), (2, 1), (3, 2)]);
    }

    #[test]
    fn a_long_line_comes_in_pieces_that_know_where_they_are() {
        let line = vec![b'x'; PIECE_BYTES + 10];
        let pieces = split(&[&line, b"\nnext"]);
        let shape: Vec<_> =
            pieces.iter().map(|piece| (piece.0, piece.1, piece.2.len(), piece.3, piece.4)).collect();
        let long = PIECE_BYTES as u64;
        assert_eq!(
            shape,
            [(1, 0, PIECE_BYTES, true, false), (1, long, 10, false, true), (2, long + 11, 4, true, true)]
        );
    }

    #[test]
    fn a_long_line_is_shown_by_its_two_ends() {
        let mut shown = Shown::new(4, 3);
        for piece in ["abc", "defgh", "ij", "klm\r"] {
            shown.add(piece.as_bytes());
        }
        assert_eq!(shown.text(), "abcd … [7 bytes] … lm");
        let mut short = Shown::new(4, 3);
        short.add(b"abcdef\r");
        assert_eq!(short.text(), "abcdef");
    }

    #[test]
    fn numbers_are_grouped() {
        assert_eq!([7, 999, 1_204, 52_428_800].map(grouped), ["7", "999", "1,204", "52,428,800"]);
    }

    proptest! {
        #[test]
        fn however_the_chunks_fall_the_lines_are_the_same(
            text in proptest::collection::vec(prop_oneof![3 => Just(b'a'), 1 => Just(b'\n')], 0..300),
            size in 1_usize..40,
        ) {
            let chunks: Vec<&[u8]> = text.chunks(size).collect();
            prop_assert_eq!(split(&chunks), split(&[&text]));
        }
    }
}
