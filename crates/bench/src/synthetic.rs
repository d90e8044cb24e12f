//! Guests of a bench: processes that hold made-up pages of known contents.

use anyhow::{Context, bail};
use cli::exit::Outcome;
use guest::{Guest, GuestKind};
use page::PAGE_BYTES;
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Arguments of a guest that holds pages until its input closes.
#[derive(clap::Args)]
pub struct HoldArgs {
    /// Which guest of the bench
    #[arg(long)]
    number: u64,
    /// Pages to hold
    #[arg(long)]
    pages: usize,
    /// Hold them in transparent huge pages, as VMMs hold guest RAM
    #[arg(long)]
    huge: bool,
}

/// Line that a synthetic guest writes once its pages are there.
pub const READY: &str = "ready\n";

/// The bytes of a page, aligned to 4096 bytes, so that it is exactly one page of the kernel's.
#[derive(Clone)]
#[repr(C, align(4096))]
pub struct AlignedPage(pub [u8; PAGE_BYTES]);

/// The pages of a guest. Of every eight:
///
/// | pages | content |
/// |---|---|
/// | 4 | no other page has it |
/// | 2 | every guest has it |
/// | 1 | the guest has it many times |
/// | 1 | zeros |
pub fn contents(number: u64, pages: usize, huge: bool) -> anyhow::Result<Vec<AlignedPage>> {
    let mut all = Vec::with_capacity(pages);
    if huge {
        act::prefer_huge_pages(all.spare_capacity_mut())?;
    }
    let page = |n: u64| match n % 8 {
        0..4 => filled((number + 1) << 40 | n),
        4 | 5 => filled(n),
        6 => filled((number + 1) << 40 | (n % 1024)),
        // Written, so that it becomes a resident page of zeros of the guest's own.
        _ => AlignedPage([0; PAGE_BYTES]),
    };
    all.extend((0..pages as u64).map(page));
    Ok(all)
}

/// A page filled by Xorshift from a seed: pages of different seeds differ, and none can be compressed.
pub fn filled(seed: u64) -> AlignedPage {
    let mut page = AlignedPage([0; PAGE_BYTES]);
    let mut x = (seed << 1 | 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for word in page.0.as_chunks_mut::<8>().0 {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        *word = x.to_ne_bytes();
    }
    page
}

/// Writes a file of pages, for guests to read past the host's page cache.
///
/// # Errors
/// The file cannot be written.
pub fn write_pages(path: &Path, pages: impl Iterator<Item = AlignedPage>) -> anyhow::Result<()> {
    let cannot = || format!("cannot write {}", path.display());
    let mut file = BufWriter::new(File::create(path).with_context(cannot)?);
    for page in pages {
        file.write_all(&page.0).with_context(cannot)?;
    }
    file.into_inner().map_err(|e| e.into_error()).and_then(|file| file.sync_all()).with_context(cannot)
}

/// Holds the pages until standard input closes, which happens when the bench ends, however it ends.
pub fn hold(args: &HoldArgs) -> anyhow::Result<Outcome> {
    let bytes = contents(args.number, args.pages, args.huge)?;
    let mut out = std::io::stdout();
    out.write_all(READY.as_bytes()).and_then(|()| out.flush()).context("cannot say that the pages are there")?;
    std::io::stdin().read_to_end(&mut Vec::new()).context("cannot wait for the bench to end")?;
    drop(std::hint::black_box(bytes));
    Ok(Outcome::Done)
}

/// Running synthetic guests; dropping them ends their processes.
pub struct Guests {
    children: Vec<Child>,
}

impl Guests {
    /// Starts `guests` guests of `pages` pages each, and waits until they hold them.
    pub fn start(guests: u64, pages: usize, huge: bool) -> anyhow::Result<Self> {
        let mut running = Self { children: Vec::new() };
        for number in 0..guests {
            let child = Command::new(cli::OWN_PROGRAM)
                .args(["bench-guest", "hold", "--number", &number.to_string(), "--pages", &pages.to_string()])
                .args(huge.then_some("--huge"))
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .context("cannot start a guest")?;
            running.children.push(child);
        }
        for child in &mut running.children {
            let mut line = String::new();
            let out = child.stdout.take().context("a guest without output")?;
            BufReader::new(out).read_line(&mut line).context("cannot hear from a guest")?;
            if line != READY {
                bail!("a guest of the bench ended before its pages were there");
            }
        }
        Ok(running)
    }

    /// The first `count` guests, as the census takes them.
    pub fn first(&self, count: usize) -> Vec<Guest> {
        let guest = |(n, child): (usize, &Child)| Guest {
            id: format!("process:{}", child.id()),
            name: format!("bench-{n}"),
            kind: GuestKind::Process,
            pids: vec![child.id()],
            group: format!("bench-{}", n % 2),
            ram_bytes: None,
            facts: guest::Facts::default(),
        };
        self.children.iter().enumerate().take(count).map(guest).collect()
    }
}

impl Drop for Guests {
    fn drop(&mut self) {
        for child in &mut self.children {
            // Fails only if the process has ended already; waiting then reaps it all the same.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
