//! The Mersenne Twister MT19937 of Matsumoto and Nishimura (1998), the generator behind `std::mt19937`, numpy's
//! `RandomState` and llama.cpp: a seed gives the numbers that it gives there.

/// Words of state.
const N: usize = 624;

/// MT19937.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mt19937 {
    state: Box<[u32; N]>,
    next: usize,
}

impl Mt19937 {
    /// Length of [`Mt19937::save`].
    pub const SAVED_BYTES: usize = 4 * (N + 1);

    /// Seeds below 2^32 by `init_genrand(seed)`, larger ones by `init_by_array([low word, high word])`: as
    /// `numpy.random.RandomState(seed)` and `RandomState([low, high])`.
    pub fn new(seed: u64) -> Self {
        let (low, high) = (seed as u32, (seed >> 32) as u32);
        if high == 0 { Self::from_word(low) } else { Self::from_words(&[low, high]) }
    }

    fn from_word(seed: u32) -> Self {
        let mut state = Box::new([seed; N]);
        for i in 1..N {
            let before = state[i - 1];
            state[i] = (before ^ (before >> 30)).wrapping_mul(1_812_433_253).wrapping_add(i as u32);
        }
        Mt19937 { state, next: N }
    }

    fn from_words(key: &[u32]) -> Self {
        let Mt19937 { mut state, next } = Self::from_word(19_650_218);
        let mut i = 1;
        let mut stir = |i: &mut usize, factor: u32, add: u32, subtract: u32| {
            let before = state[*i - 1];
            let mixed = state[*i] ^ (before ^ (before >> 30)).wrapping_mul(factor);
            state[*i] = mixed.wrapping_add(add).wrapping_sub(subtract);
            *i += 1;
            if *i == N {
                state[0] = state[N - 1];
                *i = 1;
            }
        };
        for k in 0..N.max(key.len()) {
            let j = k % key.len();
            stir(&mut i, 1_664_525, key[j].wrapping_add(j as u32), 0);
        }
        for _ in 1..N {
            let position = i as u32;
            stir(&mut i, 1_566_083_941, 0, position);
        }
        state[0] = 1 << 31;
        Mt19937 { state, next }
    }

    /// The next 32 bits (`genrand_int32`).
    pub fn next_u32(&mut self) -> u32 {
        if self.next == N {
            self.refill();
        }
        let mut y = self.state[self.next];
        self.next += 1;
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c_5680;
        y ^= (y << 15) & 0xefc6_0000;
        y ^ (y >> 18)
    }

    fn refill(&mut self) {
        const M: usize = 397;
        for i in 0..N {
            let y = (self.state[i] & 0x8000_0000) | (self.state[(i + 1) % N] & 0x7fff_ffff);
            let twist = if y & 1 == 1 { 0x9908_b0df } else { 0 };
            self.state[i] = self.state[(i + M) % N] ^ (y >> 1) ^ twist;
        }
        self.next = 0;
    }

    /// The next 53 bits m: the uniform number m / 2^53 in [0, 1) is `genrand_res53`, numpy's `random_sample`. Two
    /// outputs: the upper 27 bits of the first, then the upper 26 of the second.
    pub fn bits53(&mut self) -> u64 {
        let (a, b) = (self.next_u32() >> 5, self.next_u32() >> 6);
        (u64::from(a) << 26) + u64::from(b)
    }

    /// The state as bytes.
    pub fn save(&self) -> Vec<u8> {
        let words = self.state.iter().copied().chain([self.next as u32]);
        words.flat_map(u32::to_le_bytes).collect()
    }

    /// What [`Mt19937::save`] gave; `None` if it cannot be a state.
    pub fn restore(bytes: &[u8]) -> Option<Self> {
        let (words, odd) = bytes.as_chunks::<4>();
        let mut words = words.iter().map(|word| u32::from_le_bytes(*word));
        let mut state = Box::new([0; N]);
        for word in state.iter_mut() {
            *word = words.next()?;
        }
        let next = words.next()? as usize;
        // From the all-zero state nothing but zeros follows.
        let possible =
            next <= N && state.iter().any(|word| *word != 0) && odd.is_empty() && words.next().is_none();
        possible.then_some(Mt19937 { state, next })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `mt19937ar.out` of the authors: first outputs for the key 0x123, 0x234, 0x345, 0x456.
    #[test]
    fn keys_give_the_published_numbers() {
        let mut rng = Mt19937::from_words(&[0x123, 0x234, 0x345, 0x456]);
        let first: Vec<u32> = (0..5).map(|_| rng.next_u32()).collect();
        assert_eq!(first, [1_067_595_299, 955_945_823, 477_289_528, 4_107_218_783, 4_228_976_476]);
    }

    /// The C++ standard states the 10,000th output of `std::mt19937` with its default seed.
    #[test]
    fn the_default_seed_gives_the_published_numbers() {
        let mut rng = Mt19937::new(5489);
        let first: Vec<u32> = (0..3).map(|_| rng.next_u32()).collect();
        assert_eq!(first, [3_499_211_612, 581_869_302, 3_890_346_734]);
        assert_eq!((3..10_000).map(|_| rng.next_u32()).last(), Some(4_123_659_995));
    }

    #[test]
    fn a_saved_state_continues() {
        let mut rng = Mt19937::new(1 << 40);
        assert!((0..700).map(|_| rng.next_u32()).any(|x| x > 1 << 31));
        let saved = rng.save();
        assert_eq!(saved.len(), Mt19937::SAVED_BYTES);
        let mut again = Mt19937::restore(&saved).unwrap();
        assert!((0..2_000).all(|_| rng.next_u32() == again.next_u32()));
        assert_eq!(Mt19937::restore(&saved[1..]), None);
        assert_eq!(Mt19937::restore(&[saved.as_slice(), &[0]].concat()), None);
        assert_eq!(Mt19937::restore(&vec![0; saved.len()]), None);
        assert_eq!(Mt19937::restore(&vec![255; saved.len()]), None);
    }
}
