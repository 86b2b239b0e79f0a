//! Products of at most 32 activation rows: weights are multiplied as they stream by.

use crate::buffers::TICKETS;
use crate::launch::{Activation, Args, Planes};
use crate::product::{ALONE, GROUP, MOST_PLANES, Product, Segment, Shape, spared};
use crate::program::{Compiler, Work};
use crate::weights::{Layout, Matrix};
use muser_core::{Buf, DeviceError};
use std::ops::Range;

const PROJECT: &str = "src/kernels/project.cu";

/// Layouts of a product's matrices as its launches take them: each once, in order, two a launch.
pub(crate) fn launches(layouts: &[Layout]) -> Vec<Vec<Layout>> {
    let mut layouts = layouts.to_vec();
    layouts.sort_by_key(|l| *l as i32);
    layouts.dedup();
    layouts.chunks(2).map(<[Layout]>::to_vec).collect()
}

/// Whether a launch on so many rows takes a program for these layouts. Groups leave the programs for one layout aside where one for two has it:
/// products of a layer that share their text find it in the instruction cache.
pub(crate) fn serves(programs: &[Vec<Layout>], program: &[Layout], columns: usize) -> bool {
    let wider =
        |other: &Vec<Layout>| other.len() > program.len() && program.iter().all(|l| other.contains(l));
    columns <= ALONE || !programs.iter().any(wider)
}

/// The kernel of kernels/project.cu for one or two layouts and at most `columns` activation rows.
pub(crate) fn product_name(layouts: &[Layout], columns: usize) -> String {
    let names: Vec<_> = layouts.iter().map(|l| l.name()).collect();
    format!("project_{}_{columns}", names.join("_"))
}

impl Compiler<'_> {
    /// Products with the same `n` activation rows, each to its address; returns the planes that each leaves, at most `most`.
    pub(crate) fn multiply(
        &mut self,
        steps: Range<usize>,
        parts: &[(Matrix, u64)],
        x: Activation,
        n: usize,
        most: usize,
    ) -> Result<Vec<Planes>, DeviceError> {
        let mut left = vec![Planes::default(); parts.len()];
        let layouts: Vec<Layout> = parts.iter().map(|p| p.0.layout).collect();
        // A launch serves one or two layouts.
        for together in launches(&layouts) {
            let of = |layout: &Layout| -> Vec<usize> {
                (0..parts.len()).filter(|i| parts[*i].0.layout == *layout).collect()
            };
            let groups: Vec<Vec<usize>> = together.iter().map(of).collect();
            let cols = parts[groups[0][0]].0.cols;
            let tiles = groups.iter().flatten().map(|i| parts[*i].0.tiles()).sum();
            let columns = if self.key.even { GROUP } else { n };
            let program = self
                .programs
                .iter()
                .filter(|p| together.iter().all(|l| p.contains(l)) && serves(&self.programs, p, columns))
                .min_by_key(|p| p.len())
                .cloned()
                .unwrap_or_else(|| together.clone());
            let shape = Shape::of(self.card.room, &program, &together, columns, cols, tiles, most);
            let shape = shape.ok_or_else(|| {
                DeviceError::Backend(format!(
                    "a product of {cols} columns does not fit the shared memory of {}; use --device cpu",
                    self.card.name
                ))
            })?;
            for i in groups.iter().flatten() {
                let (m, out) = parts[*i];
                left[*i] = Planes { ptr: out, stride: n * m.rows, count: shape.planes() };
            }
            for first in (0..n).step_by(shape.columns.min(GROUP)) {
                let segment = |i: &usize| {
                    let matrix = parts[*i].0;
                    Segment { matrix, out: left[*i].from(first * matrix.rows), stride: matrix.rows }
                };
                let product = |group: &Vec<usize>| Product {
                    segments: group.iter().map(segment).collect(),
                    cols,
                    n: (n - first).min(shape.columns),
                    slices: shape.slices,
                    blocks: shape.blocks,
                    team: shape.team,
                    late: 0,
                    less: 0,
                };
                let mut products: Vec<Product> = groups.iter().map(product).collect();
                if let [a, b] = products.as_mut_slice() {
                    // Blocks as bytes, but each with a row of tiles of its own: no row is cut twice.
                    let share = a.bytes() as f64 / (a.bytes() + b.bytes()) as f64;
                    let least = shape.blocks.saturating_sub(b.tiles()).max(1);
                    let most = (shape.blocks - 1).min(a.tiles());
                    a.blocks = ((shape.blocks as f64 * share).round() as usize).clamp(least, most);
                    b.blocks = shape.blocks - a.blocks;
                }
                // Where a row's bits must not depend on how many there are, neither may the warps that have its parts.
                let mut late = if shape.columns > ALONE && !self.key.even { self.late() } else { 0 };
                // Blocks on multiprocessors that are left to them hold up nobody; a single such one is not counted.
                let spared = spared(self.card.room, shape.columns);
                if spared > 1 {
                    late = late.saturating_sub(spared);
                }
                for (i, product) in products.iter_mut().enumerate() {
                    product.share(if i == 0 { late } else { 0 });
                }
                let number = (self.nodes.len() % TICKETS * 4) as u64;
                let ticket = if products[0].late > 0 { self.buffers.tickets.ptr + number } else { 0 };
                // The only layout of a launch may be the second of its program.
                let none = Product::NONE;
                let mut slots: Vec<&Product> = products.iter().collect();
                if program[0] != together[0] {
                    slots.insert(0, &none);
                }
                slots.resize(2, &none);
                let args = slots.into_iter().fold(Args::default(), Args::product);
                let args = args.ptr(ticket).ptr(x.at_row(first, cols)).int(cols);
                let name = product_name(&program, shape.columns);
                let grid = (shape.blocks, shape.slices, 1);
                self.push_shared(steps.clone(), PROJECT, &name, grid, (shape.threads(), shape.shared), args)?;
            }
        }
        Ok(left)
    }

    /// Multiprocessors that the last launch holds until it ends, if it is not a product.
    fn late(&self) -> usize {
        match self.nodes.last().map(|node| (node.file, &node.work)) {
            Some((file, Work::Kernel { grid, .. })) if file != PROJECT => (grid.0 * grid.1 * grid.2) as usize,
            _ => 0,
        }
    }

    pub(crate) fn gate_up(
        &mut self,
        steps: Range<usize>,
        gate: Matrix,
        up: Matrix,
    ) -> Result<(), DeviceError> {
        let b = self.buffers;
        let (n, ff) = (self.key.rows, gate.rows);
        let parts = [(gate, b.raw.gate.ptr), (up, b.raw.up.ptr)];
        let left = self.multiply(steps.clone(), &parts, self.activation(&b.h), n, MOST_PLANES)?;
        let f = self.activation(&b.f);
        let args = Args::default().planes(&left[0]).planes(&left[1]).int(ff).activation(&f);
        self.push(steps, "src/kernels/norm.cu", "silu_mul", (ff.div_ceil(1024), n, 1), 256, args)?;
        self.leave_activation(Buf::F, &f, ff);
        Ok(())
    }
}
