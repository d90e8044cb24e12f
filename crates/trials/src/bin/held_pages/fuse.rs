//! A file system with one file: it imitates a slow device. Reads are answered on command. A write is taken on command:
//! until then the kernel keeps the request, and holds the page that is to be written.
//!
//! It is mounted in a mount namespace of this process's own, so that the mount ends with the process.

use io_uring::{IoUring, opcode, squeue, types};
use page::PAGE_BYTES;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::error::Error;
use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const READ: u32 = 15;
const WRITE: u32 = 16;
const FLUSH: u32 = 25;
const INIT: u32 = 26;
/// Flags in an answer to `OPEN`: reads and writes bypass the page cache, and nothing is asked when the file is closed.
/// Otherwise a killed program would wait for its own file system for ever.
const OPEN_FLAGS: u32 = 1 | 1 << 5;
const FILE_BYTES: u64 = 1 << 20;
/// Bytes of a write's request before what is to be written: `struct fuse_in_header`, `struct fuse_write_in`.
const WRITE_HEAD: usize = 80;
/// Time in seconds for which the kernel may keep the name and the attributes of the file. When the server is silent, it
/// may keep the name alone.
const VALID_S: u64 = 3600;
const PATIENCE: Duration = Duration::from_secs(10);

/// Value of every byte that a read returns.
pub const BROUGHT: u8 = 0xd1;

/// Whether `FLUSH` requests, which the kernel sends when a descriptor is closed, are left without an answer.
static KEEPS_CLOSERS_WAITING: AtomicBool = AtomicBool::new(false);
/// Whether all requests but those that open the file are left without an answer.
static IS_SILENT: AtomicBool = AtomicBool::new(false);

/// The mounted file system and its file.
pub struct SlowFile {
    path: CString,
    device: File,
    waiting: Receiver<u64>,
    unanswered: Vec<u64>,
    readers: Vec<JoinHandle<io::Result<usize>>>,
    /// Whether the file system takes no request.
    paused: Arc<AtomicBool>,
    written: Receiver<Vec<u8>>,
    writer: Option<IoUring>,
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
        let ((reads, waiting), (writes, written)) = (channel(), channel());
        let paused = Arc::new(AtomicBool::new(false));
        let is_paused = Arc::clone(&paused);
        let served = device.try_clone()?;
        std::thread::spawn(move || serve(served, &reads, &writes, &is_paused));
        let (path, unanswered, readers) = (CString::new("/mnt/file")?, Vec::new(), Vec::new());
        Ok(Self { path, device, waiting, unanswered, readers, paused, written, writer: None })
    }

    /// From here on, `FLUSH` is not answered, so that `close` of the file does not return.
    #[allow(dead_code, reason = "one of the programs that mount this file system does not call it")]
    pub fn keep_closers_waiting(&self) {
        KEEPS_CLOSERS_WAITING.store(true, Ordering::Relaxed);
    }

    /// From here on, only requests that open the file are answered. The kernel asks for the file's attributes each time
    /// that they are needed, and sends `FLUSH` when the file is closed.
    #[allow(dead_code, reason = "one of the programs that mount this file system does not call it")]
    pub fn fall_silent(&self) {
        IS_SILENT.store(true, Ordering::Relaxed);
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
        self.unanswered.push(self.waiting.recv_timeout(PATIENCE)?);
        Ok(())
    }

    /// Begins a write of a page through io_uring, and returns once the kernel has the request in its queue for the file
    /// system, and holds the page.
    pub fn begin_write(&mut self, page: *const u8) -> Result<(), Box<dyn Error>> {
        let file = File::options().write(true).custom_flags(libc::O_DIRECT).open(self.path.to_str()?)?;
        // The file system does not implement `POLL`, and the kernel learns that here. Otherwise io_uring would wait for
        // an answer.
        poll(&mut [PollFd::new(&file, PollFlags::OUT)], Some(&Timespec::default()))?;
        // An agent in this process looks at each file that is opened, and would also wait for the file system.
        std::thread::sleep(Duration::from_millis(500));
        let mut ring = IoUring::new(4)?;
        let write = opcode::Write::new(types::Fd(file.as_raw_fd()), page, PAGE_BYTES as u32).build();
        // The write is made by a thread of the kernel, since the file system keeps its callers waiting.
        let write = write.flags(squeue::Flags::ASYNC);
        // SAFETY: the page may be unmapped meanwhile: the kernel holds its frame, and only reads it.
        unsafe { ring.submission().push(&write) }?;
        self.paused.store(true, Ordering::SeqCst);
        ring.submit()?;
        let time = Timespec::try_from(PATIENCE)?;
        if poll(&mut [PollFd::new(&self.device, PollFlags::IN)], Some(&time))? == 0 {
            return Err("the kernel has no request".into());
        }
        // io_uring keeps the file open, and an agent does not find it among this process's descriptors.
        drop(file);
        self.writer = Some(ring);
        Ok(())
    }

    /// Has the file system take the write. Returns the bytes that the kernel passed to it.
    pub fn take_write(&mut self) -> Result<Vec<u8>, Box<dyn Error>> {
        self.paused.store(false, Ordering::SeqCst);
        let bytes = self.written.recv_timeout(PATIENCE)?;
        if let Some(ring) = self.writer.take() {
            ring.submit_and_wait(1)?;
        }
        Ok(bytes)
    }

    /// Answers all reads, and waits until the callers have got the answers.
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

/// Answers all requests, until the file system is unmounted. Requests to read are not answered: their numbers go to
/// `reads`. The bytes of writes go to `writes`.
fn serve(mut device: File, reads: &Sender<u64>, writes: &Sender<Vec<u8>>, paused: &AtomicBool) -> io::Result<()> {
    let mut buffer = vec![0; 1 << 20];
    loop {
        poll(&mut [PollFd::new(&device, PollFlags::IN)], None)?;
        if paused.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        }
        let got = match device.read(&mut buffer) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            got => got?,
        };
        let word =
            |at: usize| buffer[..got].get(at..).and_then(|b| b.first_chunk()).map_or(0, |b| u32::from_ne_bytes(*b));
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        let (code, unique, node) = (word(4), long(8), long(16));
        let is_silent = IS_SILENT.load(Ordering::Relaxed);
        match code {
            _ if is_silent && !matches!(code, INIT | LOOKUP | OPEN) => {}
            INIT => {
                let mut out = vec![0; 64];
                for (at, value) in [(0, 7_u32), (4, 31), (8, 4096), (20, 4096), (24, 1)] {
                    out[at..at + 4].copy_from_slice(&value.to_ne_bytes());
                }
                answer(&mut device, unique, &out)?;
            }
            LOOKUP => {
                let valid = if is_silent { 0 } else { VALID_S };
                let entry = [2, 0, VALID_S, valid, 0_u64].iter().flat_map(|n| n.to_ne_bytes()).collect::<Vec<_>>();
                answer(&mut device, unique, &[&entry[..], &attributes(2)].concat())?;
            }
            GETATTR => {
                answer(&mut device, unique, &[&VALID_S.to_ne_bytes()[..], &[0; 8], &attributes(node)].concat())?;
            }
            OPEN => {
                let flags = if is_silent { 0 } else { OPEN_FLAGS };
                answer(&mut device, unique, &[&[0; 8][..], &flags.to_ne_bytes(), &[0; 4]].concat())?;
            }
            WRITE => {
                let bytes = buffer[..got].get(WRITE_HEAD..).unwrap_or_default().to_vec();
                answer(&mut device, unique, &[&word(56).to_ne_bytes()[..], &[0; 4]].concat())?;
                let _ = writes.send(bytes);
            }
            READ => _ = reads.send(unique),
            FORGET => {}
            FLUSH if KEEPS_CLOSERS_WAITING.load(Ordering::Relaxed) => {}
            _ => refuse(&mut device, unique)?,
        }
    }
}
