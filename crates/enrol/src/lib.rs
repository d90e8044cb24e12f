//! Makes running processes members of groups, whose identical pages are folded into one, by the rules of a service
//! (`[[enrol]]`); also processes that start later.
//!
//! ```text
//!   every 2 s                             facts from the kernel           rules of the service
//!     look: which processes are there? ----------> decide: to be attached? why not? <---'
//!                                                       |
//!                                                       v
//!                                     attach: pagefold-attach, a few at a time ---> the supervisor decides on membership
//! ```
//!
//! | step | module | it |
//! |---|---|---|
//! | look | `facts`, `watch` | reads what the kernel says about each process. A process can choose only facts that make it less likely to be attached |
//! | decide | `decide` | is a pure function of facts and rules |
//! | act | `attach` | starts `pagefold-attach`, which the kernel lets trace that process or not |
//!
//! If a process cannot be attached, that is tried again after a wait that doubles each time, and the reason is reported
//! to the service.
//!
//! A `pagefold-attach` keeps running for each attached process, and serves it. Every 10 s, a new one is started for
//! each process whose own one was killed.
#![forbid(unsafe_code)]

pub mod attach;
mod crew;
pub mod decide;
pub mod facts;
mod labels;
mod metadata;
mod run;
mod watch;

pub use run::{Planned, plan, run};

/// Programs and orders for tests.
#[cfg(test)]
mod testing {
    use crate::attach::Order;
    use api::enrol::Via;
    use host::ProcessId;
    use std::io::Write;
    use std::path::Path;
    use std::process::{Command, Stdio};

    /// Makes an executable shell script. A child process writes it: if this process did, a child that another test
    /// forks could have it open for writing, and executing it would fail (`ETXTBSY`).
    pub fn make_script(path: &Path, script: &str) {
        let mut writer = Command::new("sh");
        writer.args(["-c", "cat > \"$0\" && chmod 755 \"$0\""]).arg(path).stdin(Stdio::piped());
        let mut child = writer.spawn().expect("run sh");
        let mut input = child.stdin.take().expect("a pipe");
        input.write_all(format!("#!/bin/sh\n{script}\n").as_bytes()).expect("write a script");
        drop(input);
        assert!(child.wait().expect("wait for sh").success());
    }

    /// An order to attach a process with this pid that does not exist.
    pub fn order(pid: u32) -> Order {
        Order {
            process: ProcessId { pid, start_ticks: 1 },
            group: "acme".into(),
            name: None,
            all_anonymous: true,
            by_rule: true,
            dry_run: false,
            via: Via::Agent,
            undo: false,
            again: false,
        }
    }
}
