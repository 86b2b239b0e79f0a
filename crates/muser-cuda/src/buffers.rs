//! Memory for activations, sized once by the largest pass.

use crate::attention::PART_BYTES;
use crate::chain::{COUNTERS, MOST_CHAINED};
use crate::gpu::{Gpu, Memory};
use crate::launch::{Activation, GROUP_ROW};
use crate::many::SLOTS;
use crate::product::{HEAD_PLANES, MOST_PLANES, SUM_PLANES};
use crate::program::SMALL;
use crate::stream::{MOST_WIDE, WIDEST, arranged_bytes};
use crate::weights::TILE_COLS;
use muser_core::rotary::Rotary;
use muser_core::{Buf, DeviceError, Lane, Model, Pass};

/// Bytes of a row's description on the card (struct Row of kernels/common.cuh).
pub(crate) const ROW_BYTES: usize = 32;

/// Launches whose blocks are numbered, until numbers are used again.
pub(crate) const TICKETS: usize = 1024;

/// An activation as f32 and f16, and as a group of rows leaves it.
pub(crate) struct Act {
    f: Memory,
    h: Memory,
    t: Memory,
}

impl Act {
    /// `floats` rows as f32, `rows` as f16.
    fn new(gpu: Option<&Gpu>, floats: usize, rows: usize, width: usize) -> Result<Self, DeviceError> {
        let tiles = SMALL * width.div_ceil(TILE_COLS) * GROUP_ROW;
        Ok(Act {
            f: alloc(gpu, floats * width * 4)?,
            h: alloc(gpu, rows * width * 2)?,
            t: alloc(gpu, tiles * 2)?,
        })
    }

    pub fn addresses(&self) -> Activation {
        Activation { f: self.f.ptr, h: self.h.ptr, t: self.t.ptr, wide: false }
    }

    pub fn memory(&self) -> &Memory {
        &self.f
    }
}

/// All buffers.
pub(crate) struct Buffers {
    pub rows: Memory,
    pub x: Memory,
    /// The residual of one or two rows within a layer, and the counters of launches whose blocks wait for each other (kernels/chain.cu); none where
    /// there are no such launches.
    pub between: Memory,
    pub counters: Option<Memory>,
    pub h: Act,
    /// Queries and keys after norm and rotation.
    pub q: Memory,
    pub q16: Memory,
    pub k: Memory,
    pub a: Act,
    pub f: Act,
    /// What products leave, as planes.
    pub raw: Raw,
    /// What products on many rows leave side by side, as f16.
    pub joined: Memory,
    pub features: Memory,
    pub picked: Act,
    pub logits: Memory,
    pub logit_rows: usize,
    /// What blocks found of rows whose keys are split.
    pub partial: Memory,
    /// Planes of the head's logits.
    pub head: Memory,
    /// By which blocks of products are numbered as they start, a word for each launch; zero between launches.
    pub tickets: Memory,
    /// Planes of products of many rows from the tiles, and activations as warpgroups read them; of F for all launches.
    pub planes: Memory,
    pub arranged: Memory,
    pub arranged_f: Memory,
    /// Slots of widened matrices; the strict lane keeps rows' attention weights there.
    pub scratch: Memory,
    pub scratch_bytes: usize,
    angles: Memory,
    /// None where the drafter turns as the target does.
    draft_angles: Option<Memory>,
}

/// Results of products, each with room for its planes.
pub(crate) struct Raw {
    pub q: Memory,
    pub k: Memory,
    pub v: Memory,
    pub g: Memory,
    pub p: Memory,
    pub gate: Memory,
    pub up: Memory,
}

/// Bytes of the planes that kernels/stream.cu and kernels/stream_wide.cu leave.
pub(crate) const PLANES_BYTES: usize = 48 << 20;

fn alloc(gpu: Option<&Gpu>, bytes: usize) -> Result<Memory, DeviceError> {
    gpu.map_or_else(|| Ok(Memory::nowhere()), |gpu| gpu.alloc(bytes))
}

/// Cosine and sine of each position and pair, on all processors: a long context has millions.
fn angles(rotary: &Rotary, pairs: usize, context: usize) -> Vec<u8> {
    let mut bytes = vec![0u8; context * pairs * 8];
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let share = context.div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        for (thread, part) in bytes.chunks_mut(share * pairs * 8).enumerate() {
            scope.spawn(move || {
                for (at, pair) in part.chunks_exact_mut(8).enumerate() {
                    let (c, s) = rotary.at((thread * share + at / pairs) as u32, at % pairs);
                    pair[..4].copy_from_slice(&c.to_le_bytes());
                    pair[4..].copy_from_slice(&s.to_le_bytes());
                }
            });
        }
    });
    bytes
}

/// Width of a buffer in any pass over tokens.
fn widest(model: &Model, buf: Buf) -> usize {
    [Pass::Target, Pass::Draft].iter().map(|p| model.plans.width(*p, buf)).max().unwrap_or(0)
}

/// Width of the results of one step that stand side by side.
fn joined(model: &Model) -> usize {
    let qkvg = [Buf::Q, Buf::K, Buf::V, Buf::G].map(|buf| widest(model, buf)).iter().sum();
    (2 * widest(model, Buf::F)).max(qkvg)
}

/// Columns of the widest matrix.
fn most_cols(model: &Model) -> usize {
    model.slots.values().map(|(_, _, cols)| *cols).max().unwrap_or(0)
}

fn arranged_bytes_of_f(model: &Model) -> usize {
    MOST_WIDE / WIDEST * arranged_bytes(widest(model, Buf::F))
}

/// Slots that hold a layer's largest matrix, or what attention of a row keeps.
fn scratch_bytes(model: &Model, lane: Lane) -> usize {
    if lane == Lane::Strict {
        let g = model.geometry();
        return g.heads * crate::strict::scratch(crate::strict::span(g.context), g.head_dim) * 4;
    }
    let layer = |(slot, (_, rows, cols)): (&muser_core::Slot, &(_, usize, usize))| {
        let outside = matches!(slot.kind, muser_core::Kind::TokenEmbd | muser_core::Kind::Output);
        if outside { 0 } else { rows * cols * 2 }
    };
    SLOTS * model.slots.iter().map(layer).max().unwrap_or(0)
}

impl Buffers {
    /// Without a card it only tells where things would stand. `parts` is how many rows with split keys leave.
    pub fn new(
        gpu: Option<&Gpu>,
        model: &Model,
        lane: Lane,
        rows: usize,
        parts: usize,
    ) -> Result<Self, DeviceError> {
        let alloc = |bytes| alloc(gpu, bytes);
        let plans = &model.plans;
        let width = |buf| widest(model, buf);
        // Rows as f32: the serving lane's passes of many rows have f16 instead.
        let floats = if lane == Lane::Serving { rows.min(SMALL) } else { rows };
        let f32s = |buf| alloc(floats * width(buf) * 4);
        // A few rows leave several planes.
        let raw = |buf| alloc(floats.max(MOST_PLANES * SMALL) * width(buf) * 4);
        let act = |buf| Act::new(gpu, floats, rows, width(buf));
        let features = plans.width(Pass::Inject, Buf::Features);
        let scratch_bytes = scratch_bytes(model, lane);
        let angles = |pass: Pass| {
            let Some((plan, gpu)) = plans.get(pass).zip(gpu) else { return alloc(16) };
            let bytes = angles(&plan.rotary, plan.geometry.head_dim / 2, model.geometry().context);
            let mut memory = gpu.alloc(bytes.len())?;
            gpu.upload(&mut memory, 0, &bytes)?;
            gpu.synchronize()?;
            Ok(memory)
        };
        let turns = |pass| plans.get(pass).map(|p| &p.rotary);
        let shared = turns(Pass::Draft).is_none_or(|draft| Some(draft) == turns(Pass::Target));
        Ok(Buffers {
            rows: alloc(rows * ROW_BYTES)?,
            x: alloc(rows * width(Buf::X) * 4)?,
            between: alloc(MOST_CHAINED * width(Buf::X) * 4)?,
            counters: Some(alloc(model.geometry().layers.len() * COUNTERS * 4)?),
            h: act(Buf::H)?,
            q: f32s(Buf::Q)?,
            q16: alloc(rows * width(Buf::Q) * 2)?,
            k: alloc(rows * width(Buf::K) * 4)?,
            a: act(Buf::A)?,
            f: act(Buf::F)?,
            raw: Raw {
                q: raw(Buf::Q)?,
                k: raw(Buf::K)?,
                v: raw(Buf::V)?,
                g: raw(Buf::G)?,
                p: alloc(rows.max(SUM_PLANES * SMALL) * width(Buf::P) * 4)?,
                gate: raw(Buf::F)?,
                up: raw(Buf::F)?,
            },
            joined: alloc(if lane == Lane::Serving { rows * joined(model) * 2 } else { 0 })?,
            features: alloc(2 * rows * features * 4)?,
            picked: Act::new(gpu, floats, rows, features.max(width(Buf::H)))?,
            logits: alloc(SMALL * width(Buf::Logits) * 4)?,
            logit_rows: SMALL,
            partial: alloc(parts * PART_BYTES)?,
            head: alloc(HEAD_PLANES * SMALL * width(Buf::Logits) * 4)?,
            tickets: alloc(TICKETS * 4)?,
            planes: alloc(if lane == Lane::Serving { PLANES_BYTES } else { 0 })?,
            arranged: alloc(if lane == Lane::Serving { arranged_bytes(most_cols(model)) } else { 0 })?,
            arranged_f: alloc(if lane == Lane::Serving { arranged_bytes_of_f(model) } else { 0 })?,
            scratch: alloc(scratch_bytes)?,
            scratch_bytes,
            angles: angles(Pass::Target)?,
            draft_angles: if shared { None } else { Some(angles(Pass::Draft)?) },
        })
    }

    /// Bytes that [`Buffers::new`] takes, within a few per cent.
    pub fn bytes(model: &Model, lane: Lane, rows: usize) -> u64 {
        let width = |buf| widest(model, buf);
        let floats = if lane == Lane::Serving { rows.min(SMALL) } else { rows };
        let features = model.plans.width(Pass::Inject, Buf::Features);
        let acts = [Buf::H, Buf::A, Buf::F].map(width).iter().sum::<usize>() + features.max(width(Buf::H));
        let products = [Buf::Q, Buf::K, Buf::V, Buf::G, Buf::F, Buf::F].map(width).iter().sum::<usize>();
        let joined = if lane == Lane::Serving { joined(model) } else { 0 };
        (rows * ((width(Buf::X) + width(Buf::P) + width(Buf::K)) * 4 + (acts + width(Buf::Q) + joined) * 2)
            + rows * features * 8
            + floats * (acts + width(Buf::Q)) * 4
            + floats.max(MOST_PLANES * SMALL) * products * 4
            + scratch_bytes(model, lane)
            + SMALL * width(Buf::Logits) * 4 * (HEAD_PLANES + 1)
            + 2 * model.geometry().context * model.geometry().head_dim * 4
            + if lane == Lane::Serving {
                PLANES_BYTES + arranged_bytes(most_cols(model)) + arranged_bytes_of_f(model)
            } else {
                0
            }
            + (1 << 28)) as u64
    }

    /// Makes room for the logits of `rows` rows; true if the buffer moved.
    pub fn fit_logits(&mut self, gpu: &Gpu, rows: usize, vocab: usize) -> Result<bool, DeviceError> {
        if rows <= self.logit_rows {
            return Ok(false);
        }
        self.logits = gpu.alloc(rows * vocab * 4)?;
        self.logit_rows = rows;
        Ok(true)
    }

    /// Cosines and sines by position.
    pub fn angles(&self, pass: Pass) -> u64 {
        let draft = self.draft_angles.as_ref().filter(|_| pass != Pass::Target);
        draft.unwrap_or(&self.angles).ptr
    }

    /// Where a product's result goes.
    pub fn raw(&self, buf: Buf) -> &Memory {
        match buf {
            Buf::Q => &self.raw.q,
            Buf::K => &self.raw.k,
            Buf::V => &self.raw.v,
            Buf::G => &self.raw.g,
            _ => &self.raw.p,
        }
    }

    /// Where rows of another device's part of the model go.
    pub fn handed(&mut self, buf: Buf) -> Result<&mut Memory, DeviceError> {
        match buf {
            Buf::X => Ok(&mut self.x),
            Buf::P => Ok(&mut self.raw.p),
            Buf::Features => Ok(&mut self.features),
            _ => Err(DeviceError::Backend(format!("{buf:?} is nothing that a device hands over"))),
        }
    }

    /// The f32 rows of a buffer.
    pub fn memory(&self, buf: Buf) -> &Memory {
        match buf {
            Buf::X => &self.x,
            Buf::H => self.h.memory(),
            Buf::Q => &self.q,
            Buf::K => &self.k,
            Buf::V => &self.raw.v,
            Buf::G => &self.raw.g,
            Buf::A => self.a.memory(),
            Buf::P => &self.raw.p,
            Buf::F => self.f.memory(),
            Buf::Features => &self.features,
            Buf::Logits => &self.logits,
        }
    }
}
