//! Kernel parameters as bytes: mirrors of the structs in kernels/*.cu, field by field.

use crate::weights::Matrix;

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
        self.0.push([a.f, a.q, a.d, a.s, a.h].iter().flat_map(|p| p.to_le_bytes()).collect());
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
    pub fn matvec(mut self, m: &Matvec) -> Self {
        let mut bytes = vec![];
        for i in 0..4 {
            let empty = (0, 0, 0, 0, 0.0f32);
            let seg = m.segments.get(i);
            let (w, out, rows, layout, scale) =
                seg.map_or(empty, |s| (s.0.ptr, s.1, s.0.rows, s.0.layout as i32, s.0.scale));
            bytes.extend(w.to_le_bytes());
            bytes.extend(out.to_le_bytes());
            bytes.extend((rows as u32).to_le_bytes());
            bytes.extend(layout.to_le_bytes());
            bytes.extend(scale.to_le_bytes());
            bytes.extend([0u8; 4]);
        }
        let stride = |i: usize| m.segments.get(i).map_or(0, |s| s.2);
        let words =
            [m.segments.len(), m.cols, m.n, m.first, m.x_stride, stride(0), stride(1), stride(2), stride(3)];
        bytes.extend(words.iter().flat_map(|n| (*n as u32).to_le_bytes()));
        bytes.extend(m.mul.to_le_bytes());
        bytes.extend(m.cap.to_le_bytes());
        bytes.extend((m.batch as u32).to_le_bytes());
        bytes.extend(m.gather.to_le_bytes());
        self.0.push(bytes);
        self
    }
}

/// Addresses of an activation: f32, int8, scales of 32, sums of 16, f16.
#[derive(Clone, Copy, Default)]
pub(crate) struct Activation {
    pub f: u64,
    pub q: u64,
    pub d: u64,
    pub s: u64,
    pub h: u64,
}

impl Activation {
    /// The same buffers from row `row` on; rows are `width` elements apart.
    pub fn at_row(&self, row: usize, width: usize) -> Self {
        let at = (row * width) as u64;
        Activation {
            f: self.f + at * 4,
            q: self.q + at,
            d: self.d + at / 8,
            s: self.s + at / 4,
            h: self.h + at * 2,
        }
    }
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

/// A product of up to four matrices with the same activation rows.
pub(crate) struct Matvec {
    /// Matrix, address of its output, elements between two rows of it.
    pub segments: Vec<(Matrix, u64, usize)>,
    pub cols: usize,
    pub n: usize,
    pub first: usize,
    pub x_stride: usize,
    pub mul: f32,
    pub cap: f32,
    pub batch: usize,
    pub gather: u64,
}
