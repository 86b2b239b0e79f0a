//! The whole sampler: against llama.cpp's samplers, numpy's random numbers, and its own contract.

use super::*;
use proptest::prelude::*;
use serde_json::Value;

fn fixture() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/sampling/sampling.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn floats(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
}

/// Temperature 1 and nothing else.
fn plain() -> SamplerOptions {
    SamplerOptions { top_k: 0, top_p: 1.0, ..SamplerOptions::default() }
}

fn golden_options(golden: &Value) -> SamplerOptions {
    let mut o = plain();
    for (name, value) in golden.as_object().unwrap() {
        let number = value.as_f64().unwrap_or(f64::NAN) as f32;
        match name.as_str() {
            "temperature" => o.temperature = number,
            "top_k" => o.top_k = number as u32,
            "top_p" => o.top_p = number,
            "min_p" => o.min_p = number,
            "typical_p" => o.typical_p = number,
            "repetition_penalty" => o.repetition_penalty = number,
            "presence_penalty" => o.presence_penalty = number,
            "frequency_penalty" => o.frequency_penalty = number,
            "repeat_last_n" => o.repeat_last_n = number as i32,
            "logit_bias" => {
                let pair = |p: &Value| {
                    (p[0].as_u64().unwrap() as u32, p[1].as_f64().map_or(f32::NEG_INFINITY, |b| b as f32))
                };
                o.logit_bias = value.as_array().unwrap().iter().map(pair).collect();
            }
            other => panic!("no option {other}"),
        }
    }
    o
}

#[test]
fn every_stage_keeps_what_llama_cpp_keeps() {
    let fixture = fixture();
    let cases = fixture["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 81);
    for case in cases {
        let logits = floats(&fixture["logits"][case["logits"].as_str().unwrap()]);
        let mut sampler = Sampler::new(golden_options(&case["options"]), logits.len()).unwrap();
        for token in case["history"].as_array().unwrap() {
            sampler.accept(token.as_u64().unwrap() as u32);
        }
        let ours: Vec<(u32, f64)> = sampler.distribution(&logits, None).unwrap().iter().collect();
        let theirs: Vec<(u32, f64)> = case["kept"]
            .as_array()
            .unwrap()
            .iter()
            .map(|k| (k[0].as_u64().unwrap() as u32, k[1].as_f64().unwrap()))
            .collect();
        let what = format!("{} {}", case["logits"], case["options"]);
        assert_eq!(
            ours.iter().map(|k| k.0).collect::<Vec<_>>(),
            theirs.iter().map(|k| k.0).collect::<Vec<_>>(),
            "{what}"
        );
        for (our, their) in ours.iter().zip(&theirs) {
            assert!((our.1 - their.1).abs() < 2e-6 * their.1 + 1e-11, "{what}: {our:?} {their:?}");
        }
    }
}

#[test]
fn random_numbers_are_numpys() {
    for golden in fixture()["uniform"].as_array().unwrap() {
        let mut rng = Mt19937::new(golden["seed"].as_str().unwrap().parse().unwrap());
        for value in golden["values"].as_array().unwrap() {
            assert_eq!(rng.bits53(), value.as_u64().unwrap());
        }
    }
}

/// Draws by numpy's numbers: the first token whose cumulative probability exceeds the uniform number.
#[test]
fn a_draw_inverts_the_cumulative_distribution() {
    let fixture = fixture();
    let logits = floats(&fixture["logits"]["usual"]);
    let sum: f64 = logits.iter().map(|x| f64::from(*x).exp()).sum();
    for golden in fixture["uniform"].as_array().unwrap() {
        let seed = golden["seed"].as_str().unwrap().parse().unwrap();
        let mut sampler = Sampler::new(SamplerOptions { seed: Some(seed), ..plain() }, logits.len()).unwrap();
        assert_eq!(sampler.seed(), seed);
        for value in golden["values"].as_array().unwrap() {
            let mut cumulative = 0.0;
            let want = logits.iter().position(|x| {
                cumulative += f64::from(*x).exp() / sum;
                cumulative > value.as_u64().unwrap() as f64 / (1u64 << 53) as f64
            });
            assert_eq!(Some(sampler.sample(&logits, None).unwrap().token as usize), want, "seed {seed}");
        }
    }
}

#[test]
fn greedy_takes_the_lowest_of_equal_logits_after_penalties_and_mask() {
    let logits = [1.0, 3.0, 0.0, 3.0, 2.5];
    let choose = |options: SamplerOptions, history: &[u32], mask: Option<&TokenMask>| {
        let mut sampler = Sampler::new(options, 5).unwrap();
        sampler.set_history(history);
        let before = sampler.rng.clone();
        let token = sampler.sample(&logits, mask).unwrap().token;
        assert_eq!(sampler.rng, before, "greedy draws nothing");
        token
    };
    let greedy = SamplerOptions::greedy();
    assert_eq!(choose(greedy.clone(), &[1], None), 1);
    assert_eq!(choose(SamplerOptions { presence_penalty: 0.1, ..greedy.clone() }, &[1], None), 3);
    assert_eq!(choose(SamplerOptions { repetition_penalty: 2.0, ..greedy.clone() }, &[1, 3], None), 4);
    assert_eq!(choose(SamplerOptions { logit_bias: vec![(2, 9.0)], ..greedy.clone() }, &[], None), 2);
    let mut mask = TokenMask::none(5);
    mask.set_words(&[0b10001]);
    assert_eq!(choose(greedy, &[], Some(&mask)), 4);
}

#[test]
fn plain_greedy_is_only_what_a_device_can_do() {
    let is = |options: SamplerOptions| Sampler::new(options, 10).unwrap().plain_greedy();
    let greedy = SamplerOptions::greedy();
    assert!(is(greedy.clone()));
    assert!(is(SamplerOptions { presence_penalty: 1.0, repeat_last_n: 0, ..greedy.clone() }));
    assert!(!is(SamplerOptions::default()));
    assert!(!is(SamplerOptions { presence_penalty: 1.0, ..greedy.clone() }));
    assert!(!is(SamplerOptions { logprobs: Some(0), ..greedy.clone() }));
    assert!(!is(SamplerOptions { logit_bias: vec![(1, 1.0)], ..greedy }));
}

/// The default options look at 64 logits, and more of them than that decide under penalties and masks, too.
#[test]
fn the_largest_logits_decide_unless_others_may_rise() {
    let looks = |options: SamplerOptions| Sampler::new(options, 10).unwrap().looks_at();
    let d = SamplerOptions::default;
    assert_eq!(looks(d()), Some(64));
    assert_eq!(looks(SamplerOptions { logit_bias: vec![(1, 1.0)], ..SamplerOptions::greedy() }), None);
    assert_eq!(looks(SamplerOptions { logit_bias: vec![(1, f32::NEG_INFINITY)], ..d() }), Some(64));
    assert_eq!(looks(SamplerOptions { presence_penalty: 1.0, ..SamplerOptions::greedy() }), Some(1));
    assert_eq!(looks(SamplerOptions { presence_penalty: -1.0, ..d() }), None);
    assert_eq!(looks(SamplerOptions { repetition_penalty: 0.9, ..d() }), None);
    assert_eq!(looks(SamplerOptions { repetition_penalty: 0.9, repeat_last_n: 0, ..d() }), Some(64));
    assert_eq!(looks(SamplerOptions { logprobs: Some(1), ..d() }), None);
    assert_eq!(looks(SamplerOptions { top_k: 0, ..d() }), None);

    let tokens: Vec<(u32, f32)> = (0..100).map(|t| (t * 7, -(t as f32))).collect();
    let decides = |options, n, mask: Option<&TokenMask>| {
        let mut sampler = Sampler::new(options, 1000).unwrap();
        [7, 7, 14].iter().for_each(|t| sampler.accept(*t));
        let largest = Largest { tokens: &tokens[..n], floor: 1.0 - n as f32 };
        sampler.sample_largest(largest, mask).unwrap().is_some()
    };
    assert_eq!([63, 64].map(|n| decides(d(), n, None)), [false, true]);
    let penalty = SamplerOptions { presence_penalty: 90.0, ..d() };
    assert_eq!([65, 66].map(|n| decides(penalty.clone(), n, None)), [false, true]);
    let mut mask = TokenMask::none(1000);
    (0..1000).filter(|t| t % 3 > 0).for_each(|t| mask.allow(t));
    assert_eq!([95, 96].map(|n| decides(d(), n, Some(&mask))), [false, true]);
}

#[test]
fn options_outside_their_range_are_named() {
    let refused = |options: SamplerOptions| Sampler::new(options, 100).unwrap_err().to_string();
    let d = SamplerOptions::default;
    let cases = [
        (
            SamplerOptions { temperature: -0.5, ..d() },
            "sampling option temperature is -0.5; allowed: 0 (greedy) and above",
        ),
        (
            SamplerOptions { temperature: f32::NAN, ..d() },
            "sampling option temperature is NaN; allowed: 0 (greedy) and above",
        ),
        (
            SamplerOptions { temperature: f32::INFINITY, ..d() },
            "sampling option temperature is inf; allowed: 0 (greedy) and above",
        ),
        (SamplerOptions { top_p: 1.5, ..d() }, "sampling option top_p is 1.5; allowed: 0 to 1"),
        (SamplerOptions { min_p: -1.0, ..d() }, "sampling option min_p is -1; allowed: 0 to 1"),
        (SamplerOptions { typical_p: 2.0, ..d() }, "sampling option typical_p is 2; allowed: 0 to 1"),
        (
            SamplerOptions { repetition_penalty: 0.0, ..d() },
            "sampling option repetition_penalty is 0; allowed: 0.01 to 100",
        ),
        (
            SamplerOptions { repeat_last_n: -2, ..d() },
            "sampling option repeat_last_n is -2; allowed: -1 (all), 0 and above",
        ),
        (
            SamplerOptions { presence_penalty: 1e9, ..d() },
            "sampling option presence_penalty is 1000000000; allowed: -100 to 100",
        ),
        (
            SamplerOptions { frequency_penalty: f32::NAN, ..d() },
            "sampling option frequency_penalty is NaN; allowed: -100 to 100",
        ),
        (SamplerOptions { logprobs: Some(21), ..d() }, "sampling option logprobs is 21; allowed: 0 to 20"),
        (
            SamplerOptions { logit_bias: vec![(1, f32::INFINITY)], ..d() },
            "sampling option logit_bias is inf; allowed: -1000 to 1000, or minus infinity",
        ),
        (
            SamplerOptions { logit_bias: vec![(100, 0.0)], ..d() },
            "token 100 does not exist: the vocabulary has 100 tokens, numbered from 0",
        ),
    ];
    for (options, message) in cases {
        assert_eq!(refused(options), message);
    }
}

#[test]
fn bad_rows_are_errors() {
    for options in [SamplerOptions::default(), SamplerOptions::greedy(), plain()] {
        let mut sampler = Sampler::new(options, 3).unwrap();
        let nan = sampler.sample(&[0.0, 1.0, f32::NAN], None).unwrap_err();
        assert!(matches!(nan, SampleError::NotFinite { token: 2, .. }), "{nan}");
        let infinite = sampler.forced(0, &[0.0, f32::INFINITY, 1.0]).unwrap_err();
        assert_eq!(infinite, SampleError::NotFinite { token: 1, value: f32::INFINITY });
        assert!(matches!(sampler.sample(&[0.0], None), Err(SampleError::Length { got: 1, vocab: 3, .. })));
        let mask = TokenMask::none(3);
        assert_eq!(sampler.sample(&[0.0; 3], Some(&mask)), Err(SampleError::NothingAllowed));
        let short = TokenMask::none(2);
        assert!(matches!(sampler.sample(&[0.0; 3], Some(&short)), Err(SampleError::Length { got: 2, .. })));
        assert_eq!(sampler.forced(3, &[0.0; 3]), Err(SampleError::NoSuchToken { token: 3, vocab: 3 }));
    }
    let forbidden = (0..3).map(|token| (token, f32::NEG_INFINITY)).collect();
    let mut sampler = Sampler::new(SamplerOptions { logit_bias: forbidden, ..plain() }, 3).unwrap();
    assert_eq!(sampler.sample(&[0.0; 3], None), Err(SampleError::NothingAllowed));
}

/// The largest finite logits, with factors that overflow.
#[test]
fn huge_logits_stay_ranked() {
    let options = SamplerOptions { repetition_penalty: 0.01, ..plain() };
    let mut sampler = Sampler::new(options, 3).unwrap();
    sampler.set_history(&[0, 2]);
    let kept: Vec<_> = sampler.distribution(&[f32::MAX, 0.0, f32::MIN], None).unwrap().iter().collect();
    assert_eq!(kept, [(0, 1.0), (1, 0.0), (2, 0.0)]);
}

/// Log-softmax of 1..=4 with numpy: x - log(sum(exp(x))).
#[test]
fn logprobs_are_of_the_raw_logits() {
    let logits = [1.0, 4.0, 2.0, 3.0];
    let options =
        SamplerOptions { logit_bias: vec![(1, -50.0)], logprobs: Some(2), temperature: 0.0, ..plain() };
    let mut sampler = Sampler::new(options.clone(), 4).unwrap();
    let chosen = sampler.sample(&logits, None).unwrap();
    let logprobs = chosen.logprobs.unwrap();
    assert_eq!(chosen.token, 3);
    let top =
        [TokenLogprob { token: 1, logprob: -0.440_189_7 }, TokenLogprob { token: 3, logprob: -1.440_189_7 }];
    assert_eq!(logprobs, Logprobs { logprob: -1.440_189_7, top: top.to_vec() });

    sampler.set_options(SamplerOptions { logprobs: Some(0), ..options }).unwrap();
    let forced = sampler.forced(0, &logits).unwrap().logprobs.unwrap();
    assert_eq!(forced, Logprobs { logprob: -3.440_189_7, top: vec![] });
}

#[test]
fn seeds_are_drawn_when_none_is_given() {
    let seeds: Vec<u64> = (0..4).map(|_| Sampler::new(plain(), 2).unwrap().seed()).collect();
    assert!(seeds.iter().any(|seed| *seed != seeds[0]), "{seeds:?}");
}

/// Chi-squared, 99th percentile for 7 degrees of freedom: 18.475 (published tables).
#[test]
fn draws_follow_the_distribution() {
    let logits = [0.0, 1.0, -1.0, 0.5, 2.0, 0.25, -0.5, 1.5];
    let mut sampler = Sampler::new(SamplerOptions { seed: Some(1), temperature: 1.3, ..plain() }, 8).unwrap();
    let expected: Vec<(u32, f64)> = sampler.distribution(&logits, None).unwrap().iter().collect();
    let n = 20_000;
    let mut counts = [0f64; 8];
    (0..n).for_each(|_| counts[sampler.sample(&logits, None).unwrap().token as usize] += 1.0);
    let chi: f64 =
        expected.iter().map(|(t, p)| (counts[*t as usize] - p * n as f64).powi(2) / (p * n as f64)).sum();
    assert!(chi < 18.475, "{chi}: {counts:?}");
}

fn any_options() -> impl Strategy<Value = SamplerOptions> {
    let chosen = (0.1f32..2.0, 0u32..40, 0.1f32..1.2, 0f32..0.2, 0.3f32..1.5);
    let penalties = (0.8f32..1.5, -1i32..12, -1f32..1.0, -1f32..1.0, any::<u64>());
    (chosen, penalties).prop_map(
        |((temperature, top_k, top_p, min_p, typical), (repetition, last, presence, frequency, seed))| {
            SamplerOptions {
                temperature,
                top_k,
                top_p: top_p.min(1.0),
                min_p,
                typical_p: typical.min(1.0),
                repetition_penalty: repetition,
                repeat_last_n: last,
                presence_penalty: presence,
                frequency_penalty: frequency,
                logit_bias: vec![(3, 0.5)],
                seed: Some(seed),
                logprobs: None,
            }
        },
    )
}

/// Made-up logits that depend on the step.
fn row(step: usize) -> Vec<f32> {
    (0..32).map(|i| ((i * 7 + step * 13) % 29) as f32 * 0.2).collect()
}

fn continuation(sampler: &mut Sampler, steps: std::ops::Range<usize>) -> Vec<u32> {
    let mut step = |i| {
        let token = sampler.sample(&row(i), None).unwrap().token;
        sampler.accept(token);
        token
    };
    steps.map(&mut step).collect()
}

proptest! {
    #[test]
    fn clones_saved_states_and_histories_continue_alike(options in any_options(), steps in 0usize..40) {
        let mut sampler = Sampler::new(options.clone(), 32).unwrap();
        let tokens = continuation(&mut sampler, 0..steps);
        let saved = sampler.save();
        let mut clone = sampler.clone();
        let want = continuation(&mut sampler, steps..steps + 30);
        prop_assert_eq!(&continuation(&mut clone, steps..steps + 30), &want);

        let mut restored = Sampler::new(SamplerOptions { seed: Some(99), ..options.clone() }, 32).unwrap();
        restored.accept(1);
        restored.restore(&saved).unwrap();
        prop_assert_eq!(&continuation(&mut restored, steps..steps + 30), &want);

        // The history alone, on a fresh start, gives the same distribution.
        let mut fresh = Sampler::new(options, 32).unwrap();
        fresh.set_history(&[tokens.as_slice(), &want].concat());
        let distribution = |s: &mut Sampler| s.distribution(&row(0), None).unwrap().iter().collect::<Vec<_>>();
        prop_assert_eq!(distribution(&mut fresh), distribution(&mut sampler));
    }

    /// What a card finds of a row decides as the whole row does, or not at all.
    #[test]
    fn largest_logits_choose_as_all_of_them(
        mut options in any_options(),
        bias in -1f32..0.3,
        greedy in any::<bool>(),
        logits in proptest::collection::vec((-40i32..40).prop_map(|x| x as f32 * 0.25), 4..700),
        history in proptest::collection::vec(0u32..64, 0..30),
        (k, forbidden, searched) in (1usize..200, 1u32..9, any::<bool>()),
    ) {
        options.logit_bias = vec![(3, bias)];
        if greedy {
            options.temperature = 0.0;
        }
        let n = logits.len() as u32;
        let mut mask = TokenMask::none(logits.len());
        // Of every nine tokens some are forbidden, or none and there is no mask.
        (0..n).filter(|t| t % 9 >= forbidden - 1).for_each(|t| mask.allow(t));
        let mask = Some(&mask).filter(|_| forbidden > 1);
        let allowed = |t: &u32| !searched || mask.is_none_or(|mask| mask.allows(*t));
        let mut tokens: Vec<(u32, f32)> = (0..n).filter(allowed).map(|t| (t, logits[t as usize])).collect();
        tokens.sort_by(|a, b| b.1.total_cmp(&a.1));
        let floor = tokens.get(k - 1).map_or(f32::NEG_INFINITY, |kth| kth.1);
        tokens.retain(|t| t.1 >= floor);
        let mut sampler = Sampler::new(options.clone(), logits.len()).unwrap();
        history.iter().filter(|t| **t < n).for_each(|t| sampler.accept(*t));
        let mut other = sampler.clone();
        let found = other.sample_largest(Largest { tokens: &tokens, floor }, mask);
        match found {
            Ok(None) => {
                prop_assert_eq!(&other.rng, &sampler.rng);
                let plain = options.penalty_window() == 0 && bias <= 0.0 && (mask.is_none() || searched);
                prop_assert!(!plain || bias < 0.0 || k < sampler.looks_at().unwrap_or(usize::MAX));
            }
            found => {
                prop_assert_eq!(found.map(Option::unwrap), sampler.sample(&logits, mask));
                prop_assert_eq!(&other.rng, &sampler.rng);
            }
        }
    }

    #[test]
    fn damaged_states_are_refused_or_harmless(cut in 0usize..2600, at in 0usize..2600, byte in any::<u8>()) {
        let mut sampler = Sampler::new(SamplerOptions::default(), 32).unwrap();
        continuation(&mut sampler, 0..10);
        let mut saved = sampler.save();
        prop_assert!(sampler.restore(&saved[..cut % saved.len()]).is_err());
        let at = at % saved.len();
        saved[at] = byte;
        if sampler.restore(&saved).is_ok() {
            continuation(&mut sampler, 0..10);
        }
    }
}
