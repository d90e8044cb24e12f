//! Keys of sketches. A sketch holds HMACs of fingerprints, so it tells nothing without its group's key.
//! Sketches of two keys have nothing in common.
//!
//! | group | its key |
//! |---|---|
//! | with a file `DIR/GROUP.key` | the file's content: the same file on several hosts makes their sketches comparable |
//! | any other, and a guest by itself | made of this host's own key, `DIR/host.key`, which is random and stays here |

use anyhow::Context;
use cli::exit::Stop;
use hmac::{Hmac, KeyInit, Mac};
use page::Fingerprint;
use rustix::process::geteuid;
use sha2::Sha256;
use std::fs::{self, DirBuilder, File};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Least length of a key, in bytes.
const LEAST_BYTES: usize = 32;
/// Greatest length of a key, in bytes.
const MOST_BYTES: usize = 4096;
/// Length of a key's public name, in bytes of its hash.
const ID_BYTES: usize = 8;

/// The key of one group.
#[derive(Clone)]
pub struct Key {
    mac: Hmac<Sha256>,
    id: String,
}

impl Key {
    /// The key with this secret.
    pub fn new(secret: &[u8]) -> Self {
        let mac = Hmac::<Sha256>::new_from_slice(secret).expect("HMAC takes keys of any length");
        let name = of(&mac, b"pagefold sketch key");
        let id = name[..ID_BYTES].iter().map(|byte| format!("{byte:02x}")).collect();
        Self { mac, id }
    }

    /// A random key, which is gone with this process: its sketches can be compared only with each other.
    ///
    /// # Errors
    /// The kernel has no random numbers.
    pub fn once() -> anyhow::Result<Self> {
        Ok(Self::new(&random()?))
    }

    /// Public name of the key. Sketches with the same name can be compared.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The number that stands for a content in a sketch: the first 8 bytes of the HMAC of its fingerprint.
    pub fn hide(&self, content: Fingerprint) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = of(&self.mac, &content.0.to_le_bytes());
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }
}

/// The keys of a host, in a directory that only its owner can enter.
pub struct Keys {
    dir: PathBuf,
    own: Hmac<Sha256>,
}

impl Keys {
    /// The keys in this directory. Makes it, and the host's own key, where they are not there.
    ///
    /// # Errors
    /// Others can enter the directory, or it cannot be written.
    pub fn open(dir: &Path) -> anyhow::Result<Self> {
        make_private(dir)?;
        let path = dir.join("host.key");
        let own = match read(&path)? {
            Some(secret) => secret,
            None => make(&path)?,
        };
        let own = Hmac::<Sha256>::new_from_slice(&own).expect("HMAC takes keys of any length");
        Ok(Self { dir: dir.to_owned(), own })
    }

    /// The key of a group.
    ///
    /// # Errors
    /// The group's file is there, and cannot be used.
    pub fn of(&self, group: &str) -> anyhow::Result<Key> {
        // A guest by itself is named by its id, which has a colon.
        let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        let file = group.chars().all(is_name).then(|| self.dir.join(format!("{group}.key")));
        let secret = file.filter(|_| group != "host").map(|path| read(&path)).transpose()?.flatten();
        Ok(secret.map_or_else(|| Key::new(&of(&self.own, group.as_bytes())), |secret| Key::new(&secret)))
    }
}

/// The directory of keys if none is named. Root has the host's, any other user one in the home directory.
pub fn usual_dir() -> PathBuf {
    let home = || std::env::var_os("HOME").filter(|home| !home.is_empty()).map(PathBuf::from);
    match home() {
        Some(home) if !geteuid().is_root() => home.join(".local/state/pagefold/sketch"),
        _ => PathBuf::from("/var/lib/pagefold/sketch"),
    }
}

fn of(mac: &Hmac<Sha256>, message: &[u8]) -> [u8; 32] {
    let mut mac = mac.clone();
    mac.update(message);
    mac.finalize().into_bytes().into()
}

fn random() -> anyhow::Result<[u8; LEAST_BYTES]> {
    let mut bytes = [0; LEAST_BYTES];
    let got = rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty());
    anyhow::ensure!(got.context("the kernel has no random numbers")? == LEAST_BYTES, "too few random numbers");
    Ok(bytes)
}

/// Makes a directory that only its owner can enter, or checks that an existing one is so.
fn make_private(dir: &Path) -> anyhow::Result<()> {
    // Parent directories get the usual rights: other programs may use them.
    if let Some(above) = dir.parent() {
        fs::create_dir_all(above).with_context(|| format!("cannot make {}", above.display()))?;
    }
    match DirBuilder::new().mode(0o700).create(dir) {
        Err(e) if e.kind() != ErrorKind::AlreadyExists => {
            return Err(e).with_context(|| format!("cannot make {}", dir.display()));
        }
        _ => {}
    }
    let meta = fs::metadata(dir).with_context(|| format!("cannot look at {}", dir.display()))?;
    if meta.is_dir() && meta.uid() == geteuid().as_raw() && meta.mode() & 0o077 == 0 {
        return Ok(());
    }
    let text = format!("{} must be a directory of yours that nobody else can enter: chmod 700", dir.display());
    Err(Stop::Usage(text).into())
}

/// The key in a file that only its owner can read; `None` if there is no such file.
fn read(path: &Path) -> anyhow::Result<Option<Vec<u8>>> {
    let file =
        match File::options().read(true).custom_flags(rustix::fs::OFlags::NOFOLLOW.bits().cast_signed()).open(path) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            opened => opened.with_context(|| format!("cannot open {}", path.display()))?,
        };
    let meta = file.metadata().with_context(|| format!("cannot look at {}", path.display()))?;
    if !meta.is_file() || meta.uid() != geteuid().as_raw() || meta.mode() & 0o077 != 0 {
        let text = format!("{} must be a file of yours that nobody else can read: chmod 600", path.display());
        return Err(Stop::Usage(text).into());
    }
    let mut secret = Vec::new();
    // One byte more than a key may have shows that a file is too long. Cut short, it could be the same key as another
    // file.
    let most = MOST_BYTES as u64;
    file.take(most + 1).read_to_end(&mut secret).with_context(|| format!("cannot read {}", path.display()))?;
    if !(LEAST_BYTES..=MOST_BYTES).contains(&secret.len()) {
        let text = format!("{} must have {LEAST_BYTES} to {MOST_BYTES} bytes, as a key has", path.display());
        return Err(Stop::Usage(text).into());
    }
    Ok(Some(secret))
}

/// Makes the host's own key. If two processes do so at the same time, both get the key of one of them.
fn make(path: &Path) -> anyhow::Result<Vec<u8>> {
    let part = path.with_extension(format!("{}.part", std::process::id()));
    let secret = random()?;
    let written = || {
        let mut file = File::options().write(true).create_new(true).mode(0o600).open(&part)?;
        file.write_all(&secret)?;
        file.sync_all()?;
        match fs::hard_link(&part, path) {
            Err(e) if e.kind() != ErrorKind::AlreadyExists => Err(e),
            _ => Ok(()),
        }
    };
    let result = written();
    let _ = fs::remove_file(&part);
    result.with_context(|| format!("cannot write {}", path.display()))?;
    read(path)?.with_context(|| format!("{} is gone again", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    /// Test case 1 of RFC 4231.
    #[test]
    fn hash_is_hmac_sha256() {
        let mac = Hmac::<Sha256>::new_from_slice(&[0x0b; 20]).unwrap();
        assert_eq!(of(&mac, b"Hi There")[..8], [0xb0, 0x34, 0x4c, 0x61, 0xd8, 0xdb, 0x38, 0x53]);
    }

    #[test]
    fn only_same_file_makes_sketches_of_two_hosts_comparable() {
        let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for dir in [&one, &two] {
            fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o700)).unwrap();
            let path = dir.path().join("acme.key");
            fs::write(&path, [7; 32]).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        }
        let keys = |dir: &tempfile::TempDir, group: &str| Keys::open(dir.path()).unwrap().of(group).unwrap();
        let page = Fingerprint(1);
        assert_eq!(keys(&one, "acme").hide(page), keys(&two, "acme").hide(page));
        assert_eq!(keys(&one, "beta").id(), keys(&one, "beta").id());
        assert_ne!(keys(&one, "beta").hide(page), keys(&two, "beta").hide(page));
        assert_ne!(keys(&one, "beta").hide(page), keys(&one, "qemu:beta").hide(page));
        assert_ne!(keys(&one, "host").hide(page), keys(&one, "acme").hide(page));
    }

    #[test]
    fn key_that_others_can_read_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o750)).unwrap();
        assert!(Keys::open(dir.path()).err().unwrap().to_string().contains("chmod 700"));
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o700)).unwrap();
        let keys = Keys::open(dir.path()).unwrap();
        let path = dir.path().join("acme.key");
        fs::write(&path, [7; 32]).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        assert!(keys.of("acme").err().unwrap().to_string().contains("chmod 600"));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        for length in [31, 4097] {
            fs::write(&path, vec![7; length]).unwrap();
            assert!(keys.of("acme").err().unwrap().to_string().contains("32 to 4096 bytes"));
        }
    }
}
