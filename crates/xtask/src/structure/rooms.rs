//! Rooms and what they depend on, by cargo's account.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::graph::{self, Graph};

/// A crate below `crates/`.
#[derive(Debug, Default, Serialize)]
pub struct Room {
    /// Its name.
    pub name: String,
    /// Lines of its Rust files: sources, tests, examples and benches.
    pub lines: usize,
    /// Rooms that it depends on, sorted.
    pub depends_on: Vec<String>,
    /// Rooms that only its tests and examples depend on, sorted.
    pub dev_depends_on: Vec<String>,
    /// Its directory, relative to the root.
    #[serde(skip)]
    pub directory: String,
}

/// The part of `cargo metadata` that is used.
#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    workspace_root: PathBuf,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    manifest_path: PathBuf,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    kind: Option<String>,
    path: Option<PathBuf>,
}

/// Lists the rooms by name, their lines not counted yet.
pub fn list(root: &Path) -> Result<Vec<Room>> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output =
        Command::new(cargo).args(["metadata", "--no-deps", "--format-version", "1"]).current_dir(root).output();
    let output = output.context("cannot run cargo metadata")?;
    if !output.status.success() {
        bail!("cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr).trim_end());
    }
    parse(&output.stdout)
}

fn parse(metadata: &[u8]) -> Result<Vec<Room>> {
    let metadata: Metadata = serde_json::from_slice(metadata).context("cannot read what cargo metadata says")?;
    let inside = |package: &Package| {
        let directory = package.manifest_path.parent()?.strip_prefix(&metadata.workspace_root).ok()?.to_str()?;
        directory.starts_with("crates/").then(|| directory.to_string())
    };
    let directories: Vec<Option<String>> = metadata.packages.iter().map(inside).collect();
    let packages = || {
        metadata
            .packages
            .iter()
            .zip(&directories)
            .filter_map(|(package, directory)| Some((package, directory.as_ref()?)))
    };
    let names: BTreeSet<&str> = packages().map(|(package, _)| package.name.as_str()).collect();
    let mut rooms: Vec<Room> = packages().map(|(package, directory)| room(package, directory, &names)).collect();
    rooms.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(rooms)
}

fn room(package: &Package, directory: &str, names: &BTreeSet<&str>) -> Room {
    let depends = |is_dev: bool| -> BTreeSet<String> {
        let dependencies =
            package.dependencies.iter().filter(|dependency| (dependency.kind.as_deref() == Some("dev")) == is_dev);
        let rooms =
            dependencies.filter(|dependency| dependency.path.is_some() && names.contains(dependency.name.as_str()));
        rooms.map(|dependency| dependency.name.clone()).collect()
    };
    let depends_on = depends(false);
    let dev_depends_on = depends(true).difference(&depends_on).cloned().collect();
    let depends_on = depends_on.into_iter().collect();
    Room { name: package.name.clone(), lines: 0, depends_on, dev_depends_on, directory: directory.into() }
}

/// Finds rooms that depend on each other, dependencies of tests included.
pub fn cycles(rooms: &[Room]) -> Vec<Vec<String>> {
    let edges = |room: &Room| room.depends_on.iter().chain(&room.dev_depends_on).cloned().collect();
    graph::cycles(&rooms.iter().map(|room| (room.name.clone(), edges(room))).collect::<Graph>())
}

#[cfg(test)]
mod tests {
    use super::*;

    const METADATA: &str = r#"{"workspace_root": "/w", "packages": [
        {"name": "b", "manifest_path": "/w/crates/b/Cargo.toml", "dependencies": [
            {"name": "a", "kind": "dev", "path": "/w/crates/a"}, {"name": "libc", "kind": null}]},
        {"name": "a", "manifest_path": "/w/crates/a/Cargo.toml", "dependencies": [
            {"name": "b", "kind": null, "path": "/w/crates/b"}, {"name": "b", "kind": "dev", "path": "/w/crates/b"}]},
        {"name": "other", "manifest_path": "/w/other/Cargo.toml", "dependencies": []}]}"#;

    #[test]
    fn rooms_are_the_crates_below_crates() {
        let rooms = parse(METADATA.as_bytes()).unwrap();
        let found: Vec<_> = rooms.iter().map(|room| (room.name.as_str(), room.directory.as_str())).collect();
        assert_eq!(found, [("a", "crates/a"), ("b", "crates/b")]);
        assert_eq!((rooms[0].depends_on.as_slice(), rooms[0].dev_depends_on.len()), (["b".to_string()].as_slice(), 0));
        assert_eq!((rooms[1].depends_on.len(), rooms[1].dev_depends_on.as_slice()), (0, ["a".to_string()].as_slice()));
    }

    #[test]
    fn dependencies_of_tests_make_cycles() {
        assert_eq!(cycles(&parse(METADATA.as_bytes()).unwrap()), [["a", "b"]]);
    }
}
