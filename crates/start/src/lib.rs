//! Starting guests from pages that are there already.
//!
//! ```text
//!   template create:  QEMU on a shared memory file, until the helper inside has answered and the guest is idle
//!                       -> stopped -> memory, device state and disk of that instant, with their digests, in one directory
//!   clone:            memory file, sealed: a living clone's, or loaded from the directory, digest checked
//!                       -> N times: QEMU maps it private, reads the device state
//!                       -> identity sent, guest goes on -> answer from inside -> handed out
//!                                                       -> no answer, or a wrong one: ended, and an error
//! ```
//!
//! - All clones of a template map one memory file. It is sealed before the first of them maps it, so nobody can write it. The
//!   files on the disk are not looked at again. It goes with the last clone.
//! - A template belongs to a group, and other groups cannot clone it. Two groups that make templates of one image have no page
//!   frame in common.
//! - Where a service serves the group, the memory file is a segment of its pool, and each clone is a member (`folding.rs`).
//! - Another program may start a clone's machine, by a script that `snippet.rs` writes. The clone is handed out in the
//!   same way (`clones/awaited.rs`).
//! - A clone is in a record before its QEMU is started (`record.rs`). The next command that looks at clones ends those whose
//!   starter was killed.
#![forbid(unsafe_code)]

mod ask;
mod clones;
mod create;
mod digest;
mod folding;
mod identities;
mod machine;
pub mod measure;
mod memory;
mod names;
mod place;
mod record;
mod running;
mod saving;
mod snippet;
mod store;
mod template;
mod vmm;

pub use clones::{Cloned, Clones, Wanted};
pub use create::Source;
pub use folding::Folding;
pub use machine::{DIR, DISK, NAME};
pub use place::{clones_dir, templates_dir};
pub use record::{Record, State};
pub use running::Running;
pub use snippet::Starter;
pub use store::Store;
pub use template::Template;
