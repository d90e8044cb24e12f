//! The program `pagefold-history`: reads arguments, and prepares the directory. The library does the rest.
#![forbid(unsafe_code)]

use anyhow::{Context, bail};
use api::history::Wanted;
use api::place::{Meant, Place, RULE, own_uid};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use cli::exit::{self, Outcome, Stop};
use cli::note;
use history::record::Recorder;
use history::sample::Sampler;
use history::show::{self, Form};
use history::{serve, window::STEP_S};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags, fchown, fstat, open};
use rustix::process::{Gid, Uid, umask};
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The directory of the file with figures, unless another one is named.
const USUAL_DIR: &str = "/var/lib/pagefold/history";
/// Name of the file with figures in its directory.
const FILE: &str = "history.db";

/// Figures of groups and members over time
#[derive(Parser)]
#[command(name = "pagefold-history", bin_name = "pagefold history", version = cli::version(), max_term_width = 110,
          args_conflicts_with_subcommands = true, disable_help_subcommand = true)]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    show: Show,
}

const EXAMPLES: &str = "\
A service whose configuration has [history] keeps these figures. docs/watch.md lists them.

Examples:
  pagefold history --since 1d
  pagefold history --since 365d --step 1d --group acme --figure saved_bytes --csv";

#[derive(Subcommand)]
enum Command {
    /// Keep the figures of a service, every ten seconds; [history] in its configuration has the service start this
    #[command(hide = true)]
    Record(Record),
}

#[derive(clap::Args)]
struct Record {
    #[arg(long, value_name = "DIR", help = RULE)]
    service: Option<PathBuf>,
    /// A directory for the file alone
    #[arg(long, value_name = "DIR", default_value = USUAL_DIR)]
    dir: PathBuf,
    /// Most bytes of the file, its log of up to 16 MiB aside
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = cli::size::parse_bytes)]
    keep_size: u64,
    /// Become this user
    #[arg(long, hide = true)]
    uid: Option<u32>,
    /// The user who may ask at the service's history.sock, besides root
    #[arg(long, hide = true)]
    reader: Option<u32>,
    /// End when standard input closes
    #[arg(long, hide = true)]
    until_hangup: bool,
}

/// Arguments for reading.
#[derive(clap::Args)]
struct Show {
    /// Figures since then: a time in UTC, or how long ago
    #[arg(long, value_name = "WHEN", default_value = "1d", value_parser = parse_time)]
    since: i64,
    /// Figures before then
    #[arg(long, value_name = "WHEN", value_parser = parse_time)]
    until: Option<i64>,
    /// Time of one point: a multiple of ten seconds. Usually 10s for a day, 1min for a month, 15min beyond
    #[arg(long, value_name = "TIME", value_parser = parse_step)]
    step: Option<i64>,
    /// Of this group
    #[arg(long)]
    group: Option<String>,
    /// Of this member; "" is the group itself
    #[arg(long)]
    member: Option<String>,
    /// This figure, such as saved_bytes
    #[arg(long)]
    figure: Option<String>,
    /// The directory of the file
    #[arg(long, value_name = "DIR", default_value = USUAL_DIR)]
    dir: PathBuf,
    /// Print CSV, a line for each point
    #[arg(long, conflicts_with = "json")]
    csv: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[expect(clippy::disallowed_methods, reason = "times of samples, and times that people name")]
fn now() -> i64 {
    seconds(SystemTime::now())
}

fn seconds(at: SystemTime) -> i64 {
    at.duration_since(UNIX_EPOCH).map_or(0, |since| i64::try_from(since.as_secs()).unwrap_or(i64::MAX))
}

fn parse_time(text: &str) -> Result<i64, String> {
    let ago = || humantime::parse_duration(text).ok().and_then(|ago| now().checked_sub_unsigned(ago.as_secs()));
    let at = humantime::parse_rfc3339_weak(text).ok().map(seconds).or_else(ago);
    at.ok_or_else(|| format!("{text:?} is no time: use 2026-11-29T12:00:00Z, or 90min for 90 minutes ago"))
}

fn parse_step(text: &str) -> Result<i64, String> {
    let step = humantime::parse_duration(text).ok().and_then(|step| i64::try_from(step.as_secs()).ok());
    step.ok_or_else(|| format!("{text:?} is no time: use 10s, 15min, 1h, 1d"))
}

fn main() -> ExitCode {
    let codes = format!("{EXAMPLES}\n\n{}", exit::CODES);
    let arguments = Args::command().after_help(codes).get_matches();
    let args = Args::from_arg_matches(&arguments).unwrap_or_else(|error| error.exit());
    exit::code_of(|| match args.command {
        Some(Command::Record(args)) => record(&args),
        None => show(args.show),
    })
}

fn show(args: Show) -> anyhow::Result<Outcome> {
    let form = match (args.csv, args.json) {
        (true, _) => Form::Csv,
        (_, true) => Form::Json,
        _ => Form::Table,
    };
    let path = args.dir.join(FILE);
    let found = fs::symlink_metadata(&path).map_err(|e| {
        let why =
            format!("cannot look at {}: {e}: [history] in the service's configuration has it keep one", path.display());
        Stop::HostLacks(why)
    })?;
    if own_uid() == 0 {
        // The file's owner chooses what SQLite parses. So root reads the file with the rights of its owner.
        act::give_up_rights(Some(found.uid()).filter(|uid| *uid != 0)).context("cannot give up rights")?;
    }
    let Show { since, until, step, group, member, figure, .. } = args;
    let wanted = Wanted { groups: None, group, member, figure, since: Some(since), until, step };
    show::run(&path, &wanted, form, now())
}

/// Makes the directory if it is missing. If `uid` is given, the directory becomes this user's, and so do the files in
/// it that belong to the directory's owner; a directory with other files than those of a history is refused then.
fn prepare(dir: &Path, uid: Option<u32>) -> io::Result<()> {
    match fs::DirBuilder::new().recursive(true).mode(0o700).create(dir) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    let Some(uid) = uid else { return Ok(()) };
    let names = fs::read_dir(dir)?.map(|entry| Ok(entry?.file_name())).collect::<io::Result<Vec<_>>>()?;
    if let Some(other) = names.iter().find(|name| !name.to_string_lossy().starts_with(FILE)) {
        return Err(io::Error::other(format!(
            "it has {}: a directory for the history alone is needed",
            other.display()
        )));
    }
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let handle = open(dir, flags | OFlags::DIRECTORY, Mode::empty())?;
    let owner = fstat(&handle)?.st_uid;
    if owner == uid {
        return Ok(());
    }
    for name in names {
        let file = rustix::fs::openat(&handle, &name, flags, Mode::empty())?;
        if fstat(&file)?.st_uid == owner {
            fchown(&file, Some(Uid::from_raw(uid)), Some(Gid::from_raw(uid)))?;
        }
    }
    Ok(fchown(&handle, Some(Uid::from_raw(uid)), Some(Gid::from_raw(uid)))?)
}

fn record(args: &Record) -> anyhow::Result<Outcome> {
    umask(Mode::from_bits_truncate(0o077));
    let place: Place = Meant::of(args.service.as_deref(), None).place();
    prepare(&args.dir, args.uid).with_context(|| format!("cannot use {}", args.dir.display()))?;
    let listener = serve::listen(&place, args.reader)?;
    act::give_up_rights(args.uid).context("cannot give up rights")?;
    let path = args.dir.join(FILE);
    let mut recorder = Recorder::open(&path, args.keep_size, now())?;
    let thread = std::thread::Builder::new().name("answers".into());
    thread.spawn(move || serve::run(&listener, path, now)).context("cannot start a thread")?;
    let (mut sampler, mut is_silent) = (Sampler::new(place), false);
    loop {
        let at = now();
        match sampler.sample() {
            Ok(sampled) => {
                is_silent = false;
                recorder.take(at, &sampled);
            }
            Err(e) if !std::mem::replace(&mut is_silent, true) => {
                note!("the service does not answer: {}", cli::printable(&exit::in_words(&e)));
            }
            Err(_) => {}
        }
        // Waits until the next multiple of the step, so that two moments never fall into the same ten seconds.
        let left = STEP_S - now().rem_euclid(STEP_S);
        if has_hung_up(Duration::from_secs(left.unsigned_abs()), args.until_hangup)? {
            return Ok(Outcome::Done);
        }
    }
}

/// Waits for `pause`. With `may_hang_up`, the wait ends early if standard input closes. Returns whether that happened.
fn has_hung_up(pause: Duration, may_hang_up: bool) -> anyhow::Result<bool> {
    if !may_hang_up {
        std::thread::sleep(pause);
        return Ok(false);
    }
    let stdin = io::stdin();
    let timeout = Timespec { tv_sec: pause.as_secs().cast_signed(), tv_nsec: 0 };
    match poll(&mut [PollFd::new(&stdin, PollFlags::IN)], Some(&timeout)) {
        Ok(ready) => Ok(ready > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(e) => bail!("cannot wait: {e}"),
    }
}
