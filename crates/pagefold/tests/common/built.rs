//! Programs in C that a test builds for itself from `programs/`.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// A program built for a test. Dropping it removes the program.
pub struct Built {
    program: PathBuf,
    _dir: TempDir,
}

impl Built {
    /// Builds a program of `programs/`; `None`, with the reason printed, if its compiler is missing.
    pub fn new(source: &str) -> Option<Self> {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(source);
        let program = dir.path().join(file.file_stem().expect("a name"));
        let mut compiler = cc();
        compiler.arg("-o").arg(&program).arg(file);
        compile(compiler).then_some(Self { program, _dir: dir })
    }

    /// Its path.
    pub fn program(&self) -> &str {
        self.program.to_str().expect("a plain path")
    }
}

fn cc() -> Command {
    let mut command = Command::new("cc");
    command.args(["-O2", "-Wall", "-pthread"]);
    command
}

/// Runs a compiler; `false`, with the reason printed, if it is missing.
fn compile(mut command: Command) -> bool {
    match command.output() {
        Ok(output) => {
            assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
            true
        }
        Err(e) if e.kind() == ErrorKind::NotFound => {
            eprintln!("skipped: there is no {} on this host", command.get_program().display());
            false
        }
        Err(e) => panic!("{command:?}: {e}"),
    }
}
