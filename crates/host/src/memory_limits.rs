//! Memory limits of control groups: how much memory the kernel lets processes have.
//!
//! A limit holds for a control group and all groups below it together. So the most that some processes may have
//! together is a sum over the tree. A group may have as much as its limit. If all of these processes lie in groups
//! below it, it may have no more than these groups may have together:
//!
//! ```text
//!   /           no limit      1.5 GiB
//!   |- tenant   1 GiB         1 GiB: the limit
//!   |  |- vm1   768 MiB       768 MiB
//!   |  `- vm2   768 MiB       768 MiB
//!   `- other    512 MiB       512 MiB
//! ```
//!
//! Version 1 has the limit in `memory.limit_in_bytes`, version 2 in `memory.max`. On a hybrid host the memory
//! controller is in one of the trees of version 1.
//!
//! If a process takes more memory than is left below the limit, the kernel kills a process of the group. So pages that
//! become private need room below the limit, too ([`MemoryLimits::left`]).

use crate::mounts::Mount;
use crate::{Cgroups, text};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Part of a limit that never counts as left: 1/20. It is kept for other memory that processes need while pages become
/// private.
const KEPT_PART: u64 = 20;

/// The tree of control groups that limits memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryLimits {
    /// The directory where the tree is mounted.
    at: PathBuf,
    /// The group that is mounted there.
    mounted: PathBuf,
    files: &'static Files,
}

/// Names of a group's files, by version.
#[derive(Debug, PartialEq, Eq)]
struct Files {
    limit: &'static str,
    used: &'static str,
    /// The line of `memory.stat` with inactive file pages of the group and of the groups below it.
    idle: &'static str,
    /// Lines with other memory that the kernel takes back before it ends a process.
    reclaimed: &'static [&'static str],
}

const V1: Files = Files {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    idle: "total_inactive_file ",
    reclaimed: &["total_active_file "],
};
const V2: Files = Files {
    limit: "memory.max",
    used: "memory.current",
    idle: "inactive_file ",
    reclaimed: &["active_file ", "slab_reclaimable "],
};

/// A control group whose memory limit binds processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bound {
    /// The control group, as the kernel names it.
    pub group: PathBuf,
    /// Its limit, in bytes.
    pub limit: u64,
    /// Bytes that the kernel can still give it, as [`MemoryLimits::room_bytes`] has them.
    pub room: u64,
}

/// Memory that is left in control groups, from which some is taken one after the other.
#[derive(Debug)]
pub struct LeftMemory<'a> {
    limits: &'a MemoryLimits,
    /// Bytes left in each group that was looked at.
    groups: BTreeMap<PathBuf, u64>,
}

impl LeftMemory<'_> {
    /// Takes as much of `wanted` bytes as processes of a group can still get, and returns how much this is: the least
    /// of what is left to the group and to all groups above it. If the kernel does not tell, all of `wanted` is
    /// returned.
    pub fn take(&mut self, group: &str, wanted: u64) -> u64 {
        let Some(path) = self.limits.inside(group) else { return wanted };
        for group in path.ancestors() {
            self.groups.entry(group.to_owned()).or_insert_with(|| self.limits.left_in(group));
        }
        let left = path.ancestors().filter_map(|group| self.groups.get(group)).min();
        let taken = left.map_or(wanted, |left| wanted.min(*left));
        for group in path.ancestors() {
            self.groups.entry(group.to_owned()).and_modify(|left| *left -= taken);
        }
        taken
    }
}

impl MemoryLimits {
    /// The tree of this host; `None` if no controller of memory is mounted.
    pub fn find() -> Option<Self> {
        Self::parse(&text::read("/proc/self/mountinfo").ok()?)
    }

    fn parse(mountinfo: &str) -> Option<Self> {
        let mounts = || mountinfo.lines().filter_map(Mount::parse);
        let first = mounts().find(|m| m.kind == "cgroup" && m.options.split(',').any(|option| option == "memory"));
        let (mount, files) = match first {
            Some(mount) => (mount, &V1),
            None => (mounts().find(|m| m.kind == "cgroup2")?, &V2),
        };
        Some(Self { at: mount.at.into(), mounted: mount.root.into(), files })
    }

    /// The group in which a process's memory counts; `None` if the process is gone.
    pub fn group_of(&self, pid: u32) -> Option<String> {
        let cgroups = Cgroups::parse(&text::read(format!("/proc/{pid}/cgroup")).ok()?);
        Some(cgroups.memory_path(*self.files == V2).unwrap_or("/").to_owned())
    }

    /// The most memory that processes of all these groups may have together. `None` if the processes of one of these
    /// groups have no limit below `ram` bytes, or the kernel does not tell.
    pub fn most_bytes(&self, groups: &BTreeSet<String>, ram: u64) -> Option<u64> {
        let mut paths = Vec::new();
        for group in groups {
            let path = self.inside(group)?;
            let smallest = path.ancestors().map(|group| self.limit(group)).min()?;
            paths.push(Some(path).filter(|_| smallest < ram)?);
        }
        (!paths.is_empty()).then(|| self.most_below(Path::new(""), &paths))
    }

    /// The limit that applies to processes of a group, and how much of it they can still get, without 1/20 of the limit
    /// that is kept. `None` if no limit below the host's RAM applies.
    pub fn bound_and_left(&self, group: &str) -> Option<(u64, u64)> {
        let limit = self.most_bytes(&BTreeSet::from([group.to_owned()]), crate::ram_bytes())?;
        Some((limit, self.left().take(group, limit)))
    }

    /// Memory that processes of a group can still get before the kernel kills one of them, if nothing is swapped out.
    /// `None` if no limit below the host's RAM applies.
    pub fn room_bytes(&self, group: &str) -> Option<u64> {
        self.bounds(group).into_iter().map(|bound| bound.room).min()
    }

    /// The control groups whose limits apply to processes of this group: itself, or groups above it. Empty if the
    /// kernel does not tell.
    pub fn bounds(&self, group: &str) -> Vec<Bound> {
        let all = self.inside(group).into_iter().flat_map(Path::ancestors);
        let limited = all.map(|group| (group, self.limit(group))).filter(|(_, limit)| *limit < crate::ram_bytes());
        let room = |group, limit: u64| limit.saturating_sub(self.needed(group, self.files.reclaimed));
        let bound = |(group, limit)| Bound { group: self.mounted.join(group), limit, room: room(group, limit) };
        limited.map(bound).collect()
    }

    /// The directory of a group; `None` for the one that holds all others, or if it cannot be seen.
    pub fn dir_of(&self, group: &str) -> Option<PathBuf> {
        let path = self.inside(group).filter(|path| path.components().next().is_some())?;
        Some(self.at.join(path))
    }

    /// Memory that processes of a group use, page cache included; `None` if the kernel does not tell.
    pub fn used_bytes(&self, group: &str) -> Option<u64> {
        text::read(self.at.join(self.inside(group)?).join(self.files.used)).ok()?.trim().parse().ok()
    }

    /// Memory that processes can still get before a limit is reached.
    pub const fn left(&self) -> LeftMemory<'_> {
        LeftMemory { limits: self, groups: BTreeMap::new() }
    }

    /// Path of a group below the mounted one; `None` if the group cannot be seen.
    fn inside<'a>(&self, group: &'a str) -> Option<&'a Path> {
        let path = Path::new(group).strip_prefix(&self.mounted).ok()?;
        path.components().all(|part| matches!(part, std::path::Component::Normal(_))).then_some(path)
    }

    /// Memory that is left to a group itself: its limit less the memory that it uses. Idle pages of files do not count
    /// as used, because the kernel takes them back.
    fn left_in(&self, group: &Path) -> u64 {
        let limit = self.limit(group);
        // A group without a real limit is not read: for a group above many others, the kernel adds up all of them.
        if limit >= crate::ram_bytes() {
            return u64::MAX;
        }
        (limit - limit / KEPT_PART).saturating_sub(self.needed(group, &[]))
    }

    /// Memory that a group uses, without idle pages of files, and without the memory in these lines of its
    /// `memory.stat`.
    fn needed(&self, group: &Path, others: &[&str]) -> u64 {
        let file = |name| text::read(self.at.join(group).join(name));
        let used = file(self.files.used).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0_u64);
        let stat = file("memory.stat").unwrap_or_default();
        let of = |kind: &&str| stat.lines().find_map(|line| line.strip_prefix(*kind)?.parse::<u64>().ok());
        let spared = [self.files.idle].iter().chain(others).filter_map(of).fold(0, u64::saturating_add);
        used.saturating_sub(spared)
    }

    /// The most that processes of these groups, which lie in `group`, may have together.
    fn most_below(&self, group: &Path, paths: &[&Path]) -> u64 {
        let limit = self.limit(group);
        if paths.contains(&group) {
            return limit;
        }
        let depth = group.components().count() + 1;
        let child = |path: &&Path| path.components().take(depth).collect::<PathBuf>();
        let children: BTreeSet<PathBuf> = paths.iter().map(child).collect();
        let below = |child: &PathBuf| {
            let inside: Vec<&Path> = paths.iter().filter(|path| path.starts_with(child)).copied().collect();
            self.most_below(child, &inside)
        };
        children.iter().map(below).fold(0, u64::saturating_add).min(limit)
    }

    /// The limit of one group; the greatest number if it has none.
    fn limit(&self, group: &Path) -> u64 {
        let limit = text::read(self.at.join(group).join(self.files.limit));
        limit.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const G: u64 = 1 << 30;
    const M: u64 = 1 << 20;

    const UNIFIED: &str = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
    const HYBRID: &str = "\
35 30 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
37 30 0:32 /jail /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
38 30 0:33 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
";

    /// A tree with these limits in a directory of its own.
    fn tree(files: &'static Files, limits: &[(&str, &str)]) -> (tempfile::TempDir, MemoryLimits) {
        let dir = tempfile::tempdir().unwrap();
        for (group, limit) in limits {
            fs::create_dir_all(dir.path().join(group)).unwrap();
            fs::write(dir.path().join(group).join(files.limit), limit).unwrap();
        }
        let limits = MemoryLimits { at: dir.path().to_owned(), mounted: "/".into(), files };
        (dir, limits)
    }

    fn most(limits: &MemoryLimits, groups: &[&str]) -> Option<u64> {
        limits.most_bytes(&groups.iter().map(|group| (*group).to_owned()).collect(), 64 * G)
    }

    #[test]
    fn memory_controller_is_found_in_either_version() {
        let found = |mountinfo| MemoryLimits::parse(mountinfo).map(|l| (l.at, l.mounted, l.files.limit));
        assert_eq!(found(UNIFIED), Some(("/sys/fs/cgroup".into(), "/".into(), "memory.max")));
        let hybrid = ("/sys/fs/cgroup/memory".into(), "/jail".into(), "memory.limit_in_bytes");
        assert_eq!(found(HYBRID), Some(hybrid));
        assert_eq!(found("22 28 0:20 / /proc rw shared:12 - proc proc rw\nrubbish\n"), None);
    }

    /// Texts of the files as version 2 writes them: the root has none.
    #[test]
    fn smallest_limit_along_the_path_holds_and_counts_once() {
        let (_dir, limits) = tree(
            &V2,
            &[
                ("tenant", "1073741824\n"),
                ("tenant/vm1", "805306368\n"),
                ("tenant/vm2", "805306368\n"),
                ("tenant/vm1/inner", "max\n"),
                ("other", "536870912\n"),
                ("free", "max\n"),
            ],
        );
        assert_eq!(most(&limits, &["/other"]), Some(512 * M));
        assert_eq!(most(&limits, &["/tenant/vm1/inner"]), Some(768 * M));
        assert_eq!(most(&limits, &["/tenant/vm1", "/tenant/vm1/inner"]), Some(768 * M));
        assert_eq!(most(&limits, &["/tenant/vm1", "/tenant/vm2"]), Some(G));
        assert_eq!(most(&limits, &["/tenant/vm1/inner", "/tenant/vm2", "/other"]), Some(G + 512 * M));
    }

    #[test]
    fn member_without_limit_or_out_of_sight_means_no_sum() {
        let (_dir, limits) = tree(&V2, &[("free", "max\n"), ("other", "1073741824\n"), ("wide", "999999999999\n")]);
        for group in ["/free", "/", "/wide", "/../elsewhere", "/no/such"] {
            assert_eq!(most(&limits, &["/other", group]), None, "{group}");
        }
        assert_eq!(most(&limits, &[]), None);
        let jailed = MemoryLimits { mounted: "/jail".into(), ..limits };
        assert_eq!((most(&jailed, &["/jail/other"]), most(&jailed, &["/jailother"])), (Some(G), None));
    }

    #[test]
    fn bound_of_a_group_is_the_smallest_above_it_and_its_rest_is_told() {
        let (dir, limits) = tree(&V2, &[("t", "1048576000\n"), ("t/a", "max\n"), ("free", "max\n")]);
        for group in ["t", "t/a"] {
            fs::write(dir.path().join(group).join(V2.used), format!("{}\n", 300 * M)).unwrap();
        }
        // 1000 MiB, of which 1/20 is not counted.
        assert_eq!(limits.bound_and_left("/t/a"), Some((1000 * M, 650 * M)));
        assert_eq!(limits.bound_and_left("/free"), None);
    }

    /// Version 1 writes no word where there is no limit, but the greatest number of whole pages.
    #[test]
    fn first_version_has_no_limit_at_its_greatest_number() {
        let none = "9223372036854771712\n";
        let (_dir, limits) = tree(&V1, &[("", none), ("a", "268435456\n"), ("b", none)]);
        assert_eq!((most(&limits, &["/a"]), most(&limits, &["/a", "/b"])), (Some(256 * M), None));
    }

    /// Two groups of a tenant; 100 MiB of what one uses are idle pages of files.
    #[test]
    fn members_of_a_group_share_its_left_memory() {
        for files in [&V1, &V2] {
            let (dir, limits) = tree(files, &[("t", "1073741824\n"), ("t/a", "461373440\n"), ("t/b", "max\n")]);
            for (group, used, idle) in [("t", 900 * M, 100 * M), ("t/a", 400 * M, 100 * M), ("t/b", 500 * M, 0)] {
                let at = dir.path().join(group);
                fs::write(at.join(files.used), format!("{used}\n")).unwrap();
                fs::write(at.join("memory.stat"), format!("anon 7\n{}{idle}\n", files.idle)).unwrap();
            }
            let tenant = G - G / 20 - 800 * M;
            let mut left = limits.left();
            assert_eq!(left.take("/t/a", 50 * M), 50 * M);
            assert_eq!((limits.used_bytes("/t/a"), limits.used_bytes("/t/c")), (Some(400 * M), None));
            assert_eq!((limits.dir_of("/t/a"), limits.dir_of("/")), (Some(dir.path().join("t/a")), None));
            assert_eq!(left.take("/t/b", 500 * M), tenant - 50 * M, "the tenant's limit, of which 50 MiB are taken");
            assert_eq!((left.take("/t/a", M), left.take("/t/b", M), left.take("/t", M)), (0, 0, 0));
            let mut left = limits.left();
            assert_eq!(left.take("/t/a", G), (440 - 22 - 300) * M, "its own limit");
            assert_eq!((left.take("/t/b", G), left.take("/elsewhere", G)), (tenant - 118 * M, G));
        }
    }

    /// A tenant that was given a group writes its limit. Sums are the largest number at most, and nothing is left
    /// twice.
    #[test]
    fn numbers_of_groups_at_their_ends_overflow_nothing() {
        let ends = ["0", "1", "4503599627370496", "18446744073709551615", "18446744073709551616", "-1", "max"];
        for files in [&V1, &V2] {
            for end in ends {
                let (dir, limits) =
                    tree(files, &[("t", "1073741824"), ("t/a", end), ("t/b", end), ("u", end), ("v", end)]);
                for group in ["t/a", "t/b", "u", "v"] {
                    fs::write(dir.path().join(group).join(files.used), end).unwrap();
                    fs::write(dir.path().join(group).join("memory.stat"), format!("{}{end}\n", files.idle)).unwrap();
                }
                assert!(most(&limits, &["/t/a", "/t/b"]).is_some_and(|bytes| bytes <= G), "{end}");
                assert!(most(&limits, &["/u", "/v"]).is_none_or(|bytes| bytes <= 2 * 64 * G), "{end}");
                let mut left = limits.left();
                let taken = ["/t/a", "/t/b", "/u", "/v"].map(|group| left.take(group, u64::MAX));
                assert!(taken[0].saturating_add(taken[1]) <= G, "{end}: {taken:?}");
            }
        }
    }

    #[test]
    fn room_of_a_group_is_all_that_the_kernel_can_give_it() {
        for files in [&V1, &V2] {
            let (dir, limits) = tree(files, &[("t", "1048576000\n"), ("t/a", "999999999999999\n")]);
            assert_eq!(limits.room_bytes("/t/a"), Some(1000 * M), "nothing is told of what it uses");
            fs::write(dir.path().join("t").join(files.used), format!("{}\n", 990 * M)).unwrap();
            let stat = format!("anon 7\n{}{}\n{}{}\n", files.idle, 100 * M, files.reclaimed[0], 50 * M);
            fs::write(dir.path().join("t/memory.stat"), stat).unwrap();
            assert_eq!((limits.room_bytes("/t/a"), limits.room_bytes("/other")), (Some(160 * M), None));
            assert_eq!(limits.bounds("/t/a"), [Bound { group: "/t".into(), limit: 1000 * M, room: 160 * M }]);
            fs::write(dir.path().join("t").join(files.used), format!("{}\n", 2000 * M)).unwrap();
            assert_eq!(limits.room_bytes("/t"), Some(0));
        }
    }

    #[test]
    fn own_group_is_known_on_this_host() {
        let Some(limits) = MemoryLimits::find() else {
            eprintln!("skipped: no controller of memory is mounted");
            return;
        };
        assert!(limits.group_of(std::process::id()).unwrap().starts_with('/'));
        assert_eq!(limits.group_of(0), None);
    }
}
