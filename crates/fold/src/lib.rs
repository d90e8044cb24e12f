//! The group worker: pool, content index, planning, pacing.
#![forbid(unsafe_code)]

pub mod control;
