//! A group's settings and worker in words.

use api::ask::{GroupState, NOT_CONFIGURED, WorkerState};
use api::control::{Fold, Latency, Settings, ZeroPolicy};
use api::promise::Fit;
use page::pages_to_bytes;

/// The state of a worker.
pub const fn worker(worker: WorkerState) -> &'static str {
    match worker {
        WorkerState::None => "none",
        WorkerState::Starting => "starting",
        WorkerState::Running => "running",
    }
}

/// The settings; those at their defaults are left out.
pub fn settings(s: &Settings, configured: bool) -> String {
    let usual = Settings::default();
    let mut words = vec![
        match s.fold {
            Fold::On => "folds",
            Fold::Off => "fold off: leaves what is folded, folds nothing more",
            Fold::Unfold => "unfold: all pages are private again, or will be soon",
        }
        .to_owned(),
    ];
    words.extend(s.scan_rate.map(|rate| format!("scans {rate} pages/s")));
    words.extend(
        s.scan_budget_percent.map(|most| format!("scans as fast as yields, for at most {most}% of a processor")),
    );
    if s.zero_pages != usual.zero_pages {
        let policy = if s.zero_pages == ZeroPolicy::Ignore { "left alone" } else { "folded when idle" };
        words.push(format!("pages of zeros {policy}"));
    }
    if s.split_huge_at_percent != usual.split_huge_at_percent {
        words.push(match s.split_huge_at_percent {
            None => "huge pages stay whole".to_owned(),
            Some(percent) => format!("splits huge pages at {percent}%"),
        });
    }
    if s.intra_member_only {
        words.push("each member by itself".to_owned());
    }
    if s.pool_slots != usual.pool_slots {
        words.push(format!("pool of {}", cli::bytes(pages_to_bytes(s.pool_slots.into()))));
    }
    if s.latency == Latency::Eager {
        words.push("eager for processors".to_owned());
    }
    if !configured {
        words.push(NOT_CONFIGURED.to_owned());
    }
    words.join("; ")
}

/// The first line of a group's state: how many more guests fit. Empty unless memory is balanced between VMs of the
/// group.
pub fn fit(fit: Option<&Fit>) -> String {
    let Some(fit) = fit else { return String::new() };
    let Fit { more, policy, like_bytes, storm_bytes, reserve_bytes } = fit;
    let [like, storm, reserve] = [like_bytes, storm_bytes, reserve_bytes].map(|bytes| cli::bytes(*bytes));
    let policy = policy.name();
    format!("{more} more guests of {like} fit ({policy}); a full break storm needs {storm}, the reserve is {reserve}\n")
}

/// The settings and the worker of a group, in words.
pub fn of(state: &GroupState) -> String {
    let worker = match (state.worker, state.worker_pid) {
        (_, Some(pid)) => format!("worker {}, process {pid}", worker(state.worker)),
        (none, None) => format!("worker {}", worker(none)),
    };
    format!("{}; {worker}", settings(&state.settings, state.configured))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figure_of_memory_is_a_line_by_itself_or_none() {
        let one =
            Fit { more: 3, like_bytes: 512 << 20, storm_bytes: 3 << 30, reserve_bytes: 4 << 30, ..Fit::default() };
        let line =
            "3 more guests of 512 MiB fit (strict); a full break storm needs 3.00 GiB, the reserve is 4.00 GiB\n";
        assert_eq!((fit(Some(&one)), fit(None)), (line.to_owned(), String::new()));
    }

    #[test]
    fn only_changed_settings_are_shown() {
        assert_eq!(settings(&Settings::default(), true), "folds");
        let other = Settings {
            scan_rate: Some(9),
            scan_budget_percent: Some(5),
            zero_pages: ZeroPolicy::Ignore,
            split_huge_at_percent: None,
            fold: Fold::Off,
            intra_member_only: true,
            pool_slots: 2048,
            latency: Latency::Eager,
            ..Settings::default()
        };
        let words = settings(&other, false);
        for part in [
            "fold off",
            "9 pages/s",
            "5% of a processor",
            "zeros left alone",
            "stay whole",
            "by itself",
            "pool of 8.0 MiB",
            "eager for processors",
            "last limits",
        ] {
            assert!(words.contains(part), "{words}");
        }
    }
}
