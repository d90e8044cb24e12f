//! `pagefold lab up`, and the program of a process guest.

use super::{list, seconds};
use anyhow::Context;
use api::place::Meant;
use clap::ValueEnum;
use cli::exit::Outcome;
use cli::say;
use cli::size::parse_bytes;
use commands::Room;
use indicatif::{ProgressBar, ProgressStyle};
use lab::{Cache, Fold, Image, Lab, Progress, Spec};
use std::path::PathBuf;
use std::time::Duration;

/// Arguments of `pagefold lab up`.
#[derive(clap::Args)]
pub struct Args {
    /// Image of the guests
    #[arg(long, value_enum)]
    image: ImageName,
    /// How many guests
    #[arg(long, default_value_t = 1, value_name = "N")]
    guests: usize,
    /// Groups to deal them out to
    #[arg(long, value_delimiter = ',', default_value = "lab", value_name = "NAME,...")]
    groups: Vec<String>,
    /// RAM of a VM [default: 256M, debian 512M], data of a process [default: 64M]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    memory: Option<u64>,
    /// Kernel of a VM [default: the newest cloud kernel in /boot]
    #[arg(long, value_name = "FILE")]
    kernel: Option<PathBuf>,
    /// Kernel of a VM: the cloud kernel of this Debian suite, fetched from apt's mirror once
    #[arg(long, value_name = "SUITE", conflicts_with = "kernel")]
    suite: Option<String>,
    /// Add to a VM's kernel command line
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true, allow_hyphen_values = true)]
    append: String,
    /// Add an argument to QEMU's command line; give one for each word
    #[arg(long = "qemu-arg", value_name = "WORD", allow_hyphen_values = true)]
    qemu_args: Vec<String>,
    /// Let VMs go on from saved states of guests that were booted once, each on its own: ready in seconds. The first call
    /// boots and saves those that are missing. Inside, a guest bears the name of the saved one
    #[arg(long)]
    saved: bool,
    /// Have them folded, each as a member of its group
    #[arg(long)]
    fold: bool,
    /// Directory of the service that folds them [default: the host's service, or one of your own]
    #[arg(long, value_name = "DIR", requires = "fold")]
    service: Option<PathBuf>,
    /// Longest time that a guest may take to be ready
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = seconds())]
    timeout: u64,
}

/// Name of an image, as `--image` takes it.
#[derive(Clone, Copy, ValueEnum)]
pub enum ImageName {
    /// A VM with a kernel and busybox; up in seconds
    Tiny,
    /// A VM with Debian, systemd, MariaDB and Apache; takes a minute to build, once
    Debian,
    /// A container on a root directory that all of this kind share
    LxcShared,
    /// A container on a copy of that directory
    LxcCopied,
    /// A container with MariaDB, on a copy of a root directory; takes a minute to build, once
    LxcMariadb,
    /// A container with Apache and its forked children, on a copy of the same directory
    LxcApache,
    /// A plain process that holds files and data; needs no rights and no packages
    Process,
}

impl From<ImageName> for Image {
    fn from(name: ImageName) -> Self {
        match name {
            ImageName::Tiny => Self::Tiny,
            ImageName::Debian => Self::Debian,
            ImageName::LxcShared => Self::LxcShared,
            ImageName::LxcCopied => Self::LxcCopied,
            ImageName::LxcMariadb => Self::LxcMariadb,
            ImageName::LxcApache => Self::LxcApache,
            ImageName::Process => Self::Process,
        }
    }
}

/// Runs the command.
pub fn run(lab: &Lab, args: Args, as_json: bool) -> anyhow::Result<Outcome> {
    let service = args.service.map(std::path::absolute).transpose()?;
    let asked = service.clone();
    let fold = if args.fold { Some(Fold { pagefold: cli::pagefold().to_owned(), service }) } else { None };
    let cache = Cache::open(&lab::cache_dir()?)?;
    let of_suite = args.suite.map(|suite| lab::kernel_of_suite(&cache, &suite)).transpose()?;
    let spec = Spec {
        guests: args.guests,
        groups: args.groups,
        memory_bytes: args.memory,
        kernel: args.kernel.or(of_suite),
        append: args.append,
        qemu_args: args.qemu_args,
        saved: args.saved,
        fold,
        patience: Duration::from_secs(args.timeout),
        ..Spec::new(args.image.into())
    };
    host::note_interrupts().context("cannot catch signals")?;
    let room = |each| {
        let meant = Meant::of(asked.as_deref(), None);
        Room::make(meant.place().dir(), "lab-up", (each, spec.guests), None)
    };
    let room = spec.known_bytes().map(room).transpose()?.flatten();
    let show = Show::new();
    let up = lab.up(&spec, &cache, &|event: Progress| show.event(&event));
    drop((show, room));
    let guests = match (up, host::interrupted()) {
        (Err(why), Some(signal)) => {
            say!("pagefold: interrupted: {why}");
            say!(
                "pagefold: the guests of this call are ended; pagefold lab list shows what else runs, lab down ends all"
            );
            return Ok(Outcome::Status(u8::try_from(128 + signal).unwrap_or(1)));
        }
        (up, _) => up?,
    };
    list::print(lab, &guests, as_json)
}

/// Arguments of a process guest; see [`Spec::process_program`].
#[derive(clap::Args)]
pub struct HoldArgs {
    #[arg(long)]
    name: String,
    #[arg(long)]
    group: String,
    #[arg(long)]
    memory_bytes: u64,
}

/// Runs as a process guest until it is ended.
pub fn hold(args: &HoldArgs) -> anyhow::Result<Outcome> {
    match lab::live(&args.name, &args.group, args.memory_bytes)? {}
}

/// Progress on stderr: one moving line on a terminal, or else a line for each step done.
pub struct Show(ProgressBar);

impl Show {
    /// A display that shows nothing yet.
    pub fn new() -> Self {
        let bar = ProgressBar::new_spinner();
        bar.set_style(ProgressStyle::with_template("{spinner} {msg} ({elapsed})").expect("a valid template"));
        if !bar.is_hidden() {
            bar.enable_steady_tick(Duration::from_millis(100));
        }
        Self(bar)
    }

    /// Shows what `lab up` has just done or is doing.
    pub fn event(&self, event: &Progress) {
        match event {
            Progress::Building(image) => {
                self.done(format!("building the image for {}, once", list::image_name(*image)));
                self.now("building".into());
            }
            Progress::Saving => self.done("booting a guest to save it, once".into()),
            Progress::Emulated(why) => self.done(format!("VMs are emulated (TCG), which is slow: {why}")),
            Progress::Started(count) => self.now(format!("waiting for {count} guests to be ready")),
            Progress::Ready(name, time) => self.done(format!("{name} ready after {}", list::time(time.as_secs_f64()))),
            Progress::Busiest(share) => self.now(format!("busiest guest: {:.0}% of a CPU", share * 100.0)),
        }
    }

    /// Shows a step in progress, on a terminal only.
    fn now(&self, text: String) {
        self.0.set_message(text);
    }

    fn done(&self, text: String) {
        if self.0.is_hidden() {
            say!("{text}");
        } else {
            self.0.println(text);
        }
    }
}

impl Drop for Show {
    fn drop(&mut self) {
        // Leave a clean line for further output.
        self.0.finish_and_clear();
    }
}
