//! Programs that are started beside workers: the prover, the web side, and the one that attaches.

use std::io;
use std::path::PathBuf;

/// The path of a helper. It lies beside this program, as where both were built, or in `../lib/pagefold` from there, as in
/// a package.
///
/// # Errors
/// It is in neither place (`NotFound`), or the place of this program is not known.
pub fn program(name: &str) -> io::Result<PathBuf> {
    let own = std::env::current_exe()?;
    let beside = own.with_file_name(name);
    let in_library = own.parent().and_then(|dir| dir.parent()).map(|dir| dir.join("lib/pagefold").join(name));
    if beside.exists() {
        return Ok(beside);
    }
    in_library.filter(|path| path.exists()).ok_or_else(|| {
        let (beside, kind) = (beside.display(), io::ErrorKind::NotFound);
        io::Error::new(kind, format!("neither {beside} is there, nor a file of that name in ../lib/pagefold"))
    })
}
