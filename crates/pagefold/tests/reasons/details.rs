//! Reasons that share a state with others: each is named, and so is what ends it.

use crate::common::service::{Service, cannot_fold, until};
use crate::{fix, until_state};

/// Advises memory, which has a NUMA policy if there is an argument. Says whether it could have one.
const BOUND: &str = "
import ctypes, mmap, sys
memory = mmap.mmap(-1, 64 * 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
node, number, bind = ctypes.c_ulong(1), 237, 2
def mbind(): return ctypes.CDLL(None).syscall(number, address, ctypes.c_ulong(64 * 4096), bind, ctypes.byref(node), ctypes.c_ulong(64), 0)
print(len(sys.argv) < 2 or mbind() == 0, flush=True)
memory.madvise(mmap.MADV_MERGEABLE)
sys.stdin.read()
";

#[test]
fn memory_with_a_numa_policy_is_named_and_member_without_it_is_folded() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let bound = service.run("acme", "a", &[], &["python3", "-c", BOUND, "bound"]);
    until(60, "it has a policy or not", || !bound.lines().is_empty());
    if bound.lines()[0] != "True" {
        return eprintln!("skipped: this kernel has no NUMA policies");
    }
    let row = until_state(&service, "a", "not_foldable");
    assert!(row["detail"].as_str().is_some_and(|why| why.contains("a NUMA policy of its own")), "{row}");
    assert!(fix(&row).contains("start it again without what is named"), "{row}");
    let _again = service.run("acme", "b", &[], &["python3", "-c", BOUND]);
    until_state(&service, "b", "folding");
}
