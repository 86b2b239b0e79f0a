//! Weights on the card, in the tiles of kernels/layout.cuh.

use crate::few::launches;
use crate::gpu::{Gpu, Memory};
use crate::launch::Args;
use crate::panels::{Form, PANEL, Panels};
use crate::upload::Uploader;
use muser_core::{DeviceError, Kind, Lane, Model, ModelError, Op, Pass, Slot, TensorView};
use muser_format::DType;
use std::collections::HashMap;

/// Layout of a matrix on the card; the numbers are those of kernels/layout.cuh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Layout {
    F16 = 0,
    Q8 = 1,
    Q4 = 2,
    Q4K = 3,
    Q5K = 4,
    Q6K = 5,
    Iq4 = 6,
    Fp4 = 7,
}

/// Rows of a tile.
pub(crate) const TILE_ROWS: usize = 16;
/// Columns of a tile.
pub(crate) const TILE_COLS: usize = 256;

impl Layout {
    /// The layout that a type is kept in; types without one of their own become f16.
    pub fn of(dtype: DType) -> Self {
        match dtype {
            DType::Q8_0 => Layout::Q8,
            DType::Q4_0 => Layout::Q4,
            DType::Q4K => Layout::Q4K,
            DType::Q5K => Layout::Q5K,
            // Three bits and a scale of 16 values are six bits and such a scale.
            DType::Q6K | DType::Q3K => Layout::Q6K,
            DType::Iq4Nl | DType::Iq4Xs => Layout::Iq4,
            DType::Nvfp4 => Layout::Fp4,
            _ => Layout::F16,
        }
    }

    /// Bytes of a tile.
    pub fn tile_bytes(self) -> usize {
        match self {
            Layout::F16 => 8192,
            Layout::Q8 => 4352,
            Layout::Q4 | Layout::Q4K | Layout::Iq4 | Layout::Fp4 => 2304,
            Layout::Q5K => 2816,
            Layout::Q6K => 3360,
        }
    }

    /// Bytes of a matrix; edges are padded to whole tiles.
    pub fn bytes(self, rows: usize, cols: usize) -> usize {
        rows.div_ceil(TILE_ROWS) * cols.div_ceil(TILE_COLS) * self.tile_bytes()
    }

    /// Short name for kernels.
    pub fn name(self) -> &'static str {
        match self {
            Layout::F16 => "f16",
            Layout::Q8 => "q8_0",
            Layout::Q4 => "q4_0",
            Layout::Q4K => "q4_k",
            Layout::Q5K => "q5_k",
            Layout::Q6K => "q6_k",
            Layout::Iq4 => "iq4",
            Layout::Fp4 => "fp4",
        }
    }
}

/// What kernels/pack.cu reads: a number there, and the type that is uploaded. Rare types are dequantised on the host.
pub(crate) fn source(dtype: DType) -> (usize, DType) {
    match dtype {
        DType::F16 => (1, dtype),
        DType::BF16 => (2, dtype),
        DType::Q8_0 => (3, dtype),
        DType::Q4_0 => (4, dtype),
        DType::Q4K => (5, dtype),
        DType::Q5K => (6, dtype),
        DType::Q6K => (7, dtype),
        DType::Iq4Nl => (8, dtype),
        DType::Iq4Xs => (9, dtype),
        DType::Nvfp4 => (10, dtype),
        DType::Q3K => (11, dtype),
        _ => (0, DType::F32),
    }
}

/// A matrix on the card.
#[derive(Clone, Copy)]
pub(crate) struct Matrix {
    pub ptr: u64,
    pub layout: Layout,
    pub rows: usize,
    pub cols: usize,
    /// What products are multiplied with.
    pub scale: f32,
}

impl Matrix {
    /// Tiles from top to bottom.
    pub fn tiles(&self) -> usize {
        self.rows.div_ceil(TILE_ROWS)
    }

    /// The rows `first..` of a matrix, `rows` of them; both fall between tiles.
    pub fn part(&self, first: usize, rows: usize) -> Self {
        let at = first / TILE_ROWS * self.cols.div_ceil(TILE_COLS) * self.layout.tile_bytes();
        Matrix { ptr: self.ptr + at as u64, rows, ..*self }
    }
}

/// All weights of a model: tiles for the serving lane, panels for the strict one.
pub(crate) struct Weights {
    matrices: HashMap<Slot, Matrix>,
    panels: HashMap<Slot, Panels>,
    vectors: HashMap<Slot, u64>,
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

/// Types of a model's matrices, each once.
pub(crate) fn types(model: &Model) -> Vec<DType> {
    let matrices = model.slots.iter().filter(|(slot, _)| !is_vector(slot));
    let mut all: Vec<DType> = matrices.map(|(_, (dtype, ..))| *dtype).collect();
    all.sort_by_key(|dtype| dtype.name());
    all.dedup();
    all
}

/// Layouts that one launch multiplies: single ones, and pairs that a step of a plan has side by side.
pub(crate) fn products(model: &Model) -> Vec<Vec<Layout>> {
    let layout = |slot: &Slot| model.slots.get(slot).map(|(dtype, ..)| Layout::of(*dtype));
    let mut all: Vec<Vec<Layout>> = types(model).into_iter().map(|dtype| vec![Layout::of(dtype)]).collect();
    for plan in [Pass::Target, Pass::Draft, Pass::Inject].into_iter().filter_map(|pass| model.plans.get(pass))
    {
        for step in &plan.steps {
            let slots: Vec<Slot> = match &step.op {
                Op::Project { outs, .. } => outs.iter().map(|(slot, _)| *slot).collect(),
                Op::GateUp { gate, up } => vec![*gate, *up],
                _ => continue,
            };
            let layouts: Vec<Layout> = slots.iter().filter_map(layout).collect();
            all.extend(launches(&layouts));
        }
    }
    all.sort_by_key(|layouts| layouts.iter().map(|l| *l as i32).collect::<Vec<_>>());
    all.dedup();
    all
}

/// Bytes that the weights will take on the card, and those of the largest tensor on its way there.
pub(crate) fn bytes(model: &Model, lane: Lane) -> (u64, u64) {
    let kept = |(slot, (dtype, rows, cols)): (&Slot, &(DType, usize, usize))| {
        let bytes = match lane {
            _ if is_vector(slot) => cols * 4,
            Lane::Serving => Layout::of(*dtype).bytes(*rows, *cols),
            Lane::Strict => Form::of(*dtype).bytes(*rows, *cols),
        };
        bytes.next_multiple_of(256) as u64
    };
    (model.slots.iter().map(kept).sum(), staged(model) as u64)
}

/// Bytes of the largest matrix as it is uploaded.
fn staged(model: &Model) -> usize {
    let matrices = model.slots.iter().filter(|(slot, _)| !is_vector(slot));
    let raw = |(_, (dtype, rows, cols)): (&Slot, &(DType, usize, usize))| rows * raw_row(*dtype, *cols);
    matrices.map(raw).max().unwrap_or(0)
}

/// Bytes of a row as it is uploaded.
fn raw_row(dtype: DType, cols: usize) -> usize {
    let kept = source(dtype).1;
    cols / kept.block_len() * kept.block_bytes()
}

impl Weights {
    /// A matrix of the serving lane.
    pub fn matrix(&self, slot: Slot) -> Result<Matrix, DeviceError> {
        self.matrices.get(&slot).copied().ok_or_else(|| absent(slot))
    }

    /// A matrix of the strict lane.
    pub fn panels(&self, slot: Slot) -> Result<Panels, DeviceError> {
        self.panels.get(&slot).copied().ok_or_else(|| absent(slot))
    }

    /// The address of a vector.
    pub fn vector(&self, slot: Slot) -> Result<u64, DeviceError> {
        self.vectors.get(&slot).copied().ok_or_else(|| absent(slot))
    }

    /// Where every weight would stand: enough to list a pass's launches.
    pub fn described(model: &Model, lane: Lane) -> Self {
        let (mut matrices, mut panels, mut vectors) = (HashMap::new(), HashMap::new(), HashMap::new());
        let ptr = Memory::nowhere().ptr;
        for (slot, (dtype, rows, cols)) in &model.slots {
            let (slot, rows, cols, scale) = (*slot, *rows, *cols, 1.0);
            if is_vector(&slot) {
                vectors.insert(slot, ptr);
            } else if lane == Lane::Strict {
                panels.insert(slot, Panels { ptr, form: Form::of(*dtype), rows, cols, scale });
            } else {
                matrices.insert(slot, Matrix { ptr, layout: Layout::of(*dtype), rows, cols, scale });
            }
        }
        Weights { matrices, panels, vectors, bytes: bytes(model, lane).0, _memory: vec![] }
    }

    /// Copies every weight of the model's plans; `progress` gets bytes done and in all.
    pub fn load(
        gpu: &Gpu,
        model: &Model,
        lane: Lane,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, DeviceError> {
        let total = model.weight_bytes();
        let mut weights = Weights {
            matrices: HashMap::new(),
            panels: HashMap::new(),
            vectors: HashMap::new(),
            bytes: bytes(model, lane).0,
            _memory: vec![],
        };
        let mut slots: Vec<&Slot> = model.slots.keys().collect();
        slots.sort_by_key(|s| (s.net as u8, s.layer, s.kind as u8));
        let bounds = gpu.alloc(slots.len() * 4)?;
        let (raw, uploader) = (gpu.alloc(staged(model))?, Uploader::new(gpu)?);
        let mut stage = Stage { raw, bounds, packed: vec![], panels: vec![], uploader };
        let mut done = 0;
        for slot in slots {
            let t = model.tensor(*slot)?;
            if is_vector(slot) {
                let values = t.to_f32()?;
                if values.iter().any(|value| !value.is_finite()) {
                    return Err(damaged(*slot));
                }
                let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
                let mut memory = gpu.alloc(bytes.len())?;
                gpu.upload(&mut memory, 0, &bytes)?;
                weights.vectors.insert(*slot, memory.ptr);
                weights._memory.push(memory);
            } else {
                if t.cols % 32 != 0 {
                    return Err(DeviceError::Backend(format!(
                        "{slot} has {} columns, and CUDA kernels need a multiple of 32; use --device cpu",
                        t.cols
                    )));
                }
                let mut step = |bytes| progress(done + bytes, total);
                let memory = match lane {
                    Lane::Serving => stage.pack(gpu, *slot, &t, &mut step)?,
                    Lane::Strict => stage.panels(gpu, *slot, &t, &mut step)?,
                };
                weights._memory.push(memory);
            }
            done += t.data.len() as u64;
        }
        stage.finish(gpu, &mut weights)?;
        Ok(weights)
    }
}

fn absent(slot: Slot) -> DeviceError {
    DeviceError::Backend(format!("{slot} is not on the card; this is a defect of muser: use --device cpu"))
}

/// The serving lane's kernels would take such a value for the largest f16.
fn damaged(slot: Slot) -> DeviceError {
    DeviceError::Backend(format!(
        "{slot} holds a value that is no finite number: the model's file is damaged; fetch it again"
    ))
}

/// What tensors pass through on their way; nothing waits for the card before the last.
struct Stage {
    /// A tensor's rows on the card.
    raw: Memory,
    /// The bound of each matrix, from which the card takes its norm and, at the end, the host; of the strict lane's, whether a scale
    /// has a sign.
    bounds: Memory,
    packed: Vec<(Slot, Matrix)>,
    panels: Vec<(Slot, Panels)>,
    uploader: Uploader,
}

/// Bytes that are uploaded at once: what is dequantised on the host is bounded by it.
const PIECE: usize = 64 << 20;

/// The rows of a matrix as `source` says; rare types as f32.
fn upload(
    gpu: &Gpu,
    uploader: &mut Uploader,
    t: &TensorView<'_>,
    to: &mut Memory,
    step: &mut dyn FnMut(u64),
) -> Result<(), DeviceError> {
    let kept = source(t.dtype).1;
    let (from, row) = (t.row_bytes(), raw_row(t.dtype, t.cols));
    let rows = (PIECE / row.max(1)).max(1);
    for (i, part) in t.data.chunks(from * rows).enumerate() {
        let at = i * rows * row;
        if kept == t.dtype {
            uploader.upload(gpu, to, at, part)?;
        } else {
            uploader.upload(gpu, to, at, &dequantized(t.dtype, t.cols, from, part)?)?;
        }
        step((i * rows * from + part.len()) as u64);
    }
    Ok(())
}

impl Stage {
    /// One matrix from the file's blocks to panels.
    fn panels(
        &mut self,
        gpu: &Gpu,
        slot: Slot,
        t: &TensorView<'_>,
        step: &mut dyn FnMut(u64),
    ) -> Result<Memory, DeviceError> {
        upload(gpu, &mut self.uploader, t, &mut self.raw, step)?;
        let (form, rows, cols) = (Form::of(t.dtype), t.rows, t.cols);
        let memory = gpu.alloc(form.bytes(rows, cols))?;
        let args = Args::default().ptr(self.raw.ptr).long(raw_row(t.dtype, cols)).int(rows).int(cols);
        let args = args.ptr(memory.ptr).ptr(self.bounds.ptr + (self.panels.len() * 4) as u64);
        let threads = rows.next_multiple_of(PANEL) * cols.next_multiple_of(form.columns()) / 8;
        let kernel = gpu.kernel(&format!("strict_pack_{}", source(t.dtype).0))?;
        gpu.launch(kernel, (threads.div_ceil(256) as u32, 1, 1), 256, 0, &args.0)?;
        self.panels.push((slot, Panels { ptr: memory.ptr, form, rows, cols, scale: t.scale }));
        Ok(memory)
    }

    /// One matrix from the file's blocks to tiles.
    fn pack(
        &mut self,
        gpu: &Gpu,
        slot: Slot,
        t: &TensorView<'_>,
        step: &mut dyn FnMut(u64),
    ) -> Result<Memory, DeviceError> {
        let ((number, kept), layout) = (source(t.dtype), Layout::of(t.dtype));
        let to = raw_row(t.dtype, t.cols);
        upload(gpu, &mut self.uploader, t, &mut self.raw, step)?;
        // A power of two brings scales where f16 is precise; it is taken back from the products.
        let count = t.rows * t.cols / kept.block_len();
        let bound = self.bounds.ptr + (self.packed.len() * 4) as u64;
        let args = Args::default().ptr(self.raw.ptr).long(count).ptr(bound);
        gpu.launch(gpu.kernel(&format!("bound_{number}"))?, (1024, 1, 1), 256, 0, &args.0)?;
        let memory = gpu.alloc(layout.bytes(t.rows, t.cols))?;
        let threads = t.rows.div_ceil(TILE_ROWS) * t.cols.div_ceil(TILE_COLS) * 128;
        let args = Args::default().ptr(self.raw.ptr).long(to).int(t.rows).int(t.cols).ptr(bound);
        let args = args.int(most_exponent(layout)).ptr(memory.ptr);
        let grid = (threads.div_ceil(256) as u32, 1, 1);
        gpu.launch(gpu.kernel(&format!("pack_{number}"))?, grid, 256, 0, &args.0)?;
        let matrix = Matrix { ptr: memory.ptr, layout, rows: t.rows, cols: t.cols, scale: t.scale };
        self.packed.push((slot, matrix));
        Ok(memory)
    }

    /// Waits for all matrices; takes their norms back from their scales, and tells forms with signs from those without.
    fn finish(self, gpu: &Gpu, weights: &mut Weights) -> Result<(), DeviceError> {
        let mut bytes = vec![0u8; (self.packed.len() + self.panels.len()) * 4];
        gpu.download(&self.bounds, 0, &mut bytes)?;
        let bounds = || bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        if let Some(((slot, _), _)) = self.packed.iter().zip(bounds()).find(|(_, bound)| !bound.is_finite()) {
            return Err(damaged(*slot));
        }
        let matrix = |((slot, matrix), bound): ((Slot, Matrix), f32)| {
            let scale = matrix.scale / norm(bound, most_exponent(matrix.layout));
            (slot, Matrix { scale, ..matrix })
        };
        let panels = |((slot, panels), sign): ((Slot, Panels), f32)| {
            let form = if sign.to_bits() == 0 { panels.form } else { panels.form.signed() };
            (slot, Panels { form, ..panels })
        };
        weights.matrices = self.packed.into_iter().zip(bounds()).map(matrix).collect();
        weights.panels = self.panels.into_iter().zip(bounds()).map(panels).collect();
        Ok(())
    }
}

/// Power of two below which a layout's scales (f16: its values) are brought.
fn most_exponent(layout: Layout) -> usize {
    if layout == Layout::F16 { 14 } else { 5 }
}

/// The largest power of two that keeps `bound` times it at most 2^`exponent`.
fn norm(bound: f32, exponent: usize) -> f32 {
    if bound > 0.0 {
        (exponent as f64 - f64::from(bound).log2()).floor().clamp(-60.0, 60.0).exp2() as f32
    } else {
        1.0
    }
}

/// Rows of any type as little-endian f32, on all processors.
fn dequantized(dtype: DType, cols: usize, from: usize, rows: &[u8]) -> Result<Vec<u8>, DeviceError> {
    let mut out = vec![0u8; rows.len() / from * cols * 4];
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let share = (rows.len() / from).div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        let parts = rows.chunks(from * share).zip(out.chunks_mut(cols * 4 * share));
        let workers: Vec<_> = parts
            .map(|(rows, out)| scope.spawn(move || dequantize_rows(dtype, cols, from, rows, out)))
            .collect();
        for worker in workers {
            worker
                .join()
                .map_err(|_| DeviceError::Backend("a worker that converts weights stopped".into()))??;
        }
        Ok(())
    })
    .map(|()| out)
}

fn dequantize_rows(
    dtype: DType,
    cols: usize,
    from: usize,
    rows: &[u8],
    out: &mut [u8],
) -> Result<(), DeviceError> {
    let mut values = vec![0f32; cols];
    for (row, out) in rows.chunks_exact(from).zip(out.chunks_exact_mut(cols * 4)) {
        muser_format::dequantize(dtype, row, &mut values).map_err(ModelError::from)?;
        for (to, v) in out.chunks_exact_mut(4).zip(&values) {
            to.copy_from_slice(&v.to_le_bytes());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::norm;

    #[test]
    fn norms_are_powers_of_two_below_the_limit() {
        for bound in [1e-6f32, 0.004, 1.0, 31.9, 32.0, 33.0, 6e4] {
            let n = norm(bound, 5);
            assert_eq!(n.to_bits() & 0x7f_ffff, 0, "{n} is no power of two");
            assert!(bound * n <= 32.0 && bound * n > 16.0, "{bound} * {n}");
        }
        assert_eq!(norm(0.0, 5), 1.0);
    }
}
