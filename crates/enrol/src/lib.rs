//! Enrols running processes by the rules of a service (`[[enrol]]`), also those that start later.
//!
//! ```text
//!   every 2 s                             facts of the kernel's           rules of the service
//!     look: which processes are there? ----------> decide: to be attached? why not? <---'
//!                                                       |
//!                                                       v
//!                                     attach: pagefold-attach, a few at a time ---> the supervisor decides on membership
//! ```
//!
//! | step | module | it |
//! |---|---|---|
//! | look | `facts`, `watch` | reads what the kernel says of each process. None of it is chosen by the process, but for what makes it less likely to be attached |
//! | decide | `decide` | is a pure function of facts and rules |
//! | act | `attach` | starts `pagefold-attach`, which the kernel lets trace that process or not |
//!
//! A process that cannot be attached is tried again after a wait that doubles, and its reason is told to the service.
//!
//! A program that stays beside an attached process may be killed. Every 10 s, another one is started for each process that has lost its own in this way.
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

    /// Makes a script for the shell. A child writes it: what this process writes cannot be executed as long as a child of
    /// another test has that open.
    pub fn make_script(path: &Path, script: &str) {
        let mut writer = Command::new("sh");
        writer.args(["-c", "cat > \"$0\" && chmod 755 \"$0\""]).arg(path).stdin(Stdio::piped());
        let mut child = writer.spawn().expect("run sh");
        let mut input = child.stdin.take().expect("a pipe");
        input.write_all(format!("#!/bin/sh\n{script}\n").as_bytes()).expect("write a script");
        drop(input);
        assert!(child.wait().expect("wait for sh").success());
    }

    /// An order to attach a process that nobody has.
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
