//! How a product on a few rows is spread over the card: columns in shared memory, blocks, planes of partial sums.

use crate::launch::{GROUP_ROW, Planes};
use crate::weights::{Layout, Matrix, TILE_COLS};

/// Activation rows that one launch takes at most.
pub(crate) const GROUP: usize = 16;
/// Activation rows up to which a warp multiplies a tile by itself where warpgroups could.
pub(crate) const MOST_NARROW: usize = 8;
/// Warps that then multiply together: a warpgroup.
const TEAM: usize = 4;
/// Planes of partial sums that a product leaves at most.
pub(crate) const MOST_PLANES: usize = 12;
/// The same for what is added to the residual and for the drafter's features, whose rows are the widest: 33,280 columns of Q8_0.
pub(crate) const SUM_PLANES: usize = 18;
/// The same for the head, whose planes are long.
pub(crate) const HEAD_PLANES: usize = 4;

/// Activation rows up to which blocks are many and small, and not numbered as they start.
pub(crate) const ALONE: usize = 2;

/// Warps of a block and the small tiles that each has on their way, for one or two rows, up to 8, and more: the first that leave room.
const CREWS_ALONE: [Crew; 1] = [Crew { warps: 8, stages: 3 }];
const CREWS_FEW: [Crew; 4] = [
    Crew { warps: 16, stages: 4 },
    Crew { warps: 16, stages: 3 },
    Crew { warps: 8, stages: 3 },
    Crew { warps: 4, stages: 3 },
];
const CREWS: [Crew; 3] =
    [Crew { warps: 16, stages: 2 }, Crew { warps: 8, stages: 2 }, Crew { warps: 4, stages: 2 }];
/// Blocks of 256 columns that a slice should hold at least: 19,968 columns, the release's widest row, then are in no more than
/// [`MOST_PLANES`] slices, and weights are read once for all rows. Fewer warps leave more room for them.
const LEAST_SLICE: usize = 7;

/// The shape of one launch of kernels/project.cu.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Activation rows that the kernel is compiled for.
    pub columns: usize,
    /// Slices of the columns.
    pub slices: usize,
    /// Blocks for each slice.
    pub blocks: usize,
    /// Warps of a block.
    pub warps: usize,
    /// Warps that multiply together, each with its own of so many rows of tiles.
    pub team: usize,
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
    /// Warpgroups multiply more than [`MOST_NARROW`] rows.
    pub wide: bool,
}

/// Shared memory of a block from which on they do: products then never need fewer than [`GROUP`] rows a launch.
pub(crate) const WIDE_ROOM: usize = 200_000;

/// Warps that multiply together in a kernel for so many rows.
pub(crate) fn team(room: Room, columns: usize) -> usize {
    if room.wide && columns > MOST_NARROW { TEAM } else { 1 }
}

/// Multiprocessors that products of so many rows leave to the small kernels between them, where there are many. Those begin early there, with
/// a block a row, and blocks of products that had to wait for them to end would be the last. With more than four rows it costs as much as it gains.
pub(crate) fn spared(room: Room, columns: usize) -> usize {
    match columns {
        _ if room.processors < 64 => 0,
        1..=4 => columns,
        _ => 1,
    }
}

impl Shape {
    /// The shape for `n` rows of `cols` elements times `tiles` tiles of rows in these layouts, with at most `planes` planes, by a kernel for
    /// all layouts of `program`.
    pub fn of(
        room: Room,
        program: &[Layout],
        layouts: &[Layout],
        n: usize,
        cols: usize,
        tiles: usize,
        planes: usize,
    ) -> Option<Self> {
        let mut columns = n.next_power_of_two().min(GROUP);
        // Groups leave their activations as tiles, which more columns take than those that stand alone.
        let least = match columns {
            _ if team(room, columns) > 1 => GROUP,
            0..=ALONE => 1,
            _ => 2 * ALONE,
        };
        while columns >= least {
            let crew = crew(room, program, columns);
            if let Some(shape) = Self::with(room, crew, layouts, columns, cols, tiles, planes) {
                return Some(shape);
            }
            columns /= 2;
        }
        None
    }

    fn with(
        room: Room,
        crew: Crew,
        layouts: &[Layout],
        columns: usize,
        cols: usize,
        tiles: usize,
        planes: usize,
    ) -> Option<Self> {
        let (fixed, each) = shared(layouts, columns, crew);
        let all = cols.div_ceil(TILE_COLS);
        // Blocks of one multiprocessor hide each other's waits; groups want longer slices instead.
        let per = if columns <= 2 { 3 } else { 1 };
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
            let processors = room.processors - spared(room, columns);
            let team = team(room, columns);
            let blocks = (processors * per / slices).clamp(layouts.len(), tiles.div_ceil(team));
            Some(Shape { columns, slices, blocks, warps: crew.warps, team, shared: fixed + most * each })
        })
    }

    /// Threads of a block.
    pub fn threads(&self) -> usize {
        self.warps * 32
    }

    /// Planes that it leaves.
    pub fn planes(&self) -> usize {
        if self.slices == 1 { 2 } else { self.slices }
    }
}

/// Warps of a block, and tiles in the ring of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Crew {
    pub warps: usize,
    pub stages: usize,
}

/// The crew of a block for at most so many rows on a card, for which kernels/project.cu is compiled there.
pub(crate) fn crew(room: Room, layouts: &[Layout], columns: usize) -> Crew {
    let crews: &[Crew] = match columns {
        1 | ALONE => &CREWS_ALONE,
        3..=8 => &CREWS_FEW,
        _ => &CREWS,
    };
    let holds = |crew: &&Crew| {
        let (fixed, each) = shared(layouts, columns, **crew);
        fixed + LEAST_SLICE * each <= room.block
    };
    *crews.iter().find(holds).unwrap_or(&crews[crews.len() - 1])
}

/// Bytes of shared memory, mirrors of kernels/project.cu: rings, partial sums and zeros; and activations with their sums and a barrier for
/// each 256 columns.
fn shared(layouts: &[Layout], columns: usize, crew: Crew) -> (usize, usize) {
    let most = |of: &dyn Fn(Layout) -> usize| layouts.iter().map(|l| of(*l)).max().unwrap_or(0);
    let place = |layout| match columns {
        1 | ALONE if layout != Layout::F16 => 128,
        1..=8 => 512,
        _ => 1024,
    };
    let warp = most(&|layout| ring_bytes(layout, crew.stages) + place(layout));
    let fixed = crew.warps * warp + 528;
    if columns > ALONE {
        return (fixed, columns * GROUP_ROW * 2 + 8);
    }
    (fixed + columns * (64 + 32), columns * (TILE_COLS * 2 + most(&sum_bytes)))
}

/// Bytes of a warp's ring: tiles on their way, of F16 quarters.
fn ring_bytes(layout: Layout, stages: usize) -> usize {
    match layout {
        Layout::F16 => layout.tile_bytes(),
        Layout::Q8 | Layout::Q6K => 2 * layout.tile_bytes(),
        _ => stages * layout.tile_bytes(),
    }
}

/// Bytes of the sums of 256 activations of one or two rows.
fn sum_bytes(layout: Layout) -> usize {
    match layout {
        Layout::Q4K | Layout::Q5K | Layout::Q8 | Layout::Q4 | Layout::Iq4 => 32,
        Layout::Q6K => 64,
        Layout::F16 | Layout::Fp4 => 0,
    }
}

/// Tiles that a block has less because it starts late.
const LESS: usize = 30;

/// One matrix of a launch: where its planes go.
#[derive(Clone, Copy)]
pub(crate) struct Segment {
    pub matrix: Matrix,
    pub out: Planes,
    /// Elements from one activation row's results to the next's.
    pub stride: usize,
}

/// Matrices of one layout in a launch of kernels/project.cu.
pub(crate) struct Product {
    pub segments: Vec<Segment>,
    pub cols: usize,
    pub n: usize,
    pub slices: usize,
    /// Blocks of a slice.
    pub blocks: usize,
    /// As [`Shape::team`].
    pub team: usize,
    /// Blocks of a slice that start late, its first ones, and what they have of the list of tiles.
    pub late: usize,
    pub less: usize,
}

impl Product {
    /// What a launch without a second layout has in its place.
    pub const NONE: Product =
        Product { segments: vec![], cols: 0, n: 0, slices: 0, blocks: 0, team: 1, late: 0, less: 0 };

    /// Rows of tiles, or what a team has of them at once.
    pub fn tiles(&self) -> usize {
        self.segments.iter().map(|s| s.matrix.tiles().div_ceil(self.team)).sum()
    }

    /// Deals the tiles out to blocks of which `late` start last: where they are few, they have less.
    pub fn share(&mut self, late: usize) {
        // The list of one slice is of rows of tiles, that of all columns of tiles, of F16 quarters.
        let parts = self.segments.first().map_or(1, |s| if s.matrix.layout == Layout::F16 { 4 } else { 1 });
        let across = self.cols.div_ceil(TILE_COLS) * parts;
        let (list, one, less) = match self.slices {
            1 => (self.tiles() * across, across, LESS * parts / self.team),
            slices => (self.tiles(), 1, LESS * parts * slices / across / self.team),
        };
        let late = late / self.slices;
        let late = if 2 * late <= self.blocks && list / self.blocks >= 2 * one { late } else { 0 };
        let each = ((list + late * less) / self.blocks).saturating_sub(less).max(one);
        (self.late, self.less) = (late, late * each);
    }

    /// Bytes of its weights.
    pub fn bytes(&self) -> usize {
        self.segments.iter().map(|s| s.matrix.layout.bytes(s.matrix.rows, self.cols)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::Card;

    const CONSUMER: Room = Room { block: 101_376, processor: 102_400, processors: 82, wide: false };

    #[test]
    fn shapes_fit_their_card() {
        use Layout::*;
        for room in [Card::h200().room, CONSUMER] {
            for layout in [F16, Q8, Q4, Q4K, Q5K, Q6K, Iq4, Fp4] {
                for (cols, tiles) in [(6656, 544), (19968, 416), (4096, 416), (256, 16), (33_280, 416)] {
                    for n in 1..=32 {
                        let s = Shape::of(room, &[layout], &[layout], n, cols, tiles, SUM_PLANES).unwrap();
                        assert!(
                            s.shared <= room.block && s.planes() <= SUM_PLANES,
                            "{layout:?} {n} {cols}: {s:?}"
                        );
                        let all = cols.div_ceil(TILE_COLS);
                        let most = all.div_ceil(s.slices);
                        assert!((s.slices - 1) * most < all, "a slice without columns: {s:?}");
                        assert!(s.blocks * s.team <= tiles.next_multiple_of(s.team));
                        assert!(!room.wide || n <= MOST_NARROW || s.columns == GROUP);
                    }
                }
            }
        }
    }

    #[test]
    fn groups_read_weights_once_or_twice_on_a_card_with_little_shared_memory() {
        use Layout::*;
        for layouts in [&[F16][..], &[Q8], &[Q4], &[Q4K], &[Q5K], &[Q6K], &[Iq4], &[Fp4], &[Q4K, Q6K]] {
            for (cols, tiles, planes) in [
                (6656, 2496, MOST_PLANES),
                (19968, 416, MOST_PLANES),
                (4096, 416, MOST_PLANES),
                (6656, 12628, HEAD_PLANES),
            ] {
                for n in [3, 4, 5, 8, 16] {
                    let s = Shape::of(CONSUMER, layouts, layouts, n, cols, tiles, planes).unwrap();
                    assert!(n <= 2 * s.columns, "{n} rows, {layouts:?}, {cols} columns: {s:?}");
                }
            }
        }
    }

    #[test]
    fn two_layouts_have_blocks_of_their_own() {
        for processors in 1..=8 {
            let room = Room { processors, ..CONSUMER };
            for n in [1, 2, 4, 16] {
                let both = [Layout::Q4K, Layout::Q6K];
                let s = Shape::of(room, &both, &both, n, 19968, 2, MOST_PLANES).unwrap();
                assert_eq!(s.blocks, 2, "{processors} multiprocessors, {n} rows: {s:?}");
            }
        }
    }

    #[test]
    fn late_blocks_have_less() {
        let share = |cols: usize, tiles: usize, slices, blocks, late| {
            let matrix = Matrix { ptr: 0, rows: tiles * 16, cols, layout: Layout::Q4K, scale: 1.0 };
            let segments = vec![Segment { matrix, out: Planes::default(), stride: 0 }];
            let mut product = Product { segments, cols, slices, blocks, ..Product::NONE };
            product.share(late);
            (product.late, product.less)
        };
        // Rows of 13 tiles: 36 for each of 8 blocks, 38 or 39 for the others.
        assert_eq!(share(6656, 2496, 2, 65, 16), (8, 8 * 36));
        // Tiles, but no less than a row of 26, so that none is cut twice.
        assert_eq!(share(6656, 544, 1, 131, 16), (16, 16 * 81));
        assert_eq!(share(6656, 280, 1, 131, 16), (16, 16 * 29));
        // Many late blocks, or so little to do that all have one or two rows, are not told apart.
        assert_eq!(share(6656, 2496, 2, 65, 80), (0, 0));
        assert_eq!(share(6656, 200, 1, 131, 16), (0, 0));
    }

    #[test]
    fn few_rows_leave_multiprocessors_to_small_kernels() {
        let blocks = |room, n| {
            let one = [Layout::Q4K];
            let shape = Shape::of(room, &one, &one, n, 6656, 2496, MOST_PLANES).unwrap();
            shape.blocks * shape.slices
        };
        // Three blocks a multiprocessor for two rows; for 8 and 16 two slices of 65.
        assert_eq!([2, 3, 4, 8, 16].map(|n| blocks(Card::h200().room, n)), [390, 128, 128, 130, 130]);
        let few = Room { processors: 40, ..Card::h200().room };
        assert_eq!([2, 4].map(|n| blocks(few, n)), [120, 40]);
    }

    #[test]
    fn one_row_is_not_sliced_on_a_large_card() {
        let one = [Layout::Q4K];
        let s = Shape::of(Card::h200().room, &one, &one, 1, 19968, 416, MOST_PLANES).unwrap();
        assert_eq!((s.columns, s.slices, s.blocks), (1, 1, 262));
        let s = Shape::of(Card::h200().room, &one, &one, 1, 6656, 544, MOST_PLANES).unwrap();
        assert_eq!((s.columns, s.slices, s.blocks), (1, 1, 393));
    }
}
