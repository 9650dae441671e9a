//! Giving inputs to a parser, for tests inside of the crate that has it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::corpus::Corpus;
use crate::mutate::Mutator;

/// No input may take a parser longer than this, in a build without optimisation and on a busy machine.
const SLOW: Duration = Duration::from_secs(10);

/// What a parser made of an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Judged {
    /// It was taken.
    Accepted,
    /// It was refused.
    Refused,
}

/// Gives the corpus of a parser, and so many inputs made of it, to the parser. Fails when it panics or takes too long, and says
/// in which file the input is: it can be added to the corpus. Also fails when all inputs were accepted, or all refused: then they
/// say nothing about the parser.
///
/// # Panics
///
/// As a test does when it fails.
#[track_caller]
pub fn check(parser: &str, inputs: usize, mut read: impl FnMut(&[u8]) -> Judged) {
    let corpus = Corpus::of(parser).unwrap_or_else(|error| panic!("the corpus of {parser}: {error}"));
    let mut mutator = Mutator::new(&corpus, 1, parser);
    let (mut accepted, mut refused) = (0, 0);
    for number in 0..corpus.count() + inputs {
        let input = mutator.draw();
        let begun = Instant::now();
        // What a parser leaves behind after a panic is not used again: the test has failed.
        let read = catch_unwind(AssertUnwindSafe(|| read(&input)));
        let took = begun.elapsed();
        match read {
            Ok(_) if took > SLOW => {
                panic!("{parser}: input {number} took {took:?}; it is in {}", keep(parser, &input))
            }
            Ok(Judged::Accepted) => accepted += 1,
            Ok(Judged::Refused) => refused += 1,
            Err(_) => {
                panic!("{parser}: input {number} broke it: {}\nit is in {}", shown(&input), keep(parser, &input))
            }
        }
    }
    assert!(accepted > 0 && refused > 0, "{parser}: {accepted} inputs were accepted and {refused} refused");
}

/// Writes an input to a file outside of the corpus, and says where.
pub fn keep(parser: &str, input: &[u8]) -> String {
    let folder: PathBuf = Corpus::folder().join("../../target/hostile");
    let digest = input
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3));
    let path = folder.join(format!("{parser}-{digest:016x}"));
    match std::fs::create_dir_all(&folder).and_then(|()| std::fs::write(&path, input)) {
        Ok(()) => path.display().to_string(),
        Err(error) => format!("no file ({error})"),
    }
}

/// The beginning of an input, readable.
pub fn shown(input: &[u8]) -> String {
    let text: String =
        String::from_utf8_lossy(&input[..input.len().min(2_000)]).escape_debug().take(2_000).collect();
    if input.len() > 2_000 { format!("{text}… ({} bytes)", input.len()) } else { text }
}
