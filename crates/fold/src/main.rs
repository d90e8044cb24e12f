//! `pagefold-worker`: one group's worker, started by the supervisor. Its listening socket is its standard input.
//! It is linked with nothing that reads a command line or a configuration.
#![forbid(unsafe_code)]

use anyhow::Context;
use api::name;
use cli::exit::{self, Outcome, Stop};
use host::SeqpacketListener;
use rustix::fd::AsFd;
use std::path::PathBuf;
use std::process::ExitCode;

/// Most connections to the worker's socket that the kernel queues before they are accepted (`listen`).
const BACKLOG: i32 = 16;

/// Arguments, as the supervisor gives them: each an option with a value.
#[derive(Debug, Default, PartialEq, Eq)]
struct Args {
    /// `--group`: the group.
    group: String,
    /// `--supervisor-uid`: the supervisor's user. Connections of other users, but for root, are closed.
    supervisor_uid: u32,
    /// `--prover`: socket of the service's prover.
    prover: PathBuf,
    /// `--uid`: the user as which the worker runs once it has its descriptors.
    uid: Option<u32>,
}

impl Args {
    fn read(words: impl Iterator<Item = String>) -> Result<Self, String> {
        let (mut group, mut supervisor_uid, mut prover, mut uid) = (None, None, None, None);
        let mut words = words;
        while let Some(option) = words.next() {
            let value = words.next().ok_or_else(|| format!("{option} takes a value"))?;
            let user = || value.parse::<u32>().map_err(|e| format!("{option} {value}: {e}"));
            match option.as_str() {
                "--group" => group = Some(name::parse_group(&value)?),
                "--supervisor-uid" => supervisor_uid = Some(user()?),
                "--prover" => prover = Some(value.into()),
                "--uid" => uid = Some(user()?),
                _ => return Err(format!("there is no option {option}: the supervisor starts this program")),
            }
        }
        let lacks = |option: &str| format!("{option} is missing: the supervisor starts this program");
        Ok(Self {
            group: group.ok_or_else(|| lacks("--group"))?,
            supervisor_uid: supervisor_uid.ok_or_else(|| lacks("--supervisor-uid"))?,
            prover: prover.ok_or_else(|| lacks("--prover"))?,
            uid,
        })
    }
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned()).collect();
    exit::code_of(|| {
        if words == ["--version"] {
            cli::output::line(format_args!("pagefold-worker {}", cli::version()))?;
            return Ok(Outcome::Done);
        }
        run(Args::read(words.into_iter()).map_err(Stop::Usage)?)
    })
}

fn run(args: Args) -> anyhow::Result<Outcome> {
    // The worker is executed through a descriptor (`/proc/self/fd/N`), so the kernel would name it `N`.
    let _ = rustix::thread::set_name(c"pagefold-worker");
    host::let_signals_through().context("cannot let signals through")?;
    act::raise_open_files_limit();
    let socket = std::io::stdin().as_fd().try_clone_to_owned().context("standard input is not a socket")?;
    // A second `listen` makes this process the peer in `SO_PEERCRED` of processes that connect.
    rustix::net::listen(&socket, BACKLOG).context("standard input is not a listening socket")?;
    act::give_up_rights(args.uid).context("cannot give up rights")?;
    act::let_own_user_look().context("cannot let the prover look at this process")?;
    let listener = SeqpacketListener::from_fd(socket, PathBuf::from(format!("{}.sock", args.group)));
    fold::run(listener, &args.group, args.supervisor_uid, args.prover)?;
    Ok(Outcome::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Result<Args, String> {
        Args::read(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn arguments_are_the_supervisors() {
        let args = Args { group: "acme".into(), supervisor_uid: 7, prover: "/x".into(), uid: None };
        assert_eq!(read("--group acme --supervisor-uid 7 --prover /x"), Ok(args));
        assert_eq!(
            read("--prover /x --uid 61184 --group acme --supervisor-uid 0").map(|args| args.uid),
            Ok(Some(61184))
        );
        for wrong in [
            "",
            "--group acme --supervisor-uid 7",
            "--group a/b --supervisor-uid 7 --prover /x",
            "--group acme --supervisor-uid -1 --prover /x",
            "--group acme --supervisor-uid 7 --prover /x --uid",
            "--group acme --supervisor-uid 7 --prover /x --more 1",
        ] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }
}
