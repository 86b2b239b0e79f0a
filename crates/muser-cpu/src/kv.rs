//! Keys and values of a sequence: rings for local layers, planes for full ones, both growing piece by piece.

use crate::isa::Isa;
use crate::simd::{Kernel, Simd, dispatch};
use half::f16;
use muser_core::{CacheSpec, DeviceError, KvType};

/// Rows of a piece.
const PIECE: usize = 256;

/// One layer's keys and values. A head's row is padded to whole blocks of the storage type.
pub struct Cache {
    kv: KvType,
    kv_heads: usize,
    head_dim: usize,
    /// Rows of the ring; a plane has no end.
    ring: Option<usize>,
    window: Option<usize>,
    head_bytes: usize,
    /// Keys of 256 rows, then values of 256 rows.
    pieces: Vec<Vec<u8>>,
}

/// Elements of a head as stored.
pub fn padded(kv: KvType, head_dim: usize) -> usize {
    head_dim.next_multiple_of(if kv == KvType::Q8_0 { 32 } else { 16 })
}

impl Cache {
    fn new(spec: &CacheSpec, kv: KvType, room: usize) -> Self {
        let elements = padded(kv, spec.head_dim);
        Cache {
            kv,
            kv_heads: spec.kv_heads,
            head_dim: spec.head_dim,
            ring: spec.window.map(|w| w + room),
            window: spec.window,
            head_bytes: if kv == KvType::Q8_0 { elements / 32 * 34 } else { elements * 2 },
            pieces: vec![],
        }
    }

    fn row_bytes(&self) -> usize {
        self.kv_heads * self.head_bytes
    }

    fn slot(&self, pos: usize) -> usize {
        self.ring.map_or(pos, |ring| pos % ring)
    }

    /// Makes room for positions below `end`.
    fn grow(&mut self, end: usize) -> Result<(), DeviceError> {
        let rows = self.ring.map_or(end, |ring| end.min(ring));
        let bytes = 2 * PIECE * self.row_bytes();
        while self.pieces.len() * PIECE < rows {
            let mut piece = Vec::new();
            piece.try_reserve_exact(bytes).map_err(|_| DeviceError::Memory {
                what: format!("the KV cache of position {}", self.pieces.len() * PIECE),
                need: bytes as u64,
                have: crate::arena::available_memory().unwrap_or(0),
                mend: "close sequences, or use a shorter context or q8_0 KV".into(),
            })?;
            piece.resize(bytes, 0);
            self.pieces.push(piece);
        }
        Ok(())
    }

    /// Bytes of one head's key (`which` 0) or value (1) at a position that was stored.
    #[inline]
    pub fn head(&self, which: usize, pos: usize, head: usize) -> &[u8] {
        let slot = self.slot(pos);
        let at = (which * PIECE + slot % PIECE) * self.row_bytes() + head * self.head_bytes;
        &self.pieces[slot / PIECE][at..at + self.head_bytes]
    }

    /// Stores the key and value rows of a position.
    pub fn store(&mut self, isa: Isa, pos: usize, k: &[f32], v: &[f32]) {
        let (slot, bytes) = (self.slot(pos), self.row_bytes());
        let piece = &mut self.pieces[slot / PIECE];
        for (which, row) in [k, v].into_iter().enumerate() {
            let to = &mut piece[(which * PIECE + slot % PIECE) * bytes..][..bytes];
            for (head, to) in row.chunks_exact(self.head_dim).zip(to.chunks_exact_mut(self.head_bytes)) {
                dispatch(isa, Encode { kv: self.kv, from: head, to });
            }
        }
    }

    /// Positions that a row at `len` or later can see.
    fn kept(&self, len: usize) -> std::ops::Range<usize> {
        self.window.map_or(0, |w| len.saturating_sub(w))..len
    }

    fn row(&self, which: usize, pos: usize) -> &[u8] {
        let (slot, bytes) = (self.slot(pos), self.row_bytes());
        &self.pieces[slot / PIECE][(which * PIECE + slot % PIECE) * bytes..][..bytes]
    }
}

/// One sequence.
pub struct Sequence {
    /// Longest length.
    pub context: usize,
    /// One cache a layer, in the plan's order.
    pub caches: Vec<Cache>,
    /// Positions below this have room in every cache.
    grown: usize,
}

impl Sequence {
    /// An empty sequence; memory comes with the rows.
    pub fn new(specs: &[CacheSpec], kv: KvType, room: usize, context: usize) -> Self {
        Sequence { context, caches: specs.iter().map(|s| Cache::new(s, kv, room)).collect(), grown: 0 }
    }

    /// Makes room for positions below `end`.
    pub fn grow(&mut self, end: usize) -> Result<(), DeviceError> {
        if end > self.grown {
            self.caches.iter_mut().try_for_each(|c| c.grow(end))?;
            self.grown = end;
        }
        Ok(())
    }

    /// The first `len` positions as bytes: per cache, keys and values of what can still be seen, in rising order.
    pub fn save(&self, len: usize) -> Result<Vec<u8>, DeviceError> {
        if len > self.grown {
            return Err(DeviceError::BadState(format!(
                "{len} positions were asked for, {} are held",
                self.grown
            )));
        }
        let mut out = (len as u64).to_le_bytes().to_vec();
        for cache in &self.caches {
            for pos in cache.kept(len) {
                out.extend_from_slice(cache.row(0, pos));
                out.extend_from_slice(cache.row(1, pos));
            }
        }
        Ok(out)
    }

    /// Restores what [`Sequence::save`] gave.
    pub fn restore(&mut self, len: usize, state: &[u8]) -> Result<(), DeviceError> {
        let need: usize =
            8 + self.caches.iter().map(|c| c.kept(len).len() * 2 * c.row_bytes()).sum::<usize>();
        let (header, mut rest) = state.split_at_checked(8).unwrap_or_default();
        if len > self.context || state.len() != need || header != (len as u64).to_le_bytes() {
            return Err(DeviceError::BadState(format!(
                "{} bytes where {len} positions of this model have {need}; prefill the prompt again",
                state.len()
            )));
        }
        self.grow(len)?;
        for cache in &mut self.caches {
            let bytes = cache.row_bytes();
            for pos in cache.kept(len) {
                let slot = cache.slot(pos);
                for which in 0..2 {
                    let (row, after) = rest.split_at(bytes);
                    cache.pieces[slot / PIECE][(which * PIECE + slot % PIECE) * bytes..][..bytes]
                        .copy_from_slice(row);
                    rest = after;
                }
            }
        }
        Ok(())
    }
}

/// A head's floats into storage.
struct Encode<'a> {
    kv: KvType,
    from: &'a [f32],
    to: &'a mut [u8],
}

impl Kernel for Encode<'_> {
    type Out = ();
    #[inline(always)]
    fn eval<S: Simd>(self, s: S) {
        if self.kv == KvType::Q8_0 {
            for (from, to) in self.from.chunks(32).zip(self.to.chunks_exact_mut(34)) {
                let most = from.iter().fold(0f32, |m, x| if x.abs() > m { x.abs() } else { m });
                let d = f16::from_f32(most / 127.0);
                let inverse = if d.to_f32() > 0.0 { 1.0 / d.to_f32() } else { 0.0 };
                to[..2].copy_from_slice(&d.to_le_bytes());
                for (to, x) in to[2..].iter_mut().zip(from) {
                    *to = (x * inverse).round_ties_even().clamp(-127.0, 127.0) as i8 as u8;
                }
            }
            return;
        }
        for (from, to) in self.from.chunks(16).zip(self.to.as_chunks_mut::<32>().0) {
            let mut x = [0.0; 16];
            x[..from.len()].copy_from_slice(from);
            s.to_half(to, s.load_f(&x));
        }
    }
}

/// A stored head as floats; `to` is as long as the padded head.
#[inline(always)]
pub fn decode<S: Simd>(s: S, kv: KvType, from: &[u8], to: &mut [f32]) {
    if kv == KvType::Q8_0 {
        for (from, to) in from.chunks_exact(34).zip(to.as_chunks_mut::<32>().0) {
            let d = f16::from_le_bytes([from[0], from[1]]).to_f32();
            to.iter_mut().zip(&from[2..]).for_each(|(to, q)| *to = d * f32::from(*q as i8));
        }
        return;
    }
    for (from, to) in from.as_chunks::<32>().0.iter().zip(to.as_chunks_mut::<16>().0) {
        s.store_f(to, s.half(from));
    }
}
