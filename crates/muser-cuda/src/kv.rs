//! Keys and values of sequences on the card: rings and planes of token-major f16 rows.

use crate::gpu::{Gpu, Memory};
use crate::launch::Cache;
use muser_core::{CacheSpec, DeviceError, SeqId};
use std::collections::HashMap;

/// Sequences that a card holds at most.
pub(crate) const SLOTS: usize = 64;

/// One sequence.
pub(crate) struct Sequence {
    pub slot: usize,
    pub context: usize,
    /// K and V of each cache.
    planes: Vec<[Memory; 2]>,
}

/// All sequences, and the table of their addresses that kernels read.
pub(crate) struct Kv {
    specs: Vec<CacheSpec>,
    room: usize,
    table: Memory,
    sequences: HashMap<SeqId, Sequence>,
    free: Vec<usize>,
    next: u32,
}

impl Kv {
    /// Without a card it only tells where things would stand.
    pub fn new(gpu: Option<&Gpu>, specs: &[CacheSpec], room: usize) -> Result<Self, DeviceError> {
        let table =
            gpu.map_or_else(|| Ok(Memory::nowhere()), |gpu| gpu.alloc(specs.len() * 2 * SLOTS * 8))?;
        let free = (0..SLOTS).rev().collect();
        Ok(Kv { specs: specs.to_vec(), room, table, sequences: HashMap::new(), free, next: 0 })
    }

    fn capacity(&self, spec: &CacheSpec, context: usize) -> usize {
        spec.window.map_or(context, |w| (w + self.room).min(context))
    }

    /// Bytes of a sequence of `context` positions.
    pub fn bytes(&self, context: usize) -> u64 {
        let each = |s: &CacheSpec| (self.capacity(s, context) * s.kv_heads * s.head_dim * 4) as u64;
        self.specs.iter().map(each).sum()
    }

    pub fn open(&mut self, gpu: &Gpu, context: usize) -> Result<SeqId, DeviceError> {
        let need = self.bytes(context);
        let (have, _) = gpu.memory()?;
        if need > have {
            // Rings do not grow; what is left decides how long the planes can be.
            let fixed = self.bytes(0);
            let each = self.bytes(1 << 20).saturating_sub(fixed) >> 20;
            let fits = have.saturating_sub(fixed) / each.max(1);
            return Err(DeviceError::Memory {
                what: format!("a context of {context} tokens"),
                need,
                have,
                mend: format!("about {fits} tokens fit: give a smaller --context or close other sequences"),
            });
        }
        let slot = self.free.pop().ok_or_else(|| DeviceError::Memory {
            what: "another sequence".into(),
            need: SLOTS as u64 + 1,
            have: SLOTS as u64,
            mend: "close a sequence first".into(),
        })?;
        let mut planes = vec![];
        for (i, spec) in self.specs.clone().iter().enumerate() {
            let bytes = self.capacity(spec, context) * spec.kv_heads * spec.head_dim * 2;
            let pair = [gpu.alloc(bytes)?, gpu.alloc(bytes)?];
            for (which, memory) in pair.iter().enumerate() {
                let at = ((i * 2 + which) * SLOTS + slot) * 8;
                gpu.upload(&mut self.table, at, &memory.ptr.to_le_bytes())?;
            }
            planes.push(pair);
        }
        gpu.synchronize()?;
        let id = SeqId(self.next);
        self.next += 1;
        self.sequences.insert(id, Sequence { slot, context, planes });
        Ok(id)
    }

    pub fn close(&mut self, seq: SeqId) {
        if let Some(sequence) = self.sequences.remove(&seq) {
            self.free.push(sequence.slot);
        }
    }

    pub fn get(&self, seq: SeqId) -> Option<&Sequence> {
        self.sequences.get(&seq)
    }

    /// What kernels need to know of a cache. A ring's capacity is window + room for every sequence: shorter contexts never wrap.
    pub fn cache(&self, index: usize) -> Cache {
        let spec = &self.specs[index];
        let address = |which: usize| self.table.ptr + ((index * 2 + which) * SLOTS * 8) as u64;
        Cache {
            k: address(0),
            v: address(1),
            capacity: spec.window.map_or(0, |w| w + self.room),
            window: spec.window.unwrap_or(0),
            kv_heads: spec.kv_heads,
            width: spec.kv_heads * spec.head_dim,
        }
    }

    /// Runs of (position, first row, rows) that hold the positions from..len of a cache.
    fn runs(&self, spec: &CacheSpec, len: usize) -> Vec<(usize, usize, usize)> {
        let from = spec.window.map_or(0, |w| len.saturating_sub(w));
        let Some(window) = spec.window else { return vec![(from, from, len - from)] };
        let capacity = window + self.room;
        let (mut at, mut runs) = (from, vec![]);
        while at < len {
            let row = at % capacity;
            let n = (capacity - row).min(len - at);
            runs.push((at, row, n));
            at += n;
        }
        runs
    }

    pub fn save(&self, gpu: &Gpu, seq: SeqId, len: usize) -> Result<Vec<u8>, DeviceError> {
        let sequence = self.sequences.get(&seq).ok_or(DeviceError::NoSequence(seq.0))?;
        let mut out = vec![];
        for (spec, pair) in self.specs.iter().zip(&sequence.planes) {
            let row = spec.kv_heads * spec.head_dim * 2;
            for memory in pair {
                for (_, first, n) in self.runs(spec, len.min(sequence.context)) {
                    let at = out.len();
                    out.resize(at + n * row, 0);
                    gpu.download(memory, first * row, &mut out[at..])?;
                }
            }
        }
        Ok(out)
    }

    pub fn restore(&mut self, gpu: &Gpu, seq: SeqId, len: usize, state: &[u8]) -> Result<(), DeviceError> {
        let bad = |why: String| DeviceError::BadState(format!("{why}; prefill the prompt again"));
        let sequence = self.sequences.get(&seq).ok_or(DeviceError::NoSequence(seq.0))?;
        if len > sequence.context {
            return Err(bad(format!("{len} positions do not fit a context of {}", sequence.context)));
        }
        let held = |s: &CacheSpec| s.window.map_or(len, |w| w.min(len)) * s.kv_heads * s.head_dim * 4;
        let want: usize = self.specs.iter().map(held).sum();
        if state.len() != want {
            return Err(bad(format!("{} bytes where {want} belong", state.len())));
        }
        let runs: Vec<_> = self.specs.iter().map(|s| self.runs(s, len)).collect();
        let sequence = self.sequences.get_mut(&seq).ok_or(DeviceError::NoSequence(seq.0))?;
        let mut at = 0;
        for ((spec, pair), runs) in self.specs.iter().zip(&mut sequence.planes).zip(runs) {
            let row = spec.kv_heads * spec.head_dim * 2;
            for memory in pair {
                for (_, first, n) in &runs {
                    gpu.upload(memory, first * row, &state[at..at + n * row])?;
                    at += n * row;
                }
            }
        }
        gpu.synchronize()
    }

    pub fn copy(&mut self, gpu: &Gpu, from: SeqId, to: SeqId, len: usize) -> Result<(), DeviceError> {
        let mut target = self.sequences.remove(&to).ok_or(DeviceError::NoSequence(to.0))?;
        let result = self.copy_into(gpu, from, &mut target, len);
        self.sequences.insert(to, target);
        result
    }

    fn copy_into(
        &self,
        gpu: &Gpu,
        from: SeqId,
        target: &mut Sequence,
        len: usize,
    ) -> Result<(), DeviceError> {
        let source = self.sequences.get(&from).ok_or(DeviceError::NoSequence(from.0))?;
        if len > target.context || len > source.context {
            return Err(DeviceError::BadState(format!("{len} positions do not fit the other sequence")));
        }
        for ((spec, a), b) in self.specs.iter().zip(&source.planes).zip(&mut target.planes) {
            let row = spec.kv_heads * spec.head_dim * 2;
            for (a, b) in a.iter().zip(b) {
                for (_, first, n) in self.runs(spec, len) {
                    gpu.copy(a, first * row, b, first * row, n * row)?;
                }
            }
        }
        gpu.synchronize()
    }
}
