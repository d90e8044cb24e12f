//! Children that check the pages that they inherited. Later writes by their parent, and changes of the pool, must not
//! show in their pages.

use crate::area::exit_now;
use crate::content::Random;
use crate::owners::ok;
use crate::plot::Plot;
use crate::tally::{Mismatch, count, fail, must};
use std::io;
use std::time::{Duration, Instant};

/// The children of one thread.
#[derive(Default)]
pub struct Children {
    pids: Vec<libc::pid_t>,
}

impl Children {
    /// Most children at a time: pages that a living child shares with its parent cannot be folded.
    const MOST: usize = 1;

    /// Forks a child that lives for up to a second, or executes a program.
    pub fn born(&mut self, plot: &mut Plot, random: &mut Random) {
        self.collect();
        if random.one_in(3) {
            count("programs_executed");
            let status = ok("run true", std::process::Command::new("true").status());
            assert!(status.success(), "true: {status}");
            return;
        }
        if self.pids.len() >= Self::MOST {
            return;
        }
        let life = Duration::from_millis(random.next() % 1000);
        // SAFETY: the child has only this thread, and uses only what belongs to it. The allocator may be used after a
        // fork.
        match unsafe { libc::fork() } {
            -1 => fail(&format!("fork: {}", io::Error::last_os_error())),
            0 => {
                must("in a child", grow_up(plot, random, life));
                exit_now(0);
            }
            child => {
                count("forks");
                self.pids.push(child);
                // The parent writes the pages that the child checks first.
                for _ in 0..plot.len() / 8 {
                    must("beside a child", plot.poke(random.below(plot.len()), 1, random));
                }
            }
        }
    }

    /// Checks that children that have ended reported no fault.
    fn collect(&mut self) {
        self.pids.retain(|pid| !has_ended(*pid, libc::WNOHANG));
    }

    pub fn wait_for_all(&mut self) {
        for pid in self.pids.drain(..) {
            has_ended(pid, 0);
        }
    }
}

fn has_ended(pid: libc::pid_t, options: libc::c_int) -> bool {
    let mut status = 0;
    // SAFETY: writes one number.
    match unsafe { libc::waitpid(pid, &raw mut status, options) } {
        0 => false,
        -1 => fail(&format!("waitpid: {}", io::Error::last_os_error())),
        _ if status == 0 => true,
        _ => fail(&format!("the child {pid} ended with {status:#x}")),
    }
}

/// What a child does: it checks again and again that all pages are as they were at the fork. Then it writes some.
fn grow_up(plot: &mut Plot, random: &mut Random, life: Duration) -> Result<(), Mismatch> {
    let end = Instant::now() + life;
    plot.check_all()?;
    for _ in 0..plot.len() / 16 {
        plot.poke(random.below(plot.len()), 1, random)?;
    }
    while Instant::now() < end {
        for _ in 0..64 {
            plot.check(random.below(plot.len()))?;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    plot.check_all()
}
