//! The model's chat template, rendered by minijinja as transformers renders it with jinja2.

use crate::TextError;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, ValueKind};
use minijinja::{Environment, Error, ErrorKind, UndefinedBehavior, Value};
use serde::Serialize;
use serde_json::{Map, Value as Json};
use std::fmt::Write;

/// Longest text that a template may produce: far over any context, far under memory.
const MAX_RENDERED: usize = 64 << 20;
/// Instructions that a rendering may take, so that a hostile template ends.
const FUEL: u64 = 50_000_000;

/// A compiled chat template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    bos: String,
}

impl ChatTemplate {
    /// Compiles a template. `bos` is the text of the beginning-of-text token, which templates print first.
    pub fn new(source: &str, bos: &str) -> Result<Self, TextError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|e| TextError::Template(e.to_string()))?);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", to_json);
        environment.add_function("raise_exception", |text: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, text))
        });
        environment.add_function("strftime_now", |format: String| -> Result<String, Error> {
            let mut out = String::new();
            write!(out, "{}", chrono::Local::now().format(&format)).map_err(|_| {
                Error::new(ErrorKind::InvalidOperation, format!("strftime_now: bad format {format:?}"))
            })?;
            Ok(out)
        });
        environment
            .add_template_owned("chat", source.to_string())
            .map_err(|e| TextError::Template(format!("the file's chat template does not compile: {e:#}")))?;
        Ok(ChatTemplate { environment, source: source.to_string(), bos: bos.to_string() })
    }

    /// The template's text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders messages (as the template expects them, see [`crate::messages::normalize`]) and tools with the template's
    /// variables, such as `add_generation_prompt`, `reasoning_strength` and `current_date`.
    pub fn render(
        &self,
        messages: &Json,
        tools: Option<&Json>,
        kwargs: &Map<String, Json>,
    ) -> Result<String, TextError> {
        let mut context = Map::new();
        context.insert("messages".into(), messages.clone());
        context.insert("tools".into(), tools.cloned().unwrap_or(Json::Null));
        context.insert("bos_token".into(), Json::from(self.bos.as_str()));
        context.extend(kwargs.iter().map(|(k, v)| (k.clone(), v.clone())));
        let failed = |e: Error| TextError::Template(e.detail().map_or_else(|| e.to_string(), str::to_string));
        let template = self.environment.get_template("chat").map_err(failed)?;
        let text = template.render(Value::from(Serde(context))).map_err(failed)?;
        if text.len() > MAX_RENDERED {
            return Err(TextError::Template(format!(
                "the prompt is {} bytes long, {MAX_RENDERED} are allowed",
                text.len()
            )));
        }
        Ok(text)
    }
}

/// transformers' `tojson`: json.dumps with `ensure_ascii=False`, `", "` and `": "` between items; `indent` as given.
fn to_json(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    options.assert_all_used()?;
    let mut out = vec![];
    let failed = |e: serde_json::Error| Error::new(ErrorKind::BadSerialization, e.to_string());
    match indent {
        Some(n) => {
            let spaces = " ".repeat(n.min(16));
            let formatter = serde_json::ser::PrettyFormatter::with_indent(spaces.as_bytes());
            value
                .serialize(&mut serde_json::Serializer::with_formatter(&mut out, formatter))
                .map_err(failed)?;
        }
        None => value
            .serialize(&mut serde_json::Serializer::with_formatter(&mut out, PythonSpacing))
            .map_err(failed)?,
    }
    let text = String::from_utf8_lossy(&out).into_owned();
    Ok(if value.kind() == ValueKind::Undefined { Value::from("null") } else { Value::from(text) })
}

/// `", "` between items and `": "` after keys, as Python's json.dumps writes them.
struct PythonSpacing;

impl serde_json::ser::Formatter for PythonSpacing {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }
    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }
    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, out: &mut W) -> std::io::Result<()> {
        out.write_all(b": ")
    }
}
