//! `yielding`: registers its own memory with a userfaultfd of its own while the memory is being folded.
//!
//! QEMU does the same for a postcopy migration or a background snapshot. The program serves the faults, then
//! unregisters the memory, and folding may go on.

use crate::area::{PAGE, folded};
use crate::content::Random;
use crate::plot::Plot;
use crate::tally::{count, fail, must, report};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Register memory with a userfaultfd while it is being folded
#[derive(clap::Args)]
pub struct Args {
    /// Times that it registers and lets go
    #[arg(long, default_value_t = 6)]
    rounds: usize,
    /// Pages
    #[arg(long, default_value_t = 4096)]
    pages: usize,
    /// How long it waits between two steps, in milliseconds
    #[arg(long, default_value_t = 700)]
    pause: u64,
    /// Work on after each time until pages are folded again, a minute at most
    #[arg(long)]
    await_folded: bool,
}

/// Longest wait until pages are folded: 1 min.
const FOLDS_WITHIN: Duration = Duration::from_secs(60);

/// Numbers of userfaultfd's ioctls: `_IOWR(0xAA, 0x3F, struct uffdio_api)`, `_IOWR(0xAA, 0x00, struct
/// uffdio_register)`, `_IOR(0xAA, 0x01, struct uffdio_range)`, `_IOWR(0xAA, 0x04, struct uffdio_zeropage)`.
const UFFDIO_API: libc::Ioctl = 0xc018_aa3f_u32 as libc::Ioctl;
const UFFDIO_REGISTER: libc::Ioctl = 0xc020_aa00_u32 as libc::Ioctl;
const UFFDIO_UNREGISTER: libc::Ioctl = 0x8010_aa01_u32 as libc::Ioctl;
const UFFDIO_ZEROPAGE: libc::Ioctl = 0xc020_aa04_u32 as libc::Ioctl;
const MISSING: u64 = 1;

/// Calls `ioctl` with a structure of 64-bit words.
fn call<const N: usize>(fd: libc::c_int, request: libc::Ioctl, mut words: [u64; N]) -> io::Result<()> {
    // SAFETY: each request is made with as many words as its structure has; the kernel checks the addresses in it.
    let answer = unsafe { libc::ioctl(fd, request, words.as_mut_ptr()) };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn userfaultfd() -> libc::c_int {
    // SAFETY: takes flags and returns a descriptor.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) } as libc::c_int;
    if fd < 0 {
        fail(&format!("userfaultfd: {}", io::Error::last_os_error()));
    }
    fd
}

/// Runs the mode.
pub fn run(args: &Args) {
    let (began, mut random) = (Instant::now(), Random::unforeseen());
    let mut plot = Plot::whole(args.pages, 50);
    must("while it was filled", plot.fill_all(&mut random));
    let pause = Duration::from_millis(args.pause);
    for _ in 0..args.rounds {
        work(&mut plot, &mut random, pause);
        let fd = userfaultfd();
        if let Err(e) = call(fd, UFFDIO_API, [0xaa, 0, 0]) {
            fail(&format!("UFFDIO_API: {e}"));
        }
        let range = [plot.area().address(0) as u64, (args.pages * PAGE) as u64];
        if let Err(e) = call(fd, UFFDIO_REGISTER, [range[0], range[1], MISSING, 0]) {
            fail(&format!("UFFDIO_REGISTER of its own memory: {e}"));
        }
        count("registrations");
        serve_while(fd, || {
            work(&mut plot, &mut random, pause);
            // The next access to a discarded page causes a userfaultfd event, which a thread of this program answers
            // with zeros.
            let from = random.below(args.pages - 16);
            crate::owners::ok("MADV_DONTNEED", plot.area().advise(from, 16, libc::MADV_DONTNEED));
            must("discarded while registered", plot.zeroed(from, 16));
        });
        if let Err(e) = call(fd, UFFDIO_UNREGISTER, range) {
            fail(&format!("UFFDIO_UNREGISTER: {e}"));
        }
        // SAFETY: a descriptor of ours that nobody uses any more.
        unsafe { libc::close(fd) };
        work(&mut plot, &mut random, pause);
        if args.await_folded {
            let end = Instant::now() + FOLDS_WITHIN;
            while folded(plot.area(), 0, args.pages) == 0 && Instant::now() < end {
                work(&mut plot, &mut random, Duration::from_millis(100));
            }
        }
        println!("{}", serde_json::json!({"folded": folded(plot.area(), 0, args.pages)}));
    }
    report("yielding", began);
}

fn work(plot: &mut Plot, random: &mut Random, time: Duration) {
    let end = Instant::now() + time;
    while Instant::now() < end {
        must("while it worked", plot.poke(random.below(plot.len()), 1, random));
        std::thread::sleep(Duration::from_micros(500));
    }
    must("after work", plot.check_all());
}

/// Answers userfaultfd events with pages of zeros, until `what` is done.
fn serve_while(fd: libc::c_int, what: impl FnOnce()) {
    let done = Arc::new(AtomicBool::new(false));
    let server = {
        let done = Arc::clone(&done);
        std::thread::spawn(move || {
            while !done.load(Relaxed) {
                if let Some(address) = next_fault(fd) {
                    let page = address / PAGE as u64 * PAGE as u64;
                    // The page may be there already.
                    let _ = call(fd, UFFDIO_ZEROPAGE, [page, PAGE as u64, 0, 0]);
                    count("faults_served");
                }
            }
        })
    };
    what();
    done.store(true, Relaxed);
    server.join().expect("the thread that serves faults");
}

/// Address of the next userfaultfd event; `None` if none comes within 20 ms.
fn next_fault(fd: libc::c_int) -> Option<u64> {
    const PAGEFAULT: u64 = 0x12;
    let mut wait = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one structure, which lives.
    unsafe { libc::poll(&raw mut wait, 1, 20) };
    let mut message = [0_u64; 4];
    // SAFETY: as many bytes as there is room for.
    let count = unsafe { libc::read(fd, message.as_mut_ptr().cast(), 32) };
    (count == 32 && message[0] & 0xff == PAGEFAULT).then_some(message[2])
}
