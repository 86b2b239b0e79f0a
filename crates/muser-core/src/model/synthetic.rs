//! Random weights of any geometry, made in memory, for benchmarks: the speed of a machine without a download.

use super::{TensorView, Weights};
use crate::geometry::{DraftSpec, Geometry, LayerKind, RopePairs};
use crate::plan::{Kind, Net, Slot};
use half::f16;
use muser_format::DType;
use std::collections::HashMap;

/// Which type each kind of weight gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuantMix {
    /// One type for every matrix.
    Uniform(DType),
    /// llama.cpp's Q4_K_M: Q4_K, with Q6_K for the head and, in about half of the layers, for ffn_down and attn_v.
    Q4KM,
}

impl QuantMix {
    /// `q4_k_m`, or the name of a type.
    pub fn from_name(name: &str) -> Option<Self> {
        if name.eq_ignore_ascii_case("q4_k_m") {
            return Some(QuantMix::Q4KM);
        }
        DType::from_name(&name.to_ascii_uppercase()).map(QuantMix::Uniform)
    }

    fn dtype(self, kind: Kind, layer: usize, layers: usize) -> DType {
        // llama.cpp's rule for "more bits": the first and last eighth, and every third layer between.
        let more = layer < layers / 8 || layer >= 7 * layers / 8 || (layer - layers / 8) % 3 == 2;
        match (self, kind) {
            (QuantMix::Uniform(t), _) => t,
            (QuantMix::Q4KM, Kind::Output) => DType::Q6K,
            (QuantMix::Q4KM, Kind::FfnDown | Kind::AttnV) if more => DType::Q6K,
            (QuantMix::Q4KM, _) => DType::Q4K,
        }
    }
}

/// The released 30B's shape (model card; `config.json` of the checkpoint), optionally with fewer layers.
pub fn muse_glimmer_30b(layers: usize) -> Geometry {
    Geometry {
        // A full layer is every fourth, counted back from the last.
        layers: (0..layers)
            .map(|i| if (layers - 1 - i).is_multiple_of(4) { LayerKind::Full } else { LayerKind::Local })
            .collect(),
        hidden: 6656,
        ff: 19968,
        heads: 32,
        kv_heads: 2,
        head_dim: 128,
        vocab: 202_048,
        context: 131_072,
        window: 2048,
        norm_eps: 1e-5,
        post_norm_eps: 1e-8,
        rope_theta: 500_000.0,
        rope_pairs: RopePairs::Interleaved,
        logit_scale: 0.196_116,
        softcap: Some(20.0),
    }
}

/// The released drafter's shape for a target of `target_layers` layers.
pub fn muse_glimmer_30b_drafter(target_layers: usize) -> (Geometry, DraftSpec) {
    let mut g = muse_glimmer_30b(5);
    g.layers = vec![LayerKind::Local; 5];
    g.kv_heads = 8;
    g.rope_pairs = RopePairs::Halves;
    g.logit_scale = 1.0;
    g.softcap = None;
    // The release captures 1, 13, 25, 37, 49 of 52; other depths are spread alike.
    let at = |i: usize| (1 + i * target_layers.saturating_sub(4) / 4).min(target_layers - 1);
    (g, DraftSpec { block: 16, mask_token: 201_818, target_layers: (0..5).map(at).collect() })
}

/// Random blocks: one pool a (type, fan-in), which every tensor of that kind shares. Devices copy weights, so sharing
/// does not flatter a cache.
pub struct Synthetic {
    net: Net,
    geometry: Geometry,
    features: usize,
    mix: QuantMix,
    pools: HashMap<(DType, usize), Vec<u8>>,
    ones: Vec<u8>,
    qk_scale: Vec<u8>,
}

impl Synthetic {
    /// Weights for the target (`features` = 0) or for a drafter that reads `features` concatenated target layers.
    pub fn new(net: Net, geometry: Geometry, features: usize, mix: QuantMix, seed: u64) -> Self {
        let mut s = Self::shapes(net, geometry, features, mix);
        let mut random = SplitMix(seed);
        let mut sizes: HashMap<(DType, usize), usize> = HashMap::new();
        for layer in 0..s.geometry.layers.len() {
            for kind in MATRICES {
                if let Some((dtype, rows, cols)) = s.shape(kind, layer) {
                    let bytes = rows * dtype.row_bytes(cols).unwrap_or(0);
                    let size = sizes.entry((dtype, cols)).or_default();
                    *size = bytes.max(*size);
                }
            }
        }
        for ((dtype, cols), bytes) in sizes {
            s.pools.insert((dtype, cols), pool(dtype, cols, bytes, &mut random));
        }
        s
    }

    /// The same shapes and types with empty data: enough to plan, route and count with, not to run.
    pub fn shapes(net: Net, geometry: Geometry, features: usize, mix: QuantMix) -> Self {
        let floats = |n: usize, v: f32| (0..n).flat_map(|_| v.to_le_bytes()).collect::<Vec<u8>>();
        let ones = floats(geometry.hidden.max(geometry.ff), 1.0);
        let qk_scale = floats(geometry.head_dim, 3.87);
        Synthetic { net, features, mix, pools: HashMap::new(), ones, qk_scale, geometry }
    }

    fn shape(&self, kind: Kind, layer: usize) -> Option<(DType, usize, usize)> {
        let g = &self.geometry;
        let (rows, cols) = match (kind, self.net) {
            (Kind::TokenEmbd | Kind::Output, Net::Target) => (g.vocab, g.hidden),
            (Kind::AttnGate, Net::Target) => (g.q_width(), g.hidden),
            (Kind::Fc, Net::Draft) => (g.hidden, self.features * g.hidden),
            (Kind::AttnQ, _) => (g.q_width(), g.hidden),
            (Kind::AttnK | Kind::AttnV, _) => (g.kv_width(), g.hidden),
            (Kind::AttnOutput, _) => (g.hidden, g.q_width()),
            (Kind::FfnGate | Kind::FfnUp, _) => (g.ff, g.hidden),
            (Kind::FfnDown, _) => (g.hidden, g.ff),
            _ => return None,
        };
        Some((self.mix.dtype(kind, layer, g.layers.len()), rows, cols))
    }
}

const MATRICES: [Kind; 11] = [
    Kind::TokenEmbd,
    Kind::Output,
    Kind::AttnQ,
    Kind::AttnK,
    Kind::AttnV,
    Kind::AttnGate,
    Kind::AttnOutput,
    Kind::FfnGate,
    Kind::FfnUp,
    Kind::FfnDown,
    Kind::Fc,
];

impl Weights for Synthetic {
    fn get(&self, slot: Slot) -> Option<TensorView<'_>> {
        let vector = |data: &'_ [u8], cols: usize| -> Option<(usize, usize)> {
            (data.len() >= cols * 4).then_some((1, cols))
        };
        if let Some((dtype, rows, cols)) = self.shape(slot.kind, slot.layer as usize) {
            let bytes = rows * dtype.row_bytes(cols)?;
            let data = match self.pools.get(&(dtype, cols)) {
                Some(pool) => pool.get(..bytes)?,
                None => &[],
            };
            return Some(TensorView { dtype, rows, cols, data, scale: 1.0 });
        }
        let g = &self.geometry;
        let (source, cols) = match (slot.kind, self.net) {
            (Kind::AttnQNorm, Net::Target) => (&self.qk_scale, g.head_dim),
            (Kind::AttnQNorm | Kind::AttnKNorm, _) => (&self.ones, g.head_dim),
            _ => (&self.ones, g.hidden),
        };
        let (rows, cols) = vector(source, cols)?;
        Some(TensorView { dtype: DType::F32, rows, cols, data: &source[..cols * 4], scale: 1.0 })
    }
}

/// Random bytes with scales that keep activations near one: values of about 1/sqrt(fan-in).
fn pool(dtype: DType, cols: usize, bytes: usize, random: &mut SplitMix) -> Vec<u8> {
    // A run of random blocks, repeated: its length is odd in blocks, so that rows differ.
    let (len, size) = (dtype.block_len(), dtype.block_bytes());
    let blocks = ((1 << 22) / size) | 1;
    let mut unit = vec![0u8; (blocks * size).min(bytes.next_multiple_of(size))];
    unit.chunks_mut(8).for_each(|c| c.copy_from_slice(&random.next().to_le_bytes()[..c.len()]));
    let std = 1.0 / (cols as f32).sqrt();
    let f16_at = |block: &mut [u8], at: usize, v: f32| {
        block[at..at + 2].copy_from_slice(&f16::from_f32(v).to_le_bytes())
    };
    for block in unit.chunks_exact_mut(size) {
        match dtype {
            DType::F32 => block.copy_from_slice(&(random.unit() * std * 3.4).to_le_bytes()),
            DType::F16 => f16_at(block, 0, random.unit() * std * 3.4),
            DType::BF16 => {
                let bits = (random.unit() * std * 3.4).to_bits() >> 16;
                block[..2].copy_from_slice(&(bits as u16).to_le_bytes());
            }
            // Scale and minimum of each group are made equal, and dmin = 7.5 d, so that the mean stays near zero.
            DType::Q4K | DType::Q5K => {
                let (centre, spread) = if dtype == DType::Q4K { (7.5, 4.6) } else { (15.5, 9.2) };
                let d = std / (32.0 * spread);
                f16_at(block, 0, d);
                f16_at(block, 2, d * centre);
                let scales: Vec<u8> = (0..8).map(|_| 24 + (random.next() % 16) as u8).collect();
                for j in 0..4 {
                    block[4 + j] = (scales[j] & 63) | ((scales[j + 4] >> 4) << 6);
                    block[8 + j] = block[4 + j];
                    block[12 + j] = (scales[j + 4] & 15) | ((scales[j + 4] & 15) << 4);
                }
            }
            DType::Q6K => {
                block[192..208].iter_mut().for_each(|s| *s = 24 + (*s % 16));
                f16_at(block, 208, std / (32.0 * 18.5));
            }
            DType::Q8_0 => f16_at(block, 0, std / 74.0),
            DType::Q4_0 | DType::Iq4Nl => f16_at(block, 0, std / 4.6),
            DType::Q2K => {
                f16_at(block, 80, std / 9.0);
                f16_at(block, 82, std / 6.0);
            }
            DType::Q3K => f16_at(block, 108, std / 40.0),
            DType::Nvfp4 => block[..size - len / 2].iter_mut().for_each(|s| *s = 0x28 + (*s & 7)),
            DType::Mxfp4 => block[0] = (127.0 + (std / 3.0).log2().round()) as u8,
            DType::Q4_1 | DType::Q5_1 => {
                f16_at(block, 0, std / 9.0);
                f16_at(block, 2, -std);
            }
            DType::Q5_0 => f16_at(block, 0, std / 9.2),
            // The ternary types keep their scale last; the IQ types first.
            DType::Tq1_0 | DType::Tq2_0 => f16_at(block, size - 2, std),
            // IQ1_M spreads its f16 scale over the top nibbles of four words.
            DType::Iq1M => {
                let bits = f16::from_f32(std / 8.0).to_bits();
                for i in 0..4 {
                    block[size - 7 + 2 * i] =
                        (block[size - 7 + 2 * i] & 0x0f) | (((bits >> (4 * i)) as u8 & 15) << 4);
                }
            }
            _ => f16_at(block, 0, std / 64.0),
        }
    }
    let mut out = Vec::with_capacity(bytes);
    while out.len() < bytes {
        let n = unit.len().min(bytes - out.len());
        out.extend_from_slice(&unit[..n]);
    }
    out
}

/// SplitMix64 (Steele, Lea and Flood, 2014): enough for random blocks.
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in -0.5 .. 0.5.
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    }
}
