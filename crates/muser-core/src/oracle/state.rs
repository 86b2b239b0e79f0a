//! Sequences of the reference: every cache keeps its last rows by position.

use crate::device::DeviceError;
use crate::geometry::{CacheSpec, KvType};
use half::f16;
use std::collections::BTreeMap;

/// Keys and values by position. A ring forgets what lies more than window + room behind its newest row.
pub struct Cache {
    rows: BTreeMap<u32, (Vec<f32>, Vec<f32>)>,
    reach: Option<u32>,
    kv: KvType,
    head_dim: usize,
    width: usize,
}

/// A block of q8_0 and back.
fn through_q8_0(block: &[f32]) -> Vec<f32> {
    let most = block.iter().fold(0f32, |most, x| most.max(x.abs()));
    let factor = f16::from_f32(most / 127.0).to_f32();
    let inverse = if factor > 0.0 { 1.0 / factor } else { 0.0 };
    block.iter().map(|x| (x * inverse).round_ties_even().clamp(-127.0, 127.0) * factor).collect()
}

impl Cache {
    /// Stores one row, rounded to the KV type.
    pub fn store(&mut self, pos: u32, k: &[f32], v: &[f32]) {
        let (kv, head_dim) = (self.kv, self.head_dim);
        let round = |x: &[f32]| match kv {
            KvType::F32 => x.to_vec(),
            KvType::Q8_0 => {
                x.chunks(head_dim).flat_map(|head| head.chunks(32)).flat_map(through_q8_0).collect()
            }
            KvType::F16 => x.iter().map(|v| f16::from_f32(*v).to_f32()).collect(),
        };
        self.rows.insert(pos, (round(k), round(v)));
        // A ring holds `reach` rows; a write replaces the row of the same place one turn earlier.
        if let Some(old) = self.reach.and_then(|reach| pos.checked_sub(reach)) {
            self.rows.remove(&old);
        }
    }

    /// The key row of a position that was stored and is still held; empty rows of zeros otherwise cannot occur: the
    /// device's contract gives consecutive positions.
    pub fn key(&self, pos: u32) -> &[f32] {
        &self.rows[&pos].0
    }

    /// The value row of a position.
    pub fn value(&self, pos: u32) -> &[f32] {
        &self.rows[&pos].1
    }
}

/// One sequence.
pub struct Sequence {
    /// Longest length.
    pub context: usize,
    /// One cache a layer, in the plan's order.
    pub caches: Vec<Cache>,
    windows: Vec<Option<u32>>,
}

impl Sequence {
    pub fn new(specs: &[CacheSpec], kv: KvType, room: usize, context: usize) -> Self {
        let cache = |s: &CacheSpec| Cache {
            rows: BTreeMap::new(),
            reach: s.window.map(|w| (w + room) as u32),
            kv,
            head_dim: s.head_dim,
            width: s.kv_heads * s.head_dim,
        };
        let windows = specs.iter().map(|s| s.window.map(|w| w as u32)).collect();
        Sequence { context, caches: specs.iter().map(cache).collect(), windows }
    }

    /// Positions of each cache that a row at `len` or later can see, as f32 bytes.
    pub fn save(&self, len: usize) -> Vec<u8> {
        let mut out = vec![];
        for (cache, window) in self.caches.iter().zip(&self.windows) {
            let first = window.map_or(0, |w| (len as u32).saturating_sub(w));
            let held = cache.rows.range(first..len as u32);
            out.extend((held.clone().count() as u32).to_le_bytes());
            for (pos, (k, v)) in held {
                out.extend(pos.to_le_bytes());
                k.iter().chain(v).for_each(|x| out.extend(x.to_le_bytes()));
            }
        }
        out
    }

    pub fn restore(&mut self, len: usize, state: &[u8]) -> Result<(), DeviceError> {
        let bad =
            || DeviceError::BadState("it is truncated or of another model; prefill the prompt again".into());
        let mut words = state.chunks_exact(4).map(|c| [c[0], c[1], c[2], c[3]]);
        let mut restored = vec![];
        for cache in &self.caches {
            let count = u32::from_le_bytes(words.next().ok_or_else(bad)?);
            let mut rows = BTreeMap::new();
            for _ in 0..count {
                let pos = u32::from_le_bytes(words.next().ok_or_else(bad)?);
                let mut row = || {
                    (0..cache.width).map(|_| words.next().map(f32::from_le_bytes)).collect::<Option<Vec<_>>>()
                };
                let (k, v) = (row().ok_or_else(bad)?, row().ok_or_else(bad)?);
                if pos as usize >= len {
                    return Err(bad());
                }
                rows.insert(pos, (k, v));
            }
            restored.push(rows);
        }
        if words.next().is_some() {
            return Err(bad());
        }
        self.caches.iter_mut().zip(restored).for_each(|(cache, rows)| cache.rows = rows);
        Ok(())
    }
}
