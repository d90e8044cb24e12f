//! QEMU's command line: of the machine that becomes a template, and of its clones.
//!
//! Both are lists of words with placeholders for what differs between machines. QEMU finds the machine's RAM as a
//! memory file at its standard input.

use std::path::Path;

/// Placeholder for the machine's directory.
pub const DIR: &str = "{dir}";
/// Placeholder for the machine's name.
pub const NAME: &str = "{name}";
/// Placeholder for the path of the disk.
pub const DISK: &str = "{disk}";

/// Name of the helper's socket in the machine's directory.
pub(crate) const IDENTITY: &str = "identity";
/// QEMU's option for the helper's serial line, with an interrupt of its own. By default, the third serial line has that
/// of the first. QEMU does not combine requests of two devices for one interrupt of the ISA bus: when the guest writes
/// to its console, an interrupt of the helper's line might be lost.
const HELPER_LINE: &str = "isa-serial,chardev=identity,irq=5";
/// Name of the QMP socket in the machine's directory.
pub(crate) const QMP: &str = "qmp";
/// Name that QEMU gives the RAM of machines pc and q35.
const RAM: &str = "pc.ram";
/// Options that QEMU needs to boot a kernel, but not to load a saved state. With them, QEMU keeps the contents of these
/// files in its own memory: 14 MiB a clone, with Debian's cloud kernel.
const BOOT: [&str; 3] = ["-kernel", "-initrd", "-append"];
/// ROM that QEMU adds for `-kernel`. It is a part of the device state.
const BOOT_ROM: &str = "linuxboot_dma.bin";

/// Values for the placeholders of a command line.
pub(crate) struct Places<'a> {
    pub(crate) dir: &'a Path,
    pub(crate) name: &'a str,
    pub(crate) disk: &'a Path,
}

impl Places<'_> {
    /// The command line with the placeholders replaced. QEMU separates parts of an option by commas; a doubled comma
    /// stands for itself.
    pub(crate) fn fill(&self, words: &[String]) -> Vec<String> {
        let escaped = |path: &Path| path.to_string_lossy().replace(',', ",,");
        let (dir, disk) = (escaped(self.dir), escaped(self.disk));
        words.iter().map(|word| word.replace(DIR, &dir).replace(NAME, self.name).replace(DISK, &disk)).collect()
    }
}

/// The command line of the machine that becomes a template: with its RAM in the memory file, which QEMU writes through
/// to (`share=on`), and with the helper's serial line.
pub(crate) fn to_make(words: &[String], memory_bytes: u64) -> Vec<String> {
    let line = format!("socket,id=identity,server=on,wait=off,path={DIR}/{IDENTITY}");
    let more = ["-chardev", &line, "-device", HELPER_LINE].map(str::to_owned);
    words.iter().cloned().chain(memory_in_file(memory_bytes)).chain(more).collect()
}

/// Options by which the machine's RAM is the file at standard input. The memory block has the name that QEMU gives to
/// RAM of its own, so that either can load the other's state.
pub(crate) fn memory_in_file(memory_bytes: u64) -> [String; 4] {
    let backend = format!("memory-backend-file,id={RAM},size={memory_bytes}B,mem-path=/proc/self/fd/0,share=on");
    ["-object".to_owned(), backend, "-machine".to_owned(), format!("memory-backend={RAM}")]
}

/// The command line of a clone of that machine, which waits for the device state. Memory and disk are its own from the
/// first write on.
pub(crate) fn to_clone(made: &[String]) -> Vec<String> {
    // A machine that may boot again needs what it boots from.
    let boots_once = made.iter().any(|word| word == "-no-reboot") && made.iter().any(|word| word == BOOT[0]);
    let mut words = Vec::with_capacity(made.len());
    let mut rest = made.iter();
    while let Some(word) = rest.next() {
        if boots_once && BOOT.contains(&word.as_str()) {
            rest.next();
            continue;
        }
        let word = word.replace("mem-path=/proc/self/fd/0,share=on", "mem-path=/proc/self/fd/0,share=off");
        let is_disk = word.contains(DISK);
        words.push(if is_disk { format!("{word},snapshot=on") } else { word });
    }
    let rom = boots_once.then_some(["-option-rom", BOOT_ROM]).into_iter().flatten();
    words.extend(rom.chain(["-incoming", "defer"]).map(str::to_owned));
    words
}

/// The command line of a machine that goes on from a state with its memory in it: a clone's, with memory of its own.
pub(crate) fn to_restore(clone: &[String]) -> Vec<String> {
    let own = |word: &String| {
        let word = word.replace("memory-backend-file,", "memory-backend-ram,");
        word.replace(",mem-path=/proc/self/fd/0,share=off", "")
    };
    clone.iter().map(own).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn clone_has_private_memory_and_disk_and_no_kernel() {
        let line =
            "qemu -no-reboot -kernel k -initrd i -append a=b -drive id=root,format=raw,file={disk} -name guest={name}";
        let made = to_make(&words(line), 4096);
        assert!(made.join(" ").contains("size=4096B,mem-path=/proc/self/fd/0,share=on -machine memory-backend=pc.ram"));
        let clone = to_clone(&made).join(" ");
        for part in ["file={disk},snapshot=on", "share=off", "-option-rom linuxboot_dma.bin -incoming defer"] {
            assert!(clone.contains(part), "{part} in {clone}");
        }
        let restored = to_restore(&to_clone(&made)).join(" ");
        assert!(restored.contains("-object memory-backend-ram,id=pc.ram,size=4096B -machine"), "{restored}");
        assert!(!clone.contains("-kernel") && !clone.contains("a=b") && !clone.contains("share=on"), "{clone}");
    }

    #[test]
    fn machine_that_may_boot_again_keeps_its_kernel() {
        let clone = to_clone(&words("qemu -kernel k -append a")).join(" ");
        assert_eq!(clone, "qemu -kernel k -append a -incoming defer");
    }

    #[test]
    fn places_are_filled_and_commas_doubled() {
        let places = Places { dir: Path::new("/run/a,b"), name: "web-1", disk: Path::new("/d") };
        let filled = places.fill(&words("path={dir}/qmp guest={name} file={disk}"));
        assert_eq!(filled, ["path=/run/a,,b/qmp", "guest=web-1", "file=/d"]);
    }
}
