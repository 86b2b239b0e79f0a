//! Byte-level BPE with special tokens, built from a GGUF file's vocabulary.

use crate::TextError;
use crate::bpe::{Bpe, Scratch};
use crate::split::split;
use aho_corasick::{AhoCorasick, MatchKind};
use hashbrown::{DefaultHashBuilder, HashMap, HashTable};
use muser_format::{Array, Gguf, Value};
use std::hash::BuildHasher;
use std::ops::Range;

/// What a file says of its tokens.
#[derive(Clone, Debug, Default)]
pub struct Vocab {
    /// Tokens by id, in GGUF's byte-level form (every byte is one printable character); special tokens as plain text.
    pub tokens: Vec<String>,
    /// ggml token types by id: 1 normal, 3 control, 4 user defined, 5 unused, 6 byte.
    pub types: Vec<i32>,
    /// Merges in order of rank, each `LEFT RIGHT`.
    pub merges: Vec<String>,
    /// Name of the split (`tokenizer.ggml.pre`).
    pub pre: String,
    /// Beginning of text.
    pub bos: Option<u32>,
    /// Tokens that end a generation.
    pub eos: Vec<u32>,
    /// Whether a prompt starts with `bos`.
    pub add_bos: bool,
}

/// Whether the text of a special token becomes that token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Specials {
    /// Yes: text that may hold them, such as what another program rendered.
    Parse,
    /// No: text from users, which must not be able to write control tokens.
    Plain,
}

/// Text to ids and back.
pub struct Tokenizer {
    /// Bytes of all tokens, one after the other, and where each ends.
    bytes: Vec<u8>,
    ends: Vec<usize>,
    kinds: Vec<Kind>,
    /// Normal tokens by their bytes: ids, the bytes are in `bytes`.
    whole: HashTable<u32>,
    hasher: DefaultHashBuilder,
    bpe: Bpe,
    specials: Option<AhoCorasick>,
    special_ids: Vec<u32>,
    bos: Option<u32>,
    end_ids: Vec<u32>,
}

/// What a token is to the encoder.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// Made by BPE.
    Normal,
    /// Control or user defined: found in text as it stands.
    Special,
    /// Never made from text.
    Unused,
}

impl Vocab {
    /// Reads `tokenizer.ggml.*`.
    pub fn from_gguf(file: &Gguf) -> Result<Vocab, TextError> {
        let model = file.str("tokenizer.ggml.model")?;
        if model != "gpt2" {
            return Err(TextError::Vocabulary(format!(
                "tokenizer.ggml.model is {model:?}; muser reads byte-level BPE (gpt2): use a Muse Glimmer file with its tokenizer"
            )));
        }
        let strings = |key: &str| match file.get(key) {
            Some(Value::Array(Array::Str(all))) => Ok(all.clone()),
            _ => Err(TextError::Vocabulary(format!(
                "{key} is missing or no array of strings; convert the file again"
            ))),
        };
        let tokens = strings("tokenizer.ggml.tokens")?;
        let id = |key: &str| file.get(key).and_then(Value::as_u64).filter(|id| (*id as usize) < tokens.len());
        let named = |name: &str| tokens.iter().position(|t| t == name).map(|id| id as u64);
        let ends = [
            id("tokenizer.ggml.eos_token_id"),
            id("tokenizer.ggml.eot_token_id"),
            named("<|end_of_text|>"),
            named("<|eot|>"),
        ];
        // The end of a message ends no turn, though converters have named it here.
        let ends = ends.into_iter().flatten().filter(|id| tokens[*id as usize] != "<|eom|>");
        let mut eos: Vec<u32> = ends.map(|id| id as u32).collect();
        eos.sort();
        eos.dedup();
        let types = match file.get("tokenizer.ggml.token_type") {
            Some(Value::Array(Array::I32(all))) => all.clone(),
            Some(Value::Array(array)) => {
                array.to_u64s().unwrap_or_default().into_iter().map(|t| t.min(9) as i32).collect()
            }
            _ => vec![],
        };
        Ok(Vocab {
            types,
            merges: strings("tokenizer.ggml.merges")?,
            pre: file.str("tokenizer.ggml.pre")?.to_string(),
            bos: id("tokenizer.ggml.bos_token_id").map(|id| id as u32),
            eos,
            add_bos: matches!(file.get("tokenizer.ggml.add_bos_token"), Some(Value::Bool(true))),
            tokens,
        })
    }
}

/// The byte that a character of the byte-level alphabet stands for (GPT-2's table: printable Latin-1 is itself, the other
/// bytes follow from U+0100 on).
fn byte_of(c: char) -> Option<u8> {
    let itself = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    match u32::from(c) {
        code @ 0..=0xff if itself(code as u8) => Some(code as u8),
        code @ 0x100..=0x143 => (0..=255u8).filter(|b| !itself(*b)).nth((code - 0x100) as usize),
        _ => None,
    }
}

/// Decoding table of the byte-level alphabet.
fn alphabet() -> [Option<u8>; 0x144] {
    std::array::from_fn(|code| char::from_u32(code as u32).and_then(byte_of))
}

/// Longest piece that is remembered within a text: longer ones rarely come again.
const MAX_REMEMBERED: usize = 64;
/// Most pieces that are remembered.
const MAX_MEMORY: usize = 1 << 16;

impl Tokenizer {
    /// Builds the tables.
    pub fn new(vocab: Vocab) -> Result<Self, TextError> {
        if vocab.pre != "llama4" && vocab.pre != "gpt-4o" {
            return Err(TextError::Vocabulary(format!(
                "tokenizer.ggml.pre is {:?}; muser knows the split llama4: use a Muse Glimmer file",
                vocab.pre
            )));
        }
        let alphabet = alphabet();
        // Appends the bytes that a text in byte-level form stands for.
        let plain = |text: &str, out: &mut Vec<u8>| {
            text.chars().try_for_each(|c| {
                out.push(alphabet.get(c as usize).copied().flatten()?);
                Some(())
            })
        };
        let (mut bytes, mut ends, mut kinds) = (vec![], vec![], vec![]);
        let (mut whole, hasher) =
            (HashTable::with_capacity(vocab.tokens.len()), DefaultHashBuilder::default());
        let mut of_byte = [None; 256];
        for (id, text) in (0u32..).zip(&vocab.tokens) {
            let kind = match vocab.types.get(id as usize) {
                Some(3 | 4) => Kind::Special,
                // Converters have typed control tokens as normal; no rank of the release looks like one.
                _ if text.len() > 4 && text.starts_with("<|") && text.ends_with("|>") => Kind::Special,
                Some(5) => Kind::Unused,
                _ => Kind::Normal,
            };
            let start = bytes.len();
            // A normal token outside the alphabet can't be made by BPE; it is its text.
            if kind != Kind::Normal || plain(text, &mut bytes).is_none() {
                bytes.truncate(start);
                bytes.extend_from_slice(text.as_bytes());
            }
            ends.push(bytes.len());
            kinds.push(kind);
            if kind == Kind::Normal {
                let token = &bytes[start..];
                if let [byte] = *token {
                    of_byte[byte as usize].get_or_insert(id);
                }
                let hash = |token: &[u8]| hasher.hash_one(token);
                if find(&whole, &hasher, &bytes, &ends, token).is_none() {
                    whole.insert_unique(hash(token), id, |id| {
                        hash(token_slice(&bytes, &ends, *id).unwrap_or_default())
                    });
                }
            }
        }
        let missing = of_byte.iter().position(Option::is_none);
        if let Some(byte) = missing {
            return Err(TextError::Vocabulary(format!(
                "no token stands for byte {byte}; the vocabulary is damaged: convert the file again"
            )));
        }
        let mut merges = Vec::with_capacity(vocab.merges.len());
        let mut text = vec![];
        for (rank, merge) in vocab.merges.iter().enumerate() {
            let ids = merge.split_once(' ').and_then(|(left, right)| {
                let id = |token: &[u8]| find(&whole, &hasher, &bytes, &ends, token);
                text.clear();
                plain(left, &mut text)?;
                let middle = text.len();
                plain(right, &mut text)?;
                Some((id(&text[..middle])?, id(&text[middle..])?, id(&text)?))
            });
            merges.push(ids.ok_or_else(|| {
                TextError::Vocabulary(format!(
                    "merge {rank} ({merge:?}) names tokens that do not exist: convert the file again"
                ))
            })?);
        }
        // An empty text would be found everywhere.
        let special =
            |id: &u32| kinds[*id as usize] == Kind::Special && !vocab.tokens[*id as usize].is_empty();
        let special_ids: Vec<u32> = (0..vocab.tokens.len() as u32).filter(special).collect();
        let texts = special_ids.iter().map(|id| &vocab.tokens[*id as usize]);
        let specials = match special_ids.is_empty() {
            true => None,
            false => Some(
                AhoCorasick::builder()
                    .match_kind(MatchKind::LeftmostLongest)
                    .build(texts)
                    .map_err(|e| TextError::Vocabulary(format!("special tokens: {e}")))?,
            ),
        };
        Ok(Tokenizer {
            bpe: Bpe::new(of_byte.map(Option::unwrap_or_default), merges.into_iter()),
            bytes,
            ends,
            kinds,
            whole,
            hasher,
            specials,
            special_ids,
            bos: vocab.bos.filter(|_| vocab.add_bos),
            end_ids: vocab.eos,
        })
    }

    /// Ids of a text. The beginning-of-text token is the caller's business ([`Tokenizer::bos`]).
    pub fn encode(&self, text: &str, specials: Specials) -> Vec<u32> {
        match specials {
            Specials::Parse => self.encode_between(text, self.find_specials(text)),
            Specials::Plain => self.encode_between(text, []),
        }
    }

    /// Where special tokens stand in a text.
    pub(crate) fn find_specials(&self, text: &str) -> impl Iterator<Item = (Range<usize>, u32)> {
        let found = self.specials.iter().flat_map(move |finder| finder.find_iter(text));
        found.map(|found| (found.range(), self.special_ids[found.pattern().as_usize()]))
    }

    /// Ids of a text in which these ranges, in order, are these tokens.
    pub(crate) fn encode_between(
        &self,
        text: &str,
        tokens: impl IntoIterator<Item = (Range<usize>, u32)>,
    ) -> Vec<u32> {
        let mut encoder = Encoder {
            tokenizer: self,
            ids: Vec::with_capacity(text.len() / 4 + 4),
            scratch: Scratch::default(),
            seen: HashMap::new(),
        };
        let mut at = 0;
        for (range, id) in tokens {
            encoder.push(&text[at..range.start]);
            encoder.ids.push(id);
            at = range.end;
        }
        encoder.push(&text[at..]);
        encoder.ids
    }

    /// Beginning of text, for prompts that are not rendered by the template, where the file asks for it.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// Whether a token ends a generation.
    pub fn is_end(&self, id: u32) -> bool {
        self.end_ids.contains(&id)
    }

    /// Tokens that end a generation.
    pub fn end_ids(&self) -> &[u32] {
        &self.end_ids
    }

    /// Bytes of a token; a special token's are its text.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        token_slice(&self.bytes, &self.ends, id)
    }

    /// Whether a token is special: markup, not text.
    pub fn is_special(&self, id: u32) -> bool {
        self.kinds.get(id as usize).is_some_and(|kind| *kind != Kind::Normal)
    }

    /// The special token with this text.
    pub fn special(&self, text: &str) -> Option<u32> {
        self.special_ids.iter().copied().find(|id| self.token_bytes(*id) == Some(text.as_bytes()))
    }

    /// Number of tokens.
    pub fn vocab_size(&self) -> usize {
        self.ends.len()
    }

    /// Bytes of a sequence of tokens; unknown ids give nothing.
    pub fn decode(&self, ids: &[u32]) -> Vec<u8> {
        ids.iter().filter_map(|id| self.token_bytes(*id)).flatten().copied().collect()
    }

    /// A detokeniser for one stream.
    pub fn decoder(&self) -> Detokenizer {
        Detokenizer::default()
    }
}

fn token_slice<'a>(bytes: &'a [u8], ends: &[usize], id: u32) -> Option<&'a [u8]> {
    let id = id as usize;
    let start = id.checked_sub(1).map_or(Some(0), |before| ends.get(before).copied())?;
    bytes.get(start..*ends.get(id)?)
}

fn find(
    whole: &HashTable<u32>,
    hasher: &DefaultHashBuilder,
    bytes: &[u8],
    ends: &[usize],
    token: &[u8],
) -> Option<u32> {
    whole.find(hasher.hash_one(token), |id| token_slice(bytes, ends, *id) == Some(token)).copied()
}

/// The ids of one text so far.
struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    ids: Vec<u32>,
    scratch: Scratch,
    /// Where in `ids` the tokens of a piece stand that was merged before.
    seen: HashMap<&'a [u8], Range<usize>>,
}

impl<'a> Encoder<'a> {
    fn push(&mut self, text: &'a str) {
        let t = self.tokenizer;
        for piece in split(text).map(str::as_bytes) {
            // A piece that is a token is that token, whatever the merges would make of it (ignore_merges of the release).
            if let Some(id) = find(&t.whole, &t.hasher, &t.bytes, &t.ends, piece) {
                self.ids.push(id);
            } else if let Some(before) = self.seen.get(piece) {
                self.ids.extend_from_within(before.clone());
            } else {
                let start = self.ids.len();
                t.bpe.encode(piece, &mut self.scratch, &mut self.ids);
                if piece.len() <= MAX_REMEMBERED && self.seen.len() < MAX_MEMORY {
                    self.seen.insert(piece, start..self.ids.len());
                }
            }
        }
    }
}

/// Tokens to text, piece by piece, never half a character.
#[derive(Clone, Debug, Default)]
pub struct Detokenizer {
    held: Vec<u8>,
}

impl Detokenizer {
    /// Text that is complete once `id` has come; invalid bytes become U+FFFD.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> String {
        self.held.extend_from_slice(tokenizer.token_bytes(id).unwrap_or_default());
        let mut out = String::new();
        let mut rest = &self.held[..];
        loop {
            match std::str::from_utf8(rest) {
                Ok(text) => {
                    out.push_str(text);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    out.push_str(&String::from_utf8_lossy(valid));
                    // No length means an unfinished character: it waits for its last bytes.
                    let Some(bad) = error.error_len() else {
                        rest = after;
                        break;
                    };
                    out.push('\u{fffd}');
                    rest = &after[bad..];
                }
            }
        }
        self.held = rest.to_vec();
        out
    }

    /// What is left at the end of a stream: an unfinished character becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.held)).into_owned()
    }
}
