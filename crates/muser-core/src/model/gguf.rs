//! Reading a model from GGUF files: architecture `muse-glimmer`, drafters of architecture `dflash`.

use super::{Drafter, Model, ModelError, TensorView, Weights, assistant};
use crate::geometry::{DraftSpec, Geometry, LayerKind, RopePairs};
use crate::plan::{Kind, Net, Slot};
use muser_format::{Array, DType, Gguf, Value};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Opens a target and, if given, its drafter. The target's [`Gguf`] comes back too: it holds tokenizer and template.
pub fn open(target: &Path, drafter: Option<&Path>) -> Result<(Model, Arc<Gguf>), ModelError> {
    let file = Arc::new(Gguf::open(target)?);
    let geometry = target_geometry(&file)?;
    let weights = GgufWeights::new(file.clone(), Net::Target, &geometry)?;
    let draft = match drafter {
        Some(path) => Some(open_drafter(path, &geometry, &file)?),
        None => None,
    };
    Ok((Model::new(geometry, Box::new(weights), draft)?, file))
}

/// The drafter that stands beside a target, in the same folder: a GGUF file of architecture `dflash`, or the folder of an
/// assistant, whose width and vocabulary are the target's. Several candidates: the name closest to the target's, then a
/// file before a folder and the larger file.
pub fn find_drafter(target: &Path) -> Option<PathBuf> {
    let folder = target.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let own = Gguf::open(target).ok()?;
    let geometry = target_geometry(&own).ok()?;
    let name = |p: &Path| p.file_name().map(|n| n.to_string_lossy().to_lowercase()).unwrap_or_default();
    let target_name = name(target);
    let mut found: Vec<(usize, u64, PathBuf)> = std::fs::read_dir(folder)
        .ok()?
        .filter_map(|entry| entry.ok().map(|e| e.path()))
        .filter(|path| {
            let gguf = path.extension().is_some_and(|e| e == "gguf") && name(path).contains("dflash");
            gguf || name(path).contains("assistant") && path.is_dir() && assistant::is_assistant(path)
        })
        .filter(|path| open_drafter(path, &geometry, &own).is_ok())
        .map(|path| {
            let file = name(&path);
            let shared = target_name.split(['-', '_', '.']).filter(|part| file.contains(*part)).count();
            let size = std::fs::metadata(&path).map_or(0, |m| if m.is_file() { m.len() } else { 0 });
            (shared, size, path)
        })
        .collect();
    found.sort();
    found.pop().map(|(_, _, path)| path)
}

/// Metadata access with errors that name the file and the key.
struct Keys<'a> {
    file: &'a Gguf,
    prefix: &'static str,
}

impl Keys<'_> {
    fn bad(&self, key: &str, why: impl Into<String>) -> ModelError {
        ModelError::Key { path: self.file.path().to_path_buf(), key: key.to_string(), why: why.into() }
    }

    fn size(&self, name: &str, max: usize) -> Result<usize, ModelError> {
        let key = format!("{}.{name}", self.prefix);
        let value = self.file.u64(&key)? as usize;
        if value == 0 || value > max {
            return Err(self.bad(
                &key,
                format!("{value} is outside 1..={max}; the file is damaged or not of this architecture"),
            ));
        }
        Ok(value)
    }

    fn float(&self, name: &str) -> Result<Option<f32>, ModelError> {
        let key = format!("{}.{name}", self.prefix);
        if self.file.get(&key).is_none() {
            return Ok(None);
        }
        let value = self.file.f32(&key)?;
        if !value.is_finite() || value <= 0.0 {
            return Err(self.bad(&key, format!("{value} is not a positive number")));
        }
        Ok(Some(value))
    }

    fn need_float(&self, name: &str) -> Result<f32, ModelError> {
        let key = format!("{}.{name}", self.prefix);
        self.float(name)?
            .ok_or_else(|| self.bad(&key, "is missing; convert the file with a current converter"))
    }

    /// Bool array (Meta's files) or, for targets, one number (Unsloth's): every n-th layer counted back from the last is full.
    fn pattern(&self, layers: usize, number_allowed: bool) -> Result<Vec<LayerKind>, ModelError> {
        let key = format!("{}.attention.sliding_window_pattern", self.prefix);
        let kind = |local: bool| if local { LayerKind::Local } else { LayerKind::Full };
        match self.file.get(&key) {
            None => Err(self.bad(&key, "is missing; convert the file with a current converter")),
            Some(Value::Array(Array::Bool(local))) if local.len() == layers => {
                Ok(local.iter().map(|l| kind(*l)).collect())
            }
            Some(Value::Array(Array::Bool(local))) => {
                Err(self.bad(&key, format!("has {} entries for {layers} layers", local.len())))
            }
            Some(_) if number_allowed => match self.file.u64(&key)? as usize {
                0 => Err(self.bad(&key, "a period of 0 names no full layer")),
                n => Ok((0..layers).map(|i| kind(!(layers - 1 - i).is_multiple_of(n))).collect()),
            },
            Some(_) => Err(self.bad(&key, "must be an array of booleans, one a layer")),
        }
    }

    fn check_arch(&self) -> Result<(), ModelError> {
        let found = self.file.arch()?;
        if found == self.prefix {
            return Ok(());
        }
        let mend = match (found, self.prefix) {
            ("dflash", _) => {
                "this is a drafter: give it with --draft and name the target with -m".to_string()
            }
            ("muse-glimmer", _) => "this is a target: name it with -m".to_string(),
            ("clip", _) => "this is a vision projector; muser reads text models".to_string(),
            ("dflash-draft", _) => {
                "the file was made by an old converter: convert the drafter again, to architecture dflash"
                    .to_string()
            }
            _ => "choose a Muse Glimmer GGUF".to_string(),
        };
        Err(ModelError::Architecture {
            path: self.file.path().to_path_buf(),
            found: found.to_string(),
            expected: self.prefix,
            mend,
        })
    }

    /// What targets and drafters share. Bounds keep every product of two sizes far from overflow.
    fn geometry(&self, pattern_number: bool) -> Result<Geometry, ModelError> {
        let layers = self.size("block_count", 4096)?;
        let (heads, kv_heads) =
            (self.size("attention.head_count", 1 << 14)?, self.size("attention.head_count_kv", 1 << 14)?);
        let head_dim = self.size("attention.key_length", 1 << 12)?;
        if heads % kv_heads != 0 {
            let key = format!("{}.attention.head_count_kv", self.prefix);
            return Err(
                self.bad(&key, format!("{heads} query heads do not divide among {kv_heads} KV heads"))
            );
        }
        let value_dim = self.size("attention.value_length", 1 << 12)?;
        if head_dim % 2 != 0 || value_dim != head_dim {
            let key = format!("{}.attention.value_length", self.prefix);
            return Err(
                self.bad(&key, format!("{value_dim} must equal the key length {head_dim}, an even number"))
            );
        }
        Ok(Geometry {
            layers: self.pattern(layers, pattern_number)?,
            hidden: self.size("embedding_length", 1 << 20)?,
            ff: self.size("feed_forward_length", 1 << 22)?,
            heads,
            kv_heads,
            head_dim,
            vocab: 0,
            context: self.size("context_length", 1 << 30)?,
            window: self.size("attention.sliding_window", 1 << 24)?,
            norm_eps: self.need_float("attention.layer_norm_rms_epsilon")?,
            post_norm_eps: 1e-8,
            rope_theta: self.need_float("rope.freq_base")? as f64,
            rope_pairs: RopePairs::Interleaved,
            logit_scale: 1.0,
            softcap: None,
        })
    }
}

fn target_geometry(file: &Gguf) -> Result<Geometry, ModelError> {
    let keys = Keys { file, prefix: "muse-glimmer" };
    keys.check_arch()?;
    let mut g = keys.geometry(true)?;
    g.vocab = vocab(file)?;
    // Absent in some files: the architecture's multiplier is 1 / sqrt(hidden / 256).
    g.logit_scale = keys.float("logit_scale")?.unwrap_or((256.0 / g.hidden as f32).sqrt());
    g.softcap = keys.float("final_logit_softcapping")?.or(Some(20.0));
    Ok(g)
}

/// Rows of the embedding, which must agree with the tokenizer where the file has one.
fn vocab(file: &Gguf) -> Result<usize, ModelError> {
    let rows = file.tensor("token_embd.weight").map(|t| t.rows()).ok_or(ModelError::Missing {
        name: "token_embd.weight".into(),
        mend: "the file is incomplete; download it again",
    })?;
    if let Some(Value::Array(Array::Str(tokens))) = file.get("tokenizer.ggml.tokens")
        && tokens.len() != rows
    {
        return Err(ModelError::Key {
            path: file.path().to_path_buf(),
            key: "tokenizer.ggml.tokens".into(),
            why: format!("has {} tokens, but token_embd.weight has {rows} rows", tokens.len()),
        });
    }
    Ok(rows)
}

fn open_drafter(path: &Path, target: &Geometry, target_file: &Gguf) -> Result<Drafter, ModelError> {
    if assistant::is_assistant(path) {
        return assistant::open(path, target);
    }
    let file = Arc::new(Gguf::open(path)?);
    let keys = Keys { file: &file, prefix: "dflash" };
    keys.check_arch()?;
    let mut g = keys.geometry(false)?;
    g.rope_pairs = RopePairs::Halves;
    g.vocab = target.vocab;
    if g.hidden != target.hidden {
        return Err(ModelError::DraftMismatch(format!(
            "{} is {} wide, the target {}; use the drafter that was trained for this target",
            path.display(),
            g.hidden,
            target.hidden
        )));
    }
    if let (Some(a), Some(b)) = (file.get("tokenizer.ggml.tokens"), target_file.get("tokenizer.ggml.tokens"))
        && a != b
    {
        return Err(ModelError::DraftMismatch(format!("{} was made for another vocabulary", path.display())));
    }
    refuse_unknown_heads(&file, path)?;
    let block = keys.size("block_size", 64)?;
    if block < 2 {
        return Err(keys.bad("dflash.block_size", "a block needs the anchor and at least one mask"));
    }
    let mask_token = file.u64("tokenizer.ggml.mask_token_id")?;
    if mask_token >= target.vocab as u64 {
        return Err(keys.bad(
            "tokenizer.ggml.mask_token_id",
            format!("{mask_token} is outside the target's {} tokens", target.vocab),
        ));
    }
    let spec =
        DraftSpec { block, mask_token: mask_token as u32, target_layers: target_layers(&keys, target)? };
    let weights = GgufWeights::new(file.clone(), Net::Draft, &g)?;
    Ok((g, spec, Box::new(weights)))
}

/// `dflash.target_layers` names layer inputs; the captures are the outputs one layer before.
fn target_layers(keys: &Keys<'_>, target: &Geometry) -> Result<Vec<usize>, ModelError> {
    let key = "dflash.target_layers";
    let Some(Value::Array(array)) = keys.file.get(key) else {
        return Err(
            keys.bad(key, "is missing or not an array; convert the drafter again with a current converter")
        );
    };
    let inputs: Vec<u64> = array.to_u64s().ok_or_else(|| keys.bad(key, "must hold whole numbers"))?;
    let (first, last) = (1, target.layers.len() as u64);
    if inputs.is_empty() || inputs.len() > 64 || inputs.windows(2).any(|w| w[0] >= w[1]) {
        return Err(keys.bad(key, "must hold 1 to 64 rising layer numbers"));
    }
    match inputs.iter().find(|i| **i < first || **i > last) {
        Some(i) => Err(ModelError::DraftMismatch(format!(
            "{key} names layer {i}, the target has {last}; use the drafter that was trained for this target"
        ))),
        None => Ok(inputs.iter().map(|i| *i as usize - 1).collect()),
    }
}

/// Drafters with parts that muser does not compute would draft nonsense: name them instead.
fn refuse_unknown_heads(file: &Gguf, path: &Path) -> Result<(), ModelError> {
    let refuse = |what: &str| {
        Err(ModelError::DraftMismatch(format!(
            "{} has {what}, which muser does not run; use a plain DFlash drafter or --draft off",
            path.display()
        )))
    };
    if matches!(file.get("dflash.attention.causal"), Some(Value::Bool(true))) {
        return refuse("causal attention inside a block (dflash.attention.causal)");
    }
    if matches!(file.get("dflash.sample_from_anchor"), Some(Value::Bool(true))) {
        return refuse("an anchor row that is sampled from (dflash.sample_from_anchor)");
    }
    for tensor in file.tensors() {
        let name = &tensor.name;
        if name.contains("conv_") || name.contains("selector_") {
            return refuse(&format!("DFlash2 heads (tensor {name})"));
        }
        if name.contains("markov_") || name.contains("confidence") {
            return refuse(&format!("DSpark heads (tensor {name})"));
        }
    }
    Ok(())
}

/// Weights of one file, by slot.
struct GgufWeights {
    file: Arc<Gguf>,
    net: Net,
    /// Rows of Q, K and V, in the order of a fused `attn_qkv`.
    fused: [usize; 3],
    /// Stand-in for `attn_q_norm` where a file has none: the architecture's factor on normed queries.
    qk_scale: Vec<u8>,
    ones: Vec<u8>,
}

/// Factor on normed queries (`qk_scale_factor` of the released config.json); files normally hold it as `attn_q_norm`.
const QK_SCALE: f32 = 3.87;

impl GgufWeights {
    fn new(file: Arc<Gguf>, net: Net, g: &Geometry) -> Result<Self, ModelError> {
        let row = |v: f32| (0..g.head_dim).flat_map(|_| v.to_le_bytes()).collect();
        let fused = [g.q_width(), g.kv_width(), g.kv_width()];
        let w = GgufWeights { file, net, fused, qk_scale: row(QK_SCALE), ones: row(1.0) };
        for t in w.file.tensors().iter().filter(|t| t.name.ends_with("_norm.weight")) {
            if t.dtype != DType::F32 {
                return Err(ModelError::Key {
                    path: w.file.path().to_path_buf(),
                    key: t.name.clone(),
                    why: format!("norm weights are F32 in GGUF files, this one is {}", t.dtype.name()),
                });
            }
        }
        Ok(w)
    }

    fn scale(&self, tensor: &str) -> f32 {
        let name = format!("{}.scale", tensor.trim_end_matches(".weight"));
        let value = self.file.tensor(&name).filter(|t| t.info.dtype == DType::F32);
        let bytes = value.and_then(|t| t.data.get(..4)).and_then(|b| b.try_into().ok());
        bytes.map_or(1.0, f32::from_le_bytes)
    }

    /// Q, K or V out of a fused `attn_qkv`.
    fn part_of_fused(&self, slot: Slot) -> Option<TensorView<'_>> {
        let part = [Kind::AttnQ, Kind::AttnK, Kind::AttnV].iter().position(|k| *k == slot.kind)?;
        let name = format!("blk.{}.attn_qkv.weight", slot.layer);
        let tensor = self.file.tensor(&name)?;
        let bytes = tensor.info.dtype.row_bytes(tensor.cols())?;
        let start: usize = self.fused[..part].iter().sum();
        let rows = self.fused[part];
        let data = tensor.data.get(start * bytes..(start + rows) * bytes)?;
        Some(TensorView {
            dtype: tensor.info.dtype,
            rows,
            cols: tensor.cols(),
            data,
            scale: self.scale(&name),
        })
    }
}

impl Weights for GgufWeights {
    fn get(&self, slot: Slot) -> Option<TensorView<'_>> {
        let name = slot.to_string();
        if let Some(t) = self.file.tensor(&name) {
            let scale = self.scale(&name);
            return Some(TensorView {
                dtype: t.info.dtype,
                rows: t.rows(),
                cols: t.cols(),
                data: t.data,
                scale,
            });
        }
        let constant = |data| {
            let cols = self.ones.len() / 4;
            Some(TensorView { dtype: DType::F32, rows: 1, cols, data, scale: 1.0 })
        };
        match (slot.kind, self.net) {
            (Kind::AttnQNorm, Net::Target) => constant(&self.qk_scale),
            (Kind::AttnKNorm, Net::Target) => constant(&self.ones),
            _ => self.part_of_fused(slot),
        }
    }
}
