use super::*;
use host::HeldLease;
use proptest::prelude::*;
use rustix::fd::{AsFd, OwnedFd};

/// A step of the model's member.
#[derive(Clone, Debug)]
enum Step {
    /// It maps another slot.
    Map,
    /// It lets its oldest slot go.
    Release,
    /// It forks: the child has what it has, lease and slots.
    Fork,
    /// A child ends.
    ChildEnds(usize),
    /// It takes the lease that is offered.
    Take,
    /// So many seconds go by.
    Wait(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => Just(Step::Map),
        3 => Just(Step::Release),
        1 => Just(Step::Fork),
        2 => (0..4_usize).prop_map(Step::ChildEnds),
        2 => Just(Step::Take),
        2 => (1..4_u64).prop_map(Step::Wait),
    ]
}

struct Child {
    slots: Vec<PoolSlot>,
    _lease: Option<HeldLease>,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    /// No slot is free while the member or a child of it maps it; and every slot is free in the end.
    #[test]
    fn no_slot_is_free_that_somebody_maps(steps in prop::collection::vec(step(), 1..80)) {
        let mut leases = Leases::new().unwrap();
        let mut now = Instant::now();
        let (mut mapped, mut children, mut released) = (VecDeque::new(), Vec::<Child>::new(), 0);
        // The lease that is mapped, and a file of it with which children are made.
        let mut held: Option<(HeldLease, OwnedFd)> = None;
        let (mut next, mut freed) = (0, Vec::new());
        for step in steps.iter().chain([&Step::Take, &Step::Wait(9), &Step::Take]) {
            match step {
                Step::Map if held.is_some() => {
                    mapped.push_back(PoolSlot::from_bits(next));
                    next += 1;
                }
                Step::Release => {
                    if let Some(slot) = mapped.pop_front() {
                        leases.released(slot, now);
                        released += 1;
                    }
                }
                Step::Fork => {
                    let lease = held.as_ref().map(|(_, file)| HeldLease::hold(file).unwrap());
                    children.push(Child { slots: mapped.iter().copied().collect(), _lease: lease });
                }
                Step::ChildEnds(at) if *at < children.len() => drop(children.remove(*at)),
                Step::Take => {
                    if let Some((era, lease)) = leases.offered() {
                        let file = lease.as_fd().try_clone_to_owned().unwrap();
                        held = Some((HeldLease::hold(&file).unwrap(), file));
                        leases.take(era).unwrap();
                        prop_assert_eq!(leases.take(era), Err(NotOffered(era)));
                    }
                }
                Step::Wait(seconds) => now += Duration::from_secs(*seconds),
                _ => {}
            }
            leases.rotate(now).unwrap();
            for slot in leases.ended().unwrap() {
                prop_assert!(!mapped.contains(&slot), "{slot} is mapped");
                prop_assert!(!children.iter().any(|child| child.slots.contains(&slot)), "a child maps {slot}");
                freed.push(slot);
            }
            prop_assert_eq!(freed.len() + leases.limbo(), released);
        }
        // The connection ends. Its process goes on with what it maps.
        let identity = crate::control::Identity { name: String::new(), pid: 1, started: 1 };
        let mut ghost = Ghost::new(identity, leases, mapped.iter().copied().collect());
        let mut slots = Vec::new();
        let over = ghost.is_over(&mut slots).unwrap();
        let needed = held.is_some() || children.iter().any(|child| child._lease.is_some());
        prop_assert!(!(over && needed), "somebody holds a lease");
        prop_assert!(mapped.iter().all(|slot| ghost.holds(*slot)));
        drop((held, children));
        prop_assert!(ghost.is_over(&mut slots).unwrap());
        prop_assert_eq!(freed.len() + slots.len() + ghost.into_slots().len(), next as usize);
    }
}

#[test]
fn eras_do_not_pile_up_behind_a_child_that_stays() {
    let mut leases = Leases::new().unwrap();
    let file = leases.offered().unwrap().1.as_fd().try_clone_to_owned().unwrap();
    let _child = HeldLease::hold(&file).unwrap();
    leases.take(1).unwrap();
    let mut now = Instant::now();
    for n in 0..100 {
        leases.released(PoolSlot::from_bits(n), now);
        now += Duration::from_secs(3);
        if leases.rotate(now).unwrap() {
            let era = leases.offered().unwrap().0;
            leases.take(era).unwrap();
        }
        assert_eq!(leases.ended().unwrap(), []);
    }
    assert_eq!((leases.eras.len(), leases.limbo()), (MOST_ERAS, 100));
}

#[test]
fn a_lease_that_was_spoilt_keeps_nothing() {
    let mut leases = Leases::new().unwrap();
    let file = leases.offered().unwrap().1.as_fd().try_clone_to_owned().unwrap();
    let _held = HeldLease::hold(&file).unwrap();
    leases.take(1).unwrap();
    let now = Instant::now();
    leases.released(PoolSlot::from_bits(1), now);
    assert!(leases.rotate(now + Duration::from_secs(3)).unwrap());
    leases.take(2).unwrap();
    assert_eq!(leases.ended().unwrap(), []);
    rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::SEAL).unwrap();
    assert_eq!(leases.ended().unwrap(), [PoolSlot::from_bits(1)]);
}
