//! What the card can do: reads from its memory, and f16 products on its tensor cores.

use crate::gpu::{Gpu, failed};
use crate::launch::Args;
use crate::many::Gemm;
use cudarc::driver::sys;
use muser_core::{DeviceError, Limits};

/// Bytes that are read: far beyond any second-level cache.
const BYTES: usize = 1 << 30;
/// Rows and columns of the matrices that are multiplied.
const SIDE: usize = 8192;
const REPEATS: usize = 5;

/// Measures both; takes about 20 ms and 1.5 GB for that time.
pub(crate) fn limits(gpu: &Gpu) -> Result<Limits, DeviceError> {
    let (from, out) = (gpu.alloc(BYTES)?, gpu.alloc(4)?);
    let args = Args::default().ptr(from.ptr).long(BYTES / 16).ptr(out.ptr);
    let (kernel, blocks) = (gpu.kernel("read_all")?, gpu.card.room.processors as u32 * 8);
    let read = fastest(gpu, || gpu.launch(kernel, (blocks, 1, 1), 256, 0, &args.0))?;
    let (a, b, c) = (gpu.alloc(SIDE * SIDE * 2)?, gpu.alloc(SIDE * SIDE * 2)?, gpu.alloc(SIDE * SIDE * 4)?);
    let gemm = Gemm {
        slot: 0,
        w: a.ptr,
        x: b.ptr,
        out: c.ptr,
        shape: (SIDE, SIDE, SIDE),
        stride: SIDE,
        factor: 1.0,
        half: false,
    };
    let multiply = fastest(gpu, || gpu.gemm(&gemm))?;
    Ok(Limits {
        bytes_per_second: BYTES as f64 / read,
        operations_per_second: 2.0 * (SIDE as f64).powi(3) / multiply,
    })
}

/// Seconds of the fastest of a few runs, the first left out.
fn fastest(gpu: &Gpu, mut run: impl FnMut() -> Result<(), DeviceError>) -> Result<f64, DeviceError> {
    let timed = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
    let event = || gpu.stream.context().new_event(timed).map_err(failed("create an event"));
    let (start, end) = (event()?, event()?);
    let mut best = f64::INFINITY;
    for i in 0..=REPEATS {
        start.record(&gpu.stream).map_err(failed("record an event"))?;
        run()?;
        end.record(&gpu.stream).map_err(failed("record an event"))?;
        gpu.synchronize()?;
        let seconds = f64::from(start.elapsed_ms(&end).map_err(failed("read an event"))?) / 1e3;
        if i > 0 {
            best = best.min(seconds);
        }
    }
    Ok(best)
}
