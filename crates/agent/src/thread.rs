//! The agent's thread. It connects to the worker, does what the worker asks, looks for pages that have rested, and
//! reports statistics.
//!
//! ```text
//!              connect                 Welcome, segments, lease                 Pace
//!   APART ------------------> CONNECTED ------------------------> INTRODUCED --------> AT WORK: Held, then rounds
//!     ^  (again and again)        |                                    |                   |
//!     `---------------------------+------------------------------------+-------------------'
//!              the worker hung up, sent a message that no worker sends, or reads nothing
//! ```
//!
//! While there is no connection to a worker, nothing is folded. Folded pages need no worker: the kernel handles their
//! faults.

mod looks;
mod report;
mod state;
mod told;

use crate::cpu_time::cpu_time;
use crate::fold::{Folder, donate, find_broken};
use crate::follow::Following;
use crate::forks::Forks;
use crate::give_way::CHANGES_EVERY;
use crate::link::Link;
use crate::pool::Pool;
use crate::program::Program;
use crate::round::Rounds;
use crate::section::Section;
use crate::table;
use crate::witness::Silence;
use crate::world;
use crate::{arena, forks, give_way, home, inherit, keeper, maps};
use act::{HUGE_PAGES, Purpose, Role, SharedMark, Userfault};
use host::{Pagemap, ProcessId, ProcessStat};
use looks::{Activity, Looks};
use page::PageRange;
use policy::LIFE;
use report::report;
use rustix::fd::OwnedFd;
use rustix::time::ClockId;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use told::Told;
use wire::{FoldMode, Hello, HugePages, MemberStats, Outcome, Pace, ToAgent, ToWorker, VERSION};

/// Name of the prover's socket, beside the socket that agents connect to.
const PROVER: &str = "prove.sock";
/// Shortest and longest time between two attempts to connect: 100 ms, 5 s.
const RECONNECT: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// Shortest and longest time between two reports of statistics to the worker: 1 s, 10 s. The time doubles with each
/// report without news.
const STATS_EVERY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(10));
/// Longest time from a fold to the next report of statistics: 100 ms.
const STATS_SOON: Duration = Duration::from_millis(100);
/// Longest time between two checks of states whose change wakes nobody: 1 s.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// A sleep of the agent's thread that is longer than this counts as a rest, during which changes of memory by the
/// program wake the thread: 500 ms.
const REST: Duration = Duration::from_millis(500);
/// Share of the pages of a huge page (2 MiB) that may be missing when it is collapsed in a member that is being
/// unfolded: 1/4.
const UNFOLDED_MISSING: u64 = 4;
/// Free memory that the agent's arena must have before a round: 4 MiB.
const ROUND_BYTES: usize = 4 << 20;
/// Longest time for which mappings are given back in a process that forks often: 2 s.
const WITHDRAW_TIME: Duration = Duration::from_secs(2);
/// Longest time for which mappings are given back when as many children live as can be followed: 1 min.
const WITHDRAW_ALL_TIME: Duration = Duration::from_secs(60);
/// Most runs in one message to the worker.
const RUNS: usize = 2048;
/// Time since the last fold or donation after which the page-table entries of slots that were read for comparisons are
/// dropped, and the memory of the donation window is given back: 2 s.
const VIEW_RESTS: Duration = Duration::from_secs(2);

/// Reason for the end of a connection that is sent to the worker if the agent was told to leave the process.
const LEAVES: &str = "its agent leaves the process";

/// Number of connections that the worker closed without giving the agent a lease, after which the agent of a forked
/// child gives up: most of a minute.
const MOST_REFUSALS: u32 = 12;

/// The settings with which this process was enrolled.
#[derive(Debug)]
pub struct Asked {
    /// The socket to connect to.
    pub socket: PathBuf,
    /// Whether all private anonymous memory is enrolled.
    pub all_anonymous: bool,
    /// The most mappings that the process may have before no more are spent on folding; `None`: half of the kernel's
    /// limit.
    pub most_vmas: Option<u64>,
    /// Whether to find written pages by fingerprints and not by the kernel's notes of writes, as on a kernel without
    /// `WP_ASYNC`.
    pub compare_fingerprints: bool,
    /// Whether to fold resting pages without asking whether the folds will last.
    pub eager: bool,
    /// The kernel's release (`uname -r`), by which it is known which bugs the kernel has.
    pub kernel: String,
    /// Time after which forked children enrol; `None` if they do not.
    pub children_after: Option<Duration>,
}

impl Asked {
    /// The reason why nothing may be folded on this kernel, given the host's present state (swap); `None` if pages may
    /// be folded.
    fn refusal(&self) -> Option<String> {
        host::refuses_folding(&self.kernel, host::has_swap())
    }
}

/// The state of the agent that outlives connections to workers.
struct Agent {
    asked: &'static Asked,
    program: &'static dyn Program,
    folder: Result<Folder, String>,
    pagemap: Pagemap,
    pool: Pool,
    rounds: Rounds,
    stats: MemberStats,
    cpu_before: Duration,
    /// What [`History::folds`](policy::History::folds) said when this connection began.
    folds_before: (u64, u64),
    began: Instant,
    broken_looks: Looks,
    viewed: Option<Instant>,
    activity: Activity,
    /// Whether a program to which the agent was attached while it ran has been seen idle since.
    began_quiet: bool,
    /// The lease, by whose mapping the worker sees that this process, or a child of it, may still map slots. It
    /// outlives the connection, as these mappings do.
    lease: Option<SharedMark>,
    /// Leases of former connections, kept until the worker of this connection has read which slots this process maps.
    former_leases: Vec<SharedMark>,
    /// The time for which no keeper is asked, because it did not answer.
    silence: Silence,
    forks: Forks,
    /// Whether there may be pages that map a pool without a worker.
    has_orphans: bool,
    /// Number of forks, as the follower counts them, that `forks` knows of.
    births: u64,
    /// When memory with homes was last looked for: the number of enrolled mappings of files, and of segments that were
    /// offered.
    tried: (usize, u64),
    /// While mappings are given back: the most mappings that may stay, and when to stop at the latest.
    withdrawing: Option<(u64, Instant)>,
}

/// The state of one connection to a worker.
struct Session {
    link: Link,
    window: Option<OwnedFd>,
    /// Time of the last copy of pages into the window; `None` once the window's memory has been given back.
    donated: Option<Instant>,
    /// A lease that is to replace the former one as soon as the worker has been told which slots this process maps.
    offered: Option<(u32, SharedMark)>,
    pace: Option<Pace>,
    /// Number of pages that may become private when they are unfolded: the worker has promised memory for them.
    room: u64,
    unfolded: bool,
    told: Told,
}

impl Session {
    /// Gives the window's memory back when nothing was donated for a while, and the worker has read all messages.
    fn rest_window(&mut self, now: Instant) {
        if self.donated.is_some_and(|donated| now - donated > VIEW_RESTS) && self.link.is_read() {
            self.donated = None;
            // If it fails, the memory stays until the connection ends.
            let _ = self.window.as_ref().map(act::empty_file);
        }
    }
}

/// Files that a process may not be able to open any more once it has given up its rights, as forked children often do.
pub struct Files {
    pagemap: Pagemap,
    /// An idle userfaultfd, and one that notes writes if this kernel supports that.
    userfaults: io::Result<(Userfault, Option<Userfault>)>,
}

impl Files {
    /// Opens all of these files in the calling thread's table of files.
    ///
    /// # Errors
    /// This process cannot read its own page table, or `/proc` is that of another PID namespace: process numbers there
    /// are not those of system calls.
    pub fn open(asked: &Asked) -> io::Result<Self> {
        if !host::proc_is_ours() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        Ok(Self::with(Pagemap::own().map_err(io::Error::other)?, asked))
    }

    /// Opens the userfaultfds in the calling thread's table of files.
    pub fn with(pagemap: Pagemap, asked: &Asked) -> Self {
        let notes = || if asked.compare_fingerprints { Ok(None) } else { open_notes() };
        let userfaults = Userfault::open_idle().and_then(|idle| Ok((idle, notes()?)));
        Self { pagemap, userfaults }
    }
}

/// Runs the agent in this process until the process ends, or the agent is to leave it. `is_child`: the process was
/// forked by a member, and its table has memory that it inherited.
///
/// # Errors
/// This process cannot read its own list of mappings.
pub fn run(asked: &'static Asked, files: Files, is_child: bool, program: &'static dyn Program) -> io::Result<()> {
    let mut agent = Agent::new(asked, files, program)?;
    if is_child {
        let notes = agent.folder.as_ref().ok().and_then(|folder| folder.section().notes());
        inherit::compare(notes).map_err(|()| io::ErrorKind::PermissionDenied)?;
    }
    if is_child || !world::is_hooked() && may_share_pages() {
        agent.rounds.leave_shared();
    }
    let mut pause = RECONNECT.0;
    let mut refusals = 0;
    loop {
        if program.is_leaving() && agent.leave() {
            return Ok(());
        }
        if let Ok(link) = Link::connect(&agent.asked.socket) {
            let began = Instant::now();
            agent.serve(link);
            refusals += u32::from(agent.lease.is_none() && agent.former_leases.is_empty());
            if is_child && refusals >= MOST_REFUSALS {
                return Err(io::ErrorKind::ConnectionRefused.into());
            }
            if began.elapsed() > RECONNECT.1 {
                pause = RECONNECT.0;
            }
        }
        program.sleep(pause);
        pause = page::doubled(Some(pause), RECONNECT);
    }
}

/// Whether the program may share pages with a parent or a child that was forked, judged by the processes that exist
/// when the agent starts.
fn may_share_pages() -> bool {
    let own = std::process::id();
    ProcessStat::read(own).is_ok_and(|stat| stat.forked) || !host::children(own).is_empty()
}

fn open_folder(asked: &Asked, watch: Userfault, notes: Option<Userfault>) -> io::Result<Folder> {
    let prover = asked.socket.with_file_name(PROVER);
    let following = if keeper::begin_followed(&prover, &watch).is_ok() {
        follow(asked, watch, true)?
    } else {
        // Another userfaultfd is opened, because a late keeper may still begin the first one.
        let other = Userfault::open(Purpose::Follow).or_else(|_| watch.begin(Purpose::Follow).map(|()| watch))?;
        follow(asked, other, false)?
    };
    let section = Section::new(following, notes)?;
    give_way::publish(&section);
    Folder::new(section, asked.most_vmas, prover)
}

fn follow(asked: &Asked, watch: Userfault, forks: bool) -> io::Result<Arc<Following>> {
    let following = Following::start(watch, forks, asked.socket.with_file_name(PROVER))?;
    if asked.all_anonymous || !world::is_hooked() {
        // The program has not enrolled its memory itself, so it may change the memory in any way.
        following.expect_discards();
    }
    table::lock().follow_forks(forks);
    following.publish();
    Ok(following)
}

/// Follows forks from here on if a keeper can be reached now. Nothing may lie in mappings of the pool.
fn follow_forks(asked: &Asked, folder: &mut Folder, silence: &mut Silence) {
    if silence.lasts() {
        return;
    }
    let prover = asked.socket.with_file_name(PROVER);
    let opened = Userfault::open_idle().and_then(|watch| keeper::begin_followed(&prover, &watch).map(|()| watch));
    if matches!(&opened, Err(e) if e.kind() == io::ErrorKind::TimedOut) {
        silence.begin();
    }
    let Ok(watch) = opened else { return };
    silence.end();
    if let Ok(following) = follow(asked, watch, true) {
        folder.follow_by(&following);
        give_way::publish(folder.section());
    }
}

/// The userfaultfd that notes writes; `None` on a kernel that cannot note them.
fn open_notes() -> io::Result<Option<Userfault>> {
    match Userfault::open(Purpose::Note) {
        Ok(notes) => Ok(Some(notes)),
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => Ok(None),
        Err(e) => Err(e),
    }
}

impl Agent {
    fn new(asked: &'static Asked, files: Files, program: &'static dyn Program) -> io::Result<Self> {
        let Files { pagemap, userfaults } = files;
        let opened = userfaults.and_then(|(watch, notes)| open_folder(asked, watch, notes)).map_err(|e| {
            match e.raw_os_error() {
                Some(libc::EINVAL) => "the kernel has no UFFDIO_MOVE: Linux 6.8 or newer is needed".to_owned(),
                Some(libc::EPERM) => {
                    "this process may not use userfaultfd: see vm.unprivileged_userfaultfd and /dev/userfaultfd"
                        .to_owned()
                }
                Some(libc::EFBIG) => {
                    "the size of files is limited (RLIMIT_FSIZE), and so that of the agent's memory files".to_owned()
                }
                _ => format!("cannot open a userfaultfd: {e}"),
            }
        });
        if asked.eager {
            table::lock().be_eager();
        }
        let notes_writes = opened.as_ref().is_ok_and(|folder| folder.section().notes().is_some());
        let now = Instant::now();
        Ok(Self {
            asked,
            program,
            folder: opened,
            pagemap,
            pool: Pool::default(),
            rounds: Rounds::new(notes_writes, asked.eager)?,
            stats: MemberStats::default(),
            cpu_before: Duration::ZERO,
            folds_before: (0, 0),
            began: now,
            broken_looks: Looks::new(now),
            viewed: None,
            activity: Activity::new(now),
            began_quiet: false,
            lease: None,
            former_leases: Vec::new(),
            silence: Silence::default(),
            forks: Forks::new(now),
            has_orphans: false,
            births: 0,
            tried: (0, 0),
            withdrawing: None,
        })
    }

    /// Serves one worker until the connection ends. If the agent ends it, the worker is told the reason.
    fn serve(&mut self, link: Link) {
        let (window, offered, pace) = (None, None, None);
        let told = Told::new(Instant::now());
        let mut session = Session { link, window, donated: None, offered, pace, room: 0, unfolded: false, told };
        let why = self.converse(&mut session).err().map(|e| e.to_string());
        let bye = ToWorker::Bye(why.unwrap_or_else(|| LEAVES.to_owned()));
        // A worker that has ended is told nothing.
        let _ = session.link.send(&bye);
    }

    fn converse(&mut self, session: &mut Session) -> io::Result<()> {
        self.pool.withdraw();
        // Counters begin with the connection. The worker remembers counters of former connections, but for stalls.
        self.stats = MemberStats { stalls: self.stats.stalls, ..MemberStats::default() };
        let follower = self.folder.as_ref().map_or(Duration::ZERO, |folder| folder.section().following().cpu_time());
        self.cpu_before = cpu_time(ClockId::ThreadCPUTime) + follower;
        self.folds_before = table::lock().folds();
        session.link.send(&ToWorker::Hello(Hello { version: VERSION, eager: self.asked.eager }))?;
        while !self.program.is_leaving() {
            session.link.flush()?;
            while let Some((message, files)) = session.link.receive()? {
                self.obey(session, message, files)?;
            }
            if let Some(pace) = session.pace {
                self.work(session, pace)?;
            }
            let until = self.until_next(session);
            self.wait(session, until)?;
        }
        Ok(())
    }

    /// See [`Program::leave`].
    fn leave(&mut self) -> bool {
        self.program.leave(&mut self.folder, (&self.pagemap, &self.pool), &mut self.stats)
    }

    /// Waits for a message of the worker, for the follower's alarm, or for this time. During a long sleep (a rest), the
    /// thread wakes from time to time to see whether the program has changed memory that the table knows, because the
    /// program's threads cannot wake it.
    fn wait(&self, session: &Session, until: Duration) -> io::Result<()> {
        let Ok(folder) = &self.folder else { return session.link.wait(until, None).map(drop) };
        let following = folder.section().following();
        let alarm = Some(following.alarm());
        if until <= REST || !following.rest(true) {
            following.rest(false);
            return session.link.wait(until.min(REST), alarm).map(drop);
        }
        let now = Instant::now();
        // In a process without hooks, a check also finds that the agent is to leave, so it must come sooner.
        let longest = if world::is_hooked() { CHANGES_EVERY.1 } else { CHANGES_EVERY.0 };
        let (end, piece) = (now + until, self.rounds.rest_in(now).clamp(CHANGES_EVERY.0, longest));
        let waited = loop {
            let left = end.saturating_duration_since(Instant::now());
            let came = session.link.wait(left.min(piece), alarm);
            let is_undisturbed =
                self.rounds.has_noticed_all() && give_way::wanted().is_empty() && !self.program.is_leaving();
            if !matches!(came, Ok(false)) || !is_undisturbed || left <= piece {
                break came;
            }
        };
        following.rest(false);
        waited.map(drop)
    }

    fn until_next(&mut self, session: &Session) -> Duration {
        let now = Instant::now();
        let rest = self.folder.as_mut().ok().and_then(Folder::rest).unwrap_or(STATS_EVERY.1);
        let Some(pace) = session.pace else { return LOOK_EVERY };
        let stats = session.told.due.saturating_duration_since(now);
        if self.lost_track().is_some() {
            return stats.min(rest);
        }
        if self.withdrawing.is_some() {
            return Duration::ZERO;
        }
        let collapse = self.folder.as_ref().map_or(LOOK_EVERY, |folder| folder.collapse_in(now));
        let work = match pace.fold {
            FoldMode::On if self.forks.rests(now).is_some() => LOOK_EVERY,
            FoldMode::On if self.folder.is_ok() && !session.link.is_full() => self.rounds.due_in(now).min(collapse),
            FoldMode::Unfold if !session.unfolded && session.room > 0 => Duration::ZERO,
            FoldMode::Unfold if self.folder.is_ok() => collapse,
            _ => LOOK_EVERY,
        };
        stats.min(work).min(rest)
    }

    fn obey(&mut self, session: &mut Session, message: ToAgent, mut files: Vec<OwnedFd>) -> io::Result<()> {
        let file = files.pop();
        match (message, file) {
            (ToAgent::Welcome(VERSION), Some(window)) => {
                act::check(&window, Role::Window)?;
                session.window = Some(window);
            }
            (ToAgent::Segment(number, slots), Some(file)) => {
                if self.pool.offer(number, slots, file)? {
                    self.has_orphans |= orphan(|slot_segment| slot_segment == number);
                }
            }
            (ToAgent::Lease(epoch), Some(file)) => {
                session.offered = Some((epoch, SharedMark::new(file)?));
                if session.pace.is_some() {
                    self.take_lease(session)?;
                }
            }
            (ToAgent::Pace(pace), _) => self.begin(session, pace)?,
            (ToAgent::Donate(id, runs), _) => {
                let window = session.window.as_ref().ok_or(io::ErrorKind::InvalidData)?;
                let folder = self.folder.as_ref().map_err(|_| io::ErrorKind::InvalidData)?;
                session.link.send(&ToWorker::Donated(id, donate(folder.section(), window, &runs)))?;
                session.donated = Some(Instant::now());
            }
            (ToAgent::Fold(id, runs), _) => {
                let outcomes = self.fold(session, &runs);
                session.link.send(&ToWorker::Folded(id, outcomes))?;
            }
            (ToAgent::Why(id, ranges), _) => {
                session.link.send(&ToWorker::Because(id, self.rounds.why(&self.pagemap, &ranges)))?
            }
            (ToAgent::Again, _) => self.rounds.again(&self.pagemap).map_err(io::Error::other)?,
            (ToAgent::Room(pages), _) => session.room = pages,
            (ToAgent::Leave, _) => self.program.be_told_to_leave(),
            _ => return Err(io::Error::new(io::ErrorKind::InvalidData, "a message that no worker sends")),
        }
        Ok(())
    }

    /// Sets the pace that the worker asks for. At the first pace of a connection, the worker is also told which slots
    /// this member holds already.
    fn begin(&mut self, session: &mut Session, pace: Pace) -> io::Result<()> {
        let first = session.pace.replace(pace).is_none();
        session.unfolded = false;
        session.told.again_within(STATS_EVERY.0);
        if pace.fold != FoldMode::Unfold {
            session.room = 0;
        }
        if first {
            self.pool.forget_withdrawn();
            self.has_orphans |= orphan_unknown(&self.pool);
            let lost_track = self.lost_track().is_some();
            let (held, homes) = {
                let mut table = table::lock();
                if !lost_track {
                    table.take_released(usize::MAX);
                }
                // If track of the mappings was lost, slots in the list of released ones may still be mapped somewhere.
                ([table.all_slot_runs(), table.released().to_vec()].concat(), table.home_runs())
            };
            for runs in homes.chunks(RUNS) {
                session.link.send(&ToWorker::Home(runs.to_vec()))?;
            }
            self.enter_homes(session)?;
            Self::tell_moves(session)?;
            for runs in held.chunks(RUNS) {
                session.link.send(&ToWorker::Held(runs.to_vec()))?;
            }
            self.former_leases.extend(self.lease.take());
            self.take_lease(session)?;
            self.rounds.again(&self.pagemap).map_err(io::Error::other)?;
        }
        Ok(())
    }

    /// Notes memory with homes in the table (module `home`) and tells the worker of it, if the program has enrolled
    /// mappings of files, or the worker has offered segments, since this was last done.
    fn enter_homes(&mut self, session: &mut Session) -> io::Result<()> {
        let tried = (table::lock().of_files().len(), self.pool.offers());
        let Ok(folder) = &self.folder else { return Ok(()) };
        if tried.0 == 0 || std::mem::replace(&mut self.tried, tried) == tried {
            return Ok(());
        }
        let told = home::enter(&self.pool, folder.section().following());
        for runs in told.chunks(RUNS) {
            session.link.send(&ToWorker::Home(runs.to_vec()))?;
        }
        Ok(())
    }

    /// Replaces the lease by the one that the worker has offered, if there is one, and tells the worker.
    fn take_lease(&mut self, session: &mut Session) -> io::Result<()> {
        let Some((epoch, lease)) = session.offered.take() else { return Ok(()) };
        self.lease = Some(lease);
        session.link.send(&ToWorker::LeaseTaken(epoch))
    }

    /// How the program was seen to change mappings in a way that bypasses the hooks; `None` if it was not.
    fn lost_track(&self) -> Option<&'static str> {
        self.folder.as_ref().ok().and_then(|folder| folder.section().following().lost_track())
    }

    fn fold(&mut self, session: &mut Session, runs: &[wire::FoldRun]) -> Vec<Outcome> {
        let on = session.pace.is_some_and(|pace| pace.fold == FoldMode::On)
            && self.lost_track().is_none()
            && self.asked.refusal().is_none()
            && self.forks.rests(Instant::now()).is_none()
            && !maps::locks_future();
        match &mut self.folder {
            Ok(folder) if on => {
                self.program.discover(folder.section(), true);
                let now = Instant::now();
                self.viewed = Some(now);
                session.told.again_within(STATS_SOON);
                let outcomes = folder.fold(runs, &self.pool, (&self.pagemap, &mut self.rounds), &mut self.stats);
                self.rounds.hurry(outcomes.iter().filter(|outcome| **outcome == Outcome::Folded).count());
                outcomes
            }
            _ => vec![Outcome::Off; runs.iter().map(|run| usize::from(run.pages)).sum()],
        }
    }

    fn work(&mut self, session: &mut Session, pace: Pace) -> io::Result<()> {
        // An allocation that fails would end the program. The program's limits, or the host's, may leave no memory for
        // a round.
        if !arena::ensure(ROUND_BYTES) {
            std::thread::sleep(RECONNECT.0);
            return Ok(());
        }
        let now = Instant::now();
        let seconds = u32::try_from((now - self.began).as_secs() + 1).unwrap_or(u32::MAX);
        if let Ok(folder) = &self.folder {
            self.program.discover(folder.section(), false);
        }
        table::lock().set_time(seconds, self.rounds.quiet(now));
        self.rounds.notice_changes(now);
        if let Some(how) = self.lost_track() {
            return self.say_why_it_rests(session, how);
        }
        self.mind_forks(now);
        self.enter_homes(session)?;
        self.look_at_broken(pace, now)?;
        if let Ok(folder) = &mut self.folder {
            folder.settle_discards(&self.pagemap).map_err(io::Error::other)?;
            for range in give_way::wanted() {
                folder.make_anonymous((&self.pagemap, &self.pool), range, &mut self.stats);
            }
            match pace.fold {
                FoldMode::On if self.forks.rests(now).is_some() => {}
                FoldMode::On if !session.link.is_full() => self.look_and_report(session, pace, now)?,
                FoldMode::Unfold if session.unfolded => self.collapse((HUGE_PAGES / UNFOLDED_MISSING, 0))?,
                FoldMode::Unfold => self.unfold(session),
                _ => {}
            }
        }
        if self.viewed.is_some_and(|viewed| now - viewed > VIEW_RESTS) {
            self.viewed = None;
            self.pool.rest();
        }
        session.rest_window(now);
        self.release(session)?;
        Self::tell_moves(session)?;
        if !self.former_leases.is_empty() && session.link.is_read() {
            self.former_leases.clear();
        }
        session.told.notice(table::lock().counts(), session.unfolded);
        if now >= session.told.due {
            self.say_how_it_goes(session, pace)?;
        }
        Ok(())
    }

    /// Counts the program's forks. If they cost too much, or too many children live, mappings are given back, and
    /// nothing is folded for a while.
    fn mind_forks(&mut self, now: Instant) {
        let Ok(folder) = &mut self.folder else { return };
        let births = folder.section().following().births();
        // A new follower counts from 0.
        let forks = births.saturating_sub(std::mem::replace(&mut self.births, births));
        if forks > 0 {
            world::tell_birth();
            if !world::is_hooked() {
                self.rounds.leave_shared();
            }
            let mappings = table::lock().mappings(table::everything());
            let most = self.forks.add(forks, mappings, now);
            if let Some(most) = most {
                forks::have_wait(true);
                self.withdrawing = Some((most, now + WITHDRAW_TIME));
            }
        }
        if folder.section().following().found_too_many() && table::lock().mappings(table::everything()) > 0 {
            self.forks.find_too_many(now);
            forks::have_wait(true);
            self.withdrawing = Some((0, now + WITHDRAW_ALL_TIME));
        }
        if let Some((most, until)) = self.withdrawing {
            // The supervisor promises memory only for unfolding that a worker wants, and this cannot wait for a
            // promise.
            let room = host::spare_bytes() / page::PAGE_BYTES as u64;
            let is_done = folder.withdraw((&self.pagemap, &self.pool), (most, room), &mut self.stats);
            if is_done || now > until {
                self.withdrawing = None;
                forks::have_wait(false);
            }
        }
    }

    /// Searches for written pages among the folded ones, and has those that rest fingerprinted, if it is time for that.
    fn look_at_broken(&mut self, pace: Pace, now: Instant) -> io::Result<()> {
        if !self.broken_looks.is_due(now, self.rounds.cadence(now), self.rounds.rest_in(now)) {
            return Ok(());
        }
        let before = cpu_time(ClockId::ThreadCPUTime);
        find_broken(&self.pagemap).map_err(io::Error::other)?;
        let may_refold = pace.fold == FoldMode::On && self.folder.as_ref().is_ok_and(|folder| folder.may_refold(now));
        let due = if may_refold { self.rounds.look_at_broken(pace.pages_per_s, now) } else { 0 };
        self.broken_looks = Looks::took(now, cpu_time(ClockId::ThreadCPUTime).saturating_sub(before), due);
        Ok(())
    }

    /// Makes a round if one is due, tells the worker of pages that have rested, and collapses a huge page if possible.
    fn look_and_report(&mut self, session: &mut Session, pace: Pace, now: Instant) -> io::Result<()> {
        let Ok(folder) = &self.folder else { return Ok(()) };
        if !world::is_hooked() && !self.began_quiet && self.activity.is_idle(now) {
            self.began_quiet = true;
            let process = ProcessId::of(std::process::id()).ok();
            let age = Duration::from_secs(process.map_or(0, |process| process.age_seconds()));
            self.rounds.begin_quiet(age, now);
        }
        let huge = pace.huge_pages != HugePages::Keep;
        let notes = folder.section().notes();
        let looked = self.rounds.look(&self.pagemap, notes, pace.pages_per_s, huge);
        self.stats.done.pages_scanned += looked.map_err(io::Error::other)?;
        let idle = self.activity.is_idle(now) && self.rounds.cadence(now).is_little;
        let hashed = report(&mut self.rounds, folder, &mut session.link, pace, idle)?;
        self.stats.done.pages_hashed += hashed;
        session.told.notice_hashed(self.stats.done.pages_hashed);
        // Half as many missing pages as those for which a huge page is split: otherwise it would soon be split again.
        let most = match pace.huge_pages {
            HugePages::Keep => 0,
            HugePages::SplitAt(percent) => HUGE_PAGES * u64::from(percent) / 200,
        };
        self.collapse((most, LIFE.as_secs() as u32))
    }

    /// Collapses a huge page, if it is time for that; `rest` is as for [`Folder::collapse`].
    fn collapse(&mut self, rest: (u64, u32)) -> io::Result<()> {
        let Ok(folder) = &mut self.folder else { return Ok(()) };
        let collapsed = folder.collapse((&self.pagemap, &self.pool, &mut self.rounds), rest, &mut self.stats);
        collapsed.map_err(io::Error::other)
    }

    /// Unfolds some of the folded pages.
    fn unfold(&mut self, session: &mut Session) {
        let Ok(folder) = &mut self.folder else { return };
        match folder.unfold(&self.pagemap, &self.pool, &mut session.room) {
            Ok(done) => {
                session.unfolded = done;
                folder.hurry_to_collapse();
            }
            Err(e) => {
                self.stats.detail = format!("cannot unfold: {e}; what is not unfolded stays folded");
                std::thread::sleep(RECONNECT.0);
            }
        }
    }

    /// Tells the worker which slots are no longer mapped, after all messages about followed memory were read.
    fn release(&self, session: &mut Session) -> io::Result<()> {
        if table::lock().released().is_empty() {
            return Ok(());
        }
        if let Ok(folder) = &self.folder {
            // Slots that the program has moved are mapped elsewhere. All messages about moves must have been read
            // before.
            folder.section().following().catch_up();
        }
        let has_moved = self.folder.as_ref().is_ok_and(|folder| folder.section().following().has_moved());
        if self.lost_track().is_none() && !has_moved { release(&mut session.link) } else { Ok(()) }
    }

    /// Tells the worker which pages no longer show their homes, and which show them again.
    fn tell_moves(session: &mut Session) -> io::Result<()> {
        let [left, back] = table::lock().take_moves();
        for runs in left.chunks(RUNS) {
            session.link.send(&ToWorker::Released(runs.to_vec()))?;
        }
        for runs in back.chunks(RUNS) {
            session.link.send(&ToWorker::Home(runs.to_vec()))?;
        }
        Ok(())
    }
}

/// Tells the worker which slots are no longer mapped.
fn release(link: &mut Link) -> io::Result<()> {
    loop {
        let released = table::lock().take_released(RUNS);
        if released.is_empty() {
            return Ok(());
        }
        link.send(&ToWorker::Released(released))?;
    }
}

/// Marks pages as broken that map a segment which the worker no longer has. Nobody has to be told when they are
/// written, and no page can be folded to their slots. They are folded again where they are ([`crate::refold`]). Returns
/// whether there are any.
fn orphan(of_segment: impl Fn(u8) -> bool) -> bool {
    let mut table = table::lock();
    let orphans: Vec<_> = table.all_slot_runs().into_iter().filter(|run| of_segment(run.slot.segment())).collect();
    for run in &orphans {
        table.set_orphaned(PageRange { start: run.start, pages: run.pages.into() });
    }
    table.lose_homes(&of_segment);
    table.drop_released(|slot| of_segment(slot.segment()));
    !orphans.is_empty()
}

fn orphan_unknown(pool: &Pool) -> bool {
    orphan(|segment| page::PoolSlot::new(segment, 0).is_none_or(|slot| pool.of(slot).is_none()))
}
