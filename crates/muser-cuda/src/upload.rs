//! Bytes from the page cache to the card: several threads fill page-locked buffers while the one before is on its way.

use crate::gpu::{Gpu, Memory, failed};
use cudarc::driver::PinnedHostSlice;
use muser_core::DeviceError;

/// Bytes of a buffer: long enough for the full rate of the bus, short enough to be filled meanwhile.
const PIECE: usize = 32 << 20;
/// Threads that fill a buffer at most; one copies slower than the bus takes.
const THREADS: usize = 8;

/// Two page-locked buffers in turn.
pub(crate) struct Uploader {
    buffers: [PinnedHostSlice<u8>; 2],
    turn: usize,
}

impl Uploader {
    pub fn new(gpu: &Gpu) -> Result<Self, DeviceError> {
        Ok(Uploader { buffers: [gpu.pinned(PIECE)?, gpu.pinned(PIECE)?], turn: 0 })
    }

    /// Copies bytes to the card at an offset; what was submitted before is done first, what comes after waits.
    pub fn upload(&mut self, gpu: &Gpu, to: &mut Memory, at: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        for (i, part) in bytes.chunks(PIECE).enumerate() {
            let at = at + i * PIECE;
            if part.len() < PIECE {
                gpu.upload(to, at, part)?;
                continue;
            }
            let buffer = &mut self.buffers[self.turn];
            self.turn ^= 1;
            // Waits until the copy out of this buffer is done.
            let filled = buffer.as_mut_slice().map_err(failed("wait for a copy"))?;
            let threads = std::thread::available_parallelism().map_or(1, |n| n.get()).min(THREADS);
            let share = PIECE.div_ceil(threads);
            std::thread::scope(|scope| {
                for (to, from) in filled.chunks_mut(share).zip(part.chunks(share)) {
                    scope.spawn(move || to.copy_from_slice(from));
                }
            });
            gpu.upload_pinned(to, at, buffer)?;
        }
        Ok(())
    }
}
