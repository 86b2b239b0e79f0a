//! The model's side of text: tokenizer, template, grammars, and how a conversation becomes a prompt.

use crate::constrain::{Answer, Choice, Grammars, MessageGrammar};
use crate::error::ApiError;
use crate::request::{Chat, Level, only_text};
use muser_format::Gguf;
use muser_text::{ChatTemplate, Rendered, Specials, TextError, Tokenizer, Vocab};
use serde_json::{Map, Value};
use std::sync::Arc;

/// The header of an answer, committed to when the model is not to reason.
const ANSWER: &str = " to=user<|message|>";

/// Tokenizer, template and grammars of a model.
pub struct TextModel {
    /// The name that clients see.
    pub name: String,
    /// Text to ids and back.
    pub tokenizer: Tokenizer,
    /// The chat template.
    pub template: ChatTemplate,
    /// Constraints.
    pub grammars: Arc<Grammars>,
    /// Tokens that end the reasoning and begin a message; and the same with the header of an answer.
    pub end_reasoning: [Vec<u32>; 2],
    first_end: u32,
}

/// A conversation as a prompt.
pub struct Prompt {
    /// The prompt's text.
    pub rendered: Rendered,
    /// The prompt.
    pub tokens: Vec<u32>,
    /// Where other prompts are likely to part from this one.
    pub marks: Vec<usize>,
    /// Tools in the template's form.
    pub tools: Option<Value>,
    /// Whether the answer's header is part of the prompt.
    pub committed: bool,
    /// What the turn must follow.
    pub grammar: Option<MessageGrammar>,
}

impl TextModel {
    /// Reads a model file. `vocab` is the number of logits.
    pub fn from_gguf(file: &Gguf, name: String, vocab: usize) -> Result<Self, TextError> {
        let tokenizer = Tokenizer::new(Vocab::from_gguf(file)?)?;
        let bos = tokenizer.special("<|begin_of_text|>").map_or("", |_| "<|begin_of_text|>");
        let template = ChatTemplate::new(file.str("tokenizer.chat_template")?, bos)?;
        let grammars = Grammars::new(&tokenizer, vocab).map_err(|e| TextError::Vocabulary(e.to_string()))?;
        let next = "<|eom|><|start|>assistant";
        let end_reasoning = [next.to_string(), format!("{next}{ANSWER}")]
            .map(|text| tokenizer.encode(&text, Specials::Parse));
        let first_end = grammars.control().eot;
        Ok(TextModel { name, tokenizer, template, grammars: Arc::new(grammars), end_reasoning, first_end })
    }

    /// Renders a conversation and compiles what its answer must follow. With `free_calls`, tools alone ask for no grammar.
    pub fn prompt(&self, chat: &Chat, answer: &Answer, free_calls: bool) -> Result<Prompt, ApiError> {
        blocking(|| self.make_prompt(chat, answer, free_calls))
    }

    fn make_prompt(&self, chat: &Chat, answer: &Answer, free_calls: bool) -> Result<Prompt, ApiError> {
        for (i, message) in chat.messages.as_array().into_iter().flatten().enumerate() {
            only_text(&format!("messages[{i}].content"), message.get("content"))?;
        }
        let (messages, tools) = muser_text::messages::normalize(&chat.messages, chat.tools.as_ref())?;
        let mut variables = Map::new();
        variables.insert("add_generation_prompt".into(), true.into());
        if let Some(level) = chat.reasoning.level {
            variables.insert("reasoning_strength".into(), level.strength().into());
        }
        variables.extend(chat.variables.clone());
        let mut rendered = self.template.render(&messages, tools.as_ref(), &variables)?;
        let silent = chat.reasoning.level == Some(Level::Off);
        let budget = chat.reasoning.budget.is_some();
        let free = free_calls && chat.choice == Choice::Auto && *answer == Answer::Free;
        let grammar = match free {
            true => None,
            false => MessageGrammar::compile(
                &self.grammars,
                tools.as_ref(),
                &chat.choice,
                chat.parallel,
                answer,
                silent,
                budget,
            )?,
        };
        // A grammar forbids the reasoning header itself; without one, the answer's header is committed.
        let committed = silent && grammar.is_none();
        if committed {
            rendered.push(ANSWER);
        }
        let tokens = rendered.encode(&self.tokenizer);
        let system = tokens.iter().position(|t| *t == self.first_end).map(|at| at + 1);
        let marks = system.into_iter().chain([tokens.len()]).collect();
        Ok(Prompt { rendered, tokens, marks, tools, committed, grammar })
    }
}

/// Runs what may take long for a large body, so that the other connections of this thread go on meanwhile.
pub fn blocking<T>(work: impl FnOnce() -> T) -> T {
    tokio::task::block_in_place(work)
}
