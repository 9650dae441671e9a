//! What was run and what came of it, for people: lines on the terminal, and `docs/proof.md`.

use std::fmt::Write;

use longhaul::faults::Mutant;

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

/// What a run did, in one line.
pub fn line(ran: &Ran) -> String {
    let counts: Vec<String> = ran
        .outcome
        .counts
        .iter()
        .filter(|(_, count)| **count > 0)
        .map(|(what, count)| format!("{count} {what}"))
        .collect();
    let verdict = if ran.outcome.is_clean() { "held" } else { "DID NOT HOLD" };
    format!(
        "{} on {}, seed {}: {verdict} ({}; {:.0} s)",
        ran.name,
        ran.store,
        ran.seed,
        counts.join(", "),
        ran.outcome.seconds
    )
}

/// `docs/proof.md`.
pub fn page(commit: &str, date: &str, runs: &[Ran], tried: &[Tried], hunts: &[Hunted]) -> String {
    let mut page = String::from(include_str!("report/head.md"));
    // Writing to a string cannot fail.
    let _ = writeln!(page, "\n## What was run\n\nFrom commit {commit}, {date}.\n");
    page.push_str("| run | store | seed | what happened | violations |\n|---|---|---|---|---|\n");
    for Ran { name, store, seed, outcome } in runs {
        let counts: Vec<String> = outcome
            .counts
            .iter()
            .filter(|(_, count)| **count > 0)
            .map(|(what, count)| format!("{count} {what}"))
            .collect();
        let counts = counts.join(", ");
        let _ = writeln!(
            page,
            "| {name} | {store} | {seed} | {counts}, in {:.0} s | {} |",
            outcome.seconds,
            outcome.violations.len()
        );
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
