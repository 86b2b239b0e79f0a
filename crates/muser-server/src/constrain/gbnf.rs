//! llama.cpp's grammar notation, translated to Lark.
//!
//! Rules that need no recursion become terminals, so that they keep their meaning as regular expressions whatever the
//! lexer would make of their parts; in the other rules, neighbouring regular parts are joined into terminals. A terminal
//! takes as much as it can: where llama.cpp would let the next part have some of it, this translation does not.

use super::GrammarError;
use serde_json::Value;
use std::collections::{HashMap, HashSet};
use std::fmt::Write;

/// Deepest nesting of groups.
const MAX_DEPTH: usize = 64;
/// Most rules: each may stand within the one before it.
const MAX_RULES: usize = 2048;
/// Largest number in a repetition.
const MAX_REPEAT: usize = 10_000;

enum Node {
    /// A Lark string literal or regular expression.
    Text(String),
    Rule(usize),
    Sequence(Vec<Node>),
    Alternatives(Vec<Node>),
    Repeat(Box<Node>, usize, Option<usize>),
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
    names: HashMap<String, usize>,
    rules: Vec<Option<Node>>,
}

fn bad(why: String) -> GrammarError {
    GrammarError::Bad { what: "the grammar", why }
}

/// Translates a grammar whose start is `root`.
pub fn to_lark(text: &str) -> Result<String, GrammarError> {
    let mut parser = Parser { text, at: 0, names: HashMap::new(), rules: vec![] };
    parser.parse()?;
    let Parser { names, rules, .. } = parser;
    let root = *names.get("root").ok_or_else(|| bad("it has no rule named root".into()))?;
    if let Some((name, _)) = names.iter().find(|(_, i)| rules.get(**i).is_none_or(Option::is_none)) {
        return Err(bad(format!("rule {name:?} is used but not defined")));
    }
    let rules: Vec<Node> = rules.into_iter().flatten().collect();
    let mut writer = Writer { regular: regular(&rules), terminals: String::new(), extra: 0 };
    let mut out = format!("start: {}\n", writer.name(root));
    for (i, rule) in rules.iter().enumerate() {
        let name = writer.name(i);
        let body = if writer.regular.contains(&i) { writer.terminal(rule) } else { writer.rule(rule) };
        // Writing to a String cannot fail.
        let _ = writeln!(out, "{name}: {body}");
    }
    Ok(out + &writer.terminals)
}

/// Rules from which no recursion can be reached.
fn regular(rules: &[Node]) -> HashSet<usize> {
    fn uses(node: &Node, out: &mut HashSet<usize>) {
        match node {
            Node::Text(_) => {}
            Node::Rule(i) => drop(out.insert(*i)),
            Node::Sequence(all) | Node::Alternatives(all) => all.iter().for_each(|n| uses(n, out)),
            Node::Repeat(inner, ..) => uses(inner, out),
        }
    }
    let used: Vec<HashSet<usize>> = rules
        .iter()
        .map(|rule| {
            let mut out = HashSet::new();
            uses(rule, &mut out);
            out
        })
        .collect();
    // A rule is regular once all that it uses is: recursion never gets there.
    let mut left: Vec<usize> = used.iter().map(HashSet::len).collect();
    let mut users = vec![vec![]; rules.len()];
    for (user, all) in used.iter().enumerate() {
        all.iter().for_each(|i| users[*i].push(user));
    }
    let mut ready: Vec<usize> = (0..rules.len()).filter(|i| left[*i] == 0).collect();
    let mut known = HashSet::new();
    while let Some(rule) = ready.pop() {
        known.insert(rule);
        for user in &users[rule] {
            left[*user] -= 1;
            if left[*user] == 0 {
                ready.push(*user);
            }
        }
    }
    known
}

struct Writer {
    regular: HashSet<usize>,
    terminals: String,
    extra: usize,
}

impl Writer {
    fn name(&self, rule: usize) -> String {
        if self.regular.contains(&rule) { format!("T{rule}") } else { format!("r{rule}") }
    }

    fn is_regular(&self, node: &Node) -> bool {
        match node {
            Node::Text(_) => true,
            Node::Rule(i) => self.regular.contains(i),
            Node::Sequence(all) | Node::Alternatives(all) => all.iter().all(|n| self.is_regular(n)),
            Node::Repeat(inner, ..) => self.is_regular(inner),
        }
    }

    fn terminal(&self, node: &Node) -> String {
        match node {
            Node::Text(text) => text.clone(),
            Node::Rule(i) => self.name(*i),
            Node::Sequence(all) if all.is_empty() => "\"\"".into(),
            Node::Sequence(all) => all.iter().map(|n| self.terminal(n)).collect::<Vec<_>>().join(" "),
            Node::Alternatives(all) => {
                format!("({})", all.iter().map(|n| self.terminal(n)).collect::<Vec<_>>().join(" | "))
            }
            Node::Repeat(inner, min, max) => format!("({}){}", self.terminal(inner), repeat(*min, *max)),
        }
    }

    fn rule(&mut self, node: &Node) -> String {
        if self.is_regular(node) {
            return self.extra_terminal(node);
        }
        match node {
            Node::Text(text) => text.clone(),
            Node::Rule(i) => self.name(*i),
            Node::Sequence(all) => {
                let mut out = vec![];
                let mut rest = &all[..];
                while let Some(first) = rest.first() {
                    let run = rest.iter().take_while(|n| self.is_regular(n)).count();
                    if run > 0 {
                        let body = rest[..run].iter().map(|n| self.terminal(n)).collect::<Vec<_>>().join(" ");
                        out.push(self.add_terminal(&body));
                    } else {
                        out.push(self.rule(first));
                    }
                    rest = &rest[run.max(1)..];
                }
                out.join(" ")
            }
            Node::Alternatives(all) => {
                format!("({})", all.iter().map(|n| self.rule(n)).collect::<Vec<_>>().join(" | "))
            }
            Node::Repeat(inner, min, max) => format!("({}){}", self.rule(inner), repeat(*min, *max)),
        }
    }

    fn extra_terminal(&mut self, node: &Node) -> String {
        let body = self.terminal(node);
        if body == "\"\"" { body } else { self.add_terminal(&body) }
    }

    fn add_terminal(&mut self, body: &str) -> String {
        let name = format!("X{}", self.extra);
        self.extra += 1;
        let _ = writeln!(self.terminals, "{name}: {body}");
        name
    }
}

fn repeat(min: usize, max: Option<usize>) -> String {
    match (min, max) {
        (0, None) => "*".into(),
        (1, None) => "+".into(),
        (0, Some(1)) => "?".into(),
        (min, None) => format!("{{{min},}}"),
        (min, Some(max)) => format!("{{{min},{max}}}"),
    }
}

impl Parser<'_> {
    fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let c = self.peek()?;
        self.at += c.len_utf8();
        Some(c)
    }

    fn eat(&mut self, text: &str) -> bool {
        let found = self.rest().starts_with(text);
        if found {
            self.at += text.len();
        }
        found
    }

    /// Skips blanks and comments, and line ends where they mean nothing.
    fn blank(&mut self, lines: bool) {
        while let Some(c) = self.peek() {
            match c {
                ' ' | '\t' => self.at += 1,
                '\r' | '\n' if lines => self.at += 1,
                '#' => self.at += self.rest().find(['\r', '\n']).unwrap_or(self.rest().len()),
                _ => return,
            }
        }
    }

    fn error(&self, expected: &str) -> GrammarError {
        let line = self.text[..self.at].matches('\n').count() + 1;
        let found = self.rest().lines().next().unwrap_or_default();
        let found: String = found.chars().take(40).collect();
        bad(format!("line {line}: expected {expected}, found {found:?}"))
    }

    fn word(&mut self) -> Option<String> {
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        let len = self.rest().find(|c| !is_part(c)).unwrap_or(self.rest().len());
        let word = self.rest()[..len].to_string();
        self.at += len;
        (len > 0).then_some(word)
    }

    fn rule_index(&mut self, name: String) -> usize {
        let next = self.names.len();
        let index = *self.names.entry(name).or_insert(next);
        if index == self.rules.len() {
            self.rules.push(None);
        }
        index
    }

    fn parse(&mut self) -> Result<(), GrammarError> {
        self.blank(true);
        while self.peek().is_some() {
            let name = self.word().ok_or_else(|| self.error("the name of a rule"))?;
            let index = self.rule_index(name.clone());
            self.blank(false);
            if !self.eat("::=") {
                return Err(self.error("::="));
            }
            self.blank(true);
            let body = self.alternatives(0)?;
            if self.rules.len() > MAX_RULES {
                return Err(bad(format!("it has more than {MAX_RULES} rules")));
            }
            if self.rules[index].replace(body).is_some() {
                return Err(bad(format!("rule {name:?} is defined twice")));
            }
            self.blank(true);
        }
        Ok(())
    }

    fn alternatives(&mut self, depth: usize) -> Result<Node, GrammarError> {
        if depth > MAX_DEPTH {
            return Err(bad(format!("groups nest more than {MAX_DEPTH} deep")));
        }
        let mut all = vec![self.sequence(depth)?];
        while self.eat("|") {
            self.blank(true);
            all.push(self.sequence(depth)?);
        }
        Ok(if all.len() == 1 { all.remove(0) } else { Node::Alternatives(all) })
    }

    fn sequence(&mut self, depth: usize) -> Result<Node, GrammarError> {
        let mut all: Vec<Node> = vec![];
        loop {
            self.blank(depth > 0);
            let item = match self.peek() {
                Some('"') => Node::Text(self.literal()?),
                Some('[') => Node::Text(self.class()?),
                Some('.') => {
                    self.at += 1;
                    Node::Text("/(?s:.)/".into())
                }
                Some('(') => {
                    self.at += 1;
                    self.blank(true);
                    let inner = self.alternatives(depth + 1)?;
                    self.blank(true);
                    if !self.eat(")") {
                        return Err(self.error("a closing parenthesis"));
                    }
                    inner
                }
                Some(c) if c.is_ascii_alphanumeric() || c == '-' || c == '_' => {
                    let name = self.word().unwrap_or_default();
                    Node::Rule(self.rule_index(name))
                }
                Some(')' | '|' | '\r' | '\n') | None => return Ok(Node::Sequence(all)),
                Some(_) => return Err(self.error("a literal, a character class, a rule or a group")),
            };
            let item = self.repetition(item)?;
            all.push(item);
        }
    }

    fn repetition(&mut self, item: Node) -> Result<Node, GrammarError> {
        let (min, max) = match self.peek() {
            Some('*') => (0, None),
            Some('+') => (1, None),
            Some('?') => (0, Some(1)),
            Some('{') => {
                let end = self.rest().find('}').ok_or_else(|| self.error("a repetition such as {2,5}"))?;
                let inside: String = self.rest()[1..end].split_whitespace().collect();
                let number = |text: &str| text.parse::<usize>().ok().filter(|n| *n <= MAX_REPEAT);
                let parsed = match inside.split_once(',') {
                    None => number(&inside).map(|n| (n, Some(n))),
                    Some((min, "")) => number(min).map(|n| (n, None)),
                    Some(("", max)) => number(max).map(|n| (0, Some(n))),
                    Some((min, max)) => number(min).zip(number(max)).map(|(a, b)| (a, Some(b))),
                };
                let range = parsed.filter(|(a, b)| b.is_none_or(|b| *a <= b));
                let range = range.ok_or_else(|| self.error("a repetition such as {2,5}, at most 10000"))?;
                self.at += end;
                range
            }
            _ => return Ok(item),
        };
        self.at += 1;
        Ok(Node::Repeat(Box::new(item), min, max))
    }

    fn literal(&mut self) -> Result<String, GrammarError> {
        self.at += 1;
        let mut text = String::new();
        loop {
            match self.peek() {
                Some('"') => {
                    self.at += 1;
                    return Ok(Value::from(text).to_string().replace('\u{7f}', "\\u007f"));
                }
                Some('\n') | None => return Err(self.error("a closing quote")),
                Some(_) => text.push(self.character()?),
            }
        }
    }

    fn class(&mut self) -> Result<String, GrammarError> {
        self.at += 1;
        let mut out = String::from(if self.eat("^") { "/[^" } else { "/[" });
        let empty = out.len();
        while self.peek() != Some(']') {
            if matches!(self.peek(), Some('\n') | None) {
                return Err(self.error("a closing bracket"));
            }
            let from = self.character()?;
            let _ = write!(out, "\\x{{{:x}}}", u32::from(from));
            if self.rest().starts_with('-') && !self.rest().starts_with("-]") {
                self.at += 1;
                let to = self.character()?;
                if to < from {
                    return Err(self.error("a range that rises"));
                }
                let _ = write!(out, "-\\x{{{:x}}}", u32::from(to));
            }
        }
        if out.len() == empty {
            return Err(self.error("a character in the class"));
        }
        self.at += 1;
        Ok(out + "]/")
    }

    fn character(&mut self) -> Result<char, GrammarError> {
        match self.next() {
            Some('\\') => {}
            Some(c) => return Ok(c),
            None => return Err(self.error("a character")),
        }
        let digits = match self.next() {
            Some('n') => return Ok('\n'),
            Some('r') => return Ok('\r'),
            Some('t') => return Ok('\t'),
            Some(c @ ('\\' | '"' | '[' | ']' | '^' | '-' | '/')) => return Ok(c),
            Some('x') => 2,
            Some('u') => 4,
            Some('U') => 8,
            _ => return Err(self.error("an escape: \\n \\r \\t \\\\ \\\" \\[ \\] \\x \\u or \\U")),
        };
        let code = self.rest().get(..digits).and_then(|hex| u32::from_str_radix(hex, 16).ok());
        let c = code.and_then(char::from_u32).ok_or_else(|| self.error("the number of a character"))?;
        self.at += digits;
        Ok(c)
    }
}
