//! `muser inspect`: what a model file holds.

use crate::open::{Opened, SourceArgs};
use crate::output::{self, Table};
use anyhow::Result;
use clap::Args;
use muser_core::cost::cache_bytes;
use muser_core::{Geometry, KvType, LayerKind};
use muser_format::{Array, Gguf, Value};
use serde_json::{Value as Json, json};
use std::collections::BTreeMap;
use std::io::Write;

/// Show what a model file holds: shape, types of its weights, memory for a context, template, oddities
#[derive(Args)]
pub struct Inspect {
    #[command(flatten)]
    source: SourceArgs,
    /// Context to work out the memory for [default: the model's own]
    #[arg(short, long, value_name = "N")]
    context: Option<usize>,
    /// Print one JSON object
    #[arg(long, conflicts_with_all = ["template", "metadata"])]
    json: bool,
    /// Print the chat template alone
    #[arg(long)]
    template: bool,
    /// Print every metadata key
    #[arg(long, conflicts_with = "template")]
    metadata: bool,
}

impl Inspect {
    /// Runs the command.
    pub fn run(self) -> Result<()> {
        let mut out = std::io::stdout().lock();
        if self.template || self.metadata {
            let file = self.source.model.gguf()?;
            if self.template {
                out.write_all(file.str(TEMPLATE)?.as_bytes())?;
                return Ok(());
            }
            for (key, value) in file.metadata() {
                writeln!(out, "{key} = {}", short(value))?;
            }
            return Ok(());
        }
        let opened = self.source.open()?;
        let report = report(&opened, self.context)?;
        if self.json {
            writeln!(out, "{report:#}")?;
        } else {
            print(&mut out, &report)?;
        }
        Ok(())
    }
}

const TEMPLATE: &str = "tokenizer.chat_template";

/// A metadata value in one line.
fn short(value: &Value) -> String {
    const MOST: usize = 100;
    let text = match value {
        Value::Str(text) => format!("{text:?}"),
        Value::Array(Array::Bool(items)) => {
            let local: String = items.iter().map(|b| if *b { '1' } else { '0' }).collect();
            format!("{} {local}", value.type_name())
        }
        Value::Array(array) => match array.to_u64s() {
            Some(items) if items.len() <= 16 => format!("{} {items:?}", value.type_name()),
            _ => value.type_name(),
        },
        Value::Bool(b) => b.to_string(),
        _ => match (value.as_integer(), value.as_f64()) {
            (Some(integer), _) => integer.to_string(),
            (_, Some(float)) => format!("{}", float as f32),
            _ => value.type_name(),
        },
    };
    if text.chars().count() > MOST { text.chars().take(MOST).chain("...".chars()).collect() } else { text }
}

fn report(opened: &Opened, context: Option<usize>) -> Result<Json> {
    let (model, file) = (&opened.model, opened.gguf.as_ref());
    let g = model.geometry();
    let context = context.unwrap_or(g.context).clamp(1, g.context);
    let mut kinds: BTreeMap<String, BTreeMap<&str, (u64, u64, u64)>> = BTreeMap::new();
    let (mut parameters, mut bytes) = (0u64, 0u64);
    for t in file.iter().flat_map(|f| f.tensors()) {
        let kind = match t.name.split('.').collect::<Vec<_>>()[..] {
            ["blk", _, kind, ..] => format!("blk.*.{kind}"),
            _ => t.name.trim_end_matches(".weight").to_string(),
        };
        let values = t.rows() as u64 * t.cols() as u64;
        let entry = kinds.entry(kind).or_default().entry(t.dtype.name()).or_default();
        *entry = (entry.0 + 1, entry.1 + values, entry.2 + t.byte_len());
        parameters += values;
        bytes += t.byte_len();
    }
    let tensors: Vec<Json> = kinds
        .iter()
        .flat_map(|(kind, types)| types.iter().map(move |(name, sums)| (kind, name, sums)))
        .map(|(kind, name, (count, values, bytes))| {
            let bits = *bytes as f64 * 8.0 / (*values).max(1) as f64;
            json!({ "kind": kind, "type": name, "count": count, "parameters": values, "bytes": bytes, "bits": bits })
        })
        .collect();
    let cache = |kv| cache_bytes(model, kv, context, 512);
    let drafter = model.plans.draft.as_ref().map(|d| {
        json!({
            "file": opened.drafter,
            "geometry": geometry(&d.block.geometry),
            "block": d.spec.block,
            "mask_token": d.spec.mask_token,
            "target_layers": d.spec.target_layers,
        })
    });
    let key = |name: &str| file.and_then(|f| f.get(name));
    let text = |name: &str| key(name).and_then(Value::as_str);
    let id = |name: &str| key(&format!("tokenizer.ggml.{name}_token_id")).and_then(Value::as_u64);
    Ok(json!({
        "file": opened.path,
        "name": text("general.name"),
        "gguf_version": file.map(|f| f.version()),
        "file_bytes": file.map(|f| f.file_bytes()),
        "parameters": parameters,
        "bits_per_weight": bytes as f64 * 8.0 / parameters.max(1) as f64,
        "geometry": geometry(g),
        "tensors": tensors,
        "memory": {
            "context": context,
            "weights": model.weight_bytes(),
            "cache_f16": cache(KvType::F16),
            "cache_q8_0": cache(KvType::Q8_0),
        },
        "tokenizer": {
            "model": text("tokenizer.ggml.model"),
            "split": text("tokenizer.ggml.pre"),
            "tokens": g.vocab,
            "bos": id("bos"),
            "eos": id("eos"),
            "eot": id("eot"),
        },
        "template_bytes": text(TEMPLATE).map(str::len),
        "drafter": drafter,
        "oddities": file.map(|f| oddities(f, opened)).unwrap_or_default(),
    }))
}

fn geometry(g: &Geometry) -> Json {
    let full: Vec<usize> = (0..g.layers.len()).filter(|i| g.layers[*i] == LayerKind::Full).collect();
    json!({
        "layers": g.layers.len(),
        "full_layers": full,
        "hidden": g.hidden,
        "ff": g.ff,
        "heads": g.heads,
        "kv_heads": g.kv_heads,
        "head_dim": g.head_dim,
        "vocab": g.vocab,
        "context": g.context,
        "window": g.window,
        "norm_eps": g.norm_eps,
        "post_norm_eps": g.post_norm_eps,
        "rope_theta": g.rope_theta,
        "logit_scale": g.logit_scale,
        "softcap": g.softcap,
    })
}

/// What differs from the files that most converters write, with what muser makes of it.
fn oddities(file: &Gguf, opened: &Opened) -> Vec<String> {
    let mut found = vec![];
    let key = |name: &str| file.get(&format!("muse-glimmer.{name}"));
    if let Some(value) = key("attention.sliding_window_pattern").and_then(Value::as_u64) {
        found.push(format!(
            "sliding_window_pattern is the number {value}, not one bool a layer: every {value}th layer, counted back from the last, is full"
        ));
    }
    for (name, used) in [("logit_scale", "1/sqrt(hidden/256)"), ("final_logit_softcapping", "20")] {
        if key(name).is_none() {
            found.push(format!("muse-glimmer.{name} is missing: {used} is used"));
        }
    }
    if file.tensor("blk.0.attn_q_norm.weight").is_none() {
        found.push("attn_q_norm is missing: the architecture's factor 3.87 is used".into());
    }
    if file.tensor("blk.0.attn_qkv.weight").is_some() {
        found.push("q, k and v are one tensor, attn_qkv: muser reads it in three parts".into());
    }
    if file.get(TEMPLATE).is_none() {
        found.push("there is no chat template: chat and run can't format messages, `run --raw` works".into());
    }
    if file.get("tokenizer.ggml.tokens").is_none() {
        found.push("there is no tokenizer: only commands that take token ids work".into());
    }
    let used: std::collections::HashSet<String> =
        opened.model.slots.keys().map(ToString::to_string).collect();
    let unused = |name: &str| !used.contains(name) && !name.contains("attn_qkv") && !name.ends_with(".scale");
    let unused: Vec<&str> = file.tensors().iter().map(|t| t.name.as_str()).filter(|n| unused(n)).collect();
    if let Some(first) = unused.first() {
        found.push(format!("{} tensors are not used, the first is {first}", unused.len()));
    }
    found
}

fn print(out: &mut impl Write, report: &Json) -> Result<()> {
    let text = |value: &Json| match value {
        Json::Null => "-".to_string(),
        Json::String(s) => s.clone(),
        other => other.to_string(),
    };
    let size = |value: &Json| output::bytes(value.as_u64().unwrap_or(0));
    writeln!(out, "file        {}", text(&report["file"]))?;
    writeln!(out, "name        {}", text(&report["name"]))?;
    writeln!(
        out,
        "size        {}, {} parameters, {:.2} bits a weight, GGUF version {}",
        size(&report["file_bytes"]),
        output::count(report["parameters"].as_f64().unwrap_or(0.0)),
        report["bits_per_weight"].as_f64().unwrap_or(0.0),
        report["gguf_version"]
    )?;
    print_geometry(out, "target", &report["geometry"])?;
    let draft = &report["drafter"];
    if draft.is_null() {
        writeln!(out, "drafter     none")?;
    } else {
        print_geometry(out, "drafter", &draft["geometry"])?;
        writeln!(
            out,
            "            {}: block of {}, mask token {}, features of layers {}",
            text(&draft["file"]),
            draft["block"],
            draft["mask_token"],
            draft["target_layers"]
        )?;
    }
    let tokens = &report["tokenizer"];
    writeln!(
        out,
        "tokenizer   {} ({}), {} tokens, bos {}, eos {}, eot {}",
        text(&tokens["model"]),
        text(&tokens["split"]),
        tokens["tokens"],
        text(&tokens["bos"]),
        text(&tokens["eos"]),
        text(&tokens["eot"])
    )?;
    match report["template_bytes"].as_u64() {
        Some(bytes) => writeln!(out, "template    {bytes} bytes (print it with --template)")?,
        None => writeln!(out, "template    none")?,
    }
    let memory = &report["memory"];
    writeln!(
        out,
        "memory      weights {}; a context of {} adds {} (f16) or {} (q8_0)",
        size(&memory["weights"]),
        memory["context"],
        size(&memory["cache_f16"]),
        size(&memory["cache_q8_0"])
    )?;
    for oddity in report["oddities"].as_array().into_iter().flatten() {
        writeln!(out, "oddity      {}", text(oddity))?;
    }
    let mut table = Table::new(&["tensors", "type", ">count", ">parameters", ">bytes", ">bits"]);
    for t in report["tensors"].as_array().into_iter().flatten() {
        table.row([
            text(&t["kind"]),
            text(&t["type"]),
            text(&t["count"]),
            output::count(t["parameters"].as_f64().unwrap_or(0.0)),
            size(&t["bytes"]),
            format!("{:.2}", t["bits"].as_f64().unwrap_or(0.0)),
        ]);
    }
    write!(out, "\n{}", table.text())?;
    Ok(())
}

fn print_geometry(out: &mut impl Write, name: &str, g: &Json) -> Result<()> {
    let full = g["full_layers"].as_array().map_or(0, Vec::len);
    writeln!(
        out,
        "{name:<11} {} layers ({full} full), hidden {}, ff {}, {} query and {} KV heads of {}, vocabulary {}",
        g["layers"], g["hidden"], g["ff"], g["heads"], g["kv_heads"], g["head_dim"], g["vocab"]
    )?;
    writeln!(
        out,
        "            context {}, window {}, rope theta {}, logit scale {}, soft cap {}",
        g["context"], g["window"], g["rope_theta"], g["logit_scale"], g["softcap"]
    )?;
    Ok(())
}
