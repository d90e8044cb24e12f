//! What a Linux guest uses each frame of its memory for, read from that memory alone, from outside and with nothing of ours
//! inside. Pure: memory comes through [`GuestMemory`], and no file, process or clock is touched here.
//!
//! Everything that is read was written by the guest, who may be hostile. So what is read is bounded in bytes, depth and
//! number of steps, arithmetic on it wraps or is checked, and what cannot be told is
//! [`GuestPageKind::Unknown`](page::GuestPageKind::Unknown).
#![forbid(unsafe_code)]

mod btf;
mod files;
mod frames;
mod kernel;
mod layout;
mod memory;
mod note;
mod paging;
mod tasks;

pub use files::File;
pub use frames::{FileNumber, Frames, count};
pub use kernel::{FrameIndex, ImagePart, Kernel, NoKernel};
pub use memory::{GuestMemory, HEAD_BYTES, PhysRange, Saved};
