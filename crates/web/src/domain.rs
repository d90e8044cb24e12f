//! The libvirt domain that a process belongs to, by its control group: the name is libvirt's, and not the process's choice.

use host::Cgroups;

/// The domain, from a path such as `/machine.slice/machine-qemu\x2d3\x2dweb1.scope/libvirt/emulator`. libvirt cuts names
/// that are too long for a scope.
pub fn of(cgroups: &Cgroups) -> Option<String> {
    let parts = cgroups.paths().flat_map(|path| path.split('/'));
    let scopes = parts.filter_map(|part| part.strip_prefix("machine-")?.strip_suffix(".scope"));
    scopes.filter_map(|scope| domain(&unescape(scope))).next()
}

/// `web1` of `qemu-3-web1`.
fn domain(machine: &str) -> Option<String> {
    let (number, name) = machine.strip_prefix("qemu-")?.split_once('-')?;
    let is_number = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
    (is_number && !name.is_empty()).then(|| cli::printable(name))
}

/// Undoes systemd's escapes such as `\x2d`. A text with bytes that are no text is none.
fn unescape(name: &str) -> String {
    let (mut bytes, mut rest) = (Vec::new(), name.as_bytes());
    while let Some((first, after)) = rest.split_first() {
        let hex = after.strip_prefix(b"x").filter(|_| *first == b'\\').and_then(|after| after.split_at_checked(2));
        let byte = hex.and_then(|(hex, after)| Some((u8::from_str_radix(str::from_utf8(hex).ok()?, 16).ok()?, after)));
        let (byte, after) = byte.unwrap_or((*first, after));
        bytes.push(byte);
        rest = after;
    }
    String::from_utf8(bytes).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn domains_are_told_from_other_control_groups() {
        for (path, name) in [
            (r"/machine.slice/machine-qemu\x2d3\x2dweb1.scope/libvirt/emulator", Some("web1")),
            (r"/machine.slice/machine-qemu\x2d12\x2da\x2db\x20c.scope", Some("a-b c")),
            (r"/machine.slice/machine-qemu\x2d1\x2d\x1b\x5b2J.scope", Some("?[2J")),
            (r"/machine.slice/machine-qemu\x2dx\x2dweb1.scope", None),
            (r"/machine.slice/machine-qemu\x2d1\x2d.scope", None),
            (r"/machine.slice/machine-lxc\x2d1\x2dweb1.scope", None),
            ("/system.slice/qemu-1-web1.service", None),
            (r"/machine.slice/machine-qemu\x2d1\x2d\xff\xfe.scope", None),
        ] {
            assert_eq!(of(&Cgroups::parse(&format!("0::{path}\n"))).as_deref(), name, "{path}");
        }
    }
}
