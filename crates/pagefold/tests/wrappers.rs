//! Members that are started by wrappers: scripts and programs that execute another program.

mod common;

use common::copy_program;
use common::service::{Service, cannot_fold, find_member, folded_pages, until};
use serde_json::Value;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Says which variables its children get, and holds 16 MiB in which every content is there twice.
const SERVER: &str = "
import os, subprocess, sys
print(' '.join(sorted(l.split('=')[0] for l in subprocess.check_output(['env'], text=True).splitlines())), flush=True)
half = os.urandom(8 << 20)
both = bytearray(half + half)
print(sys.executable, flush=True)
sys.stdin.read()
";

/// A directory with wrappers.
struct Wrappers(tempfile::TempDir);

impl Wrappers {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary directory"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn script(&self, name: &str, text: &str) -> String {
        let (source, path) = (self.path(&format!("{name}.text")), self.path(name));
        fs::write(&source, text).expect("write a script");
        copy_program(&source, &path);
        fs::set_permissions(&path, Permissions::from_mode(0o755)).expect("make it executable");
        path.to_str().expect("a plain path").to_owned()
    }

    /// Compiles a C program.
    fn compile(&self, name: &str, text: &str, flags: &[&str]) -> String {
        let source = self.path(&format!("{name}.c"));
        fs::write(&source, text).expect("write a program");
        let path = self.path(name);
        let made = Command::new("cc").args(flags).arg("-o").arg(&path).arg(&source).status().expect("run cc");
        assert!(made.success(), "compile {name}");
        path.to_str().expect("a plain path").to_owned()
    }
}

impl Wrappers {
    /// Programs that execute the program that their arguments name, each by another function.
    fn compile_wrappers(&self) -> [String; 3] {
        let begin = "#define _GNU_SOURCE\n#include <unistd.h>\n#include <sys/syscall.h>\nextern char **environ;\n\
                     int main(int n, char **a) { return ";
        [
            ("compiled", "execlp(\"sh\", \"sh\", \"-c\", \"exec \\\"$@\\\"\", \"x\", a[1], a[2], a[3], (char *)0)"),
            ("listed", "execle(a[1], a[1], a[2], a[3], (char *)0, environ)"),
            ("raw", "syscall(SYS_execve, a[1], a + 1, environ)"),
        ]
        .map(|(name, call)| self.compile(name, &format!("{begin}{call}; }}\n"), &[]))
    }
}

/// The members in `group show`, once there is one.
fn members(service: &Service) -> Vec<Value> {
    service.show("acme")["members"].as_array().expect("a list").clone()
}

#[test]
fn program_that_wrappers_execute_is_the_member() {
    if cannot_fold() {
        return;
    }
    let (service, wrappers) = (Service::start(), Wrappers::new());
    let server = wrappers.script("server.py", SERVER);
    // Helpers run first, as in a shim of pyenv's: none of them may take the place of the member.
    let shim = wrappers.script(
        "shim",
        "#!/bin/bash\nset -e\nself=$(dirname \"$0\")\n(true; /bin/true)\nfor n in 1 2 3; do x=$(basename \"$self\"); done\n\
         exec /usr/bin/env -i PATH=/usr/bin:/bin python3 \"$@\"\n",
    );
    let [compiled, listed, raw] = wrappers.compile_wrappers();
    let plain = wrappers.script("plain", &format!("#!/bin/sh\nexec python3 {server}\n"));
    for (name, words) in [
        ("plain", vec![plain]),
        ("chain", vec![wrappers.script("outer", "#!/bin/sh\nexec \"$@\"\n"), raw, listed, compiled, shim, server]),
    ] {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let mut member = service.run("acme", name, &["--all-anonymous"], &words);
        until(60, &format!("{name} is folded: {}", member.errors()), || {
            member.assert_is_well();
            folded_pages(&service.show("acme"), name) > 3000
        });
        let program = fs::read_link(format!("/proc/{}/exe", member.pid())).expect("it runs");
        assert!(program.to_string_lossy().contains("python3"), "{}", program.display());
        let shown = members(&service);
        assert_eq!(shown.len(), 1, "helpers of the wrapper are members: {shown:?}");
        assert_eq!((shown[0]["pid"].as_u64(), &shown[0]["connected"]), (Some(member.pid().into()), &true.into()));
        let variables = &member.lines()[0];
        assert!(!variables.contains("PAGEFOLD_SOCKET") && !variables.contains("LD_PRELOAD"), "{variables}");
        member.kill();
        until(60, "its row is gone", || members(&service).is_empty());
    }
    assert!(!service.log().contains("a connection was refused"), "{}", service.log());
}

#[test]
fn member_without_agent_has_row_with_reason() {
    if cannot_fold() {
        return;
    }
    let (service, wrappers) = (Service::start(), Wrappers::new());
    let idle = "#include <unistd.h>\nint main() { for (;;) pause(); }\n";
    let program = wrappers.compile("fixed", idle, &["-static"]);
    let wrapper = wrappers.script("wrapper", &format!("#!/bin/sh\nexec {program}\n"));
    let member = service.run("acme", "web", &[], &[&wrapper]);
    until(60, "the program is executed", || is_program(member.pid(), &program));
    let shown = service.show("acme");
    let row = find_member(&shown, "web").unwrap_or_else(|| panic!("no row: {shown}"));
    assert_eq!((&row["state"], &row["connected"]), (&"no_agent".into(), &false.into()), "{row}");
    let reason = format!("its program ({program}) runs without libpagefold.so");
    assert!(row["detail"].as_str().expect("text").starts_with(&reason), "{row}");
    let text = service.pagefold(&["group", "show", &service.group("acme")]);
    let text = String::from_utf8_lossy(&text.stdout).replace('\n', " ");
    assert!(text.contains("no agent: nothing of it is folded"), "{text}");
    let doctor = service.pagefold(&["doctor", "--pid", &member.pid().to_string()]);
    let doctor = String::from_utf8_lossy(&doctor.stdout).split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(doctor.contains("runs without libpagefold.so"), "{doctor}");
}

fn is_program(pid: u32, program: &str) -> bool {
    fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|path| path == Path::new(program))
}

#[test]
fn qemu_wrapper_takes_group_from_its_link_and_lets_libvirt_ask() {
    let wrapper = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/pagefold-qemu");
    let wrappers = Wrappers::new();
    // In place of the installed program, which cannot be had here.
    let text = fs::read_to_string(&wrapper).expect("the wrapper").replace("/usr/bin/pagefold run", "echo run");
    wrappers.script("pagefold-qemu", &text);
    std::os::unix::fs::symlink("pagefold-qemu", wrappers.path("acme")).expect("make a link");
    let run = |name: &str, group: Option<&str>, words: &[&str]| {
        let mut command = Command::new(wrappers.path(name));
        command.args(words).env("PAGEFOLD_QEMU", "/bin/echo").envs(group.map(|group| ("PAGEFOLD_GROUP", group)));
        let output = command.output().expect("run the wrapper");
        (output.status.code(), String::from_utf8(output.stdout).expect("text"))
    };
    let domain = ["-name", "guest=web 1,debug-threads=on", "-S"];
    let joined = |group: &str| format!("run --group {group} --name web-1 -- /bin/echo {}\n", domain.join(" "));
    assert_eq!(run("acme", None, &domain), (Some(0), joined("acme")));
    assert_eq!(run("acme", Some("beta"), &domain), (Some(0), joined("beta")));
    assert_eq!(run("pagefold-qemu", Some("beta"), &domain), (Some(0), joined("beta")));
    assert_eq!(run("pagefold-qemu", None, &domain), (Some(2), String::new()));
    for question in [&["-S", "-machine", "none,accel=kvm:tcg"][..], &["-version"], &["-help"]] {
        assert_eq!(run("acme", None, question), (Some(0), format!("{}\n", question.join(" "))));
    }
}
