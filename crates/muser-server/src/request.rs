//! A generation as the server runs it, whatever protocol asked for it.

use crate::app::Caller;
use crate::constrain::{Answer, Choice};
use crate::error::{ApiError, Kind};
use crate::fields::Fields;
use muser_core::sample::{MAX_LOGPROBS, SamplerOptions};
use muser_text::{Specials, Tokenizer};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::time::Duration;

/// What is continued.
#[derive(Clone, Debug)]
pub enum Input {
    /// A conversation, rendered by the model's template.
    Chat(Box<Chat>),
    /// Token ids as they are.
    Tokens(Vec<u32>),
}

/// A conversation.
#[derive(Clone, Debug, Default)]
pub struct Chat {
    /// Messages in OpenAI's form.
    pub messages: Value,
    /// Tools in OpenAI's form.
    pub tools: Option<Value>,
    /// Which messages the model may write.
    pub choice: Choice,
    /// Whether several calls may come in one turn.
    pub parallel: bool,
    /// Variables of the template.
    pub variables: Map<String, Value>,
    /// How much the model reasons.
    pub reasoning: Reasoning,
}

/// How much the model reasons.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reasoning {
    /// The level; none leaves it to the template.
    pub level: Option<Level>,
    /// Most tokens of reasoning.
    pub budget: Option<usize>,
}

/// Levels of the model, and off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Level {
    Off,
    Low,
    Medium,
    High,
    Extra,
}

impl Level {
    /// A level by any of its names.
    pub fn named(name: &str) -> Option<Level> {
        Some(match name {
            "none" | "off" | "disabled" => Level::Off,
            "minimal" | "low" => Level::Low,
            "medium" => Level::Medium,
            "high" => Level::High,
            "xhigh" | "max" => Level::Extra,
            _ => return None,
        })
    }

    /// The template's `reasoning_strength`. Without reasoning the system message still needs a level.
    pub fn strength(self) -> &'static str {
        match self {
            Level::Off | Level::Low => "low",
            Level::Medium => "medium",
            Level::High => "high",
            Level::Extra => "xhigh",
        }
    }
}

/// A generation.
#[derive(Clone, Debug)]
pub struct Request {
    /// What is continued.
    pub input: Input,
    /// How many independent continuations.
    pub n: usize,
    /// Most new tokens of each; none: what the context leaves.
    pub max_tokens: Option<usize>,
    /// Texts that end an answer.
    pub stop: Vec<String>,
    /// How tokens are chosen.
    pub sampling: SamplerOptions,
    /// Go on after an end token.
    pub ignore_end: bool,
    /// What the answer must look like.
    pub answer: Answer,
    /// Whether earlier work may be reused.
    pub reuse: bool,
    /// Most drafted tokens a step, 0 for plain decoding; none: what pays.
    pub draft_rows: Option<usize>,
    /// Whether each token is reported besides the text.
    pub report_tokens: bool,
    /// When to give up.
    pub timeout: Option<Duration>,
    /// Who asks; none within the server.
    pub caller: Option<Caller>,
}

impl Request {
    /// A request with every option at its default.
    pub fn new(input: Input) -> Self {
        Request {
            input,
            n: 1,
            max_tokens: None,
            stop: vec![],
            sampling: SamplerOptions::default(),
            ignore_end: false,
            answer: Answer::Free,
            reuse: true,
            draft_rows: None,
            report_tokens: false,
            timeout: None,
            caller: None,
        }
    }

    /// Reads what OpenAI's and llama.cpp's routes have in common.
    pub fn read_common(&mut self, fields: &mut Fields, tokenizer: &Tokenizer) -> Result<(), ApiError> {
        read_sampling(&mut self.sampling, fields)?;
        self.sampling.logit_bias = read_bias(fields.take("logit_bias"), tokenizer)?;
        self.stop = fields.strings("stop")?;
        self.ignore_end = fields.flag("ignore_eos")?.unwrap_or(false);
        self.reuse = fields.flag("cache_prompt")?.unwrap_or(true);
        self.draft_rows = fields.count("speculative.n_max")?;
        if let Some(seconds) = fields.number("timeout")? {
            let wrong = |_| ApiError::field("timeout", "timeout must be a number of seconds above 0");
            self.timeout = Some(Duration::try_from_secs_f32(seconds).map_err(wrong)?);
        }
        let format = fields.object("response_format")?.map(read_format).transpose()?;
        self.answer = format.unwrap_or_default();
        if let Some(schema) = fields.take("json_schema") {
            self.answer = Answer::JsonSchema(schema);
        }
        if let Some(grammar) = fields.string("grammar")?.filter(|g| !g.is_empty()) {
            self.answer = Answer::Gbnf(grammar);
        }
        Ok(())
    }
}

/// Complains about the first part of a message's content that is no text.
pub fn only_text(at: &str, content: Option<&Value>) -> Result<(), ApiError> {
    let parts = content.and_then(Value::as_array).into_iter().flatten();
    for (i, part) in parts.enumerate() {
        if let Some(kind) = part.get("type").and_then(Value::as_str).filter(|kind| !kind.ends_with("text")) {
            return Err(not_text(&format!("{at}[{i}]"), kind));
        }
    }
    Ok(())
}

/// The complaint about an image, a document or the like at `at`.
pub fn not_text(at: &str, kind: &str) -> ApiError {
    let why = format!("{at} is of type {kind:?}, and this server reads text only: send what it says as text");
    ApiError::field(at, why)
}

/// Sampling options under their usual names.
pub fn read_sampling(options: &mut SamplerOptions, fields: &mut Fields) -> Result<(), ApiError> {
    let mut set = |name: &str, at: &mut f32| -> Result<(), ApiError> {
        fields.number(name)?.into_iter().for_each(|x| *at = x);
        Ok(())
    };
    set("temperature", &mut options.temperature)?;
    set("top_p", &mut options.top_p)?;
    set("min_p", &mut options.min_p)?;
    set("typical_p", &mut options.typical_p)?;
    set("presence_penalty", &mut options.presence_penalty)?;
    set("frequency_penalty", &mut options.frequency_penalty)?;
    set("repetition_penalty", &mut options.repetition_penalty)?;
    set("repeat_penalty", &mut options.repetition_penalty)?;
    if let Some(k) = fields.integer("top_k")? {
        options.top_k = u32::try_from(k.max(0)).unwrap_or(u32::MAX);
    }
    if let Some(n) = fields.integer("repeat_last_n")? {
        options.repeat_last_n = i32::try_from(n).unwrap_or(i32::MAX);
    }
    // A negative seed asks for a random one.
    if let Some(seed) = fields.integer("seed")? {
        options.seed = u64::try_from(seed).ok();
    }
    Ok(())
}

/// Most biases of one request: each step adds them all, and some routes report them.
const MAX_BIASES: usize = 4096;

/// `{"id": bias}`, or llama.cpp's `[[id, bias]]` where false forbids. Instead of an id there may be a text: each of its
/// tokens gets the bias.
fn read_bias(value: Option<Value>, tokenizer: &Tokenizer) -> Result<Vec<(u32, f32)>, ApiError> {
    let wrong = |what: &str| ApiError::field("logit_bias", format!("logit_bias: {what}"));
    // One bias a token, the last one, so that a long list costs each step no more than a pass over the vocabulary.
    let mut biases = BTreeMap::new();
    let mut add = |id: Option<u32>, text: Option<&str>, bias: &Value| {
        let ids = match (id, text) {
            (Some(id), _) => vec![id],
            (None, Some(text)) => tokenizer.encode(text, Specials::Plain),
            (None, None) => return Err(wrong("a bias belongs to a token id or a text")),
        };
        let bias = match bias {
            Value::Bool(false) => f32::NEG_INFINITY,
            other => other.as_f64().ok_or_else(|| wrong("values must be numbers"))? as f32,
        };
        // OpenAI's lowest value means never.
        let bias = if bias <= -100.0 { f32::NEG_INFINITY } else { bias };
        biases.extend(ids.into_iter().map(|id| (id, bias)));
        Ok(())
    };
    match value {
        None => {}
        Some(Value::Object(map)) => {
            map.iter().try_for_each(|(key, b)| add(key.parse().ok(), Some(key), b))?
        }
        Some(Value::Array(all)) => {
            all.iter().try_for_each(|pair| match pair.as_array().map(Vec::as_slice) {
                Some([key, bias]) => {
                    add(key.as_u64().and_then(|id| u32::try_from(id).ok()), key.as_str(), bias)
                }
                _ => Err(wrong("must hold pairs of token id and bias")),
            })?
        }
        Some(_) => return Err(wrong("must be an object")),
    }
    if biases.len() > MAX_BIASES {
        return Err(wrong(&format!("{} tokens have a bias; at most {MAX_BIASES} may", biases.len())));
    }
    Ok(biases.into_iter().collect())
}

/// The number of alternatives whose log probabilities are asked for.
pub fn check_logprobs(name: &str, top: usize) -> Result<usize, ApiError> {
    if top > MAX_LOGPROBS {
        return Err(ApiError::field(name, format!("{name} may be at most {MAX_LOGPROBS}, and is {top}")));
    }
    Ok(top)
}

fn read_format(mut format: Fields) -> Result<Answer, ApiError> {
    let missing =
        |what: &str| ApiError::field("response_format", format!("response_format.{what} is missing"));
    let kind = format.string("type")?.ok_or_else(|| missing("type"))?;
    match kind.as_str() {
        "text" => Ok(Answer::Free),
        // llama.cpp's clients put a schema beside it.
        "json_object" => Ok(format.take("schema").map_or(Answer::JsonObject, Answer::JsonSchema)),
        "json_schema" => {
            let inner = format.object("json_schema")?;
            let schema = match inner {
                Some(mut inner) => inner.take("schema"),
                // The Responses API has the schema one level up.
                None => format.take("schema"),
            };
            schema.map(Answer::JsonSchema).ok_or_else(|| missing("json_schema.schema"))
        }
        "regex" => Ok(Answer::Regex(format.string("pattern")?.ok_or_else(|| missing("pattern"))?)),
        "grammar" => Ok(Answer::Gbnf(format.string("grammar")?.ok_or_else(|| missing("grammar"))?)),
        "lark" => Ok(Answer::Lark(format.string("grammar")?.ok_or_else(|| missing("grammar"))?)),
        other => Err(ApiError::field(
            "response_format",
            format!(
                "response_format.type is {other:?}; text, json_object, json_schema, regex, grammar and lark are known"
            ),
        )),
    }
}

/// The Responses API's `text.format`.
pub fn read_text_format(format: Fields) -> Result<Answer, ApiError> {
    read_format(format)
}

impl Reasoning {
    /// Reads every name under which clients ask for more or less reasoning.
    pub fn read(fields: &mut Fields) -> Result<Self, ApiError> {
        let mut out = Reasoning::default();
        for name in ["reasoning_strength", "reasoning_effort"] {
            if let Some(level) = fields.string(name)? {
                out.level = Some(level_of(name, &level)?);
            }
        }
        if let Some(mut inner) = fields.object("reasoning")? {
            if let Some(level) = inner.string("effort")? {
                out.level = Some(level_of("reasoning.effort", &level)?);
            }
            out.budget = inner.count("max_tokens")?.or(out.budget);
            if inner.flag("enabled")? == Some(false) {
                out.level = Some(Level::Off);
            }
        }
        if let Some(inner) = fields.object("thinking")? {
            out.read_thinking(inner)?;
        }
        for name in ["reasoning_budget", "reasoning_budget_tokens", "thinking_budget"] {
            // llama.cpp: -1 is no limit, 0 is off.
            match fields.integer(name)? {
                Some(0) => out.level = Some(Level::Off),
                Some(n) => out.budget = usize::try_from(n).ok(),
                None => {}
            }
        }
        if fields.flag("enable_thinking")? == Some(false) {
            out.level = Some(Level::Off);
        }
        Ok(out)
    }

    /// Anthropic's `thinking`.
    pub fn read_thinking(&mut self, mut inner: Fields) -> Result<(), ApiError> {
        match inner.string("type")?.as_deref() {
            Some("disabled") => self.level = Some(Level::Off),
            Some("enabled" | "adaptive") => self.budget = inner.count("budget_tokens")?,
            _ => {
                return Err(ApiError::field(
                    "thinking",
                    "thinking.type must be enabled, adaptive or disabled",
                ));
            }
        }
        Ok(())
    }
}

fn level_of(name: &str, level: &str) -> Result<Level, ApiError> {
    Level::named(level).ok_or_else(|| {
        let known = "none, minimal, low, medium, high, xhigh and max";
        ApiError::field(name, format!("{name} is {level:?}; {known} are known"))
    })
}

/// OpenAI's `tool_choice`.
pub fn read_choice(value: Option<Value>, tools: Option<&Value>) -> Result<Choice, ApiError> {
    let wrong = |why: String| ApiError::field("tool_choice", why);
    let choice = match &value {
        None => return Ok(Choice::Auto),
        Some(Value::String(word)) => match word.as_str() {
            "auto" => Choice::Auto,
            "none" => Choice::None,
            "required" | "any" => Choice::Required,
            other => {
                return Err(wrong(format!(
                    "tool_choice is {other:?}; auto, none, required or a function are known"
                )));
            }
        },
        Some(object) => {
            let function = object.get("function").unwrap_or(object);
            let name = function.get("name").and_then(Value::as_str);
            Choice::Named(
                name.ok_or_else(|| wrong("tool_choice.function.name is missing".into()))?.to_string(),
            )
        }
    };
    let offered = |name: &str| {
        let all = tools.and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        all.iter().any(|t| t.get("function").unwrap_or(t).get("name").and_then(Value::as_str) == Some(name))
    };
    match &choice {
        Choice::Named(name) if !offered(name) => {
            Err(wrong(format!("tool_choice names {name:?}, which is not among the tools")))
        }
        Choice::Required if tools.is_none() => {
            Err(wrong("tool_choice is required, but there are no tools".into()))
        }
        _ => Ok(choice),
    }
}

impl From<muser_core::sample::SampleError> for ApiError {
    fn from(error: muser_core::sample::SampleError) -> Self {
        ApiError::new(Kind::Invalid, error.to_string())
    }
}
