//! The guests whose pages are merged: real VMs of a lab, or processes with made-up pages.

use super::layout::{self, Content};
use super::merger::Merger;
use super::options::{Image, Options};
use crate::guardian::Guardian;
use crate::synthetic::{AlignedPage, filled};
use crate::workload::churn_script;
use anyhow::{Context, bail};
use cli::exit::Outcome;
use cli::say;
use lab::{Cache, Idle, Lab, Progress, Spec};
use page::PAGE_BYTES;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

/// Rows that a guest deletes after each 500 that it inserts into its table while the guests work.
const DELETED_ROWS: u32 = 300;

/// Time limit for guests to become idle.
const SETTLE: Duration = Duration::from_secs(120);
/// Line that a synthetic guest writes once its pages are there.
const READY: &str = "ready\n";

/// Running guests; dropping them ends them.
#[derive(Default)]
pub struct Guests {
    vms: Option<Lab>,
    processes: Vec<Child>,
}

impl Guests {
    /// Starts the guests such that the merger can merge their memory. Waits until VMs are idle, and until processes
    /// have their pages.
    ///
    /// # Errors
    /// A guest does not come up.
    pub fn start(o: &Options, merger: &dyn Merger, dir: &Path, guardian: &mut Guardian) -> anyhow::Result<Self> {
        let mut guests = Self::default();
        let image = match o.image {
            Image::Synthetic => {
                guests.start_processes(o, merger)?;
                return Ok(guests);
            }
            Image::Debian => lab::Image::Debian,
            Image::Tiny => lab::Image::Tiny,
        };
        let dir = dir.join("lab");
        guardian.keep_lab(&dir)?;
        let lab = guests.vms.insert(Lab::open(&dir)?);
        start_vms(lab, o, image, merger)?;
        Ok(guests)
    }

    fn start_processes(&mut self, o: &Options, merger: &dyn Merger) -> anyhow::Result<()> {
        for number in 0..o.guests {
            let mut command = merger.command(&format!("guest-{number}"))?;
            command.args(["bench-guest", "mergeable", "--number", &number.to_string()]);
            command.args(["--pages", &(o.memory / PAGE_BYTES as u64).to_string()]);
            command.args((!o.small_pages).then_some("--huge"));
            command.stdin(Stdio::piped()).stdout(Stdio::piped());
            self.processes.push(command.spawn().context("cannot start a guest")?);
        }
        for child in &mut self.processes {
            let mut line = String::new();
            let out = child.stdout.take().context("a guest without output")?;
            BufReader::new(out).read_line(&mut line).context("cannot hear from a guest")?;
            if line != READY {
                bail!("a guest of the bench ended before its pages were there");
            }
        }
        Ok(())
    }

    /// Process ids of the guests: those processes that hold guest memory.
    ///
    /// # Errors
    /// The lab cannot be read.
    pub fn pids(&self) -> anyhow::Result<Vec<u32>> {
        let vms = self.vms.as_ref().map_or_else(|| Ok(Vec::new()), Lab::guests)?;
        Ok(vms.iter().filter_map(|guest| guest.pid).chain(self.processes.iter().map(Child::id)).collect())
    }

    /// Has the guests begin the work of `--churn`, with pauses of `pause` seconds. It goes on until the guests end.
    ///
    /// # Errors
    /// A guest does not answer.
    pub fn work(&mut self, pause: u16) -> anyhow::Result<()> {
        for guest in self.vms.as_ref().map_or_else(|| Ok(Vec::new()), Lab::guests)? {
            guest.exec(&["sh", "-c", &churn_script(pause.into(), DELETED_ROWS)], Duration::from_secs(30))?;
        }
        for child in &mut self.processes {
            let input = child.stdin.as_mut().context("a guest without input")?;
            input.write_all(b"w").context("a guest has ended")?;
        }
        Ok(())
    }
}

fn start_vms(lab: &Lab, o: &Options, image: lab::Image, merger: &dyn Merger) -> anyhow::Result<()> {
    let spec = Spec {
        guests: o.guests as usize,
        groups: vec![super::folding::GROUP.to_owned()],
        memory_bytes: Some(o.memory),
        fold: merger.fold()?,
        ..Spec::new(image)
    };
    lab.up(&spec, &Cache::open(&lab::cache_dir()?)?, &|event| {
        if let Progress::Building(_) = event {
            say!("pagefold: building the image for the guests, once");
        }
    })?;
    let settled = lab.settle(Idle::default(), SETTLE, &|_| {})?;
    if !settled.idle {
        say!("pagefold: the guests are not idle after {} s; going on", settled.waited.as_secs());
    }
    Ok(())
}

impl Drop for Guests {
    fn drop(&mut self) {
        if let Some(Err(e)) = self.vms.as_ref().map(Lab::down) {
            say!("pagefold: {e}");
        }
        for child in &mut self.processes {
            // Fails only if the process has ended already; waiting then reaps it all the same.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Arguments of the hidden command that is a synthetic guest whose memory may be merged.
#[derive(clap::Args)]
pub struct MergeableArgs {
    /// Which guest of the bench
    #[arg(long)]
    number: u64,
    /// Pages to hold
    #[arg(long)]
    pages: u64,
    /// Hold them in transparent huge pages, as VMMs hold guest RAM
    #[arg(long)]
    huge: bool,
}

fn page_of(content: Content) -> AlignedPage {
    match content {
        Content::Zeros => AlignedPage([0; PAGE_BYTES]),
        Content::Filled(seed) => filled(seed),
    }
}

/// Holds pages until standard input closes, which it does however the bench ends. As soon as a byte comes in, the
/// process writes its pages again and again.
pub fn hold(args: &MergeableArgs) -> anyhow::Result<Outcome> {
    let contents = layout::contents(args.number, args.pages);
    let mut memory: Vec<AlignedPage> = Vec::with_capacity(contents.len());
    if args.huge {
        act::prefer_huge_pages(memory.spare_capacity_mut())?;
    }
    act::ask_to_merge(memory.spare_capacity_mut())?;
    memory.extend(contents.iter().copied().map(page_of));
    let mut out = std::io::stdout();
    out.write_all(READY.as_bytes()).and_then(|()| out.flush()).context("cannot say that the pages are there")?;
    let mut word = [0];
    let told = std::io::stdin().read(&mut word).context("cannot wait for the bench")?;
    if told > 0 {
        std::thread::spawn(move || std::io::stdin().read_to_end(&mut Vec::new()).map(|_| std::process::exit(0)));
        turn_over(&mut memory, &contents, args.number);
    }
    drop(std::hint::black_box(memory));
    Ok(Outcome::Done)
}

/// Writes 1% of the pages ten times a second, as if they were page cache and other files were read into it. Every
/// second page written gets a content that other guests may have, too.
fn turn_over(memory: &mut [AlignedPage], contents: &[Content], number: u64) -> ! {
    let mut n = 0_usize;
    loop {
        for _ in 0..memory.len() / 100 {
            n += 1;
            let to = n.wrapping_mul(7919) % memory.len();
            let own = Content::Filled((number + 1) << 40 | 1 << 37 | n as u64);
            let content = if n.is_multiple_of(2) { contents[n.wrapping_mul(104_729) % contents.len()] } else { own };
            memory[to] = page_of(content);
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}
