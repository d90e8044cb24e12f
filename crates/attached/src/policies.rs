//! NUMA policies of mappings, in a process without hooks. A mapping of the pool cannot have a policy of its own: the
//! kernel would give it to the pool's file.
//!
//! Default filters of containers forbid `get_mempolicy`. If the kernel does not answer that call, its list of all
//! policies is read (`numa_maps`), for which it counts pages.

use agent::raw;
use page::HostVirt;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind, Read};

/// `MPOL_F_ADDR`: asks for the policy of the mapping at an address.
const OF_ADDRESS: usize = 2;

/// The NUMA policies of mappings, read from the kernel's list if `get_mempolicy` is forbidden.
#[derive(Debug, Default)]
pub struct Policies(Option<Plain>);

/// The mappings that have no policy of their own.
#[derive(Debug, PartialEq, Eq)]
enum Plain {
    /// All mappings: this kernel has no NUMA policies.
    All,
    /// The mappings that begin at these addresses.
    At(BTreeSet<u64>),
}

impl Policies {
    /// Whether the mapping that begins at `start` has a NUMA policy of its own.
    pub fn has_own(&mut self, start: HostVirt) -> bool {
        let mut policy = 0_i32;
        let arguments = [&raw mut policy as usize, 0, 0, start.0 as usize, OF_ADDRESS, 0];
        // SAFETY: the kernel writes the policy's number to the variable, and is given no place for its nodes.
        let answer = unsafe { raw::call(libc::SYS_get_mempolicy, arguments) };
        if answer == 0 {
            return policy != 0;
        }
        match self.0.get_or_insert_with(|| Plain::read(File::open("/proc/thread-self/numa_maps"))) {
            Plain::All => false,
            Plain::At(starts) => !starts.contains(&start.0),
        }
    }
}

impl Plain {
    /// Reads the kernel's list. A mapping that is not listed counts as one with a policy. A mapping without a policy is
    /// listed with the policy of the agent's thread, so it is recognised only if that is the default.
    fn read(list: io::Result<impl Read>) -> Self {
        let plain = |line: String| {
            let (start, rest) = line.split_once(' ')?;
            let start = u64::from_str_radix(start, 16).ok()?;
            (rest.split(' ').next() == Some("default")).then_some(start)
        };
        match list {
            Err(e) if e.kind() == ErrorKind::NotFound => Self::All,
            Err(_) => Self::At(BTreeSet::new()),
            Ok(list) => Self::At(BufReader::new(list).lines().map_while(Result::ok).filter_map(plain).collect()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_without_policy_are_told_from_those_with_one_and_from_unknown_ones() {
        let list = "7f0000001000 default anon=3 dirty=3 N0=3 kernelpagesize_kB=4\n\
                    7f0000002000 bind:0 anon=1\n7f0000003000 prefer:0\n7f0000004000 default\nrubbish\n";
        let starts = [0x7f00_0000_1000, 0x7f00_0000_4000].into();
        assert_eq!(Plain::read(Ok(list.as_bytes())), Plain::At(starts));
        let failed = |kind: ErrorKind| Plain::read(Err::<&[u8], _>(kind.into()));
        assert_eq!(failed(ErrorKind::NotFound), Plain::All);
        assert_eq!(failed(ErrorKind::PermissionDenied), Plain::At(BTreeSet::new()));
    }
}
