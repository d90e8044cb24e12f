//! `/proc/PID/cgroup`: where a process stands in the trees of control groups.
//!
//! Version 2 has one tree (`0::/path`), version 1 one a controller (`4:memory:/path`). A host that has
//! both at once is hybrid, and a process may then stand in different places of different trees.

/// The paths of one process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cgroups {
    entries: Vec<(Tree, String)>,
}

/// Which tree a path belongs to, the ones that say most about the owner first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Tree {
    Unified,
    Systemd,
    Memory,
    OtherController,
}

/// Which trees there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CgroupLayout {
    /// One tree a controller.
    V1,
    /// One tree.
    V2,
    /// Controllers in trees of version 1, and a tree of version 2 beside them.
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
    /// Parses `/proc/PID/cgroup`; lines that are not `ID:CONTROLLERS:PATH` are passed over.
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

    /// Its paths, the one that says most about the owner first: the tree of version 2, systemd's, the
    /// memory controller's, the others.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().map(|(_, path)| path.as_str())
    }

    /// The first path that is not the root; `/` if all are.
    pub fn main_path(&self) -> &str {
        self.paths().find(|p| *p != "/").unwrap_or("/")
    }

    /// Which trees there are, as far as this process tells.
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
    fn version_2() {
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
    fn a_hybrid_host_may_leave_its_version_2_tree_empty() {
        let c = Cgroups::parse("9:name=systemd:/\n4:memory:/process_api/8add\n1:cpu:/\n0::/\n");
        assert_eq!(c.layout(), CgroupLayout::Hybrid);
        assert_eq!(c.main_path(), "/process_api/8add");
    }

    #[test]
    fn no_control_groups_and_nonsense() {
        assert_eq!(Cgroups::parse("").layout(), CgroupLayout::None);
        assert_eq!(Cgroups::parse("").main_path(), "/");
        assert_eq!(Cgroups::parse("nonsense\n1:x\n2:y:relative\n"), Cgroups::default());
    }
}
