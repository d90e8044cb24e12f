//! Identities for clones: chosen here on the host, and put into effect by the helper inside the clone.

use identity::{Address, Request};
use rustix::rand::{GetRandomFlags, getrandom};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// An identity, which a clone keeps when it is rolled back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// 32 hexadecimal digits.
    pub machine_id: String,
    /// The host name inside the guest.
    pub hostname: String,
    /// Address of its first network interface.
    pub mac: [u8; 6],
    /// Network address: interface, address with prefix, and gateway.
    pub address: Option<String>,
    /// UUID of its last start, which is its boot_id as well.
    pub nonce: String,
}

impl Identity {
    /// A new identity for a clone of this name.
    pub(crate) fn new(name: &str, address: Option<String>) -> Self {
        let mut mac: [u8; 6] = random();
        // A locally administered unicast address.
        mac[0] = mac[0] & 0xfc | 0x02;
        // Further interfaces get the next addresses, so the last byte must leave room.
        mac[5] &= 0x3f;
        Self { machine_id: uuid().replace('-', ""), hostname: name.to_owned(), mac, address, nonce: uuid() }
    }

    /// The same identity with a new nonce, for another start.
    pub(crate) fn again(&self) -> Self {
        Self { nonce: uuid(), ..self.clone() }
    }

    /// The request to the helper, with the present time and a fresh seed.
    pub(crate) fn request(&self) -> Request {
        Request {
            nonce: self.nonce.clone(),
            seed: random(),
            machine_id: self.machine_id.clone(),
            hostname: self.hostname.clone(),
            time: now(),
            mac: self.mac,
            address: self.address.as_deref().and_then(Address::parse),
        }
    }
}

/// The host's wall clock: time since 1970.
pub(crate) fn now() -> Duration {
    let now = clock_gettime(ClockId::Realtime);
    Duration::new(now.tv_sec.try_into().unwrap_or(0), now.tv_nsec.try_into().unwrap_or(0))
}

/// Bytes from the host's random pool.
fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        filled += getrandom(&mut bytes[filled..], GetRandomFlags::empty()).unwrap_or(0);
    }
    bytes
}

/// A random UUID (version 4).
pub(crate) fn uuid() -> String {
    let mut bytes: [u8; 16] = random();
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn identities_differ_and_stay_when_rolled_back() {
        let all: Vec<Identity> = (0..100).map(|_| Identity::new("web", None)).collect();
        let ids: BTreeSet<_> = all.iter().map(|one| (&one.machine_id, &one.nonce, one.mac)).collect();
        assert_eq!(ids.len(), 100);
        for one in all {
            assert_eq!((one.mac[0] & 3, one.nonce.len(), one.machine_id.len()), (2, 36, 32), "{one:?}");
            let again = one.again();
            assert_ne!(again.nonce, one.nonce);
            assert_eq!(Identity { nonce: one.nonce.clone(), ..again }, one);
            assert_ne!(one.request().seed, one.request().seed);
        }
    }
}
