//! What the command line asks, and what it gets for an answer.

use super::ask::{self, Answer, Ask, GroupLine, GroupState, MemberLine};
use super::change::Change;
use super::log::note;
use super::name;
use super::supervisor::Supervisor;
use fold::control::{Fold, GroupReport, Identity};
use host::{PeerProcess, Seqpacket};
use page::pages_to_bytes;
use rustix::fd::{AsFd, BorrowedFd};
use std::collections::VecDeque;
use std::io;
use std::time::{Duration, Instant};

/// Who asks may take so long.
const PATIENCE: Duration = Duration::from_secs(10);
/// A worker may take so long to say how it does.
const WORKER_PATIENCE: Duration = Duration::from_secs(3);
/// Clients at once: in all, and of one user.
const MOST_CLIENTS: (usize, usize) = (512, 64);

/// Somebody who asks.
pub struct Client {
    socket: Seqpacket,
    peer: PeerProcess,
    since: Instant,
    waiting: VecDeque<Vec<u8>>,
    /// Waits for a worker's report.
    wants: Option<(String, Wants)>,
    done: bool,
}

/// What a worker's report is wanted for.
#[derive(Clone, Copy)]
enum Wants {
    /// To show it.
    Show,
    /// To see whether there is memory to unfold into.
    Unfold(Change),
}

impl Client {
    /// Who has connected.
    ///
    /// # Errors
    /// It has ended already.
    pub fn new(socket: Seqpacket) -> io::Result<Self> {
        let peer = PeerProcess::of(&socket)?;
        let since = Instant::now();
        Ok(Self { socket, peer, since, waiting: VecDeque::new(), wants: None, done: false })
    }

    /// Its user.
    pub fn uid(&self) -> u32 {
        self.peer.uid
    }

    /// Whether something waits to be sent.
    pub fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    fn answer(&mut self, answer: &Answer) {
        self.waiting.push_back(ask::encode(answer));
        self.flush();
    }

    fn flush(&mut self) {
        while let Some(frame) = self.waiting.front() {
            match self.socket.send(frame, &[]) {
                Ok(true) => _ = self.waiting.pop_front(),
                Ok(false) => return,
                Err(_) => {
                    self.done = true;
                    return;
                }
            }
        }
    }
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Supervisor {
    /// Whether one more may ask.
    pub(super) fn has_room_for(&self, client: &Client) -> bool {
        let same_user = self.clients.iter().filter(|c| c.uid() == client.uid()).count();
        self.clients.len() < MOST_CLIENTS.0 && same_user < MOST_CLIENTS.1
    }

    /// Takes questions, and sends what answers wait.
    pub(super) fn hear_clients(&mut self, buffer: &mut Vec<u8>) {
        let mut clients = std::mem::take(&mut self.clients);
        for client in &mut clients {
            client.flush();
            if client.wants.is_some() || client.done {
                continue;
            }
            match ask::receive(&client.socket, buffer) {
                Ok(Some(question)) => {
                    client.since = Instant::now();
                    self.hear(client, question);
                }
                Ok(None) => {}
                Err(_) => client.done = true,
            }
        }
        clients.retain(|client| !client.done);
        clients.append(&mut self.clients);
        self.clients = clients;
    }

    /// Once a second.
    pub(super) fn forget_silent_clients(&mut self) {
        for client in &mut self.clients {
            if client.wants.is_some() && client.since.elapsed() > WORKER_PATIENCE {
                client.wants = None;
                client.answer(&Answer::Refused("the group's worker does not answer; see the service's log".into()));
            }
        }
        self.clients.retain(|client| client.since.elapsed() < PATIENCE);
    }

    fn hear(&mut self, client: &mut Client, question: Ask) {
        let answered = match question {
            Ask::Join { group, name, program } => self.join(client, &group, name, &program),
            Ask::Groups => self.list_groups(client),
            Ask::Members => self.list_members(client),
            Ask::Show { group } => self.ask_worker(client, &group, Wants::Show),
            Ask::Set { group, change } if change.fold == Some(Fold::Unfold) => {
                self.ask_worker(client, &group, Wants::Unfold(change))
            }
            Ask::Set { group, change } => self.set(client, &group, &change),
        };
        if let Err(why) = answered {
            client.answer(&Answer::Refused(why));
        }
    }

    /// Whether a client may deal with a group, which is made where any group is allowed.
    fn allow(&mut self, client: &Client, group: &str, make: bool) -> Result<(), String> {
        name::check("group", group)?;
        let uid = client.uid();
        let (config, known) = match self.groups.get(group) {
            Some(found) => (found.config.clone(), true),
            None => Default::default(),
        };
        if !self.may(uid, &config) {
            return Err(format!("user {uid} may not deal with group {group}: add it to the group's users"));
        }
        if known {
            return Ok(());
        }
        match &self.config.groups {
            None if make => _ = self.group(group),
            None => return Err(format!("there is no group {group}")),
            Some(groups) => {
                let names: Vec<&str> = groups.keys().map(String::as_str).take(20).collect();
                return Err(format!("the configuration has no group {group}; it has {}", names.join(", ")));
            }
        }
        Ok(())
    }

    fn join(&mut self, client: &mut Client, group: &str, wanted: Option<String>, program: &str) -> Result<(), String> {
        self.allow(client, group, true)?;
        let PeerProcess { id, uid } = client.peer;
        let name = wanted.unwrap_or_else(|| name::of_process(program, id.pid));
        name::check("member", &name)?;
        let identity = Identity { name: name.clone(), pid: id.pid, started: id.start_ticks };
        let connected = self.state.find(id).is_some_and(|m| m.connected);
        self.state.add(MemberLine { group: group.to_owned(), identity, uid, connected })?;
        // Written before the answer: from here on, whoever supervises knows it.
        self.state.write(&self.place.state_file()).map_err(|e| format!("{e:#}"))?;
        self.group(group).idle_since = None;
        note!("group {group}: process {} of user {uid} is member {name}", id.pid);
        client.answer(&Answer::Joined(name));
        Ok(())
    }

    fn list_groups(&mut self, client: &mut Client) -> Result<(), String> {
        let uid = client.uid();
        for group in self.groups.values().filter(|g| self.may(uid, &g.config)) {
            client.answer(&Answer::Group(GroupLine {
                name: group.name.clone(),
                members: self.state.members_of(&group.name),
                worker: group.worker_state(),
                settings: group.settings(),
            }));
        }
        client.answer(&Answer::Done);
        Ok(())
    }

    fn list_members(&mut self, client: &mut Client) -> Result<(), String> {
        self.state.forget_dead();
        for member in self.state.members() {
            let sees = self.groups.get(&member.group).is_some_and(|g| self.may(client.uid(), &g.config));
            if sees {
                client.answer(&Answer::Member(member.clone()));
            }
        }
        client.answer(&Answer::Done);
        Ok(())
    }

    fn ask_worker(&mut self, client: &mut Client, group: &str, wants: Wants) -> Result<(), String> {
        self.allow(client, group, false)?;
        if self.group(group).ask_report() {
            client.wants = Some((group.to_owned(), wants));
            return Ok(());
        }
        self.use_report(client, group, wants, &GroupReport::none());
        Ok(())
    }

    /// A worker has said how it does.
    pub(super) fn reported(&mut self, group: &str, report: &GroupReport) {
        let mut clients = std::mem::take(&mut self.clients);
        for client in &mut clients {
            if let Some((_, wants)) = client.wants.take_if(|(wanted, _)| wanted == group) {
                self.use_report(client, group, wants, report);
            }
        }
        self.clients = clients;
    }

    fn use_report(&mut self, client: &mut Client, group: &str, wants: Wants, report: &GroupReport) {
        match wants {
            Wants::Show => {
                let group = self.group(group);
                client.answer(&Answer::Report(Box::new(GroupState {
                    name: group.name.clone(),
                    settings: group.settings(),
                    worker: group.worker_state(),
                    worker_pid: group.worker.as_ref().map(|w| w.process.pid),
                    segments: group.segments(),
                    report: report.clone(),
                })));
            }
            Wants::Unfold(change) => {
                let answer = match check_room(report) {
                    Ok(()) => self.set(client, group, &change),
                    Err(why) => Err(why),
                };
                if let Err(why) = answer {
                    client.answer(&Answer::Refused(why));
                }
            }
        }
    }

    fn set(&mut self, client: &mut Client, group: &str, change: &Change) -> Result<(), String> {
        self.allow(client, group, false)?;
        self.group(group).set(change);
        let (all, from) = (self.group(group).change, self.group(group).config.settings);
        self.state.set_change(group, all, from);
        self.state.write(&self.place.state_file()).map_err(|e| format!("{e:#}"))?;
        note!("group {group}: user {} has changed its settings", client.uid());
        client.answer(&Answer::Done);
        Ok(())
    }
}

/// Every page that shares a slot will need a frame of its own before any slot is free. A part of the memory is left for
/// everybody else.
fn check_room(report: &GroupReport) -> Result<(), String> {
    let available = host::available_bytes().map_err(|e| e.to_string())?;
    room_for(pages_to_bytes(report.sharing_pages), available, host::ram_bytes())
}

fn room_for(needed: u64, available: u64, ram: u64) -> Result<(), String> {
    let reserve = (ram / 20).min(1 << 30);
    if needed == 0 || needed.saturating_add(reserve) <= available {
        return Ok(());
    }
    let [needed, reserve, available] = [needed, reserve, available].map(report::bytes);
    Err(format!(
        "unfolding needs {needed}, and {reserve} are kept in reserve, but {available} are available: free memory, or end \
         members, and try again (fold off leaves everything as it is)"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unfolding_needs_room_and_says_how_much() {
        const G: u64 = 1 << 30;
        assert_eq!(room_for(0, 0, 8 * G), Ok(()));
        assert_eq!(room_for(G, 2 * G, 8 * G), Ok(()));
        let why = room_for(2 * G, 2 * G, 10 * G).unwrap_err();
        assert!(why.contains("needs 2.00 GiB, and 512 MiB are kept in reserve, but 2.00 GiB are available"), "{why}");
    }
}
