//! Writes the archive that the kernel unpacks as its first root: cpio in the "newc" format of the kernel's
//! `Documentation/driver-api/early-userspace/buffer-format.rst`.

/// An archive that is being made. All of its files belong to root and have no date, so that equal contents give equal
/// bytes.
#[derive(Debug, Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

/// A character device's major and minor number.
type Device = (u32, u32);

impl Archive {
    pub(crate) fn dir(&mut self, path: &str) {
        self.entry(path, 0o040_755, (0, 0), &[]);
    }

    pub(crate) fn file(&mut self, path: &str, mode: u32, content: &[u8]) {
        self.entry(path, 0o100_000 | mode, (0, 0), content);
    }

    pub(crate) fn link(&mut self, path: &str, target: &str) {
        self.entry(path, 0o120_777, (0, 0), target.as_bytes());
    }

    pub(crate) fn device(&mut self, path: &str, device: Device) {
        self.entry(path, 0o020_600, device, &[]);
    }

    /// Ends the archive and returns its bytes.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes
    }

    fn entry(&mut self, path: &str, mode: u32, device: Device, content: &[u8]) {
        self.entries += 1;
        let size = u32::try_from(content.len()).expect("files of an initramfs are far below 4 GiB");
        let name_size = u32::try_from(path.len() + 1).expect("paths are short");
        let links = 1;
        // inode, mode, uid, gid, links, time, size, device of the file system, device, length of name, checksum
        let fields = [self.entries, mode, 0, 0, links, 0, size, 0, 0, device.0, device.1, name_size, 0];
        self.bytes.extend(b"070701");
        self.bytes.extend(fields.iter().flat_map(|field| format!("{field:08x}").into_bytes()));
        self.bytes.extend(path.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::process::{Command, Stdio};

    /// The list that the program `cpio` prints of an archive.
    fn listing(archive: &[u8]) -> String {
        let mut cpio = Command::new("cpio")
            .args(["-itv", "--quiet", "--numeric-uid-gid"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("start cpio");
        cpio.stdin.take().expect("a pipe").write_all(archive).expect("feed cpio");
        String::from_utf8(cpio.wait_with_output().expect("wait for cpio").stdout).expect("text")
    }

    #[test]
    fn cpio_reads_what_was_written() {
        let mut archive = Archive::default();
        archive.dir("bin");
        archive.file("bin/odd", 0o755, b"12345");
        archive.link("bin/sh", "odd");
        archive.device("console", (5, 1));
        let listing = listing(&archive.finish());
        let lines: Vec<Vec<&str>> = listing.lines().map(|line| line.split_whitespace().collect()).collect();
        let seen: Vec<(&str, &str)> = lines.iter().map(|fields| (fields[0], fields[fields.len() - 1])).collect();
        assert_eq!(
            seen,
            [("drwxr-xr-x", "bin"), ("-rwxr-xr-x", "bin/odd"), ("lrwxrwxrwx", "odd"), ("crw-------", "console")]
        );
        assert_eq!(lines[1][4], "5");
        assert!(listing.contains("5,   1"), "{listing}");
    }
}
