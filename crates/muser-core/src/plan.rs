//! The forward pass as data: a [`Plan`] is an ordered list of [`Step`]s that every device runs.

mod draft;
mod part;
mod target;

use crate::geometry::{CacheSpec, DraftSpec, Geometry, RopePairs};
use crate::rotary::Rotary;
use std::fmt;

/// Which network a weight or a plan belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Net {
    /// The model that the user named.
    Target,
    /// The DFlash drafter.
    Draft,
}

/// What a weight is for. Names follow the GGUF tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Kind {
    TokenEmbd,
    OutputNorm,
    Output,
    AttnNorm,
    AttnQ,
    AttnK,
    AttnV,
    AttnGate,
    AttnOutput,
    AttnQNorm,
    AttnKNorm,
    PostAttnNorm,
    FfnNorm,
    FfnGate,
    FfnUp,
    FfnDown,
    PostFfnNorm,
    /// Drafter: the projection of the concatenated context features.
    Fc,
    /// Drafter: the norm after `Fc`.
    FcNorm,
}

/// The name of one weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slot {
    /// Network.
    pub net: Net,
    /// Layer; 0 for weights that stand outside the layers.
    pub layer: u16,
    /// Role.
    pub kind: Kind,
}

/// A buffer of activations, `rows x width`, f32 in the plan's terms (a device may store it otherwise).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Buf {
    /// Residual stream, `hidden`.
    X,
    /// Normed row that feeds projections, `hidden`.
    H,
    /// Queries, `heads * head_dim`.
    Q,
    /// Keys, `kv_heads * head_dim`.
    K,
    /// Values, `kv_heads * head_dim`.
    V,
    /// Attention gate before the sigmoid, `heads * head_dim`.
    G,
    /// Attention output, `heads * head_dim`.
    A,
    /// Block output before its norm and the residual, `hidden`.
    P,
    /// SwiGLU activations, `ff`.
    F,
    /// Captured target layers, concatenated: `target_layers.len() * hidden`. Rows are those of [`crate::Row::feature`].
    Features,
    /// Logits of the rows that ask for them, in batch order, `vocab`.
    Logits,
}

/// Which keys a row sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mask {
    /// Row at position p sees j <= p, and j > p - window where there is one.
    Causal,
    /// A drafter's block: row at p sees j > p - window up to the last row of its sequence in this batch, later rows included.
    Block,
}

/// One operation, with all that a device must know of it; each variant says what its fields do.
#[allow(missing_docs)]
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// token -> X: the table's row, then (target) RMS norm without weight.
    Embed { table: Slot, norm_eps: Option<f32> },
    /// `to` = rms(`from`) * weight.
    Norm { from: Buf, weight: Slot, eps: f32, to: Buf },
    /// Each weight times the same input row: one read of the input.
    Project { from: Buf, outs: Vec<(Slot, Buf)> },
    /// Per-head RMS norm times a weight row on Q (when it is there) and K in place, then rotation where the layer has positions.
    QkNormRope { q_norm: Option<Slot>, k_norm: Slot, eps: f32, rope: Option<RopePairs> },
    /// K, V -> cache `cache` at each row's position. Always before the step that attends, for all rows of the batch.
    Store { cache: usize },
    /// Q and cache -> A.
    Attend { cache: usize, mask: Mask },
    /// A = A * sigmoid(G).
    Gate,
    /// X = X + rms(P) * post (or X + P without a post-norm); H = rms(X) * next.
    Tail { post: Option<(Slot, f32)>, next: (Slot, f32) },
    /// X -> columns `index * hidden ..` of Features, each row at its [`crate::Row::feature`].
    Capture { index: usize },
    /// F = silu(gate x H) * (up x H).
    GateUp { gate: Slot, up: Slot },
    /// weight x H -> Logits, for rows that ask.
    Head { weight: Slot },
    /// Logits = cap * tanh(Logits * scale / cap), or Logits * scale.
    ScaleCap { scale: f32, cap: Option<f32> },
}

/// A row of the plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// Short name, as printed: `attn.q+k+v+gate`.
    pub name: String,
    /// Stage for sums: embed, attention, ffn, head, draft.
    pub stage: &'static str,
    /// Layer, where the step stands in one.
    pub layer: Option<usize>,
    /// What to do.
    pub op: Op,
}

/// The three passes that a device runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pass {
    /// Tokens through the target: prefill, decode, a group, or verification of drafted rows.
    Target,
    /// Captured features into the drafter's KV (`Row::feature` picks the row).
    Inject,
    /// A drafter's block: anchor and masks to draft logits.
    Draft,
}

/// An ordered list of steps with the network's shape beside it.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Which pass this is.
    pub pass: Pass,
    /// Shape of the network whose steps these are.
    pub geometry: Geometry,
    /// Angles by which its heads turn.
    pub rotary: Rotary,
    /// Steps in execution order.
    pub steps: Vec<Step>,
}

impl Plan {
    fn new(pass: Pass, geometry: &Geometry, steps: Vec<Step>) -> Self {
        let rotary = Rotary::new(geometry.head_dim, geometry.rope_theta);
        Plan { pass, geometry: geometry.clone(), rotary, steps }
    }
}

/// The plans of a model, and the caches that they share.
#[derive(Clone, Debug, PartialEq)]
pub struct Plans {
    /// Tokens through the target.
    pub target: Plan,
    /// Present with a drafter.
    pub draft: Option<DraftPlans>,
    /// Caches by index; the target's layers first, then the drafter's.
    pub caches: Vec<CacheSpec>,
}

/// The drafter's two plans.
#[derive(Clone, Debug, PartialEq)]
pub struct DraftPlans {
    /// Features to drafter KV.
    pub inject: Plan,
    /// Block to draft logits.
    pub block: Plan,
    /// Block size, mask token, target layers.
    pub spec: DraftSpec,
}

impl Plans {
    /// Builds all plans. `draft` holds the drafter's shape and what joins it to the target.
    pub fn new(target: &Geometry, draft: Option<(&Geometry, &DraftSpec)>) -> Self {
        let captures = draft.map_or(&[][..], |(_, spec)| &spec.target_layers);
        let mut caches = target::caches(target);
        let first = caches.len();
        if let Some((geometry, _)) = draft {
            caches.extend(draft::caches(geometry));
        }
        Plans {
            target: target::plan(target, captures),
            draft: draft.map(|(geometry, spec)| DraftPlans {
                inject: draft::inject(geometry, first),
                block: draft::block(geometry, first),
                spec: spec.clone(),
            }),
            caches,
        }
    }

    /// The plan of a pass; `None` for a drafter's pass without a drafter.
    pub fn get(&self, pass: Pass) -> Option<&Plan> {
        match pass {
            Pass::Target => Some(&self.target),
            Pass::Inject => self.draft.as_ref().map(|d| &d.inject),
            Pass::Draft => self.draft.as_ref().map(|d| &d.block),
        }
    }

    /// Elements of one row of a buffer in a pass.
    pub fn width(&self, pass: Pass, buf: Buf) -> usize {
        let g = self.get(pass).map_or(&self.target.geometry, |p| &p.geometry);
        match buf {
            Buf::X | Buf::H | Buf::P => g.hidden,
            Buf::Q | Buf::G | Buf::A => g.q_width(),
            Buf::K | Buf::V => g.kv_width(),
            Buf::F => g.ff,
            Buf::Features => {
                self.target.geometry.hidden * self.draft.as_ref().map_or(0, |d| d.spec.target_layers.len())
            }
            Buf::Logits => g.vocab,
        }
    }
}

impl Op {
    /// Buffers that the operation reads.
    pub fn reads(&self) -> Vec<Buf> {
        match self {
            Op::Embed { .. } => vec![],
            Op::Norm { from, .. } | Op::Project { from, .. } => vec![*from],
            Op::QkNormRope { q_norm, .. } => {
                if q_norm.is_some() {
                    vec![Buf::Q, Buf::K]
                } else {
                    vec![Buf::K]
                }
            }
            Op::Store { .. } => vec![Buf::K, Buf::V],
            Op::Attend { .. } => vec![Buf::Q],
            Op::Gate => vec![Buf::A, Buf::G],
            Op::Tail { .. } => vec![Buf::P, Buf::X],
            Op::Capture { .. } => vec![Buf::X],
            Op::GateUp { .. } | Op::Head { .. } => vec![Buf::H],
            Op::ScaleCap { .. } => vec![Buf::Logits],
        }
    }

    /// Buffers that the operation writes.
    pub fn writes(&self) -> Vec<Buf> {
        match self {
            Op::Embed { .. } => vec![Buf::X],
            Op::Norm { to, .. } => vec![*to],
            Op::Project { outs, .. } => outs.iter().map(|(_, b)| *b).collect(),
            Op::QkNormRope { .. } => self.reads(),
            Op::Store { .. } => vec![],
            Op::Attend { .. } | Op::Gate => vec![Buf::A],
            Op::Tail { .. } => vec![Buf::X, Buf::H],
            Op::Capture { .. } => vec![Buf::Features],
            Op::GateUp { .. } => vec![Buf::F],
            Op::Head { .. } | Op::ScaleCap { .. } => vec![Buf::Logits],
        }
    }

    /// Weight matrices that the operation multiplies.
    pub fn matrices(&self) -> Vec<Slot> {
        match self {
            Op::Project { outs, .. } => outs.iter().map(|(s, _)| *s).collect(),
            Op::GateUp { gate, up } => vec![*gate, *up],
            Op::Head { weight } => vec![*weight],
            _ => vec![],
        }
    }

    /// Weight rows that norms use.
    pub fn vectors(&self) -> Vec<Slot> {
        match self {
            Op::Norm { weight, .. } => vec![*weight],
            Op::QkNormRope { q_norm, k_norm, .. } => q_norm.iter().chain([k_norm]).copied().collect(),
            Op::Tail { post, next } => post.iter().map(|(s, _)| *s).chain([next.0]).collect(),
            _ => vec![],
        }
    }
}

impl fmt::Display for Slot {
    /// The GGUF tensor's name.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, layered) = match self.kind {
            Kind::TokenEmbd => ("token_embd", false),
            Kind::OutputNorm => ("output_norm", false),
            Kind::Output => ("output", false),
            Kind::Fc => ("fc", false),
            Kind::FcNorm => ("enc.output_norm", false),
            Kind::AttnNorm => ("attn_norm", true),
            Kind::AttnQ => ("attn_q", true),
            Kind::AttnK => ("attn_k", true),
            Kind::AttnV => ("attn_v", true),
            Kind::AttnGate => ("attn_gate", true),
            Kind::AttnOutput => ("attn_output", true),
            Kind::AttnQNorm => ("attn_q_norm", true),
            Kind::AttnKNorm => ("attn_k_norm", true),
            Kind::PostAttnNorm => ("post_attention_norm", true),
            Kind::FfnNorm => ("ffn_norm", true),
            Kind::FfnGate => ("ffn_gate", true),
            Kind::FfnUp => ("ffn_up", true),
            Kind::FfnDown => ("ffn_down", true),
            Kind::PostFfnNorm => ("post_ffw_norm", true),
        };
        if layered { write!(f, "blk.{}.{name}.weight", self.layer) } else { write!(f, "{name}.weight") }
    }
}
