//! What passes cost, measured while they run.

use std::collections::BTreeMap;
use std::ops::RangeBounds;

/// Seconds of passes by their number of rows.
#[derive(Clone, Debug, Default)]
pub struct Costs {
    pub(super) target: Curve,
    pub(super) draft: Curve,
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
    pub(super) fn context(&self, rows: usize) -> f64 {
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
pub(super) const OLDEST: [u64; SETTLED + 1] = [0, 64, 256, 1024];

#[derive(Clone, Debug, Default)]
pub(super) struct Curve {
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
    pub(super) fn known(&self, rows: impl RangeBounds<usize>) -> impl DoubleEndedIterator<Item = (f64, f64)> {
        let counts = |p: &Point| self.passes - p.last <= OLDEST[SETTLED.min(p.recent.len())];
        let points = self.points.range(rows).filter(move |(_, p)| counts(p));
        points.filter_map(|(rows, p)| Some((*rows as f64, p.seconds?)))
    }

    /// Seconds of a pass: measured, between measurements by a straight line, beyond them by the last slope (but not one that a
    /// single measurement gives, which may have come at a bad moment), and never more than a pass of more rows took. What was
    /// never measured is tried as if it were free.
    pub(super) fn estimate(&self, rows: usize) -> Option<f64> {
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

    pub(super) fn is_lone(&self, rows: usize) -> bool {
        self.points.get(&rows).is_some_and(|p| p.recent.len() == 1)
    }

    /// Whether passes of exactly this row count are settled and were measured lately.
    pub(super) fn is_fresh(&self, rows: usize) -> bool {
        let lately = |p: &Point| self.passes - p.last < (2 * p.gap).clamp(PLAIN_AGE[0], PLAIN_AGE[1]);
        self.points.get(&rows).is_some_and(|p| p.is_settled() && lately(p))
    }
}
