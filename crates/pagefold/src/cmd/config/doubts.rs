//! Parts of a configuration that are valid and yet dangerous, or without effect on this host as it is.

use api::enrol::Rule;
use enrol::decide::Rules;
use enrol::facts::Looker;
use guest::{Glob, Survey};
use host::{MemoryLimits, Process};
use service::config::{Config, ProcessRule};

/// All that is doubtful in a configuration, a sentence each.
pub fn of(config: &Config) -> Vec<String> {
    let processes: Vec<Process> =
        host::pids().unwrap_or_default().into_iter().filter_map(|pid| Process::read(pid).ok()).collect();
    let mut doubts: Vec<String> = [reserve(config), within(config), listen(config)].into_iter().flatten().collect();
    doubts.extend(guarantees(config));
    doubts.extend(parking(config));
    doubts.extend(enrolments(config, &processes));
    for (name, group) in config.groups.iter().flatten() {
        let is_vain = |rule: &&ProcessRule| !processes.iter().any(|process| rule.fits(process.uid, process));
        let vain = group.processes.iter().filter(is_vain).count();
        if vain > 0 {
            doubts.push(format!("group {name}: {vain} of its rules for processes fit no process of this host now"));
        }
    }
    doubts
}

fn reserve(config: &Config) -> Option<String> {
    let (reserve, ram) = (config.reserve?, host::ram_bytes());
    let all = cli::bytes(ram);
    (reserve >= ram).then(|| {
        format!(
            "[service] reserve = {} is all memory of this host ({all}): nothing can be unfolded",
            cli::bytes(reserve)
        )
    })
}

fn within(config: &Config) -> Option<String> {
    let group = config.balance.as_ref()?.within.as_ref()?;
    let is_bound = MemoryLimits::find().is_some_and(|limits| limits.bound_and_left(group).is_some());
    (!is_bound).then(|| {
        format!("[balance] within = \"{group}\": there is no such control group with a memory limit below the host's memory; nothing is balanced")
    })
}

fn listen(config: &Config) -> Option<String> {
    let address = config.api.as_ref()?.listen.filter(|address| !address.ip().is_loopback())?;
    Some(format!(
        "[api] listen = \"{address}\": tokens and answers cross the network as plain text; put a proxy with TLS before it"
    ))
}

fn guarantees(config: &Config) -> Vec<String> {
    let Some(balance) = &config.balance else {
        let without = (config.vain_guarantees > 0)
            .then(|| format!("{} [[guest]] without [balance] have no effect", config.vain_guarantees));
        return without.into_iter().collect();
    };
    let guests = Survey::take().map(|survey| survey.guests(&[], &[])).unwrap_or_default();
    let is_vain = |glob: &Glob| !guests.iter().any(|guest| glob.matches(&guest.id) || glob.matches(&guest.name));
    let vain = balance.guaranteed.iter().filter(|(glob, _)| glob.parse::<Glob>().is_ok_and(|glob| is_vain(&glob)));
    vain.map(|(glob, _)| format!("[[guest]] name = \"{glob}\" is no guest of this host now")).collect()
}

fn parking(config: &Config) -> Vec<String> {
    let Some(park) = &config.park else { return Vec::new() };
    let has_group = |name: &String| config.groups.as_ref().is_some_and(|groups| groups.contains_key(name));
    let unknown = park.groups.iter().filter(|group| !has_group(group));
    let unknown = unknown.map(|group| format!("[park] groups: there is no [[group]] with the name \"{group}\""));
    let no_swap = (host::total_swap_bytes() == 0).then(|| {
        "[park]: this host has no swap (nor zram), so memory that parked guests hold alone stays in frames".to_owned()
    });
    unknown.chain(no_swap).collect()
}

fn enrolments(config: &Config, processes: &[Process]) -> Vec<String> {
    let mut looker = Looker::new();
    looker.look_anew();
    let facts: Vec<_> = processes.iter().filter_map(|process| looker.look(process.pid, true)).collect();
    let mut doubts = Vec::new();
    for rule in &config.enrol {
        let is_anything = |path: &String| path.split('/').all(|part| part.chars().all(|c| c == '*'));
        let others = Rule { cgroup: None, ..rule.clone() }.to_string();
        if rule.cgroup.as_ref().is_some_and(is_anything) && others.is_empty() {
            doubts.push(format!(
                "[[enrol]] {rule} fits all programs in any control group, the system's own services among them"
            ));
        }
        let rules = Rules::new(vec![rule.clone()]);
        if !facts.iter().any(|facts| rules.fit(facts)) {
            doubts.push(format!("[[enrol]] {rule}, of group {}, fits no process of this host now", rule.group));
        }
    }
    doubts
}
