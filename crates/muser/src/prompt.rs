//! Conversations to token ids.

use crate::text::Text;
use anyhow::{Result, bail};
use clap::ValueEnum;
use muser_text::messages;
use serde_json::{Map, Value as Json};

/// How long the model reasons before it answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Think {
    Low,
    Medium,
    High,
    #[value(name = "xhigh")]
    XHigh,
    /// Not at all: the answer is begun for it
    Off,
}

impl Think {
    /// The name.
    pub fn name(self) -> &'static str {
        match self {
            Think::Low => "low",
            Think::Medium => "medium",
            Think::High => "high",
            Think::XHigh => "xhigh",
            Think::Off => "off",
        }
    }
}

/// A rendered conversation.
pub struct Prompt {
    /// Token ids.
    pub ids: Vec<u32>,
    /// The recipient whose header ends the prompt.
    pub recipient: Option<&'static str>,
}

/// Renders messages up to the assistant's turn.
pub fn render(text: &Text, messages: &[Json], tools: Option<&Json>, think: Option<Think>) -> Result<Prompt> {
    let (messages, tools) = messages::normalize(&Json::from(messages.to_vec()), tools)?;
    let mut kwargs = Map::new();
    kwargs.insert("add_generation_prompt".into(), true.into());
    if let Some(think) = think.filter(|t| *t != Think::Off) {
        kwargs.insert("reasoning_strength".into(), think.name().into());
    }
    let mut rendered = text.template()?.render(&messages, tools.as_ref(), &kwargs)?;
    let recipient = (think == Some(Think::Off)).then_some("user");
    if recipient.is_some() {
        rendered.push(" to=user<|message|>");
    }
    let ids = rendered.encode(&text.tokenizer);
    if ids.is_empty() {
        bail!("the chat template rendered nothing");
    }
    Ok(Prompt { ids, recipient })
}
