//! How the next token is chosen: flags over the model file's recommendation over muser's defaults.

use anyhow::{Context, Result};
use clap::Args;
use muser_core::sample::SamplerOptions;
use muser_format::Gguf;

/// Sampling flags; what is not given comes from the model file (general.sampling.*), else from the model's card.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Temperature; 0 always takes the most probable token [default: the file's, else 1]
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    pub temp: Option<f32>,
    /// Keep this many of the most probable tokens; 0 keeps all [default: the file's, else 64]
    #[arg(long, value_name = "N")]
    pub top_k: Option<u32>,
    /// Keep tokens until their probabilities sum up to this [default: the file's, else 0.95]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub top_p: Option<f32>,
    /// Keep tokens at least this fraction as probable as the best [default: the file's, else 0]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub min_p: Option<f32>,
    /// Keep tokens of typical surprise up to this sum; 1 keeps all [default: 1]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub typical_p: Option<f32>,
    /// Divide the logits of repeated tokens [default: 1, none]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub repetition_penalty: Option<f32>,
    /// Tokens that penalties look back; -1 all [default: 64]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub repeat_last_n: Option<i32>,
    /// Subtract from the logits of tokens that occurred [default: 0]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub presence_penalty: Option<f32>,
    /// Subtract for each time that a token occurred [default: 0]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub frequency_penalty: Option<f32>,
    /// Add to the logit of a token, as ID=BIAS; -inf forbids it (repeatable)
    #[arg(long, value_name = "ID=BIAS", value_parser = parse_bias)]
    pub logit_bias: Vec<(u32, f32)>,
    /// Start of the random numbers: the same seed gives the same text [default: random]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
}

fn parse_bias(text: &str) -> Result<(u32, f32), String> {
    let parts = text.split_once('=').and_then(|(id, bias)| Some((id.parse().ok()?, bias.parse().ok()?)));
    parts.ok_or_else(|| "is not ID=BIAS, such as 17=-1.5 or 17=-inf".to_string())
}

impl SamplingArgs {
    /// The options, with the file's recommendation where no flag was given.
    pub fn options(&self, file: Option<&Gguf>) -> Result<SamplerOptions> {
        let number = |key: &str| -> Result<Option<f32>> {
            let key = format!("general.sampling.{key}");
            match file.and_then(|f| f.get(&key)) {
                None => Ok(None),
                Some(value) => {
                    let number = value.as_f64().or_else(|| value.as_integer().map(|i| i as f64));
                    let number =
                        number.with_context(|| format!("the model file's key {key} is no number"))?;
                    Ok(Some(number as f32))
                }
            }
        };
        let default = SamplerOptions::default();
        let or = |flag: Option<f32>, key: &str, default: f32| -> Result<f32> {
            Ok(match flag {
                Some(value) => value,
                None => number(key)?.unwrap_or(default),
            })
        };
        Ok(SamplerOptions {
            temperature: or(self.temp, "temp", default.temperature)?,
            top_k: match self.top_k {
                Some(k) => k,
                None => number("top_k")?.map_or(default.top_k, |k| k as u32),
            },
            top_p: or(self.top_p, "top_p", default.top_p)?,
            min_p: or(self.min_p, "min_p", default.min_p)?,
            typical_p: self.typical_p.unwrap_or(default.typical_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(default.repetition_penalty),
            repeat_last_n: self.repeat_last_n.unwrap_or(default.repeat_last_n),
            presence_penalty: self.presence_penalty.unwrap_or(default.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(default.frequency_penalty),
            logit_bias: self.logit_bias.clone(),
            seed: self.seed,
            logprobs: None,
        })
    }
}
