//! The tags of a text that comes in pieces: each is found once.

use super::{TAGS, Tag};
use std::collections::VecDeque;

/// Tags that stand in a text, from the first that is not dealt with.
#[derive(Clone, Default)]
pub(super) struct Tags {
    /// Where each stands.
    all: VecDeque<(usize, Tag)>,
    /// How far tags were looked for.
    scanned: usize,
    opens: usize,
    ends: usize,
    block_ends: usize,
}

impl Tags {
    /// Finds the tags of what came since; what may become one is left.
    pub(super) fn scan(&mut self, text: &str) {
        while let Some(open) = text[self.scanned..].find('<') {
            let at = self.scanned + open;
            let rest = &text[at..];
            if let Some(tag) = Tag::ALL.into_iter().find(|tag| rest.starts_with(tag.text())) {
                self.all.push_back((at, tag));
                if let Some(count) = self.count(tag) {
                    *count += 1;
                }
                self.scanned = at + tag.text().len();
            } else if TAGS.iter().any(|tag| tag.starts_with(rest)) {
                self.scanned = at;
                return;
            } else {
                self.scanned = at + 1;
            }
        }
        self.scanned = text.len();
    }

    /// How far the text is known: what follows may become a tag.
    pub(super) fn scanned(&self) -> usize {
        self.scanned
    }

    /// No more text comes: what is left is none.
    pub(super) fn close(&mut self, len: usize) {
        self.scanned = len;
    }

    pub(super) fn first(&self) -> Option<(usize, Tag)> {
        self.get(0)
    }

    pub(super) fn get(&self, number: usize) -> Option<(usize, Tag)> {
        self.all.get(number).copied()
    }

    pub(super) fn any(&self, tag: Tag) -> bool {
        self.all.iter().any(|(_, other)| *other == tag)
    }

    /// How many invokes open, how many end, and how many blocks end, in what is left.
    pub(super) fn left(&self) -> (usize, usize, usize) {
        (self.opens, self.ends, self.block_ends)
    }

    pub(super) fn pop(&mut self) {
        if let Some((_, tag)) = self.all.pop_front()
            && let Some(count) = self.count(tag)
        {
            *count -= 1;
        }
    }

    /// The first `len` bytes of the text are gone.
    pub(super) fn shift(&mut self, len: usize) {
        self.scanned -= len;
        self.all.iter_mut().for_each(|(at, _)| *at -= len);
    }

    fn count(&mut self, tag: Tag) -> Option<&mut usize> {
        match tag {
            Tag::Invoke => Some(&mut self.opens),
            Tag::InvokeEnd => Some(&mut self.ends),
            Tag::CallsEnd => Some(&mut self.block_ends),
            _ => None,
        }
    }
}
