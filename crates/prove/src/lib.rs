//! The prover tells a member whether anybody else holds pages of its own. It is one process a service, with the right
//! to see reference counts.
//!
//! A page that was folded and then written lies, private again, inside a private mapping of the pool's file. The kernel
//! does not move it out of there. To fold it again, the agent has to keep writers out in another way, in two steps:
//!
//! 1. It protects the page against writes through page tables.
//! 2. It has the prover show that nobody is left who can write the page without a page table.
//!
//! Such a writer may be a device in the middle of a read (`FOLL_PIN`). It may also be a system call or a driver with a
//! plain reference (`get_user_pages`), a buffer registered with io_uring, or a pipe. All of them hold a reference of
//! the frame. The kernel's own merger goes by the number of references, and so does the prover:
//!
//! ```text
//!   member's agent                                    prover                                       kernel
//!     | protects pages (userfaultfd, synchronous)        |                                           |
//!     | ranges ----------------------------------------> |                                           |
//!     |                                                  | page table: frame, private, ours alone -> |
//!     |                                                  | reference count and mappings of frame --> |
//!     |                                                  | page table again: the same entry -------> |
//!     | <------------------------- free, or it is not    |                                           |
//!     | compares, replaces or lifts the protection       |
//! ```
//!
//! # What "free" proves
//!
//! The prover calls a page *free* under two conditions:
//!
//! - Its entry in the asker's page table was the same before and after the count was read. By that entry the page was
//!   present, private, mapped nowhere else, and protected by a userfaultfd.
//! - Its frame was a small page with one reference and one mapping.
//!
//! The proof holds **if the asker's protection is synchronous, stood before it asked, and stands until it has replaced
//! the page**. Then nobody can write the page until it is replaced:
//!
//! - *Through page tables.* The page tables of every processor, of KVM, and of devices that share them showed the
//!   protection before the asker's call returned. A write since then faults, and waits for the asker.
//! - *Through an old reference.* One that was taken before the protection and is still held is part of the count. A
//!   holder that takes one without a lock checks the page table again after it has counted itself. It lets go if the
//!   entry has changed. So either the holder sees the protection, or the prover sees the reference.
//! - *Through a new reference.* One that may write needs a writable entry of a page table, and thus a write fault.
//! - *Through another frame.* While somebody holds a reference, the kernel does not move the page to another frame. So
//!   the prover read the count of the very frame that the holder refers to, whatever happened between the two looks at
//!   the page table. A holder that let go between them can write no more.
//!
//! Two things are *not* proven:
//!
//! - That nobody will *read* the frame. A reference for reading can be taken after the count was read. It goes on to
//!   see the bytes as they were, which are those of the slot.
//! - That the protection is synchronous. One that only notes writes looks the same from here.
//!
//! *Referenced* may be untrue a moment later, and is often untrue already when the prover says it. The kernel holds
//! references of its own for a moment. It also keeps fresh pages on a list of each processor until the list is full. A
//! place on a list counts as a reference. Where pages have one reference too many, the prover has these lists emptied,
//! at most ten times a second, and looks again (`drain.rs`).
//!
//! # Slots
//!
//! A group's worker asks the same of slots of its pool that no process maps any more, before it fills them again. The
//! danger there is not a writer but a *reader* that has the frame without a mapping: a device, a socket, a pipe. The
//! prover calls such a page free under two conditions. Its entry in the worker's page table was the same before and
//! after. Its frame is a small page of a memory file, with one reference for each mapping and one for the file. The
//! story and the duties
//! of the worker are told in `crates/fold/src/proof.rs`.
//!
//! # Who may ask, and about what
//!
//! Any process that may connect to the service's socket for agents may ask, but only about itself. The prover opens its
//! page table once, by the pidfd that the kernel keeps with the connection. Addresses are looked up there and nowhere
//! else, so that nobody can name a page of another process. After an `exec` of a program with more rights, the holder
//! of the connection learns nothing about that program either: see [`host::PeerPages`]. The answer has three values a
//! page.
//!
//! Each connection has a thread of its own. The reason is that the prover has to wait for a lock of the asker's address
//! space, which a hostile asker can hold for long. The threads share only the BPF program, for the microseconds of one
//! run.
//!
//! | the asker | the prover |
//! |---|---|
//! | asks much | makes it wait, so that it takes half a processor at most |
//! | sends anything but a question | hangs up |
//! | does not read its answers | hangs up |
//! | opens too many connections | refuses further ones |

mod connection;
mod drain;
mod keep;
mod lend;
mod places;
mod reference_counts;
mod serve;

pub use reference_counts::{Held, ReferenceCounts};
pub use serve::{Serving, serve, succeed};
