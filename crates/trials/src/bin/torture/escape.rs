//! `escape`: a member that tries to write the pool, which it may only read.
//!
//! It waits until some of its memory is folded. Then it tries every way to the pool from within the process: its
//! mappings, its descriptors, and the names that `/proc` has for both. The first attempt that succeeds ends the program
//! with exit code 1. If none does, the program prints all attempts in one line of JSON.

use crate::area::{PAGE, folded, nowhere};
use crate::content::Random;
use crate::plot::Plot;
use crate::tally::{fail, must};
use serde_json::json;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Try to write the pool
#[derive(clap::Args)]
pub struct Args {
    /// Name of the pool's files
    #[arg(long)]
    pool: String,
}

struct Attempts(Vec<serde_json::Value>);

impl Attempts {
    fn add<T>(&mut self, what: &str, result: io::Result<T>) {
        match result {
            Ok(_) => fail(&format!("ESCAPED: {what} worked")),
            Err(e) => self.0.push(json!({"attempt": what, "refused": e.to_string()})),
        }
    }
}

/// Runs the mode.
pub fn run(args: &Args) {
    let mut random = Random::unforeseen();
    let mut plot = Plot::whole(1024, 16);
    must("while it was filled", plot.fill_all(&mut random));
    wait_until_folded(&plot);
    let mut attempts = Attempts(Vec::new());
    let (mappings, descriptors) = (mappings(&args.pool), descriptors(&args.pool));
    if mappings.is_empty() {
        fail("it is folded and maps no pool");
    }
    for mapping in &mappings {
        by_mapping(&mut attempts, mapping);
    }
    for path in &descriptors {
        by_name(&mut attempts, path);
    }
    must("after all attempts", plot.check_all());
    println!("{}", json!({"mappings": mappings.len(), "descriptors": descriptors.len(), "attempts": attempts.0}));
}

fn wait_until_folded(plot: &Plot) {
    let end = Instant::now() + Duration::from_secs(60);
    while folded(plot.area(), 0, plot.len()) < plot.len() / 2 {
        if Instant::now() > end {
            fail("it is not folded");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A mapping of one of the pool's files.
struct Mapping {
    name: String,
    start: usize,
    end: usize,
    shared: bool,
}

fn mappings(pool: &str) -> Vec<Mapping> {
    let maps = fs::read_to_string("/proc/self/maps").expect("read the mappings");
    let of_the_pool = maps.lines().filter(|line| line.contains(&format!("/memfd:{pool} ")));
    let mapping = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let name = words.next()?.to_owned();
        let shared = words.next()?.ends_with('s');
        let (start, end) = name.split_once('-')?;
        let number = |hex| usize::from_str_radix(hex, 16).ok();
        Some(Mapping { start: number(start)?, end: number(end)?, name: name.clone(), shared })
    };
    of_the_pool.filter_map(mapping).take(40).collect()
}

/// Paths in `/proc` of the descriptors of all threads, since a thread may have a descriptor table of its own.
fn descriptors(pool: &str) -> Vec<PathBuf> {
    let threads =
        fs::read_dir("/proc/self/task").expect("list the threads").filter_map(|entry| Some(entry.ok()?.path()));
    let of =
        |thread: PathBuf| fs::read_dir(thread.join("fd")).into_iter().flatten().filter_map(|e| Some(e.ok()?.path()));
    let is_pool = |path: &PathBuf| {
        fs::read_link(path).is_ok_and(|to| to.to_string_lossy().starts_with(&format!("/memfd:{pool} ")))
    };
    threads.flat_map(of).filter(is_pool).collect()
}

fn by_mapping(attempts: &mut Attempts, mapping: &Mapping) {
    let Mapping { name, start, end, shared } = mapping;
    let at = *start as *mut libc::c_void;
    if *shared {
        // SAFETY: more rights for a mapping change no byte of it.
        let answer = unsafe { libc::mprotect(at, end - start, libc::PROT_READ | libc::PROT_WRITE) };
        attempts.add(&format!("mprotect of {name} (shared) for writing"), worked(answer));
    }
    // SAFETY: if this succeeded, other processes would lose these pages, and the test would have failed.
    let answer = unsafe { libc::madvise(at, PAGE, libc::MADV_REMOVE) };
    attempts.add(&format!("MADV_REMOVE in {name}"), worked(answer));
    by_name(attempts, Path::new(&format!("/proc/self/map_files/{name}")));
}

fn by_name(attempts: &mut Attempts, path: &Path) {
    let shown = path.display();
    for (how, file) in [
        ("read-write", File::options().read(true).write(true).open(path)),
        ("read-only", File::open(path)),
        ("truncating", File::options().write(true).truncate(true).open(path)),
    ] {
        match file {
            // That the file can be opened is harmless if nothing can be changed through it.
            Ok(file) => by_file(attempts, &format!("{shown} opened {how}"), &file),
            Err(e) => attempts.0.push(json!({"attempt": format!("open {shown} {how}"), "refused": e.to_string()})),
        }
    }
}

fn by_file(attempts: &mut Attempts, name: &str, file: &File) {
    attempts.add(&format!("write {name}"), file.write_at(b"Dedup est machina", 0));
    attempts.add(&format!("shorten {name}"), file.set_len(0));
    attempts.add(&format!("lengthen {name}"), file.set_len(1 << 60));
    let fd = file.as_raw_fd();
    let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: takes numbers.
    attempts.add(&format!("punch a hole into {name}"), worked(unsafe { libc::fallocate(fd, punch, 0, 4096) }));
    // SAFETY: takes numbers.
    attempts.add(
        &format!("zero a part of {name}"),
        worked(unsafe { libc::fallocate(fd, libc::FALLOC_FL_ZERO_RANGE, 0, 4096) }),
    );
    let read_write = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let mapped = unsafe { libc::mmap(nowhere(), PAGE, read_write, libc::MAP_SHARED, fd, 0) };
    let mapped = if mapped == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) };
    attempts.add(&format!("map {name} shared for writing"), mapped);
    // SAFETY: a new mapping at an address of the kernel's choice.
    let view = unsafe { libc::mmap(nowhere(), PAGE, libc::PROT_READ, libc::MAP_SHARED, fd, 0) };
    if view != libc::MAP_FAILED {
        // SAFETY: more rights for a mapping that nobody else has an address of.
        let answer = unsafe { libc::mprotect(view, PAGE, read_write) };
        attempts.add(&format!("make a view of {name} writable"), worked(answer));
    }
}

fn worked(answer: libc::c_int) -> io::Result<()> {
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
