//! muser: the command line.
fn main() {}
