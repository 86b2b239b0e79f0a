//! muser: the command line.

mod args;
mod cmd;
mod device;
mod engine;
mod generate;
mod heap;
mod input;
mod listing;
mod npy;
mod open;
mod output;
mod prompt;
mod receipt;
mod sampling;
mod screen;
mod text;
mod turn;

use std::process::ExitCode;

fn main() -> ExitCode {
    match args::Cli::read().run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if output::is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", output::chain(&error));
            ExitCode::FAILURE
        }
    }
}
