//! Swap space that a bench makes for itself, in compressed memory: a zram device, which is removed at the end.

use crate::guardian::Guardian;
use crate::swap::{is_on, run};
use anyhow::Context;
use cli::exit::Stop;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Directory of the files by which zram devices are made and removed.
const CONTROL: &str = "/sys/class/zram-control";
/// Time limit for the file of a new device to appear: 5 s.
const APPEARS_WITHIN: Duration = Duration::from_secs(5);
/// Priority of the swap: the highest. The kernel uses it before other swap of the host.
const PRIORITY: &str = "32767";

/// A zram device that the host swaps to. Dropping it ends that. If the bench is cut off, the guardian does.
pub struct Zram(u32);

impl Zram {
    /// Makes a device of this size, and has the host swap to it.
    ///
    /// # Errors
    /// [`Stop::HostLacks`] where the kernel has no zram. The kernel may also refuse the device.
    pub fn on(bytes: u64, guardian: &mut Guardian) -> anyhow::Result<Self> {
        check()?;
        let file = format!("{CONTROL}/hot_add");
        let text = fs::read_to_string(&file).with_context(|| format!("cannot read {file}: no zram device is made"))?;
        let zram = Self(text.trim().parse().with_context(|| format!("{file} holds no number"))?);
        // Until the device has a size, it takes no memory. So the guardian is told of it first.
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
        // Where this fails, the guardian tries again and reports the error.
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
