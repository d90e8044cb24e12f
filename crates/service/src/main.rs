//! `pagefoldd`: the supervisor of a service. `pagefold serve` reads the command line, and becomes this program.
#![forbid(unsafe_code)]

use anyhow::{Context, bail};
use api::place::{Lock, Meant, Place};
use cli::exit::{self, Outcome, Stop};
use service::config::Config;
use service::{Options, Supervisor};
use std::ffi::OsString;
use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

/// Length of a private service's log, in bytes, beyond which the next private service empties it.
const MOST_LOG_BYTES: u64 = 1 << 20;
/// Longest time to wait for the service's lock: 5 s. An earlier service that was killed while it started a process has
/// left a fork that holds the lock until it executes its program.
const LOCK_PATIENCE: Duration = Duration::from_secs(5);
/// Time between two attempts at the lock: 20 ms.
const LOCK_AGAIN: Duration = Duration::from_millis(20);

/// The arguments: options of `pagefold serve`, whose help explains them. An option and its value are two words.
#[derive(Debug, Default, PartialEq, Eq)]
struct Args {
    config: Option<PathBuf>,
    dir: Option<PathBuf>,
    stop_workers: bool,
    enrol_apart: bool,
    private: bool,
    linger_s: u64,
    detach: bool,
    end_orphans: bool,
}

impl Args {
    fn read(words: impl Iterator<Item = OsString>) -> Result<Self, String> {
        let mut args = Self { linger_s: 60, ..Self::default() };
        let mut words = words;
        while let Some(word) = words.next() {
            let option = word.to_string_lossy();
            let mut value = || words.next().ok_or_else(|| format!("{option} takes a value"));
            match &option[..] {
                "--config" => args.config = Some(value()?.into()),
                "--dir" => args.dir = Some(value()?.into()),
                "--linger" => {
                    let seconds = value()?.to_string_lossy().parse::<u64>();
                    args.linger_s = seconds.map_err(|e| format!("{option}: {e}"))?;
                }
                "--stop-workers" => args.stop_workers = true,
                "--enrol-apart" => args.enrol_apart = true,
                "--private" => args.private = true,
                "--detach" => args.detach = true,
                "--end-orphans" => args.end_orphans = true,
                _ => return Err(format!("there is no option {option}: pagefold serve starts this program")),
            }
        }
        Ok(args)
    }
}

fn main() -> ExitCode {
    let words: Vec<OsString> = std::env::args_os().skip(1).collect();
    exit::code_of(|| {
        if words == ["--version"] {
            cli::output::line(format_args!("pagefoldd {}", cli::version()))?;
            return Ok(Outcome::Done);
        }
        run(&Args::read(words.into_iter()).map_err(Stop::Usage)?)
    })
}

fn run(args: &Args) -> anyhow::Result<Outcome> {
    let config = match &args.config {
        Some(path) => Config::read(path).map_err(Stop::usage)?,
        None => Config::default(),
    };
    let place = Meant::of(args.dir.as_deref(), config.dir.as_deref()).place();
    if args.detach {
        return detach(&place, args.linger_s);
    }
    if args.end_orphans {
        service::end_orphans(&place)?;
        return Ok(Outcome::Done);
    }
    place.make()?;
    let patience = if args.private { Duration::ZERO } else { LOCK_PATIENCE };
    let Some(lock) = lock_within(&place, patience)? else {
        if args.private {
            return Ok(Outcome::Done);
        }
        bail!("another service runs in {}", place.dir().display());
    };
    if args.private {
        // `setsid` fails if this process leads a session already.
        let _ = rustix::process::setsid();
    }
    let linger = Duration::from_secs(args.linger_s);
    let &Args { private, stop_workers, enrol_apart, .. } = args;
    serve(place, config, Options { private, stop_workers, enrol_apart, linger }, lock)
}

fn lock_within(place: &Place, patience: Duration) -> anyhow::Result<Option<Lock>> {
    let end = Instant::now() + patience;
    loop {
        let lock = place.lock()?;
        if lock.is_some() || Instant::now() >= end {
            return Ok(lock);
        }
        std::thread::sleep(LOCK_AGAIN);
    }
}

fn serve(place: Place, config: Config, options: Options, lock: Lock) -> anyhow::Result<Outcome> {
    Supervisor::new(place, config, options, lock)?.run()?;
    Ok(Outcome::Done)
}

/// Starts a private service in a new process that outlives this one, with its log in a file.
fn detach(place: &Place, linger_s: u64) -> anyhow::Result<Outcome> {
    let path = place.log_file();
    let too_long = path.metadata().is_ok_and(|log| log.len() > MOST_LOG_BYTES);
    let mut open = File::options();
    open.create(true).mode(0o600).write(true).truncate(too_long).append(!too_long);
    let log = open.open(&path).with_context(|| format!("cannot open {}", path.display()))?;
    act::keep_files_from_children();
    Command::new(cli::OWN_PROGRAM)
        .arg0("pagefoldd")
        .args(["--private", "--linger", &linger_s.to_string(), "--dir"])
        .arg(std::path::absolute(place.dir())?)
        .env_remove("LD_PRELOAD")
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .context("cannot start a service")?;
    Ok(Outcome::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Result<Args, String> {
        Args::read(line.split_whitespace().map(OsString::from))
    }

    #[test]
    fn arguments_are_those_of_pagefold_serve() {
        let usual = Args { linger_s: 60, ..Args::default() };
        assert_eq!(read(""), Ok(usual));
        let args = Args { private: true, linger_s: 2, dir: Some("/x".into()), ..Args::default() };
        assert_eq!(read("--private --linger 2 --dir /x"), Ok(args));
        let args =
            Args { config: Some("/c".into()), stop_workers: true, enrol_apart: true, linger_s: 60, ..Args::default() };
        assert_eq!(read("--config /c --enrol-apart --stop-workers"), Ok(args));
        assert!(read("--detach --end-orphans").is_ok_and(|args| args.detach && args.end_orphans));
        for wrong in ["--linger", "--linger x", "--dir", "serve", "--help"] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }
}
