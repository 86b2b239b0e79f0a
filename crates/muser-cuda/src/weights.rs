//! Weights on the card, in the layouts of kernels/dequant.cuh.

use crate::gpu::{Gpu, Memory};
use muser_core::{DeviceError, Kind, Model, ModelError, Slot, TensorView};
use muser_format::DType;
use std::collections::HashMap;

/// Layout of a weight on the card; the numbers are those of kernels/dequant.cuh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Layout {
    F32 = 0,
    F16 = 1,
    BF16 = 2,
    Q8_0 = 3,
    Q4_0 = 4,
    Q4K = 5,
    Q5K = 6,
    Q6K = 7,
}

impl Layout {
    /// The layout that a type is kept in; types without a kernel of their own are widened to f16.
    pub fn of(dtype: DType) -> Self {
        match dtype {
            DType::F32 => Layout::F32,
            DType::BF16 => Layout::BF16,
            DType::Q8_0 => Layout::Q8_0,
            DType::Q4_0 => Layout::Q4_0,
            DType::Q4K => Layout::Q4K,
            DType::Q5K => Layout::Q5K,
            DType::Q6K => Layout::Q6K,
            _ => Layout::F16,
        }
    }

    /// Bytes of a row.
    pub fn row_bytes(self, cols: usize) -> usize {
        let scales = |blocks: usize| (blocks * 2).next_multiple_of(16);
        match self {
            Layout::F32 => cols * 4,
            Layout::F16 | Layout::BF16 => cols * 2,
            Layout::Q8_0 => cols + scales(cols / 32),
            Layout::Q4_0 => cols / 2 + scales(cols / 32),
            Layout::Q4K => cols / 256 * 144,
            Layout::Q5K => cols / 256 * 176,
            Layout::Q6K => cols / 256 * 208 + scales(cols / 256),
        }
    }

    /// Weights in a 16-byte chunk of quants.
    pub fn chunk(self) -> usize {
        match self {
            Layout::F32 => 4,
            Layout::F16 | Layout::BF16 => 8,
            Layout::Q8_0 => 16,
            Layout::Q4_0 | Layout::Q4K | Layout::Q5K | Layout::Q6K => 32,
        }
    }

    /// Short name for kernels.
    pub fn name(self) -> &'static str {
        match self {
            Layout::F32 => "f32",
            Layout::F16 => "f16",
            Layout::BF16 => "bf16",
            Layout::Q8_0 => "q8_0",
            Layout::Q4_0 => "q4_0",
            Layout::Q4K => "q4_k",
            Layout::Q5K => "q5_k",
            Layout::Q6K => "q6_k",
        }
    }
}

/// A matrix on the card.
#[derive(Clone, Copy)]
pub(crate) struct Matrix {
    pub ptr: u64,
    pub layout: Layout,
    pub rows: usize,
    pub cols: usize,
    pub scale: f32,
}

/// All weights of a model.
pub(crate) struct Weights {
    pub matrices: HashMap<Slot, Matrix>,
    pub vectors: HashMap<Slot, u64>,
    pub bytes: u64,
    _memory: Vec<Memory>,
}

fn is_vector(slot: &Slot) -> bool {
    use Kind::*;
    matches!(
        slot.kind,
        OutputNorm | AttnNorm | AttnQNorm | AttnKNorm | PostAttnNorm | FfnNorm | PostFfnNorm | FcNorm
    )
}

/// Layouts of a model's matrices, each once.
pub(crate) fn layouts(model: &Model) -> Vec<Layout> {
    let matrices = model.slots.iter().filter(|(slot, _)| !is_vector(slot));
    let mut all: Vec<Layout> = matrices.map(|(_, (dtype, ..))| Layout::of(*dtype)).collect();
    all.sort_by_key(|layout| *layout as i32);
    all.dedup();
    all
}

/// Bytes that the weights will take on the card.
pub(crate) fn bytes(model: &Model) -> u64 {
    let each = |(slot, (dtype, rows, cols)): (&Slot, &(DType, usize, usize))| {
        let row = if is_vector(slot) { cols * 4 } else { Layout::of(*dtype).row_bytes(*cols) };
        (row * rows).next_multiple_of(256) as u64
    };
    model.slots.iter().map(each).sum()
}

impl Weights {
    /// Copies every weight of the model's plans; `progress` gets bytes done and in all.
    pub fn load(gpu: &Gpu, model: &Model, progress: &mut dyn FnMut(u64, u64)) -> Result<Self, DeviceError> {
        let total = bytes(model);
        let mut weights =
            Weights { matrices: HashMap::new(), vectors: HashMap::new(), bytes: total, _memory: vec![] };
        let mut slots: Vec<&Slot> = model.slots.keys().collect();
        slots.sort_by_key(|s| (s.net as u8, s.layer, s.kind as u8));
        let mut done = 0;
        for slot in slots {
            let t = model.tensor(*slot)?;
            if is_vector(slot) {
                let values = t.to_f32()?;
                let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
                let mut memory = gpu.alloc(bytes.len())?;
                gpu.upload(&mut memory, 0, &bytes)?;
                weights.vectors.insert(*slot, memory.ptr);
                weights._memory.push(memory);
                done += bytes.len() as u64;
            } else {
                let layout = Layout::of(t.dtype);
                let row = layout.row_bytes(t.cols);
                let mut memory = gpu.alloc(row * t.rows)?;
                upload(gpu, &t, layout, &mut memory, &mut |bytes| {
                    done += bytes;
                    progress(done.min(total), total);
                })?;
                let matrix = Matrix { ptr: memory.ptr, layout, rows: t.rows, cols: t.cols, scale: t.scale };
                weights.matrices.insert(*slot, matrix);
                weights._memory.push(memory);
            }
        }
        gpu.synchronize()?;
        Ok(weights)
    }
}

/// Bytes of a piece that is converted at once: bounds host memory.
const PIECE: usize = 64 << 20;

fn upload(
    gpu: &Gpu,
    t: &TensorView<'_>,
    layout: Layout,
    to: &mut Memory,
    step: &mut dyn FnMut(u64),
) -> Result<(), DeviceError> {
    let (from, row) = (t.row_bytes(), layout.row_bytes(t.cols));
    let rows = (PIECE / row.max(1)).max(1);
    for (i, part) in t.data.chunks(from * rows).enumerate() {
        let at = i * rows * row;
        if row == from
            && matches!(layout, Layout::F32 | Layout::F16 | Layout::BF16 | Layout::Q4K | Layout::Q5K)
        {
            gpu.upload(to, at, part)?;
        } else {
            let mut out = vec![0u8; part.len() / from * row];
            convert(t.dtype, layout, t.cols, from, part, &mut out)?;
            gpu.upload(to, at, &out)?;
        }
        step((part.len() / from * row) as u64);
    }
    Ok(())
}

/// Rows of file blocks to rows of the card's layout, on all processors.
fn convert(
    dtype: DType,
    layout: Layout,
    cols: usize,
    from: usize,
    rows: &[u8],
    out: &mut [u8],
) -> Result<(), DeviceError> {
    let to = layout.row_bytes(cols);
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let share = (rows.len() / from).div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        let parts = rows.chunks(from * share).zip(out.chunks_mut(to * share));
        let workers: Vec<_> = parts
            .map(|(rows, out)| {
                scope.spawn(move || {
                    let pairs = rows.chunks_exact(from).zip(out.chunks_exact_mut(to));
                    pairs.into_iter().try_for_each(|(row, out)| convert_row(dtype, layout, cols, row, out))
                })
            })
            .collect();
        for worker in workers {
            worker
                .join()
                .map_err(|_| DeviceError::Backend("a worker that converts weights stopped".into()))??;
        }
        Ok(())
    })
}

fn convert_row(
    dtype: DType,
    layout: Layout,
    cols: usize,
    row: &[u8],
    out: &mut [u8],
) -> Result<(), DeviceError> {
    // (start, length) of the quants in a block; the f16 scale; and where each goes.
    let planes = |out: &mut [u8], block: usize, parts: &[(usize, usize, usize)]| {
        for (b, from) in row.chunks_exact(block).enumerate() {
            for (start, len, base) in parts {
                out[base + b * len..][..*len].copy_from_slice(&from[*start..start + len]);
            }
        }
    };
    let blocks = cols / dtype.block_len();
    match layout {
        Layout::Q8_0 => planes(out, 34, &[(2, 32, 0), (0, 2, cols)]),
        Layout::Q4_0 => planes(out, 18, &[(2, 16, 0), (0, 2, cols / 2)]),
        Layout::Q6K => {
            let (qh, scales, d) = (blocks * 128, blocks * 192, blocks * 208);
            planes(out, 210, &[(0, 128, 0), (128, 64, qh), (192, 16, scales), (208, 2, d)]);
        }
        _ => {
            let mut values = vec![0f32; cols];
            muser_format::dequantize(dtype, row, &mut values).map_err(ModelError::from)?;
            for (to, v) in out.chunks_exact_mut(2).zip(values) {
                to.copy_from_slice(&half::f16::from_f32(v).to_le_bytes());
            }
        }
    }
    Ok(())
}
