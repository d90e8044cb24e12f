//! Starts guests as copies (clones) of a saved guest (template), whose memory they map copy-on-write.
//!
//! ```text
//!   template create:  QEMU on a shared memory file, until the helper inside has answered and the guest is idle
//!                       -> stopped -> memory, device state and disk of that instant, with their digests, in one directory
//!   clone:            sealed memory file: the one that living clones map, or loaded from the directory, digest checked
//!                       -> N times: QEMU maps it private, reads the device state
//!                       -> identity sent, guest goes on -> answer from inside -> handed out
//!                                                       -> no answer, or a wrong one: ended, and an error
//! ```
//!
//! - All clones of a template map one memory file. It is sealed before the first of them maps it, so nobody can write
//!   it. After that, the template's `memory` file on disk is not read again for them. The kernel frees the memory file
//!   when its last clone has ended.
//! - A template belongs to a group, and other groups cannot clone it. Two groups that make templates of one image have
//!   no page frame in common.
//! - If a service serves the group, the memory file is a segment of the group's pool, and each clone is a member
//!   (`folding.rs`).
//! - Another program may start a clone's machine, by a script that `snippet.rs` writes. The clone is handed out in the
//!   same way (`clones/awaited.rs`).
//! - A clone is recorded (`record.rs`) before its QEMU is started. If the process that starts a clone is killed, the
//!   next command that lists clones ends that clone.
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
