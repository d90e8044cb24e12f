//! Computes findings from samples. Pure: it touches no file, no process and no clock.
#![forbid(unsafe_code)]

mod census;
mod class;
mod entry;
mod findings;
mod history;
mod index;
mod layout;
mod runs;
mod tally;
mod zeros;

pub use census::{Census, Collected, Collector};
pub use entry::Entry;
pub use findings::{
    AlreadyShared, ByKinds, Change, Commonness, Cost, CostPart, Duplicates, Findings, FrameIdentity, GroupFindings,
    GuestFindings, HostFindings, IdlePages, KindFindings, MapCell, Opportunity, Partial, ReadThrough, RegionFindings,
    RunLengths, Share,
};
pub use history::{Round, Stretch};
pub use index::Interval;
pub use layout::Layout;
