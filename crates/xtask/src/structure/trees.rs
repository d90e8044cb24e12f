//! Crates that a program must not be linked with, by any way. ARCHITECTURE.md names them in its section "Programs".

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::allowed;

/// A package, and crates that its programs are not linked with.
#[derive(Debug, PartialEq, Eq)]
pub struct Tree {
    package: String,
    none_of: Vec<String>,
}

/// Reads the table with the columns `package` and `is linked with none of`.
pub fn parse(architecture: &str) -> Result<Vec<Tree>> {
    let rows = allowed::table(architecture, "Programs", &["package", "is linked with none of"])?;
    let names = |cell: &str| cell.split(',').map(|name| name.trim().to_string()).filter(|name| name != "-").collect();
    Ok(rows.into_iter().map(|row| Tree { package: row[0].clone(), none_of: names(&row[1]) }).collect())
}

/// Finds crates that programs of these packages are linked with, and must not be.
pub fn problems(root: &Path, trees: &[Tree]) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    for tree in trees.iter().filter(|tree| !tree.none_of.is_empty()) {
        problems.extend(tree.problems(&linked(root, &tree.package)?));
    }
    Ok(problems)
}

/// Crates that a package's programs are linked with, by cargo's account.
fn linked(root: &Path, package: &str) -> Result<String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let words = ["tree", "--package", package, "--edges", "normal", "--prefix", "none", "--format", "{p}"];
    let output = Command::new(cargo).args(words).current_dir(root).output().context("cannot run cargo tree")?;
    if !output.status.success() {
        bail!("cargo tree failed: {}", String::from_utf8_lossy(&output.stderr).trim_end());
    }
    String::from_utf8(output.stdout).context("cannot read what cargo tree says")
}

impl Tree {
    fn problems(&self, linked: &str) -> Vec<String> {
        let linked: BTreeSet<&str> = linked.lines().filter_map(|line| line.split_whitespace().next()).collect();
        let wrong = self.none_of.iter().filter(|name| linked.contains(name.as_str()));
        let say = |name| format!("{}: is linked with {name}, which ARCHITECTURE.md excludes", self.package);
        wrong.map(say).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn excluded_crate_is_a_problem_wherever_it_stands_in_the_tree() {
        let text = "## Programs\n| package | is linked with none of |\n|-|-|\n| `a` | `b`, `c` |\n| `d` | - |\n";
        let trees = parse(text).unwrap();
        assert_eq!(trees[1], Tree { package: "d".into(), none_of: Vec::new() });
        let linked = "a v0.1.0 (/x/a)\nbb v1.0.0\ne v0.1.0 (/x/e)\nc v0.1.0 (/x/c) (*)\n";
        assert_eq!(trees[0].problems(linked), ["a: is linked with c, which ARCHITECTURE.md excludes"]);
        assert!(trees[0].problems("a v0.1.0\nbc v1.0.0\n").is_empty());
    }
}
