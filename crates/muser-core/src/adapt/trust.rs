//! How far a match is trusted that a lookup found.

use crate::lookup::LONGEST;

/// Shortest matches of each class, and the chance that a match of it foretells the next token, before anything is known.
const CLASSES: [(usize, f64); 5] = [(0, 0.45), (5, 0.65), (8, 0.8), (16, 0.93), (LONGEST, 0.97)];
/// How many observations that is worth at first.
const PRIOR: f64 = 3.0;
/// Observations after which this text has shown what it is worth.
const TESTED: usize = 2;
/// What an observation leaves of earlier ones.
const KEEPS: f64 = 0.97;
/// What a new prompt leaves of them.
const PROMPT_KEEPS: f64 = 0.15;

/// How often matches foretold the next token, by their length. Every token of a sequence tells, drafted or not.
#[derive(Clone, Debug)]
pub(super) struct Trust([Class; CLASSES.len()]);

/// Of matches of one class, older ones counting less: how often it came out, and how often as foretold.
#[derive(Clone, Copy, Debug)]
struct Class {
    decided: f64,
    confirmed: f64,
    /// Since the prompt began.
    seen: usize,
}

impl Default for Trust {
    fn default() -> Self {
        let prior = |(_, chance)| Class { decided: PRIOR, confirmed: PRIOR * chance, seen: 0 };
        Trust(CLASSES.map(prior))
    }
}

impl Trust {
    /// The token after a match of this length was the foretold one, or not.
    pub fn observe(&mut self, length: usize, foretold: bool) {
        let class = &mut self.0[class(length)];
        class.decided = KEEPS * class.decided + 1.0;
        class.confirmed = KEEPS * class.confirmed + f64::from(u8::from(foretold));
        class.seen += 1;
    }

    /// Makes room for what the next text teaches.
    pub fn fade(&mut self) {
        for (class, fresh) in self.0.iter_mut().zip(Trust::default().0) {
            let mix = |old: f64, fresh: f64| PROMPT_KEEPS * old + (1.0 - PROMPT_KEEPS) * fresh;
            class.decided = mix(class.decided, fresh.decided);
            class.confirmed = mix(class.confirmed, fresh.confirmed);
            class.seen = 0;
        }
    }

    /// Whether this text has shown what matches of this length are worth.
    pub fn is_tested(&self, length: usize) -> bool {
        self.0[class(length)].seen >= TESTED
    }

    /// Chance of each row after a match of this length that it and all before it are confirmed: a confirmed row has made the
    /// match longer.
    pub fn chances(&self, length: usize) -> impl Iterator<Item = f64> {
        (length..).scan(1.0, |all, length| {
            let Class { decided, confirmed, .. } = self.0[class(length)];
            *all *= confirmed / decided;
            Some(*all)
        })
    }
}

fn class(length: usize) -> usize {
    CLASSES.iter().rposition(|(shortest, _)| length >= *shortest).unwrap_or(0)
}
