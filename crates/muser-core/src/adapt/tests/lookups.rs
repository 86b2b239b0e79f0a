//! Lookups alone and beside a drafter.

use super::*;

/// What a text is at some token: the length of the match there, 0 for none, and the chance that it is right.
type Text<'a> = &'a dyn Fn(usize) -> (usize, f64);

impl Run<'_> {
    /// A sequence of so many tokens, after a prompt that taught nothing: seconds as a multiple of plain ones, and the rows that
    /// each source proposed. Without a `drafter` there are lookups only; else it is right with this chance.
    fn repeating(&mut self, tokens: usize, drafter: Option<f64>, text: Text<'_>) -> (f64, [usize; 2]) {
        let mut pace = Pace::auto(15);
        pace.begin(0.0, 0.7);
        let (mut seconds, mut done, mut proposed) = (0.0, 0, [0; 2]);
        while done < tokens {
            let (length, chance) = text(done);
            let left = tokens - done - 1;
            let room = if drafter.is_some() { 15.min(left) } else { 0 };
            let matched = (length > 0).then_some((length, 31.min(left)));
            let mut seats = [Seat { matched, ..seat(&mut pace, room) }];
            let (s, all) = self.step(&mut seats, &[[drafter.unwrap_or(0.0), chance]]);
            let (block, brought) = all[0];
            proposed[block.source as usize] += block.rows;
            // Every token tells what a match was worth.
            for i in 0..brought {
                let by_lookup = block.source == Source::Lookup && i < block.rows;
                let right = if by_lookup { i + 1 < brought } else { self.uniform() < chance };
                if length > 0 {
                    pace.foretold(length + i, right);
                }
            }
            seconds += s;
            done += brought;
        }
        (seconds / tokens as f64 / self.machine.plain(), proposed)
    }
}

#[test]
fn never_slower_than_plain() {
    for (name, machine) in [("cpu", &CPU), ("gpu", &GPU), ("slow", &SLOW)] {
        let texts: [(&str, Text<'_>); 7] = [
            ("none", &|_| (0, 0.0)),
            ("hostile", &|_| (4, 0.0)),
            ("hostile, long", &|_| (40, 0.0)),
            ("hard", &|t| (3 + t % 9, 0.2)),
            ("code", &|t| (4 + t % 30, 0.9)),
            ("a quotation, then hostile", &|t| if t < 150 { (t + 3, 0.98) } else { (12, 0.0) }),
            ("in turns", &|t| if t / 40 % 2 == 0 { (9, 0.0) } else { (9, 0.98) }),
        ];
        for drafter in [None, Some(0.1)] {
            let mut run = Run::new(machine, 3);
            for i in 0..35 {
                let (what, text) = texts[i % texts.len()];
                let tokens = 200 + 37 * i;
                let (share, _) = run.repeating(tokens, drafter, text);
                assert!(
                    share <= 1.025,
                    "{name}, {what}, {tokens} tokens, drafter {drafter:?}: {share} of plain"
                );
            }
        }
    }
}

#[test]
fn lengths_are_near_the_best() {
    for (name, machine) in [("cpu", &CPU), ("gpu", &GPU), ("slow", &SLOW)] {
        for chance in [0.0, 0.6, 0.9, 0.98] {
            let gain = |d: usize| {
                let tokens: f64 = (0..=d).map(|j| f64::powi(chance, j as i32)).sum();
                tokens / if d == 0 { 1.0 } else { machine.target(1 + d) }
            };
            let best = (0..=31).map(gain).fold(0.0, f64::max);
            let gains =
                (0..10).map(|seed| 1.0 / Run::new(machine, seed).repeating(10_000, None, &|_| (6, chance)).0);
            let mean = gains.sum::<f64>() / 10.0;
            assert!(mean > 0.9 * best, "{name}, {chance}: {mean} times plain, the best is {best}");
        }
    }
}

#[test]
fn the_source_that_brings_more_is_asked() {
    for machine in [&CPU, &GPU] {
        let share = |drafter: f64, lookup: f64| {
            let (_, [drafter, lookup]) =
                Run::new(machine, 4).repeating(2000, Some(drafter), &|_| (20, lookup));
            lookup as f64 / (drafter + lookup) as f64
        };
        assert!(share(0.2, CHAT) > 0.95);
        assert!(share(CHAT, 0.2) < 0.05);
        // Of equals the one that costs no pass of its own.
        assert!(share(CHAT, CHAT) > 0.6);
    }
}

#[test]
fn the_drafters_pass_is_spared_where_lookups_do_as_well() {
    let mut costs = Costs::default();
    for rows in [32, 32, 32, 16, 16, 16, 8, 8, 8, 4, 4, 4, 2, 2, 2, 1, 1, 1, 1] {
        costs.target(rows, 0.9 + 0.1 * rows as f64);
    }
    let source = |draft: f64| {
        let mut costs = costs.clone();
        (0..20).for_each(|_| costs.draft(16, draft, 0));
        let mut pace = Pace::auto(15);
        (0..40).for_each(|_| pace.observe(15, 15));
        for hit in 0..40 {
            pace.foretold(20, hit % 10 > 0);
        }
        blocks(&costs, &mut [Seat { matched: Some((20, 31)), ..seat(&mut pace, 15) }])[0].source
    };
    assert_eq!(source(0.01), Source::Drafter);
    assert_eq!(source(3.0), Source::Lookup);
}
