//! Version and build of a program, as each of ours tells them.

use std::sync::LazyLock;

/// The version.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The commit that it was built from. `./x build --release` and `./x package` tell; a build for development, which changes all the time, has none.
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
