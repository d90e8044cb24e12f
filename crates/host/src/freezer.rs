//! Control groups that are frozen: none of their threads runs a program's code until they are thawed.
//!
//! | version | a group is frozen | read |
//! |---|---|---|
//! | 1 (controller `freezer`) | itself, or by one above it | `freezer.state`: `FREEZING`, `FROZEN` |
//! | 2 | itself, or by one above it | `cgroup.freeze` of each: what was asked for, also before the last thread has stopped |

use crate::mounts::Mount;
use crate::text;
use std::path::{Component, Path};

/// The frozen control group that a thread of a process is in, the outermost if there are several. `None`: there is
/// none, or it cannot be seen from here.
pub fn frozen_group(pid: u32, thread: u32) -> Option<String> {
    let groups = text::read(format!("/proc/{pid}/task/{thread}/cgroup")).ok()?;
    find(&groups, &text::read("/proc/self/mountinfo").ok()?)
}

fn find(groups: &str, mountinfo: &str) -> Option<String> {
    groups.lines().find_map(|line| {
        let (controllers, group) = line.split_once(':')?.1.split_once(':')?;
        let has = |list: &str| list.split(',').any(|one| one == "freezer");
        let is_tree = |mount: &Mount<'_>| match mount.kind {
            "cgroup2" => controllers.is_empty(),
            "cgroup" => has(controllers) && has(mount.options),
            _ => false,
        };
        let trees = mountinfo.lines().filter_map(Mount::parse).filter(is_tree);
        trees.filter_map(|tree| outermost(group, &tree)).next()
    })
}

fn outermost(group: &str, tree: &Mount<'_>) -> Option<String> {
    let path = Path::new(group).strip_prefix(tree.root).ok()?;
    if !path.components().all(|part| matches!(part, Component::Normal(_))) {
        return None;
    }
    let found = path.ancestors().filter(|path| is_frozen(&Path::new(tree.at).join(path))).last()?;
    Some(Path::new(tree.root).join(found).display().to_string())
}

/// Whether a group is frozen. The root group cannot be: it has neither file.
fn is_frozen(dir: &Path) -> bool {
    let holds = |file, frozen: &[&str]| text::read(dir.join(file)).is_ok_and(|text| frozen.contains(&text.trim()));
    holds("cgroup.freeze", &["1"]) || holds("freezer.state", &["FREEZING", "FROZEN"])
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn outermost_frozen_group_of_either_version_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().to_str().unwrap();
        let mounts = format!(
            "30 23 0:26 / {at}/two rw - cgroup2 cgroup2 rw\n37 30 0:32 /jail {at}/one rw - cgroup cgroup rw,freezer\n\
             38 30 0:33 / {at}/cpu rw - cgroup cgroup rw,cpu\n"
        );
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let groups = "4:freezer:/jail/a/b\n3:cpu:/frozen\n0::/x/y/z\n";
        let found = || find(groups, &mounts);
        assert_eq!(found(), None, "no file is there");
        for group in ["x", "x/y", "x/y/z"] {
            write(&format!("two/{group}/cgroup.freeze"), "0\n");
        }
        write("cpu/frozen/freezer.state", "FROZEN\n");
        write("one/a/freezer.state", "THAWED\n");
        write("one/a/b/freezer.state", "THAWED\n");
        assert_eq!(found(), None);
        write("two/x/y/cgroup.freeze", "1\n");
        assert_eq!(found().as_deref(), Some("/x/y"));
        write("two/x/cgroup.freeze", "1\n");
        assert_eq!(found().as_deref(), Some("/x"));
        write("one/a/b/freezer.state", "FREEZING\n");
        assert_eq!(found().as_deref(), Some("/jail/a/b"));
        for unseen in ["4:freezer:/other/b\n", "0::/../x\n", "", "0::x\n"] {
            assert_eq!(find(unseen, &mounts), None, "{unseen}");
        }
    }
}
