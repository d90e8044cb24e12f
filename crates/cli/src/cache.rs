//! The directory for files that can be made again when they are lost.

use std::env;
use std::path::PathBuf;

/// `PAGEFOLD_CACHE`, else `pagefold` under `XDG_CACHE_HOME` or `~/.cache`; `None` if none of these variables nor `HOME` is set.
pub fn cache_dir() -> Option<PathBuf> {
    variable("PAGEFOLD_CACHE")
        .or_else(|| Some(variable("XDG_CACHE_HOME")?.join("pagefold")))
        .or_else(|| Some(variable("HOME")?.join(".cache/pagefold")))
}

fn variable(name: &str) -> Option<PathBuf> {
    env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}
