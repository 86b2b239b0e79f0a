//! What commands print with: errors as one message, sizes and counts for people, tables, progress.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{ErrorKind, IsTerminal};
use std::time::{Duration, Instant};

/// An error and its causes in one line; a cause that the message already quotes is left out.
pub fn chain(error: &anyhow::Error) -> String {
    let mut message = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !message.contains(&cause) {
            message = format!("{message}: {cause}");
        }
    }
    message
}

/// Whether the reader of our output went away, which is no failure of ours.
pub fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let kind =
        |cause: &(dyn std::error::Error + 'static)| cause.downcast_ref::<std::io::Error>().map(|e| e.kind());
    error.chain().any(|cause| kind(cause) == Some(ErrorKind::BrokenPipe))
}

/// `16.9 GB`: decimal units, three digits.
pub fn bytes(count: u64) -> String {
    scaled(count as f64, &["B", "kB", "MB", "GB", "TB", "PB"])
}

/// `27.9 G`: counts of parameters and operations.
pub fn count(count: f64) -> String {
    scaled(count, &["", "k", "M", "G", "T", "P"]).trim_end().to_string()
}

fn scaled(mut value: f64, units: &[&str]) -> String {
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    let digits = if unit == 0 || value >= 99.95 {
        0
    } else if value >= 9.995 {
        1
    } else {
        2
    };
    format!("{value:.digits$} {}", units[unit])
}

/// `1.23 ms`: a duration in the unit that shows it best.
pub fn seconds(value: f64) -> String {
    match value {
        v if v < 1e-3 => format!("{:.1} us", v * 1e6),
        v if v < 1.0 => format!("{:.2} ms", v * 1e3),
        v => format!("{v:.2} s"),
    }
}

/// `0-2, 4-6`: rising numbers as ranges.
pub fn ranges(numbers: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = vec![];
    for n in numbers {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == *n => *last = *n,
            _ => runs.push((*n, *n)),
        }
    }
    let run = |(a, b): &(usize, usize)| if a == b { a.to_string() } else { format!("{a}-{b}") };
    runs.iter().map(run).collect::<Vec<_>>().join(", ")
}

/// The same, at most 24 characters: the middle is left out and the count stands behind.
pub fn short_ranges(numbers: &[usize]) -> String {
    let all = ranges(numbers);
    let (Some((first, _)), Some((_, last))) = (all.split_once(", "), all.rsplit_once(", ")) else {
        return all;
    };
    if all.len() <= 24 { all } else { format!("{first} .. {last} ({})", numbers.len()) }
}

/// Rows of cells with a header, printed in aligned columns or as a Markdown table.
pub struct Table {
    header: Vec<&'static str>,
    /// Columns of numbers stand to the right.
    right: Vec<bool>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Column titles; a title that starts with `>` makes a column of numbers.
    pub fn new(header: &[&'static str]) -> Self {
        Table {
            header: header.iter().map(|h| h.trim_start_matches('>')).collect(),
            right: header.iter().map(|h| h.starts_with('>')).collect(),
            rows: vec![],
        }
    }

    /// Adds a row, one cell a column.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }

    /// Aligned columns, two spaces apart.
    pub fn text(&self) -> String {
        let header: Vec<String> = self.header.iter().map(ToString::to_string).collect();
        let all: Vec<&Vec<String>> = std::iter::once(&header).chain(&self.rows).collect();
        let width =
            |c: usize| all.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..header.len()).map(width).collect();
        let mut out = String::new();
        for row in all {
            let mut line = String::new();
            for ((cell, width), right) in row.iter().zip(&widths).zip(&self.right) {
                line += &if *right { format!("{cell:>width$}  ") } else { format!("{cell:<width$}  ") };
            }
            out += line.trim_end();
            out.push('\n');
        }
        out
    }

    /// A Markdown table.
    pub fn markdown(&self) -> String {
        let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
        let mut out = line(self.header.iter().map(ToString::to_string).collect());
        out += &line(self.right.iter().map(|r| if *r { "---:" } else { "---" }.to_string()).collect());
        for row in &self.rows {
            out += &line(row.iter().map(|c| c.replace('|', "\\|")).collect());
        }
        out
    }
}

/// A progress bar on standard error: where that is a terminal, and only for work that takes a while.
pub struct Progress {
    bar: ProgressBar,
    start: Instant,
    wanted: bool,
}

/// Work that ends before this needs no bar.
const PATIENCE: Duration = Duration::from_millis(500);

impl Progress {
    /// `what` is done, counted in bytes or in pieces.
    pub fn new(what: &str, in_bytes: bool) -> Self {
        let counts = if in_bytes { "{bytes}/{total_bytes} {bytes_per_sec}" } else { "{pos}/{len} {per_sec}" };
        let style = ProgressStyle::with_template(&format!("{{msg:>8}} {{wide_bar}} {counts}"));
        let bar = ProgressBar::hidden().with_message(what.to_string());
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Progress { bar, start: Instant::now(), wanted: std::io::stderr().is_terminal() }
    }

    /// So much of `total` is done.
    pub fn at(&mut self, done: u64, total: u64) {
        if self.wanted && self.start.elapsed() > PATIENCE {
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
            self.wanted = false;
        }
        self.bar.set_length(total);
        self.bar.set_position(done);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_for_people() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(16_900_000_000), "16.9 GB");
        assert_eq!(bytes(999_600), "1.00 MB");
        assert_eq!(count(27.85e9), "27.9 G");
        assert_eq!(ranges(&[0, 1, 2, 4, 6, 7]), "0-2, 4, 6-7");
        assert_eq!(short_ranges(&[0, 1, 2, 4, 6, 8, 10, 12, 14, 16, 18]), "0-2 .. 18 (11)");
        assert_eq!(seconds(0.0000125), "12.5 us");
    }

    #[test]
    fn a_cause_stands_once() {
        let error = anyhow::anyhow!("no such file").context("cannot open x: no such file").context("model");
        assert_eq!(chain(&error), "model: cannot open x: no such file");
    }

    #[test]
    fn tables_align() {
        let mut table = Table::new(&["name", ">n"]);
        table.row(["a|b".to_string(), "10".to_string()]);
        assert_eq!(table.text(), "name   n\na|b   10\n");
        assert_eq!(table.markdown(), "| name | n |\n| --- | ---: |\n| a\\|b | 10 |\n");
    }
}
