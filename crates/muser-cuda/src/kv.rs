//! Keys and values of sequences on the card: rings and planes of token-major rows.

use crate::gpu::{Gpu, Memory};
use crate::launch::Cache;
use muser_core::{CacheSpec, DeviceError, KvType, SeqId};
use std::collections::HashMap;

/// Sequences that a card holds at most.
pub(crate) const SLOTS: usize = 64;
/// Tables of addresses of a cache: keys, values, and factors of both (FACTORS in kernels/kv.cuh is two of them).
const MOST_PLANES: usize = 4;

/// What kernels of this type of keys and values are called, behind their names.
pub(crate) fn suffix(kv: KvType) -> &'static str {
    if kv == KvType::Q8_0 { "_q8_0" } else { "" }
}

/// One sequence.
pub(crate) struct Sequence {
    pub slot: usize,
    pub context: usize,
    /// Of each cache the planes that [`Kv::widths`] lists.
    planes: Vec<Vec<Memory>>,
}

/// All sequences, and the table of their addresses that kernels read.
pub(crate) struct Kv {
    kv: KvType,
    specs: Vec<CacheSpec>,
    room: usize,
    table: Memory,
    sequences: HashMap<SeqId, Sequence>,
    free: Vec<usize>,
    next: u32,
}

impl Kv {
    /// Without a card it only tells where things would stand.
    pub fn new(gpu: Option<&Gpu>, specs: &[CacheSpec], kv: KvType, room: usize) -> Result<Self, DeviceError> {
        let bytes = specs.len() * MOST_PLANES * SLOTS * 8;
        let table = gpu.map_or_else(|| Ok(Memory::nowhere()), |gpu| gpu.alloc(bytes))?;
        let free = (0..SLOTS).rev().collect();
        Ok(Kv { kv, specs: specs.to_vec(), room, table, sequences: HashMap::new(), free, next: 0 })
    }

    /// The name of a kernel that reads or writes caches, for their type.
    pub fn kernel(&self, name: &str) -> String {
        format!("{name}{}", suffix(self.kv))
    }

    /// Shared memory of attend_few (TOP_AT in kernels/decode.cu, and what stands there).
    pub fn shared_few(&self) -> usize {
        if self.kv == KvType::Q8_0 { 53_248 } else { 89_600 }
    }

    /// What attend_rows needs of it beyond halves: factors of 32 keys and values.
    pub fn shared_rows(&self) -> usize {
        if self.kv == KvType::Q8_0 { 512 } else { 0 }
    }

    /// Bytes of a row of each plane of a cache: keys, values; of q8_0 also their factors (kernels/kv.cuh).
    fn widths(&self, spec: &CacheSpec) -> Vec<usize> {
        let elements = spec.kv_heads * spec.head_dim;
        match self.kv {
            KvType::Q8_0 => vec![elements, elements, elements / 16, elements / 16],
            _ => vec![elements * 2; 2],
        }
    }

    /// Bytes of a position in a cache.
    fn width(&self, spec: &CacheSpec) -> usize {
        self.widths(spec).iter().sum()
    }

    fn capacity(&self, spec: &CacheSpec, context: usize) -> usize {
        spec.window.map_or(context, |w| (w + self.room).min(context))
    }

    /// Bytes of a sequence of `context` positions.
    pub fn bytes(&self, context: usize) -> u64 {
        let each = |s: &CacheSpec| (self.capacity(s, context) * self.width(s)) as u64;
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
            let capacity = self.capacity(spec, context);
            let widths = self.widths(spec);
            let of_cache =
                widths.iter().map(|width| gpu.alloc(capacity * width)).collect::<Result<Vec<_>, _>>()?;
            for (which, memory) in of_cache.iter().enumerate() {
                let at = ((i * MOST_PLANES + which) * SLOTS + slot) * 8;
                gpu.upload(&mut self.table, at, &memory.ptr.to_le_bytes())?;
            }
            planes.push(of_cache);
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
        let address = |which: usize| self.table.ptr + ((index * MOST_PLANES + which) * SLOTS * 8) as u64;
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
        for (spec, planes) in self.specs.iter().zip(&sequence.planes) {
            for (memory, row) in planes.iter().zip(self.widths(spec)) {
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
        let held = |s: &CacheSpec| s.window.map_or(len, |w| w.min(len)) * self.width(s);
        let want: usize = self.specs.iter().map(held).sum();
        if state.len() != want {
            return Err(bad(format!("{} bytes where {want} belong", state.len())));
        }
        let caches: Vec<_> = self.specs.iter().map(|s| (self.widths(s), self.runs(s, len))).collect();
        let sequence = self.sequences.get_mut(&seq).ok_or(DeviceError::NoSequence(seq.0))?;
        let mut at = 0;
        for (planes, (widths, runs)) in sequence.planes.iter_mut().zip(caches) {
            for (memory, row) in planes.iter_mut().zip(widths) {
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
            for ((a, b), row) in a.iter().zip(b).zip(self.widths(spec)) {
                for (_, first, n) in self.runs(spec, len) {
                    gpu.copy(a, first * row, b, first * row, n * row)?;
                }
            }
        }
        gpu.synchronize()
    }
}
