//! `muser logits`: the logits of every position, for comparing engines.

use crate::cmd::tokenize::ids;
use crate::device::DeviceArgs;
use crate::npy;
use crate::open::ModelArgs;
use crate::open::{Draft, SourceArgs};
use anyhow::{Result, bail};
use clap::Args;
use muser_core::{Device, Pass, Row};
use std::path::PathBuf;

/// Write the logits of every position as a NumPy file, for comparing engines
///
/// The file holds f32, one row a position and one column a token, after the logit scale and the soft cap. Nothing is put
/// before the tokens. --chunk says how many rows are computed at once.
#[derive(Args)]
pub struct Logits {
    #[command(flatten)]
    model: ModelArgs,
    /// Token ids: numbers separated by commas
    #[arg(long, value_name = "IDS", allow_hyphen_values = true)]
    tokens: String,
    /// The file to write
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    #[command(flatten)]
    device: DeviceArgs,
}

impl Logits {
    /// Runs the command.
    pub fn run(self) -> Result<()> {
        let opened = SourceArgs { model: self.model, draft: Some(Draft::Off) }.open()?;
        let vocab = opened.model.geometry().vocab;
        let tokens = ids(&self.tokens, vocab)?;
        if tokens.is_empty() {
            bail!("--tokens names no token");
        }
        let mut device = self.device.load(&opened, (1, tokens.len()))?;
        let mut file = npy::Writer::create(&self.output, tokens.len(), vocab)?;
        each(device.as_mut(), &tokens, self.device.chunk(), &mut |logits| file.row(logits))?;
        file.finish()
    }
}

/// Runs tokens on a new sequence, `chunk` rows at a time, and hands on each position's logits.
pub fn each(
    device: &mut dyn Device,
    tokens: &[u32],
    chunk: usize,
    sink: &mut dyn FnMut(&[f32]) -> Result<()>,
) -> Result<()> {
    let seq = device.open(tokens.len())?;
    for (c, part) in tokens.chunks(chunk).enumerate() {
        let row = |(i, token): (usize, &u32)| Row {
            feature: i as u32,
            ..Row::new(seq, (c * chunk + i) as u32, *token).with_logits()
        };
        device.run(Pass::Target, &part.iter().enumerate().map(row).collect::<Vec<_>>(), None)?;
        for i in 0..part.len() {
            sink(device.logits(i)?)?;
        }
    }
    device.close(seq);
    Ok(())
}
