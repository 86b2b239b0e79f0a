//! `muser perplexity`: how well the model predicts a text, and how far its logits are from stored ones.

use crate::cmd::logits::each;
use crate::device::DeviceArgs;
use crate::open::{Draft, ModelArgs, SourceArgs};
use crate::output::Progress;
use crate::text::Text;
use crate::{input, npy};
use anyhow::{Context, Result, bail};
use clap::Args;
use muser_text::Specials;
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;

/// Measure how well the model predicts a text, and the distance of its logits from stored ones
///
/// The text is cut into windows that are computed on their own, each with the beginning-of-text token before it where the
/// model has one. Predictions are scored from the middle of a window on, where they have at least half a window to go by
/// (as llama.cpp does it).
#[derive(Args)]
pub struct Perplexity {
    /// Text file; `-` is standard input
    text: PathBuf,
    /// Tokens of a window
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(4..))]
    window: u32,
    /// Most windows
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    windows: Option<u32>,
    /// Store the logits of every scored position in a NumPy file
    #[arg(long, value_name = "FILE")]
    store: Option<PathBuf>,
    /// Kullback-Leibler divergence from the logits that an earlier run stored with the same text and windows
    #[arg(long, value_name = "FILE", conflicts_with = "store")]
    against: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Sums over scored positions.
#[derive(Default)]
struct Sums {
    count: usize,
    nll: f64,
    nll_squared: f64,
    kl: Vec<f64>,
    same_best: usize,
}

impl Perplexity {
    /// Runs the command.
    pub fn run(self) -> Result<()> {
        let opened = SourceArgs { model: self.model, draft: Some(Draft::Off) }.open()?;
        let file = opened.gguf.as_ref().context("a model file is needed for its tokenizer")?;
        let text = Text::new(file)?;
        let given =
            if self.text.as_os_str() == "-" { input::stdin_text()? } else { input::text_file(&self.text)? };
        let ids = text.tokenizer.encode(&given, Specials::Plain);
        let bos = text.bos_id();
        let body = self.window as usize - usize::from(bos.is_some());
        let windows: Vec<&[u32]> =
            ids.chunks_exact(body).take(self.windows.map_or(usize::MAX, |n| n as usize)).collect();
        if windows.is_empty() {
            bail!(
                "the text has {} tokens, one window needs {body}; give a longer text or a smaller --window",
                ids.len()
            );
        }
        let first = self.window as usize / 2;
        let vocab = opened.model.geometry().vocab;
        let scored = (self.window as usize - 1 - first) * windows.len();
        let mut store =
            self.store.as_deref().map(|path| npy::Writer::create(path, scored, vocab)).transpose()?;
        let mut against = self.against.as_deref().map(npy::Reader::open).transpose()?;
        if let Some(stored) = against.as_ref().filter(|s| (s.rows, s.cols) != (scored, vocab)) {
            bail!(
                "the stored logits are {} x {}, this text and model give {scored} x {vocab}; use the same text, windows and vocabulary",
                stored.rows,
                stored.cols
            );
        }
        let mut device = self.device.load(&opened, (1, self.window as usize))?;
        let mut sums = Sums::default();
        let mut bar = Progress::new("windows", false);
        for (done, window) in windows.iter().enumerate() {
            let tokens: Vec<u32> = bos.into_iter().chain(window.iter().copied()).collect();
            let mut position = 0;
            each(device.as_mut(), &tokens, self.device.chunk(), &mut |logits| {
                if position >= first && position + 1 < tokens.len() {
                    let stored = against.as_mut().map(npy::Reader::row).transpose()?;
                    sums.add(logits, tokens[position + 1], stored.as_deref());
                    if let Some(store) = &mut store {
                        store.row(logits)?;
                    }
                }
                position += 1;
                Ok(())
            })?;
            bar.at(done as u64 + 1, windows.len() as u64);
        }
        drop(bar);
        if let Some(store) = store {
            store.finish()?;
        }
        sums.print(&opened.name, windows.len(), self.json)
    }
}

impl Sums {
    fn add(&mut self, logits: &[f32], next: u32, stored: Option<&[f32]>) {
        let total = log_sum_exp(logits);
        let nll = total - f64::from(logits[next as usize]);
        self.count += 1;
        self.nll += nll;
        self.nll_squared += nll * nll;
        if let Some(stored) = stored {
            let stored_total = log_sum_exp(stored);
            let kl = stored.iter().zip(logits).map(|(want, got)| {
                let want = f64::from(*want) - stored_total;
                want.exp() * (want - (f64::from(*got) - total))
            });
            self.kl.push(kl.sum());
            let best = |values: &[f32]| muser_core::device::argmax(values);
            self.same_best += usize::from(best(stored) == best(logits));
        }
    }

    fn print(mut self, model: &str, windows: usize, as_json: bool) -> Result<()> {
        let n = self.count as f64;
        let mean = self.nll / n;
        // The standard error of the mean, carried through the exponential.
        let error = mean.exp() * ((self.nll_squared / n - mean * mean).max(0.0) / n).sqrt();
        self.kl.sort_by(f64::total_cmp);
        let kl = (!self.kl.is_empty()).then(|| {
            let at = |share: f64| self.kl[((self.kl.len() - 1) as f64 * share) as usize];
            (self.kl.iter().sum::<f64>() / n, at(0.5), at(0.99), at(1.0), self.same_best as f64 / n)
        });
        let mut out = std::io::stdout().lock();
        if as_json {
            let report = json!({
                "model": model,
                "windows": windows,
                "positions": self.count,
                "loss": mean,
                "perplexity": mean.exp(),
                "perplexity_error": error,
                "kl_mean": kl.map(|k| k.0),
                "kl_median": kl.map(|k| k.1),
                "kl_p99": kl.map(|k| k.2),
                "kl_max": kl.map(|k| k.3),
                "same_best": kl.map(|k| k.4),
            });
            writeln!(out, "{report}")?;
            return Ok(());
        }
        writeln!(out, "{model}: {windows} windows, {} positions scored", self.count)?;
        writeln!(out, "perplexity {:.4} +- {error:.4} (loss {mean:.5})", mean.exp())?;
        if let Some((mean, median, p99, max, best)) = kl {
            writeln!(
                out,
                "KL divergence: mean {mean:.6}, median {median:.6}, 99 % {p99:.6}, largest {max:.6}"
            )?;
            writeln!(out, "same best token: {:.2} %", 100.0 * best)?;
        }
        Ok(())
    }
}

fn log_sum_exp(values: &[f32]) -> f64 {
    let max = values.iter().copied().fold(f32::NEG_INFINITY, f32::max) as f64;
    max + values.iter().map(|v| (f64::from(*v) - max).exp()).sum::<f64>().ln()
}
