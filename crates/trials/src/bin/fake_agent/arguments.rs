//! Arguments of this process that keep everybody waiting who reads them.

use act::{MemberMemory, Purpose, Userfault, Watch};
use std::fs::File;
use std::io::Read;
use std::time::Duration;

/// Memory that never comes, in which the kernel looks for this process's arguments.
pub struct Arguments {
    _memory: MemberMemory,
    _faults: Userfault,
}

impl Arguments {
    /// Takes a process with `CAP_SYS_RESOURCE` and `CAP_SYS_PTRACE`.
    pub fn hide() -> Result<Self, String> {
        let memory = MemberMemory::new(1).map_err(|e| e.to_string())?;
        let faults = Userfault::open(Purpose::Follow).map_err(|e| e.to_string())?;
        faults.register(memory.range(), Watch::Missing).map_err(|e| e.to_string())?;
        let start = memory.range().start.0;
        // The memory lies below the stack, where the arguments were. Their beginning must never lie behind their end.
        for (place, address) in [(libc::PR_SET_MM_ARG_START, start), (libc::PR_SET_MM_ARG_END, start + 64)] {
            // SAFETY: the kernel looks for the text of the arguments there, for others. This process does not.
            if unsafe { libc::prctl(libc::PR_SET_MM, place, address, 0, 0) } != 0 {
                return Err(format!("prctl: {}", std::io::Error::last_os_error()));
            }
        }
        Ok(Self { _memory: memory, _faults: faults })
    }

    /// Whether reading them waits.
    pub fn keep_waiting(&self) -> bool {
        let reading = std::thread::spawn(|| {
            let _ = File::open("/proc/self/cmdline").and_then(|mut file| file.read_to_end(&mut Vec::new()));
        });
        std::thread::sleep(Duration::from_millis(200));
        !reading.is_finished()
    }
}
