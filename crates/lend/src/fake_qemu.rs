//! A guest for tests. This process answers by QMP in place of its QEMU, one client at a time.

use guest::{Guest, GuestKind, QemuFacts};
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A size that the guest was told.
#[derive(Clone, Debug)]
pub(crate) struct Told {
    pub size_bytes: u64,
    pub at: Instant,
    /// Journal and ledger at this time.
    pub written: String,
}

/// A guest as its QEMU has it.
#[derive(Debug)]
pub(crate) struct State {
    /// Its size before it was told another one.
    pub size_bytes: u64,
    /// Time that its balloon takes for a change of size; `None`: its size never changes.
    pub takes: Option<Duration>,
    pub told: Vec<Told>,
    /// Sizes of memory that was plugged in.
    pub dimms: Vec<u64>,
    /// As `query-status` has it.
    pub status: &'static str,
    /// As `query-migrate` has it.
    pub migration: &'static str,
    /// The QMP command that fails. `stop` takes effect nevertheless.
    pub fails: &'static str,
    /// When `cont` was heard last.
    pub cont_at: Option<Instant>,
}

/// A guest with a balloon.
pub(crate) struct FakeQemu {
    pub guest: Guest,
    state: Arc<Mutex<State>>,
    _socket: tempfile::TempDir,
}

impl FakeQemu {
    /// A guest that runs. It does as it is told at once. `ledger` is the directory of journal and ledger.
    pub fn start(name: &str, ram_bytes: u64, ledger: &Path) -> Self {
        let socket = tempfile::tempdir().expect("a temporary directory");
        let path = socket.path().join("qmp");
        let listener = UnixListener::bind(&path).expect("listen");
        let state = Arc::new(Mutex::new(State {
            size_bytes: ram_bytes,
            takes: Some(Duration::ZERO),
            told: Vec::new(),
            dimms: Vec::new(),
            status: "running",
            migration: "none",
            fails: "",
            cont_at: None,
        }));
        let (shared, ledger) = (Arc::clone(&state), ledger.to_owned());
        std::thread::spawn(move || {
            for client in listener.incoming() {
                // The client may hang up at any time.
                let _ = client.and_then(|client| serve(client, &shared, &ledger));
            }
        });
        let facts = guest::Facts { qemu: Some(qemu_facts(path)), ..guest::Facts::default() };
        let guest = Guest {
            id: format!("qemu:{name}"),
            name: name.into(),
            kind: GuestKind::Qemu,
            pids: vec![std::process::id()],
            group: "g".into(),
            ram_bytes: Some(ram_bytes),
            facts,
        };
        Self { guest, state, _socket: socket }
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The pid of a process that has ended.
pub(crate) fn ended_pid() -> u32 {
    let mut child = std::process::Command::new("true").spawn().expect("run true");
    child.wait().expect("its end");
    child.id()
}

fn qemu_facts(socket: PathBuf) -> QemuFacts {
    let qmp_socket = Some(socket.to_str().expect("a path in UTF-8").to_owned());
    QemuFacts { qmp_socket, balloon: true, ..QemuFacts::default() }
}

fn serve(client: UnixStream, state: &Mutex<State>, ledger: &Path) -> std::io::Result<()> {
    let mut answers = client.try_clone()?;
    writeln!(answers, "{}", json!({"QMP": {}}))?;
    for line in BufReader::new(client).lines() {
        let command: Value = serde_json::from_str(&line?)?;
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        writeln!(answers, "{}", state.obey(&command, ledger))?;
    }
    Ok(())
}

impl State {
    fn obey(&mut self, command: &Value, ledger: &Path) -> Value {
        let name = command["execute"].as_str().unwrap_or_default();
        let result = match name {
            "qom-list" => json!([]),
            "query-balloon" => json!({"actual": self.size()}),
            "balloon" => {
                self.size_bytes = self.size();
                let size_bytes = command["arguments"]["value"].as_u64().expect("a size");
                let read = |name: &str| fs::read_to_string(ledger.join(name)).unwrap_or_default();
                let written = read("journal/journal") + &read("balance.json");
                self.told.push(Told { size_bytes, at: Instant::now(), written });
                json!({})
            }
            "query-memory-devices" => {
                self.dimms.iter().map(|bytes| json!({"type": "dimm", "data": {"size": bytes}})).collect()
            }
            "query-status" => json!({"status": self.status}),
            "query-migrate" => json!({"status": self.migration}),
            "migrate_cancel" => {
                self.migration = "cancelled";
                json!({})
            }
            "stop" => {
                self.status = "paused";
                json!({})
            }
            "cont" if self.fails != name => {
                self.cont_at = Some(Instant::now());
                self.status = "running";
                json!({})
            }
            _ => json!({}),
        };
        if self.fails == name { json!({"error": {"desc": "not now"}}) } else { json!({"return": result}) }
    }

    /// Its size at the moment: the last one told, once its balloon has had the time for it.
    fn size(&self) -> u64 {
        let last = self.told.last().filter(|told| self.takes.is_some_and(|takes| told.at.elapsed() >= takes));
        last.map_or(self.size_bytes, |told| told.size_bytes)
    }
}
