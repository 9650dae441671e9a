//! What a seed makes of a corpus: parts of JSON exchanged, words replaced by [`WORDS`], texts cut, spliced, repeated and nested, bits
//! turned over.

use crate::corpus::Corpus;
use crate::dice::Dice;
use crate::json::{Kind, parts};
use crate::words::WORDS;

/// An input grows to at most this, unless it came longer.
const MOST_BYTES: usize = 64 * 1024;
/// How deep something is nested: around and beyond the bounds of parsers.
const DEPTHS: [usize; 7] = [2, 60, 64, 65, 127, 130, 3_000];
/// How long something is made: around and beyond the bounds of fields.
const LENGTHS: [usize; 8] = [2, 64, 128, 255, 256, 1_000, 5_000, 40_000];

/// Draws inputs.
#[derive(Clone, Debug)]
pub struct Mutator<'c> {
    corpus: &'c Corpus,
    /// Where its chance comes from; whoever draws more than bytes uses the same.
    pub dice: Dice,
    drawn: usize,
}

impl<'c> Mutator<'c> {
    /// The inputs of this seed for a parser. The first are the files of the corpus as they are.
    pub fn new(corpus: &'c Corpus, seed: u64, parser: &str) -> Self {
        Self { corpus, dice: Dice::of(seed, parser), drawn: 0 }
    }

    /// The next input.
    pub fn draw(&mut self) -> Vec<u8> {
        self.drawn += 1;
        if self.drawn <= self.corpus.count() {
            return self.corpus.bytes(self.drawn - 1).to_vec();
        }
        let mut input = self.corpus.bytes(self.dice.below(self.corpus.count())).to_vec();
        if self.dice.once_in(20) {
            return input;
        }
        for _ in 0..=self.dice.below(4) {
            self.change(&mut input);
        }
        input
    }

    /// Changes something of it.
    pub fn change(&mut self, input: &mut Vec<u8>) {
        let before = input.len();
        match self.dice.below(20) {
            0..9 => self.change_json(input),
            9..12 => self.replace_word(input),
            12 => self.insert(input),
            13 => self.cut(input),
            14 => self.truncate(input),
            15 => self.repeat(input),
            16 => self.splice(input),
            17 => self.flip(input),
            18 => self.lines(input),
            _ => self.lengthen(input),
        }
        if input.len() > MOST_BYTES {
            input.truncate(before.max(MOST_BYTES));
        }
    }

    fn word(&mut self) -> &'static [u8] {
        WORDS[self.dice.below(WORDS.len())]
    }

    /// A value of JSON, more often than not a sound one.
    fn value(&mut self) -> Vec<u8> {
        let word = self.word();
        match self.dice.below(4) {
            0 => word.to_vec(),
            1 => [b"\"", word, b"\""].concat(),
            2 => [b"[", word, b"]"].concat(),
            _ => [b"{\"", word, b"\":", word, b"}"].concat(),
        }
    }

    fn change_json(&mut self, input: &mut Vec<u8>) {
        let parts = parts(input);
        if parts.is_empty() {
            return self.replace_word(input);
        }
        let part = *self.dice.one_of(&parts);
        let whole = input[part.start..part.end].to_vec();
        let new = match (part.kind, self.dice.below(7)) {
            (Kind::Member, 0) => Vec::new(),
            // Twice.
            (Kind::Member, 1) => [&whole, b",".as_slice(), &whole].concat(),
            (Kind::Member, _) => [b"\"", self.word(), b"\":", &self.value(), b",", &whole].concat(),
            (Kind::Name, _) => [b"\"", self.word(), b"\""].concat(),
            (Kind::Value, 0) => nested(&whole, *self.dice.one_of(&DEPTHS), self.dice.once_in(2)),
            // That of another part, or of another file.
            (Kind::Value, 1) => {
                let other = *self.dice.one_of(&parts);
                input[other.start..other.end].to_vec()
            }
            (Kind::Value, 2) => {
                let other = self.corpus.bytes(self.dice.below(self.corpus.count()));
                match crate::json::parts(other).as_slice() {
                    [] => self.value(),
                    parts => {
                        let part = self.dice.one_of(parts);
                        other[part.start..part.end].to_vec()
                    }
                }
            }
            // The same in another dress.
            (Kind::Value, 3) => [b"\"", whole.as_slice(), b"\""].concat(),
            (Kind::Value, _) => self.value(),
        };
        input.splice(part.start..part.end, new);
    }

    /// A run of letters and digits.
    fn a_word_of(&mut self, input: &[u8]) -> Option<(usize, usize)> {
        if input.is_empty() {
            return None;
        }
        let plain = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
        let from = self.dice.below(input.len());
        let start = from + input[from..].iter().position(plain)?;
        let end = start + input[start..].iter().position(|byte| !plain(byte)).unwrap_or(input.len() - start);
        Some((start, end))
    }

    fn replace_word(&mut self, input: &mut Vec<u8>) {
        let word = self.word();
        match self.a_word_of(input) {
            Some((start, end)) => drop(input.splice(start..end, word.iter().copied())),
            None => self.insert(input),
        }
    }

    fn insert(&mut self, input: &mut Vec<u8>) {
        let at = self.dice.below(input.len() + 1);
        let word = self.word();
        input.splice(at..at, word.iter().copied());
    }

    fn span(&mut self, input: &[u8]) -> (usize, usize) {
        let start = self.dice.below(input.len() + 1);
        let longest = (input.len() - start).min(64);
        (start, start + self.dice.below(longest + 1))
    }

    fn cut(&mut self, input: &mut Vec<u8>) {
        let (start, end) = self.span(input);
        input.drain(start..end);
    }

    fn truncate(&mut self, input: &mut Vec<u8>) {
        let at = self.dice.below(input.len() + 1);
        if self.dice.once_in(4) { drop(input.drain(..at)) } else { input.truncate(at) }
    }

    fn repeat(&mut self, input: &mut Vec<u8>) {
        let (start, end) = self.span(input);
        let times = 1 + self.dice.below(50);
        let again = input[start..end].repeat(times);
        input.splice(end..end, again);
    }

    fn splice(&mut self, input: &mut Vec<u8>) {
        let other = self.corpus.bytes(self.dice.below(self.corpus.count()));
        let (at, from) = (self.dice.below(input.len() + 1), self.dice.below(other.len() + 1));
        input.truncate(at);
        input.extend_from_slice(&other[from..]);
    }

    fn flip(&mut self, input: &mut [u8]) {
        for _ in 0..=self.dice.below(4) {
            if !input.is_empty() {
                let at = self.dice.below(input.len());
                input[at] = if self.dice.once_in(2) {
                    input[at] ^ 1 << self.dice.below(8)
                } else {
                    self.dice.draw() as u8
                };
            }
        }
    }

    /// Lines left out, told twice, exchanged, or ended otherwise.
    fn lines(&mut self, input: &mut Vec<u8>) {
        let mut lines: Vec<&[u8]> = input.split(|byte| *byte == b'\n').collect();
        let (one, other) = (self.dice.below(lines.len()), self.dice.below(lines.len()));
        let end = match self.dice.below(6) {
            0 => b"\r\n".as_slice(),
            1 => b"\r",
            _ => b"\n",
        };
        match self.dice.below(4) {
            0 => drop(lines.remove(one)),
            1 => lines.insert(one, lines[other]),
            2 => lines.swap(one, other),
            _ => {}
        }
        *input = lines.join(end);
    }

    fn lengthen(&mut self, input: &mut Vec<u8>) {
        let length = *self.dice.one_of(&LENGTHS);
        let long = match self.dice.below(5) {
            0 => "x".repeat(length),
            1 => "9".repeat(length),
            2 => "é".repeat(length / 2),
            3 => "a,".repeat(length / 2),
            _ => "\\\"".repeat(length / 2),
        };
        match self.a_word_of(input) {
            Some((start, end)) => drop(input.splice(start..end, long.bytes())),
            None => input.extend(long.bytes()),
        }
    }
}

/// Something inside so many arrays, or objects.
fn nested(inner: &[u8], depth: usize, objects: bool) -> Vec<u8> {
    let (open, close): (&[u8], &[u8]) = if objects { (b"{\"a\":", b"}") } else { (b"[", b"]") };
    [&open.repeat(depth), inner, &close.repeat(depth)].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn corpus() -> Corpus {
        let files = [
            ("a", r#"{"handler": "h", "input": {"a": [1, 2]}}"#),
            ("b", "GET / HTTP/1.1\r\nhost: x\r\n\r\n"),
            ("c", ""),
        ];
        Corpus::made(files.map(|(name, text)| (name.to_owned(), text.into())))
    }

    #[test]
    fn a_seed_gives_the_same_inputs_again_and_the_corpus_first() {
        let corpus = corpus();
        let draw = |seed| {
            let mut inputs = Mutator::new(&corpus, seed, "p");
            (0..2_000).map(|_| inputs.draw()).collect::<Vec<_>>()
        };
        let inputs = draw(1);
        assert_eq!(inputs, draw(1));
        assert_ne!(inputs, draw(2));
        let kept: Vec<&[u8]> = corpus.files().map(|(_, bytes)| bytes).collect();
        assert_eq!(inputs[..3], kept);
    }

    #[test]
    fn inputs_are_of_every_kind_and_bounded() {
        let corpus = corpus();
        let mut inputs = Mutator::new(&corpus, 3, "p");
        let drawn: Vec<Vec<u8>> = (0..20_000).map(|_| inputs.draw()).collect();
        let some = |what: &str, holds: &dyn Fn(&[u8]) -> bool| {
            assert!(drawn.iter().any(|input| holds(input)), "none of them {what}");
        };
        some("is no text", &|input| std::str::from_utf8(input).is_err());
        some("has a NUL", &|input| input.contains(&0));
        some("is deep", &|input| input.windows(65).any(|window| window.iter().all(|byte| *byte == b'[')));
        some("is long", &|input| input.len() > 10_000);
        some("is empty", &|input| input.is_empty());
        let twice = br#""handler": "h","handler": "h""#;
        some("has a member twice", &|input| input.windows(twice.len()).any(|window| window == twice));
        assert!(drawn.iter().all(|input| input.len() <= MOST_BYTES));
    }
}
