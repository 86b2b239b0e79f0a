//! The loaded engine with all that commands need beside it.

use crate::device::DeviceArgs;
use crate::open::{Opened, SourceArgs};
use crate::text::Text;
use anyhow::{Context, Result};
use clap::Args;
use muser_core::Engine;

/// Longest default context: the caches of a full-length one would take gigabytes that most chats never use.
const DEFAULT_CONTEXT: usize = 32_768;

/// Which model, on which device, how long its context is.
#[derive(Args, Clone, Debug)]
pub struct EngineArgs {
    #[command(flatten)]
    pub source: SourceArgs,
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Tokens of a context; 0 is the model's longest [default: the model's longest, at most 32768]
    #[arg(short, long, value_name = "N")]
    pub context: Option<usize>,
    /// Draft this many tokens at every step instead of what pays best
    #[arg(long, value_name = "N")]
    pub draft_rows: Option<usize>,
}

/// A model on its device, with its text side.
pub struct Loaded {
    /// Files and shapes.
    pub opened: Opened,
    /// Tokenizer and template.
    pub text: Text,
    /// The device with its sessions.
    pub engine: Engine,
    /// Tokens of a context.
    pub context: usize,
}

impl EngineArgs {
    /// Opens and loads everything.
    pub fn load(&self) -> Result<Loaded> {
        let opened = self.source.open()?;
        let file = opened.gguf.as_ref().context("random weights have no tokenizer")?;
        let text = Text::new(file)?;
        let most = opened.model.geometry().context;
        let context = match self.context {
            None => most.min(DEFAULT_CONTEXT),
            Some(0) => most,
            Some(n) => n.min(most),
        };
        let device = self.device.load(&opened, (1, context))?;
        let mode = self.source.draft_mode(self.draft_rows);
        let engine = Engine::new(device, opened.model.clone(), mode);
        Ok(Loaded { opened, text, engine, context })
    }
}
