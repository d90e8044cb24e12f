//! `pagefold worker`: one group's worker, started by the supervisor. Its listening socket is its standard input.

use anyhow::Context;
use api::name;
use cli::exit::Outcome;
use host::SeqpacketListener;
use rustix::fd::AsFd;
use std::path::PathBuf;

/// Arguments of `pagefold worker`.
#[derive(clap::Args)]
pub struct Args {
    /// The group
    #[arg(long, value_parser = name::parse_group)]
    group: String,
    /// The supervisor's user: nobody else's orders are taken
    #[arg(long)]
    supervisor_uid: u32,
    /// Socket of the service's prover
    #[arg(long)]
    prover: PathBuf,
    /// Become this user
    #[arg(long)]
    uid: Option<u32>,
}

/// Greatest number of connections that wait to be accepted.
const BACKLOG: i32 = 16;

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    host::let_signals_through().context("cannot let signals through")?;
    act::raise_open_files_limit();
    let socket = std::io::stdin().as_fd().try_clone_to_owned().context("standard input is not a socket")?;
    // A second `listen` makes this process the peer in `SO_PEERCRED` of processes that connect.
    rustix::net::listen(&socket, BACKLOG).context("standard input is not a listening socket")?;
    act::give_up_rights(args.uid).context("cannot give up rights")?;
    act::let_own_user_look().context("cannot let the prover look at this process")?;
    let listener = SeqpacketListener::from_fd(socket, PathBuf::from(format!("{}.sock", args.group)));
    fold::run(listener, &args.group, args.supervisor_uid, args.prover.clone())?;
    Ok(Outcome::Done)
}
