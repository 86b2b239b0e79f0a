//! `muser run`: one prompt, one answer.

use crate::engine::EngineArgs;
use crate::generate::{Generation, generate};
use crate::input;
use crate::prompt::{Think, render};
use crate::sampling::SamplingArgs;
use crate::screen::Screen;
use crate::turn::{Turn, message_json};
use anyhow::{Result, bail};
use clap::Args;
use muser_core::stop::StopStrings;
use serde_json::{Value as Json, json};
use std::io::{IsTerminal, Write};
use std::path::PathBuf;

/// Answer one prompt
///
/// The answer goes to standard output, tool calls after it as JSON, one a line; reasoning (where it is a terminal) and
/// statistics go to standard error.
#[derive(Args)]
pub struct Run {
    /// The prompt; `-` stands for standard input, which is also read when nothing else is given
    pub(super) prompt: Vec<String>,
    /// Put the text of a file behind the prompt (repeatable)
    #[arg(short, long, value_name = "FILE")]
    pub(super) file: Vec<PathBuf>,
    /// System message
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    pub(super) system: Option<String>,
    /// How long to reason [default: the template's, high]
    #[arg(long, value_enum, conflicts_with = "raw")]
    pub(super) think: Option<Think>,
    /// Tools to offer, a JSON array in OpenAI's form
    #[arg(long, value_name = "FILE", conflicts_with = "raw")]
    pub(super) tools: Option<PathBuf>,
    /// Continue the prompt as it is, without the chat template; special tokens are recognised
    #[arg(long)]
    pub(super) raw: bool,
    /// Most new tokens [default: until the model ends or the context is full]
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) max_tokens: Option<u32>,
    /// End the answer before this text (repeatable)
    #[arg(long, value_name = "TEXT")]
    pub(super) stop: Vec<String>,
    /// Print one JSON object: text, message, token ids, finish, statistics
    #[arg(long)]
    pub(super) json: bool,
    #[command(flatten)]
    pub(super) sampling: SamplingArgs,
    #[command(flatten)]
    pub(super) engine: EngineArgs,
}

impl Run {
    /// Runs the command.
    pub fn run(self) -> Result<()> {
        let prompt = self.prompt()?;
        self.answer(&prompt)
    }

    /// Answers this prompt.
    pub fn answer(self, prompt: &str) -> Result<()> {
        let tools = self.tools.as_deref().map(input::tools_file).transpose()?;
        let mut loaded = self.engine.load()?;
        let options = self.sampling.options(loaded.opened.gguf.as_deref())?;
        let (ids, recipient) = if self.raw {
            (loaded.text.encode_start(prompt), None)
        } else {
            let mut messages = vec![];
            messages.extend(self.system.as_ref().map(|text| json!({ "role": "system", "content": text })));
            messages.push(json!({ "role": "user", "content": prompt }));
            let prompt = render(&loaded.text, &messages, tools.as_ref(), self.think)?;
            (prompt.ids, prompt.recipient)
        };
        if ids.is_empty() {
            bail!("the prompt is empty");
        }
        let mut session = loaded.engine.session(loaded.context, options)?;
        session.push(&ids);

        let mut raw = String::new();
        let mut screen = Screen::new(std::io::stderr().is_terminal());
        let mut stop = StopStrings::new(&self.stop)?;
        let mut turn = Turn::new(tools.as_ref(), recipient, stop.clone());
        let most = self.max_tokens.map(|n| n as usize);
        let generation = generate(&mut loaded, &mut session, most, None, &mut |text, special| {
            if self.raw {
                let text = stop.push(text);
                raw += &text;
                if !self.json {
                    screen.show(&muser_text::Event::Content(text));
                }
                return stop.hit().is_none() && !screen.is_broken();
            }
            raw += text;
            turn.push(text, special, &mut |event| {
                if !self.json {
                    screen.show(event)
                }
            }) && !screen.is_broken()
        })?;
        let mut message = Json::Null;
        if self.raw {
            let rest = stop.release();
            raw += &rest;
            if !self.json {
                screen.show(&muser_text::Event::Content(rest));
            }
        } else {
            message = message_json(&turn.finish(&mut |event| {
                if !self.json {
                    screen.show(event)
                }
            }));
        }
        if self.json {
            let Generation { tokens, finish, stats } = &generation;
            let report = json!({
                "model": loaded.opened.name,
                "device": loaded.engine.info().name,
                "seed": session.sampler().seed(),
                "text": raw,
                "message": message,
                "finish": finish.name(),
                "prompt_ids": ids,
                "ids": tokens,
                "stats": stats.json(),
            });
            writeln!(std::io::stdout().lock(), "{report}")?;
        } else {
            screen.finish(true)?;
        }
        eprintln!("{}", generation.stats.line());
        Ok(())
    }

    fn prompt(&self) -> Result<String> {
        let nothing = self.prompt.is_empty() && self.file.is_empty();
        if nothing && std::io::stdin().is_terminal() {
            bail!("there is no prompt: give it as an argument, with --file, or on standard input");
        }
        let stdin = if nothing || self.prompt.iter().any(|p| p == "-") {
            input::stdin_text()?
        } else {
            String::new()
        };
        let words: Vec<&str> =
            self.prompt.iter().map(|p| if p == "-" { &stdin } else { p.as_str() }).collect();
        let mut parts = vec![if nothing { stdin.clone() } else { words.join(" ") }];
        for file in &self.file {
            parts.push(input::text_file(file)?);
        }
        parts.retain(|part| !part.is_empty());
        Ok(parts.join("\n\n"))
    }
}
