//! Many seeds, on all cores.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use longhaul::faults::Mutant;

use super::{Simulated, faults, simulate};
use crate::Anyhow;
use crate::drive::Outcome;

/// Which seeds.
#[derive(Clone, Copy, Debug)]
pub struct Seeds {
    /// The first.
    pub from: u64,
    /// How many.
    pub count: u64,
    /// A defect that all of them have.
    pub mutant: Option<Mutant>,
}

/// Simulates seeds, each on one thread, until all are done or `told` says that it is enough. A kind of fault that none of them
/// had did not fire.
pub fn simulate_many(seeds: Seeds, told: impl Fn(&Simulated) -> bool + Sync) -> Result<Outcome, Anyhow> {
    let begun = Instant::now();
    let counts = BTreeMap::from([("seeds", 0)]);
    let sum = Mutex::new(Outcome { counts, ..Outcome::default() });
    let (next, enough) = (AtomicU64::new(0), AtomicBool::new(false));
    let work = || -> Result<(), Anyhow> {
        while !enough.load(Ordering::Relaxed) {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= seeds.count {
                break;
            }
            let simulated = simulate(seeds.from.wrapping_add(number), seeds.mutant)?;
            let mut sum = sum.lock().unwrap_or_else(PoisonError::into_inner);
            *sum.counts.entry("seeds").or_default() += 1;
            for (what, count) in &simulated.counts {
                *sum.counts.entry(*what).or_default() += *count;
            }
            if !told(&simulated) {
                enough.store(true, Ordering::Relaxed);
            }
            sum.violations.extend(simulated.violations);
        }
        Ok(())
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        // As deep as that of a main thread.
        let start = || std::thread::Builder::new().stack_size(8 * 1024 * 1024).spawn_scoped(scope, work);
        let running = (0..threads).map(|_| start()).collect::<Result<Vec<_>, _>>()?;
        for thread in running {
            let ended = thread.join().map_err(|_| "a simulation panicked")?;
            if ended.is_err() {
                enough.store(true, Ordering::Relaxed);
            }
            ended?;
        }
        Ok::<(), Anyhow>(())
    })?;
    let mut sum = sum.into_inner().unwrap_or_else(PoisonError::into_inner);
    let fired = |fault: &str| sum.counts.get(fault).is_some_and(|count| *count > 0);
    let not_fired = faults().filter(|fault| !fired(fault)).map(str::to_owned).collect();
    sum.not_fired = not_fired;
    sum.seconds = begun.elapsed().as_secs_f64();
    Ok(sum)
}
