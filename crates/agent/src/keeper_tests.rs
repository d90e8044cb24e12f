use super::*;
use act::Purpose;
use host::{Files, SeqpacketListener};
use page::PageSet;
use wire::prove::{decode_keep, encode_kept};

/// More children than the kernel keeps for a keeper that does not read.
const MOST: usize = 600;

/// A follower of this process's own memory, in the place of a child.
fn child() -> Follower {
    Follower::of_child(Userfault::open(Purpose::Note).unwrap(), PageSet::new())
}

/// A keeper that listens, and a directory with its socket.
fn listening() -> (SeqpacketListener, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    (SeqpacketListener::bind(&dir.path().join("keeper"), Files::Refused).unwrap(), dir)
}

/// Children that the keeper has been handed. It answers for each.
fn handed(connection: &Seqpacket, answer: Kept) -> usize {
    let (mut frame, mut files) = ([0; 8], Vec::new());
    let mut count = 0;
    while let Received::Frame(bytes) = connection.receive(&mut frame, &mut files).unwrap() {
        if let Some(number) = decode_keep(&frame[..bytes]) {
            assert_eq!(files.len(), 1);
            count += 1;
            assert!(connection.send(&encode_kept(number, answer), &[]).unwrap());
        } else {
            assert_eq!((&frame[..bytes], files.len()), (&ALONE[..], 0));
            assert!(connection.send(&ALONE_TOO, &[]).unwrap());
        }
    }
    count
}

/// Whether the kernel refuses files for a connection without a place: from Linux 6.16 on.
fn are_refused(listener: &SeqpacketListener) -> bool {
    let socket = Seqpacket::connect(listener.path()).unwrap();
    let sent = socket.send(&encode_keep(0), &[child().watch().as_fd()]);
    assert!(listener.accept().unwrap().is_some());
    sent.is_err()
}

/// A keeper with a connection, which has been handed nothing, and that connection.
fn connected(listener: &SeqpacketListener) -> (Keeper, Seqpacket) {
    let mut keeper = Keeper::new(listener.path().to_owned());
    let _ = keeper.take(child());
    let connection = listener.accept().unwrap().expect("a connection").take_files();
    keeper.asked.clear();
    handed(&connection, Kept::Yes);
    (keeper, connection)
}

#[test]
fn child_stays_here_until_keeper_has_room_for_it() {
    let (listener, _dir) = listening();
    let mut absent = Keeper::new(PathBuf::from("/nonexistent"));
    assert!(absent.take(child()).is_some() && absent.is_idle(), "there is no keeper");
    absent.refused = Instant::now().checked_sub(REFUSED_FOR * 2);
    assert!(!absent.is_to_give_way(0, true) && absent.is_to_give_way(1, false), "there is none for long");
    let mut keeper = Keeper::new(listener.path().to_owned());
    let are_refused = are_refused(&listener);
    assert_eq!((keeper.take(child()).is_some(), keeper.is_idle()), (are_refused, are_refused), "it has no place");
    let connection = listener.accept().unwrap().expect("a connection").take_files();
    let taken = (0..MOST).take_while(|_| keeper.take(child()).is_none()).count();
    assert!(0 < taken && taken < MOST, "{taken}");
    assert_eq!(keeper.asked.len(), handed(&connection, Kept::Yes), "it has too much to read");
    assert!(keeper.hear().is_empty() && keeper.has_answered() && !keeper.is_to_give_way(0, false));
}

/// Once, the keeper dropped such children without an answer. They hung, and read stale bytes after their parent's end.
#[test]
fn child_that_keeper_has_no_place_for_comes_back_and_no_more_are_to_come() {
    let (listener, _dir) = listening();
    for (answer, comes_back) in [(Kept::No, 1), (Kept::Last, 0)] {
        let (mut keeper, connection) = connected(&listener);
        assert!(keeper.take(child()).is_none() && !keeper.is_to_give_way(0, true));
        assert_eq!(handed(&connection, answer), 1);
        assert_eq!((keeper.hear().len(), keeper.kept.len()), (comes_back, 1 - comes_back));
        assert!(keeper.is_to_give_way(comes_back, false) && !keeper.is_to_give_way(comes_back, true));
        assert_eq!(keeper.take(child()).is_some(), comes_back == 1, "it is asked again a moment later");
    }
}

/// A fork did not return: the keeper took no connection for half a second, and children had taken all descriptors when
/// it did.
#[test]
fn connection_is_made_when_children_have_taken_all_descriptors() {
    if !crate::testing::alone("keeper::tests::connection_is_made_when_children_have_taken_all_descriptors") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("keeper");
    let mut keeper = Keeper::new(path.clone());
    assert!(keeper.take(child()).is_some() && keeper.socket.is_none(), "nobody listens");
    let listener = SeqpacketListener::bind(&path, Files::Refused).unwrap();
    let limit = rustix::process::Rlimit { current: Some(64), ..getrlimit(Resource::Nofile) };
    rustix::process::setrlimit(Resource::Nofile, limit).unwrap();
    let one = child();
    let others: Vec<OwnedFd> = std::iter::from_fn(spare).collect();
    assert!(world::connect(Server::Prover, &path).is_err(), "a descriptor is left");
    keeper.next = Instant::now();
    let _ = keeper.take(one);
    drop(others);
    assert!(keeper.socket.is_some() && listener.accept().unwrap().is_some());
}

/// Forks waited for ever when so many children lived as the limit of open files allowed.
#[test]
fn children_take_no_more_descriptors_than_the_program_may_have() {
    if !crate::testing::alone("keeper::tests::children_take_no_more_descriptors_than_the_program_may_have") {
        return;
    }
    let limit = rustix::process::Rlimit { current: Some(128), ..getrlimit(Resource::Nofile) };
    rustix::process::setrlimit(Resource::Nofile, limit).unwrap();
    let (listener, _dir) = listening();
    let (mut keeper, connection) = connected(&listener);
    let (mut given, mut gave_way) = (0, None);
    for n in 0..MOST {
        assert!(keeper.take(child()).is_none());
        if keeper.is_to_give_way(0, true) {
            gave_way.get_or_insert(n);
        }
        given += handed(&connection, Kept::Yes);
        assert!(keeper.hear().is_empty() && keeper.kept.len() < 128 * 3 / 4);
    }
    assert_eq!((given, gave_way), (MOST, Some(63)));
}

/// Another agent may have claimed the child meanwhile. The fork probes of other tests would hold the connection, too.
#[test]
fn children_come_back_when_keeper_is_gone() {
    if !crate::testing::alone("keeper::tests::children_come_back_when_keeper_is_gone") {
        return;
    }
    let (listener, _dir) = listening();
    let (mut keeper, connection) = connected(&listener);
    let (mut one, mut other) = (child(), child());
    assert!(!one.is_claimed() && !other.is_claimed());
    let claim = one.watch().claim().unwrap();
    assert!(keeper.take(one).is_none());
    assert_eq!((handed(&connection, Kept::Yes), keeper.hear().len()), (1, 0));
    // The keeper ends before it has answered for this child.
    assert!(keeper.take(other).is_none());
    keeper.next_look = Instant::now();
    assert!(keeper.look().is_empty() && !keeper.is_idle());
    drop(connection);
    let mut back = keeper.hear();
    assert!(keeper.is_idle());
    assert_eq!(back.iter_mut().map(Follower::is_claimed).collect::<Vec<_>>(), [true, false]);
    drop(claim);
    keeper.next = Instant::now();
    let _ = keeper.take(child());
    assert!(listener.accept().unwrap().is_some(), "it goes to the next keeper");
}

/// Once, the next connection took the children of the closed one for its own. No process read the kernel's messages
/// about them, so their discards never returned.
#[test]
fn children_of_a_closed_connection_are_followed_here_when_there_is_another_already() {
    if !crate::testing::alone(
        "keeper::tests::children_of_a_closed_connection_are_followed_here_when_there_is_another_already",
    ) {
        return;
    }
    let (listener, _dir) = listening();
    let (mut keeper, connection) = connected(&listener);
    assert!(keeper.take(child()).is_none());
    assert_eq!((handed(&connection, Kept::Yes), keeper.hear().len(), keeper.kept.len()), (1, 0, 1));
    assert!(keeper.take(child()).is_none(), "it ends before it has answered for this one");
    drop(connection);
    // As the follower's thread does when another child is born at once.
    let mut back = keeper.hear();
    back.append(&mut keeper.look());
    let _ = keeper.take(child());
    assert!(listener.accept().unwrap().is_some(), "it connects anew");
    back.append(&mut keeper.hear());
    keeper.next_look = Instant::now();
    back.append(&mut keeper.look());
    assert_eq!(back.len(), 2);
}

/// Otherwise both would read the children's messages: a keeper that is told nothing goes on reading.
#[test]
fn connection_on_which_nothing_can_be_sent_is_left_to_the_keeper_to_close() {
    let (listener, _dir) = listening();
    let (mut keeper, connection) = connected(&listener);
    assert!(keeper.take(child()).is_none());
    assert_eq!((handed(&connection, Kept::Yes), keeper.hear().len()), (1, 0));
    let socket = keeper.socket.as_ref().map(AsFd::as_fd).expect("a connection");
    rustix::net::shutdown(socket, rustix::net::Shutdown::Write).unwrap();
    assert!(keeper.take(child()).is_some());
    assert!(keeper.look().is_empty() && keeper.socket.is_some() && keeper.kept.len() == 1);
}

#[test]
fn forks_are_followed_only_if_keeper_says_so() {
    let (listener, _dir) = listening();
    for answer in [&FOLLOWS_FORKS[..], b"no", b""] {
        std::thread::scope(|scope| {
            let asker = scope.spawn(|| begin_followed(listener.path(), &Userfault::open_idle().unwrap()));
            let connection = std::iter::repeat_with(|| listener.accept().unwrap()).flatten().next().expect("endless");
            let (connection, mut frame, mut files) = (connection.take_files(), [0; 8], Vec::new());
            let read = std::iter::repeat_with(|| connection.receive(&mut frame, &mut files).unwrap());
            let first = read.into_iter().find(|got| !matches!(got, Received::Nothing));
            assert!(matches!(first, Some(Received::Frame(bytes)) if bytes == FOLLOW_FORKS.len()));
            assert_eq!(files.len(), 1);
            if !answer.is_empty() {
                assert!(connection.send(answer, &[]).unwrap());
            }
            drop(connection);
            assert_eq!(asker.join().unwrap().is_ok(), answer == FOLLOWS_FORKS, "{answer:?}");
        });
    }
}
