//! Saves a clone to a file, and restores it later by copying its memory, with the clone's own name and addresses.
//!
//! The file begins with a line of JSON that describes the clone, followed by QEMU's migration stream with the memory in
//! it. The file's name ends with `.part` until it is complete.

use super::job::{Hand, Job, Slot, start, wait_loaded};
use super::{Cloned, Clones, Wanted};
use crate::folding::Folding;
use crate::machine;
use crate::memory;
use crate::place::{lock, private_dir};
use crate::record::{Record, State};
use crate::saving;
use crate::store::Store;
use crate::template::{Template, Vmm};
use crate::vmm;
use anyhow::{Context, bail};
use cli::exit::Stop;
use guest::qmp::{Qmp, QmpError};
use host::ProcessId;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// First word of the file, by which a saved clone is recognized.
const MAGIC: &str = "pagefold-saved-1 ";
/// Longest first line, in bytes.
const HEADER_BYTES: u64 = 1 << 20;
/// Longest time for a state to be written: 600 s.
const WRITING: Duration = Duration::from_secs(600);

/// Longest wait for a clone to run again after the process that saved it was killed: 10 s. Interval between two
/// attempts: 20 ms.
const GOING_ON: Duration = Duration::from_secs(10);
const SOON: Duration = Duration::from_millis(20);

/// The description of a saved clone, in the first line of the file.
#[derive(Serialize, Deserialize)]
struct Header {
    record: Record,
    words: Vec<String>,
    vmm: Vmm,
    has_helper: bool,
    disk: Option<PathBuf>,
}

impl Clones {
    /// Writes a clone to a file. It is stopped meanwhile, and goes on afterwards.
    ///
    /// # Errors
    /// The clone has a disk that it may have written, and the state does not contain the disk. Or the file cannot be
    /// written.
    pub fn save(&self, clone: &Record, template: &Template, dir: &Path, file: &Path) -> anyhow::Result<()> {
        clone.check_own_machine("saved")?;
        if template.disk.is_some() {
            let text = format!("{} has a disk, whose writes go to a file without a name that ends with it", clone.name);
            return Err(Stop::Usage(format!("{text}: shut it down, or make a template of it")).into());
        }
        let process = clone.process.context("a clone that lives has a process")?;
        self.note_saver(&clone.name, Some(ProcessId::of(std::process::id())?))?;
        let written =
            write_file(file, &header(clone, template, dir), |part| write(&self.dir_of(&clone.name), &process, part));
        self.note_saver(&clone.name, None).and(written)
    }

    /// Notes the process that has stopped a clone, so that the clone goes on if that process is killed.
    fn note_saver(&self, name: &str, saver: Option<ProcessId>) -> anyhow::Result<()> {
        let _lock = lock(&self.dir)?;
        let dir = self.dir_of(name);
        // A clone that has ended meanwhile has no record.
        Record::read(&dir).map_or(Ok(()), |record| Record { saver, ..record }.write(&dir))
    }

    /// Writes a template as a file that [`Self::restore`] takes: for measuring what copying takes.
    ///
    /// # Errors
    /// As for [`Self::make`], or the file cannot be written.
    pub fn save_template(&self, wanted: &Wanted, file: &Path) -> anyhow::Result<()> {
        private_dir(&self.dir)?;
        let device = wanted.template.device(wanted.dir)?;
        let (memory, slots) = self.reserve(wanted, false)?;
        let job = Job { clones: self, wanted, device: &device, memory: &memory };
        let slot = slots.into_iter().next().context("no name")?;
        let header = header(&slot.record, wanted.template, wanted.dir);
        write_file(file, &header, |part| job.write_whole(slot, &std::path::absolute(part)?))
    }

    /// Restores a saved clone, under the name that it had, or under another. Under another name, it gets a new
    /// identity. If a service folded it, it is folded again, also onto its template, as long as the template is in the
    /// `store`.
    ///
    /// # Errors
    /// The file is no saved clone, a clone of this name lives, QEMU has another version, or the helper does not answer.
    pub fn restore(
        &self,
        file: &Path,
        name: Option<&str>,
        hand: (bool, Duration),
        store: &Store,
    ) -> anyhow::Result<Cloned> {
        let (header, offset) = read_header(file)?;
        header.vmm.check(Path::new(&header.words[0]))?;
        let name = name.unwrap_or(&header.record.name).to_owned();
        private_dir(&self.dir)?;
        let folding = Folding::again(&header.record)?;
        let mut slot = self.take_name(&header.record, name, folding.as_ref())?;
        let begin = Instant::now();
        let hand = Hand { has_helper: header.has_helper, allow_unconfirmed: hand.0, patience: hand.1 };
        let disk = header.disk.unwrap_or_default();
        if let Err(why) = self.offer_template(&slot.record, folding.as_ref(), store) {
            cli::say!("pagefold: {} is not folded onto its template: {why:#}", slot.record.name);
        }
        let loaded = self.read_state(&mut slot, &header.words, &disk, (file, offset), begin + hand.patience);
        let restored = loaded.and_then(|qmp| hand.out(&mut slot, qmp, begin));
        if restored.is_err() {
            self.forget(&slot.record)?;
        }
        restored.with_context(|| format!("{} cannot be restored from {}", slot.record.name, file.display()))
    }

    /// Reserves a name for a saved clone, by recording the clone.
    fn take_name(&self, saved: &Record, name: String, folding: Option<&Folding>) -> anyhow::Result<Slot> {
        let _lock = lock(&self.dir)?;
        let dir = self.dir_of(&name);
        let taken = self.tidy()?.iter().any(|clone| clone.name == name);
        crate::names::deal(&name, 1, &taken.then(|| name.clone()).into_iter().collect())?;
        private_dir(&dir)?;
        // Under another name, the clone is another guest, because the original may still live.
        let same = saved.identity.as_ref().filter(|_| name == saved.name);
        let record = Record {
            name,
            state: State::Starting,
            process: None,
            starter: Some(ProcessId::of(std::process::id())?),
            memory: None,
            saver: None,
            identity: same.map(|identity| identity.again()),
            service: folding.map(|folding| folding.dir().to_owned()),
            ..saved.clone()
        };
        record.write(&dir)?;
        Ok(Slot { record, dir })
    }

    /// Has the service load the template of a restored clone, so that the clone's pages can be folded onto it. Nothing
    /// is done if the template is gone, or was made anew since.
    fn offer_template(&self, clone: &Record, folding: Option<&Folding>, store: &Store) -> anyhow::Result<()> {
        let Some(folding) = folding else { return Ok(()) };
        let Ok((template, dir)) = store.find(&clone.group, &clone.template) else { return Ok(()) };
        if !clone.is_of(&template) {
            return Ok(());
        }
        let _lock = lock(&self.dir)?;
        memory::of(&template, &dir, &self.tidy()?, Some(folding)).map(drop)
    }

    fn read_state(
        &self,
        slot: &mut Slot,
        words: &[String],
        disk: &Path,
        (file, offset): (&Path, u64),
        deadline: Instant,
    ) -> anyhow::Result<Qmp> {
        let file = std::path::absolute(file)?;
        let mut qmp = start(self, slot, words, disk, None, deadline)?;
        let uri = format!("exec:tail -c +{} {}", offset + 1, saving::quoted(&file));
        qmp.execute("migrate-incoming", json!({"uri": uri}))?;
        wait_loaded(&mut qmp, &slot.dir, deadline)?;
        Ok(qmp)
    }
}

fn header(record: &Record, template: &Template, dir: &Path) -> Header {
    Header {
        record: record.clone(),
        words: machine::to_restore(&template.words),
        vmm: template.vmm.clone(),
        has_helper: template.has_helper,
        disk: template.disk.as_ref().map(|_| dir.join("disk")),
    }
}

/// Writes a file: the first line, and behind it what `append` writes.
fn write_file(file: &Path, header: &Header, append: impl FnOnce(&Path) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let part = file.with_added_extension("part");
    let begin = || -> std::io::Result<()> {
        let mut part = File::options().create(true).write(true).truncate(true).mode(0o600).open(&part)?;
        writeln!(part, "{MAGIC}{}", serde_json::to_string(header)?)
    };
    begin().with_context(|| format!("cannot write {}", part.display()))?;
    let written = append(&part)
        .and_then(|()| fs::rename(&part, file).with_context(|| format!("cannot rename {}", part.display())));
    if written.is_err() {
        let _ = fs::remove_file(&part);
    }
    written
}

/// Has the QEMU of a clone stop the guest, append its state to a file, and let the guest run again.
fn write(dir: &Path, process: &ProcessId, to: &Path) -> anyhow::Result<()> {
    let deadline = Instant::now() + WRITING;
    let to = std::path::absolute(to)?;
    let mut qmp = vmm::connect(dir, process, deadline)?;
    qmp.execute("stop", json!({}))?;
    // QEMU was told to leave out memory when it read the template's state.
    let written = vmm::leave_out_memory(&mut qmp, false)
        .map_err(anyhow::Error::from)
        .and_then(|()| saving::append_state(&mut qmp, &to, deadline));
    qmp.execute("cont", json!({}))?;
    written
}

/// Lets a clone run again if the process that had stopped it to save it was killed. Returns its record.
pub(super) fn let_go_on(clone: Record, dir: &Path) -> Record {
    let (Some(process), Some(_)) = (clone.process, clone.saver.filter(|saver| !saver.is_alive())) else { return clone };
    let free = Record { saver: None, ..clone.clone() };
    match go_on(dir, &process).and_then(|()| free.write(dir)) {
        Ok(()) => free,
        Err(why) => {
            cli::say!("pagefold: {} stands still since the process that saved it was killed: {why:#}", clone.name);
            clone
        }
    }
}

fn go_on(dir: &Path, process: &ProcessId) -> anyhow::Result<()> {
    let deadline = Instant::now() + GOING_ON;
    let mut qmp = vmm::connect(dir, process, deadline)?;
    // The rest of the state is not needed, so writing is cancelled.
    qmp.execute("migrate_cancel", json!({}))?;
    loop {
        match qmp.execute("cont", json!({})) {
            // QEMU is about to finish the state that it writes.
            Err(QmpError::Refused { .. }) if Instant::now() < deadline => sleep(SOON),
            done => return Ok(done.map(drop)?),
        }
    }
}

/// The description in a file's first line, and the offset at which QEMU's state begins.
fn read_header(file: &Path) -> anyhow::Result<(Header, u64)> {
    let open = File::open(file).with_context(|| format!("cannot open {}", file.display()))?;
    let mut line = String::new();
    let read = BufReader::new(std::io::Read::take(open, HEADER_BYTES)).read_line(&mut line);
    let header = read.ok().and_then(|_| serde_json::from_str(line.strip_prefix(MAGIC)?).ok());
    let Some(header) = header else { bail!("{} is no saved clone: pagefold save writes one", file.display()) };
    Ok((header, line.len() as u64))
}
