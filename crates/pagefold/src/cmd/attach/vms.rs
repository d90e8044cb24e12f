//! VMs among the processes that are to be attached.

use cli::say;
use guest::Survey;

/// Says of each VM whose RAM cannot be folded, or not all of it, why that is so, and what would help.
///
/// # Errors
/// The processes of this host cannot be listed.
pub fn say_what_is_left(pids: &[u32]) -> anyhow::Result<()> {
    let is_vm = |pid: &u32| host::Process::read_without_arguments(*pid).is_ok_and(|process| guest::is_vm(&process));
    if !pids.iter().any(is_vm) {
        return Ok(());
    }
    let vms = Survey::take()?.guests(&[], &[]).into_iter().filter(|guest| guest.kind.is_vm());
    for vm in vms.filter(|vm| vm.pids.iter().any(|pid| pids.contains(pid))) {
        let check = guest::check_mergeable(&vm, true, None);
        if let Some(way) = check.fix.filter(|_| check.found.starts_with("no:") || check.found.starts_with("in part:")) {
            say!("pagefold: RAM of {}: {}; {way}", cli::printable(&vm.name), check.found);
        }
    }
    Ok(())
}
