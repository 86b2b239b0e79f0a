//! Drafters as Hugging Face publishes them: a folder with `config.json` (model_type `muse_glimmer_assistant`) and
//! `model.safetensors`. Names and shapes are those of the release; no row is permuted and norm weights are plain.

use super::{Drafter, ModelError, TensorView, Weights};
use crate::geometry::{DraftSpec, Geometry, LayerKind, RopePairs};
use crate::plan::{Kind, Slot};
use muser_format::{DType, SafeDtype, Safetensors};
use serde::Deserialize;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Longest config that is read: the release's has under a kilobyte.
const MAX_CONFIG: u64 = 1 << 20;

/// Whose config it is.
#[derive(Deserialize)]
struct Whose {
    model_type: String,
}

/// What is used of config.json.
#[derive(Deserialize)]
struct Config {
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    head_dim: usize,
    max_position_embeddings: usize,
    sliding_window: usize,
    rms_norm_eps: f32,
    layer_types: Vec<String>,
    block_size: usize,
    mask_token_id: usize,
    /// Outputs of these target layers are captured.
    target_layer_ids: Vec<usize>,
    rope_parameters: Rope,
}

#[derive(Deserialize)]
struct Rope {
    rope_theta: f64,
}

/// Whether a path is such a drafter: a folder that has a config.json, or a file beside one.
pub(super) fn is_assistant(path: &Path) -> bool {
    let file = path.extension().is_some_and(|e| e == "safetensors" || e == "json");
    (path.is_dir() || file) && config_of(path).is_file()
}

fn config_of(path: &Path) -> PathBuf {
    if path.is_dir() { path.join("config.json") } else { path.with_file_name("config.json") }
}

/// Opens the drafter of a target: its folder, or a file in it.
pub(super) fn open(path: &Path, target: &Geometry) -> Result<Drafter, ModelError> {
    let config_path = config_of(path);
    let config = read(&config_path)?;
    let geometry = geometry(&config, &config_path, target)?;
    let spec = DraftSpec {
        block: config.block_size,
        mask_token: config.mask_token_id as u32,
        target_layers: config.target_layer_ids,
    };
    let folder = config_path.parent().unwrap_or(Path::new("."));
    let weights = Assistant { file: Safetensors::open(folder)?, layers: geometry.layers.len() };
    weights.check(folder)?;
    Ok((geometry, spec, Box::new(weights)))
}

fn read(path: &Path) -> Result<Config, ModelError> {
    let bad = |why: String| ModelError::DraftMismatch(format!("{}: {why}", path.display()));
    let mut text = String::new();
    let file = std::fs::File::open(path).map_err(|e| bad(format!("can't be opened: {e}")))?;
    let read = file.take(MAX_CONFIG).read_to_string(&mut text);
    read.map_err(|e| bad(format!("can't be read: {e}; download it again")))?;
    let damaged =
        |e: serde_json::Error| bad(format!("is no drafter's config: {e}; download the assistant again"));
    let whose: Whose = serde_json::from_str(&text).map_err(damaged)?;
    if whose.model_type != "muse_glimmer_assistant" {
        return Err(ModelError::Architecture {
            path: path.to_path_buf(),
            found: whose.model_type,
            expected: "muse_glimmer_assistant",
            mend: "give the assistant's folder, or a GGUF of architecture dflash".into(),
        });
    }
    serde_json::from_str(&text).map_err(damaged)
}

/// Checks the numbers; bounds keep every product of two sizes far from overflow.
fn geometry(config: &Config, path: &Path, target: &Geometry) -> Result<Geometry, ModelError> {
    let bad = |key: &str, why: String| ModelError::Key { path: path.to_path_buf(), key: key.into(), why };
    let sizes = [
        ("hidden_size", config.hidden_size, 1 << 20),
        ("intermediate_size", config.intermediate_size, 1 << 22),
        ("num_hidden_layers", config.num_hidden_layers, 4096),
        ("num_attention_heads", config.num_attention_heads, 1 << 14),
        ("num_key_value_heads", config.num_key_value_heads, 1 << 14),
        ("head_dim", config.head_dim, 1 << 12),
        ("max_position_embeddings", config.max_position_embeddings, 1 << 30),
        ("sliding_window", config.sliding_window, 1 << 24),
        ("block_size", config.block_size, 64),
    ];
    for (key, value, most) in sizes {
        if value == 0 || value > most {
            return Err(bad(key, format!("{value} is outside 1..={most}; the file is damaged")));
        }
    }
    if config.hidden_size != target.hidden {
        return Err(ModelError::DraftMismatch(format!(
            "{} is {} wide, the target {}; use the drafter that was trained for this target",
            path.display(),
            config.hidden_size,
            target.hidden
        )));
    }
    if !config.num_attention_heads.is_multiple_of(config.num_key_value_heads) {
        let why = format!("{} query heads do not divide among them", config.num_attention_heads);
        return Err(bad("num_key_value_heads", why));
    }
    if !config.head_dim.is_multiple_of(2) {
        return Err(bad("head_dim", format!("{} is odd", config.head_dim)));
    }
    if config.block_size < 2 {
        return Err(bad("block_size", "a block needs the anchor and at least one mask".into()));
    }
    if config.mask_token_id >= target.vocab {
        let why = format!("{} is outside the target's {} tokens", config.mask_token_id, target.vocab);
        return Err(bad("mask_token_id", why));
    }
    for (key, value) in
        [("rms_norm_eps", f64::from(config.rms_norm_eps)), ("rope_theta", config.rope_parameters.rope_theta)]
    {
        if !value.is_finite() || value <= 0.0 {
            return Err(bad(key, format!("{value} is not a positive number")));
        }
    }
    let ids = &config.target_layer_ids;
    if ids.is_empty() || ids.len() > 64 || ids.windows(2).any(|w| w[0] >= w[1]) {
        return Err(bad("target_layer_ids", "must hold 1 to 64 rising layer numbers".into()));
    }
    if let Some(id) = ids.iter().find(|id| **id >= target.layers.len()) {
        return Err(ModelError::DraftMismatch(format!(
            "target_layer_ids names layer {id}, the target has {}; use the drafter that was trained for this target",
            target.layers.len()
        )));
    }
    if config.layer_types.len() != config.num_hidden_layers {
        let why = format!("has {} entries for {} layers", config.layer_types.len(), config.num_hidden_layers);
        return Err(bad("layer_types", why));
    }
    let kind = |name: &String| match name.as_str() {
        "sliding_attention" => Ok(LayerKind::Local),
        "full_attention" => Ok(LayerKind::Full),
        other => {
            Err(bad("layer_types", format!("{other:?} is neither sliding_attention nor full_attention")))
        }
    };
    Ok(Geometry {
        layers: config.layer_types.iter().map(kind).collect::<Result<_, _>>()?,
        hidden: config.hidden_size,
        ff: config.intermediate_size,
        heads: config.num_attention_heads,
        kv_heads: config.num_key_value_heads,
        head_dim: config.head_dim,
        vocab: target.vocab,
        context: config.max_position_embeddings,
        window: config.sliding_window,
        norm_eps: config.rms_norm_eps,
        post_norm_eps: 1e-8,
        rope_theta: config.rope_parameters.rope_theta,
        rope_pairs: RopePairs::Halves,
        logit_scale: 1.0,
        softcap: None,
    })
}

/// The weights, by slot.
struct Assistant {
    file: Safetensors,
    layers: usize,
}

/// Weights that a layer has, in the names of the checkpoint.
const LAYER: [(Kind, &str); 11] = [
    (Kind::AttnNorm, "input_layernorm"),
    (Kind::AttnQ, "self_attn.q_proj"),
    (Kind::AttnK, "self_attn.k_proj"),
    (Kind::AttnV, "self_attn.v_proj"),
    (Kind::AttnOutput, "self_attn.o_proj"),
    (Kind::AttnQNorm, "self_attn.q_norm"),
    (Kind::AttnKNorm, "self_attn.k_norm"),
    (Kind::FfnNorm, "post_attention_layernorm"),
    (Kind::FfnGate, "mlp.gate_proj"),
    (Kind::FfnUp, "mlp.up_proj"),
    (Kind::FfnDown, "mlp.down_proj"),
];
/// Weights that stand outside the layers.
const OUTSIDE: [(Kind, &str); 3] = [
    (Kind::Fc, "encoder.fc.weight"),
    (Kind::FcNorm, "encoder.output_norm_enc.weight"),
    (Kind::OutputNorm, "norm.weight"),
];

impl Assistant {
    /// Every tensor must be one that muser computes with: a drafter with other heads would draft nonsense.
    fn check(&self, folder: &Path) -> Result<(), ModelError> {
        let known: Vec<String> = (0..self.layers)
            .flat_map(|l| LAYER.iter().map(move |(_, name)| format!("layers.{l}.{name}.weight")))
            .chain(OUTSIDE.iter().map(|(_, name)| name.to_string()))
            .collect();
        for name in self.file.names() {
            let Some(tensor) = self.file.tensor(name) else { continue };
            if !known.iter().any(|k| k == name) {
                return Err(ModelError::DraftMismatch(format!(
                    "{} has tensor {name}, which muser does not run; use a plain DFlash drafter or --draft off",
                    folder.display()
                )));
            }
            if dtype(tensor.dtype).is_none() {
                return Err(ModelError::Key {
                    path: folder.to_path_buf(),
                    key: name.into(),
                    why: format!("is {:?}; muser reads F32, F16 and BF16 checkpoints", tensor.dtype),
                });
            }
        }
        Ok(())
    }
}

fn dtype(of: SafeDtype) -> Option<DType> {
    match of {
        SafeDtype::F32 => Some(DType::F32),
        SafeDtype::F16 => Some(DType::F16),
        SafeDtype::BF16 => Some(DType::BF16),
        _ => None,
    }
}

impl Weights for Assistant {
    fn get(&self, slot: Slot) -> Option<TensorView<'_>> {
        let outside = OUTSIDE.iter().find(|(kind, _)| *kind == slot.kind).map(|(_, name)| name.to_string());
        let layered = || {
            let (_, name) = LAYER.iter().find(|(kind, _)| *kind == slot.kind)?;
            Some(format!("layers.{}.{name}.weight", slot.layer))
        };
        let tensor = self.file.tensor(&outside.or_else(layered)?)?;
        let (rows, cols) = match tensor.shape {
            [cols] => (1, *cols),
            [rows, cols] => (*rows, *cols),
            _ => return None,
        };
        Some(TensorView { dtype: dtype(tensor.dtype)?, rows, cols, data: tensor.data, scale: 1.0 })
    }
}
