//! The target's table: one row a step, no control flow but the layer loop.

use super::{Buf, Kind, Mask, Net, Op, Pass, Plan, Slot, Step};
use crate::geometry::{CacheSpec, Geometry, LayerKind};

/// One cache a layer.
pub(super) fn caches(g: &Geometry) -> Vec<CacheSpec> {
    let window = |kind: &LayerKind| (*kind == LayerKind::Local).then_some(g.window);
    g.layers
        .iter()
        .map(|kind| CacheSpec { kv_heads: g.kv_heads, head_dim: g.head_dim, window: window(kind) })
        .collect()
}

/// Tokens to logits; `captures` are the layers whose outputs the drafter wants.
pub(super) fn plan(g: &Geometry, captures: &[usize]) -> Plan {
    use Kind::*;
    let (eps, post) = (g.norm_eps, g.post_norm_eps);
    let outside = |kind| Slot { net: Net::Target, layer: 0, kind };
    let mut steps = vec![];
    let mut row = |layer: Option<usize>, stage: &'static str, name: &str, op: Op| {
        steps.push(Step { name: name.to_string(), stage, layer, op });
    };

    row(None, "embed", "embed+norm", Op::Embed { table: outside(TokenEmbd), norm_eps: Some(eps) });
    for (i, kind) in g.layers.iter().enumerate() {
        let w = |kind| Slot { net: Net::Target, layer: i as u16, kind };
        let rope = (*kind == LayerKind::Local).then_some(g.rope_pairs);
        let (next, at) = if i + 1 < g.layers.len() {
            (Slot { layer: i as u16 + 1, ..w(AttnNorm) }, Some(i))
        } else {
            (outside(OutputNorm), Some(i))
        };
        let qkvg = vec![(w(AttnQ), Buf::Q), (w(AttnK), Buf::K), (w(AttnV), Buf::V), (w(AttnGate), Buf::G)];
        if i == 0 {
            row(
                at,
                "attention",
                "attn.norm",
                Op::Norm { from: Buf::X, weight: w(AttnNorm), eps, to: Buf::H },
            );
        }
        row(at, "attention", "attn.q+k+v+gate", Op::Project { from: Buf::H, outs: qkvg });
        row(
            at,
            "attention",
            "attn.qk-norm+rope",
            Op::QkNormRope { q_norm: Some(w(AttnQNorm)), k_norm: w(AttnKNorm), eps, rope },
        );
        row(at, "attention", "attn.kv-store", Op::Store { cache: i });
        row(at, "attention", "attn.attend", Op::Attend { cache: i, mask: Mask::Causal });
        row(at, "attention", "attn.gate", Op::Gate);
        row(
            at,
            "attention",
            "attn.output",
            Op::Project { from: Buf::A, outs: vec![(w(AttnOutput), Buf::P)] },
        );
        row(
            at,
            "attention",
            "attn.tail",
            Op::Tail { post: Some((w(PostAttnNorm), post)), next: (w(FfnNorm), eps) },
        );
        row(at, "ffn", "ffn.gate+up+silu", Op::GateUp { gate: w(FfnGate), up: w(FfnUp) });
        row(at, "ffn", "ffn.down", Op::Project { from: Buf::F, outs: vec![(w(FfnDown), Buf::P)] });
        row(at, "ffn", "ffn.tail", Op::Tail { post: Some((w(PostFfnNorm), post)), next: (next, eps) });
        if let Some(index) = captures.iter().position(|layer| *layer == i) {
            row(at, "draft", "draft.capture", Op::Capture { index });
        }
    }
    row(None, "head", "lm-head", Op::Head { weight: outside(Output) });
    row(None, "head", "scale+softcap", Op::ScaleCap { scale: g.logit_scale, cap: g.softcap });
    Plan::new(Pass::Target, g, steps)
}
