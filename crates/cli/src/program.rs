//! Which files to execute to start this program again, or a command of `pagefold`.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The file that this process executes, to start the same program again. After an upgrade, the program's usual path
/// leads to another file or to none, but this one still leads to the old file.
pub const OWN_PROGRAM: &str = "/proc/self/exe";

static PAGEFOLD: OnceLock<PathBuf> = OnceLock::new();

/// Path of `pagefold`: this program, or the one that [`use_pagefold`] has named.
pub fn pagefold() -> &'static Path {
    PAGEFOLD.get().map_or(Path::new(OWN_PROGRAM), PathBuf::as_path)
}

/// Sets the path of `pagefold`, for a program that is not `pagefold` itself. Only the first call has an effect.
pub fn use_pagefold(program: PathBuf) {
    let _ = PAGEFOLD.set(program);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pagefold_is_this_program_until_another_is_named() {
        assert_eq!(pagefold(), Path::new(OWN_PROGRAM));
        use_pagefold("/opt/pagefold".into());
        use_pagefold("/opt/other".into());
        assert_eq!(pagefold(), Path::new("/opt/pagefold"));
    }
}
