//! `muser receipt`: digests of what a model computes here, for checking elsewhere.

use crate::cmd::tokenize::ids;
use crate::device::{DeviceArgs, LaneName};
use crate::open::{Draft, ModelArgs, SourceArgs};
use crate::receipt::{ModelDigests, ReceiptFile};
use anyhow::{Context, Result, bail};
use clap::Args;
use muser_core::Geometry;
use muser_core::receipt::{prompts, receipt};
use std::io::Write;
use std::path::PathBuf;

/// Write digests of what a model computes, so that any machine can check it with `muser verify`
///
/// The file is JSON: SHA-256 of the model file, tokenizer and template, the lane, and for each prompt its token ids and
/// the SHA-256 of the logits at each position and of the residual stream after each layer. In the strict lane it holds on
/// every machine and device, in the serving lane on every machine of the same kind of device.
#[derive(Args)]
pub struct ReceiptArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    prompts: PromptArgs,
    /// Positions that one digest of logits covers; more make a smaller file
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    span: u32,
    /// The file to write [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    device: DeviceArgs,
}

/// What is run.
#[derive(Args)]
pub struct PromptArgs {
    /// A prompt as token ids separated by commas (repeatable) [default: three of 24, 100 and 300 ids]
    #[arg(long, value_name = "IDS", allow_hyphen_values = true)]
    tokens: Vec<String>,
}

impl PromptArgs {
    /// The prompts' ids.
    pub fn ids(&self, geometry: &Geometry) -> Result<Vec<Vec<u32>>> {
        if self.tokens.is_empty() {
            return Ok(prompts(geometry));
        }
        let prompt = |list: &String| {
            let ids = ids(list, geometry.vocab)?;
            if ids.is_empty() || ids.len() > geometry.context {
                bail!("--tokens names {} tokens; the model takes 1 to {}", ids.len(), geometry.context);
            }
            Ok(ids)
        };
        self.tokens.iter().map(prompt).collect()
    }
}

impl ReceiptArgs {
    /// Runs the command.
    pub fn run(mut self) -> Result<()> {
        self.device.lane.get_or_insert(LaneName::Strict);
        let opened = SourceArgs { model: self.model, draft: Some(Draft::Off) }.open()?;
        let prompts = self.prompts.ids(opened.model.geometry())?;
        let mut device = self.device.load(&opened, (1, prompts.iter().map(Vec::len).max().unwrap_or(1)))?;
        let chunk = self.device.chunk();
        let mut runs = vec![];
        for tokens in &prompts {
            runs.push(receipt(&opened.model, device.as_mut(), tokens, chunk, self.span as usize)?);
        }
        let file = ReceiptFile::new(ModelDigests::new(&opened)?, &self.device, &device.info().kind, runs);
        let text = serde_json::to_string(&file)? + "\n";
        match &self.output {
            Some(path) => {
                std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
            }
            None => Ok(std::io::stdout().lock().write_all(text.as_bytes())?),
        }
    }
}
