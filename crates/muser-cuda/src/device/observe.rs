//! What an observer is shown of a pass: each launch's time, and what it left in the card's memory.

use super::CudaDevice;
use crate::gpu::failed;
use crate::launch::{GROUP_ROW, Halves, Left, Planes};
use crate::program::{Key, Node, SMALL};
use crate::weights::TILE_COLS;
use cudarc::driver::sys;
use muser_core::{Buf, DeviceError, Observer};

impl CudaDevice {
    /// Runs launches one after another.
    pub(super) fn observe_nodes(
        &self,
        nodes: &[Node],
        key: Key,
        rows: usize,
        observer: &mut dyn Observer,
    ) -> Result<(), DeviceError> {
        let context = self.gpu.stream.context();
        let timed = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
        let event = || context.new_event(timed).map_err(failed("create an event"));
        let (start, end) = (event()?, event()?);
        // Launches of the same steps are one kernel to an observer.
        for group in nodes.chunk_by(|a, b| a.steps == b.steps) {
            start.record(&self.gpu.stream).map_err(failed("record an event"))?;
            group.iter().try_for_each(|node| self.submit(node))?;
            end.record(&self.gpu.stream).map_err(failed("record an event"))?;
            self.gpu.synchronize()?;
            let milliseconds = start.elapsed_ms(&end).map_err(failed("read an event"))?;
            let mut read = |buf: Buf| {
                let count = match buf {
                    Buf::Logits => key.logits,
                    Buf::Features => 2 * self.max_rows,
                    _ => rows,
                };
                let width = self.model.plans.width(key.pass, buf);
                let left = group.iter().flat_map(|node| &node.leaves).find(|(b, _)| *b == buf);
                // A failed read shows as nothing; the next call of the device reports the card's error.
                match left.map(|(_, left)| left) {
                    Some(Left::Tiles(at, wide)) => {
                        self.read_tiles((*at, *wide), count, width).unwrap_or_default()
                    }
                    Some(Left::Halves(halves)) => self.read_halves(halves, count, width).unwrap_or_default(),
                    Some(Left::Planes(planes)) => self.read_planes(planes, count * width).unwrap_or_default(),
                    None => {
                        let planes = Planes::one(self.buffers.memory(buf).ptr);
                        self.read_planes(&planes, count * width).unwrap_or_default()
                    }
                }
            };
            observer.after(group[0].steps.clone(), f64::from(milliseconds) / 1e3, &mut read);
        }
        Ok(())
    }

    /// The sum of planes of `elements` values.
    fn read_planes(&self, planes: &Planes, elements: usize) -> Result<Vec<f32>, DeviceError> {
        let mut sums: Vec<f32> = vec![];
        for plane in 0..planes.count {
            let mut bytes = vec![0u8; elements * 4];
            self.gpu.download_at(planes.from(plane * planes.stride).ptr, &mut bytes)?;
            let values = bytes.chunks_exact(4).map(|c| f32::from_le_bytes([c[0], c[1], c[2], c[3]]));
            // The first plane as it is: adding it to zero would lose the sign of a zero.
            match plane {
                0 => sums = values.collect(),
                _ => sums.iter_mut().zip(values).for_each(|(sum, v)| *sum += v),
            }
        }
        Ok(sums)
    }

    /// `count` rows of what a group leaves.
    fn read_tiles(
        &self,
        (at, wide): (u64, bool),
        count: usize,
        width: usize,
    ) -> Result<Vec<f32>, DeviceError> {
        let mut bytes = vec![0u8; width.div_ceil(TILE_COLS) * SMALL * GROUP_ROW * 2];
        self.gpu.download_at(at, &mut bytes)?;
        let value = |row: usize, e: usize| {
            let (first, within) = if wide {
                let matrix = (e & 128) >> 3 | (e & 31) >> 1;
                (row / 8 * 8, (matrix * 8 + row % 8) * 8 + ((e & 96) >> 4 | (e & 1)))
            } else {
                (row, (e & 0x87) | (e & 0x18) << 2 | (e & 0x60) >> 2)
            };
            let i = ((e / TILE_COLS * SMALL + first) * GROUP_ROW + within) * 2;
            half::f16::from_le_bytes([bytes[i], bytes[i + 1]]).to_f32()
        };
        Ok((0..count).flat_map(|row| (0..width).map(move |e| value(row, e))).collect())
    }

    /// `count` rows of f16.
    fn read_halves(&self, halves: &Halves, count: usize, width: usize) -> Result<Vec<f32>, DeviceError> {
        let mut values = vec![];
        for row in 0..count {
            let mut bytes = vec![0u8; width * 2];
            self.gpu.download_at(halves.ptr + (row * halves.stride * 2) as u64, &mut bytes)?;
            values.extend(bytes.chunks_exact(2).map(|c| half::f16::from_le_bytes([c[0], c[1]]).to_f32()));
        }
        Ok(values)
    }
}
