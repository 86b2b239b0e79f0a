//! Passes of many rows: matrices are widened to f16 on a stream of their own, while the ones before are multiplied by cuBLAS; what
//! products leave stays f16 but for those that a tail adds to the residual.

use crate::launch::{Args, Halves, Left, Planes};
use crate::program::{Compiler, Node, Work};
use crate::stream::Rows;
use crate::weights::{Layout, Matrix, TILE_COLS};
use muser_core::{Buf, DeviceError};
use std::ops::Range;

/// Matrices that wait, widened, for their product: one is multiplied, one is filled.
pub(crate) const SLOTS: usize = 2;

/// A product on many rows.
pub(crate) struct Gemm {
    /// Which widened matrix.
    pub slot: usize,
    pub w: u64,
    pub x: u64,
    pub out: u64,
    /// Rows of the matrix, rows of activations, columns.
    pub shape: (usize, usize, usize),
    /// Elements from one row's results to the next's.
    pub stride: usize,
    pub factor: f32,
    /// Whether results are f16.
    pub half: bool,
}

/// Results of a product of many rows.
#[derive(Clone, Copy)]
pub(crate) enum Out {
    F32(u64),
    F16(u64),
}

impl Out {
    /// From a later element on.
    pub fn from(self, at: usize) -> Self {
        match self {
            Out::F32(ptr) => Out::F32(ptr + (at * 4) as u64),
            Out::F16(ptr) => Out::F16(ptr + (at * 2) as u64),
        }
    }
}

/// What a matrix' values are multiplied with so that `first`'s factor serves both: a power of two that f16 has room for.
fn shared_factor(first: &Matrix, other: &Matrix) -> Option<f32> {
    let ratio = other.scale / first.scale;
    let exact = ratio.is_normal() && ratio.to_bits() & 0x807f_ffff == 0 && ratio * first.scale == other.scale;
    // Values of F16 tiles come up to 2^14 as they are (`most_exponent` in weights.rs).
    let most = if other.layout == Layout::F16 { 2.0 } else { 16.0 };
    (exact && (1.0 / 16.0..=most).contains(&ratio)).then_some(ratio)
}

impl Compiler<'_> {
    /// Matrices with the same rows of activations, their results side by side.
    pub(crate) fn products(
        &mut self,
        steps: Range<usize>,
        parts: &[Matrix],
        x: Rows,
        (n, stride): (usize, usize),
        out: Out,
    ) -> Result<(), DeviceError> {
        if self.stream(steps.clone(), parts, x, (n, stride), out)? {
            return Ok(());
        }
        self.gemm(steps, parts, x.at, (n, stride), out)
    }

    /// The same by widening; neighbours that share a factor are one product.
    fn gemm(
        &mut self,
        steps: Range<usize>,
        parts: &[Matrix],
        x: u64,
        (n, stride): (usize, usize),
        out: Out,
    ) -> Result<(), DeviceError> {
        let slot_bytes = self.buffers.scratch_bytes / SLOTS;
        let (mut i, mut before) = (0, 0);
        while i < parts.len() {
            let (first, slot) = (&parts[i], self.slot);
            self.slot = (slot + 1) % SLOTS;
            let w = self.buffers.scratch.ptr + (slot * slot_bytes) as u64;
            let mut rows = 0;
            while let Some(m) = parts.get(i) {
                let Some(factor) = shared_factor(first, m) else { break };
                if rows > 0 && (rows + m.rows) * m.cols * 2 > slot_bytes {
                    break;
                }
                let twice = u32::from(half::f16::from_f32(factor).to_bits()) * 0x1_0001;
                let to = w + (rows * m.cols * 2) as u64;
                let args = Args::default().ptr(m.ptr).int(m.rows).int(m.cols).int(twice as usize).ptr(to);
                let blocks = (m.tiles() * m.cols.div_ceil(TILE_COLS) * 128).div_ceil(256) as u32;
                self.nodes.push(Node {
                    steps: steps.clone(),
                    name: format!("widen_{}", m.layout.name()),
                    file: "src/kernels/project.cu",
                    work: Work::Widen { slot, blocks, args },
                    leaves: vec![],
                });
                rows += m.rows;
                i += 1;
            }
            let (out, half) = match out.from(before) {
                Out::F32(ptr) => (ptr, false),
                Out::F16(ptr) => (ptr, true),
            };
            let shape = (rows, n, first.cols);
            let gemm = Gemm { slot, w, x, out, shape, stride, factor: first.scale, half };
            self.nodes.push(Node {
                steps: steps.clone(),
                name: "gemm-f16 (cuBLAS)".to_string(),
                file: "src/gpu.rs",
                work: Work::Gemm(gemm),
                leaves: vec![],
            });
            before += rows;
        }
        Ok(())
    }

    /// The products of one step: P as f32, others side by side as f16.
    pub(crate) fn project_many(
        &mut self,
        steps: Range<usize>,
        outs: &[(Matrix, Buf)],
        x: Rows,
    ) -> Result<(), DeviceError> {
        let n = self.key.rows;
        if let [(m, Buf::P)] = outs {
            let out = self.buffers.raw.p.ptr;
            self.products(steps, &[*m], x, (n, m.rows), Out::F32(out))?;
            self.leave(&[(Buf::P, Left::Planes(Planes::one(out)))]);
            return Ok(());
        }
        let parts: Vec<Matrix> = outs.iter().map(|(m, _)| *m).collect();
        let stride = parts.iter().map(|m| m.rows).sum();
        let out = self.buffers.joined.ptr;
        self.products(steps, &parts, x, (n, stride), Out::F16(out))?;
        let mut at = out;
        let mut left = vec![];
        for (m, buf) in outs {
            left.push((*buf, Left::Halves(Halves { ptr: at, stride })));
            at += (m.rows * 2) as u64;
        }
        self.leave(&left);
        Ok(())
    }

    /// SiLU of one product times another.
    pub(crate) fn gate_up_many(
        &mut self,
        steps: Range<usize>,
        gate: Matrix,
        up: Matrix,
    ) -> Result<(), DeviceError> {
        let (n, ff, out) = (self.key.rows, gate.rows, self.buffers.joined.ptr);
        let (x, f) = (self.buffers.h.addresses().h, self.buffers.f.addresses().h);
        self.arranged = self.stream_gate_up(steps.clone(), (gate, up), x, f)?;
        if self.arranged.is_some() {
            self.leave(&[(Buf::F, Left::Halves(Halves::rows(f, ff)))]);
            return Ok(());
        }
        self.products(steps.clone(), &[gate, up], x.into(), (n, 2 * ff), Out::F16(out))?;
        let half = |i: usize| Halves { ptr: out + (i * ff * 2) as u64, stride: 2 * ff };
        let args = Args::default().halves(&half(0)).halves(&half(1)).int(ff).ptr(f);
        self.push(steps, "src/kernels/norm.cu", "silu_rows", (n, ff.div_ceil(2048), 1), 256, args)?;
        self.leave(&[(Buf::F, Left::Halves(Halves::rows(f, ff)))]);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_factors_keep_to_f16() {
        let matrix = |layout, scale| Matrix { ptr: 0, layout, rows: 16, cols: 256, scale };
        for (layout, most) in [(Layout::Q4K, 16.0), (Layout::F16, 2.0)] {
            let first = matrix(layout, 0.25);
            assert_eq!(shared_factor(&first, &matrix(layout, 0.25 * most)), Some(most));
            assert_eq!(shared_factor(&first, &matrix(layout, 0.5 * most)), None);
            assert_eq!(shared_factor(&first, &matrix(layout, 0.3)), None);
        }
    }
}
