//! Plans how memory that folding saves is given to guests, and taken back when it is needed.
//!
//! ```text
//!   facts --> policy --> plan --> actuators
//!   |         |          |
//!   |         |          frees first, grows when these have landed; refusals with their reason
//!   |         sizes that the policy wants, each with its reason
//!   host, groups and guests, with everything a guest claims within its bounds
//! ```
//!
//! All of this is pure: facts in, plan out. A guest's *size* is its RAM less its balloon. Up to its guarantee, the size
//! is its own. The rest is a *loan*, which can be withdrawn.
//!
//! Two sums decide, and they differ in one term only:
//!
//! ```text
//!   untouched = size - resident                     what the guest may still take
//!   spare     = available - floor - untouched       what can be lent        ([`Budget`])
//!   cover     = available - floor + withdrawable    against untouched + folded: every folded page breaks  ([`Reserve`])
//! ```
//!
//! In the first sum, folded pages take no memory: so what folding saves can be lent. In the second sum each folded page
//! takes a frame again, as when all are written at once; loans that can be withdrawn within 10 s count against that. A
//! plan keeps both sums at zero or above.
//!
//! When a balloon takes a page whose frame others share, no frame is freed. So [`price`] values a balloon by the frames
//! that it frees.
#![forbid(unsafe_code)]
// Figures from other processes are added up here, so no sum may overflow.
#![cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]

mod admit;
pub mod baseline;
mod driver;
mod facts;
pub mod ksm;
mod ladder;
mod pace;
mod params;
mod pause;
mod plan;
pub mod policy;
pub mod price;
mod proposal;
mod remind;
mod reserve;
mod share_out;
mod standing;
mod still;

pub use admit::{Admission, Assurance, Costs, Wanted, admit};
pub use driver::{Driver, DriverState, Sighting, has_arrived};
pub use facts::{Claims, Facts, GroupFacts, GuestFacts, HostFacts, Reservation};
pub use ladder::{Ladder, Rung, RungEvent, relief_bytes};
pub use pace::{Pace, PaceChange, Paces};
pub use params::Params;
pub use pause::{Pause, pauses, resumable};
pub use plan::{History, Plan, Refusal, Step, make_room, plan};
pub use policy::{Policy, Wish};
pub use proposal::{Proposal, Proposals};
pub use remind::reminder;
pub use reserve::{Budget, Reserve};
pub use standing::{Held, Seen, Standing};
pub use still::Stillness;

#[cfg(test)]
mod admit_tests;
#[cfg(test)]
mod extreme_tests;
#[cfg(test)]
mod plan_tests;
#[cfg(test)]
mod test_world;
