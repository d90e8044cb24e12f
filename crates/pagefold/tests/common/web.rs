//! A service with a web side, and tokens for it.

use super::http::{Http, Target};
use super::supervised::{Fake, Installed, Supervisor, signal, wait_for};
use std::fs::{self, Permissions};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;

pub const READS_ALL: &str = "reads-all-0123456789abcdef0123456789";
pub const CONTROLS_ALL: &str = "controls-all-0123456789abcdef0123456";
pub const READS_ACME: &str = "reads-acme-0123456789abcdef012345678";
pub const CONTROLS_ACME: &str = "controls-acme-0123456789abcdef01234";

/// A service with a web side.
pub struct Web {
    pub installed: Installed,
    pub supervisor: Supervisor,
    pub unix: Http,
    pub tcp: Http,
    pub config: String,
}

impl Web {
    /// Groups `acme` and `beta`, and these lines in `[api]`.
    pub fn start(api: &str) -> Self {
        let installed = Installed::new();
        let tokens = installed.path("tokens.toml");
        fs::write(&tokens, tokens_text()).expect("write the tokens");
        fs::set_permissions(&tokens, Permissions::from_mode(0o600)).expect("close the tokens");
        // Nobody else takes a port that was just free, as the kernel gives out others first.
        let port = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("a port").port();
        let api = format!("[api]\nlisten = '{port}'\ntokens = '{}'\ngroup = 'nogroup'\n{api}\n", tokens.display());
        let config = format!("{api}[[group]]\nname = 'acme'\n");
        let supervisor = installed.serve(&format!("{config}[[group]]\nname = 'beta'\n"), &[]);
        let unix = Http::at(Target::Unix(installed.path("s/api.sock")));
        let web = Self { installed, supervisor, unix, tcp: Http::at(Target::Tcp(port)), config };
        web.wait_until_it_answers();
        web
    }

    pub fn wait_until_it_answers(&self) {
        wait_for("the web side answers", || self.unix.try_request("GET", "/v1/groups", "", "").ok());
    }

    /// The web side's process and user.
    pub fn process(&self) -> (u32, u32) {
        let log = self.installed.log();
        let line = log.lines().rfind(|line| line.contains("web side started")).expect("it was started");
        let mut numbers = line.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok());
        (numbers.next().expect("a process"), numbers.next().expect("a user"))
    }

    pub fn reload(&self, config: &str) {
        let lines = || self.installed.log().matches("the configuration is read again").count();
        let before = lines();
        fs::write(self.installed.path("config.toml"), config).expect("write the configuration");
        signal(self.supervisor.0.id(), "HUP");
        wait_for("the configuration is read again", || (lines() > before).then_some(()));
    }

    pub fn member(&self, group: &str, name: &str) -> Fake {
        let mut member = self.installed.member(group, name);
        assert!(member.connects(&self.installed), "{}", self.installed.log());
        member
    }
}

pub fn tokens_text() -> String {
    let token =
        |name: &str, token: &str, more: &str| format!("[[token]]\nname = '{name}'\ntoken = '{token}'\n{more}\n");
    token("reads-all", READS_ALL, "")
        + &token("controls-all", CONTROLS_ALL, "rights = 'control'")
        + &token("reads-acme", READS_ACME, "groups = ['acme']")
        + &token("controls-acme", CONTROLS_ACME, "rights = 'control'\ngroups = ['acme']")
}
