//! The listening sockets of a service. For each purpose there is one for everybody, and for some users one to which
//! this user alone may connect (`host::own_socket`).
//!
//! ```text
//!   agents, the command line ... --> own socket of their user --+-- few connections at a time, then the next socket's turn
//!   strangers, first connections --> everybody's ---------------+       (none is waited for while its pace, or its places, are used up)
//! ```
//!
//! Root, the users of groups, and users with members have sockets of their own. They do not queue behind other users,
//! for whom the supervisor spends a bounded part of its time.

use anyhow::Context;
use api::place::{Place, own_uid};
use cli::note;
use host::{Files, Pace, Seqpacket, SeqpacketListener, USERS, own_socket};
use rustix::event::{PollFd, PollFlags};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Most connections that are accepted at one socket in 50 ms: 4 at a socket for everybody, 128 at a user's own socket.
const PACE: (usize, usize) = (4, 128);
/// Pause after a failure to accept a connection: 200 ms.
const PAUSE: Duration = Duration::from_millis(200);
/// Most users with members who have sockets of their own, beside root and the users of groups.
const MOST_USERS: usize = 128;

/// What processes connect to a socket for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum To {
    /// The agents of members connect, and are passed on to the worker of their group.
    Agents,
    /// The command line and other clients ask the supervisor.
    Control,
    /// Connections, files and questions about templates are handed on to the supervisor (`api::hand`).
    Hand,
    /// Members connect to the prover. At the socket for everybody, the prover itself listens, and not the supervisor.
    Prover,
}

/// A socket, by its purpose and the user who alone may connect. `None`: everybody may.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entrance {
    /// The user.
    pub user: Option<u32>,
    /// The purpose.
    pub to: To,
}

/// A listening socket, and how many connections were accepted there of late.
#[derive(Debug)]
struct Open {
    listener: SeqpacketListener,
    pace: Pace,
}

/// The listening sockets of a service.
#[derive(Debug)]
pub struct Entrances {
    place: Place,
    open: BTreeMap<Entrance, Open>,
    /// Users whose own sockets could not be made. That is not tried again as long as they should have any.
    without: BTreeSet<u32>,
    /// Time before which no connection is accepted at any socket, after a failure; `None`: there was none.
    accept_after: Option<Instant>,
}

impl Entrance {
    const fn everybodys(to: To) -> Self {
        Self { user: None, to }
    }

    const fn files(self) -> Files {
        match self.to {
            To::Hand => Files::Taken,
            To::Agents | To::Control | To::Prover => Files::Refused,
        }
    }

    /// The user who alone may connect there. For all sockets of a service that is not root's, it is the service's own
    /// user.
    pub fn whose(self) -> Option<u32> {
        self.user.or_else(|| Some(own_uid()).filter(|own| *own != 0))
    }

    fn pace(self) -> usize {
        if self.whose().is_none() { PACE.0 } else { PACE.1 }
    }

    fn path(self, place: &Place) -> PathBuf {
        let everybodys = match self.to {
            To::Agents => place.agent_socket(),
            To::Control => place.control_socket(),
            To::Hand => place.hand_socket(),
            To::Prover => place.prove_socket(),
        };
        self.user.map_or_else(|| everybodys.clone(), |user| own_socket(&everybodys, user))
    }
}

impl Entrances {
    /// Listens at the sockets for everybody. The users' own sockets that an earlier supervisor has left are removed.
    ///
    /// # Errors
    /// Sockets cannot be made at the place.
    pub fn new(place: Place) -> anyhow::Result<Self> {
        match fs::remove_dir_all(place.dir().join(USERS)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => note!("sockets of an earlier service stay: {e}"),
            _ => {}
        }
        let mut entrances = Self { place, open: BTreeMap::new(), without: BTreeSet::new(), accept_after: None };
        // Any user may connect to root's service; the peer's credentials decide what it may do.
        let mode = if own_uid() == 0 { 0o666 } else { 0o600 };
        for to in [To::Agents, To::Control, To::Hand] {
            entrances.listen(Entrance::everybodys(to), mode, None)?;
        }
        Ok(entrances)
    }

    fn listen(&mut self, entrance: Entrance, mode: u32, owner: Option<u32>) -> anyhow::Result<()> {
        let path = entrance.path(&self.place);
        let listener = SeqpacketListener::bind(&path, entrance.files())?;
        let set = || format!("cannot set the rights of {}", path.display());
        fs::set_permissions(&path, Permissions::from_mode(mode)).with_context(set)?;
        chown(&path, owner, None).with_context(set)?;
        self.open.insert(entrance, Open { listener, pace: Pace::new(entrance.pace(), Instant::now()) });
        Ok(())
    }

    /// Makes sockets for each of `users` and each of `members` (users with members), and removes all others. If
    /// `prover` is given, all these users and the users in `prover` get a socket to the prover, too. Only root's
    /// service has sockets for single users.
    pub fn set(&mut self, users: BTreeSet<u32>, members: &BTreeSet<u32>, prover: Option<&BTreeSet<u32>>) {
        if own_uid() != 0 {
            return;
        }
        let mut all = users;
        let more = host::users_in_turn(members.difference(&all).copied(), MOST_USERS);
        all.extend(more);
        let own = |to| move |user: &u32| Entrance { user: Some(*user), to };
        let mut wanted = BTreeSet::new();
        for to in [To::Agents, To::Control, To::Hand] {
            wanted.extend(all.iter().map(own(to)));
        }
        if let Some(others) = prover {
            wanted.extend(all.union(others).map(own(To::Prover)));
        }
        let gone = |entrance: &Entrance| entrance.user.is_some() && !wanted.contains(entrance);
        for entrance in self.open.keys().copied().filter(gone).collect::<Vec<_>>() {
            self.close(entrance);
        }
        self.without.retain(|user| wanted.iter().any(|entrance| entrance.user == Some(*user)));
        for entrance in wanted {
            let Some(user) =
                entrance.user.filter(|user| !self.open.contains_key(&entrance) && !self.without.contains(user))
            else {
                continue;
            };
            let made = make_dir(&entrance.path(&self.place)).and_then(|()| self.listen(entrance, 0o600, Some(user)));
            if let Err(e) = made {
                note!("user {user} has no sockets of its own, and waits with all others: {e:#}");
                self.without.insert(user);
            }
        }
    }

    fn close(&mut self, entrance: Entrance) {
        if let Some(open) = self.open.remove(&entrance) {
            let _ = fs::remove_file(open.listener.path());
            // The user's directory goes with the last socket in it.
            let _ = open.listener.path().parent().map(fs::remove_dir).filter(|_| entrance.user.is_some());
        }
    }

    /// The sockets to be polled for connections: those at which one may be accepted now, if `has_room` says that there
    /// is a place for it.
    pub fn sockets(&self, now: Instant, has_room: impl Fn(Entrance) -> bool) -> impl Iterator<Item = PollFd<'_>> {
        let is_awaited = move |entrance: Entrance, open: &Open| open.pace.due(now).is_none() && has_room(entrance);
        let waits = self.accept_after.is_some_and(|after| after > now);
        let awaited = self.open.iter().filter(move |(entrance, open)| !waits && is_awaited(**entrance, open));
        awaited.map(|(_, open)| PollFd::new(&open.listener, PollFlags::IN))
    }

    /// The next time at which a connection may be accepted that may not be accepted now; `None`: nothing is held back.
    pub fn due(&self, now: Instant) -> Option<Instant> {
        self.open
            .values()
            .filter_map(|open| open.pace.due(now))
            .chain(self.accept_after.filter(|after| *after > now))
            .min()
    }

    /// All entrances.
    pub fn all(&self) -> Vec<Entrance> {
        self.open.keys().copied().collect()
    }

    /// Accepts a connection at an entrance, if one waits and the entrance has not accepted as many as it may
    /// ([`PACE`]). After a failure, nothing is accepted for [`PAUSE`].
    pub fn accept(&mut self, entrance: Entrance, now: Instant) -> Option<Seqpacket> {
        if self.accept_after.is_some_and(|after| after > now) {
            return None;
        }
        self.accept_after = None;
        let open = self.open.get_mut(&entrance).filter(|open| open.pace.due(now).is_none())?;
        let accepted = open.listener.accept();
        if matches!(accepted, Ok(Some(_))) {
            open.pace.count(now);
        }
        accepted.unwrap_or_else(|e| {
            note!("{e}");
            self.accept_after = Some(now + PAUSE);
            None
        })
    }

    /// Removes all sockets.
    pub fn end(mut self) {
        self.all().into_iter().for_each(|entrance| self.close(entrance));
        let _ = fs::remove_dir(self.place.dir().join(USERS));
    }
}

/// Makes the directory for a user's sockets, and its parent. The service alone may write in them.
fn make_dir(socket: &Path) -> anyhow::Result<()> {
    let dir = socket.parent().context("it has no directory")?;
    let make = || {
        DirBuilder::new().mode(0o755).recursive(true).create(dir)?;
        // The process's umask may have taken rights away.
        dir.ancestors().take(2).try_for_each(|dir| fs::set_permissions(dir, Permissions::from_mode(0o755)))
    };
    make().with_context(|| format!("cannot make {}", dir.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    fn entrances() -> (tempfile::TempDir, Entrances) {
        let dir = tempfile::tempdir().unwrap();
        let entrances = Entrances::new(Place::at(dir.path())).unwrap();
        (dir, entrances)
    }

    #[test]
    fn crowd_at_everybodys_socket_is_accepted_slowly_and_keeps_no_user_waiting() {
        let (_dir, mut entrances) = entrances();
        let [everybodys, own] = [None, Some(0)].map(|user| Entrance { user, to: To::Control });
        let path = everybodys.path(&entrances.place);
        let crowd: Vec<_> =
            std::iter::repeat_with(|| Seqpacket::connect(&path)).take(5000).map_while(Result::ok).collect();
        assert!((PACE.1..5000).contains(&crowd.len()), "{} wait", crowd.len());
        let now = Instant::now();
        assert_eq!(std::iter::from_fn(|| entrances.accept(everybodys, now)).count(), everybodys.pace());
        let later = entrances.due(now).expect("a pause");
        assert!(entrances.accept(everybodys, later).is_some(), "the next ones have their turn later");
        if own_uid() == 0 {
            entrances.set(BTreeSet::from([0]), &BTreeSet::from([7]), Some(&BTreeSet::from([8])));
            let _connection = Seqpacket::connect_to_service(&path).unwrap();
            assert!(entrances.accept(own, now).is_some());
        }
    }

    #[test]
    fn users_have_sockets_of_their_own_as_long_as_they_have_a_claim() {
        let (_dir, mut entrances) = entrances();
        if own_uid() != 0 {
            return;
        }
        entrances.set(BTreeSet::from([0]), &BTreeSet::from([7]), Some(&BTreeSet::from([8])));
        let path = |user, to| Entrance { user: Some(user), to }.path(&entrances.place);
        let (sevens, eights) = (path(7, To::Agents), path(8, To::Prover));
        let rights = |path: &Path| fs::metadata(path).map(|meta| (meta.uid(), meta.mode() & 0o777)).ok();
        assert_eq!([&sevens, &eights].map(|path| rights(path)), [Some((7, 0o600)), Some((8, 0o600))]);
        assert_eq!(rights(&path(8, To::Control)), None);
        assert_eq!(rights(sevens.parent().unwrap()), Some((0, 0o755)));
        entrances.set(BTreeSet::from([0]), &BTreeSet::new(), Some(&BTreeSet::from([8])));
        assert_eq!([&sevens, &eights].map(|path| path.parent().unwrap().exists()), [false, true]);
        assert_eq!(entrances.open.keys().filter(|entrance| entrance.user.is_none()).count(), 3);
    }
}
