//! The part of BPF that Pagefold needs: a map shared with user space, and a program that user space runs on demand.

use rustix::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::io;

/// One instruction.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Instruction {
    code: u8,
    /// Destination in the low, source in the high four bits.
    registers: u8,
    offset: i16,
    immediate: i32,
}

const _: () = assert!(size_of::<Instruction>() == 8);

/// An instruction by its parts.
pub const fn op(code: u8, destination: u8, source: u8, offset: i16, immediate: i32) -> Instruction {
    Instruction { code, registers: destination | source << 4, offset, immediate }
}

/// `BPF_MAP_CREATE` part of `union bpf_attr`.
#[repr(C)]
struct MapCreate {
    map_type: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    map_flags: u32,
}

/// `BPF_PROG_LOAD` part, up to `prog_flags`.
#[repr(C)]
struct ProgLoad {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buf: u64,
    kern_version: u32,
    prog_flags: u32,
}

const _: () = assert!(size_of::<MapCreate>() == 20 && size_of::<ProgLoad>() == 48);

/// `BPF_PROG_TEST_RUN` part, whole.
#[repr(C)]
#[derive(Default)]
struct TestRun {
    prog_fd: u32,
    others: [u32; 19],
}

const BPF_MAP_CREATE: libc::c_long = 0;
const BPF_PROG_LOAD: libc::c_long = 5;
const BPF_PROG_TEST_RUN: libc::c_long = 10;
const BPF_MAP_TYPE_ARRAY: u32 = 2;
const BPF_F_MMAPABLE: u32 = 1 << 10;
const BPF_PROG_TYPE_SYSCALL: u32 = 31;
const BPF_F_SLEEPABLE: u32 = 1 << 4;

/// Issues one command. `attributes` is the part of `union bpf_attr` that the command uses; the kernel takes the rest
/// of the union for zeros.
fn bpf<T>(command: libc::c_long, attributes: &mut T) -> io::Result<libc::c_long> {
    let size = size_of::<T>();
    // SAFETY: the kernel reads and writes within `size` bytes of the structure, which is exclusively borrowed and
    // made of integers. It checks the pointers in it like any user pointer. The callers, who fill these pointers in,
    // keep the memory behind them alive until this call returns.
    let answer = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attributes), size) };
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(answer) }
}

fn owned(fd: libc::c_long) -> io::Result<OwnedFd> {
    let fd = libc::c_int::try_from(fd).map_err(io::Error::other)?;
    // SAFETY: the kernel has just returned this descriptor to us and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Creates a BPF array map of one value, which can be mapped into user space.
pub fn create_shared_value(bytes: usize) -> io::Result<OwnedFd> {
    let value_size = u32::try_from(bytes).map_err(io::Error::other)?;
    let mut attributes =
        MapCreate { map_type: BPF_MAP_TYPE_ARRAY, key_size: 4, value_size, max_entries: 1, map_flags: BPF_F_MMAPABLE };
    owned(bpf(BPF_MAP_CREATE, &mut attributes)?)
}

/// Has the kernel verify and load a `BPF_PROG_TYPE_SYSCALL` program, which runs only when user space runs it.
pub fn load_syscall_program(instructions: &[Instruction]) -> io::Result<OwnedFd> {
    // The kernel lets only programs under the GPL call `bpf_probe_read_kernel`.
    let license = c"Dual MIT/GPL";
    let mut attributes = ProgLoad {
        prog_type: BPF_PROG_TYPE_SYSCALL,
        insn_cnt: u32::try_from(instructions.len()).map_err(io::Error::other)?,
        insns: instructions.as_ptr() as u64,
        license: license.as_ptr() as u64,
        log_level: 0,
        log_size: 0,
        log_buf: 0,
        kern_version: 0,
        prog_flags: BPF_F_SLEEPABLE,
    };
    owned(bpf(BPF_PROG_LOAD, &mut attributes)?)
}

/// Runs a loaded program once.
pub fn run(program: &OwnedFd) -> io::Result<()> {
    let mut attributes = TestRun { prog_fd: program.as_raw_fd().cast_unsigned(), ..TestRun::default() };
    bpf(BPF_PROG_TEST_RUN, &mut attributes).map(|_| ())
}
