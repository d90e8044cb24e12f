//! The service: a supervisor that decides which process is a member of which group, and one worker for each group,
//! which folds its members' pages.
//!
//! Words: to *fold* identical pages is to replace them by one shared page. A *member* is a process that is enrolled for
//! that; its *agent* is code of Pagefold that runs inside it. A *group* is a set of members that trust each other. A
//! group's *pool* is memory files (*segments*) of shared pages (*slots*), which members map copy-on-write. The *prover*
//! is a process of root's that tells from the kernel's reference counts whether anybody else holds a page.
//!
//! ```text
//!   pagefold run ... --Join--> supervisor                    knows it by pidfd, start time, uid, control group
//!   a member's agent --------> supervisor --Admit + socket--> worker of its group      (from then on, directly)
//!   pagefold group set ------> supervisor --Set-------------> worker
//!                              supervisor <-Segment + file--- worker                   (kept for a successor)
//!   pagefold enrol apply ----> supervisor                    rules in, reasons out; pagefold-attach makes members (enrolment.rs)
//!   pagefold-history --Groups, Show--> supervisor                                           figures over time ([history])
//!   curl, Prometheus --HTTP--> pagefold-web --the questions of the command line--> supervisor
//! ```
//!
//! The supervisor moves no page and reads no message of a member's agent. Members' connections are passed on to their
//! worker, which has no rights that could be abused.
//!
//! | end of | consequence |
//! |---|---|
//! | a worker that stands still | it is ended, and another one is started (`group.rs`) |
//! | a worker | it is started again after a wait that doubles, with the pool's files that its predecessor made; its bill goes on (`bill.rs`) |
//! | the supervisor and a worker | members keep what they have; where systemd kept the pool's files (`segments.rs`), a new worker takes them over |
//! | the supervisor | workers and members go on; the next one finds the workers by their sockets, members and bills in `state.json` |
//! | a group's configuration | its members go on under its last limits, which are in `state.json`; there are no new ones |
//! | a member | its registration ends with its process: pid and start time together are used once |
//! | the last member of a group | the worker ends after [`Options::linger`], and the pool with it |

#![forbid(unsafe_code)]

mod admissions;
mod backoff;
mod balance_config;
mod beside;
mod bill;
mod client;
pub mod config;
mod decide;
mod enrol_config;
mod enrolment;
mod entrances;
mod group;
mod handed;
pub mod helper;
mod hidden;
mod history_config;
mod kept;
mod latency;
mod member_facts;
mod orphans;
mod park_config;
mod prover;
mod registry;
mod reload;
mod requests;
mod room;
mod segments;
mod sketch_config;
mod state;
mod supervisor;
mod templates;
mod tokens;
mod trail;
mod trouble;
mod web;
mod worker;

pub use orphans::end_orphans;
pub use supervisor::{Options, Supervisor};
