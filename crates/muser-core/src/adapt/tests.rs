//! Simulated machines and texts.

mod lookups;

use super::costs::OLDEST;
use super::*;
use crate::sample::Mt19937;

/// Seconds of a pass, from (rows, seconds) pairs by straight lines, the last slope going on.
struct Machine {
    target: &'static [(f64, f64)],
    draft: f64,
    /// Seconds of a prompt's row, and of giving one to the drafter.
    prompt: f64,
    context: f64,
    /// Largest share that other work adds to a pass.
    noise: f64,
}

const CPU: Machine = Machine {
    target: &[(1.0, 1.0), (2.0, 1.15), (4.0, 1.25), (8.0, 1.6), (16.0, 2.6)],
    draft: 0.18,
    prompt: 0.12,
    context: 0.0055,
    noise: 0.1,
};
const GPU: Machine = Machine {
    target: &[(1.0, 1.0), (16.0, 1.1), (32.0, 1.25)],
    draft: 0.17,
    prompt: 0.02,
    context: 0.0002,
    noise: 0.05,
};
/// A machine that is bound by arithmetic: drafting never pays.
const SLOW: Machine =
    Machine { target: &[(1.0, 1.0), (16.0, 10.0)], draft: 0.3, prompt: 0.6, context: 0.0066, noise: 0.1 };

impl Machine {
    fn target(&self, rows: usize) -> f64 {
        let x = rows as f64;
        let (a, b) =
            self.target.windows(2).map(|w| (w[0], w[1])).find(|(_, b)| b.0 >= x).unwrap_or_else(|| {
                let n = self.target.len();
                (self.target[n - 2], self.target[n - 1])
            });
        a.1 + (b.1 - a.1) * (x - a.0) / (b.0 - a.0)
    }

    /// Mean seconds of a plain step of one row.
    fn plain(&self) -> f64 {
        self.target(1) * (1.0 + self.noise / 2.0)
    }
}

/// An engine on a machine. The first pass of each row count takes five times as long, and one measurement in fifty is
/// spoilt; neither is held against the drafts.
struct Run<'a> {
    machine: &'a Machine,
    costs: Costs,
    rng: Mt19937,
    seen: [Vec<usize>; 2],
    /// Measurements so far, and which of them takes how many times as long by other work.
    measured: usize,
    disturbed: Option<(usize, f64)>,
}

impl<'a> Run<'a> {
    fn new(machine: &'a Machine, seed: u64) -> Self {
        Run {
            machine,
            costs: Costs::default(),
            rng: Mt19937::new(seed),
            seen: [vec![], vec![]],
            measured: 0,
            disturbed: None,
        }
    }

    fn uniform(&mut self) -> f64 {
        self.rng.bits53() as f64 / (1u64 << 53) as f64
    }

    /// What a measurement gives, disturbed or not.
    fn measure(&mut self, seconds: f64) -> f64 {
        self.measured += 1;
        let times =
            self.disturbed.filter(|(which, _)| *which == self.measured).map_or(1.0, |(_, times)| times);
        times * seconds
    }

    /// Measured seconds, and those that count.
    fn time(&mut self, kind: usize, rows: usize, seconds: f64) -> (f64, f64) {
        let noisy = seconds * (1.0 + self.machine.noise * self.uniform());
        let cold = !self.seen[kind].contains(&rows);
        self.seen[kind].push(rows);
        let spoilt = self.uniform() < 0.02;
        (self.measure(noisy * if cold || spoilt { 5.0 } else { 1.0 }), noisy)
    }

    /// One step of a group whose rows are confirmed with these chances, the drafter's and a lookup's: seconds, and each one's
    /// block with the tokens that it brought.
    fn step(&mut self, group: &mut [Seat<'_>], chances: &[[f64; 2]]) -> (f64, Vec<(Block, usize)>) {
        let blocks = blocks(&self.costs, group);
        let asks = |block: &&Block| block.source == Source::Drafter && block.rows > 0;
        let owed: usize = group.iter().zip(&blocks).filter(|(_, b)| asks(b)).map(|(s, _)| s.owed).sum();
        let drafted: usize = blocks.iter().map(|block| block.rows).sum();
        let mut seconds = 0.0;
        if blocks.iter().any(|block| asks(&block)) {
            let rows = blocks.iter().filter(asks).map(|block| block.rows + 1).sum();
            let (measured, warm) = self.time(0, rows, self.machine.draft);
            let context = owed as f64 * self.machine.context;
            self.costs.draft(rows, measured + context, owed);
            seconds += warm + context;
        }
        let rows = group.len() + drafted;
        let (measured, warm) = self.time(1, rows, self.machine.target(rows));
        self.costs.target(rows, measured);
        seconds += warm;
        let mut all = vec![];
        let mut outcomes = vec![];
        for ((block, seat), chances) in blocks.into_iter().zip(group.iter_mut()).zip(chances) {
            let chance = chances[block.source as usize];
            let accepted = (0..block.rows).take_while(|_| self.uniform() < chance).count();
            let owed = if asks(&&block) { std::mem::take(&mut seat.owed) } else { 0 };
            seat.owed += if asks(&&block) { 0 } else { accepted + 1 };
            outcomes.push(Outcome { pace: Some(&mut *seat.pace), block, accepted, owed });
            all.push((block, accepted + 1));
        }
        settle(&self.costs, seconds, outcomes);
        (seconds, all)
    }

    /// A sequence of its own; `chance` by token. Seconds a token.
    fn sequence(&mut self, tokens: usize, chance: impl Fn(usize) -> f64) -> f64 {
        self.answer(0, tokens, 0.7, chance).0 / tokens as f64
    }

    /// The same after a prompt, after which the target is as sure as `sure` of its best token: seconds of prompt and answer, and
    /// whether it drafted.
    fn answer(
        &mut self,
        prompt: usize,
        tokens: usize,
        sure: f64,
        chance: impl Fn(usize) -> f64,
    ) -> (f64, bool) {
        let mut pace = Pace::auto(15);
        let mut seconds = prompt as f64 * self.machine.prompt;
        if prompt > 0 {
            let measured = self.measure(seconds);
            self.costs.prompt(prompt, measured, self.machine.context / self.machine.prompt);
        }
        pace.begin(seconds, sure);
        let (mut done, mut owed, mut drafted) = (0, prompt, false);
        while done < tokens {
            let mut seats = [Seat { owed, ..seat(&mut pace, 15.min(tokens - done - 1)) }];
            let (s, t) = self.step(&mut seats, &[[chance(done), 0.0]]);
            owed = seats[0].owed;
            drafted |= pace.quiet == 0;
            seconds += s;
            done += t[0].1;
        }
        (seconds, drafted)
    }
}

/// Chance of a row at which a target pass gives 2.6 and 9.4 tokens with 15 drafted rows.
const PROSE: f64 = 0.6155;
const CHAT: f64 = 0.9215;

#[test]
fn never_slower_than_plain() {
    for (name, machine) in [("cpu", &CPU), ("gpu", &GPU), ("slow", &SLOW)] {
        let texts: [(&str, &dyn Fn(usize) -> f64); 6] = [
            ("hostile", &|_| 0.0),
            ("hard", &|_| 0.15),
            ("prose", &|_| PROSE),
            ("chat", &|_| CHAT),
            ("chat, then hostile", &|t| if t < 150 { CHAT } else { 0.0 }),
            ("in turns", &|t| if t / 40 % 2 == 0 { 0.0 } else { CHAT }),
        ];
        let mut run = Run::new(machine, 3);
        for i in 0..30 {
            let (what, chance) = texts[i % texts.len()];
            let tokens = 200 + 37 * i;
            let share = run.sequence(tokens, chance) / machine.plain();
            assert!(share <= 1.02, "{name}, {what}, {tokens} tokens: {share} of plain");
        }
        // An engine's first sequence pays for learning what passes cost.
        for seed in 0..20 {
            let share = Run::new(machine, seed).sequence(200, |_| 0.0) / machine.plain();
            assert!(share <= 1.02, "{name}, first sequence, seed {seed}: {share} of plain");
        }
    }
}

#[test]
fn short_answers_do_not_pay_for_the_context() {
    // What a sequence takes that never drafts.
    let plain = |machine: &Machine, prompt: usize, tokens: usize| {
        prompt as f64 * machine.prompt + tokens as f64 * machine.plain()
    };
    for machine in [&CPU, &GPU, &SLOW] {
        let mut run = Run::new(machine, 5);
        for round in 0..6 {
            for (prompt, tokens) in [(400, 12), (200, 40), (30, 60), (500, 200)] {
                let (seconds, _) = run.answer(prompt, tokens, 0.3, |_| 0.05);
                let share = seconds / plain(machine, prompt, tokens);
                // The engine's first sequences pay for learning what passes cost.
                assert!(round == 0 || share < 1.02, "{prompt} tokens of prompt, {tokens}: {share} of plain");
            }
        }
        // On a card a draft costs little more than its context.
        let (_, drafted) = run.answer(400, 12, 0.3, |_| 0.05);
        assert!(!drafted || machine.context < 0.001);
    }
    // A target that is sure of itself is drafted for at once, where that can pay.
    for machine in [&CPU, &GPU] {
        let mut run = Run::new(machine, 5);
        let shares: Vec<f64> =
            (0..20).map(|_| run.answer(100, 40, 1.0, |_| CHAT).0 / plain(machine, 100, 40)).collect();
        let mean = shares.iter().sum::<f64>() / 20.0;
        assert!(mean < 0.8, "{mean} of plain");
    }
}

#[test]
fn lengths_are_near_the_best() {
    for (name, machine) in [("cpu", &CPU), ("gpu", &GPU), ("slow", &SLOW)] {
        for (what, chance) in [("hostile", 0.0), ("prose", PROSE), ("code", 0.8), ("chat", CHAT)] {
            let gain = |d: usize| {
                let tokens: f64 = (0..=d).map(|j| chance.powi(j as i32)).sum();
                tokens / if d == 0 { 1.0 } else { machine.target(1 + d) + machine.draft }
            };
            let best = (0..=15).map(gain).fold(0.0, f64::max);
            let gains =
                (0..10).map(|seed| machine.plain() / Run::new(machine, seed).sequence(4000, |_| chance));
            let mean = gains.sum::<f64>() / 10.0;
            assert!(mean > 0.92 * best, "{name}, {what}: {mean} times plain, the best is {best}");
        }
    }
}

#[test]
fn groups_share_rows_by_what_they_bring() {
    let chances = [0.0, PROSE, CHAT, 0.4];
    let by_source = chances.map(|chance| [chance, 0.0]);
    for (name, machine) in [("cpu", &CPU), ("gpu", &GPU)] {
        let plain = 4.0 / machine.target(4);
        let mut best = plain;
        for code in 0..16usize.pow(4) {
            let counts = [code & 15, code >> 4 & 15, code >> 8 & 15, code >> 12];
            let blocks = counts.iter().zip(chances);
            let tokens: f64 = blocks.map(|(d, c)| (0..=*d).map(|j| c.powi(j as i32)).sum::<f64>()).sum();
            let draft = if code == 0 { 0.0 } else { machine.draft };
            best = f64::max(best, tokens / (draft + machine.target(4 + counts.iter().sum::<usize>())));
        }
        let mut run = Run::new(machine, 2);
        let mut paces = [15; 4].map(Pace::auto);
        let (mut seconds, mut tokens) = (0.0, 0);
        for _ in 0..600 {
            let mut group: Vec<_> = paces.iter_mut().map(|pace| seat(pace, 15)).collect();
            let (s, t) = run.step(&mut group, &by_source);
            seconds += s;
            tokens += t.iter().map(|(_, tokens)| tokens).sum::<usize>();
        }
        let rate = tokens as f64 / seconds * machine.plain();
        assert!(rate > 0.94 * best && rate > 1.2 * plain, "{name}: {rate}, best {best}, plain {plain}");
    }
}

fn seat(pace: &mut Pace, room: usize) -> Seat<'_> {
    Seat { pace, room, matched: None, owed: 0 }
}

/// Rows that a sequence alone drafts.
fn rows(costs: &Costs, pace: &mut Pace, room: usize) -> usize {
    blocks(costs, &mut [seat(pace, room)])[0].rows
}

/// A machine whose costs are known, and a pace that has just learnt that nothing is confirmed.
fn parked() -> (Costs, Pace) {
    let mut costs = Costs::default();
    for rows in [5, 5, 5, 5, 1, 1, 1, 1] {
        costs.target(rows, 0.9 + 0.1 * rows as f64);
        costs.draft(rows, 0.2, 0);
    }
    let mut pace = Pace::auto(15);
    (0..10).for_each(|_| pace.observe(4, 0));
    (costs, pace)
}

#[test]
fn parked_sequences_try_again_ever_later() {
    let (mut costs, mut pace) = parked();
    let mut waits = vec![0];
    for _ in 0..3000 {
        let count = rows(&costs, &mut pace, 15);
        pace.observe(count, 0);
        costs.target(1 + count, 1.0 + 0.1 * count as f64);
        costs.target(5, 1.4);
        match count {
            0 => *waits.last_mut().unwrap() += 1,
            _ => waits.push(0),
        }
    }
    assert_eq!(waits[..6], [64, 128, 256, 512, 512, 512]);
}

#[test]
fn a_confirmed_try_ends_the_parking() {
    let (costs, mut pace) = parked();
    (0..64).for_each(|_| pace.observe(0, 0));
    let count = rows(&costs, &mut pace, 15);
    assert_eq!(count, TRY_ROWS);
    pace.observe(count, count);
    assert!(rows(&costs, &mut pace, 15) >= 2);
}

#[test]
fn room_and_fixed_lengths_are_kept() {
    let (costs, _) = parked();
    let mut fixed = Pace::fixed(7, false);
    assert_eq!(rows(&Costs::default(), &mut fixed, 15), 7);
    assert_eq!(rows(&Costs::default(), &mut fixed, 3), 3);
    let mut pace = Pace::auto(15);
    (0..20).for_each(|_| pace.observe(15, 15));
    assert!(rows(&costs, &mut pace, 15) > 8);
    for room in [0, 1, 2] {
        assert_eq!(rows(&costs, &mut pace, room), room);
    }
    assert_eq!(rows(&costs, &mut Pace::auto(0), 15), 0);
    assert!(blocks(&costs, &mut []).is_empty());
}

#[test]
fn the_first_pass_of_a_row_count_is_not_counted() {
    let mut costs = Costs::default();
    costs.target(4, 9.0);
    assert_eq!(costs.target.estimate(4), None);
    costs.target(4, 1.0);
    assert_eq!(costs.target.estimate(4), Some(1.0));
}

#[test]
fn costs_are_interpolated_and_forgotten() {
    let mut costs = Costs::default();
    for rows in [2, 2, 6, 6] {
        costs.target(rows, rows as f64);
    }
    let estimates = [1, 2, 3, 6, 10].map(|rows| costs.target.estimate(rows));
    // One measurement gives no slope.
    assert_eq!(estimates, [2.0, 2.0, 3.0, 6.0, 6.0].map(Some));
    let mut twice = costs.clone();
    twice.target(6, 6.0);
    assert_eq!(twice.target.estimate(10), Some(10.0));
    (0..OLDEST[1]).for_each(|_| costs.target(2, 2.0));
    assert_eq!(costs.target.estimate(6), Some(6.0));
    costs.target(2, 2.0);
    assert_eq!(costs.target.estimate(6), Some(2.0));
}

#[test]
fn a_bad_moment_does_not_end_drafting() {
    let mut costs = Costs::default();
    for rows in [5, 5, 5, 5, 1, 1, 1, 1] {
        costs.target(rows, 0.9 + 0.1 * rows as f64);
    }
    (0..2).for_each(|_| costs.draft(5, 40.0, 0));
    let plain_steps = (0..)
        .take_while(|_| {
            costs.target(1, 1.0);
            costs.target(5, 1.4);
            rows(&costs, &mut Pace::auto(15), 15) == 0
        })
        .count();
    assert!((1..=256).contains(&plain_steps), "{plain_steps}");
}

#[test]
fn one_disturbed_measurement_costs_no_sure_gain() {
    for machine in [&CPU, &GPU] {
        // The first is the prompt's.
        for (which, times) in (1..40).map(|which| (which, 2.0)).chain([(1, 5.0)]) {
            let mut run = Run::new(machine, 5);
            run.disturbed = Some((which, times));
            let (seconds, _) = run.answer(45, 38, 1.0, |_| 1.0);
            let share = seconds / (45.0 * machine.prompt + 38.0 * machine.plain());
            assert!(share < 0.75, "measurement {which} {times} times as long: {share} of plain");
        }
    }
}

#[test]
fn a_few_misses_outweigh_many_good_drafts() {
    let mut costs = Costs::default();
    for rows in [16, 16, 16, 8, 8, 8, 5, 5, 5, 2, 2, 2, 1, 1, 1, 1] {
        costs.target(rows, 0.9 + 0.1 * rows as f64);
        costs.draft(rows, 0.2, 0);
    }
    let mut pace = Pace::auto(15);
    (0..20).for_each(|_| pace.observe(15, 15));
    let mut wasted = vec![];
    loop {
        costs.target(1, 1.0);
        match rows(&costs, &mut pace, 15) {
            0 => break,
            count => wasted.push(count),
        }
        pace.observe(wasted[wasted.len() - 1], 0);
    }
    assert!(wasted.iter().sum::<usize>() <= 90, "{wasted:?}");
}
