//! Constraints with glimmer-mini's vocabulary: what they allow, at every tokenisation.
#![allow(clippy::unwrap_used)]

use muser_core::session::Constraint;
use muser_format::Gguf;
use muser_server::constrain::{
    Answer, Choice, GrammarError, Grammars, MessageGrammar, NoMoreReasoning, Turn,
};
use muser_text::{Specials, Tokenizer, Vocab};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, LazyLock};

static MINI: LazyLock<(Tokenizer, Arc<Grammars>)> = LazyLock::new(|| {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/glimmer-mini-Q8_0.gguf");
    let tokenizer = Tokenizer::new(Vocab::from_gguf(&Gguf::open(Path::new(path)).unwrap()).unwrap()).unwrap();
    let grammars = Arc::new(Grammars::new(&tokenizer, tokenizer.vocab_size()).unwrap());
    (tokenizer, grammars)
});

fn tools() -> Value {
    json!([
        {"type": "function", "function": {"name": "get_weather", "description": "", "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "unit": {"enum": ["C", "F"]},
                "where": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"], "additionalProperties": false},
            },
            "required": ["city", "days"],
        }}},
        {"type": "function", "function": {"name": "get_weather.hourly", "description": "", "parameters": {"type": "object", "properties": {}}}},
        {"type": "function", "function": {"name": "fs.read-file", "description": "", "parameters": {
            "type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"], "additionalProperties": false}}},
    ])
}

struct Setup {
    tools: Option<Value>,
    choice: Choice,
    parallel: bool,
    answer: Answer,
    silent: bool,
}

impl Default for Setup {
    fn default() -> Self {
        Setup {
            tools: Some(tools()),
            choice: Choice::Auto,
            parallel: true,
            answer: Answer::Free,
            silent: false,
        }
    }
}

impl Setup {
    fn turn(&self, spent: &NoMoreReasoning) -> Turn {
        let (_, grammars) = &*MINI;
        let message = MessageGrammar::compile(
            grammars,
            self.tools.as_ref(),
            &self.choice,
            self.parallel,
            &self.answer,
            self.silent,
            true,
        );
        Turn::new(grammars.clone(), Arc::new(message.unwrap().unwrap()), spent.clone())
    }

    /// Whether the turn allows `text`, in the usual tokens and byte by byte.
    fn allows(&self, text: &str) -> bool {
        let usual = follow(&mut self.turn(&NoMoreReasoning::default()), &encode(text));
        let bytes = follow(&mut self.turn(&NoMoreReasoning::default()), &bytewise(text));
        assert_eq!(
            usual.is_ok(),
            bytes.is_ok(),
            "{text:?}: {usual:?} in usual tokens, {bytes:?} byte by byte"
        );
        usual.is_ok()
    }
}

fn encode(text: &str) -> Vec<u32> {
    MINI.0.encode(text, Specials::Parse)
}

/// Control tokens whole, everything else one byte a token.
fn bytewise(text: &str) -> Vec<u32> {
    let bytes = |id: u32| -> Vec<u32> {
        let tokenizer = &MINI.0;
        if tokenizer.is_special(id) {
            return vec![id];
        }
        let of = |b: &u8| {
            (0..tokenizer.vocab_size() as u32).find(|t| tokenizer.token_bytes(*t) == Some(&[*b])).unwrap()
        };
        tokenizer.token_bytes(id).unwrap().iter().map(of).collect()
    };
    // The role after `<|start|>` is written by the server's own mask, in its usual token.
    let roles: Vec<&str> = text.split_inclusive("<|start|>assistant").collect();
    let split = |part: &&str| -> Vec<u32> {
        let body = part.strip_suffix("<|start|>assistant");
        let tail = if body.is_some() { encode("<|start|>assistant") } else { vec![] };
        encode(body.unwrap_or(part)).into_iter().flat_map(bytes).chain(tail).collect()
    };
    roles.iter().flat_map(split).collect()
}

/// The text up to the first token that is not allowed.
fn follow(constraint: &mut dyn Constraint, tokens: &[u32]) -> Result<(), String> {
    for (i, token) in tokens.iter().enumerate() {
        if constraint.mask().unwrap().is_some_and(|m| !m.allows(*token)) {
            return Err(String::from_utf8_lossy(&MINI.0.decode(&tokens[..i])).into_owned());
        }
        constraint.accept(*token).unwrap();
    }
    Ok(())
}

const CALL: &str = " to=get_weather<|message|><atem:function_calls>\n<atem:invoke name=\"get_weather\">\n\
    <atem:parameter name=\"city\">São Paulo</atem:parameter>\n<atem:parameter name=\"days\">3</atem:parameter>\n\
    </atem:invoke>\n</atem:function_calls>";

#[test]
fn auto_allows_reasoning_answers_and_calls() {
    let auto = Setup::default();
    assert!(auto.allows(" to=user<|message|>Anything <at all>.<|eot|>"));
    assert!(auto.allows(&format!(" to=self<|message|>Let me see.<|eom|><|start|>assistant{CALL}<|eot|>")));
    assert!(auto.allows(&format!("{CALL}<|eot|>")));
    assert!(auto.allows(&format!("{CALL}<|eom|><|start|>assistant{CALL}<|eot|>")));
    assert!(auto.allows(&format!(" to=user<|message|>I look.<|eom|><|start|>assistant{CALL}<|eot|>")));
    let other = " to=fs.read-file<|message|><atem:function_calls>\n<atem:invoke name=\"fs.read-file\">\n\
        <atem:parameter name=\"path\">a\n<b>\"c\"</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eot|>";
    assert!(auto.allows(other));
    // A doubled name, as the list of recipients suggests.
    assert!(auto.allows(&CALL.replace("to=get_weather", "to=get_weather.get_weather")));
}

#[test]
fn a_call_fits_its_schema() {
    let auto = Setup::default();
    assert!(!auto.allows(&CALL.replace("to=get_weather", "to=get_news")), "an unknown tool");
    assert!(
        !auto.allows(&CALL.replace("name=\"get_weather\"", "name=\"fs.read-file\"")),
        "another tool's name"
    );
    assert!(!auto.allows(&CALL.replace(">3<", ">three<")), "a word for an integer");
    assert!(!auto.allows(&CALL.replace(">3<", ">3.5<")), "a fraction for an integer");
    assert!(
        !auto.allows(&CALL.replace("<atem:parameter name=\"days\">3</atem:parameter>\n", "")),
        "days is required"
    );
    let with = |parameter: &str| CALL.replace("</atem:invoke>", &format!("{parameter}</atem:invoke>"));
    assert!(auto.allows(&with("<atem:parameter name=\"unit\">F</atem:parameter>\n")));
    assert!(
        !auto.allows(&with("<atem:parameter name=\"unit\">K</atem:parameter>\n")),
        "not in the enumeration"
    );
    assert!(auto.allows(&with("<atem:parameter name=\"where\">{\"lat\": 1.5}</atem:parameter>\n")));
    assert!(
        !auto.allows(&with("<atem:parameter name=\"where\">{\"lon\": 1.5}</atem:parameter>\n")),
        "not in the schema"
    );
    assert!(
        !auto.allows(&with("<atem:parameter name=\"when\">now</atem:parameter>\n")),
        "an unknown parameter"
    );
    let days_first = " to=get_weather<|message|><atem:function_calls>\n<atem:invoke name=\"get_weather\">\n\
        <atem:parameter name=\"days\">3</atem:parameter>\n<atem:parameter name=\"unit\">C</atem:parameter>\n\
        <atem:parameter name=\"city\">Oslo</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eot|>";
    assert!(auto.allows(days_first), "any order");
}

#[test]
fn choices() {
    let answer = " to=user<|message|>Hello.<|eot|>";
    let none = Setup { choice: Choice::None, ..Setup::default() };
    assert!(none.allows(answer) && !none.allows(CALL));
    let required = Setup { choice: Choice::Required, ..Setup::default() };
    assert!(!required.allows(answer) && required.allows(&format!("{CALL}<|eot|>")));
    assert!(required.allows(&format!(" to=self<|message|>Hm.<|eom|><|start|>assistant{CALL}<|eot|>")));
    let named = Setup { choice: Choice::Named("fs.read-file".into()), ..Setup::default() };
    assert!(!named.allows(answer) && !named.allows(CALL) && named.allows(" to=fs.read-file<|message|>"));
    let single = Setup { parallel: false, ..Setup::default() };
    assert!(single.allows(&format!("{CALL}<|eot|>")) && !single.allows(&format!("{CALL}<|eom|>")));
    let silent = Setup { silent: true, ..Setup::default() };
    assert!(!silent.allows(" to=self<|message|>") && silent.allows(answer));
}

#[test]
fn no_turn_ends_in_its_reasoning() {
    let auto = Setup::default();
    assert!(!auto.allows(" to=self<|message|>Hm.<|eot|>"));
    assert!(!auto.allows(" to=self<|message|>Hm.<|eom|><|eot|>"));
    let spent = NoMoreReasoning::default();
    let mut turn = auto.turn(&spent);
    follow(&mut turn, &encode(" to=self<|message|>Hm.")).unwrap();
    spent.store(true, Ordering::Relaxed);
    assert!(follow(&mut turn, &encode("<|eom|><|start|>assistant to=self<|message|>")).is_err());
}

#[test]
fn a_schema_holds_for_the_answer_and_leaves_reasoning_and_tools_alone() {
    let schema = json!({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": false});
    let both = Setup { answer: Answer::JsonSchema(schema.clone()), ..Setup::default() };
    let alone = Setup { tools: None, answer: Answer::JsonSchema(schema), ..Setup::default() };
    for setup in [&both, &alone] {
        assert!(setup.allows(" to=self<|message|>{not json} <b>\n<|eom|><|start|>assistant to=user<|message|>{\"ok\": true}<|eot|>"));
        assert!(!setup.allows(" to=user<|message|>Sure: {\"ok\": true}"));
        assert!(!setup.allows(" to=user<|message|>{\"ok\": 1"));
        assert!(!setup.allows(" to=user<|message|>{\"ok\": true}."));
        assert!(!setup.allows(" to=user<|message|>{\"ok\": <|eot|>"), "the turn ends inside the object");
    }
    assert!(both.allows(&format!("{CALL}<|eot|>")));
    assert!(!alone.allows(CALL));
    let any = Setup { tools: None, answer: Answer::JsonObject, ..Setup::default() };
    assert!(any.allows(" to=user<|message|>{\"a\": [1, null, \"é\\n\"]}<|eot|>"));
    assert!(!any.allows(" to=user<|message|>[1]"));
}

fn raw(answer: Answer, text: &str) -> bool {
    let grammars = &MINI.1;
    let mut turn = Turn::raw(grammars.clone(), answer.compile(grammars).unwrap());
    follow(&mut turn, &encode(&format!("{text}<|eot|>"))).is_ok()
}

#[test]
fn regular_expressions() {
    let date = || Answer::Regex(r"\d{4}/\d\d/\d\d|never".into());
    assert!(
        raw(date(), "2026/09/15")
            && raw(date(), "never")
            && !raw(date(), "2026-09-15")
            && !raw(date(), "2026/09/1")
    );
}

#[test]
fn gbnf() {
    // The arithmetic and JSON grammars of llama.cpp's documentation, in short.
    let sums = || {
        Answer::Gbnf("root ::= (expr \"=\" ws term \"\\n\")+\nexpr ::= term ([-+*/] term)*\nterm ::= ident | num | \"(\" ws expr \")\" ws\nident ::= [a-z] [a-z0-9_]* ws\nnum ::= [0-9]+ ws # digits\nws ::= [ \\t]*".into())
    };
    assert!(
        raw(sums(), "a+(b*3)=7\n")
            && raw(sums(), "1 = 2\nx=y\n")
            && !raw(sums(), "a+=7\n")
            && !raw(sums(), "a+(b=7\n")
    );
    let nested = || {
        Answer::Gbnf(
            "root ::= value\nvalue ::= list | \"x\"\nlist ::= \"[\" (value (\",\" value)*)? \"]\"".into(),
        )
    };
    assert!(raw(nested(), "[x,[],[[x]]]") && !raw(nested(), "[x,[]"));
    // Greedy lexing of the parts would miss this.
    let overlap = || Answer::Gbnf("root ::= [a-z]+ \"end\" | \"e\" [a-z]{2,3}".into());
    assert!(
        raw(overlap(), "friend")
            && raw(overlap(), "endend")
            && raw(overlap(), "exit")
            && !raw(overlap(), "fri")
    );
    let escapes = || Answer::Gbnf(r#"root ::= "\x41\u00e9\"" [^\n"] . "#.into());
    assert!(raw(escapes(), "Aé\"xy") && !raw(escapes(), "Aé\"\"y"));
    for (bad, why) in [
        ("", "root"),
        ("root ::= missing", "missing"),
        ("root ::= \"a", "line 1"),
        ("root ::= [z-a]", "line 1"),
        ("root ::= \"a\"{3,1}", "repetition"),
        ("root ::= \"a\"\nroot ::= \"b\"", "twice"),
        ("root := \"a\"", "::="),
        ("root ::= (\"a\"", "parenthesis"),
    ] {
        let error =
            Answer::Gbnf(bad.into()).compile(&MINI.1).err().unwrap_or_else(|| panic!("{bad:?} was taken"));
        assert!(error.to_string().contains(why), "{bad:?}: {error}");
    }
}

#[test]
fn bad_grammars_are_refused_with_a_reason() {
    for answer in [
        Answer::Regex("(".into()),
        Answer::JsonSchema(json!({"type": "nothing"})),
        Answer::JsonSchema(json!("text")),
        Answer::Lark("start: missing".into()),
        Answer::JsonSchema(json!({"allOf": [{"type": "string"}, {"type": "integer"}]})),
    ] {
        let error = answer.compile(&MINI.1).err().unwrap_or_else(|| panic!("{answer:?} was taken"));
        assert!(!error.to_string().is_empty());
    }
    // A tool's schema that cannot be compiled does not cost the tool.
    let odd = json!([{"function": {"name": "odd", "parameters": {"type": "object", "properties": {
        "a": {"type": "array", "items": {"$ref": "#/nowhere"}}}, "required": ["a"]}}}]);
    let odd = Setup { tools: Some(odd), ..Setup::default() };
    assert!(odd.allows(" to=odd<|message|><atem:function_calls>\n<atem:invoke name=\"odd\">\n<atem:parameter name=\"a\">[1]</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eot|>"));
}

/// Each would take hours, all memory, or a stack that no thread has.
#[test]
fn hostile_grammars_come_to_an_end() {
    let chain = |n: usize, rule: fn(usize) -> String| (0..n).map(rule).collect::<Vec<_>>().join("\n");
    let gbnf = |n| {
        Answer::Gbnf(format!(
            "root ::= r0\n{}\nr{n} ::= \"x\"",
            chain(n, |i| format!("r{i} ::= \"a\" r{} | \"b\"", i + 1))
        ))
    };
    let lark = |n| {
        Answer::Lark(format!(
            "start: r0\n{}\nr{n}: \"x\"",
            chain(n, |i| format!("r{i}: \"a\" r{} | \"b\"", i + 1))
        ))
    };
    let schema = |n: usize| {
        let mut defs: serde_json::Map<String, Value> =
            (0..n).map(|i| (format!("d{i}"), json!({"$ref": format!("#/$defs/d{}", i + 1)}))).collect();
        defs.insert(format!("d{n}"), json!({"type": "integer"}));
        Answer::JsonSchema(json!({"$ref": "#/$defs/d0", "$defs": defs}))
    };
    // As long as they may be, they are compiled or refused; longer, refused at once.
    for longest in [gbnf(2000), lark(2000), schema(2000)] {
        let _ = longest.compile(&MINI.1);
    }
    let brackets = format!("start: {}\"a\"{}", "(".repeat(20_000), ")".repeat(20_000));
    let long = format!("root ::= {}", "\"a\" | ".repeat(400_000) + "\"b\"");
    for (answer, why) in [
        (gbnf(20_000), "more than 2048 rules"),
        (lark(20_000), "more than 2048 rules"),
        (schema(20_000), "more than 2048 references"),
        (Answer::Lark(brackets), "nest more than 256 deep"),
        (Answer::Gbnf(long), "bytes long"),
        (Answer::Regex("abc|".repeat(300_000)), "bytes long"),
    ] {
        let error = answer.compile(&MINI.1).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error.contains(why), "{why}: {error}");
    }
    // Tools whose definitions lead to many others, and many parameters that each need many definitions.
    let many: Vec<Value> = (0..60).map(|i| json!({"$ref": format!("#/$defs/d{i}")})).collect();
    let mut defs: serde_json::Map<String, Value> =
        (0..60).map(|i| (format!("d{i}"), json!({"anyOf": many}))).collect();
    defs.insert("long".into(), json!({"type": "integer", "description": "x".repeat(1 << 20)}));
    let properties: serde_json::Map<String, Value> = (0..2000)
        .map(|i| {
            (format!("p{i}"), if i % 2 == 0 { json!({"anyOf": many}) } else { json!({"type": "integer"}) })
        })
        .collect();
    let tool = json!([{"function": {"name": "f", "parameters": {"type": "object", "properties": properties, "$defs": defs}}}]);
    let built =
        MessageGrammar::compile(&MINI.1, Some(&tool), &Choice::Auto, true, &Answer::Free, false, false);
    assert!(built.is_ok_and(|grammar| grammar.is_some()), "the tool's values are free then");
}

/// Grammars that are in use count against those to come; those that are only kept make way.
#[test]
fn compiled_grammars_are_bounded_together() {
    let grammars = Grammars::new(&MINI.0, MINI.0.vocab_size()).unwrap();
    let large = |i: usize| Answer::Lark(format!("start: \"a{i}\"\n// {}", "x".repeat(500 << 10)));
    let first = large(1).compile(&grammars).unwrap();
    let second = large(2).compile(&grammars).unwrap();
    let error = large(3).compile(&grammars).err();
    assert!(matches!(error, Some(GrammarError::Busy)), "{error:?}");
    large(2).compile(&grammars).unwrap();
    drop((first, second));
    large(3).compile(&grammars).unwrap();
}

/// Random walks through what is allowed always end in valid output.
#[test]
fn random_walks_end_in_valid_json() {
    let (tokenizer, grammars) = &*MINI;
    let schema = json!({"type": "object", "properties": {"n": {"type": "integer"}, "s": {"enum": ["a", "b"]}, "l": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
        "required": ["n", "s", "l"], "additionalProperties": false});
    let matcher = Answer::JsonSchema(schema).compile(grammars).unwrap();
    let mut random = 1u64;
    let mut finished = 0;
    for _ in 0..30 {
        let mut turn = Turn::raw(grammars.clone(), matcher.clone());
        let mut output = vec![];
        for _ in 0..300 {
            let mask = turn.mask().unwrap().unwrap();
            let allowed: Vec<u32> = (0..grammars.vocab() as u32).filter(|t| mask.allows(*t)).collect();
            assert!(
                !allowed.is_empty(),
                "nothing is allowed after {:?}",
                String::from_utf8_lossy(&tokenizer.decode(&output))
            );
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let end = allowed.iter().copied().find(|t| tokenizer.is_end(*t));
            let token = end.unwrap_or(allowed[(random >> 33) as usize % allowed.len()]);
            turn.accept(token).unwrap();
            if end.is_some() {
                let value: Value = serde_json::from_slice(&tokenizer.decode(&output)).unwrap();
                assert!(value["n"].is_i64() || value["n"].is_u64() || value["n"].is_number());
                assert!(value["s"] == "a" || value["s"] == "b");
                finished += 1;
                break;
            }
            output.push(token);
        }
    }
    assert!(finished > 20, "{finished} of 30 walks came to an end");
}
