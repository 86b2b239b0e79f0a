//! Stop strings: text up to the first of them, held back where it may still become one.

/// Watches a text for stop strings.
#[derive(Clone, Debug, Default)]
pub struct StopStrings {
    strings: Vec<String>,
    held: String,
    hit: bool,
}

impl StopStrings {
    /// Empty strings are ignored.
    pub fn new(strings: &[String]) -> Self {
        let strings = strings.iter().filter(|s| !s.is_empty()).cloned().collect();
        StopStrings { strings, held: String::new(), hit: false }
    }

    /// Whether one was found; nothing is passed on after it.
    pub fn hit(&self) -> bool {
        self.hit
    }

    /// Takes more text and gives what may be shown of it.
    pub fn push(&mut self, text: &str) -> String {
        if self.hit {
            return String::new();
        }
        self.held.push_str(text);
        if let Some(at) = self.strings.iter().filter_map(|s| self.held.find(s.as_str())).min() {
            self.hit = true;
            self.held.truncate(at);
            return std::mem::take(&mut self.held);
        }
        let may_start = |at: usize| self.strings.iter().any(|s| s.starts_with(&self.held[at..]));
        let end =
            self.held.char_indices().map(|(at, _)| at).find(|at| may_start(*at)).unwrap_or(self.held.len());
        let rest = self.held.split_off(end);
        std::mem::replace(&mut self.held, rest)
    }

    /// What was held back, at the text's end.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::StopStrings;
    use proptest::prelude::*;

    proptest! {
        /// However the text is split: what comes out is the text before the first stop string.
        #[test]
        fn any_split_gives_the_text_before_the_first_stop(
            text in "[abä]{0,30}",
            stops in proptest::collection::vec("[abä]{0,4}", 0..3),
            cut in proptest::collection::vec(any::<bool>(), 30),
        ) {
            let first = stops.iter().filter(|s| !s.is_empty()).filter_map(|s| text.find(s.as_str())).min();
            let mut watch = StopStrings::new(&stops);
            let (mut out, mut piece) = (String::new(), String::new());
            for (c, cut) in text.chars().zip(cut) {
                piece.push(c);
                if cut {
                    out += &watch.push(&std::mem::take(&mut piece));
                }
            }
            out += &watch.push(&piece);
            prop_assert_eq!(watch.hit(), first.is_some());
            out += &watch.finish();
            prop_assert_eq!(out, &text[..first.unwrap_or(text.len())]);
        }
    }
}
