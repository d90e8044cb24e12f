use super::*;
use act::HeldLease;
use proptest::prelude::*;
use rustix::fd::{AsFd, OwnedFd};

/// A step of the modelled member.
#[derive(Clone, Debug)]
enum Step {
    /// It maps another slot.
    Map,
    /// It releases its oldest slot.
    Release,
    /// It forks: the child inherits lease and slots.
    Fork,
    /// A child ends.
    ChildEnds(usize),
    /// It takes the lease that is offered.
    Take,
    /// This many seconds go by.
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

/// A member with its children and leases.
struct Model {
    leases: Leases,
    now: Instant,
    mapped: VecDeque<PoolSlot>,
    children: Vec<Child>,
    /// The mapped lease, and its file, with which children are made.
    held: Option<(HeldLease, OwnedFd)>,
    /// Number of the next slot to be mapped: so many were.
    next: u32,
    released: usize,
    freed: usize,
}

impl Model {
    fn new() -> Self {
        Self {
            leases: Leases::new().unwrap(),
            now: Instant::now(),
            mapped: VecDeque::new(),
            children: Vec::new(),
            held: None,
            next: 0,
            released: 0,
            freed: 0,
        }
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Map if self.held.is_some() => {
                self.mapped.push_back(PoolSlot::from_bits(self.next));
                self.next += 1;
            }
            Step::Release => {
                if let Some(slot) = self.mapped.pop_front() {
                    self.leases.released(slot, self.now);
                    self.released += 1;
                }
            }
            Step::Fork => {
                let lease = self.held.as_ref().map(|(_, file)| HeldLease::hold(file).unwrap());
                self.children.push(Child { slots: self.mapped.iter().copied().collect(), _lease: lease });
            }
            Step::ChildEnds(at) if *at < self.children.len() => drop(self.children.remove(*at)),
            Step::Take => self.take_lease(),
            Step::Wait(seconds) => self.now += Duration::from_secs(*seconds),
            _ => {}
        }
    }

    fn take_lease(&mut self) {
        let Some((epoch, lease)) = self.leases.offered() else { return };
        let file = lease.as_fd().try_clone_to_owned().unwrap();
        self.held = Some((HeldLease::hold(&file).unwrap(), file));
        self.leases.take(epoch).unwrap();
        assert_eq!(self.leases.take(epoch), Err(NotOffered(epoch)));
    }

    /// Begins and ends epochs; nobody may map a slot that is freed.
    fn free_slots(&mut self) {
        self.leases.rotate(self.now).unwrap();
        for slot in self.leases.ended().unwrap() {
            assert!(!self.mapped.contains(&slot), "{slot} is mapped");
            assert!(!self.children.iter().any(|child| child.slots.contains(&slot)), "a child maps {slot}");
            self.freed += 1;
        }
        assert_eq!(self.freed + self.leases.deferred(), self.released);
    }

    /// The connection ends, and its process goes on with the slots that it maps until all leases are over.
    fn depart(self) {
        let Self { leases, mapped, children, held, next, freed, .. } = self;
        let identity = api::control::Identity { name: String::new(), pid: 1, started: 1 };
        let mut departed = DepartedMember::new(identity, 0, leases, mapped.iter().copied().collect());
        let mut slots = Vec::new();
        let over = departed.is_over(&mut slots).unwrap();
        let needed = held.is_some() || children.iter().any(|child| child._lease.is_some());
        assert!(!(over && needed), "somebody holds a lease");
        assert!(mapped.iter().all(|slot| departed.holds(*slot)));
        drop((held, children));
        assert!(departed.is_over(&mut slots).unwrap());
        assert_eq!(freed + slots.len() + departed.into_slots().len(), next as usize);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    /// No slot is freed while the member or a child of it maps it, and every slot is free in the end.
    #[test]
    fn mapped_slot_is_never_freed(steps in prop::collection::vec(step(), 1..80)) {
        let mut model = Model::new();
        for step in steps.iter().chain([&Step::Take, &Step::Wait(9), &Step::Take]) {
            model.step(step);
            model.free_slots();
        }
        model.depart();
    }
}

#[test]
fn long_lived_child_does_not_pile_up_epochs() {
    let mut leases = Leases::new().unwrap();
    let file = leases.offered().unwrap().1.as_fd().try_clone_to_owned().unwrap();
    let _child = HeldLease::hold(&file).unwrap();
    leases.take(1).unwrap();
    let mut now = Instant::now();
    for n in 0..100 {
        leases.released(PoolSlot::from_bits(n), now);
        now += Duration::from_secs(3);
        if leases.rotate(now).unwrap() {
            let epoch = leases.offered().unwrap().0;
            leases.take(epoch).unwrap();
        }
        assert_eq!(leases.ended().unwrap(), []);
    }
    assert_eq!((leases.epochs.len(), leases.deferred()), (MOST_EPOCHS, 100));
}

#[test]
fn spoilt_lease_holds_no_slots() {
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
