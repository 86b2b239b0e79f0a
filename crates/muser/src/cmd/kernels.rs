//! `muser kernels`: the live dispatch table.

use crate::device::DeviceArgs;
use crate::listing::{Entry, PassName, entries};
use crate::open::{SourceArgs, SyntheticArgs};
use crate::output::{self, Table};
use anyhow::{Context, Result};
use clap::Args;
use muser_core::Route;
use muser_core::cost::{Batch, Cost};
use serde_json::{Value as Json, json};
use std::io::Write;

/// Show which kernel serves each step of a pass, in execution order
#[derive(Args)]
pub struct Kernels {
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
    /// Show the route ladder: every kernel that could have served, and the condition that chose
    #[arg(long)]
    why: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceArgs,
}

impl Kernels {
    /// Runs the command.
    pub fn run(self) -> Result<()> {
        let opened = self.source.open_or_make(&self.synthetic, false)?;
        let pass = self.pass.pass();
        let plan = opened.model.plans.get(pass).with_context(|| {
            format!(
                "{} has no drafter, so there is no {:?} pass; name one with --draft",
                opened.name, self.pass
            )
        })?;
        let rows = usize::from(self.rows);
        let (info, routes) = self.device.routes(&opened, pass, rows, self.depth)?;
        let batch = Batch { rows, sequences: 1, depth: self.depth, logits: 1, kv: self.device.kv.into() };
        let listed = entries(&opened.model, plan, &routes, batch);
        let mut out = std::io::stdout().lock();
        if self.json {
            let rows: Vec<Json> = listed.iter().map(|e| row_json(e, &routes[e.calls[0]])).collect();
            let head = json!({
                "model": opened.name,
                "device": info,
                "pass": format!("{:?}", self.pass).to_lowercase(),
                "rows": self.rows,
                "depth": self.depth,
                "kernels": rows,
            });
            writeln!(out, "{head:#}")?;
            return Ok(());
        }
        writeln!(
            out,
            "{}\n{info}, {:?} pass, {rows} rows at depth {}\n",
            opened.name, self.pass, self.depth
        )?;
        write!(out, "{}", table(&listed, &routes).text())?;
        let mut total = Cost::default();
        for e in &listed {
            for _ in &e.calls {
                total += e.cost;
            }
        }
        writeln!(
            out,
            "\n{} calls, {} from memory, {} operations",
            routes.len(),
            output::bytes(total.memory_bytes()),
            output::count(total.operations as f64)
        )?;
        if self.why {
            for e in &listed {
                writeln!(out, "\n{} ({})", e.name, e.types)?;
                for (kernel, condition, taken) in &routes[e.calls[0]].ladder {
                    writeln!(out, "  {} {kernel}: {condition}", if *taken { "->" } else { "  " })?;
                }
            }
        }
        Ok(())
    }
}

/// The table of a pass.
pub fn table(listed: &[Entry], routes: &[Route]) -> Table {
    let mut table = Table::new(&[
        ">#",
        "stage",
        "layers",
        "steps",
        "types",
        "kernel",
        "library",
        "file",
        "reads -> writes",
        ">bytes",
        ">operations",
    ]);
    for (i, e) in listed.iter().enumerate() {
        let Route { kernel, library, file, .. } = &routes[e.calls[0]];
        table.row([
            (i + 1).to_string(),
            e.stage.to_string(),
            output::short_ranges(&e.layers),
            e.name.clone(),
            e.types.clone(),
            kernel.clone(),
            library.to_string(),
            file.to_string(),
            e.flow(),
            output::bytes(e.cost.memory_bytes()),
            output::count(e.cost.operations as f64),
        ]);
    }
    table
}

fn row_json(e: &Entry, Route { kernel, library, file, ladder, .. }: &Route) -> Json {
    let ladder: Vec<Json> = ladder
        .iter()
        .map(|(kernel, condition, taken)| json!({ "kernel": kernel, "condition": condition, "taken": taken }))
        .collect();
    json!({
        "stage": e.stage,
        "layers": e.layers,
        "steps": e.name,
        "types": e.types,
        "kernel": kernel,
        "library": library,
        "file": file,
        "flow": e.flow(),
        "memory_bytes": e.cost.memory_bytes(),
        "operations": e.cost.operations,
        "ladder": ladder,
    })
}
