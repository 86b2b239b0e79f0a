//! Counters of what happened, in Prometheus's text format.

use crate::slots::{End, Report};
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A number that only grows, or is set.
#[derive(Debug, Default)]
pub struct Number(AtomicU64);

impl Number {
    /// Adds.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }
    /// Replaces.
    pub fn set(&self, n: u64) {
        self.0.store(n, Ordering::Relaxed);
    }
    /// Reads.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Everything that is counted.
#[derive(Debug, Default)]
#[allow(missing_docs)]
pub struct Metrics {
    pub requests: Number,
    pub refused: Number,
    pub finished: Number,
    pub failed: Number,
    pub failed_in_a_row: Number,
    pub prompt_tokens: Number,
    pub cached_tokens: Number,
    pub cache_hits: Number,
    pub generated_tokens: Number,
    pub drafted: Number,
    pub accepted: Number,
    pub looked_up: Number,
    pub looked_up_accepted: Number,
    pub prefill_rows: Number,
    pub prefill_micros: Number,
    pub steps: Number,
    pub step_sessions: Number,
    pub step_micros: Number,
    pub queue_micros: Number,
    pub host_cache_bytes: Number,
}

impl Metrics {
    pub(crate) fn admitted(&self, prompt: usize, cached: usize, hit: bool) {
        self.prompt_tokens.add(prompt as u64);
        self.cached_tokens.add(cached as u64);
        self.cache_hits.add(u64::from(hit));
    }

    pub(crate) fn prefilled(&self, rows: usize, time: Duration) {
        self.prefill_rows.add(rows as u64);
        self.prefill_micros.add(time.as_micros() as u64);
    }

    pub(crate) fn stepped(&self, sessions: usize, time: Duration) {
        self.steps.add(1);
        self.step_sessions.add(sessions as u64);
        self.step_micros.add(time.as_micros() as u64);
    }

    pub(crate) fn finished(&self, end: &End, report: &Report) {
        self.generated_tokens.add(report.generated as u64);
        self.queue_micros.add((report.queue_seconds * 1e6) as u64);
        match end {
            End::Failed(_) => {
                self.failed.add(1);
                self.failed_in_a_row.add(1);
            }
            _ => {
                self.finished.add(1);
                self.failed_in_a_row.set(0);
            }
        }
    }

    /// The text that a scraper reads. `gauges` are values of this moment: name, help, value.
    pub fn render(&self, gauges: &[(&str, &str, u64)]) -> String {
        let seconds = |micros: &Number| micros.get() as f64 / 1e6;
        let count = |n: &Number| n.get() as f64;
        let counters = [
            ("requests_total", "Generations asked for", count(&self.requests)),
            ("refused_total", "Generations refused because the queue was full", count(&self.refused)),
            ("finished_total", "Generations that came to an end", count(&self.finished)),
            ("failed_total", "Generations that the engine failed", count(&self.failed)),
            ("prompt_tokens_total", "Tokens of prompts", count(&self.prompt_tokens)),
            (
                "cached_tokens_total",
                "Tokens of prompts that were not computed again",
                count(&self.cached_tokens),
            ),
            ("cache_hits_total", "Generations whose prompt began with known tokens", count(&self.cache_hits)),
            ("generated_tokens_total", "New tokens", count(&self.generated_tokens)),
            ("drafted_tokens_total", "Tokens proposed by drafter or lookup", count(&self.drafted)),
            ("accepted_tokens_total", "Proposed tokens that the target accepted", count(&self.accepted)),
            ("lookup_drafted_tokens_total", "Tokens proposed by lookup", count(&self.looked_up)),
            (
                "lookup_accepted_tokens_total",
                "Tokens proposed by lookup that the target accepted",
                count(&self.looked_up_accepted),
            ),
            ("prefill_tokens_total", "Prompt tokens computed", count(&self.prefill_rows)),
            ("prefill_seconds_total", "Time in prompt passes", seconds(&self.prefill_micros)),
            ("decode_steps_total", "Decode steps", count(&self.steps)),
            ("decode_sessions_total", "Sessions summed over decode steps", count(&self.step_sessions)),
            ("decode_seconds_total", "Time in decode steps", seconds(&self.step_micros)),
            ("queue_seconds_total", "Time that generations waited for a slot", seconds(&self.queue_micros)),
        ];
        let mut out = String::new();
        // Writing to a String cannot fail.
        for (name, help, value) in counters {
            let _ = writeln!(
                out,
                "# HELP muser_{name} {help}.\n# TYPE muser_{name} counter\nmuser_{name} {value}"
            );
        }
        for (name, help, value) in gauges {
            let _ =
                writeln!(out, "# HELP muser_{name} {help}.\n# TYPE muser_{name} gauge\nmuser_{name} {value}");
        }
        out
    }
}
