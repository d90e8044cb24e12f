//! Processes that are frozen or suspended: before they are attached, and while one of their threads makes calls for us.

use super::{Thread, borrow_thread, make_thread};
use crate::ending::{Ending, unmapping};
use crate::refuse;
use crate::remote::Remote;
use crate::testing::{Subject, wait_for};
use crate::threads;
use act::trace::Tracee;
use host::Mapping;
use rustix::process::{Signal, kill_process};
use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};

/// A program whose only thread blocks a signal, and sleeps for a second.
const PROGRAM: &str = "
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
say('ready')
call('waited', 35, struct.pack('qq', 1, 0), None)
wait_for_end()
";

/// A control group of the test's own, of one of the two versions.
struct Group {
    dir: PathBuf,
    file: &'static str,
    words: [&'static str; 2],
}

impl Group {
    /// Both versions, as far as this host has them.
    fn both() -> Vec<Self> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let at = |is_it: fn(&str) -> bool| {
            let line = mounts.lines().find(|line| line.split_once(" - ").is_some_and(|(_, tree)| is_it(tree)))?;
            Some(PathBuf::from(line.split(' ').nth(4)?))
        };
        let v1 = at(|tree| tree.starts_with("cgroup ") && tree.ends_with("freezer"));
        let v2 = at(|tree| tree.starts_with("cgroup2 "));
        let kinds = [(v1, "freezer.state", ["THAWED", "FROZEN"]), (v2, "cgroup.freeze", ["0", "1"])];
        let make = |(at, file, words): (Option<PathBuf>, _, _)| {
            static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
            let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let dir = at?.join(format!("pagefold-frozen-{}-{number}", std::process::id()));
            fs::create_dir(&dir).ok()?;
            Some(Self { dir, file, words })
        };
        let all: Vec<Self> = kinds.into_iter().filter_map(make).collect();
        if all.is_empty() {
            eprintln!("skipped: no control group can be made here");
        }
        all
    }

    fn take(&self, pid: u32) {
        fs::write(self.dir.join("cgroup.procs"), pid.to_string()).expect("move it");
    }

    fn freeze(&self, pid: u32, freeze: bool) {
        fs::write(self.dir.join(self.file), self.words[usize::from(freeze)]).expect("freeze it");
        wait_for("the kernel says so", || host::frozen_group(pid, pid).is_some() == freeze);
    }

    fn is_version_2(&self) -> bool {
        self.file == "cgroup.freeze"
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::write(self.dir.join(self.file), self.words[0]);
        let root = self.dir.parent().unwrap_or(Path::new("/")).join("cgroup.procs");
        for pid in fs::read_to_string(self.dir.join("cgroup.procs")).unwrap_or_default().lines() {
            let _ = fs::write(&root, pid);
        }
        let _ = fs::remove_dir(&self.dir);
    }
}

fn state(subject: &Subject) -> [Option<String>; 3] {
    ["SigBlk", "SigPnd", "TracerPid"].map(|field| threads::status(subject.pid(), subject.leader(), field))
}

fn started() -> Subject {
    let subject = Subject::start(PROGRAM);
    assert_eq!(subject.line(), "ready");
    subject.wait_for_calls(&[libc::SYS_nanosleep]);
    subject
}

/// Once, attaching killed a frozen process, or did not end.
#[test]
fn process_that_is_held_is_refused_with_the_reason() {
    for group in Group::both() {
        let mut subject = started();
        let pid = subject.pid();
        group.take(pid);
        group.freeze(pid, true);
        let expected = format!("control group /{} is frozen", group.dir.file_name().unwrap().to_str().unwrap());
        let mut halts = subject.halts();
        let whys = [
            refuse::check(pid, true).unwrap_err(),
            refuse::check_for_ksm(pid).unwrap_err(),
            borrow_thread(&mut halts, |_| Ok(())).unwrap_err().to_string(),
        ];
        assert!(whys.iter().all(|why| why.starts_with(&expected)), "{whys:?}");
        assert!(!halts.is_pending(), "no thread was asked");
        group.freeze(pid, false);
        assert_eq!(refuse::check(pid, true).map(|facts| facts.threads), Ok(1));
        assert!(subject.line_with(&mut halts).starts_with("waited 0 "));
        kill_process(subject.leader(), Signal::STOP).unwrap();
        wait_for("it is suspended", || {
            threads::status(pid, subject.leader(), "State").is_some_and(|state| state.starts_with('T'))
        });
        let whys =
            [refuse::check(pid, true).unwrap_err(), borrow_thread(&mut halts, |_| Ok(())).unwrap_err().to_string()];
        assert!(whys.iter().all(|why| why.starts_with("it is suspended (SIGSTOP)")), "{whys:?}");
        kill_process(subject.leader(), Signal::CONT).unwrap();
        subject.tell_to_end();
        assert_eq!(subject.line(), "end");
    }
}

/// Once, the thread went on in the middle of a call of ours, and the program crashed.
#[test]
fn thread_of_process_that_is_frozen_meanwhile_goes_on_as_it_was() {
    for group in Group::both() {
        let mut subject = started();
        let (pid, before) = (subject.pid(), state(&subject));
        let (mut halts, remote) = (subject.halts(), Remote::open(pid).unwrap());
        group.take(pid);
        let freeze = |tracee: &Tracee| {
            group.freeze(pid, true);
            remote.call(tracee, libc::SYS_getpid, [0; 6])
        };
        let why = borrow_thread(&mut halts, freeze).unwrap_err().to_string();
        assert!(why.contains("was frozen meanwhile"), "{why}");
        let is_let_go = |halts: &mut crate::halt::Halts| {
            halts.tend();
            !halts.is_pending()
        };
        if group.is_version_2() {
            wait_for("it is let go while it is frozen", || is_let_go(&mut halts));
            assert_eq!(state(&subject)[0], before[0]);
        }
        group.freeze(pid, false);
        assert!(subject.line_with(&mut halts).starts_with("waited 0 "));
        wait_for("nobody traces it", || is_let_go(&mut halts) && state(&subject) == before);
        subject.tell_to_end();
        assert_eq!(subject.line(), "end");
    }
}

/// Once, the thread that was made in the process stayed there, with memory that nobody unmapped.
#[test]
fn nothing_is_left_in_process_that_is_frozen_meanwhile() {
    for group in Group::both() {
        for is_mapped in [false, true] {
            let mut subject = started();
            let pid = subject.pid();
            let (mut halts, remote, made) = (subject.halts(), Remote::open(pid).unwrap(), Cell::default());
            borrow_thread(&mut halts, |tracee| make_thread(pid, &remote, tracee, &made)).unwrap();
            let tracee = Tracee::of_clone(made.take().expect("a thread"));
            assert!(subject.line_with(&mut halts).starts_with("waited 0 "));
            let before = Mapping::list(pid).unwrap();
            group.take(pid);
            let left = if is_mapped {
                // The process is frozen behind the mapping of its memory.
                let thread = Thread { pid, tracee: &tracee, remote: &remote, ours: None, left: Cell::default() };
                let until = std::time::Instant::now() + crate::testing::PATIENCE;
                while tracee.wait(until).unwrap().expect("it comes") != act::trace::Stop::Asked {}
                let base = thread.call(libc::SYS_mmap, [0, 1 << 16, 3, 0x22, u64::MAX, 0]).unwrap();
                group.freeze(pid, true);
                assert!(thread.call(libc::SYS_getpid, [0; 6]).is_err());
                Some(unmapping(base, 1 << 16))
            } else {
                group.freeze(pid, true);
                None
            };
            halts.end(Ending::new(tracee, Some(remote.instruction()), left.into_iter().collect(), None));
            group.freeze(pid, false);
            wait_for("the new thread has ended", || {
                halts.tend();
                threads::list(pid).is_ok_and(|all| all.len() == 1)
            });
            assert_eq!(format!("{:?}", Mapping::list(pid).unwrap()), format!("{before:?}"));
            subject.tell_to_end();
            assert_eq!(subject.line(), "end");
        }
    }
}
