//! The HTTP server.

pub mod constrain;
pub mod metrics;
pub mod slots;
