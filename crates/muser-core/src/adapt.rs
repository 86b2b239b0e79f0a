//! How many rows to draft: by what passes cost and by what was accepted.
//!
//! A step of G sequences with D drafted rows takes one draft pass and one target pass of G + D rows, and gains G tokens
//! and the drafted ones that are confirmed. The row that is j-th in its block is confirmed with the probability that all
//! j are: a falling sequence for each block. So the best D rows of a group are the D largest of these probabilities, and
//! the best D is where expected tokens over expected seconds is largest; D = 0 is plain decoding. [`Costs`] holds the
//! seconds, one for an engine; [`Pace`] holds the probabilities, one for each sequence; [`blocks`] chooses, and [`settle`]
//! books what came of it.
//!
//! The drafter gets a sequence's context with the first draft, so one that never drafts never pays for it; and no sequence
//! drafts while its drafts have lost more than a small share of its time.
//!
//! Nothing here reads a clock: equal measurements give equal choices.

use std::collections::BTreeMap;
use std::ops::RangeBounds;

/// Seconds of passes by their number of rows.
#[derive(Clone, Debug, Default)]
pub struct Costs {
    target: Curve,
    draft: Curve,
    /// Seconds of giving the drafter a row of context.
    context: f64,
}

impl Costs {
    /// A target pass of so many rows took so long.
    pub fn target(&mut self, rows: usize, seconds: f64) {
        self.target.add(rows, seconds);
        // Drafts that a bad moment made look costly are forgotten although none follows, if slowly.
        self.draft.passes += u64::from(self.target.passes.is_multiple_of(4));
    }

    /// Drafting of so many rows took so long, with `owed` rows of context that the drafter was given before and those after it.
    pub fn draft(&mut self, rows: usize, seconds: f64, owed: usize) {
        self.draft.add(rows, (seconds - self.context(owed)).max(0.0));
    }

    /// So many rows of a prompt took so long; giving one to the drafter has `share` of a row's work. The shortest counts, but is
    /// forgotten slowly.
    pub fn prompt(&mut self, rows: usize, seconds: f64, share: f64) {
        let row = share * seconds / rows as f64;
        self.context = if self.context > 0.0 { row.min(CONTEXT_GROWS * self.context) } else { row };
    }

    /// Seconds of giving the drafter so many rows of context.
    fn context(&self, rows: usize) -> f64 {
        self.context * rows as f64
    }
}

/// What a prompt may add to the estimate of context.
const CONTEXT_GROWS: f64 = 1.02;
/// Passes after which a plain step is measured again while drafts are running, for it is what they are compared with: twice
/// as many as the last time, within these bounds.
const PLAIN_AGE: [u64; 2] = [4, 128];
/// Measurements of a row count that are kept. The second shortest counts: other work on the machine only ever adds time.
/// Of fewer than [`SETTLED`] it is the shortest.
const KEPT: usize = 5;
const SETTLED: usize = 3;
/// Passes after which a row count is forgotten, by its number of measurements: a single one may have come at a bad moment,
/// and contexts grow.
const OLDEST: [u64; SETTLED + 1] = [0, 64, 256, 1024];

#[derive(Clone, Debug, Default)]
struct Curve {
    points: BTreeMap<usize, Point>,
    passes: u64,
}

#[derive(Clone, Debug, Default)]
struct Point {
    /// The last measurements, oldest first. The first pass of a row count is not one: it compiles, captures and touches
    /// memory for the first time.
    recent: Vec<f64>,
    /// What they say; none without one.
    seconds: Option<f64>,
    /// Number of the pass that was measured last, and passes since the one before.
    last: u64,
    gap: u64,
}

impl Point {
    fn add(&mut self, seconds: f64) {
        if self.recent.len() == KEPT {
            self.recent.remove(0);
        }
        self.recent.push(seconds);
        let mut sorted = self.recent.clone();
        sorted.sort_unstable_by(f64::total_cmp);
        self.seconds = sorted.get(usize::from(self.is_settled())).copied();
    }

    fn is_settled(&self) -> bool {
        self.recent.len() >= SETTLED
    }
}

impl Curve {
    fn add(&mut self, rows: usize, seconds: f64) {
        self.passes += 1;
        let last = self.passes;
        let Some(point) = self.points.get_mut(&rows) else {
            self.points.insert(rows, Point { last, gap: 1, ..Point::default() });
            return;
        };
        point.gap = last - point.last;
        if point.gap > OLDEST[SETTLED] {
            point.recent.clear();
        }
        point.add(seconds);
        point.last = last;
    }

    /// Row counts of a range with measurements that still count.
    fn known(&self, rows: impl RangeBounds<usize>) -> impl DoubleEndedIterator<Item = (f64, f64)> {
        let counts = |p: &Point| self.passes - p.last <= OLDEST[SETTLED.min(p.recent.len())];
        let points = self.points.range(rows).filter(move |(_, p)| counts(p));
        points.filter_map(|(rows, p)| Some((*rows as f64, p.seconds?)))
    }

    /// Seconds of a pass: measured, between measurements by a straight line, beyond them by the last slope (but not one that a
    /// single measurement gives, which may have come at a bad moment), and never more than a pass of more rows took. What was
    /// never measured is tried as if it were free.
    fn estimate(&self, rows: usize) -> Option<f64> {
        let x = rows as f64;
        let mut up_to = self.known(..=rows).rev();
        let mut beyond = self.known(rows + 1..);
        let above = beyond.next();
        let more = beyond.map(|(_, s)| s).chain(above.map(|(_, s)| s)).reduce(f64::min);
        let Some((r1, s1)) = up_to.next() else { return more };
        let line = |(r0, s0): (f64, f64), (r1, s1): (f64, f64)| s0 + (s1 - s0) * (x - r0) / (r1 - r0);
        let straight = match (above, up_to.next()) {
            _ if r1 == x => s1,
            (Some(above), _) => line((r1, s1), above),
            (None, Some(before)) if !self.is_lone(r1 as usize) => line(before, (r1, s1)).max(s1),
            (None, _) => s1,
        };
        Some(more.map_or(straight, |more| straight.min(more)))
    }

    fn is_lone(&self, rows: usize) -> bool {
        self.points.get(&rows).is_some_and(|p| p.recent.len() == 1)
    }

    /// Whether passes of exactly this row count are settled and were measured lately.
    fn is_fresh(&self, rows: usize) -> bool {
        let lately = |p: &Point| self.passes - p.last < (2 * p.gap).clamp(PLAIN_AGE[0], PLAIN_AGE[1]);
        self.points.get(&rows).is_some_and(|p| p.is_settled() && lately(p))
    }
}

/// Longest first block of a sequence.
const FIRST_REACH: usize = 4;
/// Plain tokens before a parked sequence tries a draft again, at first and at most.
const RETRY: [usize; 2] = [64, 512];
/// Rows of such a try.
const TRY_ROWS: usize = 3;
/// A try's rows, if all are confirmed, must bring this many times what they cost; and it may cost no more than this share
/// of the plain steps before it.
const TRY_MARGIN: f64 = 1.25;
const TRY_SHARE: f64 = 0.01;
/// What a try leaves of earlier evidence.
const TRY_KEEPS: f64 = 0.15;
/// What a draft leaves of earlier evidence: about the last thirty count.
const KEEPS: f64 = 0.97;
/// Drafts in a row that may be rejected whole before they count for more: text changes at once, from a quotation to what the
/// model thinks of it, and a few misses must then outweigh many good drafts. And what each further one leaves.
const MISSES: usize = 2;
const MISS_KEEPS: f64 = 0.7;
/// A row's chance before anything is known, and how many observations that is worth. Where the target was sure of a prompt's
/// first token the chance is its own, up to a bound.
const PRIOR: (f64, f64) = (0.7, 2.0);
const PRIOR_MOST: f64 = 0.85;
/// How many observations at other positions' mean a position starts with.
const POOL: f64 = 2.0;
/// Drafting has to promise this much more than plain decoding.
const MARGIN: f64 = 1.03;
/// Shares of a sequence's time: what its drafts may have lost when the next is made, and what its context may cost if the next
/// draft is not expected to pay for it.
const LOSS_SHARE: f64 = 0.0075;
const CONTEXT_SHARE: f64 = 0.0125;

/// What one sequence's drafts were worth.
#[derive(Clone, Debug)]
pub struct Pace {
    fixed: Option<usize>,
    /// A row's chance before anything is known.
    prior: f64,
    /// By position in the block: how often a row was decided, and how often confirmed, older ones counting less.
    decided: Vec<f64>,
    confirmed: Vec<f64>,
    /// Longest block to ask for: grows as rows are confirmed and shrinks where none is, so that a guess is never a costly one.
    reach: usize,
    /// Drafts in a row that were rejected whole.
    misses: usize,
    /// Plain tokens since the last draft, and how many more are waited for.
    quiet: usize,
    retry: usize,
    /// Seconds since the prompt began, this sequence's share of them; and those that drafts have saved, or lost.
    time: f64,
    saved: f64,
}

impl Pace {
    /// Blocks of at most `most` drafted rows, as long as they pay.
    pub fn auto(most: usize) -> Self {
        let none = vec![0.0; most];
        Pace {
            fixed: None,
            prior: PRIOR.0,
            decided: none.clone(),
            confirmed: none,
            reach: FIRST_REACH,
            misses: 0,
            quiet: 0,
            retry: RETRY[0],
            time: 0.0,
            saved: 0.0,
        }
    }

    /// Always `rows` drafted rows, for tests and measurements.
    pub fn fixed(rows: usize) -> Self {
        Pace { fixed: Some(rows), ..Pace::auto(0) }
    }

    /// A prompt was computed in so many seconds; `chance` is the target's of the likeliest token after it. What earlier
    /// prompts taught counts little.
    pub fn begin(&mut self, seconds: f64, chance: f64) {
        self.fade(TRY_KEEPS);
        let fresh = Pace { fixed: self.fixed, ..Pace::auto(0) };
        let (decided, confirmed) = (std::mem::take(&mut self.decided), std::mem::take(&mut self.confirmed));
        *self = Pace { decided, confirmed, prior: chance.min(PRIOR_MOST), time: seconds, ..fresh };
    }

    /// Whether its drafts have not lost more than they may.
    fn may_draft(&self) -> bool {
        self.saved >= -LOSS_SHARE * self.time
    }

    /// A step has decided: of `drafted` rows the first `accepted` were confirmed.
    fn observe(&mut self, drafted: usize, accepted: usize) {
        if drafted == 0 {
            self.quiet += 1;
            return;
        }
        self.quiet = 0;
        self.misses = if accepted == 0 { self.misses + 1 } else { 0 };
        self.fade(if self.misses > MISSES { MISS_KEEPS } else { KEEPS });
        self.reach = match self.misses {
            0 | 1 => self.reach.max(2 * accepted),
            _ => FIRST_REACH.max(self.reach / 2),
        };
        let counts = self.decided.iter_mut().zip(&mut self.confirmed);
        for (position, (decided, confirmed)) in counts.enumerate().take(drafted.min(accepted + 1)) {
            *decided += 1.0;
            *confirmed += if position < accepted { 1.0 } else { 0.0 };
        }
    }

    fn fade(&mut self, keep: f64) {
        self.decided.iter_mut().chain(&mut self.confirmed).for_each(|count| *count *= keep);
    }

    /// Chance of each row that it and all before it are confirmed.
    fn chances(&self) -> impl Iterator<Item = f64> {
        let (chance, weight) = (self.prior, PRIOR.1);
        let sum = |counts: &[f64]| counts.iter().sum::<f64>();
        let pooled = (sum(&self.confirmed) + chance * weight) / (sum(&self.decided) + weight);
        let rows = self.decided.iter().zip(&self.confirmed);
        rows.scan(1.0, move |all, (decided, confirmed)| {
            *all *= (confirmed + POOL * pooled) / (decided + POOL);
            Some(*all)
        })
    }
}

/// Row counts of target passes that are worth a measurement of their own; in between costs differ little.
fn is_usual(rows: usize) -> bool {
    rows <= 6 || rows.is_power_of_two() || (rows.is_multiple_of(4) && rows <= 32)
}

/// A sequence that may draft in the coming step.
pub struct Seat<'a> {
    /// What its drafts were worth.
    pub pace: &'a mut Pace,
    /// Rows that it may draft at most.
    pub room: usize,
    /// Rows of context that the drafter has to be given before.
    pub owed: usize,
}

/// Rows to draft for each sequence of a group, no more than its `room`. A 0 is a plain row; all 0 is a plain step.
pub fn blocks(costs: &Costs, group: &mut [Seat<'_>]) -> Vec<usize> {
    let mut counts: Vec<usize> = group.iter().map(|s| s.pace.fixed.unwrap_or(0).min(s.room)).collect();
    if counts.iter().any(|count| *count > 0) {
        return counts;
    }
    let sequences = group.len();
    let Some(plain) = costs.target.estimate(sequences).filter(|_| costs.target.is_fresh(sequences)) else {
        return counts;
    };
    // One row tells what rows cost.
    let reach = if costs.target.known(..).nth(1).is_some() { usize::MAX } else { 1 };
    // Seconds of a step that drafts so many rows for so many of the sequences, as a multiple of a plain step.
    let cost = |drafted: usize, drafting: usize| {
        let draft = costs.draft.estimate(drafted + drafting).unwrap_or(0.0);
        (draft + costs.target.estimate(sequences + drafted).unwrap_or(plain)) / plain
    };
    let least = MARGIN * sequences as f64;
    let mut rows: Vec<(f64, usize)> = vec![];
    for (i, seat) in group.iter().enumerate().filter(|(_, seat)| seat.pace.may_draft()) {
        // Whether context is worth its price is a question of the drafts that follow, also where the first is to be one row. A prompt
        // that came at a bad moment makes it look several times dearer than it is.
        let hoped = seat.pace.reach.min(seat.room);
        let context = costs.context(seat.owed);
        let mut tokens = sequences as f64;
        let mut pays = |(n, chance): (usize, f64)| {
            tokens += chance;
            tokens / (cost(n + 1, 1) + context / plain) > least
        };
        let chances = || seat.pace.chances().take(hoped);
        if context <= CONTEXT_SHARE * seat.pace.time || chances().enumerate().any(&mut pays) {
            rows.extend(chances().take(reach).map(|chance| (chance, i)));
        }
    }
    rows.sort_by(|a, b| b.0.total_cmp(&a.0));
    let mut best = (least, 0);
    let mut tokens = sequences as f64;
    let mut drafting = vec![false; sequences];
    for (n, (chance, i)) in rows.iter().enumerate() {
        let drafted = n + 1;
        tokens += chance;
        drafting[*i] = true;
        if is_usual(sequences + drafted) || drafted == rows.len() {
            let rate = tokens / cost(drafted, drafting.iter().filter(|drafts| **drafts).count());
            if rate > best.0 {
                best = (rate, drafted);
            }
        }
    }
    for (_, i) in &rows[..best.1] {
        counts[*i] += 1;
    }
    for (Seat { pace, room, owed }, count) in group.iter_mut().zip(&mut counts) {
        if *count > 0 {
            pace.retry = RETRY[0];
        } else if pace.quiet >= pace.retry && pace.may_draft() {
            let tried = TRY_ROWS.min(reach).min(*room).min(pace.decided.len());
            let extra = cost(tried, 1) - 1.0;
            let pays = tried as f64 > TRY_MARGIN * extra * sequences as f64;
            let context = costs.context(*owed) / plain;
            if pays && extra + context < TRY_SHARE * pace.quiet as f64 {
                *count = tried;
                pace.retry = RETRY[1].min(2 * pace.retry);
                pace.fade(TRY_KEEPS);
            }
        }
    }
    counts
}

/// What came of a sequence in a step.
pub struct Outcome<'a> {
    /// Whose it is; none where drafting is off.
    pub pace: Option<&'a mut Pace>,
    /// Rows that were drafted, and those that were confirmed.
    pub drafted: usize,
    #[allow(missing_docs)]
    pub accepted: usize,
    /// Rows of context that the drafter was given before.
    pub owed: usize,
}

/// Books a step that took so many seconds. A draft has lost what it took beyond a plain step, but no more than estimates say, which
/// no disturbance spoils, or than another plain step where there is none yet.
pub fn settle(costs: &Costs, seconds: f64, step: Vec<Outcome<'_>>) {
    let sequences = step.len();
    let drafted: usize = step.iter().map(|o| o.drafted).sum();
    let drafting = step.iter().filter(|o| o.drafted > 0).count();
    let plain = costs.target.estimate(sequences).unwrap_or(0.0);
    let draft = costs.draft.estimate(drafted + drafting);
    let with = draft.zip(costs.target.estimate(sequences + drafted)).map(|(draft, target)| draft + target);
    for Outcome { pace, drafted: mine, accepted, owed } in step {
        let Some(pace) = pace else { continue };
        pace.observe(mine, accepted);
        pace.time += seconds / sequences as f64;
        // Beside others a draft costs less than its share.
        if mine > 0 && drafting == 1 {
            let most = with.map_or(plain, |with| with - plain + costs.context(owed));
            let lost = most.min(seconds - plain);
            pace.saved += plain * accepted as f64 / sequences as f64 - lost;
        }
    }
}

#[cfg(test)]
mod tests;
