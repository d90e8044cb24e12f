//! `/proc/PID/cgroup`: the control groups of a process.
//!
//! Version 2 has one tree of control groups (`0::/path`), version 1 has one for each controller (`4:memory:/path`). A
//! host that has both at once is hybrid. A process may have a different path in each tree.

/// The control groups of one process: its path in each tree.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cgroups {
    entries: Vec<(Tree, String)>,
}

/// The tree that a path belongs to; trees whose paths say most about the owner come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Tree {
    Unified,
    Systemd,
    Memory,
    OtherController,
}

/// The trees that a host has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CgroupLayout {
    /// One tree for each controller.
    V1,
    /// One tree for all controllers.
    V2,
    /// Trees of version 1 for controllers, and a tree of version 2 beside them.
    Hybrid,
    /// The kernel has no control groups.
    None,
}

impl CgroupLayout {
    /// The name used in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::V1 => "v1",
            Self::V2 => "v2",
            Self::Hybrid => "hybrid",
            Self::None => "none",
        }
    }
}

impl Cgroups {
    /// Parses `/proc/PID/cgroup`; skips lines that are not `ID:CONTROLLERS:PATH`.
    pub fn parse(text: &str) -> Self {
        let entry = |line: &str| {
            let (_, rest) = line.split_once(':')?;
            let (controllers, path) = rest.split_once(':')?;
            let tree = match controllers {
                "" => Tree::Unified,
                "name=systemd" => Tree::Systemd,
                _ if controllers.split(',').any(|c| c == "memory") => Tree::Memory,
                _ => Tree::OtherController,
            };
            path.starts_with('/').then(|| (tree, path.to_owned()))
        };
        let mut entries: Vec<_> = text.lines().filter_map(entry).collect();
        entries.sort_by_key(|(tree, _)| *tree);
        Self { entries }
    }

    /// Paths of the process in its trees. The tree of version 2 comes first, then systemd's, the memory controller's
    /// and the others: the paths that say most about the owner come first.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().map(|(_, path)| path.as_str())
    }

    /// These control groups, each with the path that `path` returns, or left out.
    pub(crate) fn map(&self, mut path: impl FnMut(Tree, &str) -> Option<String>) -> Self {
        let entries = self.entries.iter().filter_map(|(tree, old)| Some((*tree, path(*tree, old)?))).collect();
        Self { entries }
    }

    /// The path in the tree in which the kernel accounts memory: if `unified`, the tree of version 2, else the memory
    /// controller's. `None` if the process has no path there.
    pub fn memory_path(&self, unified: bool) -> Option<&str> {
        let wanted = if unified { Tree::Unified } else { Tree::Memory };
        self.entries.iter().find(|(tree, _)| *tree == wanted).map(|(_, path)| path.as_str())
    }

    /// The first path that is not the root; `/` if all are.
    pub fn main_path(&self) -> &str {
        self.paths().find(|p| *p != "/").unwrap_or("/")
    }

    /// The trees of the host, as far as the control groups of this process show them.
    pub fn layout(&self) -> CgroupLayout {
        let unified = self.entries.iter().any(|(tree, _)| *tree == Tree::Unified);
        let others = self.entries.iter().any(|(tree, _)| *tree != Tree::Unified);
        match (unified, others) {
            (true, false) => CgroupLayout::V2,
            (false, true) => CgroupLayout::V1,
            (true, true) => CgroupLayout::Hybrid,
            (false, false) => CgroupLayout::None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_2_has_one_path() {
        let c = Cgroups::parse("0::/user.slice/user-1000.slice/session-3.scope\n");
        assert_eq!(c.layout(), CgroupLayout::V2);
        assert_eq!(c.main_path(), "/user.slice/user-1000.slice/session-3.scope");
    }

    #[test]
    fn version_1_prefers_systemd_then_memory() {
        let c = Cgroups::parse("11:cpu,cpuacct:/a\n4:memory:/b\n1:name=systemd:/c:with:colons\n");
        assert_eq!(c.layout(), CgroupLayout::V1);
        assert_eq!(c.paths().collect::<Vec<_>>(), ["/c:with:colons", "/b", "/a"]);
    }

    #[test]
    fn main_path_on_hybrid_host_skips_root_of_version_2() {
        let c = Cgroups::parse("9:name=systemd:/\n4:memory:/process_api/8add\n1:cpu:/\n0::/\n");
        assert_eq!(c.layout(), CgroupLayout::Hybrid);
        assert_eq!(c.main_path(), "/process_api/8add");
        assert_eq!((c.memory_path(false), c.memory_path(true)), (Some("/process_api/8add"), Some("/")));
    }

    #[test]
    fn missing_control_groups_and_malformed_lines_give_no_paths() {
        assert_eq!(Cgroups::parse("").layout(), CgroupLayout::None);
        assert_eq!(Cgroups::parse("").main_path(), "/");
        assert_eq!(Cgroups::parse("nonsense\n1:x\n2:y:relative\n"), Cgroups::default());
    }
}
