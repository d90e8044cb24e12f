//! A hostile QEMU that reports memory of extreme sizes and addresses. A list of the frames in it would take all memory
//! of the process that asks.

use super::*;
use crate::{Facts, QemuFacts};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;

/// Serves one client like a QEMU whose guest has memory up to the address `last`, which lies at the address `place` of
/// QEMU's process.
fn answer(listener: &UnixListener, last: u64, place: u64) -> std::io::Result<()> {
    let (client, _) = listener.accept()?;
    let mut answers = client.try_clone()?;
    writeln!(answers, "{}", json!({"QMP": {}}))?;
    for line in BufReader::new(client).lines() {
        let command: Value = serde_json::from_str(&line?)?;
        let line = command["arguments"]["command-line"].as_str().unwrap_or_default();
        let result = match line.split(' ').next() {
            Some("info") => {
                json!(format!(
                    "FlatView #0\n AS \"memory\", root: system\n  0000000000000000-{last:016x} (prio 0, ram): pc.ram\n"
                ))
            }
            Some("gpa2hva") => json!(format!("Host virtual address for 0x0 (pc.ram) is {place:#x}\n")),
            _ => json!([]),
        };
        writeln!(answers, "{}", json!({"return": result}))?;
    }
    Ok(())
}

#[test]
fn memory_that_qemu_has_no_addresses_for_is_not_believed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    let qemu = QemuFacts { qmp_socket: Some(path.to_str().unwrap().to_owned()), ..QemuFacts::default() };
    let guest = Guest {
        id: "qemu:a".into(),
        name: "a".into(),
        kind: GuestKind::Qemu,
        pids: vec![std::process::id()],
        group: "g".into(),
        ram_bytes: Some(1 << 20),
        facts: Facts { qemu: Some(qemu), ..Facts::default() },
    };
    let own = vec![1_u8; 8 << 20];
    let there = (own.as_ptr() as u64).next_multiple_of(PAGE_BYTES as u64);
    let lies = [0, 0xfff, (1 << 52) - 1, (1 << 62) - 1, u64::MAX - 0x1000, u64::MAX];
    for (last, place) in lies.into_iter().flat_map(|last| [0, there, 1 << 52].map(|place| (last, place))) {
        let found = std::thread::scope(|scope| {
            scope.spawn(|| answer(&listener, last, place));
            open_ram(&guest, None)
        });
        let bytes = |ram: &GuestRam| ram.map.blocks().iter().map(|block| block.bytes).sum::<u64>();
        assert!(found.unwrap().iter().all(|ram| bytes(ram) < 1 << 47), "{last:#x} at {place:#x}");
    }
    drop(own);
}
