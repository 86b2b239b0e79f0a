//! The kernels: each computes one operation of the plan, for any instruction set.

pub mod attend;
pub mod matmul;
pub mod rows;
