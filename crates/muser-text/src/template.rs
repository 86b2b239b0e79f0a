//! The model's chat template, rendered by minijinja as transformers renders it with jinja2.

use crate::rendered::{Rendered, hide, hide_map};
use crate::{TextError, python};
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

/// Widest indentation that `tojson` writes.
const MAX_INDENT: usize = 16;

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
        environment.set_formatter(|out, state, value| match f64::try_from(value.clone()) {
            Ok(x) if value.kind() == ValueKind::Number && !value.is_integer() => {
                out.write_str(&python::float(x)).map_err(Error::from)
            }
            _ => minijinja::escape_formatter(out, state, value),
        });
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
    /// variables, such as `add_generation_prompt`, `reasoning_strength` and `current_date`. What they spell stays text.
    pub fn render(
        &self,
        messages: &Json,
        tools: Option<&Json>,
        kwargs: &Map<String, Json>,
    ) -> Result<Rendered, TextError> {
        let mut context = Map::new();
        context.insert("messages".into(), hide(messages));
        context.insert("tools".into(), tools.map_or(Json::Null, hide));
        context.insert("bos_token".into(), Json::from(self.bos.as_str()));
        context.extend(hide_map(kwargs));
        let failed = |e: Error| TextError::Template(e.detail().map_or_else(|| e.to_string(), str::to_string));
        let template = self.environment.get_template("chat").map_err(failed)?;
        let mut text = Bounded::default();
        template.render_captured_to(Value::from(Serde(context)), &mut text).map_err(|error| match error.kind() {
            ErrorKind::WriteFailure => {
                TextError::Template(format!("the prompt is longer than {MAX_RENDERED} bytes"))
            }
            ErrorKind::OutOfFuel => TextError::Template(format!(
                "rendering takes more than {FUEL} steps: fewer messages, or a template without an endless loop"
            )),
            _ => failed(error),
        })?;
        String::from_utf8(text.0).map(Rendered::new).map_err(|e| TextError::Template(e.to_string()))
    }
}

/// transformers' `tojson`: json.dumps with `ensure_ascii=False`, `", "` and `": "` between items; `indent` as given.
fn to_json(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    options.assert_all_used()?;
    let mut out = vec![];
    let format = python::Json::indented(indent.map(|n| n.min(MAX_INDENT)));
    value
        .serialize(&mut serde_json::Serializer::with_formatter(&mut out, format))
        .map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))?;
    let text = String::from_utf8_lossy(&out).into_owned();
    Ok(if value.kind() == ValueKind::Undefined { Value::from("null") } else { Value::from(text) })
}

/// Text of a bounded length.
#[derive(Default)]
struct Bounded(Vec<u8>);

impl std::io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_RENDERED {
            return Err(std::io::ErrorKind::FileTooLarge.into());
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
