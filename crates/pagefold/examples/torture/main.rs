//! Programs that verify themselves while they are folded.
fn main() {}
