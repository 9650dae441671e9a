//! Simulation in short: a hundred and fifty seeds, every kind of fault, and the mutants that it must find.
//! `./dev prove` simulates thousands.

use std::sync::Mutex;

use longhaul::faults::Mutant;
use longhaul_prove::mutants::{SIMULATED, breaks, simulated};
use longhaul_prove::report::tally;
use longhaul_prove::simulate::{Seeds, faults, simulate, simulate_many};

#[test]
fn everything_holds_in_a_hundred_and_fifty_simulated_seeds_and_every_kind_of_fault_fires() {
    let seeds = Seeds { from: 1_000, count: 150, mutant: None };
    let found: Mutex<Vec<String>> = Mutex::default();
    let outcome = simulate_many(seeds, |simulated| {
        let again = simulated.violations.iter().map(|one| format!("simulate --from {}: {one}", simulated.seed));
        found.lock().expect("not poisoned").extend(again);
        true
    })
    .expect("the suite itself works");
    let found = found.into_inner().expect("not poisoned");
    assert!(found.is_empty(), "{}", found.join("\n"));
    assert_eq!(outcome.not_fired, [] as [String; 0]);
    assert_eq!(outcome.counts["seeds"], 150);
    assert!(outcome.counts["tasks"] >= 450 && outcome.counts["streams read"] > 0, "{:?}", outcome.counts);
    assert_eq!(outcome.counts["events"], outcome.counts["events delivered"]);
    assert!(faults().all(|fault| outcome.counts[fault] > 0), "{:?}", outcome.counts);
}

#[test]
fn a_run_in_which_no_seed_was_simulated_says_that_no_fault_fired() {
    let none = Seeds { from: 1, count: 0, mutant: None };
    let outcome = simulate_many(none, |_| true).expect("the suite itself works");
    assert!(!outcome.is_clean());
    assert_eq!(outcome.not_fired.len(), faults().count());
}

#[test]
fn a_seed_does_the_same_again() {
    for seed in 2_000..2_030 {
        let (one, two) = (simulate(seed, None).expect("simulated"), simulate(seed, None).expect("simulated"));
        assert_eq!((one.digest(), one.counts), (two.digest(), two.counts), "seed {seed}");
    }
}

fn is_found(mutant: Mutant) {
    let outcome = simulated(mutant, 3_000).expect("the suite itself works");
    let (found, by) = (tally(&outcome), breaks(mutant));
    assert!(found.iter().any(|(invariant, _)| *invariant == by), "{mutant:?} breaks I{by}; found were {found:?}");
}

#[test]
fn mutants_are_found_by_simulation_each_by_its_invariant() {
    SIMULATED.into_iter().for_each(is_found);
}
