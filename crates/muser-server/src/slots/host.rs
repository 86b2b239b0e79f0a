//! Saved sessions in host memory: what idle slots held before they were given away, and checkpoints that rings have
//! since overwritten.

/// A saved session; its first tokens are what a prompt is compared with.
struct Entry {
    tokens: Vec<u32>,
    state: Vec<u8>,
    used: u64,
}

/// Least recently used entries within a budget of bytes.
pub struct HostCache {
    entries: Vec<Entry>,
    budget: usize,
    bytes: usize,
    clock: u64,
    window: usize,
}

/// Length of the common prefix.
pub fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

impl HostCache {
    /// `budget` bytes of states and tokens; 0 turns the tier off. `window` is the reach of the model's local layers: a
    /// restored session that is longer goes on from its end only.
    pub fn new(budget: usize, window: usize) -> Self {
        HostCache { entries: vec![], budget, bytes: 0, clock: 0, window }
    }

    /// Bytes that are held.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether a state of about `bytes` bytes could be kept at all.
    pub fn fits(&self, bytes: usize) -> bool {
        bytes <= self.budget
    }

    /// Whether a session with exactly these tokens is held.
    pub fn holds(&self, tokens: &[u32]) -> bool {
        self.entries.iter().any(|e| e.tokens == tokens)
    }

    /// Keeps a state; the least recently used ones make room.
    pub fn insert(&mut self, tokens: Vec<u32>, state: Vec<u8>) {
        self.entries.retain(|e| e.tokens != tokens);
        self.bytes = self.entries.iter().map(Entry::bytes).sum();
        self.clock += 1;
        let entry = Entry { tokens, state, used: self.clock };
        if entry.bytes() > self.budget {
            return;
        }
        while self.bytes + entry.bytes() > self.budget {
            let Some(oldest) = (0..self.entries.len()).min_by_key(|i| self.entries[*i].used) else { break };
            self.bytes -= self.entries.swap_remove(oldest).bytes();
        }
        self.bytes += entry.bytes();
        self.entries.push(entry);
    }

    /// The entry that saves most of `prompt`: its index, and how many of the prompt's tokens it can stand for.
    pub fn find(&self, prompt: &[u32]) -> Option<(usize, usize)> {
        let usable = |e: &Entry| {
            let len = common(&e.tokens, prompt).min(prompt.len().saturating_sub(1));
            (len > 0 && (len == e.tokens.len() || e.tokens.len() <= self.window)).then_some(len)
        };
        let found = self.entries.iter().enumerate().filter_map(|(i, e)| Some((i, usable(e)?)));
        found.max_by_key(|(_, len)| *len)
    }

    /// The state of an entry, which counts as used now.
    pub fn state(&mut self, index: usize) -> Option<&[u8]> {
        self.clock += 1;
        let entry = self.entries.get_mut(index)?;
        entry.used = self.clock;
        Some(&entry.state)
    }
}

impl Entry {
    fn bytes(&self) -> usize {
        self.state.len() + 4 * self.tokens.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_makes_room() {
        let mut cache = HostCache::new(100, 4);
        cache.insert(vec![1, 2, 3], vec![0; 28]);
        cache.insert(vec![4, 5, 6], vec![0; 28]);
        assert_eq!((cache.bytes(), cache.find(&[1, 2, 9])), (80, Some((0, 2))));
        cache.state(0);
        cache.insert(vec![7, 8, 9], vec![0; 28]);
        assert!(cache.holds(&[1, 2, 3]) && !cache.holds(&[4, 5, 6]) && cache.holds(&[7, 8, 9]));
        assert_eq!(cache.bytes(), 80);
        cache.insert(vec![9; 3], vec![0; 100]);
        assert_eq!(cache.bytes(), 80, "larger than the budget");
    }

    #[test]
    fn a_wrapped_ring_goes_on_from_its_end_only() {
        let mut cache = HostCache::new(1000, 4);
        cache.insert(vec![1, 2, 3, 4, 5], vec![0]);
        assert_eq!(cache.find(&[1, 2, 3, 4, 9]), None);
        assert_eq!(cache.find(&[1, 2, 3, 4, 5]), None, "the last token of a prompt is always computed");
        assert_eq!(cache.find(&[1, 2, 3, 4, 5, 6]), Some((0, 5)));
        cache.insert(vec![1, 2, 3, 4], vec![0]);
        assert_eq!(cache.find(&[1, 2, 3, 9]), Some((1, 3)));
    }
}
