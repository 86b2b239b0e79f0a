//! How many layers a card has room for, where it hasn't for all.

use crate::buffers::Buffers;
use crate::device::{CudaOptions, FEW_ROWS};
use crate::kv::{Kv, SPARED};
use crate::weights;
use muser_core::{DeviceError, Model};

/// Bytes on a card: weights, and what comes beside them with `sequences` of `context` positions.
#[derive(Clone, Copy)]
pub(crate) struct Need {
    pub weights: u64,
    pub caches: u64,
    /// While weights are loaded, and afterwards.
    staged: u64,
    buffers: u64,
}

impl Need {
    pub fn of(
        model: &Model,
        options: &CudaOptions,
        sequences: usize,
        context: usize,
    ) -> Result<Self, DeviceError> {
        let (weights, staged) = weights::bytes(model, options.lane);
        let rows = options.max_rows.unwrap_or(FEW_ROWS);
        let kv = Kv::new(None, &model.plans.caches, (options.lane, options.kv), rows)?;
        Ok(Need {
            weights,
            caches: sequences as u64 * kv.bytes(options.kv, context),
            staged,
            buffers: Buffers::bytes(model, options.lane, rows),
        })
    }

    /// What loading takes at most, before there are sequences.
    pub fn while_loading(&self) -> u64 {
        self.weights + self.staged.max(self.buffers)
    }

    /// Everything.
    pub fn in_all(&self) -> u64 {
        self.while_loading().max(self.weights + self.buffers + self.caches + SPARED)
    }
}

/// The most of a model's last layers for which `fits` holds; none where that is not even one.
pub(crate) fn layers(
    model: &Model,
    options: &CudaOptions,
    (sequences, context): (usize, usize),
    fits: impl Fn(Need) -> bool,
) -> Result<Option<usize>, DeviceError> {
    let all = model.geometry().layers.len();
    for first in 1..all {
        let Some([_, last]) = model.split(first) else { continue };
        if fits(Need::of(&last, options, sequences, context)?) {
            return Ok(Some(all - first));
        }
    }
    Ok(None)
}

/// The same in words, before what else would help.
pub(crate) fn told(layers: Option<usize>, (sequences, context): (usize, usize)) -> String {
    let contexts = if sequences == 1 { "a context".into() } else { format!("{sequences} contexts") };
    layers
        .map_or(String::new(), |n| format!("--gpu-layers {n} fits with {contexts} of {context} tokens, or "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use muser_core::cost::cache_bytes;
    use muser_core::model::{QuantMix, Synthetic, muse_glimmer_30b};
    use muser_core::{KvType, Lane, Net};

    fn release() -> Model {
        let geometry = muse_glimmer_30b(52);
        let weights = Synthetic::shapes(Net::Target, geometry.clone(), 0, QuantMix::Q4KM);
        Model::new(geometry, Box::new(weights), None).unwrap()
    }

    /// The release, of which all fits 24 GB and a part 16 and 12.
    #[test]
    fn the_most_layers_that_fit_are_found() {
        let (model, options) = (release(), CudaOptions::default());
        let fitting =
            |wanted, have: u64| layers(&model, &options, wanted, |need| need.in_all() <= have).unwrap();
        let whole = Need::of(&model, &options, 1, 32_768).unwrap();
        assert!(whole.in_all() < 24_000_000_000 && whole.while_loading() > 16_000_000_000);
        assert_eq!(whole.caches, cache_bytes(&model, KvType::F16, 32_768, 512));
        for have in [16_000_000_000, 12_000_000_000] {
            let n = fitting((1, 32_768), have).unwrap();
            let need = |n: usize| {
                let [_, last] = model.split(52 - n).unwrap();
                Need::of(&last, &options, 1, 32_768).unwrap().in_all()
            };
            assert!(need(n) <= have && need(n + 1) > have, "{n} layers in {have} bytes");
            // More or longer contexts leave less room.
            assert!(fitting((8, 131_072), have).unwrap() < n);
        }
        assert_eq!(fitting((1, 32_768), 1_000_000_000), None);
        // A part gives more of its layers away, and the same ones.
        let [_, last] = model.split(8).unwrap();
        let of_part = layers(&last, &options, (1, 32_768), |need| need.in_all() <= 12_000_000_000).unwrap();
        assert_eq!(of_part, fitting((1, 32_768), 12_000_000_000));
    }

    #[test]
    fn parts_need_what_is_theirs() {
        let (model, options) = (release(), CudaOptions { lane: Lane::Strict, ..CudaOptions::default() });
        let weights = |model: &Model| Need::of(model, &options, 1, 4096).unwrap().weights;
        let [a, b] = model.split(30).unwrap();
        assert_eq!(weights(&a) + weights(&b), weights(&model));
    }
}
