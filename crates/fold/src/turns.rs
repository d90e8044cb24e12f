//! Whose frames are read next: a member that speaks all the time takes its own time, and not that of others.
//!
//! ```text
//!   clock of a member   processor time that its frames have taken, and no less than the least of those that speak
//!   a turn              members that speak whose clock is at most a slice above the least; each is heard for a slice
//! ```
//!
//! So a member that says little is heard at once: at the end of the turn that is under way. Silence saves up no time for later.

use crate::group::Group;
use crate::table::MemberId;
use std::time::Duration;

/// Processor time for which a member is heard before others have their turn: 250 us. The frame that is being heard is heard to its end.
pub const SLICE: Duration = Duration::from_micros(250);

impl Group {
    /// Those of the members that speak who are heard in this turn, the one that has taken least time first.
    pub fn whose_turn(&mut self, mut speaking: Vec<MemberId>) -> Vec<MemberId> {
        speaking.sort_by_key(|id| self.clock(*id));
        if let Some(first) = speaking.first() {
            self.least_heard = self.clock(*first);
        }
        let end = self.least_heard.saturating_add(SLICE);
        speaking.retain(|id| self.clock(*id) <= end);
        speaking
    }

    fn clock(&self, id: MemberId) -> Duration {
        self.members.get(&id).map_or(Duration::ZERO, |member| member.heard.max(self.least_heard))
    }

    /// Notes the processor time that a member's frames have taken.
    pub fn took(&mut self, id: MemberId, time: Duration) {
        let clock = self.clock(id);
        if let Some(member) = self.members.get_mut(&id) {
            member.heard = clock.saturating_add(time);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::member::Member;
    use api::control::Identity;
    use host::Seqpacket;
    use std::path::PathBuf;
    use std::time::Instant;

    const MS: Duration = Duration::from_millis(1);

    fn group(members: u32) -> (Group, Vec<MemberId>) {
        let now = Instant::now();
        let mut group = Group::new("acme", PathBuf::new(), now);
        let join = |pid: u32| {
            let id = group.planner.join();
            let identity = Identity { name: pid.to_string(), pid, started: 1 };
            let member = Member::new(id, identity, 0, Seqpacket::pair().unwrap().0, now).unwrap();
            group.members.insert(id, member);
            id
        };
        let ids = (0..members).map(join).collect();
        (group, ids)
    }

    /// Three that speak all the time took all turns but one in four, with frames that take long.
    #[test]
    fn member_that_says_little_is_heard_in_the_next_turn() {
        let (mut group, all) = group(4);
        let (liars, honest) = (all[..3].to_vec(), all[3]);
        for _ in 0..100 {
            for id in group.whose_turn(liars.clone()) {
                group.took(id, 3 * MS);
            }
        }
        for _ in 0..10 {
            assert_eq!(group.whose_turn(all.clone())[0], honest, "it comes first");
            group.took(honest, MS / 10);
        }
        group.took(honest, 3 * MS);
        assert!(!group.whose_turn(all.clone()).contains(&honest), "it has said as much as others");
    }

    #[test]
    fn members_that_speak_all_the_time_have_equal_times_and_silence_saves_up_none() {
        let (mut group, all) = group(3);
        let (mut taken, costs) = ([Duration::ZERO; 3], [MS, 4 * MS, MS / 5]);
        for turn in 0..20_000 {
            // The last one is silent at first.
            let speaking = if turn < 1000 { &all[..2] } else { &all[..] };
            for id in group.whose_turn(speaking.to_vec()) {
                let n = all.iter().position(|one| *one == id).unwrap();
                group.took(id, costs[n]);
                taken[n] += if turn < 1000 { Duration::ZERO } else { costs[n] };
            }
        }
        let (most, least) = (taken.iter().max().unwrap(), taken.iter().min().unwrap());
        assert!(*most - *least < 6 * MS, "{taken:?}");
    }
}
