//! `pagefold-web`: the web side of a service, started by the supervisor. Its standard input is a socket of the supervisor's.
#![forbid(unsafe_code)]

use anyhow::Context;
use clap::Parser;
use cli::exit::{self, Outcome};
use cli::output;
use host::Seqpacket;
use rustix::fd::AsFd;
use std::process::ExitCode;

/// Serves HTTP for a Pagefold service, which starts it
#[derive(Parser)]
#[command(name = "pagefold-web", version = cli::version(), after_help = exit::CODES)]
struct Args {
    /// Become this user
    #[arg(long)]
    uid: Option<u32>,
    /// Print the description of its paths (OpenAPI), and end
    #[arg(long)]
    openapi: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    exit::code_of(|| run(&args))
}

fn run(args: &Args) -> anyhow::Result<Outcome> {
    if args.openapi {
        output::line(web::description())?;
        return Ok(Outcome::Done);
    }
    host::let_signals_through().context("cannot let signals through")?;
    act::raise_open_files_limit();
    let socket = std::io::stdin().as_fd().try_clone_to_owned().context("standard input is not a socket")?;
    web::serve(Seqpacket::from(socket), || act::give_up_rights(args.uid).context("cannot give up rights"))?;
    Ok(Outcome::Done)
}
