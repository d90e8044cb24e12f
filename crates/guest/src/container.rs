//! The container of a process, by the names that runtimes give to their control groups.
//!
//! The outermost container counts: another runtime inside it, for instance, is part of it. Processes of a runtime
//! that only monitor a container are in control groups of their own and are not part of it.

use crate::GuestKind;
use host::Cgroups;

/// One container.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Container {
    /// The kind of its runtime.
    pub kind: GuestKind,
    /// Its name; for runtimes that name by hash, the first twelve digits.
    pub name: String,
    /// The control group of the container. It distinguishes two containers with the same name.
    pub group: String,
}

/// Number of digits of a hash that runtimes show.
const SHORT_ID: usize = 12;
/// Number of digits of a whole hash.
const WHOLE_ID: usize = 64;

/// The container of a process with control groups `cgroups`; `None` if it is in none. Containers that the caller itself
/// is in (its control groups are `own`) do not count: a caller in a container looks for guests within its container.
pub fn container_of(cgroups: &Cgroups, own: &Cgroups) -> Option<Container> {
    let ours: Vec<Container> = own.paths().flat_map(containers_on).collect();
    cgroups.paths().find_map(|path| containers_on(path).into_iter().find(|c| !ours.contains(c)))
}

/// Whether the host has put a process among its guests: in a container, or in a control group of libvirt's or of
/// `machine.slice`. `cgroups` must be the part of its control groups that root has given ([`host::CgroupMakers`]).
/// Control groups below `user.slice` belong to login sessions, and never count.
pub(crate) fn is_placed_by_host(cgroups: &Cgroups) -> bool {
    let first = |path: &str| path.split('/').nth(1).map(str::to_owned).unwrap_or_default();
    cgroups.paths().any(|path| match first(path).as_str() {
        "user.slice" => false,
        "machine.slice" | "machine" => true,
        _ => !containers_on(path).is_empty(),
    })
}

/// The containers whose control groups are parts of this path, outermost first.
fn containers_on(path: &str) -> Vec<Container> {
    let parts: Vec<&str> = path.split('/').collect();
    let container = |n: usize| {
        let (kind, name) = recognise(&parts, n)?;
        Some(Container { kind, name, group: parts[..=n].join("/") })
    };
    (1..parts.len()).filter_map(container).collect()
}

/// The container whose control group is `parts[n]`, if it is one.
fn recognise(parts: &[&str], n: usize) -> Option<(GuestKind, String)> {
    let (part, parent, child) = (parts[n], parts[n - 1], parts.get(n + 1).copied());
    let named = |name: &str| Some((GuestKind::Lxc, name.to_owned()));
    if let Some(name) = part.strip_prefix("lxc.payload.") {
        return named(name);
    }
    if matches!(parent, "lxc" | "lxc.payload") && !part.is_empty() {
        return named(part);
    }
    by_hash(part, parent, &parts[..n]).or_else(|| by_machine(part, child))
}

/// The container of a runtime that names containers by a hash of hexadecimal digits.
fn by_hash(part: &str, parent: &str, above: &[&str]) -> Option<(GuestKind, String)> {
    let scope = part.strip_suffix(".scope").unwrap_or(part);
    let prefixes = [
        ("docker-", GuestKind::Docker),
        ("libpod-", GuestKind::Podman),
        ("cri-containerd-", GuestKind::Containerd),
        ("nerdctl-", GuestKind::Containerd),
        ("crio-", GuestKind::Crio),
    ];
    for (prefix, kind) in prefixes {
        if let Some(id) = scope.strip_prefix(prefix).and_then(short_id) {
            return Some((kind, id));
        }
    }
    // containerd without its systemd driver below a kubelet with one: `SLICE:cri-containerd:ID`.
    if let Some((_, id)) = part.split_once(":cri-containerd:") {
        return Some((GuestKind::Containerd, short_id(id)?));
    }
    if parent == "docker" {
        return Some((GuestKind::Docker, short_id(part)?));
    }
    // `/kubepods/burstable/podUID/ID`: containerd as a rule; Docker and CRI-O did the same once.
    if parent.starts_with("pod") && above.contains(&"kubepods") {
        return Some((GuestKind::Containerd, short_id(part)?));
    }
    // Docker may be configured with any other parent, as in `/ecs/TASK/ID`. Then the name is a whole hash and nothing
    // else.
    (part.len() == WHOLE_ID).then_some((GuestKind::Docker, short_id(part)?))
}

fn short_id(id: &str) -> Option<String> {
    (id.len() >= SHORT_ID && id.bytes().all(|b| b.is_ascii_hexdigit())).then(|| id[..SHORT_ID].to_owned())
}

/// The container of a scope or service of systemd-machined: systemd-nspawn, and containers of libvirt. A process that
/// monitors the payload may be beside it, directly in the service or in `supervisor`.
fn by_machine(part: &str, child: Option<&str>) -> Option<(GuestKind, String)> {
    if child == Some("supervisor") {
        return None;
    }
    if let Some(name) = part.strip_prefix("systemd-nspawn@").and_then(|p| p.strip_suffix(".service")) {
        return child.map(|_| (GuestKind::Nspawn, unescape(name)));
    }
    let name = unescape(part.strip_prefix("machine-")?.strip_suffix(".scope")?);
    if name.starts_with("qemu-") {
        return None;
    }
    match name.strip_prefix("lxc-").and_then(|n| n.split_once('-')) {
        Some((pid, name)) if pid.bytes().all(|b| b.is_ascii_digit()) => Some((GuestKind::Lxc, name.to_owned())),
        _ => Some((GuestKind::Nspawn, name)),
    }
}

/// The name of the libvirt domain in whose control group a process is; `None` if it is in none. libvirt leaves out
/// characters other than letters, digits, `-` and `.`, and shortens long names.
pub fn domain_of(cgroups: &Cgroups) -> Option<String> {
    let domain = |part: &str| {
        let name = unescape(part);
        let scope = name.strip_prefix("machine-qemu-").and_then(|rest| rest.strip_suffix(".scope"));
        let plain = || name.strip_prefix("qemu-").and_then(|rest| rest.strip_suffix(".libvirt-qemu"));
        let (number, domain) = scope.or_else(plain)?.split_once('-')?;
        let is_number = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
        (is_number && !domain.is_empty()).then(|| domain.to_owned())
    };
    // Only the first name below these groups is libvirt's. Names further down may have been given by others.
    let named = |path: &str| {
        let inside = path.strip_prefix("/machine.slice/").or_else(|| path.strip_prefix("/machine/"))?;
        inside.split('/').next().and_then(domain)
    };
    cgroups.paths().find_map(named)
}

/// Undoes systemd's escapes such as `\x2d`.
fn unescape(name: &str) -> String {
    let mut pieces = name.split("\\x");
    let mut out = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        match piece.get(..2).and_then(|digits| u8::from_str_radix(digits, 16).ok()).filter(u8::is_ascii) {
            Some(byte) => {
                out.push(char::from(byte));
                out.push_str(&piece[2..]);
            }
            None => {
                out.push_str("\\x");
                out.push_str(piece);
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use GuestKind::{Containerd, Crio, Docker, Lxc, Nspawn, Podman};

    const ID: &str = "4c01db0b339c4c01db0b339c4c01db0b339c4c01db0b339c4c01db0b339c4c01";

    fn seen_from(own: &str, path: &str) -> Option<(GuestKind, String)> {
        let parse = |path: &str| Cgroups::parse(&path.replace("ID", ID));
        container_of(&parse(path), &parse(own)).map(|c| (c.kind, c.name))
    }

    fn assert_is(text: &str, kind: GuestKind, name: &str) {
        assert_eq!(seen_from("0::/", text), Some((kind, name.to_owned())), "{text}");
    }

    #[test]
    fn lxc_is_recognised() {
        assert_is("0::/lxc.payload.web1/init.scope", Lxc, "web1");
        assert_is("0::/user.slice/user-1000.slice/user@1000.service/app.slice/lxc.payload.web1", Lxc, "web1");
        assert_is("9:name=systemd:/lxc.payload/web1\n4:memory:/lxc.payload/web1", Lxc, "web1");
        assert_is("4:memory:/lxc/100/ns/system.slice/ssh.service\n1:name=systemd:/lxc/100/ns", Lxc, "100");
        // Hybrid: the tree of version 2 has no groups, and the containers are below the caller's group in another tree.
        assert_is("9:name=systemd:/lxc.payload.a-2\n4:memory:/process_api/8add/lxc.payload.a-2\n0::/", Lxc, "a-2");
        assert_is(r"0::/machine.slice/machine-lxc\x2d4711\x2dmail\x2d1.scope/init.scope", Lxc, "mail-1");
    }

    #[test]
    fn docker_is_recognised() {
        assert_is("0::/system.slice/docker-ID.scope", Docker, "4c01db0b339c");
        assert_is("0::/system.slice/docker-ID.scope/init", Docker, "4c01db0b339c");
        assert_is(
            "12:memory:/docker/ID\n1:name=systemd:/docker/ID\n0::/system.slice/containerd.service",
            Docker,
            "4c01db0b339c",
        );
        assert_is(
            "0::/user.slice/user-1000.slice/user@1000.service/user.slice/docker-ID.scope",
            Docker,
            "4c01db0b339c",
        );
    }

    #[test]
    fn whole_hash_below_any_parent_is_container() {
        assert_is("0::/ecs/0f9c1e3b8d7a4d0f/ID", Docker, "4c01db0b339c");
        assert_is("9:memory:/my/parent/ID/init\n0::/", Docker, "4c01db0b339c");
        assert_is("0::/ID", Docker, "4c01db0b339c");
        for other in ["0::/x/ID0", "0::/x/4c01db0b339c", "0::/x/vm-ID", "0::/ecs/0f9c1e3b8d7a4d0f"] {
            assert_eq!(seen_from("0::/", other), None, "{other}");
        }
        // The caller's own container is none.
        assert_eq!(seen_from("0::/ecs/t/ID", "0::/ecs/t/ID/x"), None);
    }

    #[test]
    fn podman_is_recognised() {
        assert_is("0::/machine.slice/libpod-ID.scope/container", Podman, "4c01db0b339c");
        assert_is(
            "0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-ID.scope",
            Podman,
            "4c01db0b339c",
        );
        assert_is("4:memory:/libpod_parent/libpod-ID", Podman, "4c01db0b339c");
    }

    #[test]
    fn kubernetes_is_recognised() {
        let pod = "kubepods-burstable-pod0b5b5d1f_2f5a_4d5e_9c65_3a0f8a0a7b1c.slice";
        let below = |unit: &str| format!("0::/kubepods.slice/kubepods-burstable.slice/{pod}/{unit}");
        assert_is(&below("cri-containerd-ID.scope"), Containerd, "4c01db0b339c");
        assert_is(&below("crio-ID.scope"), Crio, "4c01db0b339c");
        assert_is(&below("crio-ID.scope/container"), Crio, "4c01db0b339c");
        assert_is(&below("docker-ID.scope"), Docker, "4c01db0b339c");
        assert_is("11:memory:/kubepods/burstable/pod0b5b5d1f-2f5a-4d5e/ID", Containerd, "4c01db0b339c");
        assert_is("11:memory:/kubepods/pod0b5b5d1f-2f5a-4d5e/crio-ID", Crio, "4c01db0b339c");
        assert_is(
            &format!("5:memory:/system.slice/containerd.service/{pod}:cri-containerd:ID"),
            Containerd,
            "4c01db0b339c",
        );
        assert_is("0::/system.slice/nerdctl-ID.scope", Containerd, "4c01db0b339c");
    }

    #[test]
    fn nspawn_is_recognised() {
        assert_is("0::/machine.slice/systemd-nspawn@web.service/payload/init.scope", Nspawn, "web");
        assert_is(r"0::/machine.slice/machine-my\x2dbox.scope/payload/system.slice/cron.service", Nspawn, "my-box");
        assert_is("1:name=systemd:/machine.slice/machine-box.scope", Nspawn, "box");
    }

    #[test]
    fn monitors_of_containers_are_not_containers() {
        for text in [
            "0::/lxc.monitor.web1",
            "4:memory:/lxc.monitor/web1",
            "0::/machine.slice/libpod-conmon-ID.scope",
            "4:memory:/libpod_parent/conmon",
            "0::/kubepods.slice/kubepods-pod1.slice/crio-conmon-ID.scope",
            "0::/kubepods.slice/kubepods-pod1.slice",
            "0::/system.slice/containerd.service",
            "0::/system.slice/docker.service",
            "0::/machine.slice/systemd-nspawn@web.service/supervisor",
            "0::/machine.slice/systemd-nspawn@web.service",
            r"0::/machine.slice/machine-box.scope/supervisor",
            r"0::/machine.slice/machine-qemu\x2d1\x2dacme.scope/libvirt/emulator",
            "12:memory:/docker/buildkit",
            "0::/user.slice/user-1000.slice/session-3.scope",
            "0::/",
            "",
        ] {
            assert_eq!(seen_from("0::/", text), None, "{text}");
        }
    }

    #[test]
    fn outermost_container_counts_except_the_one_around_caller() {
        let nested = "0::/docker/ID/lxc.payload.web1";
        assert_eq!(seen_from("0::/", nested), Some((Docker, "4c01db0b339c".into())));
        assert_eq!(seen_from("0::/docker/ID/some/where", nested), Some((Lxc, "web1".into())));
        assert_eq!(seen_from("0::/docker/ID", "0::/docker/ID"), None);
        assert_eq!(seen_from("0::/lxc.payload.web1", "0::/lxc.payload.web2"), Some((Lxc, "web2".into())));
    }

    #[test]
    fn domain_is_that_of_libvirts_control_group() {
        let domain = |path: &str| domain_of(&Cgroups::parse(path));
        for (path, expected) in [
            (r"0::/machine.slice/machine-qemu\x2d1\x2dacme\x2ddb.scope/libvirt/emulator", Some("acme-db")),
            ("9:name=systemd:/\n4:memory:/machine/qemu-12-web.libvirt-qemu/emulator", Some("web")),
            (r"0::/lxc.payload.x/machine.slice/machine-qemu\x2d1\x2dacme.scope", None),
            (r"0::/machine.slice/x.scope/machine-qemu\x2d1\x2dacme.scope", None),
            (r"0::/machine.slice/machine-qemu\x2dx\x2dacme.scope", None),
            ("0::/machine.slice/machine-box.scope", None),
            ("0::/", None),
        ] {
            assert_eq!(domain(path).as_deref(), expected, "{path}");
        }
    }

    #[test]
    fn escapes_of_systemd_are_undone() {
        assert_eq!(unescape(r"a\x2db\x2D\x2d"), "a-b--");
        assert_eq!(unescape(r"a\xzz\x2"), r"a\xzz\x2");
        assert_eq!(unescape(r"\xé"), r"\xé");
        assert_eq!(unescape(r"\xff"), r"\xff");
    }
}
