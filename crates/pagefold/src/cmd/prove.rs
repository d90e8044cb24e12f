//! `pagefold prove`: the prover of a service, started by the supervisor. Its listening socket is its standard input.

use crate::exit::{Outcome, Stop};
use anyhow::Context;
use host::{ReferenceCounts, SeqpacketListener};
use rustix::fd::AsFd;
use std::path::PathBuf;

/// Arguments of `pagefold prove`.
#[derive(clap::Args)]
pub struct Args {
    /// The supervisor's process: it ends when that does
    #[arg(long)]
    supervisor: u32,
    /// Become this user
    #[arg(long)]
    uid: Option<u32>,
}

/// Runs it.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    host::let_signals_through().context("cannot let signals through")?;
    host::raise_open_files_limit();
    let socket = std::io::stdin().as_fd().try_clone_to_owned().context("standard input is not a socket")?;
    let counts = ReferenceCounts::open().map_err(|e| Stop::HostLacks(e.to_string()))?;
    let supervisor = host::parent(args.supervisor).context("cannot tell when the supervisor ends")?;
    host::give_up_rights_but_looking(args.uid).context("cannot give up rights")?;
    let listener = SeqpacketListener::from_fd(socket, PathBuf::from("prove.sock"));
    crate::prove::serve(listener, &supervisor, counts)?;
    Ok(Outcome::Done)
}
