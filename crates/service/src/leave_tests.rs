//! A member that is asked to make all of its pages private, and whose worker cannot be told.

use super::*;
use crate::config::Config;
use crate::room::Memory;
use crate::state::State;
use api::place::Place;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};

/// A Python program that maps 1 MiB of a file with the name of the pool of group `acme`, until its standard input ends.
const MAPS: &str = "import mmap, os, sys
f = os.memfd_create('pagefold-acme'); os.ftruncate(f, 1 << 20)
m = mmap.mmap(f, 1 << 20, mmap.MAP_PRIVATE)
print('.', end='', flush=True); sys.stdin.read()";

/// A regression test: the promise was not taken back, and kept its memory from other groups until its time was over.
#[test]
fn promise_is_taken_back_where_the_worker_cannot_be_told() {
    let mut command = Command::new("python3");
    let mut child = command.args(["-c", MAPS]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    let id = ProcessId::of(child.id()).unwrap();
    let mut registry = Registry::new(Place::at(Path::new("/nonexistent")), Config::default(), State::default());
    registry.group("acme");
    registry.state.add(crate::state::member("acme", "a", id)).unwrap();
    let (theirs, ours) = Seqpacket::pair().unwrap();
    let mut client = Client::new(ours, Some(0)).unwrap();
    client.peer.uid = 0;
    let ask = Ask::MayLeave { pid: id.pid, started: id.start_ticks, for_good: true };
    Request { registry: &mut registry, client: &mut client }.hear(ask);
    client.flush();
    let (mut buffer, mut files) = (vec![0; 1 << 16], Vec::new());
    let heard = theirs.receive(&mut buffer, &mut files).unwrap();
    let host::Received::Frame(bytes) = heard else { panic!("{heard:?}") };
    let answer = String::from_utf8_lossy(&buffer[..bytes]).into_owned();
    assert!(answer.contains("the worker of group acme cannot be told"), "{answer}");
    let memory = Memory { available: 1 << 20, reserve: 0 };
    assert_eq!(registry.room.promise_all("other", 1 << 20, memory, Instant::now()), Ok(()));
    drop(child.stdin.take());
    child.wait().unwrap();
}
