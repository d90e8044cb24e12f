//! Tests of forks while pages are out on the stage, and of waking the agent's thread when it rests.

use crate::testing::{Member, alone, content, discard_past_hooks, section};
use act::{MemberMemory, Moved, Watch};
use std::io::{PipeReader, Read};
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::Duration;

/// Forks. The child tells the first word of each of the member's pages, and so does a child of its own.
fn fork_twice(member: &Member, said: &std::io::PipeWriter) {
    let pages = member.0.range().pages;
    let tell = |who: u64| {
        for page in 0..pages {
            let line = [who, page, member.word(page, 0).load(Ordering::Relaxed)];
            // SAFETY: the line is as long as is said.
            unsafe { libc::write(said.as_raw_fd(), line.as_ptr().cast(), size_of_val(&line)) };
        }
    };
    // SAFETY: the child makes system calls and nothing else.
    if unsafe { libc::fork() } != 0 {
        return;
    }
    // SAFETY: as above.
    let is_grandchild = unsafe { libc::fork() } == 0;
    tell(1 + u64::from(is_grandchild));
    // SAFETY: ends the child.
    unsafe { libc::_exit(0) };
}

/// The words that the children have told, once they have ended.
fn lines(mut said: PipeReader) -> Vec<[u64; 3]> {
    let (done, is_done) = mpsc::channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        said.read_to_end(&mut bytes).unwrap();
        done.send(bytes)
    });
    let bytes = is_done.recv_timeout(Duration::from_secs(20)).expect("children sleep on a page");
    let word = |bytes: &[u8]| u64::from_ne_bytes(bytes.try_into().unwrap());
    let mut lines: Vec<_> = bytes.chunks_exact(24).map(|line| [0, 8, 16].map(|at| word(&line[at..at + 8]))).collect();
    lines.sort_unstable();
    lines
}

/// The words that a child and its own child tell.
fn of_both(word: impl Fn(u64) -> u64) -> Vec<[u64; 3]> {
    (1..=2).flat_map(|who| (0..4).map(move |page| [who, page])).map(|[who, page]| [who, page, word(page)]).collect()
}

/// Keeps two pages out on the stage while a child is forked. `before` is called earlier, when all pages are absent.
/// Page 3 is absent all the time.
fn give_birth_during_section(before: impl FnOnce(&Member)) {
    let Some(section) = section() else { return };
    let following = section.following();
    let (member, stage) = (Member::new(4), MemberMemory::stage(2).unwrap());
    let (all, out) = (member.0.range(), member.run(0, 2));
    stage.unlock();
    following.watch().register(stage.range(), Watch::Missing).unwrap();
    member.0.drop_pages(4);
    following.hold().begin_section();
    following.watch().register(all, Watch::MissingAndWrites).unwrap();
    before(&member);
    following.watch().unregister(all).unwrap();
    member.write_content();
    discard_past_hooks(&member, 3);
    following.watch().register(all, Watch::MissingAndWrites).unwrap();
    following.take_out_of_reach();
    // SAFETY: the pages are the test's own, and only the children touch them while they are out.
    let moved = unsafe { following.watch().move_pages(out, stage.range().start) };
    assert_eq!(moved, Moved { pages: 2, stopped_by: None });
    let (said, to) = std::io::pipe().unwrap();
    fork_twice(&member, &to);
    drop(to);
    // Waits until the forking thread waits for its message to be read.
    std::thread::sleep(Duration::from_millis(300));
    following.hold().give_to_born(out, stage.range().start);
    // SAFETY: the pages go back where they were.
    assert_eq!(unsafe { following.watch().move_pages(stage.range(), out.start) }.pages, 2);
    following.end_section(&[]);
    let first_word = |page| content(page).first_chunk().map_or(0, |word| u64::from_ne_bytes(*word));
    assert_eq!(lines(said), of_both(|page| if page == 3 { 0 } else { first_word(page) }));
    following.watch().unregister(all).unwrap();
}

/// A child is forked while pages of its parent are out on the stage, so it lacks them. It forks before it is given
/// copies. Its own child lacks the same pages, and is given copies, too.
#[test]
fn grandchildren_are_given_what_their_parents_lacked() {
    if !alone("follow::tests::grandchildren_are_given_what_their_parents_lacked") {
        return;
    }
    give_birth_during_section(|_| {});
}

/// A page that was absent when a child was forked stays absent for that child, though its parent has written the page
/// since.
#[test]
fn child_of_before_a_section_is_given_nothing() {
    if !alone("follow::tests::child_of_before_a_section_is_given_nothing") {
        return;
    }
    let (said, to) = std::io::pipe().unwrap();
    give_birth_during_section(|member| {
        fork_twice(member, &to);
        drop(to);
    });
    assert_eq!(lines(said), of_both(|_| 0));
}

/// Forks. Returns whether the child has mappings in any of these places.
fn child_has_any_of(places: &[page::PageRange]) -> bool {
    // SAFETY: the child makes system calls and nothing else.
    let child = unsafe { crate::raw::call(libc::SYS_fork, [0; 6]) };
    if child == 0 {
        let mut seen = [0_u8; 8];
        let is_there = |place: &page::PageRange| {
            let arguments = [place.start.0 as usize, 4 * page::PAGE_BYTES, (&raw mut seen) as usize, 0, 0, 0];
            // SAFETY: asks what is mapped; there is room for a byte for each page.
            let answer = unsafe { crate::raw::call(libc::SYS_mincore, arguments) };
            crate::raw::error(answer) != Some(libc::ENOMEM)
        };
        let any = places.iter().any(is_there);
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(any)) };
    }
    let mut status = 0;
    // SAFETY: writes one number.
    assert_eq!(unsafe { libc::waitpid(child as i32, &raw mut status, 0) }, child as i32);
    status != 0
}

#[test]
fn memory_that_children_do_not_inherit_is_never_theirs() {
    if !alone("follow::tests::memory_that_children_do_not_inherit_is_never_theirs") {
        return;
    }
    let Some(mut section) = section() else { return };
    let (pool, is_over) = (crate::testing::pool(), std::sync::atomic::AtomicBool::new(false));
    let members: Vec<Member> = (0..2000).map(|_| Member::new(4)).collect();
    members.iter().for_each(crate::testing::advise);
    let places: Vec<_> = members.iter().map(|member| member.0.range()).collect();
    assert!(!child_has_any_of(&places));
    std::thread::scope(|scope| {
        let forking = scope.spawn(|| {
            (0..).take_while(|_| !is_over.load(Ordering::Relaxed)).filter(|_| child_has_any_of(&places)).count()
        });
        for member in &members {
            assert_eq!(
                crate::testing::fold(&mut section, member.run(0, 4), Some((&pool, 0))),
                [wire::Outcome::Folded; 4]
            );
        }
        is_over.store(true, Ordering::Relaxed);
        assert_eq!(forking.join().unwrap(), 0, "children had some of it");
    });
}

/// Whether the alarm rings within this time. Silences it.
fn rings(following: &super::Following, time: Duration) -> bool {
    let time = rustix::event::Timespec::try_from(time).unwrap();
    let alarm = following.alarm();
    let polled = rustix::event::poll(&mut [super::PollFd::new(&alarm, super::PollFlags::IN)], Some(&time)).unwrap();
    polled > 0 && rustix::io::read(alarm, &mut [0_u8; 8]).is_ok()
}

#[test]
fn discard_wakes_agent_that_rests() {
    let Some(section) = section() else { return };
    let (following, member) = (section.following(), Member::new(4));
    following.watch().register(member.0.range(), Watch::MissingAndWrites).unwrap();
    member.0.drop_pages(1);
    assert!(!rings(following, Duration::from_millis(100)), "nobody rests");
    assert!(!following.rest(true), "a discard waits to be settled");
    following.rest(false);
    following.hold().forget(member.0.range());
    assert!(following.rest(true));
    member.0.drop_pages(2);
    assert!(rings(following, Duration::from_secs(20)));
    member.0.drop_pages(2);
    assert!(!rings(following, Duration::from_millis(100)), "it was woken already");
    following.watch().unregister(member.0.range()).unwrap();
}

/// The alarm's number may be a file of the program's, in its own table of files. Such a file was once written to.
#[test]
fn programs_threads_do_not_ring() {
    let Some(section) = section() else { return };
    let following = section.following();
    assert!(following.rest(true));
    following.wake();
    assert!(!rings(following, Duration::from_millis(100)));
}
