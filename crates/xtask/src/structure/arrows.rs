//! Dependencies between files ("arrows") that ARCHITECTURE.md forbids in its section "Arrows", directly or through
//! other files.

use std::collections::BTreeSet;

use anyhow::Result;

use crate::graph::{self, Graph};

/// A module, and modules that it must not depend on, directly or through others.
#[derive(Debug, PartialEq, Eq)]
pub struct Ban {
    /// The room that the module belongs to.
    pub room: String,
    /// The module that must not depend on `from`.
    pub module: String,
    /// Modules of the room, or other rooms, on which `module` must not depend.
    pub from: Vec<String>,
}

/// Reads the table of the section "Arrows".
///
/// # Errors
/// ARCHITECTURE.md has no such table.
pub fn bans(architecture: &str) -> Result<Vec<Ban>> {
    let rows = super::allowed::table(architecture, "Arrows", &["crate", "module", "leads to none of"])?;
    let list = |cell: &str| cell.split(',').map(|name| name.trim().to_string()).collect();
    Ok(rows.into_iter().map(|row| Ban { room: row[0].clone(), module: row[1].clone(), from: list(&row[2]) }).collect())
}

/// Finds banned arrows in a room. `graph` has the files of the room that each file names, `names` the words in each file
/// that may name other rooms.
pub fn problems(room: &str, graph: &Graph, names: &Graph, bans: &[Ban]) -> Vec<String> {
    let (mut problems, graph) = (Vec::new(), with_parts(graph));
    for ban in bans.iter().filter(|ban| ban.room == room) {
        let own: Vec<&String> = graph.keys().filter(|file| is_of(file, &ban.module)).collect();
        if own.is_empty() {
            problems.push(format!("{room}: has no module `{}`, of which ARCHITECTURE.md tells arrows", ban.module));
        }
        for file in own {
            let reached: BTreeSet<&str> = graph::reachable(&graph, file).into_iter().chain([file.as_str()]).collect();
            for target in &ban.from {
                let through = reached.iter().find(|through| {
                    is_of(through, target) || names.get(**through).is_some_and(|rooms| rooms.contains(target))
                });
                if let Some(through) = through {
                    problems
                        .push(format!("{room}: {file} leads to `{target}`, by {through}; ARCHITECTURE.md forbids it"));
                }
            }
        }
    }
    problems
}

/// Adds an arrow from each file to its submodules, which it names without `crate`.
fn with_parts(graph: &Graph) -> Graph {
    let parts = |file: &str| {
        let below = format!("{}/", file.strip_suffix(".rs").unwrap_or(file));
        graph.keys().filter(move |part| part.starts_with(&below)).cloned()
    };
    graph.iter().map(|(file, targets)| (file.clone(), targets.iter().cloned().chain(parts(file)).collect())).collect()
}

/// Whether a file belongs to a module: `map.rs`, `map/*.rs`.
fn is_of(file: &str, module: &str) -> bool {
    file.strip_prefix(module).is_some_and(|rest| rest == ".rs" || rest.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graph(edges: &[(&str, &[&str])]) -> Graph {
        edges.iter().map(|(from, to)| (from.to_string(), to.iter().map(|to| to.to_string()).collect())).collect()
    }

    #[test]
    fn banned_arrow_is_found_through_other_files() {
        let text =
            "## Arrows\n\n| crate | module | leads to none of |\n|---|---|---|\n| `a` | `map` | `policy`, `table` |\n";
        let bans = bans(text).unwrap();
        let files = graph(&[
            ("map.rs", &["bits.rs"]),
            ("map/homes.rs", &["map.rs"]),
            ("bits.rs", &[]),
            ("table.rs", &["map.rs"]),
        ]);
        let names = |file: &str| graph(&[(file, &["policy"])]);
        assert!(problems("a", &files, &names("table.rs"), &bans).is_empty());
        assert_eq!(problems("a", &files, &names("bits.rs"), &bans).len(), 2, "both files of the module lead there");
        let back = graph(&[("map.rs", &["bits.rs"]), ("bits.rs", &["table.rs"]), ("table.rs", &[])]);
        assert_eq!(problems("a", &back, &Graph::new(), &bans).len(), 1);
        assert_eq!(problems("b", &back, &Graph::new(), &bans).len(), 0);
        assert_eq!(problems("a", &graph(&[("table.rs", &[])]), &Graph::new(), &bans).len(), 1, "the module is gone");
    }
}
