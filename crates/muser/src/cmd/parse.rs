//! `muser parse`: what the model wrote, as a message.

use crate::input;
use crate::turn::message_json;
use anyhow::Result;
use clap::Args;
use std::io::Write;
use std::path::PathBuf;

/// Parse raw model output on standard input into a message
///
/// Standard input is what the model wrote after `<|start|>assistant`, control tokens as their text. The message is printed
/// as one JSON object: reasoning_content and content (text or null), tool_calls (arguments are objects) and finished
/// (whether the model ended its turn).
#[derive(Args)]
pub struct Parse {
    /// The tools that were offered, a JSON array in OpenAI's form: arguments get the types of their schemas
    #[arg(long, value_name = "FILE")]
    tools: Option<PathBuf>,
}

impl Parse {
    /// Runs the command.
    pub fn run(self) -> Result<()> {
        let tools = self.tools.as_deref().map(input::tools_file).transpose()?;
        let message = muser_text::channels::parse_message(&input::stdin_text()?, tools.as_ref());
        writeln!(std::io::stdout().lock(), "{}", message_json(&message))?;
        Ok(())
    }
}
