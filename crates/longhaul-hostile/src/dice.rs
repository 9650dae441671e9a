//! Chance that is the same again for the same seed, in every version: SplitMix64.

/// A source of numbers.
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    /// The source of this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The source of part `part` of what a seed stands for.
    pub fn of(seed: u64, part: &str) -> Self {
        // FNV-1a, so that every part has numbers of its own.
        let name = part.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        let mut dice = Self(seed.wrapping_mul(0xd134_2543_de82_ef95) ^ name);
        dice.draw();
        dice
    }

    /// The next number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`; 0 when there is none.
    pub fn below(&mut self, end: usize) -> usize {
        // The remainder is below `end`, which is a usize.
        if end == 0 { 0 } else { (self.draw() % end as u64) as usize }
    }

    /// True once in so many times.
    pub fn once_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    /// One of them.
    pub fn one_of<'a, T>(&mut self, among: &'a [T]) -> &'a T {
        // A list that is given here has something in it.
        &among[self.below(among.len())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_means_the_same_for_ever() {
        let mut dice = Dice::of(1, "http");
        assert_eq!([dice.draw(), dice.draw()], [18_425_178_010_386_866_734, 2_405_038_133_506_397_507]);
        assert_ne!(Dice::of(1, "http").draw(), Dice::of(2, "http").draw());
        assert_ne!(Dice::of(1, "http").draw(), Dice::of(1, "mcp").draw());
    }
}
