//! Swap of a bench's own, in compressed memory: a zram device that is made for it, and removed in the end.

use crate::guardian::Guardian;
use crate::swap::{is_on, run};
use anyhow::Context;
use cli::exit::Stop;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Directory of the files by which devices are made and removed.
const CONTROL: &str = "/sys/class/zram-control";
/// Longest time for a device's file to appear: 5 s.
const APPEARS_WITHIN: Duration = Duration::from_secs(5);
/// Priority of the swap: the highest. The kernel uses it before other swap of the host.
const PRIORITY: &str = "32767";

/// A device that the host swaps to. Dropping it ends that; the guardian does so where the bench is cut off.
pub struct Zram(u32);

impl Zram {
    /// Makes a device for so many bytes, and has the host swap to it.
    ///
    /// # Errors
    /// [`Stop::HostLacks`] where the kernel has no zram. The kernel may also refuse the device.
    pub fn on(bytes: u64, guardian: &mut Guardian) -> anyhow::Result<Self> {
        check()?;
        let file = format!("{CONTROL}/hot_add");
        let text = fs::read_to_string(&file).with_context(|| format!("cannot read {file}: no zram device is made"))?;
        let zram = Self(text.trim().parse().with_context(|| format!("{file} holds no number"))?);
        // A device without a size takes no memory.
        guardian.keep_zram(zram.0)?;
        let file = attribute(zram.0, "disksize");
        fs::write(&file, bytes.to_string()).with_context(|| format!("cannot write {}", file.display()))?;
        let device = device(zram.0);
        let begin = Instant::now();
        while !device.exists() && begin.elapsed() < APPEARS_WITHIN {
            std::thread::sleep(Duration::from_millis(10));
        }
        let path = device.to_str().context("a path that is not UTF-8")?;
        run("mkswap", &[path])?;
        run("swapon", &["--priority", PRIORITY, path])?;
        Ok(zram)
    }

    /// Frames that the device takes for what was swapped to it, in bytes.
    ///
    /// # Errors
    /// The kernel does not tell.
    pub fn used_bytes(&self) -> anyhow::Result<u64> {
        let file = attribute(self.0, "mm_stat");
        let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let used = text.split_whitespace().nth(2).and_then(|field| field.parse().ok());
        used.with_context(|| format!("{} has no third number", file.display()))
    }
}

impl Drop for Zram {
    fn drop(&mut self) {
        // The guardian tries again, and says what fails.
        let _ = end(self.0);
    }
}

/// Checks that the kernel has zram.
///
/// # Errors
/// [`Stop::HostLacks`] if it has none.
pub fn check() -> anyhow::Result<()> {
    if PathBuf::from(CONTROL).is_dir() {
        return Ok(());
    }
    let why = format!("this kernel has no zram: there is no {CONTROL}. Load it (modprobe zram), or leave out its arms");
    Err(Stop::HostLacks(why).into())
}

/// Ends swapping to a device, and removes the device.
///
/// # Errors
/// There is too little memory for what is swapped out, or the kernel keeps the device.
pub(crate) fn end(number: u32) -> anyhow::Result<()> {
    let device = device(number);
    if is_on(&device)? {
        run("swapoff", &[device.to_str().context("a path that is not UTF-8")?])?;
    }
    if !attribute(number, "disksize").exists() {
        return Ok(());
    }
    let file = format!("{CONTROL}/hot_remove");
    fs::write(&file, number.to_string()).with_context(|| format!("cannot remove {}", device.display()))
}

fn device(number: u32) -> PathBuf {
    PathBuf::from(format!("/dev/zram{number}"))
}

fn attribute(number: u32, name: &str) -> PathBuf {
    PathBuf::from(format!("/sys/block/zram{number}/{name}"))
}
