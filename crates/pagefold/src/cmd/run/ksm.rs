//! `pagefold run --via ksm`: a member that ksmd merges, the kernel's own merger.
//!
//! ```text
//!   pagefold run: asks to be merged --executes itself--> is merged? --> a member --executes--> the program
//!                                                           \--> this kernel keeps that for forked children alone: 3
//! ```
//!
//! Kernels have `PR_SET_MEMORY_MERGE` from 6.4 on, and keep the setting across `execve` from 6.7 on.

use super::Args;
use crate::cmd::attach::say_whether_ksmd_runs;
use anyhow::{Context, bail};
use api::client::Service;
use api::enrol::Via;
use cli::exit::Stop;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Environment variable by which this program knows, after executing itself, that it has asked for merging already.
const ASKED: &str = "PAGEFOLD_MERGE_ASKED";

/// Makes this process a member whose memory ksmd merges, also when it executes `command`.
pub fn join(args: &Args, command: &mut Command, program: &str) -> anyhow::Result<()> {
    if std::env::var_os(ASKED).is_none() {
        say_whether_ksmd_runs()?;
    }
    // The membership comes first: if it is refused, nothing was changed.
    become_member(args, program)?;
    ask_for_merging()?;
    command.env_remove(ASKED);
    Ok(())
}

fn become_member(args: &Args, program: &str) -> anyhow::Result<()> {
    let mut refused = None;
    for service in Service::find(&args.service.meant())? {
        match service.join(&args.group, args.name.as_deref(), program, Via::Ksm) {
            Ok(_) => return Ok(()),
            Err(e) => refused = refused.or(Some(e)),
        }
    }
    match refused {
        Some(why) => Err(why),
        None => bail!("no service answers: with --via ksm none is started, see pagefold serve"),
    }
}

/// Asks ksmd to merge this process (`PR_SET_MEMORY_MERGE`), and executes this program again. Returns once the request
/// has survived `execve`.
fn ask_for_merging() -> anyhow::Result<()> {
    let lacks = |what: &str| Stop::HostLacks(format!("no merging by ksmd here: {what}"));
    let is_merged =
        act::memory_merge().map_err(|e| lacks(&format!("PR_GET_MEMORY_MERGE: {e}; use Linux 6.7 or newer")))?;
    if is_merged {
        return Ok(());
    }
    if std::env::var_os(ASKED).is_some() {
        return Err(lacks("this kernel forgets the setting when a program is executed; use Linux 6.7 or newer").into());
    }
    act::set_memory_merge(true).map_err(|e| lacks(&format!("PR_SET_MEMORY_MERGE: {e}")))?;
    let mut itself = Command::new("/proc/self/exe");
    let mut words = std::env::args_os();
    itself.arg0(words.next().unwrap_or_default()).args(words).env(ASKED, "1");
    Err(itself.exec()).context("cannot execute this program anew")
}
