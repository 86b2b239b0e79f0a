//! A row of logits comes from far and is long, so it is read once: the largest value of each block says where later stages have to look.

use super::{TokenMask, wide};

/// Tokens of a word of a mask, and of a block.
const WORD: usize = 32;
pub(super) const BLOCK: usize = 8 * WORD;

/// A row without NaN, with the largest value of each block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row<'a> {
    logits: &'a [f32],
    largest: &'a [f32],
}

impl<'a> Row<'a> {
    /// A row that was [scanned](scan).
    pub fn of(logits: &'a [f32], largest: &'a [f32]) -> Self {
        Row { logits, largest }
    }

    /// Number of tokens.
    pub fn len(self) -> usize {
        self.logits.len()
    }

    /// A value below the `k` largest logits, for a search that is to find them: as many blocks have one above it.
    pub fn below(self, k: usize) -> f32 {
        let Some(nth) = k.checked_sub(1).filter(|nth| *nth < self.largest.len()) else {
            return f32::NEG_INFINITY;
        };
        let mut largest = self.largest.to_vec();
        largest.select_nth_unstable_by(nth, |a, b| b.total_cmp(a)).1.next_down()
    }

    /// Shows `take` the allowed tokens whose logit is above `floor`, in order of their ids; what it returns is the new floor. Blocks below the
    /// floor cost a comparison.
    pub fn above(self, mask: Option<&TokenMask>, mut floor: f32, mut take: impl FnMut(u32, f32) -> f32) {
        for (i, (block, largest)) in self.logits.chunks(BLOCK).zip(self.largest).enumerate() {
            if *largest <= floor {
                continue;
            }
            for (word, mut bits) in wide::run(Above { logits: block, floor }).into_iter().enumerate() {
                bits &= mask.map_or(u32::MAX, |mask| mask.word(i * (BLOCK / WORD) + word));
                while bits != 0 {
                    let at = word * WORD + bits.trailing_zeros() as usize;
                    bits &= bits - 1;
                    // The floor may have risen.
                    if block[at] > floor {
                        floor = take((i * BLOCK + at) as u32, block[at]);
                    }
                }
            }
        }
    }

    /// The largest values of the blocks.
    pub fn largest(self) -> &'a [f32] {
        self.largest
    }

    /// A block's logits, those of forbidden tokens minus infinity; none where all are forbidden. `room` is for what a mask changes.
    pub fn block<'b>(self, i: usize, mask: Option<&TokenMask>, room: &'b mut [f32; BLOCK]) -> &'b [f32]
    where
        'a: 'b,
    {
        let logits = &self.logits[i * BLOCK..self.len().min((i + 1) * BLOCK)];
        let Some(mask) = mask else { return logits };
        let words: [u32; BLOCK / WORD] = std::array::from_fn(|word| mask.word(i * (BLOCK / WORD) + word));
        match words {
            _ if words == [0; BLOCK / WORD] => &[],
            _ if words == [u32::MAX; BLOCK / WORD] => logits,
            _ => wide::run(Masked { logits, words, room }),
        }
    }
}

/// Reads a row's blocks' largest values into `largest`, and says whether all values are finite.
pub(super) fn scan(logits: &[f32], largest: &mut Vec<f32>) -> bool {
    wide::run(Scan { logits, largest })
}

struct Scan<'a> {
    logits: &'a [f32],
    largest: &'a mut Vec<f32>,
}

impl wide::Loop for Scan<'_> {
    type Out = bool;

    #[inline(always)]
    fn run(self) -> bool {
        self.largest.clear();
        let mut finite = true;
        for block in self.logits.chunks(BLOCK) {
            let (value, all) = largest_of(block);
            finite &= all;
            self.largest.push(value);
        }
        finite
    }
}

/// Largest value, and whether all are finite; sixteen lanes let the compiler use vectors.
#[inline(always)]
fn largest_of(block: &[f32]) -> (f32, bool) {
    const LANES: usize = 16;
    let (mut lanes, mut zeros) = ([f32::NEG_INFINITY; LANES], [0.0f32; LANES]);
    let (whole, rest) = block.as_chunks::<LANES>();
    for values in whole {
        for ((lane, zero), x) in lanes.iter_mut().zip(&mut zeros).zip(values) {
            *lane = if *x > *lane { *x } else { *lane };
            // A finite value adds zero, any other NaN.
            *zero += *x * 0.0;
        }
    }
    let largest = lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |a, b| if *b > a { *b } else { a });
    (largest, zeros.iter().all(|zero| *zero == 0.0) && rest.iter().all(|x| x.is_finite()))
}

/// A block's logits, those without a bit minus infinity.
struct Masked<'a, 'b> {
    logits: &'a [f32],
    words: [u32; BLOCK / WORD],
    room: &'b mut [f32; BLOCK],
}

impl<'b> wide::Loop for Masked<'_, 'b> {
    type Out = &'b [f32];

    #[inline(always)]
    fn run(self) -> &'b [f32] {
        let room = &mut self.room[..self.logits.len()];
        room.copy_from_slice(self.logits);
        for (room, word) in room.chunks_mut(WORD).zip(self.words) {
            for (bit, logit) in room.iter_mut().enumerate() {
                *logit = if word & 1 << bit != 0 { *logit } else { f32::NEG_INFINITY };
            }
        }
        room
    }
}

/// One bit for each of a block's logits above the floor.
struct Above<'a> {
    logits: &'a [f32],
    floor: f32,
}

impl wide::Loop for Above<'_> {
    type Out = [u32; BLOCK / WORD];

    #[inline(always)]
    fn run(self) -> [u32; BLOCK / WORD] {
        let bits = |logits: &[f32]| {
            logits.iter().enumerate().fold(0, |bits, (i, x)| bits | u32::from(*x > self.floor) << i)
        };
        let mut words = [0; BLOCK / WORD];
        let (whole, rest) = self.logits.as_chunks::<WORD>();
        for (word, logits) in words.iter_mut().zip(whole) {
            *word = bits(logits);
        }
        if !rest.is_empty() {
            words[whole.len()] = bits(rest);
        }
        words
    }
}

#[cfg(test)]
mod tests {
    use super::wide::Loop;
    use super::*;
    use proptest::prelude::*;

    /// What a scan finds.
    struct Found<'a>(&'a [f32]);

    impl Loop for Found<'_> {
        type Out = (Vec<f32>, bool);

        #[inline(always)]
        fn run(self) -> (Vec<f32>, bool) {
            let mut largest = vec![];
            let finite = Scan { logits: self.0, largest: &mut largest }.run();
            (largest, finite)
        }
    }

    proptest! {
        #[test]
        fn every_instruction_set_reads_the_same(
            mut logits in proptest::collection::vec((-40i32..40).prop_map(|x| x as f32 * 0.25), 1..700),
            floor in -11f32..11.0,
            (at, odd) in (0usize..1400, prop_oneof![Just(f32::NEG_INFINITY), Just(f32::NAN), Just(f32::INFINITY)]),
        ) {
            let finite = at >= logits.len();
            if !finite {
                logits[at] = odd;
            }
            let largest: Vec<f32> =
                logits.chunks(BLOCK).map(|block| block.iter().copied().fold(f32::NEG_INFINITY, f32::max)).collect();
            for found in wide::each(|| Found(&logits)) {
                prop_assert_eq!(found, (largest.clone(), finite));
            }
            for block in logits.chunks(BLOCK) {
                for words in wide::each(|| Above { logits: block, floor }) {
                    for at in 0..BLOCK {
                        let above = block.get(at).is_some_and(|logit| *logit > floor);
                        prop_assert_eq!(words[at / WORD] >> (at % WORD) & 1 == 1, above);
                    }
                }
            }
        }
    }
}
