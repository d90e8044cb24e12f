//! Images of guests, built from installed programs and Debian packages.
//!
//! | image | content |
//! |---|---|
//! | `tiny` | a kernel, and an initramfs of busybox and the virtio drivers |
//! | `debian` | `tiny` with a disk that holds Debian, systemd, MariaDB and Apache |
//! | `root` | the directory tree of LXC containers |
//! | `servers` | the same with MariaDB, Apache and programs that load them |

use crate::cache::{Cache, Key, remove_dir};
use crate::cpio::Archive;
use crate::error::{Error, Result};
use crate::kernel::Kernel;
use crate::life::Mark;
use crate::program;
use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

const INIT: &str = include_str!("../recipes/init.sh");
const INITTAB: &str = include_str!("../recipes/inittab");
const AGENT: &str = include_str!("../recipes/agent.sh");
const IDENTITY_UNIT: &str = include_str!("../recipes/pagefold-identity.service");
const AGENT_UNIT: &str = include_str!("../recipes/pagefold-agent.service");
const CONTAINER_INIT: &str = include_str!("../recipes/container-init.sh");
const CONTAINER_SERVERS: &str = include_str!("../recipes/container-servers.sh");
const CONTAINER_NGINX: &str = include_str!("../recipes/container-nginx.conf");

/// Kernel modules that the initramfs gets: drivers of the disk, and of devices that further QEMU arguments may add.
const MODULES: &[&str] =
    &["virtio_pci", "virtio_blk", "virtio_balloon", "virtio_console", "virtio_mem", "virtio_net", "virtio-rng"];
const SUITE: &str = "bookworm";
const DEBIAN_PACKAGES: &str = "systemd-sysv,udev,mariadb-server,apache2";
/// File name of the helper by which a clone gets an identity of its own. Guests of `tiny` and `debian` have it in their
/// initramfs, and start it if the kernel's command line has `pagefold.identity=DEVICE`.
const HELPER: &str = "pagefold-identity";
/// Service that is masked in the `debian` image, because it searches for LVM volumes for many seconds at each boot.
const DEBIAN_MASKED: &str = "e2scrub_reap.service";
const CONTAINER_PACKAGES: &str = "cron,nginx-light";
const SERVER_PACKAGES: &str = "apache2,apache2-utils,iproute2,mariadb-server,sysbench";
/// Size of the `debian` disk: 4 GiB, in a sparse file.
const DISK_BYTES: u64 = 4 << 30;

/// Everything that building an image needs.
pub(crate) struct Workshop<'a> {
    pub(crate) cache: &'a Cache,
    /// Mark of the processes that build an image.
    pub(crate) mark: &'a Mark,
    /// Called with an image's name when it is missing and its build begins.
    pub(crate) building: &'a (dyn Fn(&str) + Sync),
}

impl Workshop<'_> {
    pub(crate) fn image(&self, name: &str, key: &Key, build: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
        self.cache.image(name, key, |dir| {
            (self.building)(name);
            build(dir)
        })
    }
}

/// The files that a VM boots from.
#[derive(Clone, Debug)]
pub(crate) struct Boot {
    pub(crate) kernel: PathBuf,
    pub(crate) initramfs: PathBuf,
    pub(crate) disk: Option<PathBuf>,
}

/// Refuses a guest whose command line asks for the helper, if the helper's program is missing: clones would wait for
/// its answers in vain.
pub(crate) fn check_helper(append: &str) -> Result<()> {
    if append.contains("pagefold.identity=") && program::beside(HELPER).is_none() {
        return Err(Error::host_lacks(format!(
            "{HELPER}, which answers in the guest, is not in ../lib/pagefold beside this program: \
             install the package pagefold, or run ./x build in its sources"
        )));
    }
    Ok(())
}

/// A kernel and its initramfs. The initramfs is the whole guest, or mounts a disk.
pub(crate) fn tiny(workshop: &Workshop, kernel: Option<&Path>) -> Result<Boot> {
    let kernel = Kernel::find(kernel)?;
    let busybox_path = program::find("busybox")?;
    let busybox = fs::read(&busybox_path).map_err(|e| Error::file("read", &busybox_path, e))?;
    if busybox.windows(9).any(|window| window == b"/ld-linux") {
        return Err(Error::host_lacks(format!(
            "{} is not static: apt-get install --no-install-recommends busybox-static",
            busybox_path.display()
        )));
    }
    let recipe = [INIT, INITTAB, AGENT, IDENTITY_UNIT, &kernel.release, &MODULES.join(" ")];
    let key = recipe.iter().fold(Key::default(), |key, part| key.with(part.as_bytes()));
    let helper = program::beside(HELPER).and_then(|path| fs::read(path).ok());
    let key = key.with(&busybox).with(&kernel.image).with(kernel.modules_dep()?.as_bytes());
    let key = key.with(helper.as_deref().unwrap_or_default());
    let dir = workshop.image("tiny", &key, |dir| {
        let archive = initramfs(&kernel, &busybox, helper.as_deref())?;
        write(&dir.join("initramfs"), &archive)?;
        write(&dir.join("vmlinuz"), &kernel.image)
    })?;
    Ok(Boot { kernel: dir.join("vmlinuz"), initramfs: dir.join("initramfs"), disk: None })
}

fn initramfs(kernel: &Kernel, busybox: &[u8], helper: Option<&[u8]>) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    for dir in ["bin", "dev", "etc", "modules", "proc", "root", "run", "sys", "tmp"] {
        archive.dir(dir);
    }
    // The kernel opens `/dev/console` for the first program, which cannot mount a `/dev` before that.
    archive.device("dev/console", (5, 1));
    archive.file("init", 0o755, INIT.as_bytes());
    archive.file("etc/inittab", 0o644, INITTAB.as_bytes());
    archive.file("bin/pagefold-agent", 0o755, AGENT.as_bytes());
    archive.file("bin/busybox", 0o755, busybox);
    archive.file("etc/pagefold-identity.service", 0o644, IDENTITY_UNIT.as_bytes());
    if let Some(helper) = helper {
        archive.file("bin/pagefold-identity", 0o755, helper);
    }
    let applets = program::output(program::command("busybox")?.arg("--list"))?;
    for applet in String::from_utf8_lossy(&applets).lines().filter(|applet| *applet != "busybox") {
        archive.link(&format!("bin/{applet}"), "busybox");
    }
    for (number, (name, content)) in kernel.modules(MODULES)?.into_iter().enumerate() {
        archive.file(&format!("modules/{number:02}-{name}.ko"), 0o644, &content);
    }
    Ok(archive.finish())
}

/// The `tiny` image with a disk of Debian. The first call needs root and about a minute.
pub(crate) fn debian(workshop: &Workshop, kernel: Option<&Path>) -> Result<Boot> {
    let recipe = [SUITE, DEBIAN_PACKAGES, DEBIAN_MASKED, AGENT, AGENT_UNIT];
    let key = recipe.iter().fold(Key::default(), |key, part| key.with(part.as_bytes()));
    let key = key.with(&DISK_BYTES.to_le_bytes());
    let dir = workshop.image("debian", &key, |dir| {
        program::need_root("building the image debian")?;
        let root = dir.join("root");
        bootstrap(DEBIAN_PACKAGES, &root, workshop.mark)?;
        configure(&root)?;
        make_disk(&root, &dir.join("disk"))?;
        remove_dir(&root)
    })?;
    Ok(Boot { disk: Some(dir.join("disk")), ..tiny(workshop, kernel)? })
}

/// Adds the agent to the root directory, and masks `DEBIAN_MASKED`.
fn configure(root: &Path) -> Result<()> {
    let units = root.join("etc/systemd/system");
    write_executable(&root.join("usr/local/sbin/pagefold-agent"), AGENT)?;
    write(&units.join("pagefold-agent.service"), AGENT_UNIT.as_bytes())?;
    let wants = units.join("multi-user.target.wants");
    fs::create_dir_all(&wants).map_err(|e| Error::file("make", &wants, e))?;
    link("/dev/null", &units.join(DEBIAN_MASKED))?;
    link("../pagefold-agent.service", &wants.join("pagefold-agent.service"))
}

fn make_disk(root: &Path, disk: &Path) -> Result<()> {
    let file = File::create(disk).map_err(|e| Error::file("create", disk, e))?;
    file.set_len(DISK_BYTES).map_err(|e| Error::file("extend", disk, e))?;
    let mut mke2fs = program::command("mke2fs")?;
    program::output(mke2fs.args(["-q", "-t", "ext4", "-J", "size=16", "-d"]).arg(root).arg(disk)).map(drop)
}

/// The directory tree of containers. The first call needs root and a few seconds.
pub(crate) fn root(workshop: &Workshop) -> Result<PathBuf> {
    let nginx = |root: &Path| write(&root.join("etc/nginx/pagefold.conf"), CONTAINER_NGINX.as_bytes());
    tree(workshop, ("root", CONTAINER_PACKAGES, CONTAINER_INIT), CONTAINER_NGINX, nginx)
}

/// The directory tree of containers with a server. The first call needs root and a minute.
pub(crate) fn servers(workshop: &Workshop) -> Result<PathBuf> {
    tree(workshop, ("servers", SERVER_PACKAGES, CONTAINER_SERVERS), "", |_| Ok(()))
}

fn tree(
    workshop: &Workshop,
    (name, packages, init): (&str, &str, &str),
    further: &str,
    add: impl FnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let recipe = [SUITE, packages, init, further];
    let key = recipe.iter().fold(Key::default(), |key, part| key.with(part.as_bytes()));
    let dir = workshop.image(name, &key, |dir| {
        program::need_root("building the image of the containers")?;
        let root = dir.join("root");
        bootstrap(packages, &root, workshop.mark)?;
        write_executable(&root.join("usr/local/sbin/pagefold-init"), init)?;
        add(&root)
    })?;
    Ok(dir.join("root"))
}

/// Unpacks and configures Debian's essential packages and `packages` into a directory.
fn bootstrap(packages: &str, root: &Path, mark: &Mark) -> Result<()> {
    let mut mmdebstrap = program::command("mmdebstrap")?;
    mmdebstrap.args(["--mode=root", "--variant=minbase", "--format=directory"]);
    // Documentation and translations are never read in a guest; without them the disk is a third smaller.
    mmdebstrap.args(["--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-exclude=/usr/share/man/*"]);
    mmdebstrap.args(["--dpkgopt=path-exclude=/usr/share/locale/*", "--aptopt=APT::Install-Recommends \"false\""]);
    mmdebstrap.arg(format!("--include={packages}")).arg(SUITE).arg(root);
    mark.put_on(&mut mmdebstrap);
    program::run(&mut mmdebstrap, &root.with_extension("log"))
}

fn write(path: &Path, content: &[u8]) -> Result<()> {
    fs::write(path, content).map_err(|e| Error::file("write", path, e))
}

fn write_executable(path: &Path, content: &str) -> Result<()> {
    write(path, content.as_bytes())?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).map_err(|e| Error::file("make executable", path, e))
}

fn link(target: &str, path: &Path) -> Result<()> {
    symlink(target, path).map_err(|e| Error::file("link", path, e))
}
