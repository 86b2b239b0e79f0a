//! `muser docs`: the pages under docs/ that are made from the code.

use crate::args::Cli;
use crate::cmd::kernels;
use crate::listing::entries;
use crate::open::{Draft, GeometryName, ModelArgs, Opened, SourceArgs, SyntheticArgs};
use crate::output::Table;
use anyhow::Result;
use clap::{Args, CommandFactory, ValueEnum};
use muser_core::cost::Batch;
use muser_core::model::QuantMix;
use muser_core::{KvType, Lane, Pass};
use muser_cpu::Isa;
use muser_cuda::Describer;
use muser_format::DType;
use std::fmt::Write as _;
use std::io::Write;

/// Print a page of docs/ that is made from the code
#[derive(Args)]
pub struct Docs {
    page: Page,
}

#[derive(Clone, Copy, ValueEnum)]
enum Page {
    /// docs/kernel-table.md
    KernelTable,
    /// docs/lanes.md
    Lanes,
}

impl Docs {
    /// Runs the command.
    pub fn run(self) -> Result<()> {
        let page = match self.page {
            Page::KernelTable => kernel_table()?,
            Page::Lanes => lanes(),
        };
        Ok(std::io::stdout().lock().write_all(page.as_bytes())?)
    }
}

/// The released geometry with its drafter, without weights.
fn released(quant: QuantMix) -> Result<Opened> {
    let source = SourceArgs { model: ModelArgs::default(), draft: Some(Draft::Auto) };
    let synthetic = SyntheticArgs { geometry: Some(GeometryName::MuseGlimmer30b), quant, layers: None };
    source.open_or_make(&synthetic, false)
}

/// Positions in the cache before the passes of the page.
const DEPTH: usize = 4096;

fn kernel_table() -> Result<String> {
    let mut page = String::from(
        "# The kernel table\n\n\
         One row a kernel, in execution order, for the released geometry (52 layers) with its drafter. `muser kernels` prints\n\
         the same for any model, device and number of rows, `muser kernels --why` with the route ladder of each row. Bytes and\n\
         operations are those of one call. This page is what `muser docs kernel-table` prints; a test compares them.\n",
    );
    let q4_k_m = released(QuantMix::Q4KM)?;
    let nvfp4 = released(QuantMix::Uniform(DType::Nvfp4))?;
    let sections = [
        ("decode, Q4_K_M", &q4_k_m, Pass::Target, Lane::Serving, 1, 1),
        ("a group of 8, Q4_K_M", &q4_k_m, Pass::Target, Lane::Serving, 8, 8),
        ("prefill of 512, Q4_K_M", &q4_k_m, Pass::Target, Lane::Serving, 512, 1),
        ("decode, NVFP4", &nvfp4, Pass::Target, Lane::Serving, 1, 1),
        ("features into the drafter's cache, 4 rows", &q4_k_m, Pass::Inject, Lane::Serving, 4, 1),
        ("a drafter's block of 16", &q4_k_m, Pass::Draft, Lane::Serving, 16, 1),
        ("decode in the strict lane, Q4_K_M", &q4_k_m, Pass::Target, Lane::Strict, 1, 1),
    ];
    for device in ["CPU", "CUDA"] {
        for (title, opened, pass, lane, rows, sequences) in sections {
            let Some(plan) = opened.model.plans.get(pass) else { continue };
            let logits = match pass {
                Pass::Target => sequences,
                Pass::Inject => 0,
                Pass::Draft => rows - 1,
            };
            let batch = Batch { rows, sequences, depth: DEPTH, logits, kv: KvType::F16 };
            let routes = match device {
                "CPU" => muser_cpu::routes(&opened.model, pass, rows, lane, Isa::Avx512),
                _ => Describer::new(&opened.model, lane, false, None, 512, KvType::F16)?
                    .routes(pass, rows, DEPTH)?,
            };
            let listed = entries(&opened.model, plan, &routes, batch);
            let table = kernels::table(&listed, &routes).markdown();
            let _ = write!(page, "\n## {device}: {title}\n\n{table}");
        }
        page += match device {
            "CPU" => {
                "\nThe instruction set stands at the end of a kernel's name; avx2 and scalar run the same kernels and give the same bits.\n"
            }
            _ => {
                "\nFor an H200: another card may spread a product over other tiles. Launches that serve the same steps are joined by +.\n"
            }
        };
    }
    Ok(page)
}

/// What a flag changes; a test makes sure that every flag of a device is listed.
struct Effect {
    flag: &'static str,
    arithmetic: &'static str,
    routes: &'static str,
}

const EFFECTS: &[Effect] = &[
    Effect {
        flag: "device",
        arithmetic: "serving: each device has its own; strict: none",
        routes: "each device has its own kernels",
    },
    Effect { flag: "devices", arithmetic: "as --device", routes: "as --device" },
    Effect {
        flag: "gpu_layers",
        arithmetic: "serving: each layer has its device's; strict: none",
        routes: "the CPU's kernels for the layers before, the GPU's for the rest",
    },
    Effect { flag: "lane", arithmetic: "all of it, see above", routes: "the kernels of the lane" },
    Effect {
        flag: "kv",
        arithmetic: "keys and values are rounded to this type; strict: f16 only",
        routes: "the attention kernel",
    },
    Effect {
        flag: "batch_invariant",
        arithmetic: "CUDA's serving lane: passes of up to 32 rows compute each row as if 16 were beside it; else none",
        routes: "kernels for 16 rows, whatever a pass has; keys split by a row's own depth",
    },
    Effect { flag: "isa", arithmetic: "none", routes: "the same kernels, compiled for these instructions" },
    Effect { flag: "threads", arithmetic: "none", routes: "none" },
    Effect {
        flag: "chunk",
        arithmetic: "CPU and strict: none",
        routes: "more rows a pass take kernels for more rows",
    },
    Effect { flag: "mapped", arithmetic: "none", routes: "weights are unpacked at every use" },
    Effect {
        flag: "draft",
        arithmetic: "CPU, strict and --batch-invariant: none; else what a verified row has from the kernels of a larger batch",
        routes: "verification takes kernels for several rows; the drafter's passes where it is not `lookup`",
    },
    Effect { flag: "draft_rows", arithmetic: "as --draft", routes: "as --draft" },
    Effect {
        flag: "slots",
        arithmetic: "CPU, strict and --batch-invariant: none",
        routes: "more rows a step take kernels for larger groups",
    },
    Effect {
        flag: "cache",
        arithmetic: "CPU and strict: none",
        routes: "what follows kept state is computed in other chunks",
    },
];

/// Environment variables that muser reads.
const ENVIRONMENT: &[(&str, &str)] = &[
    ("MUSER_MODEL", "the default model; no arithmetic"),
    ("MUSER_API_KEY", "a key of `muser serve`; no arithmetic"),
    ("XDG_CACHE_HOME", "compiled CUDA kernels are kept in muser/ there; no arithmetic"),
    ("HOME", "as XDG_CACHE_HOME, with .cache between; no arithmetic"),
    ("NO_COLOR", "no styles in the terminal; no arithmetic"),
];

/// Those that libraries inside muser read.
const LIBRARIES: &[(&str, &str)] = &[
    ("TZ", "the date that a chat template writes into the prompt; no arithmetic"),
    (
        "TERM, TERM_PROGRAM, COLORTERM, CLICOLOR, CLICOLOR_FORCE, LANG",
        "how the terminal is written to; no arithmetic",
    ),
    ("RUST_BACKTRACE, RUST_LIB_BACKTRACE", "what a crash prints; no arithmetic"),
    (
        "RUST_MIN_STACK, TOKIO_UNSTABLE_SHARDED_BLOCKING_QUEUE",
        "threads' stacks, and how the server queues work; no arithmetic",
    ),
    ("CUDA_VISIBLE_DEVICES", "which cards the driver shows; no arithmetic but the card's own"),
    (
        "LD_LIBRARY_PATH",
        "which NVRTC and cuBLAS are found: others may round the serving lane of CUDA otherwise; strict: none",
    ),
];

fn lanes() -> String {
    let mut page = String::from(
        "# Lanes, and what changes arithmetic\n\n\
         A lane is the arithmetic of a whole engine; it is chosen once (`--lane`) and never mixed inside a pass.\n\n\
         **serving** is the default: the fastest that keeps quality. Weights stay quantised, activations are rounded to 8 bits\n\
         where a kernel multiplies integers, and each device has its own kernels. On the CPU it is deterministic: the same model\n\
         and tokens give the same bits for any number of threads, any instruction set, any chunking and any group. On CUDA a\n\
         pass of few rows has its own kernels, so a row's last bits depend on how many stand beside it; with `--batch-invariant`\n\
         they do not, in passes of up to 32 rows, of which decode steps then take no more. A prompt still depends on its chunks:\n\
         the server then takes the same ones whatever else runs, but a prefix from the cache begins them elsewhere.\n\n\
         **strict** gives the same bits on every device, so that one machine can check another. All arithmetic is f32; weights\n\
         are dequantised by their block's formula, each operation rounded once; a dot product has 32 lanes of fused\n\
         multiply-adds, lane l taking the elements l, l + 32, ..., summed pairwise at distances 16, 8, 4, 2, 1; exp, tanh, sigmoid\n\
         and SiLU are muser's own, and so are the powers, cosines and sines of rotary angles, in f64; keys and values are f16,\n\
         rounded to nearest even. Sampling uses whole numbers and functions of its own too: text with a seed is the same everywhere.\n\n\
         ## Flags\n\nNo other flag changes what a model computes.\n\n",
    );
    let cli = Cli::command();
    let mut table = Table::new(&["flag", "arithmetic", "routes", "meaning"]);
    for effect in EFFECTS {
        let help = cli
            .get_subcommands()
            .flat_map(|c| c.get_arguments())
            .find(|a| a.get_id() == effect.flag)
            .and_then(|a| a.get_help())
            .map(ToString::to_string)
            .unwrap_or_default();
        let flag = format!("--{}", effect.flag.replace('_', "-"));
        table.row([flag, effect.arithmetic.into(), effect.routes.into(), help]);
    }
    page += &table.markdown();
    page += "\n## Environment variables\n\n";
    let mut table = Table::new(&["variable", "what it does"]);
    for (name, effect) in ENVIRONMENT.iter().chain(LIBRARIES) {
        table.row([name.to_string(), effect.to_string()]);
    }
    page += &table.markdown();
    page += "\nThis page is what `muser docs lanes` prints; a test compares them.\n";
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flag_of_a_device_says_what_it_changes() {
        let cli = Cli::command();
        for arg in cli.get_subcommands().flat_map(|c| c.get_arguments()) {
            if arg.get_help_heading() == Some("Device") && arg.get_id() != "context" {
                let id = arg.get_id().as_str();
                assert!(EFFECTS.iter().any(|e| e.flag == id), "docs.rs does not say what --{id} changes");
            }
        }
    }

    #[test]
    fn every_environment_variable_is_listed() {
        let crates = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
        let mut folders = vec![std::path::PathBuf::from(crates)];
        let mut read = 0;
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                } else if path.extension().is_some_and(|e| e == "rs")
                    && path.components().any(|c| c.as_os_str() == "src")
                {
                    let text = std::fs::read_to_string(&path).unwrap();
                    for call in ["env::var(\"", "env::var_os(\""] {
                        for name in text.split(call).skip(1).filter_map(|rest| rest.split('"').next()) {
                            read += 1;
                            let known = ENVIRONMENT.iter().any(|(n, _)| *n == name);
                            assert!(known, "{} reads {name}, which docs.rs does not list", path.display());
                        }
                    }
                }
            }
        }
        assert!(read >= ENVIRONMENT.len());
    }
}
