//! Products of 33 to 64 rows straight from the tiles (kernels/stream.cu): which are taken, and how they are launched.

use crate::buffers::PLANES_BYTES;
use crate::launch::Args;
use crate::many::Out;
use crate::program::Compiler;
use crate::weights::{Layout, Matrix, TILE_COLS, TILE_ROWS};
use muser_core::DeviceError;
use std::ops::Range;

/// Activation rows of a launch at most; for more, widening once is as fast.
pub(crate) const MOST_ROWS: usize = 64;
/// Shared memory that its smallest tiles need, KB.
pub(crate) const STREAM_ROOM: usize = 144;
/// Rows of tiles of a block, a warp each.
const BLOCK_TILES: usize = 16;
/// Matrices of a launch at most.
const PARTS: usize = 4;

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

impl Compiler<'_> {
    /// Products of up to 64 rows without widening, results side by side; false where that is not possible.
    pub(crate) fn stream(
        &mut self,
        steps: Range<usize>,
        parts: &[Matrix],
        x: u64,
        (n, stride): (usize, usize),
        out: Out,
    ) -> Result<bool, DeviceError> {
        let room = self.card.room;
        let fits = |m: &Matrix| has_kernel(m.layout) && Stream::shared(m.layout) <= room.block;
        if n > MOST_ROWS || parts.len() > PARTS || !parts.iter().all(fits) {
            return Ok(false);
        }
        let firsts = parts.iter().scan(0, |at, m| {
            *at += m.rows;
            Some(*at - m.rows)
        });
        let mut placed: Vec<(Matrix, usize)> = parts.iter().copied().zip(firsts).collect();
        placed.sort_by_key(|(m, _)| m.layout as i32);
        let launches: Vec<Stream> = placed
            .chunk_by(|a, b| a.0.layout == b.0.layout)
            .map(|same| Stream::new(same.to_vec(), n, room.processors))
            .collect();
        if launches.iter().any(|launch| launch.bytes() > PLANES_BYTES) {
            return Ok(false);
        }
        const FILE: &str = "src/kernels/stream.cu";
        let planes = self.buffers.planes.ptr;
        for launch in launches {
            let layout = launch.parts[0].0.layout;
            let name = |what| format!("{what}_{}", layout.name());
            let args = Args::default().stream(&launch).ptr(x).masks().ptr(planes);
            let block = (32 * BLOCK_TILES, Stream::shared(layout));
            self.push_shared(steps.clone(), FILE, &name("stream"), (launch.grid, 1, 1), block, args)?;
            let (halves, floats) = match out {
                Out::F16(ptr) => (ptr, 0),
                Out::F32(ptr) => (0, ptr),
            };
            let args = Args::default().stream(&launch).ptr(planes).long(stride).ptr(halves).ptr(floats);
            self.push(steps.clone(), FILE, &name("join"), (n, launch.blocks(), 1), 256, args)?;
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_step_has_one_owner_and_planes_fit() {
        for (rows, cols) in [(19968, 6656), (6656, 19968), (256, 6656), (6656, 4096), (512, 256), (40, 512)] {
            for n in [33, 64] {
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
}
