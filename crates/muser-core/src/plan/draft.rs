//! The drafter's two tables (DFlash, arXiv 2602.06036): features to KV, and a block to draft logits.

use super::{Buf, Kind, Mask, Net, Op, Pass, Plan, Slot, Step};
use crate::geometry::{CacheSpec, Geometry, LayerKind};

/// One cache a layer, after the target's.
pub(super) fn caches(g: &Geometry) -> Vec<CacheSpec> {
    let window = |kind: &LayerKind| (*kind == LayerKind::Local).then_some(g.window);
    g.layers
        .iter()
        .map(|kind| CacheSpec { kv_heads: g.kv_heads, head_dim: g.head_dim, window: window(kind) })
        .collect()
}

fn draft(layer: usize, kind: Kind) -> Slot {
    Slot { net: Net::Draft, layer: layer as u16, kind }
}

/// Features -> fc -> norm -> every layer's keys and values.
pub(super) fn inject(g: &Geometry, first_cache: usize) -> Plan {
    use Kind::*;
    let eps = g.norm_eps;
    let mut steps = vec![];
    let mut row = |layer: Option<usize>, name: &str, op: Op| {
        steps.push(Step { name: name.to_string(), stage: "draft", layer, op });
    };
    row(None, "draft.fc", Op::Project { from: Buf::Features, outs: vec![(draft(0, Fc), Buf::P)] });
    row(None, "draft.fc-norm", Op::Norm { from: Buf::P, weight: draft(0, FcNorm), eps, to: Buf::H });
    for i in 0..g.layers.len() {
        let kv = vec![(draft(i, AttnK), Buf::K), (draft(i, AttnV), Buf::V)];
        row(Some(i), "draft.context-k+v", Op::Project { from: Buf::H, outs: kv });
        let rope = Some(g.rope_pairs);
        row(
            Some(i),
            "draft.k-norm+rope",
            Op::QkNormRope { q_norm: None, k_norm: draft(i, AttnKNorm), eps, rope },
        );
        row(Some(i), "draft.kv-store", Op::Store { cache: first_cache + i });
    }
    Plan::new(Pass::Inject, g, steps)
}

/// [anchor, mask, ...] -> draft logits, with the target's embedding (no norm) and head (no scale, no cap).
pub(super) fn block(g: &Geometry, first_cache: usize) -> Plan {
    use Kind::*;
    let eps = g.norm_eps;
    let target = |kind| Slot { net: Net::Target, layer: 0, kind };
    let mut steps = vec![];
    let mut row = |layer: Option<usize>, name: &str, op: Op| {
        steps.push(Step { name: name.to_string(), stage: "draft", layer, op });
    };
    row(None, "draft.embed", Op::Embed { table: target(TokenEmbd), norm_eps: None });
    row(None, "draft.attn.norm", Op::Norm { from: Buf::X, weight: draft(0, AttnNorm), eps, to: Buf::H });
    for i in 0..g.layers.len() {
        let w = |kind| draft(i, kind);
        let last = i + 1 == g.layers.len();
        let next = if last { draft(0, OutputNorm) } else { draft(i + 1, AttnNorm) };
        let qkv = vec![(w(AttnQ), Buf::Q), (w(AttnK), Buf::K), (w(AttnV), Buf::V)];
        let rope = Some(g.rope_pairs);
        row(Some(i), "draft.attn.q+k+v", Op::Project { from: Buf::H, outs: qkv });
        row(
            Some(i),
            "draft.qk-norm+rope",
            Op::QkNormRope { q_norm: Some(w(AttnQNorm)), k_norm: w(AttnKNorm), eps, rope },
        );
        row(Some(i), "draft.kv-store", Op::Store { cache: first_cache + i });
        row(Some(i), "draft.attend", Op::Attend { cache: first_cache + i, mask: Mask::Block });
        row(Some(i), "draft.attn.output", Op::Project { from: Buf::A, outs: vec![(w(AttnOutput), Buf::P)] });
        row(Some(i), "draft.attn.tail", Op::Tail { post: None, next: (w(FfnNorm), eps) });
        row(Some(i), "draft.ffn.gate+up+silu", Op::GateUp { gate: w(FfnGate), up: w(FfnUp) });
        row(Some(i), "draft.ffn.down", Op::Project { from: Buf::F, outs: vec![(w(FfnDown), Buf::P)] });
        row(Some(i), "draft.ffn.tail", Op::Tail { post: None, next: (next, eps) });
    }
    row(None, "draft.lm-head", Op::Head { weight: target(Output) });
    Plan::new(Pass::Draft, g, steps)
}
