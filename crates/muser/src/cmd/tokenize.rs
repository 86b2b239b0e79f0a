//! `muser tokenize`: text to token ids and back.

use crate::input;
use crate::open::ModelArgs;
use crate::text::Text;
use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use muser_text::Specials;
use serde_json::Value as Json;
use std::io::Write;

/// Turn text on standard input into token ids, or back
///
/// Standard input is one text, or JSON lines where every line is a JSON string: then each line is a text of its own. One
/// JSON list of ids is printed a text. With --decode each input line is a list of ids (JSON, or numbers separated by
/// commas or spaces), and its text is printed as a JSON string.
#[derive(Args)]
pub struct Tokenize {
    #[command(flatten)]
    model: ModelArgs,
    /// Ids to text
    #[arg(long)]
    decode: bool,
    /// How standard input is read
    #[arg(long, value_enum, default_value = "auto", conflicts_with = "decode")]
    input: Input,
    /// Text of special tokens is ordinary text
    #[arg(long, conflicts_with = "decode")]
    plain: bool,
    /// Put the beginning-of-text token first
    #[arg(long, conflicts_with = "decode")]
    bos: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Input {
    /// JSON lines if every line is a JSON string, else one text
    Auto,
    /// One text, to its last byte
    Text,
    /// One JSON string a line
    Json,
}

impl Tokenize {
    /// Runs the command.
    pub fn run(self) -> Result<()> {
        let text = Text::new(&self.model.gguf()?)?;
        let given = input::stdin_text()?;
        let mut out = std::io::stdout().lock();
        if self.decode {
            for (i, line) in given.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
                let ids =
                    ids(line, text.tokenizer.vocab_size()).with_context(|| format!("line {}", i + 1))?;
                let bytes = text.tokenizer.decode(&ids);
                writeln!(out, "{}", Json::from(String::from_utf8_lossy(&bytes)))?;
            }
            return Ok(());
        }
        let specials = if self.plain { Specials::Plain } else { Specials::Parse };
        let bos: Vec<u32> = if self.bos {
            vec![
                text.bos_id()
                    .context("this model has no beginning-of-text token (tokenizer.ggml.bos_token_id)")?,
            ]
        } else {
            vec![]
        };
        for text_given in self.texts(&given)? {
            let mut ids = bos.clone();
            ids.extend(text.tokenizer.encode(&text_given, specials));
            writeln!(out, "{}", Json::from(ids))?;
        }
        Ok(())
    }

    fn texts(&self, given: &str) -> Result<Vec<String>> {
        let strings = || -> Result<Vec<String>> {
            input::json_lines(given)
                .map(|line| match line? {
                    Json::String(text) => Ok(text),
                    other => bail!("{other} is no JSON string"),
                })
                .collect()
        };
        match self.input {
            Input::Json => strings(),
            Input::Auto => match strings() {
                Ok(texts) if !texts.is_empty() => Ok(texts),
                _ => Ok(vec![given.to_string()]),
            },
            Input::Text => Ok(vec![given.to_string()]),
        }
    }
}

/// `[1, 2]`, `1,2` or `1 2`; every id below `vocab`.
pub fn ids(list: &str, vocab: usize) -> Result<Vec<u32>> {
    let inner = list.trim();
    let inner = inner.strip_prefix('[').and_then(|l| l.strip_suffix(']')).unwrap_or(inner);
    let words = inner.split([',', ' ', '\t']).map(str::trim).filter(|w| !w.is_empty());
    let id = |word: &str| match word.parse::<u32>() {
        Ok(id) if (id as usize) < vocab => Ok(id),
        _ => bail!("{word:?} is no token id: give whole numbers from 0 to {}", vocab.saturating_sub(1)),
    };
    words.map(id).collect()
}

#[cfg(test)]
mod tests {
    use super::ids;

    #[test]
    fn lists_of_ids() {
        for list in ["[1, 22,3]", "1,22,3", " 1 22\t3 "] {
            assert_eq!(ids(list, 23).unwrap(), [1, 22, 3]);
        }
        assert_eq!(ids("[]", 1).unwrap(), [0u32; 0]);
        for list in ["-1", "1.5", "23", "one", "[1", "4294967296"] {
            assert!(ids(list, 23).is_err(), "{list}");
        }
    }
}
