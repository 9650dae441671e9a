//! What was run and what came of it, for people: lines on the terminal, and `docs/proof.md`.

use std::fmt::Write;

use longhaul::faults::Mutant;
use serde::{Deserialize, Serialize};

use crate::drive::Outcome;
use crate::hostile::Tried;
use crate::mutants::breaks;

/// A run of the suite, for the report.
#[derive(Debug)]
pub struct Ran {
    /// What it was.
    pub name: String,
    /// On which store.
    pub store: String,
    /// With which seed.
    pub seed: u64,
    /// What came of it.
    pub outcome: Outcome,
}

/// What the report says of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    /// What it was.
    pub name: String,
    /// On which store.
    pub store: String,
    /// With which seed.
    pub seed: u64,
    /// From which commit.
    pub commit: String,
    /// What happened in it.
    pub what: String,
    /// How often something did not hold.
    pub violations: usize,
    /// Whether everything held, and everything that was to go wrong did.
    pub held: bool,
}

impl Row {
    /// The row of a run.
    pub fn of(ran: &Ran, commit: &str) -> Self {
        let Outcome { seconds, violations, .. } = &ran.outcome;
        Self {
            name: ran.name.clone(),
            store: ran.store.clone(),
            seed: ran.seed,
            commit: commit.to_owned(),
            what: format!("{}, in {seconds:.0} s", counts(&ran.outcome)),
            violations: violations.len(),
            held: ran.outcome.is_clean(),
        }
    }

    /// Whether it is of the same run.
    pub fn is_of(&self, name: &str, store: &str, seed: u64) -> bool {
        (self.name.as_str(), self.store.as_str(), self.seed) == (name, store, seed)
    }
}

/// A mutant and what found it.
#[derive(Debug)]
pub struct Hunted {
    /// Which.
    pub mutant: Mutant,
    /// On which store.
    pub store: String,
    /// With which seed.
    pub seed: u64,
    /// The invariants that did not hold, and how often.
    pub found: Vec<(u8, usize)>,
}

impl Hunted {
    /// Whether it was found by the invariant that it breaks.
    pub fn is_caught(&self) -> bool {
        self.found.iter().any(|(invariant, _)| *invariant == breaks(self.mutant))
    }

    fn by(&self) -> String {
        let found: Vec<String> =
            self.found.iter().map(|(invariant, count)| format!("I{invariant} ({count})")).collect();
        if found.is_empty() { "nothing".to_owned() } else { found.join(", ") }
    }
}

/// How often each invariant did not hold.
pub fn tally(outcome: &Outcome) -> Vec<(u8, usize)> {
    let mut counts = std::collections::BTreeMap::new();
    for violation in &outcome.violations {
        *counts.entry(violation.invariant).or_insert(0) += 1;
    }
    counts.into_iter().collect()
}

/// What happened in a run.
fn counts(outcome: &Outcome) -> String {
    let some = outcome.counts.iter().filter(|(_, count)| **count > 0);
    some.map(|(what, count)| format!("{count} {what}")).collect::<Vec<_>>().join(", ")
}

/// What a run did, in one line.
pub fn line(ran: &Ran) -> String {
    let verdict = if ran.outcome.is_clean() { "held" } else { "DID NOT HOLD" };
    let Ran { name, store, seed, outcome } = ran;
    format!("{name} on {store}, seed {seed}: {verdict} ({}; {:.0} s)", counts(outcome), outcome.seconds)
}

/// `docs/proof.md`. Hostile inputs and mutants are of this commit, runs of the one that each row names.
pub fn page(commit: &str, date: &str, rows: &[Row], tried: &[Tried], hunts: &[Hunted]) -> String {
    let mut page = String::from(include_str!("report/head.md"));
    // Writing to a string cannot fail.
    let _ = writeln!(
        page,
        "\n## What was run\n\nFrom commit {commit}, {date}; a run that is of another commit says so.\n"
    );
    page.push_str("| run | store | seed | what happened | violations |\n|---|---|---|---|---|\n");
    for Row { name, store, seed, commit: of, what, violations, held } in rows {
        let of = if of == commit { String::new() } else { format!(" ({of})") };
        let verdict = if *held || *violations > 0 { "" } else { " **did not hold**" };
        let _ = writeln!(page, "| {name}{of} | {store} | {seed} | {what} | {violations}{verdict} |");
    }
    if !tried.is_empty() {
        page.push_str("\n## Hostile input\n\n| parser | reads | inputs | accepted | refused | broke |\n|---|---|---|---|---|---|\n");
        let mut sum = [0; 3];
        for Tried { parser, tally, .. } in tried {
            let Some(tally) = tally else { continue };
            let counts = [tally.inputs, tally.accepted, tally.refused];
            sum.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
            let broke = if tally.broke.is_some() { "**yes**" } else { "no" };
            let [inputs, accepted, refused] = counts;
            let _ = writeln!(
                page,
                "| {} | {} | {inputs} | {accepted} | {refused} | {broke} |",
                parser.name, parser.reads
            );
        }
        let [inputs, accepted, refused] = sum;
        let _ = writeln!(page, "| all | | {inputs} | {accepted} | {refused} | |");
    }
    if !hunts.is_empty() {
        page.push_str(
            "\n## Mutants\n\n| mutant | store | seed | breaks | found by (violations) |\n|---|---|---|---|---|\n",
        );
        for hunt in hunts {
            let (name, by) = (hunt.mutant.name(), hunt.by());
            let verdict = if hunt.is_caught() { "" } else { " **not caught**" };
            let _ = writeln!(
                page,
                "| `{name}` | {} | {} | I{} | {by}{verdict} |",
                hunt.store,
                hunt.seed,
                breaks(hunt.mutant)
            );
        }
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &str, commit: &str, held: bool) -> Row {
        let (name, store, commit) = (name.to_owned(), "SQLite".to_owned(), commit.to_owned());
        Row { name, store, seed: 7, commit, what: "3 kills, in 2 s".to_owned(), violations: 0, held }
    }

    #[test]
    fn a_page_says_what_did_not_hold_and_what_is_of_another_commit() {
        let rows = [row("kills", "abc", true), row("freezes", "old", true), row("cuts", "abc", false)];
        let page = page("abc", "2026-01-02", &rows, &[], &[]);
        let last: Vec<&str> = page.lines().rev().take(3).collect();
        assert_eq!(
            last,
            [
                "| cuts | SQLite | 7 | 3 kills, in 2 s | 0 **did not hold** |",
                "| freezes (old) | SQLite | 7 | 3 kills, in 2 s | 0 |",
                "| kills | SQLite | 7 | 3 kills, in 2 s | 0 |",
            ]
        );
    }
}
