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
        assert!(tally.accepted > 0 && tally.refused > 0, "{line}");
    }
}
