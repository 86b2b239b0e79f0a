//! A plan compiled for this device: neighbouring steps that one kernel serves become one stage.

use crate::activations::{Scales, tiles};
use crate::forms::FormKind;
use crate::isa::Isa;
use crate::kernels::matmul::scales;
use muser_core::{Buf, Lane, Mask, Model, Op, Pass, Plan, RopePairs, Route, Slot};
use muser_format::DType;
use std::ops::Range;

/// Steps of the plan that run together.
#[derive(Clone, Debug)]
pub struct Stage {
    /// Which steps.
    pub steps: Range<usize>,
    /// What to do.
    pub work: Work,
}

/// What a stage does; as [`Op`], with fused neighbours.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub enum Work {
    Embed {
        table: Slot,
        norm_eps: Option<f32>,
    },
    Norm {
        from: Buf,
        weight: Slot,
        eps: f32,
        to: Buf,
    },
    Project {
        from: Buf,
        outs: Vec<(Slot, Buf)>,
    },
    QkNormRope {
        q_norm: Option<Slot>,
        k_norm: Slot,
        eps: f32,
        rope: Option<RopePairs>,
    },
    Store {
        cache: usize,
    },
    /// Attention, then the gate where there is one.
    Attend {
        cache: usize,
        mask: Mask,
        gate: bool,
    },
    Gate,
    Tail {
        post: Option<(Slot, f32)>,
        next: (Slot, f32),
    },
    Capture {
        index: usize,
    },
    GateUp {
        gate: Slot,
        up: Slot,
    },
    /// The head, then scale and cap where they follow.
    Head {
        weight: Slot,
        cap: Option<(f32, Option<f32>)>,
    },
    ScaleCap {
        scale: f32,
        cap: Option<f32>,
    },
}

/// Compiles a plan.
pub fn compile(plan: &Plan) -> Vec<Stage> {
    let mut stages = vec![];
    let mut at = 0;
    while at < plan.steps.len() {
        let next = plan.steps.get(at + 1).map(|s| &s.op);
        let (work, taken) = match (plan.steps[at].op.clone(), next) {
            (Op::Attend { cache, mask }, Some(Op::Gate)) => (Work::Attend { cache, mask, gate: true }, 2),
            (Op::Attend { cache, mask }, _) => (Work::Attend { cache, mask, gate: false }, 1),
            (Op::Head { weight }, Some(Op::ScaleCap { scale, cap })) => {
                (Work::Head { weight, cap: Some((*scale, *cap)) }, 2)
            }
            (Op::Head { weight }, _) => (Work::Head { weight, cap: None }, 1),
            (Op::Embed { table, norm_eps }, _) => (Work::Embed { table, norm_eps }, 1),
            (Op::Norm { from, weight, eps, to }, _) => (Work::Norm { from, weight, eps, to }, 1),
            (Op::Project { from, outs }, _) => (Work::Project { from, outs }, 1),
            (Op::QkNormRope { q_norm, k_norm, eps, rope }, _) => {
                (Work::QkNormRope { q_norm, k_norm, eps, rope }, 1)
            }
            (Op::Store { cache }, _) => (Work::Store { cache }, 1),
            (Op::Gate, _) => (Work::Gate, 1),
            (Op::Tail { post, next }, _) => (Work::Tail { post, next }, 1),
            (Op::Capture { index }, _) => (Work::Capture { index }, 1),
            (Op::GateUp { gate, up }, _) => (Work::GateUp { gate, up }, 1),
            (Op::ScaleCap { scale, cap }, _) => (Work::ScaleCap { scale, cap }, 1),
        };
        stages.push(Stage { steps: at..at + taken, work });
        at += taken;
    }
    stages
}

/// The registry, as `muser kernels` prints it: which kernel serves each stage, and which others could have.
pub fn routes(model: &Model, pass: Pass, stages: &[Stage], rows: usize, lane: Lane, isa: Isa) -> Vec<Route> {
    let library = if lane == Lane::Strict { "muser-cpu X" } else { "muser-cpu S" };
    stages
        .iter()
        .map(|stage| {
            let (what, file, slots): (&str, &'static str, Vec<Slot>) = match &stage.work {
                Work::Embed { .. } => ("embed", "src/device/run.rs", vec![]),
                Work::Norm { .. } => ("norm", "src/kernels/rows.rs", vec![]),
                Work::Project { outs, .. } => ("", "", outs.iter().map(|(s, _)| *s).collect()),
                Work::QkNormRope { .. } => ("qk-norm-rope", "src/kernels/rows.rs", vec![]),
                Work::Store { .. } => ("kv-store", "src/kv.rs", vec![]),
                Work::Attend { .. } if lane == Lane::Strict => {
                    ("attend-strict", "src/strict/attend.rs", vec![])
                }
                Work::Attend { gate: true, .. } => ("attend-flash-gate", "src/kernels/attend.rs", vec![]),
                Work::Attend { .. } => ("attend-flash", "src/kernels/attend.rs", vec![]),
                Work::Gate => ("gate", "src/math.rs", vec![]),
                Work::Tail { .. } => ("tail", "src/kernels/rows.rs", vec![]),
                Work::Capture { .. } => ("capture", "src/device/run.rs", vec![]),
                Work::GateUp { gate, up } => ("", "", vec![*gate, *up]),
                Work::Head { weight, .. } => ("", "", vec![*weight]),
                Work::ScaleCap { .. } => ("scale-cap", "src/math.rs", vec![]),
            };
            if slots.is_empty() {
                let kernel = format!("{what}-{isa}");
                let ladder = vec![(kernel.clone(), "the only one for this lane".into(), true)];
                return Route { steps: stage.steps.clone(), kernel, library, file, ladder };
            }
            let fused = matches!(stage.work, Work::GateUp { .. });
            multiply_route(model, stage, &slots, rows_of(pass, stage, rows), lane, isa, library, fused)
        })
        .collect()
}

/// The head runs on the rows that ask: one, in decode and prefill alike; all of a drafter's block.
fn rows_of(pass: Pass, stage: &Stage, rows: usize) -> usize {
    match stage.work {
        Work::Head { .. } if pass == Pass::Target && rows > 16 => 1,
        _ => rows,
    }
}

#[allow(clippy::too_many_arguments)]
fn multiply_route(
    model: &Model,
    stage: &Stage,
    slots: &[Slot],
    rows: usize,
    lane: Lane,
    isa: Isa,
    library: &'static str,
    fused: bool,
) -> Route {
    let mut dtypes: Vec<DType> = vec![];
    for slot in slots {
        if let Some((dtype, _, _)) = model.slots.get(slot).filter(|(dtype, _, _)| !dtypes.contains(dtype)) {
            dtypes.push(*dtype);
        }
    }
    let names = dtypes.iter().map(|t| t.name().to_ascii_lowercase()).collect::<Vec<_>>().join("+");
    let suffix = if fused { "-silu" } else { "" };
    let strict = lane == Lane::Strict;
    let kind = match rows {
        1 => "matvec",
        2..=16 => "rows",
        _ => "gemm",
    };
    let mut ladder = vec![(format!("dot32{suffix}-{names}-{isa}"), "the strict lane".to_string(), strict)];
    for (name, condition, holds) in [
        ("matvec", "one row".to_string(), rows == 1),
        ("rows", format!("2 to 16 rows: tiles of {}", tile_widths(rows, isa)), (2..=16).contains(&rows)),
        ("gemm", format!("more rows: tiles of {}", tile_widths(rows, isa)), rows > 16),
    ] {
        for other in Isa::ALL.into_iter().rev() {
            let why = if other == isa {
                condition.clone()
            } else if other.available() {
                format!("{condition}; {other} was not chosen")
            } else {
                format!("{condition}; this processor has no {other}")
            };
            ladder.push((format!("{name}{suffix}-{names}-{other}"), why, holds && !strict && other == isa));
        }
    }
    let kernel = if strict { ladder[0].0.clone() } else { format!("{kind}{suffix}-{names}-{isa}") };
    let file = match (strict, dtypes.first()) {
        (true, _) | (_, None) => "src/strict/project.rs",
        (_, Some(dtype)) => form_file(FormKind::of(*dtype)),
    };
    Route { steps: stage.steps.clone(), kernel, library, file, ladder }
}

fn tile_widths(rows: usize, isa: Isa) -> String {
    let mut widths: Vec<usize> = tiles(rows, isa).iter().map(|t| t.width).collect();
    widths.dedup();
    widths.iter().map(usize::to_string).collect::<Vec<_>>().join(" and ")
}

fn form_file(form: FormKind) -> &'static str {
    match form {
        FormKind::K4 => "src/forms/k4.rs",
        FormKind::K5 => "src/forms/k5.rs",
        FormKind::K6 => "src/forms/k6.rs",
        FormKind::K3 => "src/forms/k3.rs",
        FormKind::K2 => "src/forms/k2.rs",
        FormKind::Lut4 => "src/forms/lut4.rs",
        FormKind::Q4 => "src/forms/q4.rs",
        FormKind::Q8 | FormKind::Q8M => "src/forms/q8.rs",
        FormKind::Mx4 | FormKind::Nv4 => "src/forms/nv4.rs",
        FormKind::F32 | FormKind::F16 | FormKind::Bf16 => "src/forms/floats.rs",
    }
}

/// Ways to prepare so many columns of activations that the weights of a stage want.
pub fn wanted(isa: Isa, columns: usize, forms: impl Iterator<Item = FormKind>) -> Vec<Scales> {
    let tiles = tiles(columns, isa).len();
    let mut wanted = vec![];
    for scales in forms.map(|form| scales(isa, form, tiles)) {
        if !wanted.contains(&scales) {
            wanted.push(scales);
        }
    }
    wanted
}
