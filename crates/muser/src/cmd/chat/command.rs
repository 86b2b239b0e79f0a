//! What the user may type behind a slash.

use crate::prompt::Think;
use clap::ValueEnum;
use std::path::PathBuf;

/// The list that /help shows.
pub const HELP: &str = "\
/clear             forget the conversation, keep the system message
/system TEXT       set the system message; without TEXT, remove it
/think LEVEL       reason low, medium, high, xhigh or off
/tools FILE        offer the tools of a JSON file; without FILE, none
/file FILE         put a file's text before the next message
/retry             answer the last message again
/save FILE         save the conversation as JSON
/load FILE         load a saved conversation
/stats             speed, drafts and context of the last answer
/quit              leave (or Ctrl-D)
A line that ends with \\ goes on in the next one, as does all between two lines of \"\"\".
";

/// A command.
#[derive(Debug, PartialEq, Eq)]
pub enum Command {
    Help,
    Clear,
    System(String),
    Think(Think),
    Tools(Option<PathBuf>),
    File(PathBuf),
    Retry,
    Save(PathBuf),
    Load(PathBuf),
    Stats,
    Quit,
}

impl Command {
    /// Reads a line that starts with a slash.
    pub fn parse(line: &str) -> Result<Command, String> {
        let (name, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let rest = rest.trim();
        let file = || match rest {
            "" => Err(format!("{name} needs the name of a file")),
            file => Ok(PathBuf::from(file)),
        };
        Ok(match name {
            "/help" | "/?" => Command::Help,
            "/clear" => Command::Clear,
            "/system" => Command::System(rest.to_string()),
            "/think" => {
                let level = Think::from_str(rest, true);
                Command::Think(level.map_err(|_| "/think takes low, medium, high, xhigh or off".to_string())?)
            }
            "/tools" => Command::Tools((!rest.is_empty()).then(|| rest.into())),
            "/file" => Command::File(file()?),
            "/retry" => Command::Retry,
            "/save" => Command::Save(file()?),
            "/load" => Command::Load(file()?),
            "/stats" => Command::Stats,
            "/quit" | "/exit" => Command::Quit,
            _ => return Err(format!("{name} is no command; /help lists them")),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_commands() {
        assert_eq!(Command::parse("/think Low"), Ok(Command::Think(Think::Low)));
        assert_eq!(Command::parse("/system  be  brief "), Ok(Command::System("be  brief".into())));
        assert_eq!(Command::parse("/system"), Ok(Command::System(String::new())));
        assert_eq!(Command::parse("/save a b.json"), Ok(Command::Save("a b.json".into())));
        assert_eq!(Command::parse("/tools"), Ok(Command::Tools(None)));
        for bad in ["/save", "/think", "/think maximal", "/nothing", "/"] {
            assert!(Command::parse(bad).is_err(), "{bad}");
        }
    }
}
