//! How a cloned guest gets an identity of its own: what the host tells a helper program inside the guest, and what the
//! helper answers.
//!
//! A clone begins as a copy of a saved guest (its template), with the same random pool, clock, names, keys and
//! addresses as all other clones of it (its siblings). The helper, `pagefold-identity`, is a program without
//! dependencies that waits for one line from the host, on a serial line or a virtio port:
//!
//! ```text
//!   host                                                       helper, inside the guest
//!     | pagefold-identity 1 nonce=UUID seed=.. machine-id=.. hostname=.. time=.. mac=.. [address=..]
//!     | ------------------------------------------------------------> |
//!     |                                                     repairs, one after the other: `repair`
//!     | <------------------------------------------------------------ |
//!     | @pagefold-identity 1 nonce=UUID machine-id=.. boot-id=.. hostname=.. time=.. random=.. [failed=..]
//! ```
//!
//! A guest that was paused gets `pagefold-clock 1 nonce=UUID time=..`, and only sets its clock.
//!
//! The same line may come twice: the repairs are made once, and the clock is set again. The host accepts an answer only
//! if it has the request's nonce, and if everything that the helper has read back is what was asked for
//! (`Request::check`). The helper belongs to the guest: it can lie about the guest, and harms nobody else by this.
#![forbid(unsafe_code)]

mod answer;
mod clock;
mod connections;
pub mod repair;
mod request;
mod words;

pub use answer::Answer;
pub use clock::Clock;
pub use request::{Address, Request};

/// Longest line of either side, in bytes.
pub const LINE_BYTES: usize = 1024;
/// Version of the protocol. A helper that does not know this version does not answer.
pub const VERSION: &str = "1";
/// First word of the host's line.
const ASKS: &str = "pagefold-identity";
/// First word of the host's line for a guest that was paused.
const ASKS_CLOCK: &str = "pagefold-clock";
/// First word of the helper's line.
const ANSWERS: &str = "@pagefold-identity";
