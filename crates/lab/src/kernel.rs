//! The kernel that guests boot: its file, its release, and its modules in loading order.

use crate::error::{Error, Result};
use crate::program;
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Directory of installed kernels on Debian.
const BOOT: &str = "/boot";

/// A bootable kernel.
#[derive(Clone, Debug)]
pub(crate) struct Kernel {
    /// Release of the kernel, as `uname -r` prints it.
    pub(crate) release: String,
    pub(crate) image: Vec<u8>,
    /// Directory of the kernel's modules.
    modules: PathBuf,
}

/// Largest kernel file that is read: 128 MiB, some ten times the size of distributions' kernels.
const MOST_BYTES: u64 = 128 << 20;

impl Kernel {
    /// Reads the kernel that was named, or the newest cloud kernel installed here.
    pub(crate) fn find(named: Option<&Path>) -> Result<Self> {
        let path = named.map_or_else(newest_installed, |path| Ok(path.to_owned()))?;
        let image = host::read_plain_file(&path, MOST_BYTES)?;
        let release = release_of(&image).ok_or_else(|| {
            Error::usage(format!("{} is not a Linux kernel for x86 (bzImage, usually called vmlinuz)", path.display()))
        })?;
        let modules = modules_beside(&path, &release);
        Ok(Self { release, image, modules })
    }

    /// The wanted modules and their dependencies as (name, content), in the order in which they must be loaded. Modules
    /// that are built into the kernel or that it does not have are left out.
    pub(crate) fn modules(&self, wanted: &[&str]) -> Result<Vec<(String, Vec<u8>)>> {
        let load = |path: &str| Ok((module_name(path).to_owned(), unpacked(&self.modules.join(path))?));
        load_order(&self.modules_dep()?, wanted).into_iter().map(load).collect()
    }

    /// Content of the kernel's `modules.dep`; empty if there is none.
    pub(crate) fn modules_dep(&self) -> Result<String> {
        let list = self.modules.join("modules.dep");
        match fs::read_to_string(&list) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(String::new()),
            text => text.map_err(|e| Error::file("read", &list, e)),
        }
    }
}

/// Directory of the kernel's modules: in the directory tree of the kernel file, if it was unpacked from a package;
/// otherwise among the installed modules.
fn modules_beside(kernel: &Path, release: &str) -> PathBuf {
    let places = kernel
        .ancestors()
        .skip(1)
        .take(6)
        .flat_map(|above| ["lib/modules", "usr/lib/modules"].map(|modules| above.join(modules).join(release)));
    let mut with_list = places.filter(|dir| dir.join("modules.dep").is_file());
    with_list.next().unwrap_or_else(|| Path::new("/lib/modules").join(release))
}

fn newest_installed() -> Result<PathBuf> {
    let names = fs::read_dir(BOOT).map_err(|e| Error::file("list", BOOT, e))?;
    let names = names.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let cloud = names.filter(|name| name.starts_with("vmlinuz-") && name.contains("-cloud-"));
    let newest = cloud.max_by_key(|name| numbers_in(name)).ok_or_else(|| {
        Error::host_lacks(
            "no cloud kernel in /boot for guests to boot: apt-get install linux-image-cloud-amd64, \
             or name one with --kernel"
                .into(),
        )
    })?;
    Ok(Path::new(BOOT).join(newest))
}

/// The numbers in a kernel's file name, by which versions are compared: `vmlinuz-6.1.0-9-cloud-amd64` -> 6, 1, 0, 9,
/// 64.
fn numbers_in(name: &str) -> Vec<u64> {
    name.split(|c: char| !c.is_ascii_digit()).filter_map(|digits| digits.parse().ok()).collect()
}

/// The release in the header of a bzImage (`kernel_version` in the kernel's `Documentation/arch/x86/boot.rst`). `None`
/// if the file is no bzImage.
fn release_of(image: &[u8]) -> Option<String> {
    if image.get(0x202..0x206)? != b"HdrS" {
        return None;
    }
    let offset = usize::from(u16::from_le_bytes(image.get(0x20e..0x210)?.try_into().ok()?)) + 0x200;
    let text = image.get(offset..)?.split(|byte| *byte == 0 || *byte == b' ').next()?;
    let release = std::str::from_utf8(text).ok()?;
    let harmless = |c: char| c.is_ascii_alphanumeric() || "+-._~".contains(c);
    (!release.is_empty() && release.len() < 65 && release.chars().all(harmless)).then(|| release.to_owned())
}

/// The name of a module, from its path: `kernel/drivers/virtio/virtio_pci.ko.xz` -> `virtio_pci`.
fn module_name(path: &str) -> &str {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split('.').next().unwrap_or(file)
}

/// Paths in `modules.dep` of the wanted modules and their dependencies, in the order in which they must be loaded. A
/// line of that file names a module and then all its dependencies, of which the last must be loaded first.
fn load_order<'a>(modules_dep: &'a str, wanted: &[&str]) -> Vec<&'a str> {
    let lines = modules_dep.lines().filter_map(|line| line.split_once(':'));
    let by_name: HashMap<&str, (&str, &str)> = lines.map(|line| (module_name(line.0), line)).collect();
    let mut order: Vec<&str> = Vec::new();
    for (path, needed) in wanted.iter().filter_map(|name| by_name.get(name)) {
        for module in needed.split_whitespace().rev().chain([*path]) {
            if !order.contains(&module) {
                order.push(module);
            }
        }
    }
    order
}

/// Content of a module's file, decompressed if need be.
fn unpacked(path: &Path) -> Result<Vec<u8>> {
    let unpacker = match path.extension().and_then(|extension| extension.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        Some("gz") => "gzip",
        _ => return fs::read(path).map_err(|e| Error::file("read", path, e)),
    };
    program::output(program::command(unpacker)?.arg("-dc").arg(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEP: &str = "\
kernel/drivers/virtio/virtio.ko: kernel/drivers/virtio/virtio_ring.ko
kernel/drivers/virtio/virtio_ring.ko:
kernel/drivers/virtio/virtio_pci_modern_dev.ko:
kernel/drivers/virtio/virtio_pci.ko.xz: kernel/drivers/virtio/virtio_pci_modern_dev.ko \
kernel/drivers/virtio/virtio.ko kernel/drivers/virtio/virtio_ring.ko
kernel/drivers/block/virtio_blk.ko: kernel/drivers/virtio/virtio.ko kernel/drivers/virtio/virtio_ring.ko
";

    #[test]
    fn modules_load_after_their_dependencies_and_only_once() {
        let order = load_order(DEP, &["virtio_pci", "no_such_module", "virtio_blk"]);
        let names: Vec<&str> = order.into_iter().map(module_name).collect();
        assert_eq!(names, ["virtio_ring", "virtio", "virtio_pci_modern_dev", "virtio_pci", "virtio_blk"]);
    }

    #[test]
    fn versions_compare_as_numbers() {
        assert!(numbers_in("vmlinuz-6.1.0-10-cloud-amd64") > numbers_in("vmlinuz-6.1.0-9-cloud-amd64"));
        assert!(numbers_in("vmlinuz-6.12.0-1-cloud-amd64") > numbers_in("vmlinuz-6.1.0-56-cloud-amd64"));
    }

    #[test]
    fn the_release_is_read_from_the_header() {
        let mut image = vec![0_u8; 0x400];
        assert_eq!(release_of(&image), None);
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x20e..0x210].copy_from_slice(&0x100_u16.to_le_bytes());
        image[0x300..0x30d].copy_from_slice(b"6.1.0-56 (deb");
        assert_eq!(release_of(&image).as_deref(), Some("6.1.0-56"));
        image[0x300..0x306].copy_from_slice(b"../../");
        assert_eq!(release_of(&image), None);
        image.truncate(0x210);
        assert_eq!(release_of(&image), None);
    }

    #[test]
    fn modules_of_the_kernels_own_tree_are_preferred() {
        let root = tempfile::tempdir().expect("a temporary directory");
        let kernel = root.path().join("boot/vmlinuz-6.0-x");
        assert_eq!(modules_beside(&kernel, "6.0-x"), Path::new("/lib/modules/6.0-x"));
        let modules = root.path().join("usr/lib/modules/6.0-x");
        fs::create_dir_all(&modules).expect("make it");
        fs::write(modules.join("modules.dep"), "").expect("write it");
        assert_eq!(modules_beside(&kernel, "6.0-x"), modules);
        assert_eq!(modules_beside(&modules.join("vmlinuz"), "6.0-x"), modules);
    }

    #[test]
    fn the_installed_kernel_is_found_with_its_modules() {
        let kernel = Kernel::find(None).expect("a cloud kernel is installed");
        assert!(newest_installed().expect("its file").ends_with(format!("vmlinuz-{}", kernel.release)));
        let modules = kernel.modules(&["virtio_pci"]).expect("its modules");
        assert!(modules.iter().all(|(_, content)| content.starts_with(b"\x7fELF")));
        assert_eq!(modules.last().map(|(name, _)| name.as_str()), Some("virtio_pci"));
    }
}
