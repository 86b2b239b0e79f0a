//! The set of tokens that a grammar allows.

/// One bit a token, in words of 32, lowest bit first: the layout that grammar engines compute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenMask {
    words: Vec<u32>,
    vocab: usize,
}

impl TokenMask {
    /// Allows none of `vocab` tokens.
    pub fn none(vocab: usize) -> Self {
        TokenMask { words: vec![0; vocab.div_ceil(32)], vocab }
    }

    /// Takes the bits of `words`; tokens beyond them are forbidden, bits beyond the vocabulary are ignored.
    pub fn set_words(&mut self, words: &[u32]) {
        let n = words.len().min(self.words.len());
        self.words.fill(0);
        self.words[..n].copy_from_slice(&words[..n]);
    }

    /// Allows one token; a token beyond the vocabulary is ignored.
    pub fn allow(&mut self, token: u32) {
        if let Some(word) = self.words.get_mut(token as usize / 32) {
            *word |= 1 << (token % 32);
        }
    }

    /// Whether a token is allowed.
    pub fn allows(&self, token: u32) -> bool {
        (token as usize) < self.vocab && self.word(token as usize / 32) >> (token % 32) & 1 == 1
    }

    /// Number of tokens that the mask speaks of.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// All words.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// Bits of tokens `32 * i ..`.
    pub(super) fn word(&self, i: usize) -> u32 {
        self.words.get(i).copied().unwrap_or(0)
    }
}
