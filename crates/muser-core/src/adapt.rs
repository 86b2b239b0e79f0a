//! How many rows to draft: by what passes cost and by what was accepted.
//!
//! A step of G sequences with D drafted rows takes one draft pass, if the drafter is asked for any of them, and one target
//! pass of G + D rows, and gains G tokens and the drafted ones that are confirmed. The row that is j-th in its block is confirmed with the probability that all
//! j are: a falling sequence for each block. So the best D rows of a group are the D largest of these probabilities, and
//! the best D is where expected tokens over expected seconds is largest; D = 0 is plain decoding. [`Costs`] holds the
//! seconds, one for an engine; [`Pace`] holds the probabilities, one for each sequence; [`blocks`] chooses, and [`settle`]
//! books what came of it.
//!
//! Rows come from the drafter or from a [`crate::lookup::Lookup`], for each sequence from where more are expected to be
//! confirmed; and a group whose lookups alone are worth more than with the drafter's pass beside them is spared that pass.
//!
//! The drafter gets a sequence's context with the first draft, so one that never drafts never pays for it; and no sequence
//! drafts while its drafts of that source have lost more than a small share of its time. Lookups, which learn from every token
//! what a match is worth, go on where they promise much.
//!
//! Nothing here reads a clock: equal measurements give equal choices.

mod costs;
mod trust;

pub use costs::Costs;
use trust::Trust;

/// Where drafts come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    /// The drafter's network.
    Drafter,
    /// The sequence's own tokens.
    Lookup,
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
/// Where lookups have lost that, the rows of one must be expected to bring this many times what they cost.
const SURE: f64 = 2.0;
/// Chance of a lookup's first row that makes it worth to learn with it what rows cost.
const LESSON: f64 = 0.5;
const CONTEXT_SHARE: f64 = 0.0125;

/// What one sequence's drafts were worth.
#[derive(Clone, Debug)]
pub struct Pace {
    fixed: Option<Fixed>,
    /// How far lookups are trusted.
    trust: Trust,
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
    /// Seconds since the prompt began, this sequence's share of them; and those that drafts of each source have saved, or lost.
    time: f64,
    saved: [f64; 2],
}

/// Blocks of always so many rows.
#[derive(Clone, Copy, Debug)]
struct Fixed {
    rows: usize,
    /// Lookups come first, not only where there is no drafter.
    mixed: bool,
}

impl Pace {
    /// Blocks as long as they pay, the drafter's of at most `most` rows.
    pub fn auto(most: usize) -> Self {
        let none = vec![0.0; most];
        Pace {
            fixed: None,
            trust: Trust::default(),
            prior: PRIOR.0,
            decided: none.clone(),
            confirmed: none,
            reach: FIRST_REACH,
            misses: 0,
            quiet: 0,
            retry: RETRY[0],
            time: 0.0,
            saved: [0.0; 2],
        }
    }

    /// Always `rows` drafted rows, for tests and measurements: the drafter's where there is one, or with `mixed` a lookup's
    /// wherever one has found a match.
    pub fn fixed(rows: usize, mixed: bool) -> Self {
        Pace { fixed: Some(Fixed { rows, mixed }), ..Pace::auto(0) }
    }

    /// A prompt was computed in so many seconds; `chance` is the target's of the likeliest token after it. What earlier
    /// prompts taught counts little.
    pub fn begin(&mut self, seconds: f64, chance: f64) {
        self.fade(TRY_KEEPS);
        self.trust.fade();
        let fresh = Pace { fixed: self.fixed, ..Pace::auto(0) };
        let (decided, confirmed) = (std::mem::take(&mut self.decided), std::mem::take(&mut self.confirmed));
        let (trust, prior) = (std::mem::take(&mut self.trust), chance.min(PRIOR_MOST));
        *self = Pace { decided, confirmed, trust, prior, time: seconds, ..fresh };
    }

    /// The token after a match of this length was the foretold one, or not.
    pub fn foretold(&mut self, length: usize, right: bool) {
        self.trust.observe(length, right);
    }

    /// Whether its drafts have not lost more than they may.
    fn may_draft(&self, source: Source) -> bool {
        self.saved[source as usize] >= -LOSS_SHARE * self.time
    }

    /// A step has decided: of `drafted` rows of the drafter the first `accepted` were confirmed.
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

    /// The drafter's evidence counts less.
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
    /// Rows that the drafter may propose at most.
    pub room: usize,
    /// Length of the match that a lookup has found, and rows that it may propose at most.
    pub matched: Option<(usize, usize)>,
    /// Rows of context that the drafter has to be given before.
    pub owed: usize,
}

/// What a sequence drafts in a step; no rows are a plain one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Whence.
    pub source: Source,
    /// How many rows.
    pub rows: usize,
}

impl Block {
    /// Nothing is drafted.
    pub const PLAIN: Block = Block { source: Source::Drafter, rows: 0 };
}

impl Seat<'_> {
    fn fixed(&self) -> Block {
        let Some(Fixed { rows, mixed }) = self.pace.fixed else { return Block::PLAIN };
        match self.matched {
            Some((_, room)) if mixed || self.room == 0 => {
                Block { source: Source::Lookup, rows: rows.min(room) }
            }
            _ => Block { source: Source::Drafter, rows: rows.min(self.room) },
        }
    }

    /// Chances of the rows that a lookup would propose.
    fn by_lookup(&self, market: &Market<'_>) -> Vec<f64> {
        let Some((length, room)) = self.matched else { return vec![] };
        // A short answer would feel a first guess of many rows, and any answer rows that turn out to be several times dearer than thought.
        let reach = if self.pace.trust.is_tested(length) { market.reach() } else { 1 };
        let room = room.min(reach);
        let chances: Vec<f64> = self.pace.trust.chances(length).take(room).collect();
        let mut tokens = 0.0;
        let mut is_sure = |(n, chance): (usize, &f64)| {
            tokens += chance;
            tokens > SURE * (market.cost(n + 1, 0) - 1.0) * market.sequences as f64
        };
        let may = match market.reach() {
            1 => chances.first().is_some_and(|chance| *chance >= LESSON),
            _ => self.pace.may_draft(Source::Lookup) || chances.iter().enumerate().any(&mut is_sure),
        };
        if may { chances } else { vec![] }
    }

    /// Chances of the rows that the drafter would propose.
    fn by_drafter(&self, market: &Market<'_>) -> Vec<f64> {
        if !self.pace.may_draft(Source::Drafter) {
            return vec![];
        }
        // Whether context is worth its price is a question of the drafts that follow, also where the first is to be one row. A prompt
        // that came at a bad moment makes it look several times dearer than it is.
        let chances: Vec<f64> = self.pace.chances().take(self.pace.reach.min(self.room)).collect();
        let context = market.costs.context(self.owed);
        let mut tokens = market.sequences as f64;
        let mut pays = |(n, chance): (usize, &f64)| {
            tokens += chance;
            tokens / (market.cost(n + 1, n + 2) + context / market.plain) > market.least()
        };
        let is_worth = context <= CONTEXT_SHARE * self.pace.time || chances.iter().enumerate().any(&mut pays);
        if is_worth { chances } else { vec![] }
    }
}

/// What rows cost a group.
struct Market<'a> {
    costs: &'a Costs,
    sequences: usize,
    /// Seconds of a plain step.
    plain: f64,
}

impl Market<'_> {
    /// Seconds of a step with so many drafted rows and a draft pass of so many, as a multiple of a plain step.
    fn cost(&self, drafted: usize, pass: usize) -> f64 {
        let draft = if pass > 0 { self.costs.draft.estimate(pass).unwrap_or(0.0) } else { 0.0 };
        (draft + self.costs.target.estimate(self.sequences + drafted).unwrap_or(self.plain)) / self.plain
    }

    /// Rows that may be drafted by what is known of costs: twice what was measured, more than once, or one, which tells what rows cost.
    fn reach(&self) -> usize {
        let target = &self.costs.target;
        let mut measured = target.known(self.sequences + 1..).map(|(rows, _)| rows as usize).rev();
        measured.find(|rows| !target.is_lone(*rows)).map_or(1, |rows| 2 * (rows - self.sequences))
    }

    /// Tokens for the time of a plain step that drafting must bring.
    fn least(&self) -> f64 {
        MARGIN * self.sequences as f64
    }

    /// The best row counts where each sequence's rows come from the one source given: tokens for the time of a plain step,
    /// and the blocks.
    fn best(&self, offers: &[(Source, &[f64])]) -> (f64, Vec<Block>) {
        let each = offers.iter().enumerate();
        let mut rows: Vec<(f64, usize)> =
            each.flat_map(|(i, (_, chances))| chances.iter().map(move |chance| (*chance, i))).collect();
        rows.sort_by(|a, b| b.0.total_cmp(&a.0));
        let mut best = (self.least(), 0);
        let mut tokens = self.sequences as f64;
        let mut asked = vec![false; self.sequences];
        let mut pass = 0;
        for (n, (chance, i)) in rows.iter().enumerate() {
            let drafted = n + 1;
            tokens += chance;
            if offers[*i].0 == Source::Drafter {
                pass += if asked[*i] { 1 } else { 2 };
                asked[*i] = true;
            }
            if is_usual(self.sequences + drafted) || drafted == rows.len() {
                let rate = tokens / self.cost(drafted, pass);
                if rate > best.0 {
                    best = (rate, drafted);
                }
            }
        }
        let mut blocks: Vec<Block> =
            offers.iter().map(|(source, _)| Block { source: *source, rows: 0 }).collect();
        rows[..best.1].iter().for_each(|(_, i)| blocks[*i].rows += 1);
        (best.0, blocks)
    }
}

/// A sequence's chances by source.
type Offers = [Vec<f64>; 2];

fn of(offers: &Offers, source: Source) -> (Source, &[f64]) {
    (source, &offers[source as usize])
}

/// What each sequence of a group drafts.
pub fn blocks(costs: &Costs, group: &mut [Seat<'_>]) -> Vec<Block> {
    let fixed: Vec<Block> = group.iter().map(Seat::fixed).collect();
    let sequences = group.len();
    if group.iter().any(|seat| seat.pace.fixed.is_some()) {
        return fixed;
    }
    let Some(plain) = costs.target.estimate(sequences).filter(|_| costs.target.is_fresh(sequences)) else {
        return fixed;
    };
    let market = Market { costs, sequences, plain };
    // One row tells what rows cost.
    let reach = if costs.target.known(..).nth(1).is_some() { usize::MAX } else { 1 };
    let mut offers: Vec<Offers> =
        group.iter().map(|seat| [seat.by_drafter(&market), seat.by_lookup(&market)]).collect();
    let better = |offers: &Offers| {
        let [drafter, lookup] = offers.each_ref().map(|chances| chances.iter().sum::<f64>());
        if lookup > drafter { Source::Lookup } else { Source::Drafter }
    };
    let sources: Vec<Source> = offers.iter().map(better).collect();
    offers.iter_mut().flatten().for_each(|chances| chances.truncate(reach));
    let each: Vec<_> = offers.iter().zip(&sources).map(|(offers, source)| of(offers, *source)).collect();
    let (rate, mut blocks) = market.best(&each);
    // Where drafter and lookups compete, the lookups may be worth more without the drafter's pass.
    let asked = each.iter().any(|(source, chances)| *source == Source::Drafter && !chances.is_empty());
    if asked && offers.iter().any(|[_, lookup]| !lookup.is_empty()) {
        let lookups: Vec<_> = offers.iter().map(|offers| of(offers, Source::Lookup)).collect();
        let (alone, without) = market.best(&lookups);
        if alone >= rate {
            blocks = without;
        }
    }
    for (Seat { pace, room, owed, .. }, block) in group.iter_mut().zip(&mut blocks) {
        if block.rows > 0 {
            if block.source == Source::Drafter {
                pace.retry = RETRY[0];
            }
        } else if pace.quiet >= pace.retry && pace.may_draft(Source::Drafter) {
            let tried = TRY_ROWS.min(reach).min(*room).min(pace.decided.len());
            let extra = market.cost(tried, tried + 1) - 1.0;
            let pays = tried as f64 > TRY_MARGIN * extra * sequences as f64;
            let context = costs.context(*owed) / plain;
            if pays && extra + context < TRY_SHARE * pace.quiet as f64 {
                *block = Block { source: Source::Drafter, rows: tried };
                pace.retry = RETRY[1].min(2 * pace.retry);
                pace.fade(TRY_KEEPS);
            }
        }
    }
    blocks
}

/// What came of a sequence in a step.
pub struct Outcome<'a> {
    /// Whose it is; none where drafting is off.
    pub pace: Option<&'a mut Pace>,
    /// What was drafted, and how many of its rows were confirmed.
    pub block: Block,
    #[allow(missing_docs)]
    pub accepted: usize,
    /// Rows of context that the drafter was given before.
    pub owed: usize,
}

/// Books a step that took so many seconds. A draft has lost what it took beyond a plain step, but no more than estimates say, which
/// no disturbance spoils, or than another plain step where there is none yet.
pub fn settle(costs: &Costs, seconds: f64, step: Vec<Outcome<'_>>) {
    let sequences = step.len();
    let rows = |blocks: &[Block]| blocks.iter().map(|block| block.rows).sum::<usize>();
    let blocks: Vec<Block> = step.iter().map(|o| o.block).filter(|block| block.rows > 0).collect();
    let asked: Vec<Block> = blocks.iter().copied().filter(|block| block.source == Source::Drafter).collect();
    let plain = costs.target.estimate(sequences).unwrap_or(0.0);
    let draft = if asked.is_empty() { Some(0.0) } else { costs.draft.estimate(rows(&asked) + asked.len()) };
    let with =
        draft.zip(costs.target.estimate(sequences + rows(&blocks))).map(|(draft, target)| draft + target);
    for Outcome { pace, block, accepted, owed } in step {
        let Some(pace) = pace else { continue };
        match block.source {
            Source::Drafter => pace.observe(block.rows, accepted),
            Source::Lookup => pace.quiet += 1,
        }
        pace.time += seconds / sequences as f64;
        // Beside others a draft costs less than its share.
        if block.rows > 0 && blocks.len() == 1 {
            let most = with.map_or(plain, |with| with - plain + costs.context(owed));
            let lost = most.min(seconds - plain);
            pace.saved[block.source as usize] += plain * accepted as f64 / sequences as f64 - lost;
        }
    }
}

#[cfg(test)]
mod tests;
