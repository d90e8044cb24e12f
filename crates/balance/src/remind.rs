//! Reminders: sizes that are told again to balloon drivers that have not reached the size that they were told.
//!
//! | driver | the rest of the way | is told |
//! |---|---|---|
//! | `stuck`, `deflated` | harms nobody, or the host runs out of memory | its size, as before |
//! | `stuck` | takes memory that the guest needs | to give only what it does not need, and keep the rest. A Linux driver tries again and again, and leaves its guest no free page meanwhile |
//! | `deflated` | takes memory that the guest needs | nothing: it would take it back again |
//!
//! | `works`, and grows still | is not made up for: the host has become short of memory | the size that it has, or its guarantee |
//!
//! By a reminder, no guest grows beyond its guarantee.

use crate::driver::DriverState;
use crate::facts::{GuestFacts, HostFacts};
use crate::ladder::{Rung, last_resort_bytes};
use crate::plan::Step;

/// The size that is told again to a guest; `None` if it is not reminded.
pub fn reminder(host: &HostFacts, guest: &GuestFacts) -> Option<Step> {
    let (is, kept) = (guest.actual_bytes, guest.guaranteed_bytes);
    let target = guest.target_bytes?;
    if host.rung >= Rung::Withdraw && guest.coming_bytes() > 0 {
        let to_bytes = is.max(kept).min(target);
        return (to_bytes < target).then(|| step(guest, to_bytes, "the host has become short of memory"));
    }
    if !matches!(guest.driver, DriverState::Stuck | DriverState::Deflated) {
        return None;
    }
    let told_before = "it was told so before, and has not done it";
    let (to_bytes, reason) = if target >= is {
        (kept.clamp(is, target), told_before)
    } else {
        let target = target.max(kept);
        let way = is.saturating_sub(target);
        let is_harmless = way <= guest.harmless_bytes() || last_resort_bytes(host) > 0;
        match guest.driver {
            _ if is_harmless => (target, told_before),
            // A guest without statistics may have no driver at all. It stays flagged.
            DriverState::Stuck if guest.claims.is_none() => (target, told_before),
            DriverState::Stuck => (is.saturating_sub(guest.harmless_bytes()), "it needs the rest"),
            _ => return None,
        }
    };
    Some(step(guest, to_bytes, reason))
}

fn step(guest: &GuestFacts, to_bytes: u64, reason: &str) -> Step {
    Step {
        guest: guest.id.clone(),
        from_bytes: guest.actual_bytes,
        to_bytes,
        expected_bytes: 0,
        is_owed: to_bytes > guest.actual_bytes,
        reason: reason.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::Claims;

    const STUCK: DriverState = DriverState::Stuck;

    /// The size that a guest is told again, if it is. It claims that it could free `idle` bytes; with `None`, it sends
    /// no statistics. The host's floor is 100 bytes.
    fn told(
        available_bytes: u64,
        driver: DriverState,
        idle: Option<u64>,
        (actual_bytes, guaranteed_bytes, target): (u64, u64, u64),
    ) -> Option<u64> {
        let claims = idle.map(|available_bytes| Claims { available_bytes, ..Claims::default() });
        let guest = GuestFacts {
            actual_bytes,
            guaranteed_bytes,
            target_bytes: Some(target),
            resident_bytes: actual_bytes,
            driver,
            claims,
            ..GuestFacts::default()
        };
        let host = HostFacts { floor_bytes: 100, available_bytes, ..HostFacts::default() };
        reminder(&host, &guest).map(|step| step.to_bytes)
    }

    #[test]
    fn reminder_takes_nobody_below_its_guarantee_and_lends_nothing() {
        let of = |sizes| told(50, STUCK, Some(200), sizes);
        assert_eq!(
            [of((200, 100, 120)), of((200, 150, 120))],
            [Some(120), Some(150)],
            "shrinks to its guarantee at most"
        );
        assert_eq!(
            [of((80, 100, 200)), of((150, 100, 200)), of((80, 300, 200))],
            [Some(100), Some(150), Some(200)],
            "grows only to its guarantee"
        );
        assert_eq!(told(50, DriverState::Works, Some(200), (200, 100, 120)), None);
    }

    #[test]
    fn guest_that_grows_still_is_stopped_where_the_host_becomes_short_of_memory() {
        let guest = |actual_bytes, guaranteed_bytes| GuestFacts {
            ram_bytes: 1000,
            actual_bytes,
            guaranteed_bytes,
            target_bytes: Some(300),
            driver: DriverState::Works,
            ..GuestFacts::default()
        };
        let told = |rung, guest: &GuestFacts| {
            reminder(&HostFacts { rung, ..HostFacts::default() }, guest).map(|step| step.to_bytes)
        };
        assert_eq!(told(Rung::Idle, &guest(200, 100)), None);
        assert_eq!(told(Rung::Withdraw, &guest(200, 100)), Some(200));
        assert_eq!(told(Rung::Withdraw, &guest(200, 250)), Some(250), "its guarantee");
        assert_eq!([guest(200, 300), guest(300, 100)].map(|guest| told(Rung::Withdraw, &guest)), [None, None]);
    }

    #[test]
    fn guest_that_needs_its_memory_is_left_alone_until_the_host_runs_out() {
        let sizes = (200, 100, 120);
        let of = |available, driver, idle| told(available, driver, idle, sizes);
        assert_eq!(of(50, STUCK, Some(30)), Some(170), "the balloon tries no further");
        assert_eq!(of(50, DriverState::Deflated, Some(30)), None);
        assert_eq!(of(50, DriverState::Deflated, Some(80)), Some(120));
        assert_eq!(of(50, STUCK, None), Some(120), "it may have no driver");
        assert_eq!([STUCK, DriverState::Deflated].map(|driver| of(49, driver, Some(30))), [Some(120); 2]);
    }
}
