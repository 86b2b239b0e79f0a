//! The commands and their dispatch.

use crate::{cmd, input};
use anyhow::Result;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use std::ffi::OsString;
use std::io::IsTerminal;

/// What `muser` says where there is neither a terminal nor any input.
const SHORT_HELP: &str = "\
muser runs Muse Glimmer models.

  muser                        chat, in a terminal
  muser run \"What is 2 + 2?\"   answer one prompt
  echo \"What is 2 + 2?\" | muser
  muser -m FILE.gguf           use your own model
  muser --help                 all commands
";

/// Runs Muse Glimmer models. Without a command: a chat, or the answer to standard input where that is no terminal.
#[derive(Parser)]
#[command(
    name = "muser",
    version,
    args_conflicts_with_subcommands = true,
    max_term_width = 100,
    override_usage = "muser [OPTIONS OF chat]\n       muser <COMMAND> [OPTIONS]",
    after_help = "`muser COMMAND --help` explains a command; `muser` alone takes the options of `muser chat`."
)]
pub struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    chat: cmd::chat::Chat,
}

/// Options with llama.cpp's `-ngl`, which would be read as `-n gl`, spelt out.
fn as_llama_cpp(args: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut args: Vec<OsString> = args.collect();
    let options = args.iter().position(|arg| arg == "--").unwrap_or(args.len());
    args[..options].iter_mut().filter(|arg| *arg == "-ngl").for_each(|arg| *arg = "--ngl".into());
    args
}

#[derive(Subcommand)]
enum Command {
    Chat(Box<cmd::chat::Chat>),
    Run(Box<cmd::run::Run>),
    Serve(Box<cmd::serve::Serve>),
    Inspect(cmd::inspect::Inspect),
    Kernels(cmd::kernels::Kernels),
    Trace(cmd::trace::Trace),
    Bench(cmd::bench::Bench),
    Perplexity(cmd::perplexity::Perplexity),
    Receipt(cmd::receipt::ReceiptArgs),
    Verify(cmd::verify::Verify),
    Logits(cmd::logits::Logits),
    Tokenize(cmd::tokenize::Tokenize),
    Template(cmd::template::Template),
    Parse(cmd::parse::Parse),
    Doctor(cmd::doctor::Doctor),
    #[command(hide = true)]
    Docs(cmd::docs::Docs),
    /// Print a completion script for a shell
    Completions {
        /// bash, elvish, fish, powershell or zsh
        shell: clap_complete::Shell,
    },
}

impl Cli {
    /// Reads the command line. The options of `chat` work without the command, but are listed there only.
    pub fn read() -> Self {
        let hide = |arg: clap::Arg| {
            let own = ["help", "version"].contains(&arg.get_id().as_str());
            arg.hide(!own)
        };
        let matches = Cli::command().mut_args(hide).get_matches_from(as_llama_cpp(std::env::args_os()));
        Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
    }

    /// Runs the command.
    pub fn run(self) -> Result<()> {
        match self.command {
            Some(Command::Chat(args)) => args.run(),
            Some(Command::Run(args)) => args.run(),
            Some(Command::Serve(args)) => args.run(),
            Some(Command::Inspect(args)) => args.run(),
            Some(Command::Kernels(args)) => args.run(),
            Some(Command::Trace(args)) => args.run(),
            Some(Command::Bench(args)) => args.run(),
            Some(Command::Perplexity(args)) => args.run(),
            Some(Command::Docs(args)) => args.run(),
            Some(Command::Doctor(args)) => args.run(),
            Some(Command::Receipt(args)) => args.run(),
            Some(Command::Verify(args)) => args.run(),
            Some(Command::Logits(args)) => args.run(),
            Some(Command::Tokenize(args)) => args.run(),
            Some(Command::Template(args)) => args.run(),
            Some(Command::Parse(args)) => args.run(),
            Some(Command::Completions { shell }) => {
                clap_complete::generate(shell, &mut Cli::command(), "muser", &mut std::io::stdout());
                Ok(())
            }
            None => self.alone(),
        }
    }

    /// A chat in a terminal; elsewhere the answer to standard input, or a short help where that is empty.
    fn alone(self) -> Result<()> {
        if std::io::stdin().is_terminal() && std::io::stdout().is_terminal() {
            return self.chat.run();
        }
        let prompt = input::stdin_text()?;
        if prompt.trim().is_empty() {
            print!("{SHORT_HELP}");
            return Ok(());
        }
        self.chat.answer_once(&prompt)
    }
}
