//! `pagefold-prove`: the prover of a service, started by the supervisor. Its listening socket is its standard input.
//! Its standard output is another socket, through which the supervisor says which users have members, and hands on
//! connections of members.
#![forbid(unsafe_code)]

use anyhow::Context;
use clap::Parser;
use cli::exit::{self, Outcome, Stop};
use host::SeqpacketListener;
use prove::{ReferenceCounts, Serving};
use rustix::fd::AsFd;
use std::path::PathBuf;
use std::process::ExitCode;

/// Tells members whether anybody else holds their pages; a service starts it
#[derive(Parser)]
#[command(name = "pagefold-prove", version = cli::version(), after_help = exit::CODES)]
struct Args {
    /// The supervisor's process: it ends when that does
    #[arg(long, required_unless_present = "successor")]
    supervisor: Option<u32>,
    /// Become this user
    #[arg(long)]
    uid: Option<u32>,
    /// Go on with the children of a prover that was killed, whose journal has this descriptor; no prover but that
    /// starts this
    #[arg(long, conflicts_with = "supervisor", requires = "socket")]
    successor: Option<i32>,
    /// The place at which its supervisor listens
    #[arg(long)]
    socket: Option<PathBuf>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    exit::code_of(|| run(&args))
}

fn run(args: &Args) -> anyhow::Result<Outcome> {
    if let (Some(journal), Some(socket)) = (args.successor, &args.socket) {
        act::give_up_rights(None).context("cannot give up rights")?;
        prove::succeed(journal, socket.clone())?;
        return Ok(Outcome::Done);
    }
    host::let_signals_through().context("cannot let signals through")?;
    act::raise_open_files_limit();
    let socket = std::io::stdin().as_fd().try_clone_to_owned().context("standard input is not a socket")?;
    let users = std::io::stdout().as_fd().try_clone_to_owned().context("standard output is not a socket")?;
    let counts = ReferenceCounts::open().map_err(|e| Stop::HostLacks(e.to_string()))?;
    let supervisor =
        act::parent(args.supervisor.unwrap_or_default()).context("cannot tell when the supervisor ends")?;
    act::give_up_rights_but_looking(args.uid).context("cannot give up rights")?;
    let listener = SeqpacketListener::from_fd(socket, PathBuf::from("prove.sock"));
    prove::serve(Serving { listener, supervisor: &supervisor, users: users.into() }, counts)?;
    Ok(Outcome::Done)
}
