//! One file a command.

pub mod inspect;
pub mod kernels;
pub mod template;
pub mod tokenize;
