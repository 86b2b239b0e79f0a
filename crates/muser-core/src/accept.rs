//! Accepting drafted tokens.
//!
//! Proposals are single tokens, the largest of the drafter's logits or what a lookup has found, so the rule is: choose each row's token with the
//! sequence's own sampler, as if nothing had been drafted, and go on while the choice is the drafted token. Then
//!
//! 1. every token is drawn from the target's distribution given the tokens before it, by the random number that it would have
//!    without drafts: the output is the undrafted output, bit for bit where the logits are;
//! 2. a drafted token t is confirmed with probability p(t), and otherwise the token is drawn from p without t,
//!    renormalised: this is speculative sampling (Leviathan et al., 2023) for a proposal that is certain, whose acceptance
//!    min(1, p/q) is p(t) and whose residual max(0, p - q) is p without t.
//!
//! Penalties, masks, bias and log probabilities therefore need no rules of their own.

/// What one target pass settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verified {
    /// Drafted tokens that were confirmed and stay: their rows' state is valid.
    pub accepted: usize,
    /// The token after them; it still has to be computed.
    pub next: u32,
}

/// Walks the rows of a verified block: row 0 follows the last token, row i the i-th drafted one. `choose` chooses the token
/// of a row, records it, and says whether it is the last one wanted; it is called for each token of the output and no
/// further.
pub fn verify<E>(
    draft: &[u32],
    mut choose: impl FnMut(usize) -> Result<(u32, bool), E>,
) -> Result<Verified, E> {
    for (accepted, drafted) in draft.iter().enumerate() {
        let (next, last) = choose(accepted)?;
        if last || next != *drafted {
            return Ok(Verified { accepted, next });
        }
    }
    let (next, _) = choose(draft.len())?;
    Ok(Verified { accepted: draft.len(), next })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lookup::Lookup;
    use crate::sample::{SampleError, Sampler, SamplerOptions, TokenMask};
    use proptest::prelude::*;

    const VOCAB: usize = 4;

    /// A target whose logits depend on the last token.
    fn row(last: u32) -> [f32; VOCAB] {
        [[0.0, 1.0, 0.5, -0.5], [1.5, 0.2, -1.0, 0.3], [0.1, 0.0, 0.9, 1.2], [-0.3, 0.8, 0.4, 0.0]]
            [last as usize]
    }

    /// Only even tokens after 3.
    fn mask(last: u32) -> Option<TokenMask> {
        let mut mask = TokenMask::none(VOCAB);
        mask.set_words(&[0b0101]);
        Some(mask).filter(|_| last == 3)
    }

    fn options() -> SamplerOptions {
        SamplerOptions { temperature: 0.9, top_k: 3, presence_penalty: 0.6, ..SamplerOptions::default() }
    }

    /// The three tokens that follow token 0, from blocks of two drafted rows.
    fn drafted(
        sampler: &mut Sampler,
        draft: impl Fn(&[u32]) -> Vec<u32>,
        rule: fn(&mut Sampler, &[u32], &[u32]) -> Vec<u32>,
    ) -> Vec<u32> {
        let mut tokens = vec![0];
        while tokens.len() < 4 {
            let block = draft(&tokens);
            let new = rule(sampler, &tokens, &block);
            tokens.extend(new);
        }
        tokens[1..4].to_vec()
    }

    fn choose(sampler: &mut Sampler, before: &[u32], block: &[u32], i: usize) -> Result<u32, SampleError> {
        let last = block[..i].last().or(before.last()).copied().unwrap();
        let token = sampler.sample(&row(last), mask(last).as_ref())?.token;
        sampler.accept(token);
        Ok(token)
    }

    fn by_verify(sampler: &mut Sampler, before: &[u32], block: &[u32]) -> Vec<u32> {
        let verified =
            verify(block, |i| Ok::<_, SampleError>((choose(sampler, before, block, i)?, false))).unwrap();
        [&block[..verified.accepted], &[verified.next]].concat()
    }

    /// Keeps the first drafted token whatever the target says.
    fn by_trust(sampler: &mut Sampler, before: &[u32], block: &[u32]) -> Vec<u32> {
        sampler.accept(block[0]);
        [&block[..1], &by_verify(sampler, &[before, &block[..1]].concat(), &block[1..])].concat()
    }

    /// Samples a rejected row once more, the drafted token not left out.
    fn by_second_draw(sampler: &mut Sampler, before: &[u32], block: &[u32]) -> Vec<u32> {
        let mut second = sampler.clone();
        let _ = second.sample(&row(0), None);
        match by_verify(sampler, before, block) {
            tokens if tokens[0] != block[0] => {
                *sampler = second;
                vec![choose(sampler, before, block, 0).unwrap()]
            }
            tokens => tokens,
        }
    }

    /// Always proposes what a poor drafter might.
    fn poor(tokens: &[u32]) -> Vec<u32> {
        let last = tokens[tokens.len() - 1];
        vec![(last + 1) % 4, last]
    }

    /// What a lookup proposes in a text in which any three tokens stood before: a cycle of all of them, by de Bruijn.
    fn by_lookup(tokens: &[u32]) -> Vec<u32> {
        const CYCLE: &[u8] = b"0001002003011012013021022023031032033111211312212313213322232333000";
        let mut lookup = Lookup::default();
        CYCLE
            .iter()
            .map(|digit| u32::from(digit - b'0'))
            .chain(tokens.iter().copied())
            .for_each(|t| lookup.push(t));
        lookup.follow(lookup.find().unwrap().next, 2)
    }

    /// Probability of each of the 64 outputs, from the sampler's own distributions.
    fn law() -> Vec<f64> {
        let mut law = vec![0.0; 64];
        for (code, p) in law.iter_mut().enumerate() {
            let mut sampler = Sampler::new(options(), VOCAB).unwrap();
            let mut last = 0;
            *p = 1.0;
            for token in [code as u32 >> 4, code as u32 >> 2 & 3, code as u32 & 3] {
                let (row, mask) = (row(last), mask(last));
                let distribution = sampler.distribution(&row, mask.as_ref()).unwrap();
                *p *= distribution.iter().find(|(t, _)| *t == token).map_or(0.0, |(_, p)| p);
                sampler.accept(token);
                last = token;
            }
        }
        law
    }

    /// Chi-squared of 40,000 outputs against the law, over its 99th percentile by Wilson and Hilferty's formula.
    fn chi_squared(draft: fn(&[u32]) -> Vec<u32>, rule: fn(&mut Sampler, &[u32], &[u32]) -> Vec<u32>) -> f64 {
        let law = law();
        let n = 40_000;
        let mut counts = vec![0.0; 64];
        let mut sampler = Sampler::new(SamplerOptions { seed: Some(11), ..options() }, VOCAB).unwrap();
        for _ in 0..n {
            sampler.set_history(&[]);
            let tokens = drafted(&mut sampler, draft, rule);
            counts[tokens.iter().fold(0, |code, t| code << 2 | *t as usize)] += 1.0;
        }
        let possible = || counts.iter().zip(&law).filter(|(_, p)| **p > 0.0);
        if possible().map(|(c, _)| c).sum::<f64>() < f64::from(n) {
            return f64::INFINITY;
        }
        let chi: f64 = possible().map(|(c, p)| (c - p * f64::from(n)).powi(2) / (p * f64::from(n))).sum();
        let k = (possible().count() - 1) as f64;
        chi / (k * (1.0 - 2.0 / (9.0 * k) + 2.326 * (2.0 / (9.0 * k)).sqrt()).powi(3))
    }

    #[test]
    fn drafted_output_has_the_targets_law() {
        assert!((law().iter().sum::<f64>() - 1.0).abs() < 1e-12);
        for draft in [poor, by_lookup] {
            let ratio = chi_squared(draft, by_verify);
            assert!(ratio < 1.0, "chi-squared is {ratio} times its 99th percentile");
        }
    }

    #[test]
    fn the_test_of_the_law_sees_wrong_rules() {
        for draft in [poor, by_lookup] {
            assert!(chi_squared(draft, by_trust) > 1.0);
            assert!(chi_squared(draft, by_second_draw) > 1.0);
        }
    }

    proptest! {
        /// Any drafts, good or bad, leave tokens and random numbers as they are without.
        #[test]
        fn drafts_change_nothing(seed: u32, greedy: bool, blocks in proptest::collection::vec(proptest::collection::vec(0u32..4, 0..6), 1..12)) {
            let temperature = if greedy { 0.0 } else { 0.9 };
            let options = SamplerOptions { seed: Some(seed.into()), temperature, ..options() };
            let mut plain = Sampler::new(options, VOCAB).unwrap();
            let mut sampler = plain.clone();
            let mut tokens = vec![0];
            for block in &blocks {
                tokens.extend(by_verify(&mut sampler, &tokens, block));
            }
            let mut want = vec![0];
            while want.len() < tokens.len() {
                want.push(choose(&mut plain, &want, &[], 0).unwrap());
            }
            prop_assert_eq!(tokens, want);
            prop_assert_eq!(plain.save(), sampler.save());
        }
    }

    #[test]
    fn a_perfect_draft_gains_its_length_and_an_end_clips_it() {
        let ok = |token, last| Ok::<_, ()>((token, last));
        let target = [5, 6, 7, 8];
        assert_eq!(verify(&[5, 6, 7], |i| ok(target[i], false)), Ok(Verified { accepted: 3, next: 8 }));
        assert_eq!(verify(&[5, 6, 7], |i| ok(target[i], i == 1)), Ok(Verified { accepted: 1, next: 6 }));
        assert_eq!(verify(&[5, 9, 7], |i| ok(target[i], false)), Ok(Verified { accepted: 1, next: 6 }));
        assert_eq!(verify(&[], |i| ok(target[i], false)), Ok(Verified { accepted: 0, next: 5 }));
        assert_eq!(verify(&[5, 6], |i| if i == 1 { Err("row 1") } else { Ok((5, false)) }), Err("row 1"));
    }
}
