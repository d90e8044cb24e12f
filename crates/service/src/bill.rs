//! A group's bill (counters of folding and of processor time, [`Bill`]) over all its workers, kept in the state file.
//!
//! ```text
//!   worker reports --> current, the latest bill of that worker    asked for every 10 s, and by `group show`
//!        |
//!        | another worker reports, or the group is asked about after its worker has ended
//!        v
//!   former, the sum of all workers before                         total = former + current
//! ```
//!
//! When a worker is killed, what it counted since its last report is lost: 10 s at most. The worker's processor time is
//! read from `/proc` once more when the worker has ended and was not waited for yet. That needs a child of this
//! supervisor, and not one of an earlier supervisor.

#![cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]

use api::control::Bill;
use host::{ProcessId, ProcessStat};
use serde::{Deserialize, Serialize};

/// Clock ticks of `/proc/PID/stat` in a second, which the kernel's interface fixes on x86-64.
const TICKS_A_SECOND: f64 = 100.0;

/// A group's bill over all its workers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Account {
    former: Bill,
    worker: Option<ProcessId>,
    current: Bill,
}

impl Account {
    /// Takes the latest bill of a worker into account. Returns whether anything has changed.
    pub fn heard(&mut self, worker: ProcessId, bill: &Bill) -> bool {
        let before = (self.worker == Some(worker)).then(|| self.current.clone());
        if before.is_none() {
            self.former.add(&std::mem::take(&mut self.current));
            self.worker = Some(worker);
        }
        self.current.grow_to(bill);
        before.is_none_or(|before| before != self.current)
    }

    /// Reads the processor time of the current worker if it is a zombie: it has ended, and was not waited for yet.
    /// Returns whether the bill has changed.
    pub fn look_at_ended(&mut self) -> bool {
        let Some(worker) = self.worker else { return false };
        let stat = ProcessStat::read(worker.pid).ok().filter(|stat| stat.start_ticks == worker.start_ticks);
        let Some(stat) = stat.filter(ProcessStat::has_ended) else { return false };
        let used = stat.cpu_ticks as f64 / TICKS_A_SECOND;
        if used <= self.current.worker_cpu_s {
            return false;
        }
        self.current.worker_cpu_s = used;
        true
    }

    /// The sum over all workers.
    pub fn total(&self) -> Bill {
        let mut total = self.former.clone();
        total.add(&self.current);
        total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bill_goes_on_from_worker_to_worker_and_never_back() {
        let worker = |pid| ProcessId { pid, start_ticks: 1 };
        let bill = |folds, busy, worker_cpu_s| Bill {
            folds,
            fold_failures: [("busy".to_owned(), busy)].into(),
            worker_cpu_s,
            ..Bill::default()
        };
        let mut account = Account::default();
        assert!(account.heard(worker(1), &bill(10, 3, 0.5)));
        assert!(!account.heard(worker(1), &bill(10, 3, 0.5)));
        assert!(!account.heard(worker(1), &bill(9, 0, 0.25)), "a later bill that is smaller changes nothing");
        assert_eq!(account.total(), bill(10, 3, 0.5));
        assert!(account.heard(worker(2), &bill(0, 0, 0.0)));
        assert_eq!(account.total(), bill(10, 3, 0.5));
        account.heard(worker(2), &bill(5, 1, 0.25));
        let json = serde_json::to_string(&account).unwrap();
        let mut again: Account = serde_json::from_str(&json).unwrap();
        assert_eq!(again.total(), bill(15, 4, 0.75));
        again.heard(worker(3), &bill(u64::MAX, 1, 0.0));
        assert_eq!(again.total().folds, u64::MAX);
    }

    #[test]
    fn time_of_an_ended_worker_is_read_until_it_is_collected() {
        let mut child =
            std::process::Command::new("sh").args(["-c", "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done"]).spawn();
        let child = child.as_mut().expect("run sh");
        let worker = ProcessId::of(child.id()).expect("it was just started");
        let mut account = Account::default();
        account.heard(worker, &Bill::default());
        while worker.is_alive() {
            assert!(!account.look_at_ended(), "it runs");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        assert!(account.look_at_ended() && account.total().worker_cpu_s > 0.0);
        child.wait().expect("wait for our own child");
        assert!(!account.look_at_ended());
    }
}
