//! `muser trace`: the time of every kernel of a pass, beside what the machine could do.

mod chart;

use crate::device::{DeviceArgs, PassLimits};
use crate::listing::{Entry, PassName, entries};
use crate::open::{Opened, SourceArgs, SyntheticArgs};
use crate::output::{self, Progress, Table};
use anyhow::{Context, Result, bail};
use clap::Args;
use muser_core::cost::{Batch, Cost};
use muser_core::{Buf, Device, Observer, Pass, Row, SeqId};
use serde_json::{Value as Json, json};
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Time every kernel of a pass and show its share of the machine's limit
///
/// The pass is run several times and each kernel's median is taken. A kernel's limit is the larger of its bytes over the
/// memory bandwidth and its operations over the peak rate, both measured in the same run.
#[derive(Args)]
pub struct Trace {
    #[command(flatten)]
    source: SourceArgs,
    #[command(flatten)]
    synthetic: SyntheticArgs,
    /// Which pass
    #[arg(long, value_enum, default_value = "target")]
    pass: PassName,
    /// Rows of the pass: 1 is decode, a chunk is prefill
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    rows: u16,
    /// Positions in the cache before the pass
    #[arg(long, value_name = "N", default_value_t = 0)]
    depth: usize,
    /// Times that the pass is run
    #[arg(long, value_name = "N", default_value_t = 9, value_parser = clap::value_parser!(u16).range(1..))]
    repeat: u16,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Write a Chrome trace (chrome://tracing, Perfetto)
    #[arg(long, value_name = "FILE")]
    chrome: Option<PathBuf>,
    /// Write a picture
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    #[command(flatten)]
    device: DeviceArgs,
}

/// What was measured.
struct Measured {
    /// Median seconds of each call, in order.
    calls: Vec<f64>,
    /// The plan's steps of each call.
    steps: Vec<Range<usize>>,
    /// Median seconds of a whole pass that nobody watches.
    pass: f64,
}

/// One line of the table: an entry with its time.
struct Line {
    entry: Entry,
    kernel: String,
    /// Seconds of all its calls together.
    seconds: f64,
    /// Of those, the seconds that the limit allows.
    limit: f64,
    /// Whether memory is what limits.
    memory: bool,
}

impl Line {
    fn share(&self) -> f64 {
        self.limit / self.seconds.max(1e-12)
    }

    fn cost(&self) -> Cost {
        let mut total = Cost::default();
        self.entry.calls.iter().for_each(|_| total += self.entry.cost);
        total
    }
}

impl Trace {
    /// Runs the command.
    pub fn run(self) -> Result<()> {
        let opened = self.source.open_or_make(&self.synthetic, true)?;
        let pass = self.pass.pass();
        let plan = opened.model.plans.get(pass).with_context(|| {
            format!(
                "{} has no drafter, so there is no {:?} pass; name one with --draft",
                opened.name, self.pass
            )
        })?;
        let rows = usize::from(self.rows);
        let mut device = self.device.load(&opened, (1, self.depth + rows))?;
        let most = device.info().max_rows;
        if rows > most {
            bail!("{rows} rows do not fit a pass of {most}; raise --chunk or lower --rows");
        }
        let measured = measure(device.as_mut(), &opened, pass, rows, self.depth, self.repeat)?;
        let under = PassLimits::measure(device.as_mut(), pass, self.device.threads)?;
        let batch = Batch {
            rows,
            sequences: 1,
            depth: self.depth,
            logits: logit_rows(pass, rows),
            kv: self.device.kv.into(),
        };
        let routes = device.routes(pass, rows, self.depth);
        if routes.len() != measured.steps.len() {
            bail!("the device ran {} kernels where its table has {}", measured.steps.len(), routes.len());
        }
        let line = |entry: Entry| {
            let limits = under.at(routes[entry.calls[0]].steps.start);
            let calls = entry.calls.len() as f64;
            let by_memory = calls * entry.cost.memory_bytes() as f64 / limits.bytes_per_second;
            let by_compute = calls * entry.cost.operations as f64 / limits.operations_per_second;
            Line {
                kernel: routes[entry.calls[0]].kernel.clone(),
                seconds: entry.calls.iter().map(|c| measured.calls[*c]).sum(),
                limit: by_memory.max(by_compute),
                memory: by_memory >= by_compute,
                entry,
            }
        };
        let lines: Vec<Line> = entries(&opened.model, plan, &routes, batch).into_iter().map(line).collect();
        let costs: Vec<_> = lines.iter().map(|l| (routes[l.entry.calls[0]].steps.start, l.cost())).collect();
        let limits = under.joined(&costs);
        let title = format!("{}, {:?} pass, {rows} rows at depth {}", opened.name, self.pass, self.depth);
        let device = device.info().name;
        if let Some(file) = &self.chrome {
            let name = |call: usize| {
                lines.iter().find(|l| l.entry.calls.contains(&call)).map_or("?", |l| &l.entry.name)
            };
            write_file(file, &chrome(&measured, &routes, name).to_string())?;
        }
        if let Some(file) = &self.svg {
            write_file(file, &chart::svg(&title, &device, &lines))?;
        }
        let mut out = std::io::stdout().lock();
        if self.json {
            let report = json!({
                "model": opened.name,
                "device": device,
                "pass": format!("{:?}", self.pass).to_lowercase(),
                "rows": self.rows,
                "depth": self.depth,
                "pass_seconds": measured.pass,
                "kernel_seconds": measured.calls.iter().sum::<f64>(),
                "read_gb_s": limits.bytes_per_second / 1e9,
                "peak_tops": limits.operations_per_second / 1e12,
                "kernels": lines.iter().map(line_json).collect::<Vec<_>>(),
                "stages": stages(&lines).into_iter().map(|(k, v)| (k.to_string(), json!(v))).collect::<serde_json::Map<_, _>>(),
            });
            writeln!(out, "{report:#}")?;
            return Ok(());
        }
        writeln!(out, "{title}\n{device}\n\n{}", table(&lines).text())?;
        let sum: f64 = measured.calls.iter().sum();
        for (stage, seconds) in stages(&lines) {
            writeln!(out, "{stage:<10} {:>10} {:>5.1} %", output::seconds(seconds), 100.0 * seconds / sum)?;
        }
        let limit: f64 = lines.iter().map(|l| l.limit).sum();
        writeln!(
            out,
            "\n{} in {} calls; the pass alone takes {}; its limit is {} ({:.0} %) at {:.1} GB/s and {:.2} Top/s",
            output::seconds(sum),
            measured.calls.len(),
            output::seconds(measured.pass),
            output::seconds(limit),
            100.0 * limit / measured.pass,
            limits.bytes_per_second / 1e9,
            limits.operations_per_second / 1e12
        )?;
        Ok(())
    }
}

/// Rows that ask for logits: the last of a prefill chunk, all masks of a draft, none of an injection.
fn logit_rows(pass: Pass, rows: usize) -> usize {
    match pass {
        Pass::Target => 1,
        Pass::Inject => 0,
        Pass::Draft => rows.saturating_sub(1).max(1),
    }
}

/// Rows at `depth` of a sequence whose tokens are spread over the vocabulary.
fn batch(seq: SeqId, pass: Pass, depth: usize, rows: usize, vocab: usize) -> Vec<Row> {
    let row = |i: usize| {
        let token = ((depth + i) * 7919 + 11) % vocab;
        let logits = match pass {
            Pass::Target => i + 1 == rows,
            Pass::Inject => false,
            Pass::Draft => i > 0 || rows == 1,
        };
        Row { logits, feature: i as u32, ..Row::new(seq, (depth + i) as u32, token as u32) }
    };
    (0..rows).map(row).collect()
}

/// Fills a new sequence to `depth` positions.
pub fn fill(device: &mut dyn Device, opened: &Opened, context: usize, depth: usize) -> Result<SeqId> {
    let vocab = opened.model.geometry().vocab;
    let seq = device.open(context)?;
    let mut bar = Progress::new("filling", false);
    let chunk = device.info().max_rows;
    for first in (0..depth).step_by(chunk) {
        let rows = batch(seq, Pass::Target, first, chunk.min(depth - first), vocab);
        device.run(Pass::Target, &rows, None)?;
        if opened.model.plans.draft.is_some() {
            device.run(Pass::Inject, &rows, None)?;
        }
        bar.at((first + rows.len()) as u64, depth as u64);
    }
    Ok(seq)
}

#[derive(Default)]
struct Times {
    calls: Vec<(Range<usize>, f64)>,
}

impl Observer for Times {
    fn reads(&self) -> bool {
        false
    }
    fn after(&mut self, steps: Range<usize>, seconds: f64, _: &mut dyn FnMut(Buf) -> Vec<f32>) {
        self.calls.push((steps, seconds));
    }
}

fn measure(
    device: &mut dyn Device,
    opened: &Opened,
    pass: Pass,
    rows: usize,
    depth: usize,
    repeat: u16,
) -> Result<Measured> {
    let seq = fill(device, opened, depth + rows, depth)?;
    let vocab = opened.model.geometry().vocab;
    // The same positions again and again: an earlier run's rows are simply overwritten. A drafter's passes need features.
    let target = batch(seq, Pass::Target, depth, rows, vocab);
    device.run(Pass::Target, &target, None)?;
    let rows = batch(seq, pass, depth, rows, vocab);
    let (mut passes, mut watched) = (vec![], vec![]);
    for _ in 0..repeat {
        let start = Instant::now();
        device.run(pass, &rows, None)?;
        if rows.iter().any(|r| r.logits) {
            device.best()?;
        }
        passes.push(start.elapsed().as_secs_f64());
        let mut times = Times::default();
        device.run(pass, &rows, Some(&mut times))?;
        watched.push(times.calls);
    }
    device.close(seq);
    let steps: Vec<Range<usize>> = watched.first().into_iter().flatten().map(|(s, _)| s.clone()).collect();
    let of = |i: usize| median(watched.iter().filter_map(|run| run.get(i)).map(|(_, s)| *s).collect());
    Ok(Measured { calls: (0..steps.len()).map(of).collect(), steps, pass: median(passes) })
}

/// The middle value; the lower one of two.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len().saturating_sub(1) / 2).copied().unwrap_or(0.0)
}

/// Seconds of each stage, in the order of the pass.
fn stages(lines: &[Line]) -> Vec<(&'static str, f64)> {
    let mut sums: Vec<(&'static str, f64)> = vec![];
    for line in lines {
        match sums.iter_mut().find(|(stage, _)| *stage == line.entry.stage) {
            Some((_, seconds)) => *seconds += line.seconds,
            None => sums.push((line.entry.stage, line.seconds)),
        }
    }
    sums
}

fn table(lines: &[Line]) -> Table {
    let total: f64 = lines.iter().map(|l| l.seconds).sum();
    let mut table = Table::new(&[
        ">#", "layers", "steps", "types", "kernel", ">calls", ">each", ">time", ">%", ">GB/s", ">Gop/s",
        "limit", ">share",
    ]);
    for (i, l) in lines.iter().enumerate() {
        let cost = l.cost();
        table.row([
            (i + 1).to_string(),
            output::short_ranges(&l.entry.layers),
            l.entry.name.clone(),
            l.entry.types.clone(),
            l.kernel.clone(),
            l.entry.calls.len().to_string(),
            output::seconds(l.seconds / l.entry.calls.len() as f64),
            output::seconds(l.seconds),
            format!("{:.1}", 100.0 * l.seconds / total),
            format!("{:.1}", cost.memory_bytes() as f64 / l.seconds / 1e9),
            format!("{:.0}", cost.operations as f64 / l.seconds / 1e9),
            if l.memory { "memory" } else { "compute" }.to_string(),
            format!("{:.0} %", 100.0 * l.share()),
        ]);
    }
    table
}

fn line_json(l: &Line) -> Json {
    let cost = l.cost();
    json!({
        "stage": l.entry.stage,
        "layers": l.entry.layers,
        "steps": l.entry.name,
        "types": l.entry.types,
        "kernel": l.kernel,
        "calls": l.entry.calls.len(),
        "seconds": l.seconds,
        "memory_bytes": cost.memory_bytes(),
        "operations": cost.operations,
        "limit": if l.memory { "memory" } else { "compute" },
        "limit_seconds": l.limit,
        "share": l.share(),
    })
}

/// The Trace Event Format: one complete event a call, one after the other.
fn chrome<'a>(measured: &Measured, routes: &[muser_core::Route], name: impl Fn(usize) -> &'a str) -> Json {
    let mut at = 0.0;
    let event = |(i, seconds): (usize, &f64)| {
        let start = at;
        at += seconds * 1e6;
        json!({
            "name": name(i), "cat": "kernel", "ph": "X", "pid": 1, "tid": 1, "ts": start, "dur": seconds * 1e6,
            "args": { "kernel": routes[i].kernel, "steps": format!("{:?}", measured.steps[i]) },
        })
    };
    let events: Vec<Json> = measured.calls.iter().enumerate().map(event).collect();
    json!({ "displayTimeUnit": "ns", "traceEvents": events })
}

fn write_file(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}
