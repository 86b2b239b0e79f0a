//! Constrained decoding: what a request's schema, grammar and tools allow, token by token.
//!
//! Grammars are llguidance's. One grammar describes one message of the turn, header and all; the free channels
//! (reasoning, and answers without a schema) are left alone from their `<|message|>` on, so they cost nothing.

mod gbnf;
mod message;
mod tools;
mod turn;

pub use message::{Answer, Choice, MessageGrammar};
pub use turn::{NoMoreReasoning, Turn};

use llguidance::api::TopLevelGrammar;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use muser_text::{Specials, Tokenizer};
use serde_json::Value;
use std::sync::{Arc, Mutex, MutexGuard};
use thiserror::Error;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// A grammar that was refused.
#[derive(Debug, Error)]
pub enum GrammarError {
    /// The request's own schema, regular expression or grammar.
    #[error("{what}: {why}")]
    #[allow(missing_docs)]
    Bad { what: &'static str, why: String },
    /// Too much is compiled already.
    #[error("the grammars of other requests take all the memory there is for them; try again in a moment")]
    Busy,
    /// The vocabulary cannot be constrained.
    #[error("the model's vocabulary cannot be constrained: {0}")]
    Vocabulary(String),
}

/// Compiled grammars that are kept: agents send the same tools with every request.
const KEPT: usize = 32;
/// Longest grammar text that is compiled.
const MAX_GRAMMAR: usize = 512 << 10;
/// Text of all grammars that are kept or in use. A compiled one takes up to 430 times its text.
const MAX_LIVE: usize = 1 << 20;
/// States that following a grammar may come to; each takes 1 to 3 KB.
const MAX_STATES: usize = 1 << 16;
/// Bytes of text that count as one.
const UNIT: usize = 1024;
/// Stack of the thread that compiles: llguidance works its way down through rules and references.
const STACK: usize = 256 << 20;

/// Deepest nesting of brackets in a Lark grammar.
const MAX_NESTING: usize = 256;
/// Most colons of a Lark grammar, and most references in a schema: each may begin a rule, or lead to one, that leads into the next.
const MAX_CHAIN: usize = 2048;
/// Most properties in a schema: each name is compared with all others.
const MAX_PROPERTIES: usize = 4096;

/// Refuses a Lark grammar that llguidance would need too much stack for.
fn check_lark(text: &str) -> Result<(), String> {
    let (mut open, mut deepest) = (0usize, 0);
    for c in text.bytes() {
        match c {
            b'(' | b'[' | b'{' => open += 1,
            b')' | b']' | b'}' => open = open.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(open);
    }
    if deepest > MAX_NESTING {
        return Err(format!("its brackets nest more than {MAX_NESTING} deep"));
    }
    // Which colons stand in strings only llguidance's own lexer knows.
    if text.matches(':').count() > MAX_CHAIN {
        return Err(format!("it has more than {MAX_CHAIN} rules, or colons that could begin one"));
    }
    Ok(())
}

/// The same for a JSON schema.
fn check_schema(schema: &Value) -> Result<(), String> {
    fn count(value: &Value, references: &mut usize, properties: &mut usize) {
        match value {
            Value::Object(map) => {
                *references += usize::from(map.contains_key("$ref"));
                let named =
                    ["properties", "patternProperties"].iter().filter_map(|k| map.get(*k)?.as_object());
                *properties += named.map(serde_json::Map::len).sum::<usize>();
                map.values().for_each(|value| count(value, references, properties));
            }
            Value::Array(all) => all.iter().for_each(|value| count(value, references, properties)),
            _ => {}
        }
    }
    let (mut references, mut properties) = (0, 0);
    count(schema, &mut references, &mut properties);
    if references > MAX_CHAIN {
        return Err(format!("it has more than {MAX_CHAIN} references ($ref)"));
    }
    if properties > MAX_PROPERTIES {
        return Err(format!("it has more than {MAX_PROPERTIES} properties"));
    }
    Ok(())
}

/// Ids of the tokens that structure a turn.
#[derive(Clone, Debug)]
pub struct ControlTokens {
    /// `<|message|>`
    pub message: u32,
    /// `<|eom|>`
    pub eom: u32,
    /// `<|eot|>`
    pub eot: u32,
    /// All that end a generation.
    pub ends: Vec<u32>,
    /// `<|start|>assistant`
    pub start: Vec<u32>,
}

/// A grammar that can be followed. Copies share it.
#[derive(Clone)]
pub struct Compiled(Arc<(Matcher, OwnedSemaphorePermit)>);

impl Compiled {
    /// A follower of its own, at the grammar's beginning.
    fn matcher(&self) -> Matcher {
        self.0.0.deep_clone()
    }
}

/// Compiles grammars for one vocabulary.
pub struct Grammars {
    factory: ParserFactory,
    control: ControlTokens,
    vocab: usize,
    kept: Mutex<Vec<(String, Compiled)>>,
    live: Arc<Semaphore>,
    /// One grammar at a time is compiled, so that hard ones cost no more than one core.
    compiling: Mutex<()>,
}

impl Grammars {
    /// Builds the vocabulary's trie. `vocab` is the model's, which may be larger than the tokenizer's.
    pub fn new(tokenizer: &Tokenizer, vocab: usize) -> Result<Self, GrammarError> {
        let vocabulary = |why: String| GrammarError::Vocabulary(why);
        let special =
            |text: &str| tokenizer.special(text).ok_or_else(|| vocabulary(format!("{text} is missing")));
        let control = ControlTokens {
            message: special("<|message|>")?,
            eom: special("<|eom|>")?,
            eot: special("<|eot|>")?,
            ends: tokenizer.end_ids().to_vec(),
            start: tokenizer.encode("<|start|>assistant", Specials::Parse),
        };
        // A special token's bytes begin with 0xff, which no text contains.
        let word = |id: u32| match tokenizer.token_bytes(id) {
            Some(text) if tokenizer.is_special(id) => [&[TokTrie::SPECIAL_TOKEN_MARKER], text].concat(),
            Some(bytes) => bytes.to_vec(),
            None => vec![],
        };
        let words: Vec<Vec<u8>> = (0..vocab as u32).map(word).collect();
        let trie = TokTrie::from(&TokRxInfo::new(vocab as u32, control.eot), &words);
        let env: llguidance::toktrie::TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = SlicedBiasComputer::general_slices();
        let mut factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices)
            .map_err(|e| vocabulary(e.to_string()))?;
        let live = Arc::new(Semaphore::new(MAX_LIVE / UNIT));
        factory.quiet();
        factory.limits_mut().verbose_errors = false;
        factory.limits_mut().max_lexer_states = MAX_STATES;
        Ok(Grammars { factory, control, vocab, kept: Mutex::new(vec![]), live, compiling: Mutex::new(()) })
    }

    /// The tokens that structure a turn.
    pub fn control(&self) -> &ControlTokens {
        &self.control
    }

    /// Tokens of the vocabulary.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// Bytes of a token.
    fn bytes(&self, token: u32) -> &[u8] {
        self.factory.tok_env().tok_trie().token(token)
    }

    fn kept(&self) -> MutexGuard<'_, Vec<(String, Compiled)>> {
        self.kept.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// The grammar if it was compiled before; it counts as used now.
    fn known(&self, lark: &str) -> Option<Compiled> {
        let mut kept = self.kept();
        let found = kept.iter().position(|(text, _)| text == lark)?;
        let found = kept.remove(found);
        kept.push(found);
        kept.last().map(|(_, compiled)| compiled.clone())
    }

    /// Room for a grammar, for which those make way that are in no request, the one used longest ago first.
    fn reserve(&self, lark: &str) -> Result<OwnedSemaphorePermit, GrammarError> {
        let units = lark.len().div_ceil(UNIT).max(1) as u32;
        let mut kept = self.kept();
        let unused = |kept: &[(String, Compiled)]| {
            kept.iter().position(|(_, compiled)| Arc::strong_count(&compiled.0) == 1)
        };
        if kept.len() >= KEPT {
            let oldest = unused(&kept).unwrap_or(0);
            kept.remove(oldest);
        }
        loop {
            if let Ok(permit) = self.live.clone().try_acquire_many_owned(units) {
                return Ok(permit);
            }
            let oldest = unused(&kept).ok_or(GrammarError::Busy)?;
            kept.remove(oldest);
        }
    }

    /// Compiles a grammar in llguidance's Lark dialect, or takes the one that was compiled before.
    pub fn compile(&self, lark: &str) -> Result<Compiled, GrammarError> {
        let bad = |why: String| GrammarError::Bad { what: "the grammar of this request", why };
        if lark.len() > MAX_GRAMMAR {
            return Err(bad(format!("it is {} bytes long; at most {MAX_GRAMMAR} are compiled", lark.len())));
        }
        if let Some(known) = self.known(lark) {
            return Ok(known);
        }
        let build = || {
            let mut matcher =
                Matcher::new(self.factory.create_parser(TopLevelGrammar::from_lark(lark.to_string())));
            if let Some(why) = matcher.get_error() {
                return Err(bad(why));
            }
            // A grammar that nothing can satisfy shows at its first mask.
            matcher.compute_mask().map_err(|e| bad(e.to_string()))?;
            Ok(matcher)
        };
        let _one = self.compiling.lock().unwrap_or_else(|e| e.into_inner());
        // Somebody else may have asked for the same.
        if let Some(known) = self.known(lark) {
            return Ok(known);
        }
        let room = self.reserve(lark)?;
        let matcher = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("grammar".into()).stack_size(STACK);
            let built = thread.spawn_scoped(scope, build).map_err(|e| bad(e.to_string()))?;
            built.join().unwrap_or_else(|_| Err(bad("it cannot be compiled; simplify it".into())))
        })?;
        let compiled = Compiled(Arc::new((matcher, room)));
        self.kept().push((lark.to_string(), compiled.clone()));
        Ok(compiled)
    }
}
