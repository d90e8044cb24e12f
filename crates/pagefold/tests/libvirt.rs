//! Domains of the real libvirt, with its drivers `qemu` (without KVM) and `test`. They are members by an emulator that is a
//! link to `pagefold-qemu`, or by their metadata. They are saved, restored, migrated and destroyed.
//!
//! The long test (`PAGEFOLD_LONG_TESTS`) runs in a mount namespace and a network namespace of its own, where libvirt has directories of its own. The other
//! libvirt, to which a domain is migrated, has a mount namespace within that one.

mod common;

use common::supervised::{Installed, Supervisor, wait_for_within};
use common::{Afterwards, copy_program, json_of, not_root, number};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longest time for anything to happen on a busy machine: 4 minutes.
const PATIENCE: Duration = Duration::from_secs(240);
/// Variable of the process that runs the test within its namespaces.
const INSIDE: &str = "PAGEFOLD_TEST_LIBVIRT";
/// Pages that are the same in all domains: 4 MiB.
const SAME_PAGES: u64 = 1024;
/// Programs without which the test is skipped; `./x test` installs them.
const NEEDED: [&str; 4] = ["libvirtd", "virsh", "qemu-system-x86_64", "unshare"];

/// Directories of libvirt's, each of which is empty in a namespace of the test's.
const DIRECTORIES: &str = "for d in /run /etc/libvirt /var/lib/libvirt /var/cache/libvirt /var/log/libvirt; do
    mount -t tmpfs -o mode=755 tmpfs $d || exit 1
done
mkdir -p /run/libvirt /run/lock";

/// The other side of a migration.
const OTHER: &str = "mount --bind \"$1\" /run/libvirt
for d in /etc/libvirt /var/lib/libvirt /var/cache/libvirt /var/log/libvirt; do
    mount -t tmpfs -o mode=755 tmpfs $d || exit 1
done
cp \"$2\"/* /etc/libvirt/ && exec libvirtd -f /etc/libvirt/libvirtd.conf -p \"$3\"";

/// QEMU runs as this user, as it runs as `libvirt-qemu` where that is there.
const QEMU_CONF: &str = "user = \"nobody\"
group = \"nogroup\"
security_driver = \"none\"
stdio_handler = \"file\"
cgroup_device_acl = [ \"/dev/null\", \"/dev/full\", \"/dev/zero\", \"/dev/random\", \"/dev/urandom\", \"/dev/ptmx\", \"/dev/userfaultfd\" ]
";
const DAEMON_CONF: &str = "auth_unix_ro = \"none\"\nauth_unix_rw = \"none\"\nunix_sock_dir = \"/run/libvirt\"\n";

/// Whether the test cannot run here; prints the reason.
fn cannot_run() -> bool {
    let is_there = |program: &str| {
        let found = ["/usr/sbin", "/usr/bin"].iter().any(|dir| Path::new(dir).join(program).exists());
        if !found {
            eprintln!("skipped: there is no {program}");
        }
        found
    };
    not_root() || !NEEDED.into_iter().all(is_there)
}

/// Runs this test again in namespaces of its own.
fn run_inside(name: &str) {
    // libvirt leaves the control groups above those of its domains.
    let all = "for d in /sys/fs/cgroup/machine /sys/fs/cgroup/*/machine";
    let were = run("sh", &["-c", &format!("{all}; do [ ! -d $d ] || echo $d; done")]);
    let script = format!("{all}; do case '{were}' in *$d*) ;; *) rmdir $d;; esac; done > /dev/null 2>&1");
    let _afterwards = Afterwards::run(&script);
    let script = format!("{DIRECTORIES}\nip link set lo up; exec \"$@\"");
    let status = Command::new("unshare")
        .args(["--mount", "--net", "--propagation", "private", "sh", "-ec", &script, "sh"])
        .arg(std::env::current_exe().expect("this program"))
        .args(["--exact", name, "--nocapture"])
        .env(INSIDE, "1")
        .status();
    assert!(status.expect("run unshare").success(), "within its namespaces the test failed");
}

fn run(program: &str, words: &[&str]) -> String {
    let output = Command::new(program).args(words).output().expect("run a program");
    let [out, errors] = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(output.status.success(), "{program} {words:?}: {errors}");
    out
}

/// A running libvirt.
struct Libvirt {
    child: Child,
    uri: String,
}

impl Libvirt {
    fn start(mut command: Command, socket: &str, log: &Path) -> Self {
        let log = fs::File::create(log).expect("create a log");
        let child = command.stdin(Stdio::null()).stderr(log).spawn().expect("start libvirtd");
        let libvirt = Self { child, uri: format!("qemu+unix:///system?socket={socket}") };
        until("libvirt answers", || libvirt.try_virsh(&["list"]).ok());
        libvirt
    }

    fn try_virsh(&self, words: &[&str]) -> Result<String, String> {
        let output = Command::new("virsh").args(["-c", &self.uri]).args(words).output().expect("run virsh");
        let [out, errors] = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        if output.status.success() { Ok(out) } else { Err(errors) }
    }

    fn virsh(&self, words: &[&str]) -> String {
        self.try_virsh(words).unwrap_or_else(|errors| panic!("virsh {words:?}: {errors}"))
    }

    fn domains(&self) -> Vec<String> {
        self.virsh(&["list", "--name"]).split_whitespace().map(str::to_owned).collect()
    }
}

impl Drop for Libvirt {
    fn drop(&mut self) {
        if let Ok(names) = self.try_virsh(&["list", "--name"]) {
            names.split_whitespace().for_each(|name| _ = self.try_virsh(&["destroy", name]));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn until<T>(what: &str, look: impl FnMut() -> Option<T>) -> T {
    wait_for_within(PATIENCE, what, look)
}

/// A service, with the real agents and the wrapper of QEMU.
struct Host {
    _supervisor: Supervisor,
    /// Ends what names the installation's directory, also if this process is killed.
    _afterwards: Afterwards,
    installed: Installed,
}

impl Host {
    fn start() -> Option<Self> {
        let installed = Installed::attaching()?;
        let built = Path::new(env!("CARGO_BIN_EXE_pagefold")).with_file_name("libpagefold.so");
        fs::remove_file(installed.path("libpagefold.so")).expect("remove the empty library");
        copy_program(&built, &installed.path("libpagefold.so"));
        // Where nothing is installed, the wrapper is told where programs and service are.
        let wrapper = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/pagefold-qemu");
        let command = format!("{} run --service {}", installed.text("pagefold"), installed.text("s"));
        let text = fs::read_to_string(wrapper).expect("the wrapper").replace("/usr/bin/pagefold run", &command);
        fs::write(installed.path("pagefold-qemu"), text).expect("write the wrapper");
        run("chmod", &["755", &installed.text("pagefold-qemu")]);
        symlink("pagefold-qemu", installed.path("acme")).expect("make a link");
        // Nobody may use it on the host itself.
        run("mknod", &["-m", "666", "/run/userfaultfd", "c", "10", &userfaultfd_minor()]);
        run("mount", &["--bind", "/run/userfaultfd", "/dev/userfaultfd"]);
        let fill: Vec<u8> =
            (0..SAME_PAGES * 512).flat_map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_ne_bytes()).collect();
        fs::write(installed.path("fill"), fill).expect("write what RAM is filled with");
        let config = "[api]\n[[group]]\nname = 'acme'\nusers = ['nobody']\n[[group]]\nname = 'beta'\n\
                      [[enrol]]\ngroup = 'beta'\ndomain-metadata = true\n";
        let supervisor = installed.serve(config, &[]);
        let script = format!(
            "for p in /proc/[0-9]*; do case $(readlink $p/exe) in */libvirtd | */qemu-system-*)
                 grep -qaF {}/ $p/cmdline && kill -9 ${{p#/proc/}};; esac; done 2>/dev/null",
            installed.dir.path().display()
        );
        Some(Self { _supervisor: supervisor, _afterwards: Afterwards::run(&script), installed })
    }

    /// A file with the XML of a domain.
    fn xml(&self, name: &str, emulator: &str, metadata: &str) -> String {
        let path = self.installed.path(&format!("{name}.xml"));
        let xml = format!(
            "<domain type='qemu' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>{name}</name>
  <metadata>{metadata}</metadata>
  <memory unit='MiB'>64</memory>
  <os><type arch='x86_64' machine='pc'>hvm</type></os>
  <devices>
    <emulator>{emulator}</emulator>
    <controller type='usb' model='none'/><memballoon model='none'/><video><model type='none'/></video>
  </devices>
  <qemu:commandline>
    <qemu:arg value='-device'/><qemu:arg value='loader,file={},addr=0x1000000,force-raw=on'/>
  </qemu:commandline>
</domain>",
            self.installed.text("fill")
        );
        fs::write(&path, xml).expect("write a domain");
        path.to_str().expect("a plain path").to_owned()
    }

    /// Members of a group, by name: the pages that each has folded, and its domain.
    fn members(&self, group: &str) -> Vec<(String, u64)> {
        let shown = self.installed.show(group);
        let members = shown["members"].as_array().cloned().unwrap_or_default();
        let one = |m: &Value| (m["name"].as_str().unwrap_or_default().to_owned(), number(&m["folded_pages"]));
        let mut members: Vec<_> = members.iter().filter(|m| m["connected"] == true).map(one).collect();
        members.sort();
        members
    }

    /// Waits until a group has these members, with at least these pages folded each.
    fn until_folded(&self, group: &str, names: &[&str], pages: u64) {
        let mut last = Vec::new();
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end {
            last = self.members(group);
            let is_so = last.iter().map(|(name, _)| name.as_str()).eq(names.iter().copied());
            if is_so && last.iter().all(|(_, folded)| *folded >= pages) {
                return;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        let shown = self.installed.show(group);
        panic!("members {names:?} of {group} with {pages} pages each: {last:?} {shown}\n{}", self.installed.log());
    }

    /// The domain of each member, as metrics have it.
    fn domains(&self) -> Vec<(String, String)> {
        let socket = self.installed.text("s/api.sock");
        let text = run("curl", &["-s", "--unix-socket", &socket, "http://pagefold/metrics"]);
        let label =
            |line: &str, key: &str| Some(line.split_once(&format!("{key}=\""))?.1.split_once('"')?.0.to_owned());
        let infos = text.lines().filter(|line| line.starts_with("pagefold_member_info"));
        let mut found: Vec<_> =
            infos.filter_map(|line| Some((label(line, "member")?, label(line, "domain")?))).collect();
        found.sort();
        found
    }
}

fn userfaultfd_minor() -> String {
    let misc = fs::read_to_string("/proc/misc").expect("list of devices");
    let line = misc.lines().find(|line| line.ends_with(" userfaultfd")).expect("a kernel with /dev/userfaultfd");
    line.split_whitespace().next().expect("a number").to_owned()
}

fn metadata(more: &str) -> String {
    format!("<pagefold:member xmlns:pagefold='urn:pagefold:domain:1' group='beta'{more}/>")
}

/// libvirt here, with the configuration that operations.md asks for.
fn start_here(host: &Host) -> Libvirt {
    fs::write("/etc/libvirt/qemu.conf", QEMU_CONF).expect("write a configuration");
    fs::write("/etc/libvirt/libvirtd.conf", DAEMON_CONF).expect("write a configuration");
    // libvirt wants to know the user that its package makes.
    for (file, line) in [("passwd", "libvirt-qemu:x:64055:64055::/:/bin/false"), ("group", "libvirt-qemu:x:64055:")] {
        let text = fs::read_to_string(format!("/etc/{file}")).expect("read it");
        fs::write(format!("/run/{file}"), format!("{text}{line}\n")).expect("write it");
        run("mount", &["--bind", &format!("/run/{file}"), &format!("/etc/{file}")]);
    }
    let mut command = Command::new("libvirtd");
    command.args(["-f", "/etc/libvirt/libvirtd.conf", "-p", &host.installed.text("libvirtd.pid")]);
    Libvirt::start(command, "/run/libvirt/libvirt-sock", &host.installed.path("libvirtd.log"))
}

/// Another libvirt on this host.
fn start_other(host: &Host) -> Libvirt {
    let [run_dir, etc] = ["other", "other-etc"].map(|name| host.installed.path(name));
    [&run_dir, &etc].into_iter().for_each(|dir: &PathBuf| fs::create_dir(dir).expect("make a directory"));
    fs::write(etc.join("qemu.conf"), QEMU_CONF).expect("write a configuration");
    fs::write(etc.join("libvirtd.conf"), DAEMON_CONF).expect("write a configuration");
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-ec", OTHER, "sh"]).args([
        &run_dir,
        &etc,
        &host.installed.path("other.pid"),
    ]);
    let socket = host.installed.text("other/libvirt-sock");
    Libvirt::start(command, &socket, &host.installed.path("other.log"))
}

#[test]
fn domains_are_members_by_their_emulator_or_their_metadata() {
    if std::env::var_os(INSIDE).is_some() {
        Host::start().inspect(follow_domains);
    } else if std::env::var_os("PAGEFOLD_LONG_TESTS").is_none() {
        eprintln!("skipped: libvirt asks each QEMU for minutes what it can do: PAGEFOLD_LONG_TESTS=1");
    } else if !cannot_run() {
        run_inside("domains_are_members_by_their_emulator_or_their_metadata");
    }
}

fn follow_domains(host: &Host) {
    let libvirt = start_here(host);
    let (emulator, qemu) = (host.installed.text("acme"), "/usr/bin/qemu-system-x86_64");
    for name in ["web1", "web2"] {
        libvirt.virsh(&["create", &host.xml(name, &emulator, "")]);
    }
    libvirt.virsh(&["create", &host.xml("db1", qemu, &metadata(""))]);
    libvirt.virsh(&["create", &host.xml("db2", qemu, &metadata(" name='second'"))]);
    libvirt.virsh(&["create", &host.xml("other", qemu, "")]);
    host.until_folded("acme", &["web1", "web2"], SAME_PAGES);
    host.until_folded("beta", &["db1", "second"], SAME_PAGES);
    let domains = [("db1", "db1"), ("second", "db2"), ("web1", "web1"), ("web2", "web2")];
    assert_eq!(host.domains(), domains.map(|(member, domain)| (member.to_owned(), domain.to_owned())));
    save_and_restore(host, &libvirt);
    let other = migrate(host, &libvirt);

    // Metadata that are changed while a domain runs.
    let asks = ["--live", "--key", "pagefold", "--set", "<member group='beta'/>"];
    libvirt.virsh(&[&["metadata", "other", "urn:pagefold:domain:1"][..], &asks].concat());
    host.until_folded("beta", &["db1", "other", "second"], SAME_PAGES);

    other.virsh(&["destroy", "web2"]);
    ["web1", "db1", "db2", "other"].iter().for_each(|name| _ = libvirt.virsh(&["destroy", name]));
    until("destroyed domains are no members", || {
        (host.members("acme").is_empty() && host.members("beta").is_empty()).then_some(())
    });
    let audit = json_of(&host.installed.pagefold(&["audit", "--json"]));
    assert_eq!(number(&audit["cross_group_frames"]), 0, "{audit}");
}

/// Saved and restored, a domain is another process, which is the same member again.
fn save_and_restore(host: &Host, libvirt: &Libvirt) {
    let saved = ["web1", "db1"].map(|name| (name, host.installed.text(&format!("{name}.saved"))));
    saved.iter().for_each(|(name, file)| _ = libvirt.virsh(&["save", name, file]));
    until("saved domains are no members", || {
        (host.members("acme").len() == 1 && host.members("beta").len() == 1).then_some(())
    });
    saved.iter().for_each(|(_, file)| _ = libvirt.virsh(&["restore", file]));
    host.until_folded("acme", &["web1", "web2"], SAME_PAGES);
    host.until_folded("beta", &["db1", "second"], SAME_PAGES);
}

/// Migrates a domain while it runs. On the other side, its emulator makes it a member again.
fn migrate(host: &Host, libvirt: &Libvirt) -> Libvirt {
    let other = start_other(host);
    let before = pid_of("web2", host);
    // QEMU's user makes the socket.
    let through = host.installed.text("migration");
    run("mkdir", &["-m", "777", &through]);
    let through = format!("unix://{through}/socket");
    libvirt.virsh(&["migrate", "--live", "--migrateuri", &through, "web2", &other.uri]);
    assert_eq!(other.domains(), ["web2"]);
    // Its name was taken while both ran.
    let pid = fs::read_to_string(host.installed.path("other/qemu/web2.pid")).expect("its process");
    assert_ne!(pid.trim(), before.to_string(), "it is another process");
    host.until_folded("acme", &["web1", &format!("web2-{}", pid.trim())], SAME_PAGES);
    other
}

fn pid_of(member: &str, host: &Host) -> Value {
    let shown = host.installed.show("acme");
    let members = shown["members"].as_array().expect("a list");
    members.iter().find(|m| m["name"] == member).expect("the member")["pid"].clone()
}

/// The driver `test` has no processes: it shows that libvirt keeps our element as operations.md has it.
#[test]
fn libvirt_keeps_metadata_of_a_domain() {
    if cannot_run() {
        return;
    }
    let dir = tempfile::tempdir().expect("a temporary directory");
    let xml = dir.path().join("web1.xml");
    let domain = format!(
        "<domain type='test'><name>web1</name><metadata>{}</metadata><memory>8192</memory><os><type>hvm</type></os></domain>",
        metadata("")
    );
    fs::write(&xml, domain).expect("write a domain");
    let script = format!("define {}; dumpxml web1", xml.display());
    let printed = run("virsh", &["-q", "-c", "test:///default", &script]);
    assert!(
        printed.contains("<pagefold:member xmlns:pagefold=\"urn:pagefold:domain:1\" group=\"beta\"/>"),
        "{printed}"
    );
}
