//! Kernels of other Debian suites than the host's, for guests to boot.
//!
//! Packages come from the mirror in apt's configuration, under apt's own checks: the index is signed, and holds the
//! packages' hashes. They are unpacked into a directory of the cache; nothing is installed.

use crate::cache::{Cache, Key};
use crate::error::{Error, Result};
use crate::program;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
const PACKAGE: &str = "linux-image-cloud-amd64";

/// Path of the cloud kernel of a Debian suite (`bullseye`, `trixie`, `sid`, ...), with its modules beside it. It is
/// fetched if the cache does not have it.
///
/// # Errors
/// It is not the name of a suite, apt is missing, or the mirror does not answer or does not have the kernel.
pub fn kernel_of_suite(cache: &Cache, suite: &str) -> Result<PathBuf> {
    let is_name = |c: char| c.is_ascii_lowercase() || c == '-' || c.is_ascii_digit();
    if suite.is_empty() || !suite.chars().all(is_name) {
        return Err(Error::usage(format!("{suite:?} is no Debian suite: bullseye, bookworm, trixie and sid are")));
    }
    let key = Key::default().with(suite.as_bytes()).with(PACKAGE.as_bytes());
    let image = cache.image(&format!("kernel-{suite}"), &key, |dir| fetch(suite, dir))?;
    vmlinuz(&image.join("root"))
}

/// Runs apt with lists, status and cache of its own, in a directory.
struct Apt<'a> {
    dir: &'a Path,
}

impl Apt<'_> {
    fn command(&self, name: &str) -> Result<Command> {
        let mut command = program::command(name)?;
        let mut option = |name: &str, value: &str| {
            command.args(["-o", &format!("{name}={value}")]);
        };
        let path = |name: &str| self.dir.join(name).to_string_lossy().into_owned();
        option("Dir::Etc::sourcelist", &path("sources.list"));
        option("Dir::Etc::sourceparts", "/dev/null");
        option("Dir::Etc::preferencesparts", "/dev/null");
        option("Dir::State::lists", &path("lists"));
        option("Dir::State::status", &path("status"));
        option("Dir::Cache", &path("cache"));
        option("Acquire::Languages", "none");
        option("Acquire::IndexTargets::deb::DEP-11::DefaultEnabled", "false");
        // Otherwise apt complains that its own user cannot read a private directory.
        option("APT::Sandbox::User", "root");
        command.current_dir(self.dir);
        Ok(command)
    }

    fn depends(&self, package: &str) -> Result<Vec<String>> {
        let text = program::output(self.command("apt-cache")?.args(["depends", "-i", package]))?;
        let text = String::from_utf8_lossy(&text).into_owned();
        let names = text.lines().filter_map(|line| line.trim().rsplit_once("Depends: "));
        Ok(names.map(|(_, name)| name.to_owned()).collect())
    }
}

fn fetch(suite: &str, dir: &Path) -> Result<()> {
    let apt = Apt { dir };
    for name in ["lists/partial", "cache/archives/partial", "root"] {
        let made = dir.join(name);
        fs::create_dir_all(&made).map_err(|e| Error::file("make", made, e))?;
    }
    let write = |name: &str, text: &str| fs::write(dir.join(name), text).map_err(|e| Error::file("write", name, e));
    write("status", "")?;
    write("sources.list", &format!("deb [signed-by={KEYRING}] {} {suite} main\n", mirror()?))?;
    program::output(apt.command("apt-get")?.args(["update", "-qq", "--error-on=any"]))?;
    let is_kernel = |name: &String| {
        ["linux-image-", "linux-binary-", "linux-modules-"].iter().any(|prefix| name.starts_with(prefix))
    };
    let missing = || Error::host_lacks(format!("the mirror has no {PACKAGE} for {suite}"));
    let kernel = apt.depends(PACKAGE)?.into_iter().find(is_kernel).ok_or_else(missing)?;
    let mut packages: Vec<String> = apt.depends(&kernel)?.into_iter().filter(is_kernel).collect();
    packages.push(kernel);
    program::output(apt.command("apt-get")?.args(["download", "-qq"]).args(&packages))?;
    for entry in fs::read_dir(dir).map_err(|e| Error::file("list", dir, e))? {
        let path = entry.map_err(|e| Error::file("list", dir, e))?.path();
        if path.extension().is_some_and(|extension| extension == "deb") {
            program::output(program::command("dpkg-deb")?.arg("-x").arg(&path).arg(dir.join("root")))?;
            fs::remove_file(&path).map_err(|e| Error::file("remove", path, e))?;
        }
    }
    for name in ["lists", "cache"] {
        crate::cache::remove_dir(&dir.join(name))?;
    }
    index_modules(&dir.join("root"))
}

/// URI of the mirror of Debian's archive in the host's apt configuration.
fn mirror() -> Result<String> {
    let mut targets = program::command("apt-get")?;
    let text = program::output(targets.args(["indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]))?;
    let text = String::from_utf8_lossy(&text).into_owned();
    let debian = text.lines().find(|uri| uri.trim_end_matches('/').ends_with("/debian"));
    debian.map(str::to_owned).ok_or_else(|| Error::host_lacks("apt knows no mirror of Debian here".to_owned()))
}

/// Directories of packages that may contain `lib/modules`: Debian 13 merged `/lib` into `/usr`.
const PREFIXES: [&str; 2] = ["", "usr"];

/// Writes `modules.dep`, which packages do not contain: the installation of a package writes it.
fn index_modules(root: &Path) -> Result<()> {
    for base in PREFIXES.map(|prefix| root.join(prefix)) {
        let Ok(releases) = fs::read_dir(base.join("lib/modules")) else { continue };
        for release in releases.filter_map(|entry| entry.ok()?.file_name().into_string().ok()) {
            program::output(program::command("depmod")?.arg("-b").arg(&base).arg(release))?;
        }
    }
    Ok(())
}

fn vmlinuz(root: &Path) -> Result<PathBuf> {
    let mut dirs = vec![root.join("boot")];
    for base in PREFIXES.map(|prefix| root.join(prefix).join("lib/modules")) {
        dirs.extend(fs::read_dir(base).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path())));
    }
    let files = dirs.iter().flat_map(|dir| fs::read_dir(dir).into_iter().flatten());
    let mut paths = files.filter_map(|entry| Some(entry.ok()?.path()));
    let is_kernel = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz"));
    paths
        .find(is_kernel)
        .ok_or_else(|| Error::host_lacks(format!("the package had no kernel: remove {} and try again", root.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_that_names_no_suite_is_refused() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let cache = Cache::open(dir.path()).expect("a path");
        for bad in ["", "../x", "sid main http://x", "Sid"] {
            assert!(matches!(kernel_of_suite(&cache, bad), Err(Error::Stop(cli::exit::Stop::Usage(_)))), "{bad:?}");
        }
    }

    #[test]
    fn kernel_is_found_in_boot_and_in_modules() {
        for place in ["boot/vmlinuz-6.1.0", "usr/lib/modules/7.2.0/vmlinuz"] {
            let root = tempfile::tempdir().expect("a temporary directory");
            let file = root.path().join(place);
            fs::create_dir_all(file.parent().expect("a parent")).expect("make it");
            fs::write(&file, "x").expect("write it");
            assert_eq!(vmlinuz(root.path()).expect("a kernel"), file);
        }
    }
}
