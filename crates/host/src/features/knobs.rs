//! Settings of the host that decide how well a census and folding work.

use crate::ksm::chosen;
use crate::{Check, Ksm, text};

/// Recommended `vm.max_map_count`, in mappings: enough for a guest whose memory is folded in short runs. The Debian
/// package has a `sysctl.d` file that sets it.
pub const GOOD_MAP_COUNT: u64 = 1_048_576;
/// `CAP_SYS_PTRACE`
const CAP_SYS_PTRACE: u32 = 19;

pub(super) fn ksm() -> Check {
    ksm_by(Ksm::read().as_ref())
}

fn ksm_by(ksm: Option<&Ksm>) -> Check {
    let check = |found: String| Check::ok("memory:ksm", found, "the kernel's own merging, as a yardstick");
    let Some(ksm) = ksm else { return check("the kernel has no KSM".into()).warn("use a kernel with CONFIG_KSM=y") };
    let option = |name: &str, value: Option<String>| value.map(|v| format!(", {name}={v}")).unwrap_or_default();
    let details = format!(
        "run={}{}{}{}",
        ksm.run,
        option("advisor", ksm.advisor_mode.clone()),
        option("smart_scan", ksm.smart_scan.map(|n| n.to_string())),
        option("pages_to_scan", ksm.pages_to_scan.map(|n| n.to_string())),
    );
    if ksm.run == 1 {
        let counts = format!("{} frames serve {} pages", ksm.pages_shared, ksm.pages_shared + ksm.pages_sharing);
        let check = check(format!("on ({details}): {counts}, across all owners"));
        // See docs/notebook/2026-11-28-smart-scan.md.
        return if ksm.smart_scan.is_none_or(|on| on == 0) {
            check
        } else {
            check
                .warn("echo 0 > /sys/kernel/mm/ksm/smart_scan: else a guest that starts later may never be merged with others")
                .for_good("echo 'w /sys/kernel/mm/ksm/smart_scan - - - - 0' > /etc/tmpfiles.d/60-pagefold-smart-scan.conf")
        };
    }
    check(format!("off ({details}): the kernel merges nothing"))
        .warn("echo 1 > /sys/kernel/mm/ksm/run, if guests of different owners may be merged with each other")
        .for_good("echo 'w /sys/kernel/mm/ksm/run - - - - 1' > /etc/tmpfiles.d/60-pagefold-ksm.conf")
}

pub(super) fn max_map_count() -> Check {
    let count = number("/proc/sys/vm/max_map_count");
    let found = count.map_or("unknown".into(), |n| n.to_string());
    let check = Check::ok("memory:max_map_count", found, "folding: each run of folded pages is a mapping");
    match count {
        Some(n) if n >= GOOD_MAP_COUNT => check,
        _ => check.warn(format!("sysctl -w vm.max_map_count={GOOD_MAP_COUNT}")).for_good(format!(
            "echo vm.max_map_count={GOOD_MAP_COUNT} > /etc/sysctl.d/60-pagefold.conf && sysctl --system"
        )),
    }
}

pub(super) fn huge_pages() -> Check {
    let choices = text::read("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    let needed_for = "knowing what merging costs: a huge page has to be split for it";
    match chosen(&choices) {
        None => Check::ok("memory:huge_pages", "the kernel has no transparent huge pages", needed_for),
        Some("always") => Check::ok("memory:huge_pages", "always", needed_for)
            .warn("echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, where memory is dearer than speed")
            .for_good(
                "echo 'w /sys/kernel/mm/transparent_hugepage/enabled - - - - madvise' > \
                 /etc/tmpfiles.d/60-pagefold-huge-pages.conf",
            ),
        Some(mode) => Check::ok("memory:huge_pages", mode, needed_for),
    }
}

pub(super) fn swap() -> Check {
    swap_by(&text::read("/proc/meminfo").unwrap_or_default())
}

fn swap_by(meminfo: &str) -> Check {
    let mib = |key: &str| -> Option<u64> {
        let line = meminfo.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(':'))?;
        Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? >> 10)
    };
    let needed_for = "overcommit: guests may write to all their merged pages at once";
    match (mib("SwapTotal"), mib("SwapFree")) {
        (Some(total), Some(free)) if total > 0 => {
            Check::ok("memory:swap", format!("{total} MiB, {} used", total.saturating_sub(free)), needed_for)
        }
        _ => Check::ok("memory:swap", "none", needed_for)
            .warn("add swap before promising guests more memory than there is"),
    }
}

pub(super) fn ptrace() -> Check {
    let scope = number("/proc/sys/kernel/yama/ptrace_scope");
    let status = text::read("/proc/self/status").unwrap_or_default();
    ptrace_by(scope, has_capability(&status, CAP_SYS_PTRACE))
}

/// Yama restricts attaching to a process (`ptrace`). The kernel treats reading another process's memory as attaching.
fn ptrace_by(scope: Option<u64>, capable: bool) -> Check {
    let found = match scope {
        None | Some(0) => "not restricted by Yama".into(),
        Some(n) => format!("kernel.yama.ptrace_scope={n}"),
    };
    let check = Check::ok("rights:ptrace", found, "reading the pages of processes for the census");
    match scope {
        None | Some(0) => check,
        Some(1 | 2) if capable => check,
        Some(1 | 2) => check.warn("run as root; until then only processes that you started from here can be read"),
        Some(_) => check.fail("boot with another value: until then nobody may read another process's memory"),
    }
}

/// Why this process may not look at another one, and the remedy.
pub fn why_denied() -> (String, String) {
    let status = text::read("/proc/self/status").unwrap_or_default();
    let modules = text::read("/sys/kernel/security/lsm").ok();
    why_denied_by(&status, rustix::process::geteuid().is_root(), modules.as_deref().map(str::trim))
}

fn why_denied_by(status: &str, is_root: bool, modules: Option<&str>) -> (String, String) {
    if !has_capability(status, CAP_SYS_PTRACE) {
        let found = "no right to read it: that takes CAP_SYS_PTRACE".to_owned();
        let fix =
            if is_root { "give this root CAP_SYS_PTRACE, or run outside of its container" } else { "run as root" };
        return (found, fix.to_owned());
    }
    let modules = modules.map_or_else(String::new, |list| format!(" (here: {list})"));
    let found = format!(
        "the kernel lets nobody here read it, CAP_SYS_PTRACE or not: it is of another user namespace, or a security \
         module protects it{modules}"
    );
    (found, "run outside of this container or sandbox, if it is a guest; otherwise leave it".to_owned())
}

fn has_capability(status: &str, capability: u32) -> bool {
    let effective = status.lines().find_map(|l| l.strip_prefix("CapEff:"));
    effective.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).is_some_and(|set| set >> capability & 1 == 1)
}

fn number(path: &str) -> Option<u64> {
    text::read(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Status;

    #[test]
    fn ksm_is_told_on_off_or_missing() {
        let on = Ksm { run: 1, pages_shared: 554, pages_sharing: 22_731, smart_scan: Some(1), ..Ksm::default() };
        let check = ksm_by(Some(&on));
        assert_eq!(
            (check.status, check.found.as_str()),
            (Status::Warn, "on (run=1, smart_scan=1): 554 frames serve 23285 pages, across all owners")
        );
        assert_eq!(ksm_by(Some(&Ksm { smart_scan: Some(0), ..on.clone() })).status, Status::Ok);
        assert_eq!(ksm_by(Some(&Ksm { smart_scan: None, ..on.clone() })).status, Status::Ok);
        assert_eq!(ksm_by(Some(&Ksm { run: 2, ..on })).status, Status::Warn);
        assert_eq!(ksm_by(None).found, "the kernel has no KSM");
    }

    #[test]
    fn swap_is_told_from_none() {
        assert_eq!(swap_by("SwapTotal:       2097152 kB\nSwapFree:  1048576 kB\n").found, "2048 MiB, 1024 used");
        assert_eq!(swap_by("SwapTotal:  0 kB\nSwapFree:  0 kB\n").status, Status::Warn);
        assert_eq!(swap_by("").found, "none");
    }

    #[test]
    fn refusal_is_told_by_its_reason() {
        let (with, without) = ("CapEff:\t0000000000080000\n", "CapEff:\t0000000000000000\n");
        let fix = |status, is_root| why_denied_by(status, is_root, None).1;
        assert_eq!(fix(without, false), "run as root");
        assert!(fix(without, true).contains("CAP_SYS_PTRACE"), "root is not told to be root");
        assert!(!fix(with, true).contains("as root") && !fix(with, false).contains("as root"));
        assert!(why_denied_by(with, true, Some("yama,apparmor")).0.contains("yama,apparmor"));
    }

    #[test]
    fn yama_stops_those_without_the_capability() {
        for (scope, capable, status) in [
            (None, false, Status::Ok),
            (Some(0), false, Status::Ok),
            (Some(1), true, Status::Ok),
            (Some(1), false, Status::Warn),
            (Some(3), true, Status::Fail),
        ] {
            assert_eq!(ptrace_by(scope, capable).status, status, "{scope:?}");
        }
        assert!(has_capability("CapPrm:\t0\nCapEff:\t000001ffffffffff\n", CAP_SYS_PTRACE));
        assert!(!has_capability("CapEff:\t0000000000000000\n", CAP_SYS_PTRACE));
    }
}
