//! Hostile input in short: every parser that meets the outside, with a few thousand inputs; and a parser that breaks, so that it is
//! seen that it would be found. `./dev prove` gives a million.

use std::path::Path;

use longhaul_prove::hostile::{Hostile, PARSERS, hostile};

const PROGRAM: &str = env!("CARGO_BIN_EXE_longhaul-prove");

#[tokio::test(flavor = "multi_thread")]
async fn nothing_breaks_and_nothing_is_stored_by_what_nobody_should_send() {
    let plan = Hostile { seed: 7, inputs: 20_000, only: None };
    let tried = hostile(&plan, Path::new(PROGRAM)).await.expect("the suite itself works");
    assert_eq!(tried.len(), PARSERS.len());
    for tried in tried {
        let line = tried.line();
        let Some(tally) = tried.tally else {
            eprintln!("skipped: {line}");
            continue;
        };
        let input =
            tried.input.map(|(input, path)| format!("{}: {}", path.display(), longhaul_hostile::shown(&input)));
        assert_eq!(tally.broke, None, "{line}\n{}", input.unwrap_or_default());
        assert_eq!(tally.accepted + tally.refused, tally.inputs, "{line}");
        // Of hostile input that is all refused, or all accepted, nothing is learned.
        let enough = tally.inputs >= 100;
        assert!(!enough || (tally.accepted > 0 && tally.refused > 0), "{line}");
    }
}

/// Gives hostile input to a parser that breaks.
async fn breaks(parser: &str) -> (String, Vec<u8>) {
    let plan = Hostile { seed: 3, inputs: 20_000, only: Some(parser.to_owned()) };
    let mut tried = hostile(&plan, Path::new(PROGRAM)).await.expect("the suite itself works");
    let tried = tried.pop().expect("one parser was tried");
    assert!(!tried.held(), "{}", tried.line());
    let (input, path) = tried.input.expect("the input is kept");
    std::fs::remove_file(path).expect("it is in a file");
    (tried.tally.and_then(|tally| tally.broke).expect("it is said what broke"), input)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_that_nobody_looks_at_is_found_with_its_input() {
    let (why, input) = breaks("panics").await;
    assert!(why.contains("there is a NUL") && input.contains(&0), "{why}: {input:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_dies_leaves_the_input_that_killed_it() {
    let (why, input) = breaks("dies").await;
    assert!(why.contains("signal") && input.contains(&0), "{why}: {input:?}");
}
