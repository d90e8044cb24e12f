//! The auxiliary vector: facts that the kernel gives to a program when a process executes it.

use crate::memory_files::proc_file;
use crate::{Error, ProcessMemory, Result};
use linux_raw_sys::auxvec::AT_RANDOM;
use page::HostVirt;
use std::fs::File;
use std::io::Read;

/// Longest vector that is read, in bytes. The kernel's has some 400.
const MOST_BYTES: u64 = 4096;

/// The auxiliary vector of a program. The kernel chooses the addresses in it at random for each program that is
/// executed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuxiliaryVector(Vec<u8>);

impl AuxiliaryVector {
    /// The auxiliary vector of the program that a process runs.
    ///
    /// # Errors
    /// [`Error::is_gone`] and [`Error::is_denied`].
    pub fn of(pid: u32) -> Result<Self> {
        let path = proc_file(pid, "auxv");
        let mut bytes = Vec::new();
        let read = File::open(&path).and_then(|file| file.take(MOST_BYTES).read_to_end(&mut bytes));
        read.map_err(|e| Error::file("read", &path, e))?;
        Ok(Self(bytes))
    }

    /// The value of this kind (`AT_*`).
    pub fn value(&self, kind: u32) -> Option<u64> {
        let words: Vec<u64> = self.0.as_chunks().0.iter().map(|bytes| u64::from_ne_bytes(*bytes)).collect();
        words.as_chunks().0.iter().find(|[key, _]| *key == u64::from(kind)).map(|[_, value]| *value)
    }
}

/// The 16 random bytes (`AT_RANDOM`) that the kernel gives to each program that it executes. A fork copies them with
/// the stack. So two processes with the same bytes come from one execution of a program, unless one of them has written
/// the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Execution([u8; 16]);

impl Execution {
    /// The bytes of a process; `None` if they cannot be read.
    pub fn of(pid: u32) -> Option<Self> {
        let at = AuxiliaryVector::of(pid).ok()?.value(AT_RANDOM)?;
        let mut bytes = [0; 16];
        ProcessMemory::open(pid).ok()?.read_bytes(HostVirt(at), &mut bytes).ok()?;
        Some(Self(bytes))
    }
}

#[cfg(test)]
impl AuxiliaryVector {
    /// The execution with these random bytes.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        Self(bytes.to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::process::{Command, Stdio};

    #[test]
    fn forked_child_is_of_its_parents_execution_and_other_programs_are_not() {
        // The shell forks for what stands in parentheses, and waits for its input to end.
        let shell = || {
            let mut command = Command::new("sh");
            command.args(["-c", "exec 3<&0; (echo forked; read line <&3; exit) & wait; exit"]);
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a shell")
        };
        let mut shells = [shell(), shell()];
        for shell in &mut shells {
            shell.stdout.as_mut().expect("a pipe").read_exact(&mut [0; 6]).expect("it forks");
        }
        let [first, second] = shells.each_ref().map(|shell| Execution::of(shell.id()).expect("it runs"));
        let own = Execution::of(std::process::id()).expect("our own memory can be read");
        assert!(first != own && first != second);
        let children: Vec<_> = crate::children(shells[0].id()).into_iter().map(Execution::of).collect();
        for mut shell in shells {
            drop(shell.stdin.take());
            assert!(shell.wait().expect("it ends").success());
        }
        assert_eq!(children, [Some(first)]);
    }
}
