//! One layer of one or two activation rows as one launch: kernels/chain.cu.

use crate::gpu::Card;
use crate::launch::{Args, Left, Planes};
use crate::product::Room;
use crate::program::Compiler;
use crate::weights::{Layout, Matrix, TILE_COLS};
use muser_core::{Buf, DeviceError, Model, Op, Pass, Plan, Slot};
use std::sync::{Mutex, PoisonError};

const FILE: &str = "src/kernels/chain.cu";

// As the kernel has them.
const WARPS: usize = 16;
/// Bytes of a warp's ring.
const fn ring(rows: usize) -> usize {
    if rows == 1 { 10_240 } else { 6912 }
}
/// Activation rows of a launch at most.
pub(crate) const MOST_CHAINED: usize = 2;
/// KB of the rings of one row.
pub(crate) const CHAIN_ROOM: usize = WARPS * ring(1) / 1024;
/// The same of two.
pub(crate) const CHAIN_ROOM_TWO: usize = WARPS * ring(2) / 1024;
/// Counters of one launch.
pub(crate) const COUNTERS: usize = 4;

/// Cards on which a device of this process launches chains. Two at once could each keep the other's blocks from the card for ever.
static IN_USE: Mutex<Vec<usize>> = Mutex::new(vec![]);

/// The right to launch chains on a card.
pub(crate) struct Lease(usize);

impl Lease {
    /// For card `index`, if no other device has it.
    pub fn take(index: usize) -> Option<Self> {
        let mut cards = IN_USE.lock().unwrap_or_else(PoisonError::into_inner);
        if cards.contains(&index) {
            return None;
        }
        cards.push(index);
        Some(Lease(index))
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        IN_USE.lock().unwrap_or_else(PoisonError::into_inner).retain(|card| *card != self.0);
    }
}

/// The layouts that the kernel is compiled for: those of all products behind attention, if they are one or two.
pub(crate) fn layouts(model: &Model) -> Option<Vec<Layout>> {
    let layout = |slot: &Slot| model.slots.get(slot).map(|(dtype, ..)| Layout::of(*dtype));
    let mut all: Vec<Layout> = vec![];
    for step in &model.plans.target.steps {
        let slots: Vec<Slot> = match &step.op {
            Op::Project { outs, .. } => outs.iter().map(|(slot, _)| *slot).collect(),
            Op::GateUp { gate, up } => vec![*gate, *up],
            Op::Head { weight } => vec![*weight],
            _ => continue,
        };
        all.extend(slots.iter().filter_map(layout));
    }
    all.sort_by_key(|l| *l as i32);
    all.dedup();
    (1..=2).contains(&all.len()).then_some(all)
}

/// Whether rings for so many rows hold two tiles at least of each of these layouts.
pub(crate) fn holds(layouts: &[Layout], rows: usize) -> bool {
    layouts.iter().all(|l| 2 * l.tile_bytes() / if *l == Layout::F16 { 4 } else { 1 } <= ring(rows))
}

/// The kernel for these layouts and so many rows.
pub(crate) fn name(layouts: &[Layout], rows: usize) -> String {
    let names: Vec<_> = layouts.iter().map(|l| l.name()).collect();
    format!("chain_{}_{rows}", names.join("_"))
}

/// What is defined before its text.
pub(crate) fn defines(layouts: &[Layout], rows: usize) -> String {
    let second = layouts.get(1).map_or(String::new(), |l| format!("\n#define SECOND {}", *l as i32));
    format!("#define COLUMNS {rows}\n#define FIRST {}{second}", layouts[0] as i32)
}

/// Halves of all activations in shared memory, and bytes of shared memory in all: rings, partial sums, zeros, sums, shares of each
/// warp, activations and their groups' sums. Two rows have the residual (f32) behind their activations while there are only `hidden` of those.
fn shared(hidden: usize, widest: usize, rows: usize) -> (usize, usize) {
    let padded = |cols: usize, spare: usize| rows * (cols.next_multiple_of(TILE_COLS) + spare);
    let spare = if rows > 1 { 32 } else { 0 };
    let stash = if rows > 1 { rows * hidden * 2 } else { 0 };
    let halves = padded(widest, spare).max(padded(hidden, spare) + stash);
    let sums = padded(widest, 0) / TILE_COLS * 64 + rows * spare;
    (halves, WARPS * (ring(rows) + rows * (2 * 16 * 4 + 16) + 4 * 48) + 512 + halves * 2 + sums)
}

/// Blocks that are on the card at once: one a multiprocessor. Where there are many, those that attention takes are left to it.
fn blocks(card: &Card, kv_heads: usize) -> usize {
    let Room { processors, .. } = card.room;
    if processors >= 64 { processors - kv_heads } else { processors }
}

/// The steps of a layer behind attention.
struct Steps<'a> {
    output: Slot,
    gate: Slot,
    up: Slot,
    down: Slot,
    tails: [Tail; 2],
    capture: Option<usize>,
    next: Next<'a>,
    /// Steps in all.
    count: usize,
}

type Tail = (Option<(Slot, f32)>, (Slot, f32));

enum Next<'a> {
    Project(&'a [(Slot, Buf)]),
    Head { weight: Slot, scale: f32, cap: f32 },
}

impl<'a> Steps<'a> {
    /// Reads them off the plan from `i` on; nothing where it has another order.
    fn read(plan: &'a Plan, i: usize) -> Option<Self> {
        let op = |at: usize| plan.steps.get(i + at).map(|s| &s.op);
        let one = |at: usize, wanted: Buf| match op(at) {
            Some(Op::Project { from, outs }) if *from == wanted => match outs.as_slice() {
                [(slot, Buf::P)] => Some(*slot),
                _ => None,
            },
            _ => None,
        };
        let tail = |at: usize| match op(at) {
            Some(Op::Tail { post, next }) => Some((*post, *next)),
            _ => None,
        };
        let Some(Op::GateUp { gate, up }) = op(2) else { return None };
        let (output, down) = (one(0, Buf::A)?, one(3, Buf::F)?);
        let tails = [tail(1)?, tail(4)?];
        let capture = match op(5) {
            Some(Op::Capture { index }) => Some(*index),
            _ => None,
        };
        let at = 5 + usize::from(capture.is_some());
        let (next, count) = match (op(at)?, op(at + 1)) {
            (Op::Project { from: Buf::H, outs }, _) => (Next::Project(outs), at + 1),
            (Op::Head { weight }, Some(Op::ScaleCap { scale, cap })) => {
                (Next::Head { weight: *weight, scale: *scale, cap: cap.unwrap_or(0.0) }, at + 2)
            }
            (Op::Head { weight }, _) => (Next::Head { weight: *weight, scale: 1.0, cap: 0.0 }, at + 1),
            _ => return None,
        };
        Some(Steps { output, gate: *gate, up: *up, down, tails, capture, next, count })
    }
}

impl Compiler<'_> {
    /// Compiles the steps from `i` on as one launch, if they are a layer behind attention and the card has room; returns how many
    /// steps it served.
    pub(crate) fn chain(&mut self, i: usize, plan: &Plan) -> Result<Option<usize>, DeviceError> {
        let rows = self.key.rows;
        if self.key.pass != Pass::Target || rows > MOST_CHAINED || self.key.even {
            return Ok(None);
        }
        let (Some(layouts), Some(steps)) = (layouts(self.model), Steps::read(plan, i)) else {
            return Ok(None);
        };
        let Some(counters) = &self.buffers.counters else { return Ok(None) };
        if self.key.logits < rows && matches!(steps.next, Next::Head { .. }) {
            return Ok(None);
        }
        let (b, g) = (self.buffers, &plan.geometry);
        let matrix = |slot| self.weights.matrix(slot);
        let (gate, up) = (matrix(steps.gate)?, matrix(steps.up)?);
        let next = match &steps.next {
            Next::Project(outs) => outs
                .iter()
                .map(|(slot, buf)| Ok((matrix(*slot)?, b.raw(*buf).ptr)))
                .collect::<Result<Vec<_>, DeviceError>>()?,
            Next::Head { weight, .. } => vec![(matrix(*weight)?, b.head.ptr)],
        };
        let p = b.raw.p.ptr;
        let products = [
            vec![(matrix(steps.output)?, p)],
            vec![(gate, b.raw.gate.ptr), (up, b.raw.up.ptr)],
            vec![(matrix(steps.down)?, p)],
            next,
        ];
        let widest = products.iter().flatten().map(|(m, _)| m.cols).max().unwrap_or(0);
        let (halves, shared) = shared(g.hidden, widest, rows);
        let blocks = blocks(self.card, g.kv_heads);
        let uneven = products.iter().flatten().any(|(m, _)| m.cols % 8 != 0) || gate.layout != up.layout;
        if shared > self.card.room.block || uneven || !holds(&layouts, rows) {
            return Ok(None);
        }
        let mut bytes: Vec<u8> = vec![];
        for parts in &products {
            bytes.extend(pair(parts, blocks, &layouts, rows));
        }
        let between = b.between.ptr;
        for (k, (post, next)) in steps.tails.iter().enumerate() {
            let (post, post_eps) =
                post.map_or(Ok((0, 0.0)), |(s, eps)| self.weights.vector(s).map(|v| (v, eps)))?;
            let features = steps.capture.filter(|_| k == 1);
            let features = features.map_or(0, |index| b.features.ptr + (index * g.hidden * 4) as u64);
            let (before, after) = if k == 0 { (b.x.ptr, between) } else { (between, b.x.ptr) };
            let addresses = [post, self.weights.vector(next.0)?, before, after, features];
            bytes.extend(addresses.iter().flat_map(|a| a.to_le_bytes()));
            bytes.extend([post_eps, next.1].iter().flat_map(|v| v.to_le_bytes()));
        }
        let layer = plan.steps[i].layer.unwrap_or(0);
        let arrived = counters.ptr + (layer * COUNTERS * 4) as u64;
        let addresses = [b.a.addresses().h, b.f.addresses().h, b.rows.ptr, arrived];
        bytes.extend(addresses.iter().flat_map(|a| a.to_le_bytes()));
        let stride = self.model.plans.width(plan.pass, Buf::Features);
        let part = |n: usize| (n.div_ceil(4 * blocks) * 4) as u32;
        let (kept, activated) = (part(g.hidden), part(gate.rows));
        bytes.extend(
            [stride as u32, halves as u32, kept, activated, 0x000f_000f, 0x00f0_00f0]
                .iter()
                .flat_map(|w| w.to_le_bytes()),
        );
        let range = i..i + steps.count;
        let args = Args(vec![bytes]);
        self.push_shared(
            range.clone(),
            FILE,
            &name(&layouts, rows),
            (blocks, 1, 1),
            (WARPS * 32, shared),
            args,
        )?;
        match steps.next {
            Next::Project(outs) => {
                let left = outs.iter().zip(&products[3]);
                let left: Vec<_> =
                    left.map(|((_, buf), (m, out))| (*buf, Left::Planes(planes(m, *out, rows)))).collect();
                self.leave(&left);
            }
            Next::Head { scale, cap, .. } => {
                let (m, out) = &products[3][0];
                self.scale_cap(range, &planes(m, *out, rows), rows * m.rows, scale, cap)?;
            }
        }
        Ok(Some(steps.count))
    }
}

/// What it leaves of one matrix.
fn planes(m: &Matrix, out: u64, rows: usize) -> Planes {
    Planes { ptr: out, stride: rows * m.rows, count: 2 }
}

/// The products of a step, by layout: blocks as bytes, but each with a row of tiles of its own, so that no row is cut twice.
fn pair(parts: &[(Matrix, u64)], blocks: usize, layouts: &[Layout], rows: usize) -> Vec<u8> {
    let first = parts.iter().map(|(m, _)| m.layout).min_by_key(|l| *l as i32).unwrap_or(layouts[0]);
    let of = |same: bool| parts.iter().filter(move |(m, _)| (m.layout == first) == same).collect::<Vec<_>>();
    let (a, b) = (of(true), of(false));
    let bytes =
        |group: &[&(Matrix, u64)]| group.iter().map(|(m, _)| m.layout.bytes(m.rows, m.cols)).sum::<usize>();
    let tiles = |group: &[&(Matrix, u64)]| group.iter().map(|(m, _)| m.tiles()).sum::<usize>();
    let mut of_a = blocks.min(tiles(&a));
    let mut of_b = 0;
    if !b.is_empty() {
        let share = bytes(&a) as f64 / (bytes(&a) + bytes(&b)) as f64;
        of_a = ((blocks as f64 * share).round() as usize).clamp(1, blocks - 1).min(tiles(&a));
        of_b = (blocks - of_a).min(tiles(&b));
    }
    let cols = parts.first().map_or(0, |(m, _)| m.cols);
    [(a, of_a), (b, of_b)]
        .iter()
        .flat_map(|(group, blocks)| product(group, cols, *blocks, layouts[0], rows))
        .collect()
}

/// One product as the kernel takes it.
fn product(group: &[&(Matrix, u64)], cols: usize, blocks: usize, other: Layout, rows: usize) -> Vec<u8> {
    let mut bytes = vec![];
    for (m, out) in group {
        bytes.extend([m.ptr, *out, (rows * m.rows) as u64].iter().flat_map(|a| a.to_le_bytes()));
        bytes.extend([m.rows, m.tiles()].iter().flat_map(|n| (*n as u32).to_le_bytes()));
        bytes.extend(m.scale.to_le_bytes());
        bytes.extend([0; 4]);
    }
    bytes.resize(4 * 40, 0);
    let tiles: usize = group.iter().map(|(m, _)| m.tiles()).sum();
    let layout = group.first().map_or(other, |(m, _)| m.layout);
    let parts = if layout == Layout::F16 { 4 } else { 1 };
    let (list, among) = (tiles * cols.div_ceil(TILE_COLS) * parts, blocks.max(1));
    let words = [cols, layout as usize, blocks, list / among, list % among, 0];
    bytes.extend(words.iter().flat_map(|n| (*n as u32).to_le_bytes()));
    bytes
}
