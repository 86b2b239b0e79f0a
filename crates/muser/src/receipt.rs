//! The file form of receipts: what was run on what, and the digests of what it computed.

use crate::device::{DeviceArgs, KvName, LaneName};
use crate::input;
use crate::open::Opened;
use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use muser_core::Geometry;
use muser_core::receipt::{Receipt, hex_digest};
use muser_format::{Array, Gguf, Value};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Version of the file's form.
const FORMAT: u32 = 1;
/// Files beyond this are no receipts.
const MOST_BYTES: u64 = 256 << 20;

/// A receipt file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReceiptFile {
    format: u32,
    /// The version of muser that made it.
    pub muser: String,
    /// Digests of the model.
    pub model: ModelDigests,
    /// `strict` or `serving`.
    pub lane: String,
    /// Type of cached keys and values.
    pub kv: String,
    /// Kind of the device that made it: the serving lane holds on this kind alone.
    pub device: String,
    /// The runs.
    pub prompts: Vec<PromptDigests>,
}

/// What a model file is.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelDigests {
    /// Name of the file, for people.
    pub file: String,
    /// SHA-256 of the file; of a split model's parts one after the other.
    pub sha256: String,
    /// SHA-256 of the vocabulary: name of the split, tokens, their types, merges.
    pub tokenizer: String,
    /// SHA-256 of the chat template; none without one.
    pub template: Option<String>,
}

/// The digests of one prompt.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PromptDigests {
    tokens: Vec<u32>,
    /// Positions that one digest of logits covers.
    span: usize,
    logits: Vec<String>,
    /// After the embedding, then after each layer.
    residuals: Vec<String>,
}

impl ModelDigests {
    /// Digests of an opened model file.
    pub fn new(opened: &Opened) -> Result<Self> {
        let file = opened.gguf.as_ref().context("random weights have no file to make a receipt of")?;
        let template = file.get("tokenizer.chat_template").and_then(Value::as_str);
        Ok(ModelDigests {
            file: opened.name.clone(),
            sha256: hex_digest(file.files()),
            tokenizer: tokenizer(file),
            template: template.map(|t| hex_digest([t.as_bytes()])),
        })
    }
}

/// Every string of the vocabulary ends with a zero byte, every type is a little-endian i32.
fn tokenizer(file: &Gguf) -> String {
    let mut bytes = vec![];
    for key in ["pre", "tokens", "token_type", "merges"] {
        let mut text = |text: &str| {
            bytes.extend_from_slice(text.as_bytes());
            bytes.push(0);
        };
        match file.get(&format!("tokenizer.ggml.{key}")) {
            Some(Value::Str(one)) => text(one),
            Some(Value::Array(Array::Str(all))) => all.iter().for_each(|one| text(one)),
            Some(Value::Array(Array::I32(all))) => bytes.extend(all.iter().flat_map(|t| t.to_le_bytes())),
            _ => {}
        }
    }
    hex_digest([&bytes[..]])
}

impl ReceiptFile {
    /// A file of these runs.
    pub fn new(model: ModelDigests, args: &DeviceArgs, kind: &str, runs: Vec<Receipt>) -> Self {
        let prompt = |r: Receipt| PromptDigests {
            tokens: r.tokens,
            span: r.span,
            logits: r.logits,
            residuals: r.residuals,
        };
        ReceiptFile {
            format: FORMAT,
            muser: env!("CARGO_PKG_VERSION").into(),
            model,
            lane: args.lane().name().into(),
            kv: args.kv.name().into(),
            device: kind.into(),
            prompts: runs.into_iter().map(prompt).collect(),
        }
    }

    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self> {
        let shown = path.display();
        let size = std::fs::metadata(path).with_context(|| format!("cannot read {shown}"))?.len();
        ensure!(size <= MOST_BYTES, "{shown} has {size} bytes: it is no receipt");
        let json = input::json_file(path)?;
        match json.get("format").map(serde_json::Value::as_u64) {
            None => bail!("{shown} is no receipt: it has no \"format\""),
            Some(format) if format != Some(FORMAT.into()) => {
                bail!(
                    "{shown} has form {}, this muser reads {FORMAT}: make the receipt again",
                    json["format"]
                )
            }
            Some(_) => {}
        }
        serde_json::from_value(json).with_context(|| format!("{shown} is a broken receipt"))
    }

    /// The lane and the type of keys and values that the receipt was made in.
    pub fn arithmetic(&self) -> Result<(LaneName, KvName)> {
        let lane = LaneName::from_str(&self.lane, false);
        let kv = KvName::from_str(&self.kv, false);
        let wrong = |what: &str, value: &str| format!("the receipt is broken: {value:?} is no {what}");
        Ok((
            lane.map_err(anyhow::Error::msg).with_context(|| wrong("lane", &self.lane))?,
            kv.map_err(anyhow::Error::msg).with_context(|| wrong("type of keys and values", &self.kv))?,
        ))
    }

    /// The runs, each checked against the model's shape.
    pub fn runs(&self, geometry: &Geometry) -> Result<Vec<Receipt>> {
        ensure!(!self.prompts.is_empty(), "the receipt is broken: it has no prompt");
        self.prompts
            .iter()
            .enumerate()
            .map(|(i, p)| p.run(geometry).with_context(|| format!("the receipt is broken: prompt {}", i + 1)))
            .collect()
    }
}

impl PromptDigests {
    fn run(&self, geometry: &Geometry) -> Result<Receipt> {
        let (tokens, most) = (self.tokens.len(), geometry.context);
        ensure!((1..=most).contains(&tokens), "it has {tokens} tokens, the model takes 1 to {most}");
        if let Some(token) = self.tokens.iter().find(|t| **t as usize >= geometry.vocab) {
            bail!("token {token} is outside the vocabulary of {}", geometry.vocab);
        }
        ensure!(self.span > 0, "a digest covers at least one position");
        let (logits, layers) = (tokens.div_ceil(self.span), geometry.layers.len() + 1);
        ensure!(
            self.logits.len() == logits && self.residuals.len() == layers,
            "it has {} digests of logits and {} of residuals where {logits} and {layers} belong",
            self.logits.len(),
            self.residuals.len()
        );
        let is_digest =
            |d: &&String| d.len() == 64 && d.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        if let Some(wrong) = self.logits.iter().chain(&self.residuals).find(|d| !is_digest(d)) {
            bail!("{wrong:?} is no SHA-256");
        }
        Ok(Receipt {
            tokens: self.tokens.clone(),
            span: self.span,
            logits: self.logits.clone(),
            residuals: self.residuals.clone(),
        })
    }
}
