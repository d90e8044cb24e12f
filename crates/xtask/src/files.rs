//! The files of the tree, by paths relative to its root.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

/// Lists the files below a directory that end in `.extension`, sorted. Hidden directories and cargo's output are
/// left out. A directory that does not exist has no files.
pub fn below(root: &Path, directory: &str, extension: &str) -> Result<Vec<String>> {
    let mut found = Vec::new();
    if root.join(directory).is_dir() {
        collect(root, directory, extension, &mut found)?;
    }
    found.sort();
    Ok(found)
}

fn collect(root: &Path, directory: &str, extension: &str, found: &mut Vec<String>) -> Result<()> {
    let path = root.join(directory);
    if path.join("CACHEDIR.TAG").exists() {
        return Ok(());
    }
    for entry in fs::read_dir(&path).with_context(|| format!("cannot list {}", path.display()))? {
        let entry = entry.with_context(|| format!("cannot list {}", path.display()))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let relative = format!("{directory}/{name}");
        if entry.file_type()?.is_dir() {
            if !name.starts_with('.') {
                collect(root, &relative, extension, found)?;
            }
        } else if name.rsplit_once('.').is_some_and(|(_, end)| end == extension) {
            found.push(relative);
        }
    }
    Ok(())
}

/// Reads a file as UTF-8.
pub fn read(root: &Path, file: &str) -> Result<String> {
    fs::read_to_string(root.join(file)).with_context(|| format!("cannot read {file}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargo_output_and_hidden_directories_are_left_out() {
        let root = tempfile::tempdir().unwrap();
        for file in ["fuzz/b.rs", "fuzz/a/c.rs", "fuzz/target/d.rs", "fuzz/.git/e.rs", "fuzz/f.md"] {
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        fs::write(root.path().join("fuzz/target/CACHEDIR.TAG"), "").unwrap();
        assert_eq!(below(root.path(), "fuzz", "rs").unwrap(), ["fuzz/a/c.rs", "fuzz/b.rs"]);
        assert!(below(root.path(), "docs", "md").unwrap().is_empty());
    }
}
