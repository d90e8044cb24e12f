//! Memory that is promised to guests before they start, and the facts by which it is promised. These facts are a
//! *look*: what the process that balances memory between guests (the balancer) reads of the host at each of its rounds.
//!
//! ```text
//!   balancer: look, plan --------keep--> DIR/standing.json --\
//!                                                             +--> promise: balance::admit --> DIR/promises.json, journal
//!   who asks: command line, supervisor ----------------------/
//! ```
//!
//! | a promise is | when |
//! |---|---|
//! | used | a look finds that a guest of its name runs. A promise for several guests is not used up by the first of them |
//! | ended, replaced | the asker ends it, or has another promise made of the same name |
//! | lapsed | its time is over, and it was not used |
//!
//! `DIR/promises.lock` is held while the balancer makes a plan from the newest promises, and while a promise is made
//! from the newest look. So memory that a plan lends to a guest is not promised as well, and no two askers are promised
//! the same memory.
//!
//! A promise counts until a look has begun after the promise's end. If the guest was started in time, that look counts
//! the guest itself.

use anyhow::{Context, bail};
use balance::{Admission, Held, Reservation, Standing};
use cli::journal::{By, Journal, Line};
use host::{MemoryLimits, ProcessId};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

pub use balance::{Assurance, Wanted};

/// Longest time for which memory is promised, in seconds: 10 minutes.
pub const MOST_HOLD_S: u64 = 600;
/// Time for which memory is promised where nobody says how long, in seconds: 1 minute.
pub const USUAL_HOLD_S: u64 = 60;
/// Most guests of one promise.
pub const MOST_GUESTS: u64 = 10_000;
/// Longest name of a promise, in bytes.
const MOST_NAME_BYTES: usize = 128;
/// Most promises at a time.
const MOST_PROMISES: usize = 1024;
/// Longest of the files `standing.json` and `promises.json` that is read: 16 MiB.
const MOST_BYTES: u64 = 16 << 20;
/// Pause between two tries to get the lock: 200 us.
const PAUSE: Duration = Duration::from_micros(200);
/// A look is too old after 3 of its balancer's rounds and 30 s more.
const STALE: (u64, u64) = (3, 30);

/// A promise.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Promise {
    /// Memory.
    pub bytes: u64,
    /// Its end, in milliseconds since the host started.
    pub until_ms: u64,
    /// Number of the guests.
    pub guests: u64,
    /// Whether its asker has ended it.
    #[serde(default)]
    pub is_ended: bool,
}

impl Promise {
    /// Whether the promise is used, if `runs` says whether a guest of its name runs. A promise for several guests is
    /// not used up by the first of them.
    const fn is_used(&self, runs: bool) -> bool {
        runs && self.guests == 1
    }
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Kept {
    /// Boot id of the host to which these promises belong.
    boot: String,
    /// Number of the next promise without a name.
    next: u64,
    /// The promises, by name.
    promises: BTreeMap<String, Promise>,
}

/// What the process that balances memory has read of the host and its guests at the start of a round.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Look {
    /// Boot id of the host at the look.
    pub boot: String,
    /// The process that balances memory.
    pub balancer: ProcessId,
    /// When the look began, in milliseconds since the host started.
    pub began_ms: u64,
    /// Seconds between two rounds.
    pub every_s: u64,
    /// Control group whose memory limit counts as the host's memory; `None`: the memory of the host itself.
    pub within: Option<String>,
    /// The policy of admission for requests that name none.
    pub assurance: Assurance,
    /// The facts from which admission is computed.
    pub standing: Standing,
}

/// A request for memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Asked {
    /// The guests.
    pub wanted: Wanted,
    /// The policy; `None`: the balancer's.
    pub assurance: Option<Assurance>,
    /// Name of the promise; `None`: a name is made up.
    pub name: Option<String>,
    /// Seconds for which memory is promised; 0: nothing is promised, and only the answer is wanted.
    pub hold_s: u64,
}

/// The answer to a request for memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Answered {
    /// Name of the promise; `null` where nothing is promised.
    pub promise: Option<String>,
    /// Seconds for which it holds.
    pub held_s: Option<u64>,
    /// The decision.
    #[serde(flatten)]
    pub admission: Admission,
}

/// The figure of a group: how many more like most of its guests fit, and what a break storm takes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Fit {
    /// Further guests that fit, by the policy.
    pub more: u64,
    /// The policy.
    pub policy: Assurance,
    /// RAM of each.
    pub like_bytes: u64,
    /// Memory that a full break storm of all groups takes, promises included.
    pub storm_bytes: u64,
    /// Memory that stands against it.
    pub reserve_bytes: u64,
}

/// Parses the name of a promise, which is the name of the guest that it is for.
///
/// # Errors
/// The text is empty, too long, or not printable.
pub fn parse_name(text: &str) -> Result<String, String> {
    let is_name = !text.is_empty() && text.len() <= MOST_NAME_BYTES && cli::printable(text) == text;
    is_name.then(|| text.to_owned()).ok_or_else(|| format!("a name has 1 to {MOST_NAME_BYTES} bytes, all printable"))
}

/// The last look in a service's directory, kept in memory. Its file is read again only after it was replaced.
#[derive(Debug, Default)]
pub struct Looks(Option<(u64, SystemTime, Look)>);

impl Looks {
    /// The last look; `None` if there is none, if it is too old, or if its balancer has ended.
    pub fn fresh(&mut self, dir: &Path) -> Option<&Look> {
        let meta = fs::metadata(dir.join("standing.json")).ok()?;
        let (inode, modified) = (meta.ino(), meta.modified().ok()?);
        if self.0.as_ref().is_none_or(|(known, at, _)| (*known, *at) != (inode, modified)) {
            self.0 = Some((inode, modified, Look::read(dir).ok()??));
        }
        self.0.as_ref().map(|(_, _, look)| look).filter(|look| look.is_fresh())
    }
}

/// Error: there is no look, or the last one is too old or its balancer has ended.
#[derive(Debug)]
pub struct NoLook;

impl std::fmt::Display for NoLook {
    fn fmt(&self, out: &mut std::fmt::Formatter) -> std::fmt::Result {
        out.write_str(
            "no process balances memory here, or none has looked at it of late: have [balance] in the service's configuration, \
             or run pagefold balance apply --every 5",
        )
    }
}

impl std::error::Error for NoLook {}

/// What a line of the journal says about a promise.
#[derive(Debug, Serialize)]
#[serde(tag = "entry", rename_all = "snake_case")]
enum Entry<'a> {
    Promise { name: &'a str, bytes: u64, guests: u64, policy: Assurance, held_s: u64 },
    PromiseOver { name: &'a str, bytes: u64, became: &'static str },
}

/// All promises in a service's directory, with their lock: no other process makes a plan or a promise meanwhile.
#[derive(Debug)]
pub struct Promises {
    dir: PathBuf,
    _lock: File,
    kept: Kept,
}

impl Promises {
    /// Locks and reads the promises in a directory, which is made if it does not exist.
    ///
    /// # Errors
    /// The files cannot be used, or another process holds the lock for longer than `patience`.
    pub fn lock(dir: &Path, patience: Duration) -> anyhow::Result<Self> {
        fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let path = dir.join("promises.lock");
        let cannot = || format!("cannot lock {}", path.display());
        let Some(lock) = host::lock_file(&path, patience, PAUSE).with_context(cannot)? else {
            bail!("another process holds {}: try again", path.display());
        };
        Ok(Self { dir: dir.to_owned(), _lock: lock, kept: Kept::read(dir)? })
    }

    /// The promises that count beside a look which began at `began_ms`, without those that are used (`runs` says
    /// whether the guest of this name runs).
    pub fn reservations(&self, began_ms: u64, runs: impl Fn(&str) -> bool) -> Vec<Reservation> {
        self.kept.reservations(began_ms, runs)
    }

    /// Writes the look from which a plan was just made with all these promises, and drops the promises that are used or
    /// have lapsed by then.
    ///
    /// # Errors
    /// The files cannot be written.
    pub fn keep(&mut self, look: &Look, runs: impl Fn(&str) -> bool) -> anyhow::Result<()> {
        replace(&self.dir.join("standing.json"), look)?;
        self.drop_over(look.began_ms, runs)
    }

    /// Removes the last look, so that nothing is promised until the next one. This is for a plan that lends memory
    /// which the last look counts as free.
    ///
    /// # Errors
    /// The file cannot be removed.
    pub fn forget_look(&mut self) -> anyhow::Result<()> {
        let path = self.dir.join("standing.json");
        match fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(error).with_context(|| format!("cannot remove {}", path.display()))
            }
            _ => Ok(()),
        }
    }

    /// Drops promises that are used, and promises that have ended before `at_ms`, and writes both to the journal.
    fn drop_over(&mut self, at_ms: u64, runs: impl Fn(&str) -> bool) -> anyhow::Result<()> {
        let is_over = |name: &str, promise: &Promise| promise.is_used(runs(name)) || promise.until_ms < at_ms;
        let (over, left): (BTreeMap<_, _>, BTreeMap<_, _>) =
            std::mem::take(&mut self.kept.promises).into_iter().partition(|(name, promise)| is_over(name, promise));
        self.kept.promises = left;
        if over.is_empty() {
            return Ok(());
        }
        let became = |name: &str, promise: &Promise| match (promise.is_used(runs(name)), promise.is_ended) {
            (true, _) => "used",
            (false, true) => "ended",
            (false, false) => "lapsed",
        };
        let over = over.iter().map(|(name, promise)| (name, promise, became(name, promise)));
        let entries = over.map(|(name, promise, became)| Entry::PromiseOver { name, bytes: promise.bytes, became });
        self.write_down(&By::this_process(), entries)?;
        self.save()
    }

    /// Promises memory under this name. Zero bytes end a promise.
    ///
    /// # Errors
    /// The files cannot be written, or there are too many promises.
    pub fn set(&mut self, name: &str, bytes: u64, hold_s: u64) -> anyhow::Result<()> {
        self.set_for(&By::this_process(), (name, bytes, hold_s), (1, Assurance::Strict))
    }

    fn set_for(
        &mut self,
        by: &By,
        (name, bytes, hold_s): (&str, u64, u64),
        (guests, policy): (u64, Assurance),
    ) -> anyhow::Result<()> {
        let at_ms = host::boot_clock_ms();
        if bytes == 0 {
            let Some(promise) = self.kept.promises.get_mut(name) else { return Ok(()) };
            (promise.until_ms, promise.is_ended) = (promise.until_ms.min(at_ms), true);
            return self.save();
        }
        // Promises that no look has dropped, because no process balances memory, are dropped some time after their end.
        self.drop_over(at_ms.saturating_sub(MOST_HOLD_S.saturating_mul(1000)), |_| false)?;
        if self.kept.promises.len() >= MOST_PROMISES {
            bail!("there are {MOST_PROMISES} promises already: wait until some are used, or lapse");
        }
        let held_s = hold_s.min(MOST_HOLD_S);
        let until_ms = at_ms.saturating_add(held_s.saturating_mul(1000));
        let promise = Promise { bytes, until_ms, guests, is_ended: false };
        let before = self.kept.promises.insert(name.to_owned(), promise);
        let before = before.map(|before| Entry::PromiseOver { name, bytes: before.bytes, became: "replaced" });
        // The lines come first: each promise is in the journal, whenever this process is killed.
        let promised = Entry::Promise { name, bytes, guests, policy, held_s };
        self.write_down(by, before.into_iter().chain([promised]))?;
        self.save()
    }

    fn write_down<'a>(&self, by: &By, entries: impl Iterator<Item = Entry<'a>>) -> anyhow::Result<()> {
        let journal = Journal::of_service(&self.dir);
        let written = journal.append(entries.map(|entry| Line::now(by.clone(), "balance", entry)));
        written.with_context(|| format!("cannot write {}", journal.path().display()))
    }

    fn save(&self) -> anyhow::Result<()> {
        replace(&self.dir.join("promises.json"), &self.kept)
    }

    /// Decides by a look whether the wanted guests fit. If they do and the request wants it, the memory is promised.
    ///
    /// # Errors
    /// The request is not valid, a promise of this name is there already, it cannot be computed what the guests take,
    /// or the files cannot be used.
    pub fn ask(&mut self, look: &Look, asked: &Asked, by: &By) -> anyhow::Result<Answered> {
        if asked.wanted.guests > MOST_GUESTS {
            bail!("{MOST_GUESTS} guests at a time are the most");
        }
        asked.name.as_deref().map_or(Ok(String::new()), parse_name).map_err(anyhow::Error::msg)?;
        let assurance = asked.assurance.unwrap_or(look.assurance);
        let wanted = Wanted { assurance, ..asked.wanted.clone() };
        if let Some(name) = asked.name.as_ref().filter(|name| self.kept.promises.contains_key(*name)) {
            bail!(
                "{name} was promised memory already: pagefold balance reserve 0 --for {name} ends that, at the next look"
            );
        }
        let held = self.kept.held(look);
        let admission = balance::admit(&look.standing, &held, look.available_bytes()?, &wanted);
        let admission = admission.map_err(anyhow::Error::msg)?;
        if !admission.admitted || asked.hold_s == 0 {
            return Ok(Answered { promise: None, held_s: None, admission });
        }
        let name = asked.name.clone().unwrap_or_else(|| {
            self.kept.next = self.kept.next.wrapping_add(1);
            format!("admission-{}", self.kept.next)
        });
        let held_s = asked.hold_s.min(MOST_HOLD_S);
        self.set_for(by, (&name, admission.bytes, held_s), (wanted.guests, assurance))?;
        Ok(Answered { promise: Some(name), held_s: Some(held_s), admission })
    }
}

/// As [`Promises::ask`], by the last look in a directory.
///
/// # Errors
/// As for [`Promises::ask`]; [`NoLook`]; or another process holds the lock for longer than `patience`.
pub fn ask(dir: &Path, asked: &Asked, by: &By, patience: Duration) -> anyhow::Result<Answered> {
    // This comes before the lock, which would make the directory of a service that does not exist.
    Look::read(dir)?.ok_or(NoLook)?;
    let mut promises = Promises::lock(dir, patience)?;
    let look = Look::read(dir)?.ok_or(NoLook)?;
    promises.ask(&look, asked, by)
}

/// As [`Promises::reservations`], without the lock.
///
/// # Errors
/// The file cannot be read.
pub fn reservations(dir: &Path, began_ms: u64, runs: impl Fn(&str) -> bool) -> anyhow::Result<Vec<Reservation>> {
    Ok(Kept::read(dir)?.reservations(began_ms, runs))
}

/// How many further guests like most of a group's VMs fit, by a look; `None` if the group has no VM, or it cannot be
/// computed.
pub fn fit(dir: &Path, look: &Look, group: &str) -> Option<Fit> {
    let like_bytes = look.standing.usual_of(group)?;
    let held = Kept::read(dir).ok()?.held(look);
    let wanted = Wanted {
        memory_bytes: Some(like_bytes),
        group: Some(group.to_owned()),
        // More guests than can ever fit are asked for, because the answer says how many do fit.
        guests: u64::MAX,
        assurance: look.assurance,
        ..Wanted::default()
    };
    let found = balance::admit(&look.standing, &held, look.available_bytes().ok()?, &wanted).ok()?;
    let (storm_bytes, reserve_bytes) = (found.storm_bytes, found.reserve_bytes);
    Some(Fit { more: found.more, policy: found.policy, like_bytes, storm_bytes, reserve_bytes })
}

impl Look {
    /// Reads the last look; `None` if there is none, if it is too old, or if the host or its balancer has ended since.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read(dir: &Path) -> anyhow::Result<Option<Self>> {
        let look: Option<Self> = read(&dir.join("standing.json"))?;
        Ok(look.filter(|look| host::boot_id().is_ok_and(|boot| boot == look.boot) && look.is_fresh()))
    }

    /// Whether the look's balancer lives, and has not missed several rounds.
    pub fn is_fresh(&self) -> bool {
        let most_s = self.every_s.saturating_mul(STALE.0).saturating_add(STALE.1);
        let age_ms = host::boot_clock_ms().saturating_sub(self.began_ms);
        age_ms / 1000 <= most_s && self.balancer.is_alive()
    }

    fn available_bytes(&self) -> anyhow::Result<u64> {
        let Some(group) = &self.within else {
            return host::available_bytes().context("cannot tell how much memory is available");
        };
        let found = MemoryLimits::find().and_then(|limits| limits.bound_and_left(group));
        let (_, left) = found.with_context(|| format!("control group {group} has no memory limit"))?;
        Ok(left)
    }
}

impl Kept {
    fn read(dir: &Path) -> anyhow::Result<Self> {
        let boot = host::boot_id()?;
        let kept: Option<Self> = read(&dir.join("promises.json"))?;
        Ok(kept.filter(|kept| kept.boot == boot).unwrap_or_else(|| Self { boot, ..Self::default() }))
    }

    fn reservations(&self, began_ms: u64, runs: impl Fn(&str) -> bool) -> Vec<Reservation> {
        let counts =
            |(name, promise): &(&String, &Promise)| promise.until_ms >= began_ms && !promise.is_used(runs(name));
        let counted = self.promises.iter().filter(counts);
        counted.map(|(name, promise)| Reservation { name: name.clone(), bytes: promise.bytes }).collect()
    }

    /// The promises that count beside a look: those that have not ended before it began.
    fn held(&self, look: &Look) -> Vec<Held> {
        let at_ms = host::boot_clock_ms();
        let counts = |promise: &&Promise| promise.until_ms >= look.began_ms;
        let left_s = |promise: &Promise| promise.until_ms.saturating_sub(at_ms).div_ceil(1000);
        let held = |promise: &Promise| Held { bytes: promise.bytes, left_s: left_s(promise) };
        self.promises.values().filter(counts).map(held).collect()
    }
}

fn read<T: DeserializeOwned>(path: &Path) -> anyhow::Result<Option<T>> {
    if !path.exists() {
        return Ok(None);
    }
    let bytes = host::read_plain_file(path, MOST_BYTES)?;
    let hint = || format!("{} is damaged: remove it", path.display());
    serde_json::from_slice(&bytes).map(Some).with_context(hint)
}

/// Replaces a file as a whole. It is not synced to disk, because its content is void after a restart of the host.
fn replace(path: &Path, content: &impl Serialize) -> anyhow::Result<()> {
    let next = path.with_extension("next");
    let write = || {
        let mut file = File::options().create(true).write(true).truncate(true).mode(0o600).open(&next)?;
        file.write_all(&serde_json::to_vec(content)?)?;
        fs::rename(&next, path)
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
#[path = "promise_tests.rs"]
mod tests;
