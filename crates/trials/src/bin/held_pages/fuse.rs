//! A file system with one file, whose reads are answered on command: it imitates a slow device.
//!
//! It is mounted in a mount namespace of this process's own, so that the mount ends with the process.

use page::PAGE_BYTES;
use std::error::Error;
use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const READ: u32 = 15;
const INIT: u32 = 26;
/// Flag in an answer to `OPEN`: reads bypass the page cache.
const FOPEN_DIRECT_IO: u32 = 1;
const FILE_BYTES: u64 = 1 << 20;

/// Value of every byte that a read returns.
pub const BROUGHT: u8 = 0xd1;

/// The mounted file.
pub struct SlowFile {
    path: CString,
    device: File,
    waiting: Receiver<u64>,
    unanswered: Vec<u64>,
    readers: Vec<JoinHandle<io::Result<usize>>>,
}

fn check(answer: libc::c_int) -> io::Result<()> {
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

impl SlowFile {
    pub fn mount() -> Result<Self, Box<dyn Error>> {
        let dir = CString::new("/mnt")?;
        let device = File::options().read(true).write(true).open("/dev/fuse")?;
        let options = CString::new(format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd()))?;
        // SAFETY: takes a flag; mounts made from here on are seen by this process alone.
        check(unsafe { libc::unshare(libc::CLONE_FS | libc::CLONE_NEWNS) })?;
        let flags = libc::MS_REC | libc::MS_PRIVATE;
        // SAFETY: texts that end with 0; nothing is given back.
        check(unsafe { libc::mount(c"none".as_ptr(), c"/".as_ptr(), std::ptr::null(), flags, std::ptr::null()) })?;
        // SAFETY: as above.
        check(unsafe {
            libc::mount(c"slow".as_ptr(), dir.as_ptr(), c"fuse".as_ptr(), libc::MS_NODEV, options.as_ptr().cast())
        })?;
        let (sender, waiting) = channel();
        let served = device.try_clone()?;
        std::thread::spawn(move || serve(served, &sender));
        Ok(Self { path: CString::new("/mnt/file")?, device, waiting, unanswered: Vec::new(), readers: Vec::new() })
    }

    /// Begins a read into a page, and returns once the file system has received the request.
    pub fn begin_read(&mut self, page: *mut u8) -> Result<(), Box<dyn Error>> {
        let (path, page) = (self.path.to_str()?.to_owned(), page as usize);
        self.readers.push(std::thread::spawn(move || {
            let file = File::options().read(true).custom_flags(libc::O_DIRECT).open(path)?;
            // SAFETY: the page is one of a mapping that the program keeps; no reference to what it holds is made.
            let n = unsafe { libc::pread(file.as_raw_fd(), page as *mut libc::c_void, PAGE_BYTES, 0) };
            usize::try_from(n).map_err(|_| io::Error::last_os_error())
        }));
        self.unanswered.push(self.waiting.recv_timeout(Duration::from_secs(10))?);
        Ok(())
    }

    /// Answers all reads, and waits until they have ended.
    pub fn answer_all(&mut self) -> Result<(), Box<dyn Error>> {
        for unique in self.unanswered.drain(..) {
            answer(&mut self.device, unique, &[BROUGHT; PAGE_BYTES])?;
        }
        for reader in self.readers.drain(..) {
            let read = reader.join().map_err(|_| "a reader panicked")??;
            if read != PAGE_BYTES {
                return Err(format!("a read of {read} bytes").into());
            }
        }
        Ok(())
    }
}

fn answer(device: &mut File, unique: u64, bytes: &[u8]) -> io::Result<()> {
    let length = u32::try_from(16 + bytes.len()).map_err(io::Error::other)?;
    let head = [&length.to_ne_bytes()[..], &0_i32.to_ne_bytes(), &unique.to_ne_bytes()].concat();
    device.write_all(&[&head, bytes].concat())
}

fn refuse(device: &mut File, unique: u64) -> io::Result<()> {
    let head = [&16_u32.to_ne_bytes()[..], &(-libc::ENOSYS).to_ne_bytes(), &unique.to_ne_bytes()].concat();
    device.write_all(&head)
}

/// `struct fuse_attr`
fn attributes(node: u64) -> Vec<u8> {
    let (mode, bytes) = if node == 1 { (0o040_755_u32, 0) } else { (0o100_644, FILE_BYTES) };
    let long = [node, bytes, bytes / 512, 0, 0, 0];
    let short = [0, 0, 0, mode, 1, 0, 0, 0, 4096, 0_u32];
    long.iter().flat_map(|n| n.to_ne_bytes()).chain(short.iter().flat_map(|n| n.to_ne_bytes())).collect()
}

/// Answers all requests but reads, whose numbers it sends to `reads`. Ends with the mount.
fn serve(mut device: File, reads: &Sender<u64>) -> io::Result<()> {
    let mut buffer = vec![0; 1 << 20];
    loop {
        let got = match device.read(&mut buffer) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            got => got?,
        };
        let word =
            |at: usize| buffer[..got].get(at..).and_then(|b| b.first_chunk()).map_or(0, |b| u32::from_ne_bytes(*b));
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        let (code, unique, node) = (word(4), long(8), long(16));
        match code {
            INIT => {
                let mut out = vec![0; 64];
                for (at, value) in [(0, 7_u32), (4, 31), (8, 4096), (20, 4096), (24, 1)] {
                    out[at..at + 4].copy_from_slice(&value.to_ne_bytes());
                }
                answer(&mut device, unique, &out)?;
            }
            LOOKUP => answer(&mut device, unique, &[&2_u64.to_ne_bytes()[..], &[0; 32], &attributes(2)].concat())?,
            GETATTR => answer(&mut device, unique, &[&[0; 16][..], &attributes(node)].concat())?,
            OPEN => {
                answer(&mut device, unique, &[&[0; 8][..], &FOPEN_DIRECT_IO.to_ne_bytes(), &[0; 4]].concat())?;
            }
            READ => _ = reads.send(unique),
            FORGET => {}
            _ => refuse(&mut device, unique)?,
        }
    }
}
