//! A vocabulary and a text, both from the input: lines `TYPE TOKEN` and `+LEFT RIGHT` (a merge), a zero byte, then the text.
//! Whatever is accepted gives the text back.

#![no_main]

use libfuzzer_sys::fuzz_target;
use muser_text::{Specials, Tokenizer, Vocab, split::split};

fuzz_target!(|bytes: &[u8]| {
    let input = String::from_utf8_lossy(bytes);
    let (lines, text) = input.split_once('\0').unwrap_or(("", &input));
    assert_eq!(split(text).collect::<String>(), text);
    let mut vocab = Vocab { pre: "llama4".into(), ..Vocab::default() };
    // GPT-2's alphabet in order of code point holds each byte once.
    vocab.tokens = (0x21..0x144).filter_map(char::from_u32).map(String::from).collect();
    vocab.tokens.retain(|c| !("\u{7f}"..="\u{a0}").contains(&c.as_str()) && c != "\u{ad}");
    vocab.types = vec![1; vocab.tokens.len()];
    for line in lines.lines() {
        if let Some(merge) = line.strip_prefix('+') {
            vocab.merges.push(merge.to_string());
        } else if let Some((kind, token)) = line.split_once(' ') {
            vocab.tokens.push(token.to_string());
            vocab.types.push(kind.parse().unwrap_or(1));
        }
    }
    let Ok(tokenizer) = Tokenizer::new(vocab) else { return };
    for specials in [Specials::Parse, Specials::Plain] {
        let ids = tokenizer.encode(text, specials);
        assert_eq!(tokenizer.decode(&ids), text.as_bytes());
        let mut decoder = tokenizer.decoder();
        let mut parts: String = ids.iter().map(|id| decoder.push(&tokenizer, *id)).collect();
        parts.push_str(&decoder.finish());
        assert_eq!(parts, text);
    }
});
