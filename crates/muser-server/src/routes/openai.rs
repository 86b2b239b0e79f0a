//! What OpenAI's routes write alike: usage, timings, finish reasons, log probabilities.

use crate::generate::{Finish, TokenReport, Usage};
use crate::text::TextModel;
use serde_json::{Value, json};

/// The version that answers carry.
pub const FINGERPRINT: &str = concat!("muser-", env!("CARGO_PKG_VERSION"));

/// OpenAI's `finish_reason`.
pub fn finish_reason(finish: &Finish) -> &'static str {
    match finish {
        Finish::Stop | Finish::StopText(_) | Finish::Failed(_) => "stop",
        Finish::Length => "length",
        Finish::ToolCalls => "tool_calls",
    }
}

/// Usage of several choices: they share one prompt.
pub fn usage(all: &[Usage]) -> Value {
    let prompt = all.first().map_or(0, |u| u.report.prompt);
    let sum = |of: fn(&Usage) -> usize| all.iter().map(of).sum::<usize>();
    let generated = sum(|u| u.report.generated);
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": all.first().map_or(0, |u| u.report.cached)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(|u| u.reasoning),
            "accepted_prediction_tokens": sum(|u| u.report.accepted),
            "rejected_prediction_tokens": sum(|u| u.report.drafted - u.report.accepted),
        },
    })
}

/// Measured times of one choice, under llama.cpp's names.
pub fn timings(usage: &Usage) -> Value {
    let r = &usage.report;
    let per_second = |n: usize, seconds: f64| if seconds > 0.0 { n as f64 / seconds } else { 0.0 };
    let ms_each = |n: usize, seconds: f64| if n > 0 { seconds * 1e3 / n as f64 } else { 0.0 };
    let (computed, stepped) = (r.prompt - r.cached, r.generated.saturating_sub(1));
    json!({
        "queue_ms": r.queue_seconds * 1e3,
        "cache_n": r.cached,
        "prompt_n": computed,
        "prompt_ms": r.prompt_seconds * 1e3,
        "prompt_per_token_ms": ms_each(computed, r.prompt_seconds),
        "prompt_per_second": per_second(computed, r.prompt_seconds),
        "predicted_n": r.generated,
        "predicted_ms": r.decode_seconds * 1e3,
        // The first token belongs to the prompt's time.
        "predicted_per_token_ms": ms_each(stepped, r.decode_seconds),
        "predicted_per_second": per_second(stepped, r.decode_seconds),
        "draft_n": r.drafted,
        "draft_n_accepted": r.accepted,
        "lookup_n": r.looked_up,
        "lookup_n_accepted": r.looked_up_accepted,
    })
}

/// One token with its log probabilities, as chat completions write them.
pub fn logprob(text: &TextModel, report: &TokenReport) -> Option<Value> {
    let logprobs = report.logprobs.as_ref()?;
    let entry = |token: u32, logprob: f32| {
        let bytes = text.tokenizer.token_bytes(token).unwrap_or_default();
        json!({"token": String::from_utf8_lossy(bytes), "logprob": logprob, "bytes": bytes})
    };
    let mut out = entry(report.token, logprobs.logprob);
    let top: Vec<Value> = logprobs.top.iter().map(|t| entry(t.token, t.logprob)).collect();
    out["top_logprobs"] = top.into();
    Some(out)
}
