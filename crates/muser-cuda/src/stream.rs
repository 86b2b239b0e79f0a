//! Products of many rows straight from the tiles (kernels/stream.cu for 33 to 64, kernels/stream_wide.cu by warpgroups for 17 to 384): which are taken, and how they
//! are launched.

use crate::buffers::PLANES_BYTES;
use crate::launch::Args;
use crate::many::Out;
use crate::product::Room;
use crate::program::Compiler;
use crate::weights::{Layout, Matrix, TILE_COLS, TILE_ROWS};
use muser_core::DeviceError;
use std::ops::Range;

/// Activation rows at most; for more, widening once is as fast.
pub(crate) const MOST_ROWS: usize = 64;
/// Launches of warpgroups for one product at most, and so the rows that they take at most.
const MOST_LAUNCHES: usize = 3;
pub(crate) const MOST_WIDE: usize = MOST_LAUNCHES * WIDEST;
/// Shared memory that kernels/stream.cu's smallest tiles need, KB.
pub(crate) const STREAM_ROOM: usize = 144;
/// Rows of tiles of a block, a warp each.
const BLOCK_TILES: usize = 16;
/// Matrices of a launch at most.
const PARTS: usize = 4;

/// Activation rows for which kernels/stream_wide.cu is compiled.
pub(crate) const WIDE_COLUMNS: [usize; 3] = [32, 64, 128];
/// The most of these.
pub(crate) const WIDEST: usize = WIDE_COLUMNS[2];

/// Rows of activations of a product.
#[derive(Clone, Copy)]
pub(crate) struct Rows {
    /// f16, at this address.
    pub at: u64,
    /// Where SiLU has arranged them for warpgroups, too: for launches of at most so many rows.
    pub arranged: Option<usize>,
}

impl From<u64> for Rows {
    fn from(at: u64) -> Self {
        Rows { at, arranged: None }
    }
}

/// One kernel of kernels/stream_wide.cu.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wide {
    pub columns: usize,
    /// Stages of activations.
    pub stages: usize,
    /// Tiles of four bits a weight that a warp has on their way.
    pub tiles: usize,
    /// Shared memory of a block.
    shared: usize,
}

impl Wide {
    /// The kernel for these tiles and columns; none where warpgroups don't multiply, or rings of three stages don't fit.
    pub fn of(room: Room, layout: Layout, columns: usize) -> Option<Self> {
        let tiles = if columns == WIDEST { 2 } else { 3 };
        let held = match layout {
            Layout::F16 => 1, // two halves
            Layout::Q8 | Layout::Q6K => 2,
            _ => tiles,
        };
        let rings = BLOCK_TILES * held * layout.tile_bytes();
        let stage = WIDE_BYTES / 2 * columns + 16;
        let stages = room.block.saturating_sub(rings) / stage;
        let stages = stages.min(4);
        let shared = rings + stages * stage;
        (room.wide && stages >= 3).then_some(Wide { columns, stages, tiles, shared })
    }

    pub fn name(&self, layout: Layout) -> String {
        format!("stream_wide_{}_{}", layout.name(), self.columns)
    }
}

/// Bytes of a row's 256 activations, where they are arranged for warpgroups and both halves took as much as the first.
const WIDE_BYTES: usize = 2 * 18 * 16;

/// Bytes of activations that are arranged for one launch, `cols` a row.
pub(crate) fn arranged_bytes(cols: usize) -> usize {
    WIDEST * cols.div_ceil(TILE_COLS) * WIDE_BYTES
}

/// One launch; mirrors of the structs in kernels/stream.cu.
pub(crate) struct Stream {
    /// Each with its first column of the result.
    parts: Vec<(Matrix, usize)>,
    cols: usize,
    n: usize,
    grid: usize,
}

impl Stream {
    fn new(parts: Vec<(Matrix, usize)>, n: usize, processors: usize) -> Self {
        let mut stream = Stream { cols: parts[0].0.cols, parts, n, grid: 1 };
        stream.grid = processors.clamp(1, stream.blocks() * stream.steps());
        stream
    }

    fn blocks(&self) -> usize {
        self.parts.iter().map(|(m, _)| m.tiles().div_ceil(BLOCK_TILES)).sum()
    }

    fn steps(&self) -> usize {
        self.cols.div_ceil(TILE_COLS)
    }

    /// The block of the launch that has step `at` of all.
    fn owner(&self, at: usize) -> usize {
        ((at + 1) * self.grid - 1) / (self.blocks() * self.steps())
    }

    /// Planes among which the steps of a block's rows are cut at most.
    fn planes(&self) -> usize {
        let pieces = |block| {
            let first = block * self.steps();
            self.owner(first + self.steps() - 1) - self.owner(first) + 1
        };
        (0..self.blocks()).map(pieces).max().unwrap_or(1)
    }

    fn bytes(&self) -> usize {
        self.planes() * self.n * self.blocks() * BLOCK_TILES * TILE_ROWS * 4
    }

    /// Shared memory of a block: two stages of activations and tiles.
    fn shared(layout: Layout) -> usize {
        2 * (MOST_ROWS * (TILE_COLS * 2 + 64) + BLOCK_TILES * layout.tile_bytes())
    }

    /// The launch's description, as the kernels take it.
    pub fn words(&self) -> Vec<u8> {
        let mut bytes = vec![];
        for (m, before) in &self.parts {
            bytes.extend(m.ptr.to_le_bytes());
            let words = [m.tiles(), m.rows, *before, m.tiles().div_ceil(BLOCK_TILES)];
            bytes.extend(words.iter().flat_map(|w| (*w as u32).to_le_bytes()));
            bytes.extend(m.scale.to_le_bytes());
            bytes.extend([0; 4]);
        }
        bytes.resize(PARTS * 32, 0);
        let words = [self.parts.len(), self.blocks(), self.steps(), self.cols, self.n, self.grid];
        bytes.extend(words.iter().flat_map(|w| (*w as u32).to_le_bytes()));
        bytes
    }
}

/// Whether a layout has the kernel: f16 and Q8_0 tiles would fill shared memory, and widening gains them little.
pub(crate) fn has_kernel(layout: Layout) -> bool {
    !matches!(layout, Layout::F16 | Layout::Q8)
}

/// Launches of matrices of one layout each, whose planes fit their buffer; none where one's alone do not.
fn launches(parts: &[Matrix], n: usize, processors: usize) -> Option<Vec<Stream>> {
    let mut at = 0;
    let mut placed = vec![];
    for m in parts {
        placed.push((*m, at));
        at += m.rows;
    }
    placed.sort_by_key(|(m, _)| m.layout as i32);
    let mut launches: Vec<Stream> = vec![];
    for part in placed {
        if let Some(last) =
            launches.last().filter(|last| last.parts.len() < PARTS && last.parts[0].0.layout == part.0.layout)
        {
            let joined = Stream::new([&last.parts[..], &[part]].concat(), n, processors);
            if joined.bytes() <= PLANES_BYTES {
                launches.pop();
                launches.push(joined);
                continue;
            }
        }
        launches.push(Stream::new(vec![part], n, processors));
    }
    launches.iter().all(|launch| launch.bytes() <= PLANES_BYTES).then_some(launches)
}

impl Compiler<'_> {
    /// Products of not too many rows without widening, results side by side; false where that is not possible.
    pub(crate) fn stream(
        &mut self,
        steps: Range<usize>,
        parts: &[Matrix],
        x: Rows,
        (n, stride): (usize, usize),
        out: Out,
    ) -> Result<bool, DeviceError> {
        let (room, cols) = (self.card.room, parts[0].cols);
        if room.wide {
            let Some(most) = group(room, parts, n) else { return Ok(false) };
            for (i, first) in (0..n).step_by(most).enumerate() {
                let rows = most.min(n - first);
                let columns = columns_for(rows);
                let from = if x.arranged == Some(most) {
                    self.arranged_f(i, cols)
                } else {
                    self.arrange(steps.clone(), x.at + (first * cols * 2) as u64, (rows, cols), columns)?
                };
                let out = out.from(first * stride);
                self.stream_launches(steps.clone(), parts, from, (rows, stride), out, |layout| {
                    Wide::of(room, layout, columns).map(|wide| (wide.name(layout), WIDE, wide.shared))
                })?;
            }
            return Ok(true);
        }
        let fits = |m: &Matrix| has_kernel(m.layout) && Stream::shared(m.layout) <= room.block;
        if n > MOST_ROWS || !parts.iter().all(fits) {
            return Ok(false);
        }
        self.stream_launches(steps, parts, x.at, (n, stride), out, |layout| {
            Some((format!("stream_{}", layout.name()), STREAM, Stream::shared(layout)))
        })
    }

    /// One launch of rows; `kernel` gives name, file and shared memory for a layout.
    fn stream_launches(
        &mut self,
        steps: Range<usize>,
        parts: &[Matrix],
        x: u64,
        (n, stride): (usize, usize),
        out: Out,
        kernel: impl Fn(Layout) -> Option<(String, &'static str, usize)>,
    ) -> Result<bool, DeviceError> {
        let Some(launches) = launches(parts, n, self.card.room.processors) else { return Ok(false) };
        let planes = self.buffers.planes.ptr;
        for launch in launches {
            let Some((name, file, shared)) = kernel(launch.parts[0].0.layout) else { return Ok(false) };
            let args = Args::default().stream(&launch).ptr(x).masks().ptr(planes);
            let block = (32 * BLOCK_TILES, shared);
            self.push_shared(steps.clone(), file, &name, (launch.grid, 1, 1), block, args)?;
            let (halves, floats) = match out {
                Out::F16(ptr) => (ptr, 0),
                Out::F32(ptr) => (0, ptr),
            };
            let args = Args::default().stream(&launch).ptr(planes).long(stride).ptr(halves).ptr(floats);
            self.push(steps.clone(), JOIN, "join", (n.div_ceil(4), launch.blocks(), 1), 256, args)?;
        }
        Ok(true)
    }

    /// Gate and up of one layout by warpgroups, with SiLU behind them; none where that is not possible. Rows are left to `f`, and arranged: returns
    /// for what launches.
    pub(crate) fn stream_gate_up(
        &mut self,
        steps: Range<usize>,
        (gate, up): (Matrix, Matrix),
        x: u64,
        f: u64,
    ) -> Result<Option<usize>, DeviceError> {
        let (room, n, parts) = (self.card.room, self.key.rows, [gate, up]);
        let Some(most) = group(room, &parts, n) else { return Ok(None) };
        let joined =
            launches(&parts, most.min(n), room.processors).is_some_and(|launches| launches.len() == 1);
        if !joined || gate.rows != up.rows {
            return Ok(None);
        }
        for (i, first) in (0..n).step_by(most).enumerate() {
            let rows = most.min(n - first);
            let columns = columns_for(rows);
            let Some(wide) = Wide::of(room, gate.layout, columns) else { return Ok(None) };
            let from =
                self.arrange(steps.clone(), x + (first * gate.cols * 2) as u64, (rows, gate.cols), columns)?;
            let launch = Stream::new(vec![(gate, 0), (up, gate.rows)], rows, room.processors);
            let planes = self.buffers.planes.ptr;
            let args = Args::default().stream(&launch).ptr(from).masks().ptr(planes);
            let block = (32 * BLOCK_TILES, wide.shared);
            self.push_shared(steps.clone(), WIDE, &wide.name(gate.layout), (launch.grid, 1, 1), block, args)?;
            let args = Args::default().stream(&launch).ptr(planes).ptr(f + (first * gate.rows * 2) as u64);
            let args = args.ptr(self.arranged_f(i, gate.rows));
            let grid = (columns / 8, gate.rows.div_ceil(TILE_COLS), 1);
            self.push(steps.clone(), JOIN, "join_silu", grid, 256, args)?;
        }
        Ok(Some(most))
    }

    /// Where rows of F stand arranged for the `group`-th launch.
    fn arranged_f(&self, group: usize, width: usize) -> u64 {
        self.buffers.arranged_f.ptr + (group * arranged_bytes(width)) as u64
    }

    /// Rows as warpgroups read them; returns where.
    fn arrange(
        &mut self,
        steps: Range<usize>,
        x: u64,
        (rows, cols): (usize, usize),
        columns: usize,
    ) -> Result<u64, DeviceError> {
        let arranged = self.buffers.arranged.ptr;
        let args = Args::default().ptr(x).int(rows).int(cols).ptr(arranged);
        self.push(steps, JOIN, "arrange", (columns / 8, cols.div_ceil(TILE_COLS), 1), 256, args)?;
        Ok(arranged)
    }
}

/// Rows of a launch at most, where warpgroups multiply these: all launches but the last have as many, for one of 128 rows takes little longer than one of
/// 65.
fn group(room: Room, parts: &[Matrix], n: usize) -> Option<usize> {
    let fits = |columns: &usize| parts.iter().all(|m| Wide::of(room, m.layout, *columns).is_some());
    let widest = WIDE_COLUMNS.into_iter().take_while(fits).last()?;
    // Weights of 16 bits are read three times no faster than they are widened.
    let most = if parts.iter().any(|m| m.layout == Layout::F16) { 2 } else { MOST_LAUNCHES };
    let placed = n <= most * widest && launches(parts, widest.min(n), room.processors).is_some();
    placed.then_some(widest)
}

/// The kernel's columns for so many rows.
fn columns_for(rows: usize) -> usize {
    WIDE_COLUMNS.into_iter().find(|columns| rows <= *columns).unwrap_or(WIDEST)
}

const STREAM: &str = "src/kernels/stream.cu";
const WIDE: &str = "src/kernels/stream_wide.cu";
const JOIN: &str = "src/kernels/join.cu";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::Card;

    #[test]
    fn every_step_has_one_owner_and_planes_fit() {
        for (rows, cols) in [(19968, 6656), (6656, 19968), (256, 6656), (6656, 4096), (512, 256), (40, 512)] {
            for n in [33, 64, 128] {
                let m = Matrix { ptr: 0, layout: Layout::Q4K, rows, cols, scale: 1.0 };
                let s = Stream::new(vec![(m, 0)], n, 132);
                let all = s.blocks() * s.steps();
                for b in 0..s.grid {
                    let (from, to) = (all * b / s.grid, all * (b + 1) / s.grid);
                    assert!(from < to && (from..to).all(|at| s.owner(at) == b), "{rows} x {cols}, {n} rows");
                }
                assert!(s.bytes() <= PLANES_BYTES && s.planes() <= s.grid);
            }
        }
    }

    #[test]
    fn warpgroups_have_room_for_all_types_of_few_bits() {
        let room = Card::h200().room;
        for layout in [Layout::Q4, Layout::Q4K, Layout::Q5K, Layout::Q6K, Layout::Iq4, Layout::Fp4] {
            for columns in WIDE_COLUMNS {
                let wide = Wide::of(room, layout, columns).unwrap();
                assert!(wide.shared <= room.block, "{layout:?}, {columns} rows: {wide:?}");
            }
        }
        for layout in [Layout::F16, Layout::Q8] {
            let most = WIDE_COLUMNS.map(|columns| Wide::of(room, layout, columns).is_some());
            assert_eq!(most, [true, true, false], "{layout:?}");
        }
        assert_eq!(Wide::of(Room { wide: false, ..room }, Layout::Q4K, 64), None);
    }

    /// A head in eleven parts.
    #[test]
    fn launches_hold_their_planes() {
        let part = |layout| Matrix { ptr: 0, layout, rows: 19_968, cols: 6656, scale: 1.0 };
        let mut parts = vec![part(Layout::Q6K); 11];
        parts[3] = part(Layout::Q4K);
        let launches = launches(&parts, 64, 132).unwrap();
        let mut firsts: Vec<usize> = launches.iter().flat_map(|l| l.parts.iter().map(|p| p.1)).collect();
        firsts.sort_unstable();
        assert_eq!(firsts, (0..11).map(|i| i * 19_968).collect::<Vec<_>>());
        assert!(launches.iter().all(|l| l.bytes() <= PLANES_BYTES && l.parts.len() <= PARTS));
    }
}
