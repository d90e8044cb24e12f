//! The library to be preloaded, and the programs that it can be loaded into.

use cli::exit::Stop;
use object::LittleEndian;
use object::elf::{EM_X86_64, FileHeader64, PT_INTERP};
use object::read::ReadCache;
use object::read::elf::{FileHeader, ProgramHeader};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// File name of the agent's library.
const LIBRARY: &str = "libpagefold.so";
/// Greatest depth of scripts whose interpreter is a script: the kernel's limit.
const MOST_INTERPRETERS: usize = 4;

/// Reason why a program cannot be executed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Missing {
    /// The file does not exist.
    #[error("there is no program {}", .0.display())]
    NoSuch(PathBuf),
    /// The file is not a program, or the caller may not execute it.
    #[error("{} cannot be executed: no right to, or not a program", .0.display())]
    NoRight(PathBuf),
}

impl Missing {
    /// The exit code that shells use.
    pub const fn code(&self) -> u8 {
        match self {
            Self::NoSuch(_) => 127,
            Self::NoRight(_) => 126,
        }
    }
}

/// Finds a program as `execvp` does.
pub fn find_program(name: &OsStr) -> Result<PathBuf, Missing> {
    let executable = |path: &Path| path.is_file() && rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok();
    let given = PathBuf::from(name);
    let found: Vec<PathBuf> = if name.as_bytes().contains(&b'/') {
        vec![given.clone()]
    } else {
        let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
        std::env::split_paths(&path).map(|dir| dir.join(name)).collect()
    };
    match found.iter().find(|path| executable(path)) {
        Some(path) => Ok(path.clone()),
        None if found.iter().any(|path| path.exists()) => Err(Missing::NoRight(given)),
        None => Err(Missing::NoSuch(given)),
    }
}

/// Fails with the reason if no library can be loaded into a program, or into the interpreter of a script.
pub fn check_program(program: &Path) -> anyhow::Result<()> {
    let no = |why: String| Err(Stop::Usage(format!("{} cannot be a member: {why}", program.display())).into());
    let mut path = program.to_owned();
    for _ in 0..MOST_INTERPRETERS {
        // A file that may be executed, but not read, is left to the loader.
        let Ok(file) = File::open(&path) else { return Ok(()) };
        if let Some(why) = gains_rights(&path) {
            return no(why);
        }
        let mut start = Vec::new();
        if (&file).take(4096).read_to_end(&mut start).is_err() {
            return Ok(());
        }
        if let Some(line) = start.strip_prefix(b"#!") {
            let line = line.split(|&b| b == b'\n').next().unwrap_or_default().trim_ascii();
            let interpreter = line.split(|b| b.is_ascii_whitespace()).next().unwrap_or_default();
            path = PathBuf::from(OsString::from_vec(interpreter.to_owned()));
            continue;
        }
        return match linked(&file) {
            Linked::ByLoader => Ok(()),
            Linked::Statically => no("it is linked statically, so no library can be loaded into it".into()),
            Linked::ForMusl => no("it is linked with musl, and this libpagefold.so with glibc".into()),
            Linked::Foreign => no("it is not a program for x86-64".into()),
        };
    }
    Ok(())
}

/// The reason why the loader will ignore `LD_PRELOAD`: the program gets more rights than its caller. `None` if it does
/// not.
fn gains_rights(path: &Path) -> Option<String> {
    let found = fs::metadata(path).ok()?;
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    if found.mode() & 0o4000 != 0 && found.uid() != uid {
        return Some(format!("it is set-uid (user {}), and such programs load no libraries of others", found.uid()));
    }
    if found.mode() & 0o2000 != 0 && found.gid() != gid {
        return Some(format!("it is set-gid (group {}), and such programs load no libraries of others", found.gid()));
    }
    let capabilities = rustix::fs::getxattr(path, "security.capability", &mut [0_u8; 64]).is_ok_and(|n| n > 0);
    (capabilities && uid != 0)
        .then(|| "it has file capabilities, and such programs load no libraries of others".to_owned())
}

/// The way an ELF file is linked.
#[derive(Debug, PartialEq, Eq)]
enum Linked {
    ByLoader,
    Statically,
    ForMusl,
    Foreign,
}

fn linked(file: &File) -> Linked {
    let file = ReadCache::new(file);
    let Ok(header) = FileHeader64::<LittleEndian>::parse(&file) else { return Linked::Foreign };
    let parts = header.endian().and_then(|endian| header.program_headers(endian, &file));
    let Some(parts) = parts.ok().filter(|_| header.e_machine(LittleEndian) == EM_X86_64) else {
        return Linked::Foreign;
    };
    let Some(loader) = parts.iter().find(|part| part.p_type(LittleEndian) == PT_INTERP) else {
        return Linked::Statically;
    };
    let name = loader.interpreter(LittleEndian, &file).ok().flatten().unwrap_or_default();
    if name.windows(7).any(|part| part == b"ld-musl") { Linked::ForMusl } else { Linked::ByLoader }
}

/// The path of the library, next to this program or where packages put it.
pub fn library() -> anyhow::Result<PathBuf> {
    let program = std::env::current_exe().unwrap_or_default();
    let dir = program.parent().unwrap_or(Path::new("/"));
    let places = [dir.join(LIBRARY), dir.join("../lib/pagefold").join(LIBRARY)];
    let Some(found) = places.iter().find(|path| path.is_file()) else {
        let places: Vec<_> = places.iter().map(|p| p.display().to_string()).collect();
        let missing = format!("{LIBRARY} is missing: it should be {}; build it with cargo build", places.join(" or "));
        return Err(Stop::HostLacks(missing).into());
    };
    let found = found.canonicalize()?;
    // The loader takes both characters for the end of a name, and has no way to quote them.
    if found.as_os_str().as_bytes().iter().any(|b| matches!(b, b' ' | b':')) {
        let why =
            format!("{} cannot be preloaded: its path has a blank or a colon; install it elsewhere", found.display());
        return Err(Stop::HostLacks(why).into());
    }
    Ok(found)
}

/// The list of libraries to preload: `library` in front of those given before.
pub fn prepended(library: &Path, before: Option<OsString>) -> OsString {
    let mut all = library.as_os_str().to_owned();
    if let Some(before) = before.filter(|list| !list.is_empty()) {
        all.push(":");
        all.push(before);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn programs_are_found_as_shells_do() {
        assert!(find_program(OsStr::new("sh")).unwrap().ends_with("bin/sh"));
        assert_eq!(find_program(OsStr::new("no-such-program")).unwrap_err().code(), 127);
        assert_eq!(find_program(OsStr::new("/etc/passwd")).unwrap_err().code(), 126);
        assert_eq!(find_program(OsStr::new("/etc")).unwrap_err().code(), 126);
    }

    #[test]
    fn unloadable_programs_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("program");
        check_program(Path::new("/bin/sh")).unwrap();
        let mut sh = fs::read("/bin/sh").unwrap();
        fs::write(&path, format!("#!{} -e\n", "/bin/sh")).unwrap();
        check_program(&path).unwrap();
        // Without its loader (`PT_INTERP`), it counts as linked statically.
        let headers = u64::from_le_bytes(sh[32..40].try_into().unwrap()) as usize;
        let count = usize::from(u16::from_le_bytes(sh[56..58].try_into().unwrap()));
        let interpreter = (0..count).map(|n| headers + n * 56).find(|&at| sh[at] == 3).unwrap();
        sh[interpreter] = 4;
        fs::write(&path, &sh).unwrap();
        assert!(check_program(&path).unwrap_err().to_string().contains("linked statically"));
        sh[4] = 1;
        fs::write(&path, &sh).unwrap();
        assert!(check_program(&path).unwrap_err().to_string().contains("not a program for x86-64"));
        if rustix::process::getuid().is_root() {
            std::os::unix::fs::chown(&path, Some(65534), None).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o4755)).unwrap();
            assert!(check_program(&path).unwrap_err().to_string().contains("set-uid (user 65534)"));
        }
    }

    #[test]
    fn earlier_preloads_stay() {
        let library = Path::new("/x/libpagefold.so");
        assert_eq!(prepended(library, None), "/x/libpagefold.so");
        assert_eq!(prepended(library, Some("".into())), "/x/libpagefold.so");
        assert_eq!(prepended(library, Some("a.so b.so".into())), "/x/libpagefold.so:a.so b.so");
    }
}
