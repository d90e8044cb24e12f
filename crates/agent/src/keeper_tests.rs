use super::*;
use act::Purpose;
use host::{Files, SeqpacketListener};
use page::PageSet;

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

/// Children that the keeper has been handed.
fn handed(connection: &Seqpacket) -> usize {
    let (mut frame, mut files) = ([0; 8], Vec::new());
    let mut count = 0;
    while let Received::Frame(bytes) = connection.receive(&mut frame, &mut files).unwrap() {
        assert_eq!((&frame[..bytes], files.len()), (&KEEP[..], 1));
        files.clear();
        count += 1;
    }
    count
}

/// Whether the kernel refuses files for a connection without a place: from Linux 6.16 on.
fn are_refused(listener: &SeqpacketListener) -> bool {
    let socket = Seqpacket::connect(listener.path()).unwrap();
    let sent = socket.send(&KEEP, &[child().watch().as_fd()]);
    assert!(listener.accept().unwrap().is_some());
    sent.is_err()
}

#[test]
fn child_stays_here_until_keeper_has_room_for_it() {
    let (listener, _dir) = listening();
    let mut absent = Keeper::new(PathBuf::from("/nonexistent"));
    assert!(absent.take(child()).is_some() && absent.is_idle(), "there is no keeper");
    let mut keeper = Keeper::new(listener.path().to_owned());
    let are_refused = are_refused(&listener);
    assert_eq!((keeper.take(child()).is_some(), keeper.is_idle()), (are_refused, are_refused), "it has no place");
    let connection = listener.accept().unwrap().expect("a connection").take_files();
    let taken = (0..MOST).take_while(|_| keeper.take(child()).is_none()).count();
    assert!(0 < taken && taken < MOST, "{taken}");
    assert_eq!(keeper.kept.len(), handed(&connection), "it has too much to read");
}

/// Another agent may have claimed the child meanwhile. The fork probes of other tests would hold the connection, too.
#[test]
fn children_come_back_when_keeper_is_gone() {
    if !crate::testing::alone("keeper::tests::children_come_back_when_keeper_is_gone") {
        return;
    }
    let (listener, _dir) = listening();
    let mut keeper = Keeper::new(listener.path().to_owned());
    let (mut one, mut other) = (child(), child());
    assert!(!one.is_claimed() && !other.is_claimed());
    let _ = keeper.take(child());
    let connection = listener.accept().unwrap().expect("a connection").take_files();
    let claim = one.watch().claim().unwrap();
    keeper.kept.clear();
    assert!(keeper.take(one).is_none() && keeper.take(other).is_none());
    keeper.next_look = Instant::now();
    assert!(keeper.look().is_empty() && !keeper.is_idle());
    drop(connection);
    assert!(keeper.look().is_empty(), "it is too early");
    keeper.next_look = Instant::now();
    let mut back = keeper.look();
    assert!(keeper.is_idle());
    assert_eq!(back.iter_mut().map(Follower::is_claimed).collect::<Vec<_>>(), [true, false]);
    drop(claim);
    keeper.next = Instant::now();
    let _ = keeper.take(child());
    assert!(listener.accept().unwrap().is_some(), "it goes to the next keeper");
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
