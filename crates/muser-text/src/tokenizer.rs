//! Byte-level BPE with special tokens, built from a GGUF file's vocabulary.

use crate::TextError;
use crate::split::split;
use aho_corasick::{AhoCorasick, MatchKind};
use muser_format::{Array, Gguf, Value};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

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
    /// Yes: rendered templates.
    Parse,
    /// No: text from users, which must not be able to write control tokens.
    Plain,
}

/// Text to ids and back.
pub struct Tokenizer {
    bytes: Vec<Vec<u8>>,
    special: Vec<bool>,
    whole: HashMap<Vec<u8>, u32>,
    /// (left, right) -> (rank, merged).
    merges: HashMap<(u32, u32), (u32, u32)>,
    of_byte: [u32; 256],
    specials: Option<AhoCorasick>,
    special_ids: Vec<u32>,
    vocab: Vocab,
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
        let mut eos: Vec<u32> = ends.into_iter().flatten().map(|id| id as u32).collect();
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

impl Tokenizer {
    /// Builds the tables.
    pub fn new(vocab: Vocab) -> Result<Self, TextError> {
        if vocab.pre != "llama4" && vocab.pre != "gpt-4o" {
            return Err(TextError::Vocabulary(format!(
                "tokenizer.ggml.pre is {:?}; muser knows the split llama4: use a Muse Glimmer file",
                vocab.pre
            )));
        }
        let alphabet: HashMap<char, u8> =
            (0..0x144).filter_map(char::from_u32).filter_map(|c| Some((c, byte_of(c)?))).collect();
        let plain = |text: &str| text.chars().map(|c| alphabet.get(&c).copied()).collect::<Option<Vec<u8>>>();
        let is_special = |id: usize| matches!(vocab.types.get(id), Some(3..=5));
        let mut t = Tokenizer {
            bytes: vec![],
            special: vec![],
            whole: HashMap::new(),
            merges: HashMap::new(),
            of_byte: [u32::MAX; 256],
            specials: None,
            special_ids: vec![],
            vocab: Vocab::default(),
        };
        for (id, text) in vocab.tokens.iter().enumerate() {
            let special = is_special(id);
            let bytes = if special {
                text.clone().into_bytes()
            } else {
                plain(text).unwrap_or_else(|| text.clone().into_bytes())
            };
            if special {
                t.special_ids.push(id as u32);
            } else {
                if let [byte] = bytes[..] {
                    t.of_byte[byte as usize] = id as u32;
                }
                t.whole.entry(bytes.clone()).or_insert(id as u32);
            }
            t.bytes.push(bytes);
            t.special.push(special);
        }
        if let Some(byte) = t.of_byte.iter().position(|id| *id == u32::MAX) {
            return Err(TextError::Vocabulary(format!(
                "no token stands for byte {byte}; the vocabulary is damaged"
            )));
        }
        for (rank, merge) in vocab.merges.iter().enumerate() {
            let pair = merge.split_once(' ').and_then(|(l, r)| Some((plain(l)?, plain(r)?)));
            let ids = pair.and_then(|(l, r)| {
                let merged = t.whole.get(&[&l[..], &r[..]].concat())?;
                Some(((*t.whole.get(&l)?, *t.whole.get(&r)?), *merged))
            });
            let Some((pair, merged)) = ids else {
                return Err(TextError::Vocabulary(format!(
                    "merge {rank} ({merge:?}) names tokens that do not exist"
                )));
            };
            t.merges.entry(pair).or_insert((rank as u32, merged));
        }
        let texts: Vec<&str> = t.special_ids.iter().map(|id| vocab.tokens[*id as usize].as_str()).collect();
        if !texts.is_empty() {
            let built = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(texts);
            t.specials = Some(built.map_err(|e| TextError::Vocabulary(format!("special tokens: {e}")))?);
        }
        t.vocab = vocab;
        Ok(t)
    }

    /// Ids of a text. The beginning-of-text token is the caller's business ([`Tokenizer::bos`]).
    pub fn encode(&self, text: &str, specials: Specials) -> Vec<u32> {
        let mut ids = Vec::with_capacity(text.len() / 3);
        let mut cache = HashMap::new();
        let mut at = 0;
        if let (Specials::Parse, Some(finder)) = (specials, &self.specials) {
            for found in finder.find_iter(text) {
                self.encode_plain(&text[at..found.start()], &mut ids, &mut cache);
                ids.push(self.special_ids[found.pattern().as_usize()]);
                at = found.end();
            }
        }
        self.encode_plain(&text[at..], &mut ids, &mut cache);
        ids
    }

    fn encode_plain<'a>(&self, text: &'a str, ids: &mut Vec<u32>, cache: &mut HashMap<&'a [u8], Vec<u32>>) {
        for piece in split(text).map(str::as_bytes) {
            // A piece that is a token is that token, whatever the merges would make of it (ignore_merges of the release).
            if let Some(id) = self.whole.get(piece) {
                ids.push(*id);
            } else if let Some(known) = cache.get(piece) {
                ids.extend(known);
            } else {
                let merged = self.merge(piece);
                ids.extend(&merged);
                // Long pieces rarely come again.
                if piece.len() <= 64 {
                    cache.insert(piece, merged);
                }
            }
        }
    }

    /// BPE of one piece: always the pair of lowest rank, the leftmost among equals. A heap of candidates over a linked list
    /// makes it n log n.
    fn merge(&self, piece: &[u8]) -> Vec<u32> {
        const NONE: usize = usize::MAX;
        let mut ids: Vec<u32> = piece.iter().map(|b| self.of_byte[*b as usize]).collect();
        let n = ids.len();
        let mut next: Vec<usize> = (1..n).chain([NONE]).collect();
        let mut prev: Vec<usize> = [NONE].into_iter().chain(0..n - 1).collect();
        let mut heap = BinaryHeap::new();
        let candidate = |ids: &[u32], left: usize, right: usize| {
            let (rank, merged) = self.merges.get(&(ids[left], ids[right]))?;
            Some(Reverse((*rank, left, right, *merged, ids[left], ids[right])))
        };
        (1..n).for_each(|i| heap.extend(candidate(&ids, i - 1, i)));
        while let Some(Reverse((_, left, right, merged, a, b))) = heap.pop() {
            // Stale: one of the two was merged since.
            if ids[left] != a || ids[right] != b || next[left] != right {
                continue;
            }
            ids[left] = merged;
            ids[right] = u32::MAX;
            next[left] = next[right];
            if next[left] != NONE {
                prev[next[left]] = left;
                heap.extend(candidate(&ids, left, next[left]));
            }
            if prev[left] != NONE {
                heap.extend(candidate(&ids, prev[left], left));
            }
        }
        ids.retain(|id| *id != u32::MAX);
        ids
    }

    /// Beginning of text, for prompts that are not rendered by the template, where the file asks for it.
    pub fn bos(&self) -> Option<u32> {
        self.vocab.bos.filter(|_| self.vocab.add_bos)
    }

    /// Whether a token ends a generation.
    pub fn is_end(&self, id: u32) -> bool {
        self.vocab.eos.contains(&id)
    }

    /// Tokens that end a generation.
    pub fn end_ids(&self) -> &[u32] {
        &self.vocab.eos
    }

    /// Bytes of a token; a special token's are its text.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.bytes.get(id as usize).map(Vec::as_slice)
    }

    /// Whether a token is special.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    /// The special token with this text.
    pub fn special(&self, text: &str) -> Option<u32> {
        self.special_ids.iter().copied().find(|id| self.vocab.tokens[*id as usize] == text)
    }

    /// Number of tokens.
    pub fn vocab_size(&self) -> usize {
        self.bytes.len()
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
