//! A control group of its own for a process of Pagefold. Its memory and processor time are then accounted apart, and
//! can be bounded.
//!
//! The group is made below the control group of the calling process, in every tree that accounts memory or processor
//! time: the tree of version 2, or the trees of the controllers `memory`, `cpu` and `cpuacct` of version 1. If a
//! service manager has put the caller into the subgroup `supervisor` of a delegated group, the new group is made beside
//! `supervisor`.

use host::text;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// A control group, as its directories: one in each tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupHome {
    dirs: Vec<PathBuf>,
}

impl CgroupHome {
    /// Makes (or finds) `parent/name` below this process's own control group.
    ///
    /// # Errors
    /// The host has no control groups, or the caller may not make any.
    pub fn make(parent: &str, name: &str) -> io::Result<Self> {
        let roots = roots(&read("/proc/self/mountinfo")?, &read("/proc/self/cgroup")?);
        if roots.is_empty() {
            return Err(io::Error::new(io::ErrorKind::NotFound, "no tree of control groups is mounted"));
        }
        let mut home = Self { dirs: Vec::new() };
        for root in roots {
            let dir = root.join(parent).join(name);
            // In version 2, the controllers must be enabled in each group above. A group that has processes in it
            // refuses them, and the new group then accounts processor time alone. Version 1 has no such file, so the
            // write fails and is not needed.
            for above in [&root, &root.join(parent)] {
                let _ = fs::create_dir_all(root.join(parent));
                let _ = fs::write(above.join("cgroup.subtree_control"), "+cpu +memory");
            }
            if let Err(e) = fs::create_dir_all(&dir) {
                home.remove();
                return Err(io::Error::new(e.kind(), format!("cannot make {}: {e}", dir.display())));
            }
            home.dirs.push(dir);
        }
        Ok(home)
    }

    /// The group's directories, one in each tree.
    pub fn dirs(&self) -> &[PathBuf] {
        &self.dirs
    }

    /// Moves process `pid` into the group.
    ///
    /// # Errors
    /// The process is gone, or the caller may not move it.
    pub fn add(&self, pid: u32) -> io::Result<()> {
        for dir in &self.dirs {
            let file = dir.join("cgroup.procs");
            fs::write(&file, pid.to_string())
                .map_err(|e| io::Error::new(e.kind(), format!("cannot write {}: {e}", file.display())))?;
        }
        Ok(())
    }

    /// Removes the group if no process is left in it, and then its parent if that is empty. True if the group is gone.
    pub fn remove(&self) -> bool {
        for dir in &self.dirs {
            let _ = fs::remove_dir(dir);
            if let Some(parent) = dir.parent() {
                let _ = fs::remove_dir(parent);
            }
        }
        self.dirs.iter().all(|dir| !dir.exists())
    }
}

fn read(path: &str) -> io::Result<String> {
    text::read(path).map_err(|e| io::Error::other(e.to_string()))
}

/// Directories in which new groups are made: the caller's own group in each tree that accounts memory or processor
/// time. The arguments are the texts of `/proc/self/mountinfo` and `/proc/self/cgroup`.
fn roots(mountinfo: &str, cgroup: &str) -> Vec<PathBuf> {
    let unified_only = !mountinfo.contains(" - cgroup ");
    let mut roots = Vec::new();
    for line in mountinfo.lines() {
        let Some((mount, filesystem)) = line.split_once(" - ") else { continue };
        let mut filesystem = filesystem.split(' ');
        let (Some(kind), Some(options)) = (filesystem.next(), filesystem.nth(1)) else { continue };
        let (Some(mounted), Some(at)) = (mount.split(' ').nth(3), mount.split(' ').nth(4)) else { continue };
        let controllers = match kind {
            "cgroup2" if unified_only => "",
            "cgroup" => match options.split(',').find(|o| matches!(*o, "memory" | "cpu" | "cpuacct")) {
                Some(controller) => controller,
                None => continue,
            },
            _ => continue,
        };
        let Some(own) = own_path(cgroup, controllers) else { continue };
        // A mount may show only a part of the tree: the part below `mounted`.
        let below = own.strip_prefix(mounted.trim_end_matches('/')).unwrap_or(own);
        let root = Path::new(at).join(below.trim_start_matches('/'));
        let root = if root.ends_with("supervisor") { root.parent().unwrap_or(&root).to_owned() } else { root };
        if !roots.contains(&root) {
            roots.push(root);
        }
    }
    roots
}

/// The path that `/proc/self/cgroup` has for a controller; the empty controller stands for version 2.
fn own_path<'a>(cgroup: &'a str, controller: &str) -> Option<&'a str> {
    cgroup.lines().find_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        controllers.split(',').any(|c| c == controller).then_some(path)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn version_2_root_is_own_group_without_supervisor() {
        let mounts = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
        let found = |cgroup| roots(mounts, cgroup);
        assert_eq!(
            found("0::/system.slice/pagefold.service\n"),
            [Path::new("/sys/fs/cgroup/system.slice/pagefold.service")]
        );
        assert_eq!(
            found("0::/system.slice/pagefold.service/supervisor\n"),
            [Path::new("/sys/fs/cgroup/system.slice/pagefold.service")]
        );
        assert_eq!(found("0::/\n"), [Path::new("/sys/fs/cgroup/")]);
    }

    #[test]
    fn version_1_roots_are_in_trees_of_memory_and_cpu() {
        let mounts = "\
35 30 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
36 30 0:31 / /sys/fs/cgroup/devices rw - cgroup cgroup rw,devices
37 30 0:32 /jail /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
38 30 0:33 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
";
        let own = "9:name=systemd:/\n4:memory:/jail/us\n3:devices:/\n1:cpu,cpuacct:/x\n0::/\n";
        assert_eq!(
            roots(mounts, own),
            [Path::new("/sys/fs/cgroup/cpu,cpuacct/x"), Path::new("/sys/fs/cgroup/memory/us")]
        );
        assert!(roots("", own).is_empty());
    }

    #[test]
    fn group_takes_process_and_is_removed_after_it() {
        let name = format!("test-{}", std::process::id());
        let home = match CgroupHome::make("pagefold-test", &name) {
            Ok(home) => home,
            Err(e) => {
                eprintln!("skipped: no control group of our own: {e}");
                return;
            }
        };
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        home.add(child.id()).unwrap();
        let stands = text::read(format!("/proc/{}/cgroup", child.id())).unwrap();
        assert!(stands.contains(&format!("/pagefold-test/{name}")), "{stands}");
        assert!(!home.remove() && home.dirs[0].exists(), "it was removed with a process in it");
        child.kill().unwrap();
        child.wait().unwrap();
        // The kernel takes a moment to let the group go.
        for _ in 0..2000 {
            if home.remove() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        panic!("{home:?} is still there");
    }
}
