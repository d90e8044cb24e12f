//! The cache of images: each image is built once and kept.
//!
//! An image's name ends in a hash of all that it is made from. After a change of a script, a kernel or a module, a new
//! image is built beside the old one.
//!
//! A build holds a lock, so that two labs that want the same image build it once. It works in a directory of its own,
//! which is renamed when the image is complete. So an interrupted build leaves nothing that looks like an image.
//!
//! When an image is built, older ones of the same name are removed: the [`KEPT`] that were used last stay, and all that
//! were used in the last hour.

use crate::error::{Error, Result};
use rustix::fs::{FlockOperation, flock};
use std::cmp::Reverse;
use std::fs::{self, DirBuilder, File};
use std::hash::Hasher;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use twox_hash::XxHash3_64;

/// Number of images of a name that are kept.
const KEPT: usize = 6;
/// An image that was used within this time is not removed: 1 hour.
const IN_USE: Duration = Duration::from_secs(3600);

/// Hash of all that an image is made from.
#[derive(Default)]
pub(crate) struct Key(XxHash3_64);

impl Key {
    /// Adds a part of what the image is made from.
    pub(crate) fn with(mut self, content: &[u8]) -> Self {
        self.0.write(&content.len().to_le_bytes());
        self.0.write(content);
        self
    }

    fn name(&self) -> String {
        format!("{:016x}", self.0.finish())
    }
}

/// A directory of images.
#[derive(Clone, Debug)]
pub struct Cache {
    dir: PathBuf,
}

impl Cache {
    /// The cache in this directory, which is created by the first build.
    ///
    /// # Errors
    /// The path is relative and the working directory is gone.
    pub fn open(dir: &Path) -> Result<Self> {
        Ok(Self { dir: std::path::absolute(dir).map_err(|e| Error::file("find", dir, e))? })
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// The directory of an image. If there is none, `build` fills a new directory, which then becomes the image.
    pub(crate) fn image(&self, name: &str, key: &Key, build: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
        let image = self.dir.join(format!("{name}-{}", key.name()));
        if used(&image) {
            return Ok(image);
        }
        let _lock = self.lock(name)?;
        if used(&image) {
            return Ok(image);
        }
        // Only the holder of the lock builds. So if the directory exists, an interrupted build has left it.
        let building = self.dir.join(format!(".{name}.building"));
        remove_dir(&building)?;
        fs::create_dir(&building).map_err(|e| Error::file("make", &building, e))?;
        if let Err(error) = build(&building) {
            remove_dir(&building)?;
            return Err(error);
        }
        fs::rename(&building, &image).map_err(|e| Error::file("rename", &building, e))?;
        self.remove_unused(name)?;
        Ok(image)
    }

    /// Removes images of this name that have not been used for `IN_USE`, except the [`KEPT`] that were used last.
    fn remove_unused(&self, name: &str) -> Result<()> {
        let entries = fs::read_dir(&self.dir).map_err(|e| Error::file("list", &self.dir, e))?;
        let of_name = |path: &Path| {
            let key = path.file_name()?.to_str()?.strip_prefix(name)?.strip_prefix('-')?;
            (key.len() == 16).then(|| fs::metadata(path).and_then(|image| image.modified()).ok())?
        };
        let mut images: Vec<(SystemTime, PathBuf)> =
            entries.flatten().filter_map(|entry| Some((of_name(&entry.path())?, entry.path()))).collect();
        images.sort_by_key(|(used, _)| Reverse(*used));
        let unused = |used: &SystemTime| used.elapsed().is_ok_and(|age| age > IN_USE);
        images.iter().skip(KEPT).filter(|(used, _)| unused(used)).try_for_each(|(_, image)| remove_dir(image))
    }

    /// Waits for the lock of this name; dropping the file releases it.
    pub(crate) fn lock(&self, name: &str) -> Result<File> {
        let dir = &self.dir;
        DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(|e| Error::file("make", dir, e))?;
        let path = dir.join(format!("{name}.lock"));
        let file = File::options().create(true).append(true).open(&path).map_err(|e| Error::file("open", &path, e))?;
        flock(&file, FlockOperation::LockExclusive).map_err(|e| Error::file("lock", &path, e))?;
        Ok(file)
    }
}

/// Whether the image exists. If so, its modification time is set to the present, as the time of its last use.
#[expect(clippy::disallowed_methods, reason = "the file system's times are dates")]
fn used(image: &Path) -> bool {
    File::open(image).and_then(|dir| dir.set_modified(SystemTime::now())).is_ok()
}

/// Removes a directory and all in it, if it is there.
pub(crate) fn remove_dir(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::file("remove", path, e)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;
    use std::time::Duration;

    fn cache() -> (tempfile::TempDir, Cache) {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let cache = Cache::open(&dir.path().join("cache")).expect("open the cache");
        (dir, cache)
    }

    #[test]
    fn image_is_built_once_for_four_threads() {
        let (_dir, cache) = cache();
        let builds = AtomicUsize::new(0);
        let build = |dir: &Path| {
            builds.fetch_add(1, Ordering::Relaxed);
            thread::sleep(Duration::from_millis(20));
            fs::write(dir.join("disk"), b"content").map_err(|e| Error::file("write", dir, e))
        };
        let want = || cache.image("disk", &Key::default().with(b"a"), build).expect("an image");
        let images: Vec<PathBuf> = thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(want)).collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
        });
        assert_eq!(builds.load(Ordering::Relaxed), 1);
        assert!(images.iter().all(|image| *image == images[0] && image.join("disk").exists()));
    }

    #[test]
    fn different_ingredients_give_different_keys() {
        let names: Vec<String> = [Key::default(), Key::default().with(b"ab"), Key::default().with(b"a").with(b"b")]
            .iter()
            .map(Key::name)
            .collect();
        assert!(names[0] != names[1] && names[1] != names[2]);
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "the file system's times are dates")]
    fn new_image_removes_those_that_nobody_used_lately() {
        let (_dir, cache) = cache();
        let image = |name: &str, n: u8| cache.image(name, &Key::default().with(&[n]), |_| Ok(())).expect("an image");
        let old: Vec<PathBuf> = (0..10).map(|n| image("x", n)).collect();
        let other = image("x-y", 0);
        for (image, hours) in old.iter().chain([&other]).zip(2..) {
            let then = SystemTime::now() - Duration::from_secs(3600 * hours);
            File::open(image).and_then(|dir| dir.set_modified(then)).expect("an older image");
        }
        assert_eq!(image("x", 9), old[9], "the oldest is used again");
        image("x", 10);
        let kept: Vec<usize> = (0..10).filter(|&n| old[n].exists()).collect();
        assert_eq!(kept, [0, 1, 2, 3, 9]);
        assert!(other.exists());
    }

    #[test]
    fn failed_or_interrupted_build_leaves_nothing() {
        let (_dir, cache) = cache();
        let key = Key::default();
        let failed = cache.image("x", &key, |dir| Err(Error::usage(dir.display().to_string())));
        let Err(Error::Stop(cli::exit::Stop::Usage(building))) = failed else { panic!("the build's own error") };
        assert!(!Path::new(&building).exists());
        fs::create_dir(&building).expect("as a killed build leaves it");
        fs::write(Path::new(&building).join("half"), b"").expect("as a killed build leaves it");
        let image = cache.image("x", &key, |_| Ok(())).expect("an image");
        assert_eq!(fs::read_dir(image).expect("list it").count(), 0);
    }
}
