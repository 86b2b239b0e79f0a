//! Keys and values of sequences on the card: rings and planes of token-major rows.

use crate::gpu::{Card, Gpu, Memory};
use crate::launch::Cache;
use muser_core::{CacheSpec, DeviceError, KvType, Lane, SeqId};
use std::collections::HashMap;

/// Sequences that a card holds at most.
pub(crate) const SLOTS: usize = 64;
/// Tables of addresses of a cache: keys, values, and factors of both (FACTORS in kernels/kv.cuh is two of them).
const MOST_PLANES: usize = 4;

/// Bytes that caches leave free: graphs of launches and longer logits come later.
pub(crate) const SPARED: u64 = 64 << 20;

/// Bytes of a row of each plane of a cache: keys, values; of q8_0 also their factors (kernels/kv.cuh).
fn widths(kv: KvType, spec: &CacheSpec) -> Vec<usize> {
    let elements = spec.kv_heads * spec.head_dim;
    match kv {
        KvType::Q8_0 => vec![elements, elements, elements / 16, elements / 16],
        _ => vec![elements * 2; 2],
    }
}

/// Bytes of a position in a cache.
fn width(kv: KvType, spec: &CacheSpec) -> usize {
    widths(kv, spec).iter().sum()
}

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
    lane: Lane,
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
    pub fn new(
        gpu: Option<&Gpu>,
        specs: &[CacheSpec],
        (lane, kv): (Lane, KvType),
        room: usize,
    ) -> Result<Self, DeviceError> {
        let bytes = specs.len() * MOST_PLANES * SLOTS * 8;
        let table = gpu.map_or_else(|| Ok(Memory::nowhere()), |gpu| gpu.alloc(bytes))?;
        let free = (0..SLOTS).rev().collect();
        Ok(Kv { lane, kv, specs: specs.to_vec(), room, table, sequences: HashMap::new(), free, next: 0 })
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

    /// Whether warpgroups read the keys of a sequence for several rows at once.
    pub fn is_shared(&self, card: &Card) -> bool {
        card.room.wide && self.kv == KvType::F16
    }

    fn capacity(&self, spec: &CacheSpec, context: usize) -> usize {
        spec.window.map_or(context, |w| (w + self.room).min(context))
    }

    /// Bytes of a sequence of `context` positions.
    pub fn bytes(&self, kv: KvType, context: usize) -> u64 {
        let each = |s: &CacheSpec| (self.capacity(s, context) * width(kv, s)) as u64;
        self.specs.iter().map(each).sum()
    }

    /// Bytes of the sequences that are open, and how many these are.
    pub fn held(&self) -> (u64, usize) {
        (self.sequences.values().map(|s| self.bytes(self.kv, s.context)).sum(), self.sequences.len())
    }

    /// Refuses a context that needs more than the `have` bytes that are free; `fewer` tells which layers would leave room.
    pub fn check(
        &self,
        context: usize,
        have: u64,
        fewer: impl Fn() -> Result<String, DeviceError>,
    ) -> Result<(), DeviceError> {
        let have = have.saturating_sub(SPARED);
        let need = self.bytes(self.kv, context);
        if need <= have {
            return Ok(());
        }
        let mut mend = format!("{} tokens fit", self.fits(self.kv, have));
        if self.lane == Lane::Serving && self.kv == KvType::F16 {
            mend += &format!(", {} with --kv q8_0", self.fits(KvType::Q8_0, have));
        }
        mend += &format!(": {}give a smaller --context or close other sequences", fewer()?);
        Err(DeviceError::Memory { what: format!("a context of {context} tokens"), need, have, mend })
    }

    /// The longest context that `have` bytes hold.
    fn fits(&self, kv: KvType, have: u64) -> usize {
        let (mut fits, mut beyond) = (0, 1 << 32);
        while beyond - fits > 1 {
            let middle = fits + (beyond - fits) / 2;
            if self.bytes(kv, middle) <= have { fits = middle } else { beyond = middle }
        }
        fits
    }

    pub fn open(&mut self, gpu: &Gpu, context: usize) -> Result<SeqId, DeviceError> {
        let slot = *self.free.last().ok_or_else(|| DeviceError::Memory {
            what: "another sequence".into(),
            need: SLOTS as u64 + 1,
            have: SLOTS as u64,
            mend: "close a sequence first".into(),
        })?;
        let mut planes = vec![];
        for (i, spec) in self.specs.clone().iter().enumerate() {
            let capacity = self.capacity(spec, context);
            let widths = widths(self.kv, spec);
            let of_cache =
                widths.iter().map(|width| gpu.alloc(capacity * width)).collect::<Result<Vec<_>, _>>()?;
            for (which, memory) in of_cache.iter().enumerate() {
                let at = ((i * MOST_PLANES + which) * SLOTS + slot) * 8;
                gpu.upload(&mut self.table, at, &memory.ptr.to_le_bytes())?;
            }
            planes.push(of_cache);
        }
        gpu.synchronize()?;
        self.free.pop();
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
            for (memory, row) in planes.iter().zip(widths(self.kv, spec)) {
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
        let held = |s: &CacheSpec| s.window.map_or(len, |w| w.min(len)) * width(self.kv, s);
        let want: usize = self.specs.iter().map(held).sum();
        if state.len() != want {
            return Err(bad(format!("{} bytes where {want} belong", state.len())));
        }
        let caches: Vec<_> = self.specs.iter().map(|s| (widths(self.kv, s), self.runs(s, len))).collect();
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
            for ((a, b), row) in a.iter().zip(b).zip(widths(self.kv, spec)) {
                for (_, first, n) in self.runs(spec, len) {
                    gpu.copy(a, first * row, b, first * row, n * row)?;
                }
            }
        }
        gpu.synchronize()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use muser_core::cost::cache_bytes;
    use muser_core::model::{QuantMix, Synthetic, muse_glimmer_30b};
    use muser_core::{Model, Net};

    /// The release on a card with 4 GB left.
    #[test]
    fn what_fits_is_told() {
        let geometry = muse_glimmer_30b(52);
        let weights = Synthetic::shapes(Net::Target, geometry.clone(), 0, QuantMix::Q4KM);
        let model = Model::new(geometry, Box::new(weights), None).unwrap();
        let kv = |lane, kv| Kv::new(None, &model.plans.caches, (lane, kv), 512).unwrap();
        let have = 4_000_000_000;
        let check = |kv: &Kv, n| kv.check(n, have + SPARED, || Ok(String::new()));
        let mut fits = vec![];
        for of in [KvType::F16, KvType::Q8_0] {
            let n = kv(Lane::Serving, of).fits(of, have);
            assert!(cache_bytes(&model, of, n, 512) <= have && cache_bytes(&model, of, n + 1, 512) > have);
            assert!(check(&kv(Lane::Serving, of), n).is_ok());
            fits.push(n.to_string());
        }
        let refusal = |lane, of| check(&kv(lane, of), 1_000_000).unwrap_err().to_string();
        let told = refusal(Lane::Serving, KvType::F16);
        assert!(told.contains(&format!("{} tokens fit, {} with --kv q8_0", fits[0], fits[1])), "{told}");
        assert!(told.contains(&cache_bytes(&model, KvType::F16, 1_000_000, 512).to_string()), "{told}");
        assert!(refusal(Lane::Serving, KvType::Q8_0).contains(&format!("{} tokens fit:", fits[1])));
        assert!(!refusal(Lane::Strict, KvType::F16).contains("q8_0"));
    }
}
