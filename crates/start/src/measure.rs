//! Other ways to start a template's guest, for comparison: booting it, and cloning it with stock QEMU.

use crate::ask::Helper;
use crate::create::Source;
use crate::identities::Identity;
use crate::machine::{self, DISK, Places};
use crate::memory;
use crate::saving;
use crate::template::Template;
use crate::vmm;
use anyhow::{Context, bail};
use guest::qmp::Qmp;
use host::ProcessId;
use serde_json::json;
use std::fs::{self, DirBuilder, File};
use std::io::{Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Interval between two attempts to connect: 2 ms.
const SOON: Duration = Duration::from_millis(2);
/// Time without an answer after which a command is sent to the guest again: 2 s.
const AGAIN: Duration = Duration::from_secs(2);
/// Longest time that a command inside the guest may take, in seconds.
const SECONDS: u32 = 60;
/// Longest time until a guest answers: 300 s.
const PATIENCE: Duration = Duration::from_secs(300);

/// A machine that is ended when it is dropped.
pub struct Machine {
    /// Its process.
    pub process: ProcessId,
    dir: PathBuf,
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = vmm::end(&self.process);
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// The guest of a template, to be started in other ways.
pub struct Stock<'a> {
    /// The machine that the template was made of.
    pub source: &'a Source,
    /// The template.
    pub template: &'a Template,
    /// Its directory.
    pub template_dir: &'a Path,
    /// Directory for machines.
    pub dir: &'a Path,
}

impl Stock<'_> {
    fn start(&self, name: &str, words: &[String], disk: &Path, memory: &File) -> anyhow::Result<Machine> {
        let dir = self.dir.join(name);
        DirBuilder::new().mode(0o700).create(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let process = vmm::start(words, &Places { dir: &dir, name, disk }, Some(memory))?;
        Ok(Machine { process, dir })
    }

    /// Boots the guest under this name, until the helper inside has answered. Returns the machine, and the time that it
    /// took.
    ///
    /// # Errors
    /// It does not come up.
    pub fn boot(&self, name: &str) -> anyhow::Result<(Machine, Duration)> {
        let memory = memory::writable(name, self.source.memory_bytes)?;
        let made = machine::to_make(&self.source.words, self.source.memory_bytes);
        let once = |word: &String| if word.contains(DISK) { format!("{word},snapshot=on") } else { word.clone() };
        let words: Vec<String> = made.iter().map(once).collect();
        let begin = Instant::now();
        let machine = self.start(name, &words, self.source.disk.as_deref().unwrap_or(Path::new("")), &memory)?;
        let identity = Identity::new(name, None);
        let mut helper = Helper::connect(&machine.dir, &machine.process, begin + PATIENCE)?;
        helper.send(&identity)?;
        let answer = helper.confirm(&identity, begin + PATIENCE)?;
        answer.with_context(|| format!("nobody answers{}", vmm::last_words(&machine.dir)))?;
        Ok((machine, begin.elapsed()))
    }

    /// Copies the template's memory `count` times into a memory file, one after the other, and drops each copy. Returns
    /// the time that it took.
    ///
    /// # Errors
    /// It cannot be read, or is not what it was.
    pub fn copy_memory(&self, count: usize) -> anyhow::Result<Duration> {
        let begin = Instant::now();
        (0..count).try_for_each(|_| memory::load(self.template, self.template_dir, "copy").map(drop))?;
        Ok(begin.elapsed())
    }

    /// Clones the guest as stock QEMU can. Each QEMU is started with the options by which the guest was booted, and
    /// loads the device state through `cat`. Each step is done for all clones before the next. Returns the machines,
    /// and the time until a command has run inside each.
    ///
    /// # Errors
    /// QEMU fails, or a guest does not answer.
    pub fn clone(&self, count: usize) -> anyhow::Result<(Vec<Machine>, Duration)> {
        let memory = memory::of(self.template, self.template_dir, &[], None)?;
        let made = machine::to_make(&self.source.words, self.source.memory_bytes);
        let with_kernel = made.into_iter().filter(|word| word != "-no-reboot").collect::<Vec<_>>();
        let words = machine::to_clone(&with_kernel);
        let begin = Instant::now();
        let machines = (0..count)
            .map(|number| self.start(&format!("stock-{number}"), &words, &self.template_dir.join("disk"), &memory));
        let machines: Vec<Machine> = machines.collect::<anyhow::Result<_>>()?;
        let uri = format!("exec:cat {}", saving::quoted(&self.template_dir.join("device")));
        let mut loading: Vec<Qmp> = Vec::with_capacity(count);
        for machine in &machines {
            let mut qmp = vmm::connect(&machine.dir, &machine.process, begin + PATIENCE)?;
            vmm::leave_out_memory(&mut qmp, true)?;
            qmp.execute("migrate-incoming", json!({"uri": uri}))?;
            loading.push(qmp);
        }
        for qmp in &mut loading {
            vmm::wait_for(qmp, "query-status", begin + PATIENCE, |status| Ok(status != "inmigrate"))?;
            qmp.execute("cont", json!({}))?;
        }
        machines.iter().try_for_each(|machine| call(&machine.dir))?;
        Ok((machines, begin.elapsed()))
    }
}

/// Ends all machines that have sockets in this directory or below it: those of a bench that was cut off.
pub fn end_all(dir: &Path) {
    vmm::end_those_below(dir);
}

/// Waits until a command has run inside a guest of the lab.
///
/// # Errors
/// Nobody answers.
pub fn call(dir: &Path) -> anyhow::Result<()> {
    run(dir, "true").map(drop)
}

/// Runs a shell command inside a guest of the lab, by the lab's agent there (`crates/lab/recipes/agent.sh`). Returns
/// its output. The command is sent again while nobody answers, so it must be harmless to run it twice.
///
/// # Errors
/// Nobody answers.
pub fn run(dir: &Path, command: &str) -> anyhow::Result<String> {
    let begin = Instant::now();
    let mut stream = loop {
        match UnixStream::connect(dir.join("agent")) {
            Ok(stream) => break stream,
            Err(_) if begin.elapsed() < PATIENCE => sleep(SOON),
            Err(e) => return Err(e).context("cannot connect to the agent inside"),
        }
    };
    stream.set_read_timeout(Some(AGAIN))?;
    let id = crate::identities::uuid();
    let quoted: String = command.bytes().map(|byte| format!("\\0{byte:03o}")).collect();
    let mut heard = String::new();
    while begin.elapsed() < PATIENCE {
        stream.write_all(format!("\n{id} {SECONDS} {quoted}\n").as_bytes())?;
        loop {
            let mut chunk = [0; 4096];
            match stream.read(&mut chunk) {
                Ok(0) => bail!("the guest has ended"),
                Ok(count) => heard.push_str(&String::from_utf8_lossy(&chunk[..count])),
                Err(_) => break,
            }
            if let Some(output) = output_of(&heard, &id) {
                return Ok(output);
            }
        }
    }
    bail!("nobody inside answers")
}

/// The output of a command, if all of the answer to its request is there: `@ID STATUS OUT ERR`, and behind that line
/// `OUT` bytes.
fn output_of(heard: &str, id: &str) -> Option<String> {
    let (header, rest) = heard.split_once(&format!("@{id} "))?.1.split_once('\n')?;
    let bytes = header.split(' ').nth(1)?.trim().parse().ok()?;
    rest.get(..bytes).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answer_is_taken_when_it_is_whole() {
        let heard = "kernel says\n@b 0 1 0\nx\n@a 0 3 0\n42\nmore";
        assert_eq!(output_of(heard, "a").as_deref(), Some("42\n"));
        for part in ["", "@a 0", "@a 0 3 0\n4", "@b 0 1 0\nx"] {
            assert_eq!(output_of(part, "a"), None, "{part}");
        }
    }
}
