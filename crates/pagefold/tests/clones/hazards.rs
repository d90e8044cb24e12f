//! Hazards of a copied guest, each by what programs inside had before and find afterwards.

use crate::common::supervised::wait_for;
use crate::rig::{Rig, text};
use std::collections::BTreeSet;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// MAC of the template's card.
const MAC: &str = "52:54:00:00:00:01";
/// A network card, by which the guest reaches servers of the test as 10.0.2.2.
const CARD: [&str; 4] = [
    "--qemu-arg=-netdev",
    "--qemu-arg=user,id=net",
    "--qemu-arg=-device",
    "--qemu-arg=virtio-net-pci,netdev=net,romfile=,mac=52:54:00:00:00:01",
];

/// Script for the template's guest: it has an address, connections to PORT of the host and inside itself, and a repair of its own.
const LIVES: &str = "ip link set lo up; ip link set eth0 up; ip addr add 10.0.2.15/24 dev eth0; ip route add default via 10.0.2.2
mkfifo /run/say
sleep 99999 | nc 10.0.2.2 PORT >/run/far &
sleep 99999 | nc -l -p 7777 >/run/near &
until netstat -tln | grep -q :7777; do usleep 100000; done
sleep 99999 >/run/say &
nc 127.0.0.1 7777 </run/say >/run/back &
until grep -q hello /run/far && netstat -tn | grep -q '127.0.0.1:7777.*ESTABLISHED'; do usleep 100000; done
mkdir -p /etc/pagefold/identity.d
printf '#!/bin/sh\\nsleep 3; echo $PAGEFOLD_NONCE $PAGEFOLD_MACHINE_ID >>/run/own.$PAGEFOLD_HOSTNAME\\n' >/etc/pagefold/identity.d/10-own
chmod 755 /etc/pagefold/identity.d/10-own
cut -d' ' -f1 /proc/uptime";

/// Script for a clone: waits until the program that was connected to the host has been told, and looks at all that LIVES has made.
const LOOKS: &str = "cut -d' ' -f1 /proc/uptime
while ps | grep -q '[n]c 10.0.2.2'; do usleep 100000; done
netstat -tn | grep 10.0.2 | wc -l
echo alive >/run/say
until grep -q alive /run/near; do usleep 100000; done
netstat -tn | grep '127.0.0.1:7777.*ESTABLISHED' | wc -l
cat /sys/class/net/eth0/address
ip -o -4 addr show dev eth0 | wc -l
cat /run/own.$(hostname) /proc/sys/kernel/random/boot_id /etc/machine-id";

/// Waits for a guest to connect to a server of the host's, and greets it.
fn greet(listener: &TcpListener) -> TcpStream {
    listener.set_nonblocking(true).expect("do not wait");
    let (mut stream, _) = wait_for("the guest connects", || listener.accept().ok());
    stream.write_all(b"hello\n").expect("greet it");
    stream
}

fn seconds(text: &str) -> f64 {
    text.parse().unwrap_or_else(|_| panic!("{text:?} is no time"))
}

#[test]
fn clone_leaves_connections_and_addresses_behind_and_its_monotonic_clock_goes_on() {
    let rig = Rig::new();
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("listen");
    let port = listener.local_addr().expect("its address").port().to_string();
    let words = [&["web", "--image", "tiny", "--memory", "128M"][..], &CARD].concat();
    let prepared = rig.prepared(&words, |inside| {
        std::thread::scope(|scope| {
            let greeted = scope.spawn(|| greet(&listener));
            let at = Instant::now();
            let uptime = seconds(&inside(&LIVES.replace("PORT", &port)));
            (greeted.join().expect("it has connected"), at, uptime)
        })
    });
    let Some((_stream, at, before)) = prepared else { return };
    sleep(Duration::from_secs(1));
    let made = rig.clone("web", &["--count", "2"]);
    let mut seen = BTreeSet::from([MAC.to_owned()]);
    for one in &made {
        let name = text(one, "name");
        let found = rig.inside(&name, LOOKS);
        let elapsed = at.elapsed().as_secs_f64();
        let lines: Vec<&str> = found.lines().collect();
        let [uptime, far, near, mac, addresses, own, boot_id, machine_id] = lines[..] else { panic!("{found}") };
        assert_eq!((far, near, addresses), ("0", "2", "0"), "{found}");
        assert!(seen.insert(mac.to_owned()), "{mac} is another's");
        // The guest's own repair has run, with what the clone is.
        assert_eq!(own, format!("{boot_id} {machine_id}"));
        assert_eq!(machine_id, text(one, "machine_id"));
        // It neither begins anew nor counts the second that the template has lain there.
        let since = seconds(uptime) - before;
        assert!((0.0..elapsed - 1.0).contains(&since), "{since} s of {elapsed} s");
    }
    // The guest's own repair takes longer than the host waits before it asks again.
    assert_eq!(rig.inside("web-1", "sleep 4; wc -l </run/own.web-1"), "1", "it is made once");
}
