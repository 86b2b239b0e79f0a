//! The plans of two devices that run one model together.

use super::{DraftPlans, Op, Plan, Plans, Step};

impl Plans {
    /// Cuts the plans before the last tail of layer `layer - 1`, where of a row its residual X and the block's output P are all that
    /// lives. The first part has the embedding and `layer` layers; the second their last tail, the other layers, the head and the
    /// drafter. None where one of them would have no layer.
    pub fn split(&self, layer: usize) -> Option<[Plans; 2]> {
        let steps = &self.target.steps;
        let tail = |s: &Step| matches!(s.op, Op::Tail { .. }) && s.layer.is_some_and(|l| l + 1 == layer);
        let border = steps.iter().rposition(tail).filter(|at| *at > 0)?;
        let stores = |steps: &[Step]| steps.iter().filter(|s| matches!(s.op, Op::Store { .. })).count();
        let (before, after) = steps.split_at(border);
        let (first, rest) = self.caches.split_at(stores(before));
        if stores(after) == 0 {
            return None;
        }
        let plan = |plan: &Plan, steps| Plan { steps, ..plan.clone() };
        let later = |steps: &[Step]| -> Vec<Step> { steps.iter().map(|s| moved(s, first.len())).collect() };
        // The width of features is the drafter's matter; the first part runs no step of it.
        let draft = |inject, block| {
            let of = |d: &DraftPlans| (plan(&d.inject, inject), plan(&d.block, block), d.spec.clone());
            self.draft.as_ref().map(of).map(|(inject, block, spec)| DraftPlans { inject, block, spec })
        };
        let drafter = self.draft.as_ref();
        let of_drafter = |of: fn(&DraftPlans) -> &Plan| drafter.map_or(vec![], |d| later(&of(d).steps));
        Some([
            Plans {
                target: plan(&self.target, before.to_vec()),
                draft: draft(vec![], vec![]),
                caches: first.to_vec(),
            },
            Plans {
                target: plan(&self.target, later(after)),
                draft: draft(of_drafter(|d| &d.inject), of_drafter(|d| &d.block)),
                caches: rest.to_vec(),
            },
        ])
    }
}

/// A step whose cache is counted from `first` on.
fn moved(step: &Step, first: usize) -> Step {
    let mut step = step.clone();
    if let Op::Store { cache } | Op::Attend { cache, .. } = &mut step.op {
        *cache -= first;
    }
    step
}
