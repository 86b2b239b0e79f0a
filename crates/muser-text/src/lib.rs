//! Tokenizer, chat template, and the parser of channels and tool calls.

mod atem;
mod bars;
mod bpe;
pub mod channels;
mod header;
pub mod messages;
mod python;
mod rendered;
pub mod split;
pub mod template;
pub mod tokenizer;
mod turn;
mod types;

pub use channels::{ChannelParser, Event, Message, ToolCall, parse_message};
pub use rendered::Rendered;
pub use template::ChatTemplate;
pub use tokenizer::{Detokenizer, Specials, Tokenizer, Vocab};

use muser_format::FormatError;
use thiserror::Error;

/// What is wrong with a vocabulary, a template or what it is given.
#[derive(Debug, Error)]
pub enum TextError {
    /// The model file.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The tokenizer's tables.
    #[error("the file's tokenizer: {0}")]
    Vocabulary(String),
    /// The chat template refused its input or is broken.
    #[error("chat template: {0}")]
    Template(String),
    /// Messages or tools of a request.
    #[error("{0}")]
    Messages(String),
}
