//! Carries out orders to attach processes, a few at a time, each in a thread.

use crate::attach::{Order, Refused};
use host::ProcessId;
use rustix::process::{WaitOptions, wait};
use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Most processes that are being attached at a time: one for each processor, and 4 at most.
const MOST_AT_ONCE: usize = 4;

/// The result of an order: its process, and the reason if the order failed.
pub type Done = (ProcessId, Option<String>);

/// Orders that wait or run, and the threads that carry them out.
pub struct Crew {
    program: PathBuf,
    dir: PathBuf,
    waiting: VecDeque<Order>,
    at_once: usize,
    running: Vec<ProcessId>,
    /// Processes whose `pagefold-attach` has said nothing within its time. No new order is given for them before that
    /// program has closed its output.
    silent: Arc<Mutex<Vec<ProcessId>>>,
    sender: Sender<Done>,
    receiver: Receiver<Done>,
}

impl Crew {
    /// A crew that starts `program`, for the service in `dir`.
    pub fn new(program: PathBuf, dir: PathBuf) -> Self {
        let (sender, receiver) = channel();
        let at_once = std::thread::available_parallelism().map_or(1, |n| n.get().min(MOST_AT_ONCE));
        Self {
            program,
            dir,
            waiting: VecDeque::new(),
            at_once,
            running: Vec::new(),
            silent: Arc::default(),
            sender,
            receiver,
        }
    }

    /// Queues an order.
    pub fn order(&mut self, order: Order) {
        self.waiting.push_back(order);
    }

    /// Whether an order for a process waits, or is being carried out.
    pub fn is_ordered(&self, process: ProcessId) -> bool {
        let is_silent = self.silent.lock().unwrap_or_else(PoisonError::into_inner).contains(&process);
        is_silent || self.running.contains(&process) || self.waiting.iter().any(|order| order.process == process)
    }

    /// Starts waiting orders until as many run as may at a time ([`MOST_AT_ONCE`]). `still` says whether an order is
    /// still wanted; others are dropped.
    pub fn start(&mut self, mut still: impl FnMut(&Order) -> bool) {
        while self.running.len() < self.at_once {
            let Some(order) = self.waiting.pop_front() else { return };
            if !still(&order) {
                continue;
            }
            self.running.push(order.process);
            let (program, dir, sender) = (self.program.clone(), self.dir.clone(), self.sender.clone());
            let silent = Arc::clone(&self.silent);
            std::thread::spawn(move || {
                let (failed, listener) = match order.carry_out(&program, &dir) {
                    Ok(Ok(_)) => (None, None),
                    Ok(Err(Refused { why, listener, .. })) => (Some(why), listener),
                    Err(e) => (Some(format!("{e:#}")), None),
                };
                let all = || silent.lock().unwrap_or_else(PoisonError::into_inner);
                all().extend(listener.is_some().then_some(order.process));
                // Sending fails only while this program ends and the receiver is gone.
                let _ = sender.send((order.process, failed));
                if let Some(listener) = listener {
                    let _ = listener.join();
                    all().retain(|silent| *silent != order.process);
                }
            });
        }
    }

    /// Waits until an order has ended, for `within` at most; `None` if none has.
    pub fn done(&mut self, within: Duration) -> Option<Done> {
        let done = self.receiver.recv_timeout(within).ok();
        if let Some((process, _)) = &done {
            self.running.retain(|running| running != process);
        }
        done
    }

    /// Reaps `pagefold-attach` programs that have ended. Each stays beside its process for as long as the process
    /// lives.
    pub fn collect(&self) {
        // While an order runs, its thread itself waits for the program if it fails. So nothing is reaped here
        // meanwhile.
        while self.running.is_empty() && matches!(wait(WaitOptions::NOHANG), Ok(Some(_))) {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{make_script, order};

    /// Longest time for a shell to end.
    const PATIENCE: Duration = Duration::from_secs(120);

    #[test]
    fn orders_are_carried_out_a_few_at_a_time_if_they_are_still_wanted() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("program");
        let say = "{\"pid\":1,\"group\":\"acme\",\"threads\":1,\"stopped_us\":1,\"enrolled_bytes\":1,\"via\":\"agent\",\"groups_hold\":true}";
        // A stand-in for `pagefold-attach` that refuses process 1, and says of all others that they are attached.
        let script = format!("if [ $2 = 1 ]; then echo 'it is traced' >&2; exit 1; fi\necho '{say}'");
        make_script(&program, &script);
        let mut crew = Crew::new(program, dir.path().to_owned());
        assert!((1..=MOST_AT_ONCE).contains(&crew.at_once));
        crew.at_once = 1;
        let process = |pid| order(pid).process;
        (1..=3).for_each(|pid| crew.order(order(pid)));
        crew.start(|_| true);
        assert_eq!((crew.running.len(), crew.waiting.len()), (1, 2));
        assert!((1..=3).all(|pid| crew.is_ordered(process(pid))) && !crew.is_ordered(process(4)));
        let (done, why) = crew.done(PATIENCE).expect("it ends");
        assert_eq!(done, process(1));
        assert!(why.as_ref().is_some_and(|why| why.contains("it is traced")), "{why:?}");
        assert!(!crew.is_ordered(process(1)));
        // The order for process 2 is not wanted any more, and is dropped.
        crew.start(|order| order.process.pid == 3);
        assert!(!crew.is_ordered(process(2)));
        assert_eq!(crew.done(PATIENCE), Some((process(3), None)));
        assert!(crew.running.is_empty() && crew.waiting.is_empty());
        assert_eq!(crew.done(Duration::ZERO), None);
    }
}
