//! Attention of one row in plain loops.

use super::state::Cache;
use crate::device::Row;
use crate::geometry::CacheSpec;
use crate::plan::Mask;
use crate::strict;
use std::ops::Range;

/// Positions that `row` sees: the one definition of both masks.
pub fn visible(mask: Mask, window: Option<usize>, row: &Row, rows: &[Row]) -> Range<u32> {
    let first = window.map_or(0, |w| (row.pos + 1).saturating_sub(w as u32));
    let last = match mask {
        Mask::Causal => row.pos,
        // A block's rows see one another; the last row of the sequence in this batch ends the block.
        Mask::Block => rows.iter().filter(|r| r.seq == row.seq).map(|r| r.pos).max().unwrap_or(row.pos),
    };
    first..last + 1
}

/// Softmax attention of all heads of one query row over the visible keys, in logical order.
pub fn attend(q: &[f32], cache: &Cache, spec: &CacheSpec, visible: Range<u32>, scale: f32) -> Vec<f32> {
    let (hd, heads) = (spec.head_dim, q.len() / spec.head_dim);
    let group = heads / spec.kv_heads;
    let keys: Vec<&[f32]> = visible.clone().map(|pos| cache.key(pos)).collect();
    let values: Vec<&[f32]> = visible.map(|pos| cache.value(pos)).collect();
    let mut out = Vec::with_capacity(q.len());
    for (h, q) in q.chunks_exact(hd).enumerate() {
        let at = (h / group) * hd;
        let scores: Vec<f32> = keys.iter().map(|k| strict::dot(q, &k[at..at + hd]) * scale).collect();
        let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weights: Vec<f32> = scores.iter().map(|s| strict::exp(s - max)).collect();
        let total = strict::sum(weights.iter().copied());
        for d in 0..hd {
            let column: Vec<f32> = values.iter().map(|v| v[at + d]).collect();
            out.push(strict::dot(&weights, &column) / total);
        }
    }
    out
}
