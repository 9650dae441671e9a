//! Hostile input, the same again for the same seed: a corpus of good and bad files (`tests/hostile/PARSER/…`), and what is made of
//! them by cutting, splicing, nesting and worse.
//!
//! [`Corpus`] reads the files of one parser, [`Mutator`] draws inputs from them, [`check`] gives each to a parser and fails with the
//! input in a file when the parser panics. Tests inside a crate use [`check`]; `longhaul-prove hostile` draws a million.
//! No dependency: what it feeds must not be read by what is tested.

mod check;
mod corpus;
mod dice;
mod json;
mod mutate;
mod words;

pub use check::{Judged, check, keep, shown};
pub use corpus::Corpus;
pub use dice::Dice;
pub use mutate::Mutator;
pub use words::{MARK, WORDS};
