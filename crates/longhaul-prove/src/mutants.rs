//! Mutants: defects that the suite must find, each by the invariant that it breaks. What makes one show is a run of the
//! suite with the faults that bring it out; the same run without the mutant must be clean.

use std::time::Duration;

use longhaul::faults::Mutant;

use crate::Anyhow;
use crate::bed::Kind;
use crate::drive::{Drive, Faults, Outcome};
use crate::simulate::{Seeds, simulate_many};

/// The mutant of that name.
pub fn named(name: &str) -> Result<Mutant, Anyhow> {
    let names: Vec<&str> = Mutant::ALL.into_iter().map(Mutant::name).collect();
    let known = Mutant::ALL.into_iter().find(|mutant| mutant.name() == name);
    known.ok_or_else(|| format!("there is no mutant '{name}'; there are {}", names.join(", ")).into())
}

/// The invariants by which a mutant may be found; the first is the one it breaks.
pub fn breaks(mutant: Mutant) -> u8 {
    match mutant {
        Mutant::FenceNotChecked | Mutant::LeaseByLocalClock => 2,
        Mutant::EventApart => 6,
        Mutant::UndoForward => 5,
        Mutant::LimitReadThenWrite => 11,
        Mutant::HeartbeatIgnored => 14,
        Mutant::IdempotencyReadThenWrite => 10,
        Mutant::OutboxByCursor => 7,
        Mutant::ApprovalUnbound => 13,
        Mutant::CancelLost => 9,
    }
}

/// The mutants that a simulation finds too: those that need neither PostgreSQL, nor a process that dies within a call of the
/// store, nor many tasks that are longer than a lease.
pub const SIMULATED: [Mutant; 4] =
    [Mutant::FenceNotChecked, Mutant::UndoForward, Mutant::ApprovalUnbound, Mutant::CancelLost];

/// How many seeds a simulation may need to find one.
pub const SEEDS: u64 = 300;

/// Simulates seeds until the mutant is found.
pub fn simulated(mutant: Mutant, seed: u64) -> Result<Outcome, Anyhow> {
    let seeds = Seeds { from: seed, count: SEEDS, mutant: Some(mutant) };
    simulate_many(seeds, |seed| seed.violations.iter().all(|found| found.invariant != breaks(mutant)))
}

/// The run that brings a mutant out.
pub fn run_of(mutant: Mutant, seed: u64) -> Drive {
    let kind = match mutant {
        Mutant::LimitReadThenWrite
        | Mutant::IdempotencyReadThenWrite
        | Mutant::LeaseByLocalClock
        | Mutant::OutboxByCursor => Kind::Postgres,
        _ => Kind::Sqlite,
    };
    let every = Duration::from_millis(150);
    let faults = match mutant {
        Mutant::FenceNotChecked => Faults { freezes: 12, every, ..Faults::default() },
        Mutant::EventApart => Faults { kills: 30, every, ..Faults::default() },
        Mutant::LeaseByLocalClock => Faults { clocks: true, ..Faults::default() },
        _ => Faults::default(),
    };
    Drive {
        kind,
        seed,
        tasks: 200,
        every: Duration::from_millis(8),
        workers: 3,
        lease: Duration::from_millis(if mutant == Mutant::HeartbeatIgnored { 1_000 } else { 3_000 }),
        faults,
        limited: if mutant == Mutant::LimitReadThenWrite { 60 } else { 8 },
        mutant: Some(mutant),
        bound: Duration::from_secs(30),
    }
}
