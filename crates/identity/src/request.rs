//! The host's request: a line with the identity that a guest is to take.

use crate::answer::Answer;
use crate::words::{Words, bytes, hex};
use crate::{ASKS, VERSION};
use act::SEED_BYTES;
use std::time::Duration;

/// Largest difference between a guest's clock and the host's, when the answer arrives, at which the clock counts as
/// set: 0.5 s.
pub(crate) const CLOCK: Duration = Duration::from_millis(500);

/// A new identity for a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// UUID of this request, which the answer must bear.
    pub nonce: String,
    /// Bytes for the kernel's random pool.
    pub seed: [u8; SEED_BYTES],
    /// 32 hexadecimal digits, as in `/etc/machine-id`.
    pub machine_id: String,
    /// The guest's name for itself.
    pub hostname: String,
    /// Wall clock: time since 1970 as the host has it when it sends the line.
    pub time: Duration,
    /// MAC address of the first network interface. Each further interface gets the next address.
    pub mac: [u8; 6],
    /// Network address of one interface; without it, interfaces have none until the guest's own network service gives
    /// them one.
    pub address: Option<Address>,
}

/// Address of a network interface inside a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// Its interface, such as `eth0`.
    pub interface: String,
    /// The address with its prefix, such as `10.0.0.7/24`.
    pub cidr: String,
    /// The gateway of all other addresses.
    pub gateway: Option<String>,
}

impl Request {
    /// The request as text. A newline in front of it ends a partial line that the guest may have read before.
    pub fn line(&self) -> String {
        let mac: Vec<String> = self.mac.iter().map(|byte| format!("{byte:02x}")).collect();
        let mut line = format!(
            "\n{ASKS} {VERSION} nonce={} seed={} machine-id={} hostname={} time={}.{:09} mac={}",
            self.nonce,
            hex(&self.seed),
            self.machine_id,
            self.hostname,
            self.time.as_secs(),
            self.time.subsec_nanos(),
            mac.join(":"),
        );
        if let Some(Address { interface, cidr, gateway }) = &self.address {
            let gateway = gateway.as_deref().unwrap_or_default();
            line.push_str(&format!(" address={interface},{cidr},{gateway}"));
        }
        line.push('\n');
        line
    }

    /// Reads a line; `None` if it is no valid request.
    pub fn parse(line: &str) -> Option<Self> {
        let words = Words::behind(ASKS, line)?;
        let mac: Vec<u8> = words.get("mac")?.split(':').map_while(|byte| u8::from_str_radix(byte, 16).ok()).collect();
        Some(Self {
            nonce: words.get("nonce")?.to_owned(),
            seed: bytes(words.get("seed")?)?,
            machine_id: words.get("machine-id").filter(|id| bytes::<16>(id).is_some())?.to_owned(),
            hostname: words.get("hostname").filter(|name| is_hostname(name))?.to_owned(),
            time: time(words.get("time")?)?,
            mac: mac.try_into().ok()?,
            address: words.get("address").map(Address::parse).map_or(Some(None), |found| found.map(Some))?,
        })
    }

    /// Checks that an answer that has just arrived, at the host's time `now`, shows the identity that was asked for.
    ///
    /// # Errors
    /// What the answer shows instead.
    pub fn check(&self, answer: &Answer, now: Duration) -> Result<(), String> {
        if answer.nonce != self.nonce {
            return Err(format!("it answers another request ({})", answer.nonce));
        }
        if let Some(failed) = answer.failed.first() {
            return Err(format!("inside, the helper cannot repair {failed}"));
        }
        let same = [
            ("machine-id", &answer.machine_id, &self.machine_id),
            ("boot_id", &answer.boot_id, &self.nonce),
            ("hostname", &answer.hostname, &self.hostname),
        ];
        if let Some((what, found, asked)) = same.into_iter().find(|(_, found, asked)| found != asked) {
            return Err(format!("inside, {what} is {found:?}, not {asked:?}"));
        }
        let apart = now.abs_diff(answer.time);
        if apart > CLOCK {
            return Err(format!("inside, the clock is {:.3} s away from the host's", apart.as_secs_f64()));
        }
        Ok(())
    }
}

impl Address {
    /// Reads `interface,address/prefix,gateway`, where the gateway may be empty.
    pub fn parse(text: &str) -> Option<Self> {
        let parts: Vec<&str> = text.split(',').collect();
        let [interface, cidr, gateway] = parts[..] else { return None };
        let plain = |text: &str| text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | ':' | '-' | '_'));
        let (address, prefix) = cidr.split_once('/')?;
        let is_fine = !interface.is_empty() && plain(interface) && !interface.starts_with(['.', '-']);
        let is_fine = is_fine && address.parse::<std::net::IpAddr>().is_ok() && prefix.parse::<u8>().is_ok();
        let gateway = Some(gateway).filter(|gateway| !gateway.is_empty());
        let is_fine = is_fine && gateway.is_none_or(|gateway| gateway.parse::<std::net::IpAddr>().is_ok());
        is_fine.then(|| Self { interface: interface.into(), cidr: cidr.into(), gateway: gateway.map(str::to_owned) })
    }
}

/// Whether a text can be the name of a machine: 1 to 63 letters, digits, `-` and `.`, and none but a letter or digit
/// first.
pub(crate) fn is_hostname(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.');
    (1..=63).contains(&text.len()) && text.chars().all(plain) && !text.starts_with(['-', '.'])
}

/// Reads a time in seconds, with nine digits behind the point; `None` if it is none.
pub(crate) fn time(text: &str) -> Option<Duration> {
    let (seconds, nanos) = text.split_once('.')?;
    let nanos: u32 = nanos.parse().ok().filter(|_| nanos.len() == 9)?;
    Some(Duration::new(seconds.parse().ok()?, nanos))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> Request {
        Request {
            nonce: "1d0c1f6e-8d8c-4f5e-9df0-6f3c3d6f3a11".into(),
            seed: [0xa5; SEED_BYTES],
            machine_id: "0123456789abcdef0123456789abcdef".into(),
            hostname: "web-1".into(),
            time: Duration::new(1_800_000_000, 42),
            mac: [2, 0, 0, 0, 0, 0xff],
            address: Address::parse("eth0,10.0.0.7/24,10.0.0.1"),
        }
    }

    fn answer(request: &Request) -> Answer {
        Answer {
            nonce: request.nonce.clone(),
            machine_id: request.machine_id.clone(),
            boot_id: request.nonce.clone(),
            hostname: request.hostname.clone(),
            time: request.time,
            random: "x".into(),
            failed: Vec::new(),
        }
    }

    #[test]
    fn line_is_read_as_it_was_written() {
        for request in [request(), Request { address: None, ..request() }] {
            let line = request.line();
            assert!(line.len() < crate::LINE_BYTES && line.starts_with('\n') && line.ends_with('\n'));
            assert_eq!(Request::parse(line.trim()), Some(request));
        }
    }

    #[test]
    fn damaged_lines_are_no_requests() {
        let line = request().line().trim().to_owned();
        for bad in [
            String::new(),
            line.replace(" 1 ", " 2 "),
            line.replace("seed=a5", "seed=5"),
            line.replace("hostname=web-1", "hostname=../etc"),
            line.replace("machine-id=0", "machine-id=x"),
            line.replace("10.0.0.7", "10.0.0.700"),
            line.replace("eth0", "-h"),
            line.replace("02:00:", ""),
            line.replace(".000000042", ".42"),
            line.replace(" nonce", " x nonce"),
            line[..line.len() / 2].to_owned(),
        ] {
            assert_eq!(Request::parse(&bad), None, "{bad}");
        }
    }

    #[test]
    fn answer_is_believed_only_if_each_part_is_what_was_asked() {
        let asked = request();
        let now = asked.time + Duration::from_millis(499);
        assert_eq!(asked.check(&answer(&asked), now), Ok(()));
        let wrong = [
            Answer { nonce: "another".into(), ..answer(&asked) },
            Answer { machine_id: "f".repeat(32), ..answer(&asked) },
            Answer { boot_id: "another".into(), ..answer(&asked) },
            Answer { hostname: "template".into(), ..answer(&asked) },
            Answer { time: asked.time - Duration::from_millis(2), ..answer(&asked) },
            Answer { failed: vec!["random:denied".into()], ..answer(&asked) },
        ];
        for answer in wrong {
            assert!(asked.check(&answer, now).is_err(), "{answer:?}");
        }
    }
}
