//! The version and the build of Pagefold's programs, which each of them prints with `--version`.

use std::sync::LazyLock;

/// The version of Pagefold.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The commit that the program was built from, as set by `./x build --release` and `./x package`; `None` in a build for
/// development.
pub const COMMIT: Option<&str> = option_env!("PAGEFOLD_COMMIT");
/// The kind of build: `release` or `development`.
pub const BUILD: &str = if cfg!(debug_assertions) { "development" } else { "release" };

/// Version, commit and kind of build in words, for `--version`.
pub fn version() -> &'static str {
    static WORDS: LazyLock<String> = LazyLock::new(|| {
        let commit = COMMIT.map_or(String::new(), |commit| format!("commit {commit}, "));
        format!("{VERSION} ({commit}{BUILD} build)")
    });
    &WORDS
}
