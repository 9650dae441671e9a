//! A simulation: on the thread where it was begun, time is tokio's paused clock, and ids, jitter and mutants come from a
//! seed. Whatever runs there does the same again under the same seed.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::RangeInclusive;

use tokio::time::Instant;
use uuid::{Builder, Uuid};

use super::Mutant;
use crate::store::clock::micros;

/// The wall clock when a simulation begins, microseconds: 2027-01-15T08:00:00Z.
const WALL: i64 = 1_800_000_000_000_000;
/// The host's boot clock then. Another number, so that the two are not taken for each other unnoticed.
const BOOT: i64 = 1_000_000_000;

thread_local! {
    static CURRENT: RefCell<Option<Current>> = const { RefCell::new(None) };
}

struct Current {
    began: Instant,
    chance: Chance,
    /// How many ids were made.
    ids: u32,
    mutant: Option<Mutant>,
}

/// Numbers that are the same again for the same seed: SplitMix64.
#[derive(Clone, Debug)]
pub(super) struct Chance(u64);

impl Chance {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(super) fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`, which is not 0.
    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.draw() % end
    }
}

/// A simulation on this thread, until it is dropped.
#[must_use = "the simulation ends when this value is dropped"]
// It stays on its thread, as a pointer does.
pub struct Simulation(PhantomData<*const ()>);

impl Simulation {
    /// Begins, inside of a tokio runtime of one thread whose clock is paused. Everything that runs in it has `mutant`, if
    /// there is one.
    pub fn begin(seed: u64, mutant: Option<Mutant>) -> Self {
        let current = Current { began: Instant::now(), chance: Chance::new(seed), ids: 0, mutant };
        CURRENT.set(Some(current));
        Self(PhantomData)
    }
}

impl Drop for Simulation {
    fn drop(&mut self) {
        CURRENT.set(None);
    }
}

fn with<T>(ask: impl FnOnce(&mut Current) -> T) -> Option<T> {
    CURRENT.with_borrow_mut(|current| current.as_mut().map(ask))
}

fn elapsed() -> Option<i64> {
    with(|current| micros(current.began.elapsed()))
}

/// The wall clock of the simulation on this thread, microseconds.
pub(crate) fn simulated_wall() -> Option<i64> {
    Some(WALL + elapsed()?)
}

/// The host's boot clock in the simulation on this thread, microseconds; `None` where there is none.
pub fn simulated_boot() -> Option<i64> {
    Some(BOOT + elapsed()?)
}

/// The mutant of the simulation on this thread.
pub(super) fn mutant() -> Option<Option<Mutant>> {
    with(|current| current.mutant)
}

/// A new id that sorts by time.
pub(crate) fn now_v7() -> Uuid {
    let Some(now) = simulated_wall() else { return Uuid::now_v7() };
    let made = with(|current| {
        current.ids += 1;
        let mut bytes = [0; 10];
        // Ids of one millisecond grow, as far as the twelve bits go that an id has for that.
        let [high, low] = ((current.ids & 0xfff) as u16).to_be_bytes();
        bytes[..2].copy_from_slice(&[high, low]);
        bytes[2..].copy_from_slice(&current.chance.draw().to_be_bytes());
        Builder::from_unix_timestamp_millis(now.unsigned_abs() / 1_000, &bytes).into_uuid()
    });
    made.unwrap_or_else(Uuid::now_v7)
}

/// A number of this range.
pub(crate) fn random_range(range: RangeInclusive<f64>) -> f64 {
    // The 53 bits that such a number has.
    let drawn = with(|current| (current.chance.draw() >> 11) as f64 / (1_u64 << 53) as f64);
    match drawn {
        Some(part) => range.start() + part * (range.end() - range.start()),
        None => rand::random_range(range),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::clock::{boot_micros, wall_micros};
    use std::time::Duration;

    #[tokio::test(start_paused = true)]
    async fn time_ids_and_chance_are_the_seeds() {
        let look = async |seed| {
            let _simulation = Simulation::begin(seed, None);
            let began = (wall_micros(), boot_micros());
            tokio::time::sleep(Duration::from_millis(90_000)).await;
            let passed = (wall_micros() - began.0, boot_micros() - began.1);
            let ids: Vec<Uuid> = (0..5_000).map(|_| now_v7()).collect();
            (began, passed, ids, random_range(0.5..=1.0))
        };
        let one = look(7).await;
        assert_eq!(one, look(7).await);
        assert_eq!((one.0, one.1), ((WALL, BOOT), (90_000_000, 90_000_000)));
        assert_ne!(one.2, look(8).await.2);
        assert!((0.5..=1.0).contains(&one.3));
        assert!(one.2[..4_095].is_sorted(), "ids of one millisecond grow");
        assert!(wall_micros() > BOOT && wall_micros() != WALL, "without a simulation it is the host's");
    }

    #[tokio::test(start_paused = true)]
    async fn a_mutant_is_the_simulations_alone() {
        let simulation = Simulation::begin(1, Some(Mutant::UndoForward));
        assert!(super::super::is(Mutant::UndoForward) && !super::super::is(Mutant::CancelLost));
        let elsewhere = std::thread::spawn(|| super::super::is(Mutant::UndoForward));
        assert!(!elsewhere.join().expect("no panic"));
        drop(simulation);
        assert!(!super::super::is(Mutant::UndoForward));
    }
}
