//! Bytes from the page cache to the card: several threads fill page-locked buffers while the one before is on its way.

use crate::gpu::{Gpu, Memory, Pinned};
use muser_core::DeviceError;

/// Bytes of a buffer: long enough for the full rate of the bus, short enough to be filled meanwhile.
const PIECE: usize = 32 << 20;
/// Buffers in turn: one is filled, the others may wait for what the card does before.
const BUFFERS: usize = 4;
/// Threads that fill a buffer at most; one copies slower than the bus takes.
const THREADS: usize = 8;
/// Bytes below which a thread isn't worth its start.
const SHARE: usize = 1 << 20;

/// Page-locked buffers in turn.
pub(crate) struct Uploader {
    buffers: Vec<Pinned>,
    turn: usize,
}

impl Uploader {
    pub fn new(gpu: &Gpu) -> Result<Self, DeviceError> {
        let buffers = (0..BUFFERS).map(|_| gpu.pinned(PIECE)).collect::<Result<_, _>>()?;
        Ok(Uploader { buffers, turn: 0 })
    }

    /// Copies bytes to the card at an offset; what was submitted before is done first, what comes after waits.
    pub fn upload(&mut self, gpu: &Gpu, to: &mut Memory, at: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get()).min(THREADS);
        for (i, part) in bytes.chunks(PIECE).enumerate() {
            let buffer = &mut self.buffers[self.turn];
            self.turn = (self.turn + 1) % BUFFERS;
            // Waits until the copy out of this buffer is done.
            let filled = &mut buffer.bytes()?[..part.len()];
            let share = part.len().div_ceil(threads).max(SHARE);
            std::thread::scope(|scope| {
                for (to, from) in filled.chunks_mut(share).zip(part.chunks(share)) {
                    scope.spawn(move || to.copy_from_slice(from));
                }
            });
            gpu.upload_pinned(to, at + i * PIECE, buffer, part.len())?;
        }
        Ok(())
    }
}
