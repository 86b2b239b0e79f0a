//! Text that is not markup, while it is mixed with markup: its `|` is another character. Every control token has a `|`, so
//! that none can be spelled, in part or whole.

/// Stands for `|`. Text may hold these noncharacters too: then the second, which begins nothing else, begins a pair.
pub(crate) const BAR: char = '\u{fdd0}';
const PAIR: char = '\u{fdd1}';
const OF_BAR: char = '\u{fdd2}';
const OF_PAIR: char = '\u{fdd3}';

/// Adds `text` to `out` so that [`restore`] gives it back; with `ordinary`, without a `|`.
pub(crate) fn hide(text: &str, ordinary: bool, out: &mut String) {
    out.reserve(text.len());
    for c in text.chars() {
        match c {
            '|' if ordinary => out.push(BAR),
            BAR => out.extend([PAIR, OF_BAR]),
            PAIR => out.extend([PAIR, OF_PAIR]),
            c => out.push(c),
        }
    }
}

/// Whether text is the same hidden.
pub(crate) fn is_same(text: &str) -> bool {
    !text.contains(['|', BAR, PAIR])
}

/// Adds the text that was hidden to `out`.
pub(crate) fn restore(hidden: &str, out: &mut String) {
    out.reserve(hidden.len());
    let mut chars = hidden.chars().peekable();
    while let Some(c) = chars.next() {
        out.push(match c {
            BAR => '|',
            PAIR if chars.next_if_eq(&OF_BAR).is_some() => BAR,
            PAIR if chars.next_if_eq(&OF_PAIR).is_some() => PAIR,
            c => c,
        });
    }
}
