//! A clone is not its sibling: what the host tells the helper inside a guest, and what the helper answers.
//!
//! A clone begins as a copy: same random pool, same clock, same names, keys and addresses. The helper, `pagefold-identity`,
//! is a program without dependencies that waits for one line from the host, on a serial line or a virtio port:
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
//! A guest that stood still gets `pagefold-clock 1 nonce=UUID time=..`, and sets its clock alone.
//!
//! The same line may come twice: the repairs are made once, and the clock is set again. The host believes an answer only if it bears the nonce, and all
//! that the helper reads back is what was asked (`Request::check`). The helper is the guest's: it can lie about itself, and
//! harms nobody else by that.
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
/// Version of the protocol. A helper that does not know it is silent.
pub const VERSION: &str = "1";
/// First word of the host's line.
const ASKS: &str = "pagefold-identity";
/// First word of the host's line for a guest that stood still.
const ASKS_CLOCK: &str = "pagefold-clock";
/// First word of the helper's line.
const ANSWERS: &str = "@pagefold-identity";
