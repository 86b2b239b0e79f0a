//! What a request asks of the sampler.

use super::{MAX_LOGPROBS, SampleError};

/// Sampling options. The default is what the model's card recommends: temperature 1, top-p 0.95, top-k 64.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplerOptions {
    /// Divides the logits of the candidates that are left; 0 picks the largest logit. Default 1.
    pub temperature: f32,
    /// Keeps this many of the largest logits; 0 keeps all. Default 64.
    pub top_k: u32,
    /// Keeps the most probable tokens whose probabilities reach this sum; 1 keeps all, 0 the most probable one. Default 0.95.
    pub top_p: f32,
    /// Keeps tokens at least this fraction as probable as the most probable one; 0 keeps all. Default 0.
    pub min_p: f32,
    /// Keeps the tokens whose surprise is nearest the expected one, up to this sum of probabilities; 1 keeps all. Default 1.
    pub typical_p: f32,
    /// Divides positive logits of tokens in the history and multiplies negative ones; 1 does nothing. Default 1.
    pub repetition_penalty: f32,
    /// How many of the last tokens the three penalties look at; -1 all, 0 none. Default 64.
    pub repeat_last_n: i32,
    /// Subtracted once from the logit of each token in the history. Default 0.
    pub presence_penalty: f32,
    /// Subtracted from the logit of a token for each time it is in the history. Default 0.
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens before all else; minus infinity forbids a token. Default none.
    pub logit_bias: Vec<(u32, f32)>,
    /// Start of the random numbers; `None` draws one. Default `None`.
    pub seed: Option<u64>,
    /// Report log probabilities: of the chosen token, and of this many most probable ones. Default `None`.
    pub logprobs: Option<usize>,
}

impl Default for SamplerOptions {
    fn default() -> Self {
        SamplerOptions {
            temperature: 1.0,
            top_k: 64,
            top_p: 0.95,
            min_p: 0.0,
            typical_p: 1.0,
            repetition_penalty: 1.0,
            repeat_last_n: 64,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: vec![],
            seed: None,
            logprobs: None,
        }
    }
}

impl SamplerOptions {
    /// Always the largest logit.
    pub fn greedy() -> Self {
        SamplerOptions { temperature: 0.0, ..SamplerOptions::default() }
    }

    /// Tokens of history that penalties look at; 0 if no penalty is set.
    pub(super) fn penalty_window(&self) -> usize {
        let off =
            self.repetition_penalty == 1.0 && self.presence_penalty == 0.0 && self.frequency_penalty == 0.0;
        if off { 0 } else { usize::try_from(self.repeat_last_n).unwrap_or(usize::MAX) }
    }

    /// Whether bias or penalties may make a logit larger.
    pub(super) fn raises(&self) -> bool {
        let penalties =
            self.repetition_penalty < 1.0 || self.presence_penalty < 0.0 || self.frequency_penalty < 0.0;
        penalties && self.penalty_window() > 0 || self.logit_bias.iter().any(|(_, bias)| *bias > 0.0)
    }

    /// Refuses what has no meaning, naming the field.
    pub(super) fn check(&self, vocab: usize) -> Result<(), SampleError> {
        let number = |field, value: f32, from: f32, to: f32, allowed| {
            if (from..=to).contains(&value) {
                return Ok(());
            }
            Err(SampleError::Option { field, value: value.to_string(), allowed })
        };
        number("temperature", self.temperature, 0.0, f32::MAX, "0 (greedy) and above")?;
        number("top_p", self.top_p, 0.0, 1.0, "0 to 1")?;
        number("min_p", self.min_p, 0.0, 1.0, "0 to 1")?;
        number("typical_p", self.typical_p, 0.0, 1.0, "0 to 1")?;
        number("repetition_penalty", self.repetition_penalty, 0.01, 100.0, "0.01 to 100")?;
        number("presence_penalty", self.presence_penalty, -100.0, 100.0, "-100 to 100")?;
        number("frequency_penalty", self.frequency_penalty, -100.0, 100.0, "-100 to 100")?;
        if self.repeat_last_n < -1 {
            let value = self.repeat_last_n.to_string();
            return Err(SampleError::Option {
                field: "repeat_last_n",
                value,
                allowed: "-1 (all), 0 and above",
            });
        }
        if let Some(top) = self.logprobs.filter(|top| *top > MAX_LOGPROBS) {
            return Err(SampleError::Option {
                field: "logprobs",
                value: top.to_string(),
                allowed: "0 to 20",
            });
        }
        for (token, bias) in &self.logit_bias {
            if *token as usize >= vocab {
                return Err(SampleError::NoSuchToken { token: *token, vocab });
            }
            if *bias != f32::NEG_INFINITY {
                number("logit_bias", *bias, -1000.0, 1000.0, "-1000 to 1000, or minus infinity")?;
            }
        }
        Ok(())
    }
}
