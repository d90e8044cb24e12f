//! The program that has Pagefold's commands, for those who start one of them.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The file of this program, to start it again. It is the same one after an upgrade has replaced it, whose path would name another, or none.
pub const OWN_PROGRAM: &str = "/proc/self/exe";

static PAGEFOLD: OnceLock<PathBuf> = OnceLock::new();

/// Path of `pagefold`: this program, or the one that [`use_pagefold`] has named.
pub fn pagefold() -> &'static Path {
    PAGEFOLD.get().map_or(Path::new(OWN_PROGRAM), PathBuf::as_path)
}

/// Names the file of `pagefold`, in a program that is another one and uses its crates. The first call counts.
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
