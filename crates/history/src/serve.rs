//! Answers questions about figures at the service's `history.sock`, in the process that records them. The socket
//! belongs to the web side's user, and is open to root and that user alone. Each connection has one question, and
//! connections are served one after the other.

use crate::read::{OVER_HTTP, answer};
use crate::store::Store;
use anyhow::Context;
use api::history::{MOST_QUESTION_BYTES, Told, Wanted};
use api::place::Place;
use cli::exit::in_words;
use std::fs::{self, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longest wait for bytes of a question, and for a peer to read bytes of the answer: 5 s.
const PATIENCE: Duration = Duration::from_secs(5);
/// Pause after a failure to accept a connection: 200 ms.
const PAUSE: Duration = Duration::from_millis(200);

/// Listens for questions. An earlier socket is replaced.
///
/// # Errors
/// The socket cannot be made.
pub fn listen(place: &Place, reader: Option<u32>) -> anyhow::Result<UnixListener> {
    let path = place.history_socket();
    let make = || {
        let _ = fs::remove_file(&path);
        let listener = UnixListener::bind(&path)?;
        fs::set_permissions(&path, Permissions::from_mode(0o600))?;
        chown(&path, reader, None)?;
        Ok::<_, std::io::Error>(listener)
    };
    make().with_context(|| format!("cannot listen at {}", path.display()))
}

/// Answers questions from the file at `path`, for ever.
pub fn run(listener: &UnixListener, path: PathBuf, now: fn() -> i64) {
    loop {
        match listener.accept() {
            // An error of a connection concerns its peer alone.
            Ok((stream, _)) => _ = serve(stream, &path, now()),
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}

fn serve(mut stream: UnixStream, path: &Path, now: i64) -> anyhow::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut question = Vec::new();
    Read::by_ref(&mut stream).take(MOST_QUESTION_BYTES).read_to_end(&mut question)?;
    let told = match serde_json::from_slice::<Wanted>(&question) {
        Ok(wanted) => match Store::read(path).map(|store| answer(&store, &wanted, now, Some(OVER_HTTP))) {
            Ok(Ok(history)) => Told::History(history),
            Ok(Err(e)) if !e.is::<rusqlite::Error>() => Told::Refused(in_words(&e)),
            Ok(Err(e)) | Err(e) => Told::Failed(in_words(&e)),
        },
        Err(e) => Told::Refused(e.to_string()),
    };
    Ok(stream.write_all(&serde_json::to_vec(&told)?)?)
}
