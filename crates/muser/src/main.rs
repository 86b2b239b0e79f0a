//! muser: the command line.

mod args;
mod cmd;
mod device;
mod input;
mod listing;
mod npy;
mod open;
mod output;
mod text;

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    match args::Cli::parse().run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if output::is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", output::chain(&error));
            ExitCode::FAILURE
        }
    }
}
