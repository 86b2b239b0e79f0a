//! The model as data: geometry, the plan, the device trait, sessions, sampling, the f32 reference.

pub mod accept;
pub mod adapt;
pub mod compare;
pub mod cost;
pub mod device;
pub mod engine;
pub mod geometry;
pub mod lookup;
pub mod model;
pub mod oracle;
pub mod plan;
pub mod receipt;
pub mod rotary;
pub mod sample;
pub mod session;
pub mod split;
pub mod stop;
pub mod strict;

pub use adapt::{Block, Source};
pub use device::{Device, DeviceError, DeviceInfo, Lane, Largest, Limits, Observer, Route, Row, SeqId};
pub use engine::{Active, DraftMode, Engine, EngineError, StepStats};
pub use geometry::{CacheSpec, DraftSpec, Geometry, KvType, LayerKind, RopePairs};
pub use model::{Model, ModelError, TensorView};
pub use oracle::Reference;
pub use plan::{Buf, Kind, Mask, Net, Op, Pass, Plan, Plans, Slot, Step};
pub use session::{Constraint, Flow, Session};
pub use split::Split;
