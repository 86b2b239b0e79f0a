//! Drafts by lookup: a sequence's last tokens are found earlier in it, and what followed them there is proposed.
//!
//! Published as prompt lookup decoding, or n-gram drafting. Agents write the same code, JSON and names again and again, and
//! then a proposal costs no drafter, only the rows that verify it. The index keeps for each position the latest earlier one
//! that the same [`GRAM`] tokens lead to, a chain as dictionary compressors have it: a token costs constant time and some forty
//! bytes, and dropping the last tokens leaves the index as if they had never been there.

use std::collections::HashMap;

/// Tokens that must be equal.
const GRAM: usize = 3;
/// Earlier positions that are looked at, the latest ones; and the length at which a match counts as certain enough.
const CANDIDATES: usize = 32;
/// See `CANDIDATES`.
pub(crate) const LONGEST: usize = 32;

/// Where a sequence's last tokens stand earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Match {
    /// Position of the token that followed them there.
    pub next: usize,
    /// How many tokens are equal, counted up to a bound.
    pub length: usize,
}

/// A sequence's tokens and where each three of them stood before.
#[derive(Clone, Debug, Default)]
pub struct Lookup {
    tokens: Vec<u32>,
    /// The latest position after these tokens.
    latest: HashMap<[u32; GRAM], u32>,
    /// For the position after each token the one before it that the same tokens lead to; 0: none.
    earlier: Vec<u32>,
}

impl Lookup {
    /// Tokens that it holds.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Adds a token at the end.
    pub fn push(&mut self, token: u32) {
        self.tokens.push(token);
        let earlier = match self.tokens.last_chunk::<GRAM>() {
            Some(gram) => self.latest.insert(*gram, self.tokens.len() as u32).unwrap_or(0),
            None => 0,
        };
        self.earlier.push(earlier);
    }

    /// Drops what stands after the first `len` tokens.
    pub fn truncate(&mut self, len: usize) {
        while self.tokens.len() > len {
            if let (Some(gram), Some(earlier)) = (self.tokens.last_chunk::<GRAM>(), self.earlier.last()) {
                match earlier {
                    0 => self.latest.remove(gram),
                    earlier => self.latest.insert(*gram, *earlier),
                };
            }
            self.tokens.pop();
            self.earlier.pop();
        }
    }

    /// The longest match of the sequence's end, the latest of equals.
    pub fn find(&self) -> Option<Match> {
        let mut best: Option<Match> = None;
        let mut next = self.earlier.last().map_or(0, |next| *next as usize);
        for _ in 0..CANDIDATES {
            if next == 0 {
                break;
            }
            let pairs = self.tokens[..next].iter().rev().zip(self.tokens.iter().rev());
            let length = pairs.take(LONGEST).take_while(|(a, b)| a == b).count();
            if best.is_none_or(|best| best.length < length) {
                best = Some(Match { next, length });
            }
            if length == LONGEST {
                break;
            }
            next = self.earlier[next - 1] as usize;
        }
        best
    }

    /// The `rows` tokens that follow at `next`. Where they reach the sequence's end they go on with themselves, as a period would.
    pub fn follow(&self, next: usize, rows: usize) -> Vec<u32> {
        let mut tokens = Vec::with_capacity(rows);
        for at in next..next + rows {
            let token = self.tokens.get(at).or_else(|| tokens.get(at - self.tokens.len()));
            tokens.extend(token.copied());
        }
        tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The same by trying every position.
    fn naive(tokens: &[u32]) -> Option<Match> {
        let equal = |next: usize| {
            (0..next).take_while(|i| tokens[next - 1 - i] == tokens[tokens.len() - 1 - i]).count()
        };
        let matches = (1..tokens.len()).rev().map(|next| Match { next, length: equal(next) });
        let matches = matches.filter(|m| m.length >= GRAM).take(CANDIDATES);
        let matches = matches.map(|m| Match { length: m.length.min(LONGEST), ..m });
        matches.reduce(|best, m| if m.length > best.length { m } else { best })
    }

    #[derive(Clone, Debug)]
    enum Act {
        Push(u32),
        /// Copies so many of the tokens that stand so many from the end.
        Repeat(usize, usize),
        Truncate(usize),
    }

    fn act() -> impl Strategy<Value = Act> {
        prop_oneof![
            6 => (0u32..4).prop_map(Act::Push),
            2 => (1usize..60, 1usize..60).prop_map(|(back, count)| Act::Repeat(back, count)),
            1 => (0usize..400).prop_map(Act::Truncate),
        ]
    }

    proptest! {
        /// Whatever was pushed and dropped before, matches are those of the tokens that are left.
        #[test]
        fn matches_are_those_of_a_naive_search(acts in proptest::collection::vec(act(), 1..120)) {
            let (mut lookup, mut tokens) = (Lookup::default(), vec![]);
            for act in acts {
                let new = match act {
                    Act::Push(token) => vec![token],
                    Act::Repeat(back, count) => {
                        let from = tokens.len().saturating_sub(back);
                        tokens[from..].iter().copied().take(count).collect()
                    }
                    Act::Truncate(len) => {
                        tokens.truncate(len);
                        lookup.truncate(len);
                        vec![]
                    }
                };
                for token in new {
                    lookup.push(token);
                    tokens.push(token);
                    prop_assert_eq!(lookup.find(), naive(&tokens));
                }
                prop_assert_eq!(lookup.find(), naive(&tokens));
                prop_assert_eq!(lookup.len(), tokens.len());
                let mut fresh = Lookup::default();
                tokens.iter().for_each(|token| fresh.push(*token));
                prop_assert_eq!(&lookup.latest, &fresh.latest);
            }
        }

        /// A proposal at `next` is what makes the sequence repeat itself from there.
        #[test]
        fn proposals_go_on_as_the_match_did(tokens in proptest::collection::vec(0u32..9, 1..40), next: usize, rows in 0usize..80) {
            let next = next % tokens.len();
            let mut lookup = Lookup::default();
            tokens.iter().for_each(|token| lookup.push(*token));
            let got = lookup.follow(next, rows);
            prop_assert_eq!(got.len(), rows);
            let whole = [&tokens[..], &got].concat();
            prop_assert!((0..rows).all(|i| whole[tokens.len() + i] == whole[next + i]));
        }
    }
}
