//! Reasons against moving a VM, as its QEMU tells them.

use anyhow::bail;
use guest::Qmp;
use serde_json::{Value, json};

/// Fails if a running VM cannot be moved: QEMU refuses, or the VM may write a disk that the hosts do not share.
pub(super) fn check(qmp: &mut Qmp, shared_disks: bool) -> anyhow::Result<()> {
    let migration = super::migration(qmp)?;
    if let Some(reason) = migration["blocked-reasons"].as_array().and_then(|all| all.first()) {
        bail!("QEMU says: {}", cli::printable(reason.as_str().unwrap_or("no reason given")));
    }
    let disks = qmp.execute("query-block", json!({}))?;
    if !shared_disks && let Some(disk) = own_disk(&disks) {
        bail!(
            "it may write the disk {disk}, and only memory is moved. If both hosts have the same disk, and the destination's QEMU has it, \
             say --shared-disks"
        );
    }
    Ok(())
}

/// A disk that the guest may write; `None` if there is none.
fn own_disk(disks: &Value) -> Option<String> {
    let all = disks.as_array().into_iter().flatten().map(|disk| &disk["inserted"]);
    let written =
        all.filter(|inserted| inserted.is_object() && inserted["ro"] != true).map(|inserted| &inserted["file"]);
    written.map(|file| cli::printable(file.as_str().unwrap_or("without a name"))).next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_disk_that_may_be_written_is_the_guests_own() {
        let disks = |ro: Value| json!([{"device": "cd"}, {"device": "a", "inserted": {"file": "/a", "ro": ro}}]);
        assert_eq!(own_disk(&disks(json!(false))), Some("/a".into()));
        assert_eq!(own_disk(&disks(Value::Null)), Some("/a".into()));
        assert_eq!(own_disk(&disks(json!(true))), None);
        assert_eq!(own_disk(&json!([])), None);
    }
}
