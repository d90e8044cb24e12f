//! Samples in, findings out. Pure: no file, no process and no clock is touched here.
#![forbid(unsafe_code)]

mod findings;

pub use findings::{
    AlreadyShared, ByKinds, Change, Duplicates, Findings, FrameIdentity, GroupFindings, GuestFindings, HostFindings,
    MapCell, Opportunity, Partial, RegionFindings, RunLengths, Share,
};
