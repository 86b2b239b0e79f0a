//! One file a command.

pub mod inspect;
pub mod kernels;
pub mod logits;
pub mod template;
pub mod tokenize;
pub mod trace;
