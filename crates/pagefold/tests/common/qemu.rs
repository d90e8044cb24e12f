//! Real QEMUs, paused from the start, with a known part of their RAM filled.

use std::fs;
use std::io::{BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// RAM of each QEMU: 128 MiB.
pub const RAM_BYTES: u64 = 128 << 20;
/// Filled part of the RAM: 8 MiB, in pages that all differ.
pub const FILLED_BYTES: u64 = 8 << 20;

/// One paused QEMU. Dropping it ends it.
pub struct Qemu {
    child: Child,
    fill: PathBuf,
    pub name: String,
}

impl Qemu {
    /// Starts one; `None`, with the reason on stderr, if QEMU is not installed. Its name is `name` and the pid of this
    /// process, so that no two tests use the same.
    pub fn start(name: &str, more: &[&str]) -> Option<Self> {
        let name = format!("{name}-{}", std::process::id());
        let fill = std::env::temp_dir().join(format!("pagefold-{name}.bin"));
        let bytes: Vec<u8> =
            (0..FILLED_BYTES / 8).flat_map(|n: u64| n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_ne_bytes()).collect();
        fs::write(&fill, bytes).expect("write what RAM is filled with");
        let child = Command::new("qemu-system-x86_64")
            .args(["-name", &format!("guest={name},debug-threads=on"), "-m", "128", "-S", "-nodefaults"])
            .args(["-accel", "tcg,tb-size=32", "-display", "none", "-monitor", "stdio"])
            .args(["-device", &format!("loader,file={},addr=0x1000000,force-raw=on", fill.display())])
            .args(more)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        match child {
            Ok(child) => {
                let mut qemu = Self { child, fill, name };
                qemu.wait_for_prompt();
                qemu.wait_for_ram();
                Some(qemu)
            }
            Err(e) => {
                eprintln!("skipped: cannot run qemu-system-x86_64: {e}");
                let _ = fs::remove_file(fill);
                None
            }
        }
    }

    /// Waits for the monitor's prompt, which QEMU prints when the machine exists, RAM included.
    fn wait_for_prompt(&mut self) {
        let mut heard = Vec::new();
        for byte in BufReader::new(self.child.stdout.as_mut().expect("a pipe")).bytes() {
            heard.push(byte.expect("hear from QEMU"));
            if heard.ends_with(b"(qemu)") {
                return;
            }
        }
        panic!("QEMU ended: {}", String::from_utf8_lossy(&heard));
    }

    /// Waits until the RAM is filled. The first reset does that, and may come after the prompt.
    fn wait_for_ram(&mut self) {
        let kib = |line: &str, key: &str| line.strip_prefix(key)?.trim().strip_suffix(" kB")?.parse::<u64>().ok();
        loop {
            let smaps = fs::read_to_string(format!("/proc/{}/smaps", self.pid())).expect("read its smaps");
            let sizes = smaps.lines().filter_map(|l| kib(l, "Size:"));
            let resident = smaps.lines().filter_map(|l| kib(l, "Rss:"));
            let ram = sizes.zip(resident).find(|(size, _)| *size == RAM_BYTES >> 10);
            if ram.is_some_and(|(_, rss)| rss >= FILLED_BYTES >> 10) {
                return;
            }
            assert!(self.child.try_wait().expect("ask for its state").is_none(), "QEMU ended");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn id(&self) -> String {
        format!("qemu:{}", self.name)
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_file(&self.fill);
    }
}
