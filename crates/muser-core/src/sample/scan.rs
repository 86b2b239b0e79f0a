//! A row of logits comes from far and is long, so it is read once: the largest value of each block says where later stages have to look.

use super::TokenMask;

/// Tokens of a word of a mask, and of a block.
const WORD: usize = 32;
const BLOCK: usize = 8 * WORD;

/// A row without NaN, with the largest value of each block.
#[derive(Clone, Copy)]
pub(super) struct Row<'a> {
    logits: &'a [f32],
    largest: &'a [f32],
}

impl<'a> Row<'a> {
    /// Reads a row, its blocks into `largest`, and says whether all values are finite.
    pub fn read(logits: &'a [f32], largest: &'a mut Vec<f32>) -> (Self, bool) {
        largest.clear();
        let mut finite = true;
        largest.extend(logits.chunks(BLOCK).map(|block| {
            let (value, all) = largest_of(block);
            finite &= all;
            value
        }));
        (Row { logits, largest }, finite)
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
            for (word, part) in block.chunks(WORD).enumerate() {
                let word = i * (BLOCK / WORD) + word;
                let allowed = mask.map_or(u32::MAX, |mask| mask.word(word));
                if allowed == 0 || largest_of(part).0 <= floor {
                    continue;
                }
                for (bit, logit) in part.iter().enumerate() {
                    if *logit > floor && allowed >> bit & 1 == 1 {
                        floor = take((word * WORD + bit) as u32, *logit);
                    }
                }
            }
        }
    }
}

/// Largest value, and whether all are finite; sixteen lanes let the compiler use vectors.
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
