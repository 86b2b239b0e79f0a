//! The tokenizer against tiktoken with Llama 4's ranks, and against Hugging Face's tokenizers.
#![allow(clippy::unwrap_used)]

use muser_text::{Specials, Tokenizer, Vocab, split::split};
use proptest::prelude::*;
use serde_json::Value;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::LazyLock;

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures")).join(name)
}

fn lines(name: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(fixture(name)).unwrap();
    text.lines().map(|l| serde_json::from_str(l).unwrap()).collect()
}

fn ids(v: &Value) -> Vec<u32> {
    v.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
}

/// GPT-2's printable alphabet, written down a second time.
fn printable(bytes: &[u8]) -> String {
    let mut table = vec!['\0'; 256];
    let mut extra = 0x100;
    for b in 0..256u32 {
        let itself = (33..=126).contains(&b) || (161..=172).contains(&b) || (174..=255).contains(&b);
        table[b as usize] = char::from_u32(if itself { b } else { extra }).unwrap();
        extra += u32::from(!itself);
    }
    bytes.iter().map(|b| table[*b as usize]).collect()
}

fn base64(text: &str) -> Vec<u8> {
    let value = |c: u8| match c {
        b'A'..=b'Z' => c - b'A',
        b'a'..=b'z' => c - b'a' + 26,
        b'0'..=b'9' => c - b'0' + 52,
        b'+' => 62,
        _ => 63,
    };
    let bits = text.bytes().filter(|c| *c != b'=').fold((vec![], 0u32, 0), |(mut out, acc, n), c| {
        let (acc, n) = (acc << 6 | u32::from(value(c)), n + 6);
        if n >= 8 {
            out.push((acc >> (n - 8)) as u8);
            (out, acc & ((1 << (n - 8)) - 1), n - 8)
        } else {
            (out, acc, n)
        }
    });
    bits.0
}

/// The release's tokenizer as far as the fixtures can see it: rank = id, and every split of a token into two tokens merges.
fn llama4() -> Tokenizer {
    let ranks = std::fs::read_to_string(fixture("tokenizer/ranks-subset.tiktoken")).unwrap();
    let ranks: Vec<(Vec<u8>, u32)> = ranks
        .lines()
        .map(|l| l.split_once(' ').map(|(t, r)| (base64(t), r.parse().unwrap())).unwrap())
        .collect();
    let known: HashMap<&[u8], u32> = ranks.iter().map(|(t, r)| (&t[..], *r)).collect();
    let specials: HashMap<String, u32> =
        serde_json::from_slice(&std::fs::read(fixture("tokenizer/specials.json")).unwrap()).unwrap();
    let size = specials.values().chain(known.values()).max().unwrap() + 1;
    let mut vocab = Vocab { pre: "llama4".into(), ..Vocab::default() };
    vocab.tokens = (0..size).map(|i| format!("unused {i}")).collect();
    vocab.types = vec![5; size as usize];
    for (token, rank) in &ranks {
        vocab.tokens[*rank as usize] = printable(token);
        vocab.types[*rank as usize] = 1;
        let splits = (1..token.len()).map(|at| token.split_at(at));
        let known = splits.filter(|(l, r)| known.contains_key(l) && known.contains_key(r));
        vocab.merges.extend(known.map(|(l, r)| format!("{} {}", printable(l), printable(r))));
    }
    for (text, id) in &specials {
        vocab.tokens[*id as usize] = text.clone();
        vocab.types[*id as usize] = 3;
    }
    Tokenizer::new(vocab).unwrap()
}

fn gguf(path: PathBuf) -> Tokenizer {
    Tokenizer::new(Vocab::from_gguf(&muser_format::Gguf::open(&path).unwrap()).unwrap()).unwrap()
}

#[test]
fn the_release_is_tiktoken() {
    let tokenizer = llama4();
    for case in lines("tokenizer/full.jsonl") {
        let text = case["text"].as_str().unwrap();
        assert_eq!(tokenizer.encode(text, Specials::Parse), ids(&case["ids"]), "{text:?}");
        // Named where it differs: the texts that spell special tokens.
        let plain = case.get("ids_plain").unwrap_or(&case["ids"]);
        assert_eq!(tokenizer.encode(text, Specials::Plain), ids(plain), "{text:?} as plain text");
        assert_eq!(tokenizer.decode(&ids(&case["ids"])), text.as_bytes());
    }
}

#[test]
fn gguf_vocabularies_are_hugging_face() {
    for file in ["gguf/tiny-Q8_0.gguf", "gguf/tiny-Q4_K_M-scalar.gguf"] {
        let tokenizer = gguf(fixture(file));
        for case in lines("tokenizer/tiny.jsonl") {
            let text = case["text"].as_str().unwrap();
            let mut got = tokenizer.encode(text, Specials::Parse);
            assert_eq!(got, ids(&case["ids_with_bos"])[1..], "{text:?}");
            got.splice(0..0, tokenizer.bos());
            assert_eq!(got, ids(&case["ids_with_bos"]), "{text:?}");
        }
        assert_eq!(tokenizer.end_ids(), [769, 776]);
    }
}

#[test]
fn detokenising_never_emits_half_a_character() {
    for case in lines("tokenizer/incremental.jsonl") {
        let strings = |key: &str| -> Vec<String> {
            case[key].as_array().unwrap().iter().map(|v| v.as_str().unwrap().to_string()).collect()
        };
        // A vocabulary of the 256 bytes and of this case's tokens.
        let hex = |h: &String| -> Vec<u8> {
            (0..h.len()).step_by(2).map(|i| u8::from_str_radix(&h[i..i + 2], 16).unwrap()).collect()
        };
        let pieces: Vec<Vec<u8>> = strings("bytes_hex").iter().map(hex).collect();
        let tokens: Vec<String> = (0..=255u8).map(|b| vec![b]).chain(pieces).map(|b| printable(&b)).collect();
        let count = tokens.len() as u32;
        let vocab = Vocab { pre: "llama4".into(), types: vec![1; tokens.len()], tokens, ..Vocab::default() };
        let tokenizer = Tokenizer::new(vocab).unwrap();
        let mut decoder = tokenizer.decoder();
        let got: Vec<String> = (256..count).map(|id| decoder.push(&tokenizer, id)).collect();
        assert_eq!(got, strings("text_after_each"), "{}", case["text"]);
        assert_eq!(decoder.finish(), "");
    }
}

#[test]
fn hostile_runs_take_linear_work() {
    // A quadratic step would need 10^12 operations here, and time the test out.
    let tokenizer = llama4();
    for unit in ["a", " ", "A", "\n", "!", "\u{301}", "\u{4e00}", "1", "\u{4e00}A", " \n", "'", "ab'", "é"] {
        let text = unit.repeat(1_000_000 / unit.len());
        let ids = tokenizer.encode(&text, Specials::Parse);
        assert_eq!(tokenizer.decode(&ids), text.as_bytes());
    }
}

/// The 256 bytes, and these tokens of types behind them.
fn small(more: &[(&str, i32)]) -> Vocab {
    let bytes = (0..=255u8).map(|b| printable(&[b]));
    Vocab {
        pre: "llama4".into(),
        tokens: bytes.chain(more.iter().map(|(t, _)| t.to_string())).collect(),
        types: [1; 256].into_iter().chain(more.iter().map(|(_, t)| *t)).collect(),
        ..Vocab::default()
    }
}

#[test]
fn only_special_tokens_are_found_in_text() {
    let more = [("<|eot|>", 3), ("<tool>", 4), ("[PAD1]", 5), ("", 3), ("<|eot|>x", 3)];
    let tokenizer = Tokenizer::new(small(&more)).unwrap();
    assert_eq!(tokenizer.encode("a<|eot|><tool><|eot|>xb", Specials::Parse), [97, 256, 257, 260, 98]);
    assert_eq!(
        tokenizer.encode("[PAD1]", Specials::Parse),
        "[PAD1]".bytes().map(u32::from).collect::<Vec<_>>()
    );
    assert_eq!(tokenizer.decode(&[256, 999, 97]), b"<|eot|>a");
    assert_eq!((tokenizer.special("<tool>"), tokenizer.special("a")), (Some(257), None));
    // A control token of the wrong type.
    let tokenizer = Tokenizer::new(small(&[("<|start|>", 1)])).unwrap();
    assert_eq!(tokenizer.encode("<|start|>a", Specials::Parse), [256, 97]);
    let tokenizer = Tokenizer::new(small(&more)).unwrap();
    assert!(tokenizer.is_special(258) && !tokenizer.is_special(97) && !tokenizer.is_special(999));
}

#[test]
fn damaged_vocabularies_are_refused() {
    let refused = |vocab: Vocab, part: &str| {
        let error = Tokenizer::new(vocab).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error.contains(part), "{error:?} lacks {part:?}");
    };
    refused(Vocab { pre: "qwen2".into(), ..small(&[]) }, "\"qwen2\"");
    refused(Vocab { merges: vec!["a b".into()], ..small(&[]) }, "merge 0 (\"a b\")");
    refused(Vocab { tokens: small(&[]).tokens.split_off(1), ..small(&[]) }, "byte 0");
    refused(Vocab::default(), "tokenizer.ggml.pre");
}

#[test]
fn the_lowest_rank_merges_first_and_the_leftmost_of_equals() {
    let more = [("bc", 1), ("ab", 1), ("abc", 1), ("aa", 1), ("aaa", 1)];
    let merges = ["b c", "a b", "ab c", "a a", "aa a"].map(String::from).to_vec();
    let tokenizer = Tokenizer::new(Vocab { merges, ..small(&more) }).unwrap();
    // A piece that is a token is that token, though its merges would give a, bc.
    assert_eq!(tokenizer.encode("abc", Specials::Plain), [258]);
    assert_eq!(tokenizer.encode("abcz", Specials::Plain), [97, 256, 122]);
    assert_eq!(tokenizer.encode("aaaaaz", Specials::Plain), [259, 260, 122]);
}

/// The pattern as the reference tokenizers run it.
static PATTERN: LazyLock<fancy_regex::Regex> = LazyLock::new(|| {
    fancy_regex::Regex::new(&std::fs::read_to_string(fixture("tokenizer/split-regex.txt")).unwrap()).unwrap()
});

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn splits_are_the_patterns(text in prop_oneof![
        "\\PC{0,40}",
        "[ \t\r\n/'sStTlLdDmMrReEvVſaAbzZÉéßǅʰ中かا\u{301}\u{93f}1²Ⅷ!.,_\u{a0}\u{3000}\u{85}\u{200d}😀]{0,40}",
    ]) {
        let want: Vec<&str> = PATTERN.find_iter(&text).map(|m| m.unwrap().as_str()).collect();
        prop_assert_eq!(split(&text).collect::<Vec<_>>(), want);
    }

    #[test]
    fn text_comes_back(text in ".{0,60}") {
        static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| gguf(fixture("gguf/tiny-Q8_0.gguf")));
        for specials in [Specials::Parse, Specials::Plain] {
            let ids = TOKENIZER.encode(&text, specials);
            prop_assert_eq!(TOKENIZER.decode(&ids), text.as_bytes());
            let mut decoder = TOKENIZER.decoder();
            let mut parts: String = ids.iter().map(|id| decoder.push(&TOKENIZER, *id)).collect();
            parts.push_str(&decoder.finish());
            prop_assert_eq!(&parts, &text);
        }
    }

    #[test]
    fn any_tokens_are_text(ids in prop::collection::vec(0u32..1100, 0..40)) {
        let tokenizer = &*MINI;
        let mut decoder = tokenizer.decoder();
        let mut parts: String = ids.iter().map(|id| decoder.push(tokenizer, *id)).collect();
        parts.push_str(&decoder.finish());
        prop_assert_eq!(parts, String::from_utf8_lossy(&tokenizer.decode(&ids)).into_owned());
    }
}

#[test]
fn the_default_models_goldens_are_its_tokens() {
    for case in lines("mini/goldens.jsonl") {
        assert_eq!(MINI.encode(case["prompt"].as_str().unwrap(), Specials::Parse), ids(&case["ids_in"]));
        assert_eq!(MINI.decode(&ids(&case["ids_out"])), case["text_out"].as_str().unwrap().as_bytes());
    }
}

static MINI: LazyLock<Tokenizer> = LazyLock::new(|| {
    gguf(PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/glimmer-mini-Q8_0.gguf")))
});

/// The default model against the tokens of its tokenizer.json, which Hugging Face's library wrote when it was trained: every one but the
/// special ones is what its own text encodes to, so the tables are whole; the goldens' prompts cover real text.
#[test]
fn the_default_model_is_its_tokenizer_json() {
    let json: Value = serde_json::from_slice(&std::fs::read(fixture("mini/tokens.json")).unwrap()).unwrap();
    // Tokens stand in the order of their ids, the added ones after the others.
    let list = |name: &str| json[name].as_array().unwrap().iter().map(|token| token.as_str().unwrap());
    assert_eq!(list("vocab").count() + list("added_tokens").count(), MINI.vocab_size());
    for (token, id) in list("vocab").zip(0..) {
        assert_eq!(printable(MINI.token_bytes(id).unwrap()), token);
        if let Ok(text) = std::str::from_utf8(MINI.token_bytes(id).unwrap()) {
            assert_eq!(MINI.encode(text, Specials::Plain).len(), split(text).count(), "{text:?}");
        }
    }
    for (text, id) in list("added_tokens").zip(list("vocab").count() as u32..) {
        assert_eq!(MINI.encode(text, Specials::Parse), [id], "{text}");
    }
}
