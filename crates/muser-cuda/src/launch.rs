//! Kernel parameters as bytes: mirrors of the structs in kernels/*.cu, field by field.

use crate::panels::Panels;
use crate::product::Product;
use crate::stream::Stream;

/// Parameters of one launch, in the order of the kernel's signature.
#[derive(Clone, Default)]
pub(crate) struct Args(pub Vec<Vec<u8>>);

impl Args {
    pub fn ptr(mut self, address: u64) -> Self {
        self.0.push(address.to_le_bytes().to_vec());
        self
    }
    pub fn int(mut self, value: usize) -> Self {
        self.0.push((value as u32).to_le_bytes().to_vec());
        self
    }
    pub fn long(mut self, value: usize) -> Self {
        self.0.push((value as u64).to_le_bytes().to_vec());
        self
    }
    pub fn float(mut self, value: f32) -> Self {
        self.0.push(value.to_le_bytes().to_vec());
        self
    }
    pub fn activation(mut self, a: &Activation) -> Self {
        self.0.push([a.f, a.h, a.t, u64::from(a.wide)].iter().flat_map(|p| p.to_le_bytes()).collect());
        self
    }
    pub fn cache(mut self, c: &Cache) -> Self {
        let mut bytes: Vec<u8> = [c.k, c.v].iter().flat_map(|p| p.to_le_bytes()).collect();
        bytes.extend(
            [c.capacity, c.window, c.kv_heads, c.width].iter().flat_map(|n| (*n as u32).to_le_bytes()),
        );
        self.0.push(bytes);
        self
    }
    pub fn planes(mut self, p: &Planes) -> Self {
        let mut bytes: Vec<u8> = [p.ptr, p.stride as u64].iter().flat_map(|v| v.to_le_bytes()).collect();
        bytes.extend((p.count as u64).to_le_bytes());
        self.0.push(bytes);
        self
    }
    pub fn stream(mut self, stream: &Stream) -> Self {
        self.0.push(stream.words());
        self
    }
    /// Masks of layout.cuh.
    pub fn masks(mut self) -> Self {
        self.0.push([0x000f_000fu32, 0x00f0_00f0].iter().flat_map(|m| m.to_le_bytes()).collect());
        self
    }
    pub fn halves(mut self, h: &Halves) -> Self {
        self.0.push([h.ptr, h.stride as u64].iter().flat_map(|v| v.to_le_bytes()).collect());
        self
    }
    /// A matrix of the strict lane, and where its product goes.
    pub fn panels(mut self, m: &Panels, out: u64) -> Self {
        self.0.push(panels(m, out));
        self
    }
    /// Up to four of them that one launch multiplies.
    pub fn parts(mut self, parts: &[(Panels, u64)]) -> Self {
        let mut bytes: Vec<u8> = parts.iter().flat_map(|(m, out)| panels(m, *out)).collect();
        bytes.resize(4 * 32, 0);
        self.0.push(bytes);
        self
    }
    /// Where attention of the strict lane keeps its four parts; what is kept for a head, and heads.
    pub fn scratch(mut self, parts: [u64; 4], words: [usize; 2]) -> Self {
        let words = words.map(|n| (n as u32).to_le_bytes());
        self.0.push([parts.map(u64::to_le_bytes).as_flattened(), words.as_flattened()].concat());
        self
    }
    pub fn product(mut self, product: &Product) -> Self {
        let mut bytes = vec![];
        for segment in &product.segments {
            let m = &segment.matrix;
            let addresses = [m.ptr, segment.out.ptr, segment.out.stride as u64];
            bytes.extend(addresses.iter().flat_map(|v| v.to_le_bytes()));
            let tiles = m.tiles().div_ceil(product.team);
            bytes.extend([m.rows, tiles, segment.stride].iter().flat_map(|n| (*n as u32).to_le_bytes()));
            bytes.extend(m.scale.to_le_bytes());
        }
        bytes.resize(4 * 40, 0);
        let words = [
            product.segments.len(),
            product.tiles(),
            product.cols,
            product.n,
            product.slices,
            product.blocks,
            0x000f_000f,
            0x00f0_00f0,
            product.late,
            product.less,
        ];
        bytes.extend(words.iter().flat_map(|n| (*n as u32).to_le_bytes()));
        self.0.push(bytes);
        self
    }
}

fn panels(m: &Panels, out: u64) -> Vec<u8> {
    let words = [m.form as usize, m.rows, m.cols].map(|n| (n as u32).to_le_bytes());
    let addresses = [m.ptr, out].map(u64::to_le_bytes);
    [addresses.as_flattened(), words.as_flattened(), &m.scale.to_le_bytes()].concat()
}

/// Addresses of an activation: f32 and f16 rows, and tiles of f16 rows (kernels/common.cuh); 0 where it isn't wanted so.
#[derive(Clone, Copy, Default)]
pub(crate) struct Activation {
    pub f: u64,
    pub h: u64,
    pub t: u64,
    /// Whether warpgroups multiply the tiles: eight rows then stand together.
    pub wide: bool,
}

/// A row of 256 columns in tiles of rows, halves: mirror of kernels/common.cuh.
pub(crate) const GROUP_ROW: usize = 288;

impl Activation {
    /// What a product of a few rows reads from row `row` on; rows are `width` elements wide.
    pub fn at_row(&self, row: usize, width: usize) -> u64 {
        if self.t != 0 { self.t + (row * GROUP_ROW * 2) as u64 } else { self.h + (row * width * 2) as u64 }
    }

    /// f16 rows alone.
    pub fn halves(&self) -> Self {
        Activation { h: self.h, ..Self::default() }
    }

    /// Tiles alone.
    pub fn tiles(&self) -> Self {
        Activation { t: self.t, wide: self.wide, ..Self::default() }
    }

    /// Rows alone.
    pub fn rows(&self) -> Self {
        Activation { t: 0, ..*self }
    }
}

/// Partial sums of a product: `count` planes, `stride` elements apart, whose sum is the result.
#[derive(Clone, Copy, Default)]
pub(crate) struct Planes {
    pub ptr: u64,
    pub stride: usize,
    pub count: usize,
}

impl Planes {
    /// A whole result.
    pub fn one(ptr: u64) -> Self {
        Planes { ptr, stride: 0, count: 1 }
    }

    /// The same from element `at` on; nothing stays nothing.
    pub fn from(&self, at: usize) -> Self {
        if self.ptr == 0 { *self } else { Planes { ptr: self.ptr + (at * 4) as u64, ..*self } }
    }
}

/// f16 rows, `stride` elements apart.
#[derive(Clone, Copy, Default)]
pub(crate) struct Halves {
    pub ptr: u64,
    pub stride: usize,
}

impl Halves {
    /// Rows that stand one after another.
    pub fn rows(ptr: u64, width: usize) -> Self {
        Halves { ptr, stride: width }
    }
}

/// Where an observer finds what a launch left in a buffer.
#[derive(Clone, Copy)]
pub(crate) enum Left {
    Planes(Planes),
    Halves(Halves),
    /// Tiles of rows, by address, and whether eight stand together.
    Tiles(u64, bool),
}

/// One layer's cache, for all slots.
#[derive(Clone, Copy)]
pub(crate) struct Cache {
    pub k: u64,
    pub v: u64,
    pub capacity: usize,
    pub window: usize,
    pub kv_heads: usize,
    pub width: usize,
}
