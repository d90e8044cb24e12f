//! Members that end, do not read, or send more while they get their children back. Userfaultfds of this process's own
//! memory stand for those of children.

use super::*;
use page::{HostVirt, PageRange};
use wire::prove::{decode_kept, encode_keep};

/// A nursery of this process's, its end of the connection, and the member's.
fn nursery() -> (Nursery, Seqpacket, Seqpacket) {
    let (ours, theirs) = Seqpacket::pair().unwrap();
    let peer = ours.peer().unwrap();
    (Nursery::new(None, None, peer), ours, theirs)
}

fn child() -> Userfault {
    Userfault::open(Purpose::Note).unwrap()
}

/// Hands a child over. False if the keeper has not read so many earlier frames that this one cannot be sent.
fn hand(theirs: &Seqpacket, number: u32, child: &Userfault) -> bool {
    theirs.send(&encode_keep(number), &[child.as_fd()]).unwrap()
}

/// All answers that have come.
fn answers(theirs: &Seqpacket) -> Vec<(u32, Answer)> {
    let (mut all, mut frame) = (Vec::new(), [0; 8]);
    while let Ok(Received::Frame(bytes)) = theirs.receive_bare(&mut frame) {
        all.push(decode_kept(&frame[..bytes]).unwrap());
    }
    all
}

/// Regression: when an answer could not be sent, the member's children were no longer followed. They read the pool's
/// bytes where they had discarded pages.
#[test]
fn children_of_member_that_ends_before_it_is_answered_stay_followed() {
    let (mut nursery, ours, theirs) = nursery();
    for number in 0..3 {
        assert!(hand(&theirs, number, &child()));
    }
    drop(theirs);
    // The first frame is received before the nursery exists, as in `connection.rs`.
    let (mut frame, mut files) = ([0; KEEP_BYTES + 1], Vec::new());
    assert_eq!(ours.receive(&mut frame, &mut files).unwrap(), Received::Frame(KEEP_BYTES));
    nursery.take(&ours, &frame[..KEEP_BYTES], files.pop()).unwrap();
    assert!(!nursery.hear(&ours), "it has ended");
    assert_eq!((nursery.children.len(), nursery.gives_back), (3, false));
}

/// Regression: a member that did not read answers got all its children back. Events of children that it had handed over
/// meanwhile were read by nobody, as long as another child was not at rest.
#[test]
fn member_that_does_not_read_answers_is_heard_again_when_it_does() {
    let (mut nursery, ours, theirs) = nursery();
    let (one, mut sent) = (child(), 0);
    while nursery.unsent.is_none() {
        assert!(hand(&theirs, sent, &one) && nursery.hear(&ours));
        sent += 1;
    }
    let (followed, unread) = (nursery.children.len(), sent);
    for number in unread..unread + 20 {
        assert!(hand(&theirs, number, &one));
        sent += 1;
    }
    assert!(nursery.hear(&ours) && nursery.children.len() == followed && !nursery.gives_back);
    let mut answered = answers(&theirs);
    while answered.len() < sent as usize {
        assert!(nursery.hear(&ours));
        let more = answers(&theirs);
        assert!(!more.is_empty(), "{} of {sent}", answered.len());
        answered.extend(more);
    }
    assert!(answered.iter().map(|(number, _)| *number).eq(0..sent), "{answered:?}");
    assert_eq!(nursery.children.len(), sent as usize);
}

/// Regression: nobody read the frames of such a member, or noticed that it had ended.
#[test]
fn member_that_gets_its_children_back_is_heard_until_all_are_at_rest() {
    for ends in [false, true] {
        let (mut nursery, ours, theirs) = nursery();
        assert!(hand(&theirs, 0, &child()) && nursery.hear(&ours));
        assert_eq!(answers(&theirs), [(0, Answer::Yes)]);
        let pages = PageRange { start: HostVirt(1 << 20), pages: 1 };
        nursery.children[0].try_hold().unwrap().note_discard(pages);
        assert!(theirs.send(b"rubbish", &[]).unwrap() && nursery.hear(&ours) && nursery.gives_back);
        assert!(hand(&theirs, 1, &child()) && nursery.hear(&ours));
        assert_eq!((answers(&theirs), nursery.children.len()), (vec![(1, Answer::No)], 1));
        if ends {
            drop(theirs);
        }
        nursery.children[0].try_hold().unwrap().forget(pages);
        assert!(!nursery.hear(&ours));
        assert_eq!(nursery.children.len(), usize::from(ends), "the member follows it, unless it has ended");
    }
}

/// Regression: the keeper was killed before it had noted some children in the journal. The member relied on their being
/// followed, and nobody read their events.
#[test]
fn successor_gives_back_what_its_predecessor_may_not_have_noted() {
    let (ours, theirs) = Seqpacket::pair().unwrap();
    let about = About { socket: Some(7), layout: (0, 0), is_born: false };
    let inherited = |is_born| {
        let follower = Follower::of_child(child(), PageSet::new());
        Inherited { follower, about: About { is_born, ..about } }
    };
    succeed(Inheritance { children: [false, true].map(inherited).into(), sockets: vec![(7, ours.into())] });
    let until = Instant::now() + Duration::from_secs(60);
    while theirs.receive_bare(&mut [0; 8]).unwrap() != Received::Closed {
        assert!(Instant::now() < until, "the member does not hear that it is to follow them");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(all().len(), 1, "the member has left one to its keeper");
}
