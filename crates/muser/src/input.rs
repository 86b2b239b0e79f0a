//! Reading what the user gives: standard input, files, JSON lines.

use anyhow::{Context, Result};
use serde_json::Value as Json;
use std::io::Read;
use std::path::Path;

/// All of standard input, which must be UTF-8.
pub fn stdin_text() -> Result<String> {
    let mut text = String::new();
    std::io::stdin()
        .read_to_string(&mut text)
        .context("standard input is not UTF-8 text; convert it, with iconv say")?;
    Ok(text)
}

/// A text file, which must be UTF-8.
pub fn text_file(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| {
        format!("cannot read {} as UTF-8 text; check its path, or convert it with iconv", path.display())
    })
}

/// A JSON file.
pub fn json_file(path: &Path) -> Result<Json> {
    let text = text_file(path)?;
    serde_json::from_str(&text)
        .with_context(|| format!("{} is not JSON; mend it at the place that follows", path.display()))
}

/// The JSON value of each line that is not empty, or why a line is none.
pub fn json_lines(text: &str) -> impl Iterator<Item = Result<Json>> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines.map(|(i, line)| {
        serde_json::from_str(line)
            .with_context(|| format!("line {} is not JSON; each line must be one JSON value", i + 1))
    })
}

/// A JSON file with an array of tools.
pub fn tools_file(path: &Path) -> Result<Json> {
    let tools = json_file(path)?;
    if !tools.is_array() {
        anyhow::bail!("{} must hold a JSON array of tools in OpenAI's form", path.display());
    }
    Ok(tools)
}
