//! What is drawn from a seed: tasks, faults, and what people decide.

use longhaul_hostile::Dice;

/// A source of numbers.
#[derive(Clone, Debug)]
pub struct Chance(Dice);

impl Chance {
    /// The source of this seed.
    pub fn new(seed: u64) -> Self {
        Self(Dice::new(seed))
    }

    /// A source of its own for part `part` of what a seed stands for.
    pub fn of(seed: u64, part: u64) -> Self {
        let mut chance = Self::new(seed ^ part.wrapping_mul(0xd134_2543_de82_ef95));
        chance.draw();
        chance
    }

    /// The next number.
    pub fn draw(&mut self) -> u64 {
        self.0.draw()
    }

    /// A number from `low` to `high`.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.draw() % (high - low + 1)
    }

    /// True so many times out of a hundred.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.draw() % 100 < percent
    }

    /// One of them.
    pub fn one_of<'a, T>(&mut self, among: &'a [T]) -> &'a T {
        // A list that is given here has something in it.
        &among[(self.draw() % among.len() as u64) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_means_the_same_for_ever() {
        let mut chance = Chance::new(42);
        assert_eq!(
            [chance.draw(), chance.draw(), chance.draw()],
            [13_679_457_532_755_275_413, 2_949_826_092_126_892_291, 5_139_283_748_462_763_858]
        );
        let parts: Vec<u64> = (0..3).map(|part| Chance::of(42, part).between(1, 1_000_000)).collect();
        assert!(parts[0] != parts[1] && parts[1] != parts[2], "{parts:?}");
    }
}
