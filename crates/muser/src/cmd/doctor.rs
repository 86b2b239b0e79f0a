//! `muser doctor`: what this machine can run, and the mend for what it can't.

use crate::cmd::logits::each;
use crate::device::{DeviceArgs, DeviceName, measure_processor};
use crate::open::{Draft, ModelArgs, Opened, SourceArgs};
use crate::output;
use crate::text::Text;
use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::{Value as Json, json};
use std::io::Write;

/// Check what this machine can run, and say how to mend what it can't
#[derive(Args)]
pub struct Doctor {
    #[command(flatten)]
    model: ModelArgs,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceArgs,
}

/// One thing that was looked at.
struct Check {
    name: &'static str,
    /// What was found, or why it fails.
    found: Result<String, String>,
    /// Whether muser runs without it.
    optional: bool,
    mend: &'static str,
}

impl Check {
    fn status(&self) -> &'static str {
        match (&self.found, self.optional) {
            (Ok(_), _) => "ok",
            (Err(_), true) => "note",
            (Err(_), false) => "FAILS",
        }
    }
}

impl Doctor {
    /// Runs the command; fails if something fails that muser needs.
    pub fn run(self) -> Result<()> {
        let mut checks = vec![];
        let mut add = |name, optional, found: Result<String, String>, mend| {
            checks.push(Check { name, found, optional, mend });
        };
        let cpu = muser_cpu::features();
        let sets: Vec<String> =
            cpu.isas.iter().filter(|(_, has)| *has).map(|(isa, _)| isa.to_string()).collect();
        let processor = format!("{}, {} threads, {}", cpu.model, cpu.threads, sets.join(" "));
        let fast = cpu.isa != muser_cpu::Isa::Scalar;
        add(
            "processor",
            true,
            if fast { Ok(processor) } else { Err(processor) },
            "without AVX2 the CPU device is slow: use a newer processor or a GPU",
        );
        let pages = if cpu.huge_pages {
            Ok("2 MB pages for weights".to_string())
        } else {
            Err("only 4 KB pages for weights".to_string())
        };
        add(
            "memory pages",
            true,
            pages,
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        );
        add("memory", true, memory(), "close other programs, or use a smaller quantisation or context");
        add(
            "GPU",
            true,
            gpu(&nvidia_cards(), muser_cuda::is_available()),
            "for an NVIDIA GPU: install its driver, and NVRTC and cuBLAS of CUDA 12.8 or later; without one the CPU is used",
        );
        let limits = measure_processor(self.device.threads);
        add(
            "speed",
            true,
            Ok(format!(
                "reads {:.1} GB/s, computes {:.2} Top/s in 8 bits: a 17 GB model decodes at up to {:.1} tokens a second",
                limits.bytes_per_second / 1e9,
                limits.operations_per_second / 1e12,
                limits.bytes_per_second / 16.1e9
            )),
            "",
        );
        let opened = SourceArgs { model: self.model.clone(), draft: None }.open();
        let model = opened.as_ref().map(|o| {
            let drafter = o
                .drafter
                .as_ref()
                .map_or("no drafter beside it".into(), |d| format!("drafter {}", d.display()));
            let path = o.path.as_ref().map_or(o.name.clone(), |p| p.display().to_string());
            format!("{path}, {}; {drafter}", output::bytes(o.model.weight_bytes()))
        });
        add(
            "model",
            false,
            model.map_err(output::chain),
            "give a Muse Glimmer GGUF with -m FILE or in MUSER_MODEL",
        );
        if let Ok(opened) = &opened {
            add(
                "tokenizer and template",
                false,
                text(opened).map_err(|e| output::chain(&e)),
                "use a GGUF that holds tokenizer and chat template",
            );
            let device = self.self_test(opened).map_err(|e| output::chain(&e));
            add(
                "self-test",
                false,
                device,
                "the device computes something else than the reference: report it with this output",
            );
        }
        let failed = checks.iter().filter(|c| c.status() == "FAILS").count();
        let mut out = std::io::stdout().lock();
        if self.json {
            let all: Vec<Json> = checks
                .iter()
                .map(|c| {
                    let found = c.found.as_ref().unwrap_or_else(|e| e);
                    json!({ "name": c.name, "status": c.status().to_lowercase(), "found": found, "mend": c.found.is_err().then_some(c.mend) })
                })
                .collect();
            writeln!(out, "{}", json!({ "version": env!("CARGO_PKG_VERSION"), "checks": all }))?;
        } else {
            for c in &checks {
                let found = c.found.as_ref().unwrap_or_else(|e| e);
                writeln!(out, "{:<6} {:<23} {found}", c.status(), c.name)?;
                if c.found.is_err() {
                    writeln!(out, "{:<30} mend: {}", "", c.mend)?;
                }
            }
        }
        match failed {
            0 => Ok(()),
            n => bail!("{n} of {} checks fail", checks.len()),
        }
    }

    /// Logits of a few tokens on the device beside those of the reference.
    fn self_test(&self, opened: &Opened) -> Result<String> {
        let path = opened.path.clone();
        let source = SourceArgs { model: ModelArgs { model: path }, draft: Some(Draft::Off) };
        let opened = source.open()?;
        if opened.model.weight_bytes() > 2_000_000_000 {
            return Ok("left out: the reference is too slow for a model of this size".into());
        }
        let vocab = opened.model.geometry().vocab as u32;
        let tokens: Vec<u32> = (0..16).map(|i| (i * 7919 + 11) % vocab).collect();
        let logits = |name: DeviceName| -> Result<(String, Vec<f32>)> {
            let mut device = self.device.load_on(name, &opened, (1, tokens.len()))?;
            let mut all = vec![];
            each(device.as_mut(), &tokens, 16, &mut |row| {
                all.extend_from_slice(row);
                Ok(())
            })?;
            Ok((device.info().name, all))
        };
        let (name, got) = logits(self.device.chosen()?)?;
        let (_, want) = logits(DeviceName::Reference)?;
        let apart = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        // The serving lane rounds activations to 8 bits: its logits, capped at 20, may differ by this much.
        let allowed = 1.5;
        if got.iter().any(|v| !v.is_finite()) || apart > allowed {
            bail!("{name}: logits differ from the reference by up to {apart}, {allowed} is allowed");
        }
        Ok(format!("{name}: logits within {apart:.3} of the reference"))
    }
}

fn text(opened: &Opened) -> Result<String> {
    let text = Text::new(opened.gguf.as_ref().context("no file")?)?;
    let template = text.template()?;
    Ok(format!("{} tokens, template of {} bytes", text.tokenizer.vocab_size(), template.source().len()))
}

/// Names of the NVIDIA cards that the kernel's driver lists.
fn nvidia_cards() -> Vec<String> {
    let folders = std::fs::read_dir("/proc/driver/nvidia/gpus").into_iter().flatten().flatten();
    let mut texts: Vec<String> =
        folders.filter_map(|f| std::fs::read_to_string(f.path().join("information")).ok()).collect();
    texts.sort();
    texts.iter().filter_map(|text| card_name(text)).collect()
}

/// The name in a card's `information` file.
fn card_name(information: &str) -> Option<String> {
    let model = information.lines().find_map(|line| line.strip_prefix("Model:"))?;
    Some(model.trim().to_string())
}

/// The cards by name, and whether muser can use them.
fn gpu(cards: &[String], usable: bool) -> Result<String, String> {
    let mut names: Vec<String> = vec![];
    for card in cards {
        let count = cards.iter().filter(|c| *c == card).count();
        let name = if count > 1 { format!("{count} x {card}") } else { card.clone() };
        if !names.contains(&name) {
            names.push(name);
        }
    }
    match (names.join(", "), usable) {
        (names, true) if names.is_empty() => Ok("an NVIDIA GPU".into()),
        (names, true) => Ok(names),
        (names, false) if names.is_empty() => Err("none that muser can use".into()),
        (names, false) => Err(format!("{names}, but its libraries can't be loaded")),
    }
}

/// Free and whole memory, where the system tells it.
fn memory() -> Result<String, String> {
    let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kilobytes = |key: &str| -> Option<u64> {
        info.lines().find_map(|l| l.strip_prefix(key))?.split_whitespace().nth(1)?.parse().ok()
    };
    match (kilobytes("MemAvailable"), kilobytes("MemTotal")) {
        (Some(free), Some(total)) => {
            let text = format!("{} free of {}", output::bytes(free * 1024), output::bytes(total * 1024));
            if free > 2_000_000 { Ok(text) } else { Err(text) }
        }
        _ => Ok("unknown: this system has no /proc/meminfo".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cards_are_named() {
        // As the driver's documentation shows the file.
        let information =
            "Model: \t\t NVIDIA H200\nIRQ:   \t\t 11\nGPU UUID: \t GPU-0\nVideo BIOS: \t 96.00\n";
        let card = card_name(information).unwrap();
        assert_eq!(card, "NVIDIA H200");
        assert_eq!(gpu(&[card.clone(), card.clone()], true), Ok("2 x NVIDIA H200".into()));
        assert_eq!(gpu(&[], true), Ok("an NVIDIA GPU".into()));
        assert!(gpu(&[card], false).unwrap_err().starts_with("NVIDIA H200, but"));
        assert!(gpu(&[], false).is_err());
    }
}
