//! The strict lane: `muser_core::strict`, vectorised, bit for bit. A lane here is one of the contract's 32.

mod attend;
mod codec;
mod dot;
mod project;

pub use attend::attend;
pub use project::{Job, project};
