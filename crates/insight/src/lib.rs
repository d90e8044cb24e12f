//! The use of each frame of a Linux guest's memory, found from outside, from that memory alone. Nothing runs inside the
//! guest. The crate is pure: memory comes through [`GuestMemory`], and no file, process or clock is touched.
//!
//! The guest wrote everything that is read here, and may be hostile. Reads are therefore bounded in bytes, depth and
//! number of steps, and arithmetic on the guest's values wraps or is checked. A frame whose use cannot be found is
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

pub use btf::Btf;
pub use files::File;
pub use frames::{FileNumber, Frames, count};
pub use kernel::{FrameIndex, ImagePart, Kernel, NoKernel};
pub use memory::{GuestMemory, HEAD_BYTES, PhysRange, Saved};
