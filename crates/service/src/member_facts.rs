//! Facts about members' processes that no worker knows: the kernel's counters of their memory, and the sizes of VMs as
//! the process that balances memory last read them.

use super::registry::Registry;
use api::control::MemberReport;
use host::MemoryCounters;
use page::pages_to_bytes;
use std::collections::BTreeSet;

/// Adds these facts to the reports on members of a group. A report on a process that is no member of it stays as it is,
/// because a worker may name any process.
pub(crate) fn add(registry: &mut Registry, group: &str, reports: &mut [MemberReport]) {
    let of_group = registry.state.members().iter().filter(|member| member.group == group);
    let members: BTreeSet<u32> = of_group.map(|member| member.identity.pid).collect();
    let dir = registry.place.dir().to_owned();
    let guests = registry.looks.fresh(&dir).map_or(&[][..], |look| look.standing.guests.as_slice());
    for report in reports.iter_mut().filter(|report| members.contains(&report.pid)) {
        report.anonymous_bytes = MemoryCounters::of(report.pid)
            .ok()
            .map(|now| pages_to_bytes(now.resident_pages.saturating_sub(now.file_pages)));
        let guest = guests.iter().find(|guest| guest.pid == report.pid);
        report.ram_bytes = guest.map(|guest| guest.ram_bytes);
        report.actual_bytes = guest.and_then(|guest| guest.actual_bytes);
    }
}
