//! Templates and clones, with real guests: what each clone is, what is refused, and what is left by killed commands.

#[path = "../common/mod.rs"]
mod common;

mod debian;
mod failures;
mod hazards;
mod identity;
mod interrupted;
mod parked;
mod rig;
mod rollback;
mod saved;
mod soak;
