//! How a product on a few rows is spread over the card: columns in shared memory, blocks, planes of partial sums.

use crate::launch::Planes;
use crate::weights::{Layout, Matrix, TILE_COLS};

/// Activation rows that one launch takes at most.
pub(crate) const GROUP: usize = 16;
/// Planes of partial sums that a product leaves at most.
pub(crate) const MOST_PLANES: usize = 10;
/// The same for the head, whose planes are long.
pub(crate) const HEAD_PLANES: usize = 4;

/// The shape of one launch of kernels/project.cu.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Activation rows that the kernel is compiled for.
    pub columns: usize,
    /// Slices of the columns.
    pub slices: usize,
    /// Blocks for each slice.
    pub blocks: usize,
    /// Dynamic shared memory of a block, bytes.
    pub shared: usize,
}

/// What a card has of shared memory, bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    /// For one block.
    pub block: usize,
    /// For all blocks of a multiprocessor.
    pub processor: usize,
    /// Multiprocessors.
    pub processors: usize,
}

impl Shape {
    /// The shape for `n` rows of `cols` elements times `tiles` tiles of rows, with at most `planes` planes.
    pub fn of(
        room: Room,
        layout: Layout,
        n: usize,
        cols: usize,
        tiles: usize,
        planes: usize,
    ) -> Option<Self> {
        let most = n.next_power_of_two().min(GROUP);
        let mut columns = most;
        while columns >= 1 {
            if let Some(shape) = Self::with(room, layout, columns, cols, tiles, planes) {
                return Some(shape);
            }
            columns /= 2;
        }
        None
    }

    fn with(
        room: Room,
        layout: Layout,
        columns: usize,
        cols: usize,
        tiles: usize,
        planes: usize,
    ) -> Option<Self> {
        // Mirrors of project.cu: warps with a ring each, partial sums and their places, activations with their sums of 32.
        let warps = warps(columns);
        let ring = match layout {
            Layout::F16 => warps * layout.tile_bytes(),
            Layout::Q4 | Layout::Q4K | Layout::Q5K | Layout::Iq4 | Layout::Fp4 if warps == 8 => {
                3 * warps * layout.tile_bytes()
            }
            _ => 2 * warps * layout.tile_bytes(),
        };
        let fixed = ring + columns * (2 * warps * 64 + 64 + 16) + 32 * 12;
        let each = columns * (TILE_COLS * 2 + 16);
        let all = cols.div_ceil(TILE_COLS);
        // Blocks of one multiprocessor hide each other's waits; groups want longer slices instead.
        let per = if columns <= 4 { 3 } else { 1 };
        (1..=per).rev().find_map(|per| {
            let limit = (room.processor / per).saturating_sub(1024).min(room.block);
            let fits = limit.checked_sub(fixed)? / each;
            if fits == 0 {
                return None;
            }
            let most = all.div_ceil(all.div_ceil(fits));
            let slices = all.div_ceil(most);
            if slices > planes || (per > 1 && slices > 2) {
                return None;
            }
            let blocks = (room.processors * per / slices).clamp(1, tiles);
            Some(Shape { columns, slices, blocks, shared: fixed + most * each })
        })
    }

    /// Threads of a block.
    pub fn threads(&self) -> usize {
        warps(self.columns) * 32
    }

    /// Planes that it leaves.
    pub fn planes(&self) -> usize {
        if self.slices == 1 { 2 } else { self.slices }
    }
}

/// Warps of a block, as project.cu has them.
fn warps(columns: usize) -> usize {
    if columns > 4 { 16 } else { 8 }
}

/// One matrix of a launch: where its planes go.
#[derive(Clone, Copy)]
pub(crate) struct Segment {
    pub matrix: Matrix,
    pub out: Planes,
    /// Elements from one activation row's results to the next's.
    pub stride: usize,
}

/// One launch of kernels/project.cu.
pub(crate) struct Product {
    pub segments: Vec<Segment>,
    pub cols: usize,
    pub n: usize,
    pub slices: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::Card;

    const CONSUMER: Room = Room { block: 101_376, processor: 102_400, processors: 82 };

    #[test]
    fn shapes_fit_their_card() {
        for room in [Card::h200().room, CONSUMER] {
            use Layout::*;
            for layout in [F16, Q8, Q4, Q4K, Q5K, Q6K, Iq4, Fp4] {
                for (cols, tiles) in [(6656, 544), (19968, 416), (4096, 416), (256, 16), (33_280, 416)] {
                    for n in 1..=32 {
                        let s = Shape::of(room, layout, n, cols, tiles, MOST_PLANES).unwrap();
                        assert!(
                            s.shared <= room.block && s.planes() <= MOST_PLANES,
                            "{layout:?} {n} {cols}: {s:?}"
                        );
                        let all = cols.div_ceil(TILE_COLS);
                        let most = all.div_ceil(s.slices);
                        assert!((s.slices - 1) * most < all, "a slice without columns: {s:?}");
                        assert!(s.blocks <= tiles);
                    }
                }
            }
        }
    }

    #[test]
    fn one_row_is_not_sliced_on_a_large_card() {
        let s = Shape::of(Card::h200().room, Layout::Q4K, 1, 19968, 416, MOST_PLANES).unwrap();
        assert_eq!((s.columns, s.slices, s.blocks), (1, 1, 264));
        let s = Shape::of(Card::h200().room, Layout::Q4K, 1, 6656, 544, MOST_PLANES).unwrap();
        assert_eq!((s.columns, s.slices, s.blocks), (1, 1, 396));
    }
}
