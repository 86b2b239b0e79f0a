//! `muser template`: conversations through the model's chat template.

use crate::open::ModelArgs;
use crate::text::Text;
use crate::{input, output};
use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::{Map, Value as Json, json};
use std::io::Write;
use std::path::PathBuf;

/// Render conversations on standard input with the model's chat template
///
/// Each line is one JSON object {"messages": [...], "tools": [...] or null, "kwargs": {...}}, passed to the template as it
/// is; kwargs are the template's variables, such as add_generation_prompt or reasoning_strength. Each line's text is
/// printed as a JSON string. A line that can't be rendered prints {"error": "..."}, and the exit code is then 1.
#[derive(Args)]
pub struct Template {
    #[command(flatten)]
    model: ModelArgs,
    /// Use this template instead of the model's
    #[arg(long, value_name = "FILE")]
    template: Option<PathBuf>,
}

impl Template {
    /// Runs the command.
    pub fn run(self) -> Result<()> {
        let mut text = Text::new(&self.model.gguf()?)?;
        if let Some(file) = &self.template {
            text.set_template(&input::text_file(file)?)?;
        }
        let template = text.template()?;
        let mut out = std::io::stdout().lock();
        let (mut lines, mut failed) = (0, 0);
        for line in input::json_lines(&input::stdin_text()?) {
            lines += 1;
            let rendered = line.and_then(|conversation| {
                let (messages, tools, kwargs) = parts(&conversation)?;
                Ok(template.render(messages, tools, &kwargs)?.text())
            });
            let printed = rendered.map(Json::from).unwrap_or_else(|error| {
                failed += 1;
                json!({ "error": output::chain(&error) })
            });
            writeln!(out, "{printed}")?;
        }
        match failed {
            0 => Ok(()),
            _ => bail!("{failed} of {lines} conversations could not be rendered"),
        }
    }
}

type Parts<'a> = (&'a Json, Option<&'a Json>, Map<String, Json>);

fn parts(conversation: &Json) -> Result<Parts<'_>> {
    let messages = conversation.get("messages").context("a line needs the key \"messages\"")?;
    let kwargs = match conversation.get("kwargs") {
        None | Some(Json::Null) => Map::new(),
        Some(Json::Object(kwargs)) => kwargs.clone(),
        Some(other) => bail!("\"kwargs\" must be an object, not {other}"),
    };
    Ok((messages, conversation.get("tools").filter(|tools| !tools.is_null()), kwargs))
}
