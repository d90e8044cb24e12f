//! The memory that a guest holds by the kernel's own accounting, summed over its processes.

use crate::region::RegionMap;
use crate::{Footprint, Guest, Partial, RegionFootprint};
use host::{Mapping, Usage};
use page::Region;

impl Footprint {
    /// Measures `guest`. Processes that cannot be read are left out and listed. The footprint is empty if no process
    /// can be read.
    pub fn measure(guest: &Guest) -> (Self, Vec<Partial>) {
        let mut total = Usage::default();
        let mut by_region = [Usage::default(); Region::ALL.len()];
        let (mut partial, mut folded_bytes) = (Vec::new(), 0);
        for &pid in &guest.pids {
            match measure_process(guest, pid, &mut by_region) {
                Ok((usage, folded)) => {
                    total = total.plus(&usage);
                    folded_bytes += folded;
                }
                Err(error) => partial.push(Partial { guest: guest.id.clone(), pid, reason: reason(&error) }),
            }
        }
        let holds_memory = |u: &Usage| u.rss_bytes + u.swap_bytes > 0;
        let regions = Region::ALL.into_iter().zip(by_region).filter(|(_, u)| holds_memory(u));
        let footprint = Self {
            guest: guest.clone(),
            rss_bytes: total.rss_bytes,
            pss_bytes: total.pss_bytes,
            uss_bytes: total.uss_bytes,
            swap_bytes: total.swap_bytes,
            ksm_bytes: total.ksm_bytes,
            folded_bytes,
            thp_bytes: total.thp_bytes,
            hugetlb_bytes: total.hugetlb_bytes,
            regions: regions.map(|(region, u)| RegionFootprint::new(region, &u)).collect(),
        };
        (footprint, partial)
    }
}

impl RegionFootprint {
    fn new(region: Region, usage: &Usage) -> Self {
        Self {
            region,
            rss_bytes: usage.rss_bytes,
            pss_bytes: usage.pss_bytes,
            uss_bytes: usage.uss_bytes,
            swap_bytes: usage.swap_bytes,
        }
    }
}

/// Totals and folded bytes of one process. Its mappings are added to `by_region`, but only if there is no error.
fn measure_process(guest: &Guest, pid: u32, by_region: &mut [Usage]) -> host::Result<(Usage, u64)> {
    let total = Usage::of(pid)?;
    let mappings = Mapping::read_all(pid)?;
    let regions = RegionMap::new(Some(guest), &mappings);
    for (n, mapping) in mappings.iter().enumerate() {
        let sum = &mut by_region[regions.region_of(n) as usize];
        *sum = sum.plus(&mapping.usage);
    }
    let folded = |m: &Mapping| m.bytes().saturating_sub(m.usage.anonymous_bytes + m.usage.swap_bytes);
    let folded = mappings.iter().filter(|m| crate::holds_folded_pages(m)).map(folded).sum();
    Ok((total, folded))
}

fn reason(error: &host::Error) -> String {
    if error.is_gone() {
        "the process has ended".into()
    } else if error.is_denied() {
        "no right to read it: run as root (with CAP_SYS_PTRACE)".into()
    } else {
        error.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Survey;
    use std::process::{Child, Command};

    fn sleeper() -> Child {
        let child = Command::new("sleep").arg("60").spawn().unwrap();
        // Before it sleeps its memory grows. The number of the system call is that of `clock_nanosleep`.
        let call = format!("/proc/{}/syscall", child.id());
        while !std::fs::read_to_string(&call).is_ok_and(|call| call.starts_with("230 ")) {}
        child
    }

    #[test]
    fn ended_process_is_listed_and_others_are_measured() {
        let (mut one, mut two) = (sleeper(), sleeper());
        let survey = Survey::take().unwrap();
        let mut guest = survey.guests(&[one.id()], &[]).into_iter().find(|g| g.pids == [one.id()]).unwrap();
        guest.pids.push(two.id());
        let (both, partial) = Footprint::measure(&guest);
        assert_eq!(partial, []);
        two.kill().unwrap();
        two.wait().unwrap();
        let (rest, partial) = Footprint::measure(&guest);
        assert_eq!(partial.len(), 1);
        assert_eq!((partial[0].pid, partial[0].guest.as_str()), (two.id(), guest.id.as_str()));
        assert_eq!(partial[0].reason, "the process has ended");
        assert!(rest.rss_bytes > 0 && rest.rss_bytes < both.rss_bytes);
        let sum: u64 = rest.regions.iter().map(|r| r.rss_bytes).sum();
        assert_eq!(sum, rest.rss_bytes);
        assert!(rest.regions.iter().any(|r| r.region == Region::Stack));
        assert!(rest.regions.windows(2).all(|w| w[0].region < w[1].region));
        one.kill().unwrap();
        one.wait().unwrap();
        let (nothing, partial) = Footprint::measure(&guest);
        assert_eq!((nothing.rss_bytes, nothing.regions.len(), partial.len()), (0, 0, 2));
    }
}
