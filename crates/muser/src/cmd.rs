//! One file a command.

pub mod bench;
pub mod chat;
pub mod docs;
pub mod doctor;
pub mod inspect;
pub mod kernels;
pub mod logits;
pub mod parse;
pub mod perplexity;
pub mod receipt;
pub mod run;
pub mod serve;
pub mod template;
pub mod tokenize;
pub mod trace;
pub mod verify;
