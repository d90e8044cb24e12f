//! The boot of a guest (by KVM if the lab finds it usable, else emulated), beside one that is idle and folded.

use super::{USUAL, Workload};
use crate::serving::program;
use crate::side::{GROUP, Side};
use anyhow::Context;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

pub const BOOT: Workload = Workload {
    name: "boot",
    unit: "boot of a guest",
    cap: USUAL,
    floor: 500,
    needs: &[("qemu-system-x86_64", "qemu-system-x86"), ("busybox", "busybox-static")],
    recipe: boot,
};

/// Boots guests one after the other, and returns the mean seconds of a boot. Guests that were booted before go on
/// running.
fn boot(side: &Side) -> anyhow::Result<f64> {
    let dir = side.path("lab")?;
    side.keep_lab(Path::new(&dir))?;
    let lab = |words: &[&str]| -> anyhow::Result<f64> {
        let mut command = Command::new(program()?);
        command.args(["lab", "--dir", &dir]).args(words).envs(side.environment());
        let begin = Instant::now();
        let output = command.output().context("cannot start a lab")?;
        let seconds = begin.elapsed().as_secs_f64();
        anyhow::ensure!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr).trim());
        Ok(seconds)
    };
    let mut words = vec!["up", "--image", "tiny", "--guests", "1", "--memory", "128M", "--groups", GROUP];
    let service = side.service().map(|dir| dir.to_str().context("a path that is not UTF-8")).transpose()?;
    if let Some(service) = service {
        words.extend(["--fold", "--service", service]);
    }
    lab(&words)?;
    side.rest()?;
    let boots = side.amount(4, 1);
    let seconds = (0..boots).map(|_| lab(&words)).sum::<anyhow::Result<f64>>()?;
    lab(&["down"])?;
    Ok(seconds / boots as f64)
}
