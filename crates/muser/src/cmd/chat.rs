//! `muser chat`: a conversation in the terminal.

mod command;
mod editor;

use crate::cmd::run::Run;
use crate::engine::{EngineArgs, Loaded};
use crate::generate::{Finish, Stats, generate};
use crate::prompt::{Think, render};
use crate::sampling::SamplingArgs;
use crate::screen::{self, Screen};
use crate::turn::{Turn, message_json};
use crate::{input, output};
use anyhow::{Context, Result};
use clap::Args;
use command::Command;
use editor::{Editor, Line};
use muser_core::Session;
use muser_core::sample::SamplerOptions;
use muser_core::stop::StopStrings;
use serde_json::{Value as Json, json};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Chat in the terminal; this is what `muser` alone does
#[derive(Args)]
pub struct Chat {
    /// System message
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// How long to reason [default: the template's, high]
    #[arg(long, value_enum)]
    think: Option<Think>,
    /// Tools to offer, a JSON array in OpenAI's form; you type their results
    #[arg(long, value_name = "FILE")]
    tools: Option<PathBuf>,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    engine: EngineArgs,
}

/// A running conversation.
struct Conversation {
    loaded: Loaded,
    options: SamplerOptions,
    session: Option<Session>,
    system: Option<String>,
    think: Option<Think>,
    tools: Option<Json>,
    /// Messages after the system message.
    messages: Vec<Json>,
    last: Option<Stats>,
    interrupted: Arc<AtomicBool>,
}

impl Chat {
    /// Answers one message where there is no terminal to chat in.
    pub fn answer_once(self, prompt: &str) -> Result<()> {
        let Chat { system, think, tools, sampling, engine } = self;
        let (max_tokens, stop) = (None, vec![]);
        let run = Run {
            prompt: vec![],
            file: vec![],
            system,
            think,
            tools,
            raw: false,
            max_tokens,
            stop,
            json: false,
            sampling,
            engine,
        };
        run.answer(prompt)
    }

    /// Runs the command until the user leaves.
    pub fn run(self) -> Result<()> {
        let tools = self.tools.as_deref().map(input::tools_file).transpose()?;
        let loaded = self.engine.load()?;
        loaded.text.template()?;
        let options = self.sampling.options(loaded.opened.gguf.as_deref())?;
        let interrupted = Arc::new(AtomicBool::new(false));
        let flag = interrupted.clone();
        ctrlc::set_handler(move || {
            // A pass that takes long must not hold the user: the second Ctrl-C ends the program.
            if flag.swap(true, Ordering::Relaxed) {
                eprint!("{}", screen::PLAIN);
                std::process::exit(130);
            }
        })
        .context("cannot watch for Ctrl-C")?;
        let mut chat = Conversation {
            loaded,
            options,
            session: None,
            system: self.system,
            think: self.think,
            tools,
            messages: vec![],
            last: None,
            interrupted,
        };
        chat.banner();
        let mut editor = Editor::new()?;
        loop {
            let call = chat.open_call();
            let prompt = call.as_ref().map_or("> ".to_string(), |name| format!("result of {name}> "));
            match editor.read(&prompt)? {
                Line::End => return Ok(()),
                Line::Nothing => {}
                Line::Text(text) if text.starts_with('/') => match Command::parse(&text) {
                    Ok(Command::Quit) => return Ok(()),
                    Ok(command) => {
                        if let Err(error) = chat.command(command) {
                            eprintln!("error: {}", output::chain(&error));
                        }
                    }
                    Err(error) => eprintln!("error: {error}"),
                },
                Line::Text(text) => {
                    let before = chat.messages.len();
                    chat.messages.push(match call {
                        None => json!({ "role": "user", "content": text }),
                        Some(name) => json!({ "role": "tool", "name": name, "content": text }),
                    });
                    if chat.open_call().is_none()
                        && let Err(error) = chat.answer()
                    {
                        chat.messages.truncate(before);
                        eprintln!("error: {}", output::chain(&error));
                    }
                }
            }
        }
    }
}

impl Conversation {
    fn banner(&self) {
        let info = self.loaded.engine.info();
        let opened = &self.loaded.opened;
        let drafter = opened.drafter.as_ref().and_then(|d| d.file_name());
        eprintln!(
            "{} on {}{}\n/help lists commands, Ctrl-C stops an answer, Ctrl-D leaves.",
            opened.name,
            info.name,
            drafter.map_or(String::new(), |d| format!(", drafts by {}", d.to_string_lossy()))
        );
    }

    /// The first tool call whose result is still missing.
    fn open_call(&self) -> Option<String> {
        let last = self.messages.iter().rposition(|m| m["role"] == "assistant")?;
        let calls = self.messages[last]["tool_calls"].as_array()?;
        let results = self.messages.len() - last - 1;
        calls.get(results)?["function"]["name"].as_str().map(str::to_string)
    }

    /// Generates the assistant's turn and adds it to the conversation.
    fn answer(&mut self) -> Result<()> {
        let system = self.system.as_ref().map(|text| json!({ "role": "system", "content": text }));
        let messages: Vec<Json> = system.into_iter().chain(self.messages.iter().cloned()).collect();
        let prompt = render(&self.loaded.text, &messages, self.tools.as_ref(), self.think)?;
        let mut session = self.continued(&prompt.ids)?;
        self.interrupted.store(false, Ordering::Relaxed);
        let mut screen = Screen::new(true);
        let mut turn = Turn::new(self.tools.as_ref(), prompt.recipient, StopStrings::default());
        let flag = self.interrupted.clone();
        let result = generate(&mut self.loaded, &mut session, None, Some(&flag), &mut |text, special| {
            turn.push(text, special, &mut |event| screen.show(event)) && !screen.is_broken()
        });
        let message = turn.finish(&mut |event| screen.show(event));
        screen.finish(false)?;
        let generation = match result {
            Ok(generation) => generation,
            Err(error) => {
                self.loaded.engine.close(session);
                return Err(error);
            }
        };
        self.session = Some(session);
        match generation.finish {
            Finish::Interrupted => eprintln!("(stopped)"),
            Finish::Context => eprintln!(
                "(the context of {} tokens is full: /clear starts anew, --context gives more)",
                self.loaded.context
            ),
            _ => {}
        }
        self.interrupted.store(false, Ordering::Relaxed);
        self.last = Some(generation.stats);
        let mut message = message_json(&message);
        if let Some(fields) = message.as_object_mut() {
            fields.remove("finished");
            fields.retain(|_, value| !value.is_null() && value.as_array().is_none_or(|a| !a.is_empty()));
            // Interrupted before its first word: as if it had not been asked.
            if fields.len() == 1 {
                self.messages.pop();
                return Ok(());
            }
        }
        self.messages.push(message);
        Ok(())
    }

    /// A session that holds what `ids` shares with the last one, and waits with the rest.
    fn continued(&mut self, ids: &[u32]) -> Result<Session> {
        if let Some(mut session) = self.session.take() {
            // At least one token must be computed anew, for its logits.
            let shared = session.tokens().iter().zip(ids).take_while(|(a, b)| a == b).count();
            let keep = shared.min(ids.len().saturating_sub(1));
            if self.loaded.engine.rewind(&mut session, keep) {
                session.sampler().set_options(self.options.clone())?;
                session.push(&ids[keep..]);
                return Ok(session);
            }
            self.loaded.engine.close(session);
        }
        let mut session = self.loaded.engine.session(self.loaded.context, self.options.clone())?;
        session.push(ids);
        Ok(session)
    }

    fn command(&mut self, command: Command) -> Result<()> {
        match command {
            Command::Help => eprint!("{}", command::HELP),
            Command::Clear => self.messages.clear(),
            Command::System(text) => {
                self.system = (!text.is_empty()).then_some(text);
                eprintln!(
                    "(the next answer uses {})",
                    if self.system.is_some() { "this system message" } else { "no system message" }
                );
            }
            Command::Think(think) => self.think = Some(think),
            Command::Tools(None) => self.tools = None,
            Command::Tools(Some(file)) => self.tools = Some(input::tools_file(&file)?),
            Command::File(file) => {
                let text = input::text_file(&file)?;
                self.messages.push(json!({ "role": "user", "content": text }));
                eprintln!(
                    "({} characters of {} stand before your next message)",
                    text.chars().count(),
                    file.display()
                );
            }
            Command::Save(file) => {
                let saved = json!({ "system": self.system, "messages": self.messages, "tools": self.tools });
                std::fs::write(&file, format!("{saved:#}\n"))
                    .with_context(|| format!("cannot write {}", file.display()))?;
            }
            Command::Load(file) => self.load(&file)?,
            Command::Retry => {
                let last = self
                    .messages
                    .iter()
                    .rposition(|m| m["role"] != "assistant")
                    .context("there is nothing to answer again")?;
                self.messages.truncate(last + 1);
                self.answer()?;
            }
            Command::Stats => match &self.last {
                Some(stats) => {
                    let used = self.session.as_ref().map_or(0, |s| s.tokens().len());
                    eprintln!("{}; context {used} of {}", stats.line(), self.loaded.context);
                }
                None => eprintln!("nothing was generated yet"),
            },
            Command::Quit => {}
        }
        Ok(())
    }

    fn load(&mut self, file: &std::path::Path) -> Result<()> {
        let saved = input::json_file(file)?;
        let messages = saved["messages"]
            .as_array()
            .with_context(|| format!("{} has no \"messages\"", file.display()))?;
        let system = saved["system"].as_str().map(str::to_string);
        let all: Vec<Json> = messages.clone();
        muser_text::messages::normalize(&Json::from(all.clone()), None)
            .with_context(|| format!("{}: its messages can't be used", file.display()))?;
        self.messages = all;
        self.system = system;
        self.tools = saved.get("tools").filter(|t| t.is_array()).cloned();
        eprintln!("({} messages)", self.messages.len());
        Ok(())
    }
}
