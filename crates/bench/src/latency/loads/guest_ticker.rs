//! The ticker inside a guest of QEMU; a second guest like it runs beside. Ticks are measured by the guest's clock, of
//! which the host knows only when it asked for each second of ticks.

use super::Load;
use super::ticker::{SOURCE, TICK_BYTES, numbers};
use crate::compiled::compiled;
use crate::latency::client::Client;
use crate::latency::samples::{Samples, now_ns};
use crate::latency::scene::Scene;
use crate::side::GROUP;
use anyhow::{Context, ensure};
use cli::say;
use lab::{Cache, Guest, Lab, Progress, Spec};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// RAM of a guest: 128 MiB.
const RAM_BYTES: u64 = 128 << 20;
/// Time limit for a command in a guest.
const PATIENCE: Duration = Duration::from_secs(60);
/// Shell command that compresses a program into lines of base64. Each is short enough for one request to the guest.
const PACK: &str = "gzip -9 <\"$1\" | base64 -w 24000";
/// Ticks that the guest is asked for at a time: a second of them.
const TICKS: &str = "1000";

/// A lab that ends its guests when it is dropped.
struct Ending(Lab);

impl Drop for Ending {
    fn drop(&mut self) {
        // Where this fails, the guardian ends the guests.
        let _ = self.0.down();
    }
}

pub fn begin(scene: &Scene) -> anyhow::Result<Load> {
    let dir = scene.side.path("lab")?;
    scene.side.keep_lab(Path::new(&dir))?;
    let lab = Ending(Lab::open(Path::new(&dir))?);
    let fold = lab::Fold { pagefold: crate::serving::program()?, service: scene.side.service().map(Path::to_owned) };
    let spec = Spec {
        memory_bytes: Some(RAM_BYTES),
        guests: 2,
        groups: vec![GROUP.to_owned()],
        fold: Some(fold),
        ..Spec::new(lab::Image::Tiny)
    };
    let mut guests = lab.0.up(&spec, &Cache::open(&lab::cache_dir()?)?, &|event| {
        if let Progress::Building(_) = event {
            say!("pagefold: building the image for the guests, once");
        }
    })?;
    let program = compiled(scene.dir, "guest-ticker", SOURCE, &["-static", "-s"])?;
    ensure!(guests.len() == 2, "the lab has other guests than two");
    scene.note_members(&guests.iter().filter_map(|guest| guest.pid).collect::<Vec<_>>());
    let (other, one) = (guests.remove(1), guests.remove(0));
    put(&one, &program)?;
    let pid = one.pid.context("the guest has no process")?;
    let mut client = Client::default();
    client.go(move |samples| tick(&one, samples))?;
    Ok(Load { client, pid, _programs: Box::new((other, lab)) })
}

fn tell(guest: &Guest, words: &[&str]) -> anyhow::Result<Vec<u8>> {
    let said = guest.exec(words, PATIENCE)?;
    ensure!(said.status == 0, "the guest cannot do this: {words:?}: {}", String::from_utf8_lossy(&said.stderr));
    Ok(said.stdout)
}

/// Copies a program into the guest, compressed and line by line.
fn put(guest: &Guest, program: &Path) -> anyhow::Result<()> {
    let packed = Command::new("sh").args(["-c", PACK, "sh"]).arg(program).output().context("cannot run sh")?;
    ensure!(packed.status.success(), "cannot pack a program: {}", String::from_utf8_lossy(&packed.stderr).trim());
    for line in String::from_utf8(packed.stdout)?.lines() {
        tell(guest, &["sh", "-c", &format!("printf %s {line} >>/packed")])?;
    }
    tell(guest, &["sh", "-c", "base64 -d </packed | gunzip >/ticker && chmod 755 /ticker"]).map(drop)
}

/// Has the guest tick, a second at a time, until the load ends.
fn tick(guest: &Guest, samples: &Samples) -> anyhow::Result<()> {
    while !samples.is_over() {
        let asked_ns = now_ns();
        let ticks = tell(guest, &["/ticker", "4", TICKS, "-"])?;
        let ticks: Vec<_> = ticks.as_chunks::<TICK_BYTES>().0.iter().map(|tick| numbers(*tick)).collect();
        let (first_ns, _) = *ticks.first().context("the ticker is silent")?;
        // The guest's clock does not show the host's time: the first tick of each second counts as due when the host
        // asked for it.
        ticks.iter().for_each(|(due_ns, took_ns)| samples.add(asked_ns + due_ns.saturating_sub(first_ns), *took_ns));
    }
    Ok(())
}
