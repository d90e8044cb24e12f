//! The prover tells a member whether anybody else has references to page frames of its memory. Each service has one
//! prover process, which has the right to see reference counts.
//!
//! A page that was folded and then written lies, private again, inside a private mapping of the pool's file. The kernel
//! does not move it out of there. To fold it again, the agent has to keep writers out in another way, in two steps:
//!
//! 1. It protects the page against writes through page tables.
//! 2. It has the prover show that nobody is left who can write the page without a page table.
//!
//! Such a writer may be a device in the middle of a read (`FOLL_PIN`). It may also be a system call or a driver with a
//! plain reference (`get_user_pages`), a buffer registered with io_uring, or a pipe. All of them have a reference to
//! the page frame. KSM decides by the number of references, and so does the prover:
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
//! The proof holds **if the asker's write protection is synchronous (a write fault waits for the asker), was there
//! before it asked, and remains until the asker has replaced the page**. Then nobody can write the page until it is
//! replaced:
//!
//! - *Through page tables.* The page tables of every processor, of KVM, and of devices that share them showed the
//!   protection before the asker's call returned. A write since then faults, and waits for the asker.
//! - *Through an old reference.* A reference that was taken before the protection and is still there is part of the
//!   count. Kernel code that takes a reference without a lock (GUP-fast) checks the page-table entry again after it has
//!   raised the count, and drops the reference if the entry has changed. So either this code sees the protection, or
//!   the prover sees the reference.
//! - *Through a new reference.* A reference for writing is taken through a writable page-table entry only, and so after
//!   a write fault.
//! - *Through another frame.* While there is a further reference, the kernel does not move the page to another frame.
//!   So the prover has read the count of the very frame that the reference is to, even if the page-table entry changed
//!   between its two readings. A reference that was dropped between them can no longer be used to write.
//!
//! Two things are *not* proven:
//!
//! - That nobody will *read* the frame. A reference for reading can be taken after the count was read. Its holder goes
//!   on to see the old bytes, which are the same as the slot's.
//! - That the protection is synchronous. A protection under which the kernel only notes writes looks the same to the
//!   prover.
//!
//! *Referenced* may be untrue a moment later, and often is by the time the prover says it. The kernel takes references
//! of its own for a moment. It also keeps new pages on a list of each processor until the list is full (a folio batch),
//! and each page on a list has one more reference. Where pages have one reference too many, the prover has these lists
//! emptied, at most ten times a second, and counts again (`drain.rs`).
//!
//! # Slots
//!
//! A group's worker asks the same of slots of its pool that no process maps any more, before it fills them again. The
//! danger there is not a writer but a *reader* that has a reference to the frame and no mapping: a device, a socket, a
//! pipe. The prover calls such a page free under two conditions. Its entry in the worker's page table was the same
//! before and after. Its frame is a small page of a memory file, with one reference for each mapping and one for the
//! file. `crates/fold/src/proof.rs` says what the worker has to do for this proof.
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
