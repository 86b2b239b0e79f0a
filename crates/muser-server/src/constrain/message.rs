//! The grammar of one message of a turn: header, then a body that is constrained where the request says so.

use super::{Compiled, GrammarError, Grammars, MAX_PROPERTIES, check_lark, check_schema, gbnf, tools};
use llguidance::Matcher;
use serde_json::{Value, json};

/// Which messages a request allows besides reasoning.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum Choice {
    /// Answers and calls.
    #[default]
    Auto,
    /// Answers only.
    None,
    /// Calls only.
    Required,
    /// Calls of this tool only.
    Named(String),
}

/// What an answer must look like.
#[derive(Clone, Debug, PartialEq, Default)]
pub enum Answer {
    /// Anything.
    #[default]
    Free,
    /// A JSON object.
    JsonObject,
    /// JSON that fits a schema.
    JsonSchema(Value),
    /// Text that a regular expression matches as a whole.
    Regex(String),
    /// A grammar in llama.cpp's notation; its start is `root`.
    Gbnf(String),
    /// A grammar in llguidance's Lark dialect; its start is `start`.
    Lark(String),
}

/// What a message is addressed to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channel {
    /// `to=self`
    Reasoning,
    /// `to=user`
    Answer,
    /// A tool.
    Tool,
    /// Output without messages: a raw completion.
    Raw,
}

/// A compiled message grammar.
pub struct MessageGrammar {
    /// With and without reasoning; the same where only one is needed.
    reasoning: Compiled,
    silent: Compiled,
    free_answer: bool,
    calls: bool,
    parallel: bool,
}

impl Answer {
    /// As the body of a Lark rule, and the rules it needs.
    fn lark(&self) -> Result<String, GrammarError> {
        Ok(match self {
            Answer::Free => String::new(),
            Answer::JsonObject => format!("%json {}", json_options(json!({"type": "object"}))),
            Answer::JsonSchema(schema) => {
                if !schema.is_object() && !schema.is_boolean() {
                    let why = "it must be a JSON object".to_string();
                    return Err(GrammarError::Bad { what: "the JSON schema", why });
                }
                check_schema(schema).map_err(|why| GrammarError::Bad { what: "the JSON schema", why })?;
                format!("%json {}", json_options(schema.clone()))
            }
            Answer::Regex(regex) => format!("/{}/", escape_slashes(regex)),
            Answer::Gbnf(text) => format!("%lark {{\n{}\n}}", gbnf::to_lark(text)?),
            Answer::Lark(text) => {
                check_lark(text).map_err(|why| GrammarError::Bad { what: "the grammar", why })?;
                format!("%lark {{\n{text}\n}}")
            }
        })
    }

    /// The whole output as one grammar.
    pub fn compile(&self, grammars: &Grammars) -> Result<Compiled, GrammarError> {
        let lark = match self {
            Answer::Gbnf(text) => gbnf::to_lark(text)?,
            Answer::Lark(text) => {
                check_lark(text).map_err(|why| GrammarError::Bad { what: "the grammar", why })?;
                text.clone()
            }
            other => format!("start: {}", other.lark()?),
        };
        grammars.compile(&lark).map_err(|e| self.name(e))
    }

    fn name(&self, error: GrammarError) -> GrammarError {
        let named = match self {
            Answer::Free | Answer::JsonObject => return error,
            Answer::JsonSchema(_) => "the JSON schema",
            Answer::Regex(_) => "the regular expression",
            Answer::Gbnf(_) | Answer::Lark(_) => "the grammar",
        };
        match error {
            GrammarError::Bad { why, .. } => GrammarError::Bad { what: named, why },
            other => other,
        }
    }
}

/// llguidance's options for JSON: `oneOf` counts as `anyOf`, and white space is bounded, so that no model can loop in it.
pub(super) fn json_options(mut schema: Value) -> Value {
    if let Some(map) = schema.as_object_mut() {
        let options = json!({"whitespace_pattern": r"[ \t\n\r]{1,40}", "coerce_one_of": true});
        map.insert("x-guidance".into(), options);
    }
    schema
}

/// A regular expression between the slashes of a Lark regex.
fn escape_slashes(regex: &str) -> String {
    let mut out = String::with_capacity(regex.len());
    let mut escaped = false;
    for c in regex.chars() {
        match c {
            '/' if !escaped => out.push_str("\\/"),
            // A regex literal ends at the line's end.
            '\n' => out.push_str("\\n"),
            c => out.push(c),
        }
        escaped = c == '\\' && !escaped;
    }
    out
}

impl MessageGrammar {
    /// Compiles what a request asks for; `None` where nothing is constrained. `tools` are in the template's form.
    /// `silent` turns say nothing to themselves; `budget` says that reasoning may be cut off.
    pub fn compile(
        grammars: &Grammars,
        tools: Option<&Value>,
        choice: &Choice,
        parallel: bool,
        answer: &Answer,
        silent: bool,
        budget: bool,
    ) -> Result<Option<Self>, GrammarError> {
        let functions = tools::functions(tools);
        if functions.is_empty() && *answer == Answer::Free {
            return Ok(None);
        }
        let offered: Vec<_> = match choice {
            Choice::None => vec![],
            Choice::Named(name) => functions.into_iter().filter(|f| f.name == *name).collect(),
            _ => functions,
        };
        if offered.iter().map(tools::Function::parameters).sum::<usize>() > MAX_PROPERTIES {
            let why = format!("they have more than {MAX_PROPERTIES} parameters");
            return Err(GrammarError::Bad { what: "the tools", why });
        }
        let answers = matches!(choice, Choice::Auto | Choice::None) || offered.is_empty();
        let body = answer.lark()?;
        let lark = |reasoning: bool, typed: bool| {
            let mut alternatives = vec![];
            let mut rules = String::new();
            if reasoning {
                alternatives.push("\" to=self\" <|message|>".to_string());
            }
            if answers {
                alternatives.push(format!(
                    "\" to=user\" <|message|> {}",
                    if body.is_empty() { "" } else { "answer" }
                ));
            }
            if answers && !body.is_empty() {
                rules.push_str(&format!("answer: {body}\n"));
            }
            for (i, function) in offered.iter().enumerate() {
                alternatives.push(function.lark(i, typed, &mut rules));
            }
            format!("start: {}\n{rules}{}", alternatives.join("\n  | "), tools::TEXT_RULE)
        };
        let compile = |reasoning: bool| {
            let strict = grammars.compile(&lark(reasoning, true));
            // A tool's schema is a help, not a demand: what cannot be compiled is left to the model.
            match strict {
                Err(GrammarError::Bad { .. }) if !offered.is_empty() => {
                    grammars.compile(&lark(reasoning, false))
                }
                other => other,
            }
            .map_err(|e| answer.name(e))
        };
        let reasoning = compile(!silent)?;
        let silent = if budget && !silent { compile(false)? } else { reasoning.clone() };
        Ok(Some(MessageGrammar {
            reasoning,
            silent,
            free_answer: body.is_empty(),
            calls: !offered.is_empty(),
            parallel,
        }))
    }

    pub(super) fn matcher(&self, silent: bool) -> Matcher {
        if silent { self.silent.matcher() } else { self.reasoning.matcher() }
    }

    /// The channel of a header such as ` to=self`.
    pub(super) fn channel(header: &[u8]) -> Channel {
        match header {
            b" to=self" => Channel::Reasoning,
            b" to=user" => Channel::Answer,
            _ => Channel::Tool,
        }
    }

    /// Whether a channel's bodies may say anything.
    pub(super) fn is_free(&self, channel: Channel) -> bool {
        channel == Channel::Reasoning || channel == Channel::Answer && self.free_answer
    }

    /// Whether another message may follow one of `channel`.
    pub(super) fn another_after(&self, channel: Channel) -> bool {
        match channel {
            Channel::Tool => self.parallel,
            _ => self.calls,
        }
    }
}
