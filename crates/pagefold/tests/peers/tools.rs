//! Tools that write much and can say themselves whether it is right.

use crate::rig::{Peer, Side};
use serde_json::{Value, json};

pub const GIT: Peer = Peer {
    name: "git",
    about: "a repository committed and packed by git, then checked by git fsck",
    floor: 0,
    needs: &[("git", "git")],
    is_short: false,
    at_once: false,
    recipe: git,
};

pub const GCC: Peer = Peer {
    name: "gcc",
    about: "GCC builds Lua, with its compilers as members; the objects' and the program's digests",
    floor: 0,
    needs: &[("cc", "gcc"), ("make", "make"), ("apt-get", "apt")],
    is_short: false,
    at_once: false,
    recipe: gcc,
};

/// Fetches Debian's source of Lua and unpacks it.
fn lua_source(side: &Side) -> String {
    side.aside(&["sh", "-c", include_str!("../../../bench/src/overhead/lua_source.sh")], "");
    side.path("lua")
}

fn gcc(side: &Side) -> Value {
    let lua = lua_source(side);
    // GCC starts each program of its own by this command.
    let compiler = match side.wrapper() {
        words if words.is_empty() => "CC=cc".to_owned(),
        words => format!("CC=cc -wrapper {}", words.join(",")),
    };
    side.must("make", &["make", "-C", &lua, "-j2", "linux", "MYLIBS=", "SYSLIBS=", &compiler], 600);
    assert!(
        !side.is_member || side.is_attached || side.members_seen() > 30,
        "{} members were seen",
        side.members_seen()
    );
    let digests = side.aside(&["sh", "-c", &format!("cd {lua}/src && sha256sum *.o lua luac | sort")], "");
    let sum = "local n = 0; for i = 1, 1000000 do n = n + i % 7 end; print(n)";
    let said = side.must("lua", &[&format!("{lua}/src/lua"), "-e", sum], 60);
    assert!(digests.lines().count() > 30, "{digests}");
    json!({"digests": digests, "said": said.trim()})
}

fn git(side: &Side) -> Value {
    let tree = side.path("tree");
    side.aside(&["cp", "-r", "/usr/include/linux", &tree], "");
    let user = ["-c", "user.name=peer", "-c", "user.email=peer@example.com", "-c", "gc.auto=0", "-c", "pack.threads=2"];
    let git = |name: &str, words: &[&str]| side.must(name, &[&["git", "-C", &tree], &user[..], words].concat(), 300);
    git("init", &["init", "-q"]);
    git("add", &["add", "."]);
    git("commit", &["commit", "-q", "-m", "all"]);
    git("pack", &["repack", "-a", "-d", "-f", "-q"]);
    git("fsck", &["fsck", "--full", "--strict", "--no-progress"]);
    let id = git("id", &["rev-parse", "HEAD^{tree}"]);
    let objects = side.aside(&["git", "-C", &tree, "count-objects", "-v"], "");
    let count = objects.lines().find(|line| line.starts_with("in-pack")).expect("a count").to_owned();
    json!({"tree": id.trim(), "objects": count, "fsck": "clean"})
}
