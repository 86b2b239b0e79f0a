//! `muser bench`: the speed of a model on this machine, beside what the machine could do.

use crate::cmd::trace::{fill, median};
use crate::device::{DeviceArgs, PassLimits};
use crate::open::{Opened, SourceArgs, SyntheticArgs};
use crate::output::{self, Table};
use anyhow::{Result, bail};
use clap::Args;
use muser_core::cost::{Batch, Cost, cost};
use muser_core::{Device, Limits, Pass, Row, SeqId};
use serde_json::{Value as Json, json};
use std::io::Write;
use std::time::Instant;

/// Measure prefill, decode, groups and drafting
///
/// With --geometry the weights are random and made in memory: a machine's speed is known before anything is downloaded.
/// Every figure is the median of its repetitions; the limits are measured in the same run.
#[derive(Args)]
pub struct Bench {
    #[command(flatten)]
    source: SourceArgs,
    #[command(flatten)]
    synthetic: SyntheticArgs,
    /// Prompt tokens to compute; 0 leaves prefill out
    #[arg(long, value_name = "N", default_value_t = 512)]
    prefill: usize,
    /// Tokens to decode one after the other; 0 leaves decoding out
    #[arg(long, value_name = "N", default_value_t = 32)]
    decode: usize,
    /// Positions in the cache before prefill and decoding
    #[arg(long, value_name = "N", default_value_t = 0)]
    depth: usize,
    /// Sizes of groups that decode together, separated by commas
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=512))]
    groups: Vec<u16>,
    /// Repetitions
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    repeat: u16,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceArgs,
}

impl Bench {
    /// Runs the command.
    pub fn run(self) -> Result<()> {
        let opened = self.source.open_or_make(&self.synthetic, true)?;
        let context = self.depth + self.prefill.max(self.decode + 1).max(1);
        if context > opened.model.geometry().context {
            bail!(
                "depth and tokens need {context} positions, the model has {}; give less",
                opened.model.geometry().context
            );
        }
        let start = Instant::now();
        let largest = self.groups.iter().max().map_or(1, |n| usize::from(*n).max(1));
        let mut device = self.device.load(&opened, (largest, context))?;
        let load_seconds = start.elapsed().as_secs_f64();
        let before = PassLimits::measure(device.as_mut(), Pass::Target, self.device.threads)?;
        let mut bench = Measuring { args: &self, opened: &opened, device: device.as_mut() };
        let seq = fill(bench.device, &opened, context, self.depth)?;
        let prefill = if self.prefill > 0 { Some(bench.prefill(seq)?) } else { None };
        let decode = if self.decode > 0 { Some(bench.decode(seq)?) } else { None };
        let drafting = bench.drafting(seq)?;
        bench.device.close(seq);
        let groups = self.groups.iter().map(|n| bench.group(usize::from(*n))).collect::<Result<Vec<_>>>()?;
        let after = PassLimits::measure(device.as_mut(), Pass::Target, self.device.threads)?;
        let info = device.info();
        let prefill_rows = self.prefill.min(info.max_rows);
        let report = Report {
            args: &self,
            model: opened.name.clone(),
            device: info.name,
            weight_bytes: info.weight_bytes,
            load_seconds,
            limits: before.best(after).joined(&self.costs(&opened, 1, 1)),
            prefill,
            decode,
            groups,
            drafting,
            prefill_rows,
            prefill_cost: self.cost(&opened, prefill_rows, 1),
            decode_cost: self.cost(&opened, 1, 1),
        };
        let mut out = std::io::stdout().lock();
        if self.json {
            writeln!(out, "{}", report.json())?
        } else {
            write!(out, "{}", report.text())?
        }
        Ok(())
    }

    /// What the steps of one pass of the target cost.
    fn costs(&self, opened: &Opened, rows: usize, logits: usize) -> Vec<(usize, Cost)> {
        let batch = Batch { rows, sequences: 1, depth: self.depth, logits, kv: self.device.kv.into() };
        let steps = opened.model.plans.target.steps.iter().enumerate();
        steps.map(|(i, step)| (i, cost(&opened.model, Pass::Target, step, batch))).collect()
    }

    /// The same in all.
    fn cost(&self, opened: &Opened, rows: usize, logits: usize) -> Cost {
        let mut total = Cost::default();
        self.costs(opened, rows, logits).into_iter().for_each(|(_, cost)| total += cost);
        total
    }
}

/// Seconds of a drafter's cycle.
struct Drafting {
    /// Rows of a block.
    rows: usize,
    draft: f64,
    verify: f64,
    inject: f64,
}

struct Measuring<'a> {
    args: &'a Bench,
    opened: &'a Opened,
    device: &'a mut dyn Device,
}

impl Measuring<'_> {
    /// Seconds of a pass with the choice of its tokens.
    fn pass(&mut self, pass: Pass, rows: &[Row]) -> Result<f64> {
        let start = Instant::now();
        self.device.run(pass, rows, None)?;
        if rows.iter().any(|r| r.logits) {
            self.device.best()?;
        }
        Ok(start.elapsed().as_secs_f64())
    }

    /// `count` rows of a sequence from `first` on.
    fn rows(&self, seq: SeqId, first: usize, count: usize) -> Vec<Row> {
        let vocab = self.opened.model.geometry().vocab;
        let token = |i: usize| ((first + i) * 7919 + 11) % vocab;
        let row = |i: usize| Row { feature: i as u32, ..Row::new(seq, (first + i) as u32, token(i) as u32) };
        (0..count).map(row).collect()
    }

    /// Median of the repetitions, after one that warms caches and kernels up. Positions are computed again and again: what
    /// a ring then holds no longer matters, only how much.
    fn repeat(&mut self, mut once: impl FnMut(&mut Self) -> Result<f64>) -> Result<f64> {
        once(self)?;
        Ok(median((0..self.args.repeat).map(|_| once(self)).collect::<Result<_>>()?))
    }

    fn prefill(&mut self, seq: SeqId) -> Result<f64> {
        let (depth, count, chunk) = (self.args.depth, self.args.prefill, self.device.info().max_rows);
        self.repeat(|m| {
            let mut seconds = 0.0;
            for first in (0..count).step_by(chunk) {
                let mut rows = m.rows(seq, depth + first, chunk.min(count - first));
                if let Some(last) = rows.last_mut().filter(|_| first + chunk >= count) {
                    last.logits = true;
                }
                seconds += m.pass(Pass::Target, &rows)?;
                if m.opened.model.plans.draft.is_some() {
                    seconds += m.pass(Pass::Inject, &rows)?;
                }
            }
            Ok(seconds)
        })
    }

    /// Seconds of one step.
    fn decode(&mut self, seq: SeqId) -> Result<f64> {
        let (depth, count) = (self.args.depth, self.args.decode);
        self.repeat(|m| {
            let mut seconds = 0.0;
            for i in 0..count {
                let mut row = m.rows(seq, depth + i, 1);
                row[0].logits = true;
                seconds += m.pass(Pass::Target, &row)?;
            }
            Ok(seconds / count as f64)
        })
    }

    /// A step of a group. Steps of one row take turns with it: a machine whose memory changes its speed from one moment to the next would
    /// make any ratio of two figures that were taken one after the other.
    fn group(&mut self, size: usize) -> Result<Group> {
        let depth = self.args.depth;
        if size > self.device.info().max_rows {
            bail!("a group of {size} does not fit a pass of {}; raise --chunk", self.device.info().max_rows);
        }
        let mut seqs = vec![];
        for _ in 0..size {
            seqs.push(fill(self.device, self.opened, depth + self.args.decode + 1, depth)?);
        }
        let count = self.args.decode.clamp(1, 16);
        let mut ratios = vec![];
        let seconds = self.repeat(|m| {
            let (mut seconds, mut one) = (0.0, 0.0);
            for i in 0..count {
                if m.args.decode > 0 {
                    let mut row = m.rows(seqs[0], depth + i, 1);
                    row[0].logits = true;
                    one += m.pass(Pass::Target, &row)?;
                }
                let mut rows: Vec<Row> = seqs.iter().flat_map(|seq| m.rows(*seq, depth + i, 1)).collect();
                for (feature, row) in rows.iter_mut().enumerate() {
                    (row.logits, row.feature) = (true, feature as u32);
                }
                seconds += m.pass(Pass::Target, &rows)?;
            }
            ratios.push(seconds / one);
            Ok(seconds / count as f64)
        })?;
        seqs.into_iter().for_each(|seq| self.device.close(seq));
        // The first repetition warms up.
        ratios.remove(0);
        Ok(Group { seconds, of_one: (self.args.decode > 0).then(|| median(ratios)) })
    }

    /// A whole block: drafted, verified, injected.
    fn drafting(&mut self, seq: SeqId) -> Result<Option<Drafting>> {
        let Some(plans) = self.opened.model.plans.draft.as_ref() else { return Ok(None) };
        let (depth, rows) = (self.args.depth, plans.spec.block);
        if rows + depth > self.args.depth + self.args.prefill.max(self.args.decode + 1) {
            return Ok(None);
        }
        let mut block = self.rows(seq, depth, rows);
        block.iter_mut().for_each(|row| row.logits = true);
        let verify = self.repeat(|m| m.pass(Pass::Target, &block))?;
        let plain = self.rows(seq, depth, rows);
        let inject = self.repeat(|m| m.pass(Pass::Inject, &plain))?;
        block[0].logits = false;
        let draft = self.repeat(|m| m.pass(Pass::Draft, &block))?;
        Ok(Some(Drafting { rows, draft, verify, inject }))
    }
}

/// Seconds of a step of a group, and how many steps of one row that is.
struct Group {
    seconds: f64,
    of_one: Option<f64>,
}

struct Report<'a> {
    args: &'a Bench,
    model: String,
    device: String,
    weight_bytes: u64,
    load_seconds: f64,
    limits: Limits,
    prefill: Option<f64>,
    decode: Option<f64>,
    groups: Vec<Group>,
    drafting: Option<Drafting>,
    prefill_rows: usize,
    prefill_cost: Cost,
    decode_cost: Cost,
}

impl Report<'_> {
    fn prefill_tok_s(&self) -> Option<f64> {
        self.prefill.map(|s| self.args.prefill as f64 / s)
    }

    /// Operations a second of prefill, those of the first chunk taken for all.
    fn prefill_rate(&self) -> Option<f64> {
        self.prefill_tok_s().map(|rate| rate / self.prefill_rows as f64 * self.prefill_cost.operations as f64)
    }

    fn decode_rate(&self) -> Option<f64> {
        self.decode.map(|s| self.decode_cost.memory_bytes() as f64 / s)
    }

    fn group(size: u16, group: &Group) -> Json {
        json!({
            "size": size,
            "step_ms": group.seconds * 1e3,
            "tok_s": f64::from(size) / group.seconds,
            "steps_of_one": group.of_one,
        })
    }

    fn json(&self) -> Json {
        let groups: Vec<Json> =
            self.args.groups.iter().zip(&self.groups).map(|(n, group)| Self::group(*n, group)).collect();
        let drafting = self.drafting.as_ref().map(|d| {
            json!({
                "rows": d.rows,
                "draft_ms": d.draft * 1e3,
                "verify_ms": d.verify * 1e3,
                "inject_ms": d.inject * 1e3,
                "steps_of_one": self.decode.map(|one| (d.draft + d.verify + d.inject) / one),
            })
        });
        json!({
            "model": self.model,
            "device": self.device,
            "lane": self.args.device.lane().name(),
            "prefill": self.args.prefill,
            "decode": self.args.decode,
            "depth": self.args.depth,
            "weight_bytes": self.weight_bytes,
            "load_seconds": self.load_seconds,
            "read_gb_s": self.limits.bytes_per_second / 1e9,
            "peak_tops": self.limits.operations_per_second / 1e12,
            "prefill_tok_s": self.prefill_tok_s(),
            "prefill_tops": self.prefill_rate().map(|r| r / 1e12),
            "prefill_share": self.prefill_rate().map(|r| r / self.limits.operations_per_second),
            "decode_tok_s": self.decode.map(|s| 1.0 / s),
            "decode_ms": self.decode.map(|s| s * 1e3),
            "decode_gb_s": self.decode_rate().map(|r| r / 1e9),
            "decode_share": self.decode_rate().map(|r| r / self.limits.bytes_per_second),
            "groups": groups,
            "drafting": drafting,
        })
    }

    fn text(&self) -> String {
        let limits = self.limits;
        let mut text = format!(
            "{} on {}\nloaded {} in {}; this machine reads {:.1} GB/s and computes {:.2} Top/s\n\n",
            self.model,
            self.device,
            output::bytes(self.weight_bytes),
            output::seconds(self.load_seconds),
            limits.bytes_per_second / 1e9,
            limits.operations_per_second / 1e12
        );
        let mut table = Table::new(&["what", ">tok/s", ">time", "reached"]);
        if let (Some(seconds), Some(rate), Some(tok_s)) =
            (self.prefill, self.prefill_rate(), self.prefill_tok_s())
        {
            table.row([
                format!("prefill of {} at depth {}", self.args.prefill, self.args.depth),
                format!("{tok_s:.1}"),
                output::seconds(seconds),
                format!("{:.2} Top/s, {:.0} %", rate / 1e12, 100.0 * rate / limits.operations_per_second),
            ]);
        }
        if let (Some(seconds), Some(rate)) = (self.decode, self.decode_rate()) {
            table.row([
                format!("decode at depth {}", self.args.depth),
                format!("{:.1}", 1.0 / seconds),
                output::seconds(seconds),
                format!("{:.1} GB/s, {:.0} %", rate / 1e9, 100.0 * rate / limits.bytes_per_second),
            ]);
        }
        let steps =
            |ratio: Option<f64>| ratio.map_or(String::new(), |steps| format!("{steps:.2} steps of one"));
        for (size, group) in self.args.groups.iter().zip(&self.groups) {
            let (time, tok_s) = (output::seconds(group.seconds), f64::from(*size) / group.seconds);
            table.row([format!("group of {size}"), format!("{tok_s:.1}"), time, steps(group.of_one)]);
        }
        if let Some(d) = &self.drafting {
            let cycle = d.draft + d.verify + d.inject;
            let parts = format!(
                "{} (draft {}, verify {}, inject {})",
                steps(self.decode.map(|one| cycle / one)),
                output::seconds(d.draft),
                output::seconds(d.verify),
                output::seconds(d.inject)
            );
            table.row([format!("drafted block of {}", d.rows), String::new(), output::seconds(cycle), parts]);
        }
        text += &table.text();
        text
    }
}
