//! A lab: brings guests up, keeps track of them, and ends them.

use crate::cache::{Cache, remove_dir};
use crate::error::{Error, Result};
use crate::guest::Guest;
use crate::image::Workshop;
use crate::life::{self, Mark, Patience};
use crate::lxc::Container;
use crate::settle::{self, Idle, Settled};
use crate::spec::Spec;
use crate::start::{self, Source, Started};
use crate::state::{Entry, Image, Store};
use crate::{name, place, program, saved};
use host::ProcessId;
use serde_json::json;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// Time limits when guests are ended: 3 s from the request to the VMM or LXC's monitor to `SIGTERM`, and 3 s from there
/// to `SIGKILL`.
const PATIENCE: Patience = Patience { before_asking: Duration::from_secs(3), before_forcing: Duration::from_secs(3) };

/// Longest process name that the kernel keeps, in bytes. Other commands know a guest that is a plain process by that
/// name.
const PROCESS_NAME_MAX: usize = 15;

/// Steps of a long operation, reported to its caller.
#[derive(Clone, Debug)]
pub enum Progress<'a> {
    /// The image of these guests, or a part of it, is missing and is being built.
    Building(Image),
    /// A guest is booted, so that it can be saved.
    Saving,
    /// VMs are emulated, for this reason.
    Emulated(&'a str),
    /// This number of guests was started.
    Started(usize),
    /// A guest is ready; the time is that since its start.
    Ready(&'a str, Duration),
    /// The busiest guest uses this share of a CPU.
    Busiest(f64),
}

/// A directory of guests.
#[derive(Clone, Debug)]
pub struct Lab {
    store: Store,
}

impl Lab {
    /// The lab in this directory. The first [`Lab::up`] creates the directory.
    ///
    /// # Errors
    /// The path is relative and the working directory is gone.
    pub fn open(dir: &Path) -> Result<Self> {
        let dir = std::path::absolute(dir).map_err(|e| Error::file("find", dir, e))?;
        Ok(Self { store: Store::new(dir) })
    }

    /// Directory of the lab.
    pub fn dir(&self) -> &Path {
        self.store.dir()
    }

    /// Path of the file that assigns guests to groups, for `pagefold census --groups`.
    pub fn groups_file(&self) -> PathBuf {
        self.store.groups_file()
    }

    /// The lab's guests, in the order in which they were started.
    ///
    /// # Errors
    /// The state file cannot be read.
    pub fn guests(&self) -> Result<Vec<Guest>> {
        Ok(self.store.guests()?.into_iter().map(|entry| Guest::new(entry, self.dir())).collect())
    }

    /// The guest of this name.
    ///
    /// # Errors
    /// There is no such guest, or the state file cannot be read.
    pub fn guest(&self, name: &str) -> Result<Guest> {
        let found = self.guests()?.into_iter().find(|guest| guest.name == name);
        found.ok_or_else(|| {
            Error::usage(format!(
                "no guest {name} in {}: pagefold lab list shows those there are",
                self.dir().display()
            ))
        })
    }

    /// Brings guests up, all at once, and waits until each reports that it is ready. If one fails, or this process is told
    /// to end ([`host::interrupted`]), all guests that this call started are ended.
    ///
    /// # Errors
    /// The request makes no sense, the host lacks something, or a guest does not come up.
    pub fn up(&self, spec: &Spec, cache: &Cache, progress: &(dyn Fn(Progress) + Sync)) -> Result<Vec<Guest>> {
        spec.check()?;
        let locked = self.store.lock_or_make()?;
        let token = locked.state.token.clone();
        let first = locked.state.guests.iter().filter(|guest| guest.image == spec.image).count();
        drop(locked);
        let building = |name: &str| {
            progress(if name.starts_with(saved::NAME) { Progress::Saving } else { Progress::Building(spec.image) });
        };
        let workshop = Workshop { cache, mark: &Mark::of_guest(&token, ".prepare"), building: &building };
        let emulated = |why: &str| progress(Progress::Emulated(why));
        let source = Source::prepare((spec, spec.first_saved + first), &workshop, self.dir(), &emulated)?;
        let names = self.enter(spec, &source, cache)?;
        let ready = self.start_all(spec, &source, &names).and_then(|started| {
            progress(Progress::Started(started.len()));
            self.wait_all(spec, started, progress)
        });
        if let Err(error) = ready {
            let interrupted = host::interrupted().is_some();
            let error = if interrupted { Error::Interrupted(names.join(", ")) } else { error };
            return Err(match self.end_guests(&names) {
                Ok(()) => error,
                Err(left) => Error::guest(&names.join(", "), format!("{error}; and cannot be ended: {left}")),
            });
        }
        Ok(self.guests()?.into_iter().filter(|guest| names.contains(&guest.name)).collect())
    }

    /// Chooses names for the guests, and writes them to the state file before any is started.
    fn enter(&self, spec: &Spec, source: &Source, cache: &Cache) -> Result<Vec<String>> {
        let mut locked = self.store.lock_or_make()?;
        let taken = locked.state.guests.iter().map(|guest| guest.name.clone()).collect();
        let dealt = name::deal(&spec.groups, spec.guests, &taken);
        let names: Vec<String> = dealt.iter().map(|(_, name)| name.clone()).collect();
        if let Some(name) = names.iter().find(|name| spec.image == Image::Process && name.len() > PROCESS_NAME_MAX) {
            let text = format!("a process is called {PROCESS_NAME_MAX} bytes at most, and {name} is longer");
            return Err(Error::usage(format!("{text}: take shorter names of groups")));
        }
        for (group, name) in dealt {
            // A copy of a root directory is too big for the lab's directory, which is usually in memory.
            let copies = cache.dir().join("copies");
            let copied = spec.image.is_copied();
            locked.state.guests.push(Entry {
                copied_root: copied.then(|| copies.join(format!("{}-{name}", locked.state.token))),
                name,
                group,
                image: spec.image,
                memory_bytes: (!spec.image.is_container()).then(|| spec.memory_bytes()),
                accelerator: source.accelerator(),
                process: None,
                ready_ms: None,
                starter: ProcessId::of(std::process::id()).ok(),
            });
        }
        locked.save()?;
        Ok(names)
    }

    /// Starts the guests of these names, with the lab's lock held.
    fn start_all(&self, spec: &Spec, source: &Source, names: &[String]) -> Result<Vec<Started>> {
        let mut locked = self.store.lock_or_make()?;
        let mut all = Vec::with_capacity(names.len());
        for (number, name) in names.iter().enumerate() {
            if host::interrupted().is_some() {
                return Err(Error::guest(name, "not started: interrupted"));
            }
            let ended = || Error::guest(name, "was ended by somebody else before it was started");
            let entry = locked.guest_mut(name).ok_or_else(ended)?.clone();
            let dir = self.dir().join(name);
            place::private_dir(&dir)?;
            if let (Some(copy), Source::Container { root }) = (&entry.copied_root, source) {
                copy_tree(root, copy)?;
            }
            let mark = Mark::of_guest(&locked.state.token, name);
            let started = start::start((spec, number), source, &entry, &dir, &mark)?;
            locked.guest_mut(name).ok_or_else(ended)?.process = Some(started.process);
            locked.save()?;
            all.push(started);
        }
        Ok(all)
    }

    /// Waits for all guests at once. Writes each to the state file as ready when it is.
    fn wait_all(&self, spec: &Spec, started: Vec<Started>, progress: &(dyn Fn(Progress) + Sync)) -> Result<()> {
        let wait = |mut guest: Started| -> Result<()> {
            let time = guest.wait_ready(spec.patience)?;
            if let Some(fold) = spec.fold.as_ref().filter(|_| spec.image.is_container()) {
                guest.attach(fold)?;
            }
            if let Some(mut locked) = self.store.lock()? {
                if let Some(entry) = locked.guest_mut(&guest.name) {
                    entry.ready_ms = u64::try_from(time.as_millis()).ok();
                }
                locked.save()?;
            }
            progress(Progress::Ready(&guest.name, time));
            Ok(())
        };
        let processes: Vec<ProcessId> = started.iter().map(|guest| guest.process).collect();
        let all_done = AtomicBool::new(false);
        thread::scope(|scope| {
            let wait = &wait;
            scope.spawn(|| end_if_interrupted(&processes, &all_done));
            let _done = Done(&all_done);
            let waiting: Vec<_> = started.into_iter().map(|guest| scope.spawn(move || wait(guest))).collect();
            waiting.into_iter().try_for_each(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
        })
    }

    /// Waits until all guests are idle at the same time, or until `patience` has passed.
    ///
    /// # Errors
    /// The state file cannot be read.
    pub fn settle(&self, idle: Idle, patience: Duration, progress: &dyn Fn(Progress)) -> Result<Settled> {
        let processes: Vec<ProcessId> = self.guests()?.iter().filter_map(Guest::process).collect();
        Ok(settle::settle(&processes, idle, patience, &|share| progress(Progress::Busiest(share))))
    }

    /// Ends all guests and removes everything of the lab but the images. Returns the names of the guests that it had.
    /// Also cleans up after an interrupted [`Lab::up`] or [`Lab::down`].
    ///
    /// # Errors
    /// A process does not end, or something cannot be removed. The lab then still exists, for another try.
    pub fn down(&self) -> Result<Vec<String>> {
        let Some(locked) = self.store.lock()? else { return Ok(Vec::new()) };
        let guests = &locked.state.guests;
        self.end_under_lock(guests, &Mark::of_lab(&locked.state.token))?;
        remove_dir(self.dir())?;
        Ok(guests.iter().map(|guest| guest.name.clone()).collect())
    }

    /// Ends some guests and removes them from the state file.
    fn end_guests(&self, names: &[String]) -> Result<()> {
        let Some(mut locked) = self.store.lock()? else { return Ok(()) };
        for name in names {
            let mark = Mark::of_guest(&locked.state.token, name);
            let (ending, staying): (Vec<Entry>, Vec<Entry>) =
                locked.state.guests.iter().cloned().partition(|guest| guest.name == *name);
            self.end_under_lock(&ending, &mark)?;
            locked.state.guests = staying;
            locked.save()?;
        }
        Ok(())
    }

    /// Ends these guests and all processes that bear `mark`, and removes the guests' files. Writes nothing, because the
    /// guests may have filled the disk.
    fn end_under_lock(&self, ending: &[Entry], mark: &Mark) -> Result<()> {
        thread::scope(|scope| {
            for entry in ending {
                scope.spawn(|| self.ask_to_end(entry));
            }
        });
        let mut processes: Vec<ProcessId> = ending.iter().filter_map(|entry| entry.process).collect();
        processes.extend(mark.bearers());
        if let Some(left) = life::end(&processes, PATIENCE).first() {
            let names: Vec<&str> = ending.iter().map(|entry| entry.name.as_str()).collect();
            return Err(Error::guest(&names.join(", "), format!("process {} does not end; try again", left.pid)));
        }
        for entry in ending {
            if entry.image.is_container() {
                self.container(entry).remove_control_groups();
            }
            entry.copied_root.as_deref().map_or(Ok(()), remove_dir)?;
            remove_dir(&self.dir().join(&entry.name))?;
        }
        Ok(())
    }

    /// Asks a guest to end: by QMP, by `lxc-stop` or by `SIGTERM`. Whether that works shows in the guest's process.
    fn ask_to_end(&self, entry: &Entry) {
        if entry.image.is_container() {
            self.container(entry).stop();
        } else if entry.image.is_vm() {
            let qmp = Guest::new(entry.clone(), self.dir()).qmp(Duration::from_secs(1));
            let _ = qmp.map(|mut qmp| qmp.execute("quit", json!({})));
        } else if let Some(process) = entry.process {
            process.terminate();
        }
    }

    fn container<'a>(&self, entry: &'a Entry) -> Container<'a> {
        Container { name: &entry.name, dir: self.dir().join(&entry.name) }
    }
}

/// Interval between two checks whether this process was told to end: 20 ms.
const LOOK: Duration = Duration::from_millis(20);

/// Sets the flag when it is dropped, which happens in a panic, too.
struct Done<'a>(&'a AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Ends these processes when this process is told to end. Threads that wait for them then see that they are gone.
fn end_if_interrupted(processes: &[ProcessId], all_done: &AtomicBool) {
    while !all_done.load(Ordering::SeqCst) {
        if host::interrupted().is_some() {
            processes.iter().for_each(|process| _ = process.terminate());
            return;
        }
        thread::sleep(LOOK);
    }
}

fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    let parent = to.parent().unwrap_or(to);
    std::fs::create_dir_all(parent).map_err(|e| Error::file("make", parent, e))?;
    program::output(program::command("cp")?.arg("-a").arg(from).arg(to)).map(drop)
}
