//! The commands and their dispatch.

use crate::cmd;
use anyhow::Result;
use clap::{CommandFactory, Parser, Subcommand};

/// Runs Muse Glimmer models. Without a command: a chat, or the answer to standard input where that is no terminal.
#[derive(Parser)]
#[command(name = "muser", version, args_conflicts_with_subcommands = true, max_term_width = 100)]
pub struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    Inspect(cmd::inspect::Inspect),
    Kernels(cmd::kernels::Kernels),
    Trace(cmd::trace::Trace),
    Logits(cmd::logits::Logits),
    Tokenize(cmd::tokenize::Tokenize),
    Template(cmd::template::Template),
    /// Print a completion script for a shell
    Completions {
        /// bash, elvish, fish, powershell or zsh
        shell: clap_complete::Shell,
    },
}

impl Cli {
    /// Runs the command.
    pub fn run(self) -> Result<()> {
        match self.command {
            Some(Command::Inspect(args)) => args.run(),
            Some(Command::Kernels(args)) => args.run(),
            Some(Command::Trace(args)) => args.run(),
            Some(Command::Logits(args)) => args.run(),
            Some(Command::Tokenize(args)) => args.run(),
            Some(Command::Template(args)) => args.run(),
            Some(Command::Completions { shell }) => {
                clap_complete::generate(shell, &mut Cli::command(), "muser", &mut std::io::stdout());
                Ok(())
            }
            None => Ok(()),
        }
    }
}
