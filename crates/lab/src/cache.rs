//! The cache of images: each image is built once and kept.
//!
//! An image's name ends in a hash of its ingredients. After a change of a script, a kernel or a module, another image
//! is built beside the old one.
//!
//! A build holds a lock, so that two labs that want the same image build it once. It works in a directory of its own,
//! which is renamed when the image is complete. So an interrupted build leaves nothing that looks like an image.

use crate::error::{Error, Result};
use rustix::fs::{FlockOperation, flock};
use std::fs::{self, DirBuilder, File};
use std::hash::Hasher;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use twox_hash::XxHash3_64;

/// Hash of an image's ingredients.
#[derive(Default)]
pub(crate) struct Key(XxHash3_64);

impl Key {
    /// Adds an ingredient.
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
    /// The cache in this directory. The first build creates the directory.
    ///
    /// # Errors
    /// The path is relative and the working directory is gone.
    pub fn open(dir: &Path) -> Result<Self> {
        Ok(Self { dir: std::path::absolute(dir).map_err(|e| Error::file("find", dir, e))? })
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// The directory of an image. If it is missing, `build` fills a directory that then becomes the image.
    pub(crate) fn image(&self, name: &str, key: &Key, build: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
        let image = self.dir.join(format!("{name}-{}", key.name()));
        if image.exists() {
            return Ok(image);
        }
        let _lock = self.lock(name)?;
        if image.exists() {
            return Ok(image);
        }
        // Only the holder of the lock builds, so an existing directory is the rest of an interrupted build.
        let building = self.dir.join(format!(".{name}.building"));
        remove_dir(&building)?;
        fs::create_dir(&building).map_err(|e| Error::file("make", &building, e))?;
        if let Err(error) = build(&building) {
            remove_dir(&building)?;
            return Err(error);
        }
        fs::rename(&building, &image).map_err(|e| Error::file("rename", &building, e))?;
        Ok(image)
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
