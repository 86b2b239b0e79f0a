//! The text side of a model file: tokenizer and chat template.

use anyhow::{Context, Result};
use muser_format::{Gguf, Value};
use muser_text::{ChatTemplate, Specials, Tokenizer, Vocab};

/// Tokenizer and, where the file has one, template.
pub struct Text {
    /// Text to ids and back.
    pub tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    bos: String,
}

impl Text {
    /// Reads both from a model file.
    pub fn new(file: &Gguf) -> Result<Self> {
        let vocab = Vocab::from_gguf(file)?;
        let bos = vocab.bos.and_then(|id| vocab.tokens.get(id as usize)).cloned().unwrap_or_default();
        let mut text = Text { tokenizer: Tokenizer::new(vocab)?, template: None, bos };
        if let Some(source) = file.get("tokenizer.chat_template").and_then(Value::as_str) {
            text.set_template(source)?;
        }
        Ok(text)
    }

    /// Puts another template in place of the file's.
    pub fn set_template(&mut self, source: &str) -> Result<()> {
        self.template = Some(ChatTemplate::new(source, &self.bos)?);
        Ok(())
    }

    /// The beginning-of-text token.
    pub fn bos_id(&self) -> Option<u32> {
        self.tokenizer.special(&self.bos)
    }

    /// The template, which chatting needs.
    pub fn template(&self) -> Result<&ChatTemplate> {
        self.template.as_ref().context(
            "the model file has no chat template (key tokenizer.chat_template); continue plain text with `run --raw`, or use a file that has one",
        )
    }

    /// Ids of a text that stands at the start of a sequence; special tokens are recognised, and the file's beginning
    /// token is put before it where the file asks for one and the text has none.
    pub fn encode_start(&self, text: &str) -> Vec<u32> {
        let mut ids = self.tokenizer.encode(text, Specials::Parse);
        if let Some(bos) = self.tokenizer.bos().filter(|bos| ids.first() != Some(bos)) {
            ids.insert(0, bos);
        }
        ids
    }
}
