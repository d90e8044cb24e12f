//! `vcpu`: KVM vCPUs that count in pages of their guests.
//!
//! A sweep adds one to the same word of every page, so all pages are equal between two sweeps. They are folded if the
//! pause is long enough; the next sweep begins at any time.
//!
//! ```text
//! guest memory:  | .. | code | .. | page 16 | page 17 | ...           | page 215 |
//! a sweep:                          word += 1, word += 1, ...           word += 1  -> exit
//! ```
//! After each sweep the program checks the counts from outside the guest.

use crate::area::{Area, PAGE, WORDS, folded};
use crate::content::{Random, word};
use crate::tally::{CHECKED, FOLDS, Mismatch, Until, count, fail, lost, report, stopping};
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// Have KVM vCPUs count in pages of their guests
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    until: Until,
    /// Machines, each with a vCPU
    #[arg(long, default_value_t = 6)]
    machines: u32,
}

/// Size of the guest's memory in pages: all that real mode can address.
const PAGES: usize = 256;
/// Page that holds the guest's code.
const CODE_PAGE: usize = 1;
/// First swept page.
const FIRST: usize = 16;
/// Number of swept pages.
const SWEPT: usize = 200;

/// The guest's program: adds one to the first double word of each swept page, leaves the guest, and starts over.
#[rustfmt::skip]
const CODE: [u8; 25] = [
    0xb8, 0x00, 0x10,                   // start: mov ax, 0x1000     the segment of page 16
    0xb9, SWEPT as u8, 0x00,            //        mov cx, SWEPT
    0x8e, 0xc0,                         // next:  mov es, ax
    0x66, 0x26, 0xff, 0x06, 0x00, 0x00, //        inc dword [es:0]
    0x05, 0x00, 0x01,                   //        add ax, 0x100      a page further
    0xe2, 0xf3,                         //        loop next
    0xe6, 0x10,                         //        out 0x10, al       a sweep is done
    0xeb, 0xe9,                         //        jmp start
    0x90, 0x90,
];

struct Machine {
    area: Area,
    vcpu: VcpuFd,
    class: u32,
    sweeps: u64,
    random: Random,
    _vm: VmFd,
}

/// Runs the mode. Without `/dev/kvm` it prints that, and ends with success.
pub fn run(args: &Args) {
    let began = Instant::now();
    let kvm = match Kvm::new() {
        Ok(kvm) => kvm,
        Err(e) => return println!("{}", serde_json::json!({"skipped": format!("open /dev/kvm: {e}")})),
    };
    std::thread::scope(|scope| {
        for n in 0..args.machines {
            let mut machine = Machine::new(&kvm, n);
            scope.spawn(move || machine.live());
        }
        args.until.wait();
    });
    report("vcpu", began);
}

fn works<T>(what: &str, result: Result<T, kvm_ioctls::Error>) -> T {
    result.unwrap_or_else(|e| fail(&format!("{what}: {e}")))
}

impl Machine {
    fn new(kvm: &Kvm, class: u32) -> Self {
        let area = Area::mergeable(PAGES);
        for page in FIRST..FIRST + SWEPT {
            (1..WORDS).for_each(|n| area.word(page, n).store(word(class + 1, n), Relaxed));
        }
        for (n, bytes) in CODE.chunks(8).enumerate() {
            let mut padded = [0; 8];
            padded[..bytes.len()].copy_from_slice(bytes);
            area.word(CODE_PAGE, n).store(u64::from_le_bytes(padded), Relaxed);
        }
        let vm = works("make a machine", kvm.create_vm());
        let region = kvm_userspace_memory_region {
            slot: 0,
            guest_phys_addr: 0,
            memory_size: (PAGES * PAGE) as u64,
            userspace_addr: area.address(0) as u64,
            flags: 0,
        };
        // SAFETY: the memory lives as long as the machine, and this program accesses it only by atomics.
        works("give it memory", unsafe { vm.set_user_memory_region(region) });
        let vcpu = works("make a vCPU", vm.create_vcpu(0));
        let mut segments = works("read its registers", vcpu.get_sregs());
        (segments.cs.base, segments.cs.selector) = (0, 0);
        works("set its segments", vcpu.set_sregs(&segments));
        let mut registers = works("read its registers", vcpu.get_regs());
        (registers.rip, registers.rflags) = ((CODE_PAGE * PAGE) as u64, 2);
        works("set its registers", vcpu.set_regs(&registers));
        Self { area, vcpu, class: class + 1, sweeps: 0, random: Random::unforeseen(), _vm: vm }
    }

    fn live(&mut self) {
        while !stopping() {
            let sweeps = if self.random.one_in(3) { self.random.below(3000) } else { 1 };
            (0..sweeps).for_each(|_| self.sweep());
            if !self.random.one_in(4) {
                self.renew();
            }
            let pause = Duration::from_micros(self.random.next() % 2_500_000);
            self.look(pause);
            self.verify();
        }
    }

    fn sweep(&mut self) {
        loop {
            match self.vcpu.run() {
                Ok(VcpuExit::IoOut(0x10, _)) => break,
                Ok(exit) => fail(&format!("the vCPU stopped: {exit:?}")),
                // The system call was interrupted: the vCPU goes on where it stopped.
                Err(e) if e.errno() == libc::EINTR || e.errno() == libc::EAGAIN => {}
                Err(e) => fail(&format!("KVM_RUN: {e}")),
            }
        }
        self.sweeps += 1;
    }

    /// Discards the swept pages between two sweeps, and fills them with the same contents again. Pages that were
    /// written in mappings of the pool can be folded again only then.
    fn renew(&mut self) {
        let given_back = self.area.advise(FIRST, SWEPT, libc::MADV_DONTNEED);
        crate::owners::ok("MADV_DONTNEED", given_back);
        for page in FIRST..FIRST + SWEPT {
            self.area.word(page, 0).store(self.sweeps & u64::from(u32::MAX), Relaxed);
            (1..WORDS).for_each(|n| self.area.word(page, n).store(word(self.class, n), Relaxed));
        }
        count("renewals");
    }

    /// Pauses, and then counts the swept pages that are folded.
    fn look(&mut self, pause: Duration) {
        std::thread::sleep(pause);
        let folded = folded(&self.area, FIRST, SWEPT);
        FOLDS.fetch_add(folded as u64, Relaxed);
        count("pauses");
    }

    fn verify(&self) {
        for page in FIRST..FIRST + SWEPT {
            let found = self.area.word(page, 0).load(Relaxed);
            let expected = self.sweeps & u64::from(u32::MAX);
            if found & u64::from(u32::MAX) != expected {
                let address = self.area.address(page);
                lost("by the vCPU", &Mismatch { address, page, offset: 0, expected, found });
            }
        }
        CHECKED.fetch_max(self.sweeps * SWEPT as u64, Relaxed);
    }
}
