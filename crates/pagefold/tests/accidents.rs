//! Accidents of a service: its disk is full or read-only, its state is damaged, the clock is set. Another service has a
//! group of the same name. Nothing opens, and nothing is lost.

mod common;

use common::supervised::{Fake, Installed, is_alive, signal, wait_for};
use common::{Afterwards, has_shown, json_of, not_root, unprivileged};
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::process::{Command, Output};

const TWO: &str = "\
[[group]]
name = 'acme'
[[group]]
name = 'beta'
";

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn mount(words: &[&str]) {
    assert!(Command::new("mount").args(words).status().expect("run mount").success(), "mount {words:?}");
}

/// Mounts a small file system at the service's directory. It is unmounted when this is dropped.
fn small_disk(installed: &Installed) -> Afterwards {
    let dir = installed.text("s");
    fs::create_dir(&dir).expect("make the directory");
    let afterwards = Afterwards::run(&format!("umount -l {dir}"));
    mount(&["-t", "tmpfs", "-o", "size=256k,mode=0755", "tmpfs", &dir]);
    afterwards
}

fn run(installed: &Installed, name: &str) -> Output {
    installed.pagefold(&["run", "--group", "acme", "--name", name, "--", "true"])
}

/// Asserts that the service takes no member and no change that it cannot write down, and that `web` is well.
fn assert_nothing_new_is_taken(installed: &Installed, web: &mut Fake) {
    let joined = run(installed, "db");
    assert!(!joined.status.success() && text(&joined.stderr).contains("cannot write"), "{joined:?}");
    let set = installed.pagefold(&["group", "set", "acme", "--fold", "off"]);
    assert!(!set.status.success() && text(&set.stderr).contains("cannot write"), "{set:?}");
    assert_eq!(installed.listed("acme")["settings"]["fold"], "on", "a change that was refused is in force");
    assert_eq!(installed.listed("acme")["members"], 1);
    assert!(web.is_connected());
    assert_eq!(installed.members("acme"), ["web"]);
}

#[test]
fn full_disk_loses_no_member_and_takes_none() {
    if not_root() {
        return;
    }
    let installed = Installed::new();
    let _disk = small_disk(&installed);
    let mut supervisor = installed.serve(TWO, &[]);
    let mut web = installed.member("acme", "web");
    assert!(web.connects(&installed), "{}", installed.log());
    assert!(installed.pagefold(&["group", "set", "acme", "--scan-rate", "1234"]).status.success());
    let worker = installed.worker("acme");
    let filler = installed.path("s/filler");
    assert!(fs::write(&filler, vec![1; 1 << 20]).is_err(), "the disk is not full");
    assert_nothing_new_is_taken(&installed, &mut web);
    // Neither the end nor the start of a supervisor needs room.
    supervisor.kill();
    let supervisor = installed.serve(TWO, &[]);
    assert_nothing_new_is_taken(&installed, &mut web);
    assert_eq!(installed.worker("acme"), worker);
    assert_eq!(installed.listed("acme")["settings"]["scan_rate"], 1234);
    supervisor.terminate();
    assert!(is_alive(worker) && installed.log().contains("workers go on for 30 s"), "{}", installed.log());
    let _supervisor = installed.serve(TWO, &[]);
    fs::remove_file(&filler).expect("make room");
    let joined = run(&installed, "db");
    assert!(joined.status.success(), "{joined:?}");
    assert!(web.is_connected());
}

#[test]
fn read_only_disk_loses_no_member_and_takes_none() {
    if not_root() {
        return;
    }
    let installed = Installed::new();
    let dir = installed.text("s");
    fs::create_dir(&dir).expect("make the directory");
    let _afterwards = Afterwards::run(&format!("umount -l {dir} 2>/dev/null"));
    let mut supervisor = installed.serve(TWO, &[]);
    let mut web = installed.member("acme", "web");
    assert!(web.connects(&installed), "{}", installed.log());
    let worker = installed.worker("acme");
    mount(&["--bind", &dir, &dir]);
    mount(&["-o", "remount,bind,ro", &dir]);
    assert_nothing_new_is_taken(&installed, &mut web);
    supervisor.kill();
    let refused = installed.pagefold(&["serve", "--dir", &dir]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stderr).contains("Read-only file system"), "{refused:?}");
    assert!(web.is_connected() && is_alive(worker));
    assert!(Command::new("umount").arg(&dir).status().expect("run umount").success());
    let _supervisor = installed.serve(TWO, &[]);
    assert_eq!((installed.worker("acme"), installed.members("acme")), (worker, vec!["web".to_owned()]));
}

/// A supervisor with an empty state would forget settings that keep members apart.
#[test]
fn damaged_state_starts_no_supervisor_and_is_left_alone() {
    if not_root() {
        return;
    }
    let installed = Installed::new();
    let mut supervisor = installed.serve(TWO, &[]);
    let mut web = installed.member("acme", "web");
    assert!(web.connects(&installed), "{}", installed.log());
    assert!(installed.pagefold(&["group", "set", "acme", "--intra-member-only", "true"]).status.success());
    let worker = installed.worker("acme");
    supervisor.kill();
    let state = installed.path("s/state.json");
    let whole = fs::read(&state).expect("the state");
    for damaged in [&whole[..whole.len() / 2], &[]] {
        fs::write(&state, damaged).expect("damage it");
        let refused = installed.pagefold(&["serve", "--dir", &installed.text("s")]);
        assert_eq!(refused.status.code(), Some(1));
        let said = text(&refused.stderr);
        assert!(said.contains("state.json: move it away to start without it"), "{said}");
        assert_eq!(fs::read(&state).expect("the state"), damaged);
        assert!(web.is_connected() && is_alive(worker));
    }
    fs::write(&state, &whole).expect("mend it");
    let _supervisor = installed.serve(TWO, &[]);
    assert_eq!((installed.worker("acme"), installed.members("acme")), (worker, vec!["web".to_owned()]));
    assert_eq!(installed.listed("acme")["settings"]["intra_member_only"], true);
}

/// Without such a user, a worker would run as root.
#[test]
fn worker_is_not_started_when_all_users_for_workers_are_taken() {
    if not_root() {
        return;
    }
    let installed = Installed::new();
    fs::create_dir(installed.path("s")).expect("make the directory");
    fs::set_permissions(installed.path("s"), Permissions::from_mode(0o755)).expect("open it");
    let taken: serde_json::Map<_, _> = (61_184..65_520).map(|uid| (format!("group-{uid}"), uid.into())).collect();
    let state = serde_json::json!({ "members": [], "changes": {}, "worker_uids": taken });
    fs::write(installed.path("s/state.json"), state.to_string()).expect("write a state");
    let mut supervisor = installed.serve(TWO, &[]);
    let mut web = installed.member("acme", "web");
    web.tell(&format!("connect {}", installed.text("s/agent.sock")));
    let why = "group acme: no worker: every user set aside for workers is taken";
    wait_for("it says why", || installed.log().contains(why).then_some(()));
    assert_eq!(installed.listed("acme")["worker_pid"], serde_json::Value::Null, "{}", installed.log());
    assert!(!installed.log().contains("worker started"), "{}", installed.log());
    // Other users may be set aside. The member joins then.
    supervisor.kill();
    let _supervisor = installed.serve(&format!("[service]\nworker-uid-base = 70000\n{TWO}"), &[]);
    assert!(web.connects(&installed), "{}", installed.log());
    let worker = fs::metadata(format!("/proc/{}", installed.worker("acme"))).expect("it runs");
    assert_eq!(worker.uid(), 70_001, "the prover has the first");
}

/// A library to preload into the supervisor, and not into its children. With it, the time of day leaps between 1970 and 2096. A program ends that
/// opens a file which the kernel fills from a process's memory: that process may keep readers waiting.
const FORBIDDEN: &str = "
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *time) {
    static int (*next)(clockid_t, struct timespec *);
    static unsigned calls;
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) {
        *time = (struct timespec) { calls++ % 2 ? 4000000000 : 1, 0 };
        return 0;
    }
    if (!next) next = dlsym(RTLD_NEXT, \"clock_gettime\");
    return next(clock, time);
}
time_t time(time_t *t) { abort(); }
int gettimeofday(struct timeval *restrict t, void *restrict zone) { abort(); }
static void check(const char *path) {
    const char *name = strrchr(path, '/');
    if (strncmp(path, \"/proc/\", 6) || !name) return;
    if (!strcmp(name, \"/cmdline\") || !strcmp(name, \"/environ\") || !strcmp(name, \"/mem\")) abort();
}
#define OPEN(open) int open(const char *path, int flags, ...) { \\
    static int (*next)(const char *, int, mode_t); \\
    va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \\
    check(path); \\
    if (!next) next = dlsym(RTLD_NEXT, #open); \\
    return next(path, flags, mode); }
OPEN(open)
OPEN(open64)
#define OPENAT(openat) int openat(int dir, const char *path, int flags, ...) { \\
    static int (*next)(int, const char *, int, mode_t); \\
    va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \\
    check(path); \\
    if (!next) next = dlsym(RTLD_NEXT, #openat); \\
    return next(dir, path, flags, mode); }
OPENAT(openat)
OPENAT(openat64)
";

/// Setting the clock changes nothing but dates in the journal. For workers and agents, `clippy.toml` says so.
#[test]
fn supervisor_goes_on_whatever_the_clock_says_and_reads_no_memory_of_others() {
    if not_root() {
        return;
    }
    let installed = Installed::new();
    fs::write(installed.path("forbidden.c"), FORBIDDEN).expect("write a program");
    let library = installed.path("forbidden.so");
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(installed.path("forbidden.c"));
    assert!(cc.status().expect("run cc").success());
    // The library works: `date` tells a wrong time with it, and `cat` cannot read what we read otherwise.
    let date = Command::new("date").args(["-u", "+%Y"]).env("LD_PRELOAD", &library).output().expect("run date");
    assert!(["1970", "2096"].contains(&String::from_utf8_lossy(&date.stdout).trim()), "{date:?}");
    for (file, works) in [("cmdline", false), ("stat", true)] {
        let mut command = Command::new("cat");
        command.arg(format!("/proc/self/{file}")).env("LD_PRELOAD", &library);
        let output = command.output().expect("run a program");
        assert_eq!(output.status.success(), works, "{command:?}: {output:?}");
    }
    let mut command = Command::new(installed.path("pagefold"));
    command.env("LD_PRELOAD", &library);
    let rule = "[[group.processes]]\nuid = 65534\nprogram = '/tmp/*/fake_agent'\n";
    let supervisor = installed.serve_by(command, &format!("{TWO}{rule}"), &[]);
    let mut web = installed.member("acme", "web");
    assert!(web.connects(&installed), "{}", installed.log());
    let first = installed.worker("acme");
    signal(first, "KILL");
    wait_for("another worker", || Some(installed.worker("acme")).filter(|worker| *worker != first));
    assert!(web.connects(&installed), "{}", installed.log());
    assert!(installed.pagefold(&["group", "set", "acme", "--fold", "off"]).status.success());
    assert_eq!(installed.members("acme"), ["web"]);
    // Others connect: one whom a rule lets in, and one whom none does.
    for (user, may_join) in [("65534", true), ("65532", false)] {
        let mut other = installed.stranger();
        assert_eq!(other.tell(&format!("become {user}")), "ok");
        let is_right = if may_join { other.connects(&installed) } else { other.is_refused(&installed) };
        assert!(is_right, "user {user}: {}", installed.log());
    }
    supervisor.terminate();
}

/// A pool is known by its file, not by its group's name alone.
#[test]
fn groups_of_one_name_in_two_services_have_nothing_in_common() {
    if not_root() {
        return;
    }
    let (installed, others) = (Installed::new(), Installed::new());
    let _supervisor = installed.serve(TWO, &[]);
    // The other service is another user's.
    fs::set_permissions(others.dir.path(), Permissions::from_mode(0o777)).expect("open the directory");
    let acme = "[[group]]\nname = 'acme'\n[[group.processes]]\nuid = 65534\n";
    let _other = others.serve_by(unprivileged(&others.text("pagefold")), acme, &[]);
    let (mut web, mut other) = (installed.member("acme", "web"), others.stranger_unprivileged());
    assert!(web.connects(&installed) && other.connects(&others), "{}{}", installed.log(), others.log());
    let shown = wait_for("the other worker answers", || {
        let output = others.pagefold_unprivileged(&["group", "show", "acme", "--json"]);
        has_shown(&output).then(|| json_of(&output))
    });
    assert_eq!(
        (installed.members("acme"), shown["members"][0]["pid"].as_u64()),
        (vec!["web".into()], Some(other.pid().into()))
    );
    assert_ne!(shown["worker_pid"], installed.worker("acme"));
    // Neither takes the other's place, or its members.
    let serve = others.pagefold_unprivileged(&["serve", "--dir", &installed.text("s")]);
    assert!(text(&serve.stderr).contains("belongs to user 0"), "{serve:?}");
    assert!(other.is_refused(&installed));
    // A process that maps the other pool of that name brings nothing along.
    installed.connect_with_pool_of_acme("acme");
    assert!(installed.log().contains("another service's group acme, and cannot join acme"), "{}", installed.log());
}
