//! The part of a control group's path whose names were given by root, and not by the user to whom a part of the tree
//! was delegated.
//!
//! A user to whom a control group was delegated makes others below it, with any names. A process in such a group could
//! be mistaken for one of a service or a container that it has nothing to do with. The owner of a directory can make
//! groups in it, or move them there. So a path counts up to the first name in a directory that others than root may
//! write:
//!
//! ```text
//!   /user.slice/user-1000.slice/user@1000.service/app.slice/docker-0123.scope
//!    root's     root's          user 1000's       `---- named by user 1000
//!   ---------------- counts -------------------
//! ```
//!
//! The same holds for a container whose root is another user outside (user namespaces). If root in the container is
//! root outside, the container chooses the names within it, too. So paths have to be compared from the front.

use crate::cgroup::Tree;
use crate::mounts::Mount;
use crate::{Cgroups, text};
use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Mode bits by which the directory's group or others may make something in it.
const WRITABLE: u32 = 0o022;
/// Most paths whose results are remembered. With more, all are forgotten.
const MOST_KNOWN: usize = 4096;

/// The trees of control groups of this host, and for known paths the part that root has given.
#[derive(Debug, Default)]
pub struct CgroupMakers {
    mounts: Vec<TreeMount>,
    known: HashMap<(Tree, String), Option<String>>,
}

/// A tree of control groups, its mount point, and the group that is mounted there.
#[derive(Debug, PartialEq, Eq)]
struct TreeMount {
    tree: Tree,
    at: PathBuf,
    root: PathBuf,
}

impl CgroupMakers {
    /// Finds the trees of control groups that are mounted where this process sees them.
    pub fn find() -> Self {
        let mountinfo = text::read("/proc/self/mountinfo").unwrap_or_default();
        Self { mounts: parse(&mountinfo), known: HashMap::new() }
    }

    /// The control groups of a process, with each path cut before the first name that a user other than root could have
    /// given. Trees that cannot be seen are left out, and so are trees of version 1 other than systemd's and the memory
    /// controller's.
    pub fn given_by_root(&mut self, cgroups: &Cgroups) -> Cgroups {
        if self.known.len() > MOST_KNOWN {
            self.known.clear();
        }
        let Self { mounts, known } = self;
        cgroups.map(|tree, path| {
            let key = (tree, path.to_owned());
            known.entry(key).or_insert_with(|| mounts.iter().find(|mount| mount.tree == tree)?.given(path)).clone()
        })
    }

    /// Forgets the results for all paths. A path that is used again may have been made by another user.
    pub fn look_anew(&mut self) {
        self.known.clear();
    }
}

impl TreeMount {
    fn given(&self, path: &str) -> Option<String> {
        let inside = Path::new(path).strip_prefix(&self.root).ok()?;
        let (mut dir, mut given) = (self.at.clone(), self.root.clone());
        for part in inside.components() {
            let std::path::Component::Normal(name) = part else { return None };
            let is_roots = fs::symlink_metadata(&dir).is_ok_and(|meta| meta.uid() == 0 && meta.mode() & WRITABLE == 0);
            if !is_roots {
                break;
            }
            dir.push(name);
            given.push(name);
        }
        given.to_str().map(str::to_owned)
    }
}

fn parse(mountinfo: &str) -> Vec<TreeMount> {
    let tree = |mount: &Mount<'_>| match mount.kind {
        "cgroup2" => Some(Tree::Unified),
        "cgroup" if mount.options.split(',').any(|option| option == "name=systemd") => Some(Tree::Systemd),
        "cgroup" if mount.options.split(',').any(|option| option == "memory") => Some(Tree::Memory),
        _ => None,
    };
    let mounts = mountinfo.lines().filter_map(Mount::parse);
    mounts.filter_map(|m| Some(TreeMount { tree: tree(&m)?, at: m.at.into(), root: m.root.into() })).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::geteuid;
    use std::os::unix::fs::{PermissionsExt, chown};

    #[test]
    fn trees_are_told_by_their_options() {
        let hybrid = "35 30 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
                      36 30 0:31 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd\n\
                      37 30 0:32 /jail /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                      38 30 0:33 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n22 28 0:20 / /proc rw - proc proc rw\n";
        let found: Vec<_> = parse(hybrid).into_iter().map(|m| (m.tree, m.root)).collect();
        let expected = [(Tree::Systemd, "/"), (Tree::Memory, "/jail"), (Tree::Unified, "/")];
        assert_eq!(found, expected.map(|(tree, root)| (tree, PathBuf::from(root))));
    }

    #[test]
    fn names_that_another_user_gives_do_not_count() {
        if !geteuid().is_root() {
            eprintln!("skipped: not root");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().to_owned();
        fs::set_permissions(&at, fs::Permissions::from_mode(0o755)).unwrap();
        fs::create_dir_all(at.join("a.slice/user@7.service/app.slice/x.scope")).unwrap();
        fs::create_dir_all(at.join("a.slice/b.service")).unwrap();
        chown(at.join("a.slice/user@7.service"), Some(7), None).unwrap();
        let mut makers = CgroupMakers {
            mounts: vec![TreeMount { tree: Tree::Unified, at: at.clone(), root: "/".into() }],
            ..CgroupMakers::default()
        };
        let mut given = |path: &str| {
            let given = makers.given_by_root(&Cgroups::parse(&format!("0::{path}\n4:memory:/m\n7:cpu:/c\n")));
            given.paths().map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(given("/a.slice/user@7.service/app.slice/x.scope"), ["/a.slice/user@7.service"]);
        assert_eq!(given("/a.slice/b.service"), ["/a.slice/b.service"]);
        assert_eq!(given("/a.slice/../b"), [""; 0]);
        fs::set_permissions(at.join("a.slice"), fs::Permissions::from_mode(0o777)).unwrap();
        makers.look_anew();
        let given = makers.given_by_root(&Cgroups::parse("0::/a.slice/b.service\n"));
        assert_eq!(given.main_path(), "/a.slice");
    }

    #[test]
    fn own_groups_are_found_on_this_host() {
        let own = Cgroups::parse(&text::read("/proc/self/cgroup").unwrap());
        let given = CgroupMakers::find().given_by_root(&own);
        assert!(own.paths().next().is_none() || given.paths().all(|path| own.paths().any(|its| its.starts_with(path))));
    }
}
