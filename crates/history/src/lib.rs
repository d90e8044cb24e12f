//! `pagefold-history`: figures of groups and members over time, in a file. `pagefold history` becomes this program.
//!
//! ```text
//!   pagefold serve, [history] --starts--> pagefold-history record --Groups, Show--> the service, every 10 s
//!                                              |
//!                                       figures of one moment (fields, sample)
//!                                              |  committed at once                        | when 16 minutes are over
//!                                            tick: a row of all figures               block: a row for each group or member
//!                                              |                                            | when their day is old enough
//!   curl --HTTP--> pagefold-web --history.sock--> serve, read <------- store <------- roll: blocks with longer steps
//!   pagefold history ---------------------------> show, read
//! ```
//!
//! It is a program of its own, because SQLite is C code that parses a file. Root's program is not linked with it, and
//! the web side has no right to any file. The process that records figures runs as a user of its own, without
//! capabilities. It may ask the service for groups and their figures, and for nothing else. Folding never waits for it.
//!
//! | trouble | consequence |
//! |---|---|
//! | the process is killed | what was committed is there: at most the last 10 s are lost |
//! | the service, or a group's worker, does not answer | a gap |
//! | the file cannot be written, as on a full disk | figures stay in memory for the window of 16 minutes and the one before; older ones are lost, and a note in the file says which |
//! | the file is damaged | it gets another name, all blocks that can be read are taken over, and a note says what is lost |
//! | the clock jumps ahead | nothing is dropped as too old before it has gone on for 16 minutes |
//! | the clock is set back | both recordings of the same time are kept, the later one is shown, and a note says so |
//! | the file reaches its bound | the oldest blocks of the group that has most are dropped, and a note says so |
#![forbid(unsafe_code)]

pub mod block;
pub mod fields;
pub mod read;
pub mod record;
mod roll;
mod salvage;
pub mod sample;
pub mod serve;
pub mod show;
pub mod store;
pub mod window;
