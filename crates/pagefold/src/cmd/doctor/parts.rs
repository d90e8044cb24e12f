//! The check `host:parts`: programs and files of this installation, which must belong together.

use host::Check;
use service::helper;
use std::io;
use std::path::Path;

/// Programs beside this one, and what is lacking without them.
const PROGRAMS: [(&str, &str); 5] = [
    ("pagefoldd", "there is no service"),
    ("pagefold-worker", "there is no service"),
    ("pagefold-prove", "broken pages are not folded again, and children are followed by their parents alone"),
    ("pagefold-web", "there is no HTTP"),
    ("pagefold-attach", "no process that runs can be attached"),
];

/// The agent that is put into running processes.
const OBJECT: (&str, &str) = ("pagefold-agent", "no process that runs can be attached");

/// Whether the agent lies where `./x build` leaves it, as seen from this program; `None` if this program's path is not
/// known.
fn built() -> Option<bool> {
    let program = std::env::current_exe().ok()?;
    let dir = program.parent()?;
    let musl: &Path = "../x86_64-unknown-linux-musl".as_ref();
    Some(dir.join(musl).join(dir.file_name()?).join(OBJECT.0).is_file())
}

/// Checks that all programs and the agent are there, and of the version of this program.
pub fn check() -> Check {
    let check = |found: String| Check::ok("host:parts", found, "folding, attaching, HTTP");
    let faults: Vec<String> = PROGRAMS.iter().filter_map(|part| fault(part, helper::program(part.0))).collect();
    let object = if built() == Some(true) { Ok(Path::new("").into()) } else { helper::find(OBJECT.0) };
    let faults = [faults, fault(&OBJECT, object).into_iter().collect()].concat();
    if faults.is_empty() {
        return check(format!("all there, and of one version: {}", cli::version()));
    }
    check(faults.join("; ")).warn("install all of them from one package (or ./x build), and start the service again")
}

fn fault((name, lacking): &(&str, &str), found: io::Result<std::path::PathBuf>) -> Option<String> {
    match found {
        Ok(_) => None,
        Err(e) if e.kind() == io::ErrorKind::NotFound => Some(format!("{name} is missing: {lacking}")),
        Err(e) => Some(format!("{e}: {lacking}")),
    }
}
