//! The repairs, inside the guest. Each repair removes one hazard of a copied machine. All of them are tried, and the
//! answer names those that failed.
//!
//! | hazard | repair |
//! |---|---|
//! | the kernel's random pool yields the same numbers as in siblings | a seed of the host's is mixed in, and the kernel's generator makes a new key |
//! | the wall clock stands where the template's stood | set to the host's |
//! | hostname, machine-id | set, in the kernel and in `/etc` |
//! | boot_id | a file is put over the kernel's, which cannot be set |
//! | SSH host keys | deleted, and made again |
//! | MAC and addresses | another MAC; addresses are taken away; a new address if the host gives one |
//! | open connections | ended, before there are new addresses: see `connections.rs` |
//! | other things that a guest must have for itself: random generators and identifiers of its programs | programs in `/etc/pagefold/identity.d` |
//!
//! Monotonic time cannot be stepped: it goes on where the template's stood.

use crate::{Address, Answer, Clock, Request, connections};
use rustix::time::{ClockId, Timespec, clock_gettime, clock_settime};
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const RANDOM: &str = "/proc/sys/kernel/random/uuid";
const HOSTNAME: &str = "/proc/sys/kernel/hostname";
/// The file that is put over the kernel's boot_id.
const OWN_BOOT_ID: &str = "/run/pagefold-boot-id";
/// Beginning of the names of SSH's host keys.
const SSH_KEYS: &str = "ssh_host_";
/// Most network interfaces that get a MAC address of their own. Further ones are left as they are.
const INTERFACES: u8 = 64;

/// The machine that is repaired.
pub struct Machine {
    /// Directory of the machine's files: `/`.
    root: PathBuf,
}

type Repair = fn(&Machine, &Request) -> io::Result<()>;

/// All repairs, in their order: the random pool first, because others draw from it, and programs of the guest's last.
const REPAIRS: [(&str, Repair); 8] = [
    ("random", |_, request| act::reseed_kernel_random(&request.seed)),
    ("clock", |_, request| set_clock(request.time)),
    ("hostname", Machine::set_hostname),
    ("machine-id", Machine::set_machine_id),
    ("boot_id", |_, request| set_boot_id(&request.nonce)),
    ("network", Machine::set_network),
    ("ssh", |machine, _| machine.renew_ssh_keys()),
    ("programs", Machine::run_programs),
];

impl Machine {
    /// The machine that this process runs on.
    pub fn own() -> Self {
        Self { root: "/".into() }
    }

    /// Makes all repairs, then reads back the machine's identity and clock.
    pub fn repair(&self, request: &Request) -> Answer {
        let failed = REPAIRS.iter().filter_map(|(name, repair)| {
            let reason = repair(self, request).err()?;
            Some(format!("{name}:{reason}"))
        });
        self.answer(&request.nonce, failed.collect())
    }

    /// Sets only the clock, then reads back the machine's identity and clock.
    pub fn set_clock(&self, clock: &Clock) -> Answer {
        let failed = set_clock(clock.time).err().map(|reason| format!("clock:{reason}"));
        self.answer(&clock.nonce, failed.into_iter().collect())
    }

    fn answer(&self, nonce: &str, failed: Vec<String>) -> Answer {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
        let now = clock_gettime(ClockId::Realtime);
        Answer {
            nonce: nonce.to_owned(),
            machine_id: fs::read_to_string(self.etc("machine-id")).unwrap_or_default().trim().to_owned(),
            boot_id: read(BOOT_ID),
            hostname: read(HOSTNAME),
            time: Duration::new(now.tv_sec.try_into().unwrap_or(0), now.tv_nsec.try_into().unwrap_or(0)),
            random: read(RANDOM),
            failed,
        }
    }

    fn etc(&self, name: &str) -> PathBuf {
        self.root.join("etc").join(name)
    }

    fn set_hostname(&self, request: &Request) -> io::Result<()> {
        rustix::system::sethostname(request.hostname.as_bytes())?;
        rewrite(&self.etc("hostname"), &request.hostname)
    }

    fn set_machine_id(&self, request: &Request) -> io::Result<()> {
        fs::write(self.etc("machine-id"), format!("{}\n", request.machine_id))?;
        // On most systems this file is a link to `/etc/machine-id`.
        rewrite(&self.root.join("var/lib/dbus/machine-id"), &request.machine_id)
    }

    /// Deletes SSH's host keys, has new ones made, and has the server read them.
    fn renew_ssh_keys(&self) -> io::Result<()> {
        let dir = self.etc("ssh");
        let Ok(found) = fs::read_dir(&dir) else { return Ok(()) };
        let keys: Vec<PathBuf> = found.flatten().map(|entry| entry.path()).filter(|path| is_ssh_key(path)).collect();
        if keys.is_empty() {
            return Ok(());
        }
        keys.iter().try_for_each(fs::remove_file)?;
        run(Command::new("ssh-keygen").arg("-A").arg("-f").arg(&self.root))?;
        let pid = fs::read_to_string(self.root.join("run/sshd.pid")).ok().and_then(|pid| pid.trim().parse().ok());
        let server = pid.and_then(rustix::process::Pid::from_raw);
        server.map_or(Ok(()), |pid| Ok(rustix::process::kill_process(pid, rustix::process::Signal::HUP)?))
    }

    /// Gives each network interface another MAC address, and removes its network addresses. Then ends TCP connections
    /// of lost addresses, and sets the network address that the request gives, if any.
    fn set_network(&self, request: &Request) -> io::Result<()> {
        let Ok(found) = fs::read_dir(self.root.join("sys/class/net")) else { return Ok(()) };
        // Interfaces without a device are the kernel's own: loopback, tunnels.
        let mut names: Vec<String> = found
            .flatten()
            .filter(|entry| entry.path().join("device").exists())
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        let mut were_up = Vec::with_capacity(names.len());
        for (number, name) in (0..INTERFACES).zip(&names) {
            let mut mac = request.mac;
            mac[5] = mac[5].wrapping_add(number);
            let mac: Vec<String> = mac.iter().map(|byte| format!("{byte:02x}")).collect();
            let up = fs::read_to_string(self.root.join("sys/class/net").join(name).join("flags"));
            were_up.push(up.is_ok_and(|flags| is_up(&flags)));
            ip(&["link", "set", "dev", name, "down"])?;
            ip(&["link", "set", "dev", name, "address", &mac.join(":")])?;
            ip(&["addr", "flush", "dev", name])?;
        }
        // All links are down, so that no packet of an ended connection reaches its other end.
        if !names.is_empty() {
            connections::end_lost()?;
        }
        for (name, was_up) in names.iter().zip(were_up) {
            let address = request.address.as_ref().filter(|address| address.interface == *name);
            if was_up || address.is_some() {
                ip(&["link", "set", "dev", name, "up"])?;
            }
            address.map_or(Ok(()), give_address)?;
        }
        match &request.address {
            Some(address) if !names.contains(&address.interface) => {
                Err(io::Error::other(format!("no interface {}", address.interface)))
            }
            _ => Ok(()),
        }
    }

    /// Runs the programs in `/etc/pagefold/identity.d`, in the order of their names. Their environment has the new
    /// identity.
    fn run_programs(&self, request: &Request) -> io::Result<()> {
        let Ok(found) = fs::read_dir(self.etc("pagefold/identity.d")) else { return Ok(()) };
        let mut programs: Vec<PathBuf> = found.flatten().map(|entry| entry.path()).collect();
        programs.sort();
        for program in programs {
            let named = |e: io::Error| io::Error::other(format!("{}: {e}", program.display()));
            let mut command = Command::new(&program);
            command.env("PAGEFOLD_NONCE", &request.nonce).env("PAGEFOLD_HOSTNAME", &request.hostname);
            run(command.env("PAGEFOLD_MACHINE_ID", &request.machine_id)).map_err(named)?;
        }
        Ok(())
    }
}

/// Whether the flags of an interface, as the kernel writes them, have `IFF_UP`.
fn is_up(flags: &str) -> bool {
    let digits = flags.trim().trim_start_matches("0x");
    u32::from_str_radix(digits, 16).is_ok_and(|flags| flags & 1 != 0)
}

fn is_ssh_key(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(SSH_KEYS))
}

fn set_clock(time: Duration) -> io::Result<()> {
    let seconds = time.as_secs().try_into().map_err(io::Error::other)?;
    let time = Timespec { tv_sec: seconds, tv_nsec: time.subsec_nanos().into() };
    Ok(clock_settime(ClockId::Realtime, time)?)
}

/// Mounts a file with this id over the kernel's boot_id.
fn set_boot_id(id: &str) -> io::Result<()> {
    fs::write(OWN_BOOT_ID, format!("{id}\n"))?;
    // If this guest is a clone of a clone, the file is there and mounted already.
    if fs::read_to_string(BOOT_ID)?.trim() == id {
        return Ok(());
    }
    act::put_file_over(Path::new(OWN_BOOT_ID), Path::new(BOOT_ID))
}

fn give_address(address: &Address) -> io::Result<()> {
    ip(&["addr", "add", &address.cidr, "dev", &address.interface])?;
    let Some(gateway) = &address.gateway else { return Ok(()) };
    ip(&["route", "add", "default", "via", gateway, "dev", &address.interface])
}

fn ip(words: &[&str]) -> io::Result<()> {
    run(Command::new("ip").args(words))
}

fn run(command: &mut Command) -> io::Result<()> {
    let status = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status()?;
    let named = || io::Error::other(format!("{}: {status}", command.get_program().display()));
    if status.success() { Ok(()) } else { Err(named()) }
}

/// Writes a line into a file that is there, and not a link; leaves out one that is missing.
fn rewrite(path: &Path, line: &str) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(meta) if meta.is_file() => fs::write(path, format!("{line}\n")),
        Ok(_) => Ok(()),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn machine() -> (tempfile::TempDir, Machine) {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let machine = Machine { root: dir.path().to_owned() };
        for part in ["etc/ssh", "etc/pagefold/identity.d", "var/lib/dbus", "sys/class/net"] {
            fs::create_dir_all(dir.path().join(part)).expect("make a directory");
        }
        (dir, machine)
    }

    fn request() -> Request {
        Request {
            nonce: "nonce".into(),
            seed: [0; act::SEED_BYTES],
            machine_id: "a".repeat(32),
            hostname: "web-1".into(),
            time: Duration::ZERO,
            mac: [2; 6],
            address: None,
        }
    }

    #[test]
    fn machine_id_is_written_wherever_it_is_kept_and_links_stay() {
        let (dir, machine) = machine();
        machine.set_machine_id(&request()).expect("write it");
        let bus = dir.path().join("var/lib/dbus/machine-id");
        let id = format!("{}\n", "a".repeat(32));
        assert_eq!(fs::read_to_string(dir.path().join("etc/machine-id")).expect("read"), id);
        assert!(!bus.exists());
        fs::write(&bus, "old").expect("write");
        machine.set_machine_id(&request()).expect("write it");
        assert_eq!(fs::read_to_string(&bus).expect("read"), id);
        fs::remove_file(&bus).expect("remove");
        symlink("/etc/machine-id", &bus).expect("link");
        machine.set_machine_id(&request()).expect("write it");
        assert!(bus.is_symlink());
    }

    #[test]
    fn programs_run_in_order_with_the_identity_and_a_failure_is_named() {
        let (dir, machine) = machine();
        let programs = dir.path().join("etc/pagefold/identity.d");
        let said = dir.path().join("said");
        for (name, script) in [
            ("20-second", format!("#!/bin/sh\necho two >>{}", said.display())),
            ("10-first", format!("#!/bin/sh\necho $PAGEFOLD_HOSTNAME $PAGEFOLD_NONCE >>{}", said.display())),
        ] {
            fs::write(programs.join(name), script).expect("write a script");
            fs::set_permissions(programs.join(name), PermissionsExt::from_mode(0o755)).expect("make it a program");
        }
        machine.run_programs(&request()).expect("they end well");
        assert_eq!(fs::read_to_string(said).expect("read"), "web-1 nonce\ntwo\n");
        fs::write(programs.join("30-bad"), "#!/bin/sh\nexit 3").expect("write a script");
        fs::set_permissions(programs.join("30-bad"), PermissionsExt::from_mode(0o755)).expect("make it a program");
        let error = machine.run_programs(&request()).expect_err("it fails").to_string();
        assert!(error.contains("30-bad"), "{error}");
    }

    #[test]
    fn guest_without_network_and_keys_needs_no_repair_of_them() {
        let (dir, machine) = machine();
        fs::create_dir(dir.path().join("sys/class/net/lo")).expect("loopback has no device");
        machine.set_network(&request()).expect("nothing to do");
        machine.renew_ssh_keys().expect("nothing to do");
        let address = Address::parse("eth0,10.0.0.7/24,");
        assert!(machine.set_network(&Request { address, ..request() }).is_err());
    }

    #[test]
    fn host_keys_are_others_afterwards() {
        if Command::new("ssh-keygen").arg("-?").stderr(Stdio::null()).status().is_err() {
            eprintln!("skipped: no ssh-keygen here");
            return;
        }
        let (dir, machine) = machine();
        let key = dir.path().join("etc/ssh/ssh_host_ed25519_key");
        fs::write(&key, "the template's").expect("write");
        fs::write(dir.path().join("etc/ssh/sshd_config"), "kept").expect("write");
        machine.renew_ssh_keys().expect("new keys");
        assert!(fs::read_to_string(&key).expect("a new key").contains("PRIVATE KEY"));
        assert!(dir.path().join("etc/ssh/sshd_config").exists());
    }

    #[test]
    fn interface_that_is_up_is_told_from_one_that_is_not() {
        assert!(is_up("0x1003\n") && !is_up("0x1002\n") && !is_up(""));
    }
}
