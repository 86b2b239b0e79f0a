//! Stop texts in a stream.

/// Passes text through up to the first stop text, and holds back what may become one.
pub struct StopFilter {
    stops: Vec<String>,
    held: String,
}

impl StopFilter {
    /// Empty texts are ignored.
    pub fn new(stops: &[String]) -> Self {
        StopFilter { stops: stops.iter().filter(|s| !s.is_empty()).cloned().collect(), held: String::new() }
    }

    /// Text that may be shown, and the stop text if one has come.
    pub fn push(&mut self, text: &str) -> (String, Option<String>) {
        if self.stops.is_empty() {
            return (text.to_string(), None);
        }
        self.held.push_str(text);
        // The stop text that ends first is the one that a client would see first.
        let found = self.stops.iter().filter_map(|s| Some((self.held.find(s.as_str())?, s)));
        if let Some((at, stop)) = found.min_by_key(|(at, s)| (at + s.len(), *at)) {
            let stop = stop.clone();
            let shown = self.held[..at].to_string();
            self.held.clear();
            return (shown, Some(stop));
        }
        let begins = |at: &usize| self.stops.iter().any(|s| s.starts_with(&self.held[*at..]));
        let at = self.held.char_indices().map(|(at, _)| at).find(begins).unwrap_or(self.held.len());
        let kept = self.held.split_off(at);
        (std::mem::replace(&mut self.held, kept), None)
    }

    /// What is held back, once no more text comes.
    pub fn release(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Any split gives the text before the first stop text to end, and that stop text.
        #[test]
        fn same_at_every_split(pieces in prop::collection::vec("[ab]{0,3}", 0..8), stops in prop::collection::vec("[ab]{1,4}", 0..3)) {
            let whole: String = pieces.concat();
            let ends = |s: &String| whole.find(s.as_str()).map(|at| (at + s.len(), at, s.clone()));
            let first = stops.iter().filter_map(ends).min();
            let mut filter = StopFilter::new(&stops);
            let (mut shown, mut hit) = (String::new(), None);
            for piece in &pieces {
                let (text, stop) = filter.push(piece);
                shown.push_str(&text);
                if stop.is_some() {
                    hit = stop;
                    break;
                }
            }
            if hit.is_none() {
                shown.push_str(&filter.release());
            }
            match first {
                Some((_, at, stop)) => prop_assert_eq!((shown, hit), (whole[..at].to_string(), Some(stop))),
                None => prop_assert_eq!((shown, hit), (whole, None)),
            }
        }
    }
}
