//! Loads in Debian guests, and how much work the guests do under each.
//!
//! | load | each guest | rate: sum over all guests, per second |
//! |---|---|---|
//! | `idle` | does nothing, and is asked now and then | answers in a second of waiting for them |
//! | `oltp` | MariaDB: a read and an update of random rows in a transaction | transactions |
//! | `web` | Apache: a static page to two clients | requests |
//! | `mixed` | the three in turn | each kind's |
//!
//! Rates of several kinds are kept apart. A build is no load here: the lab's guests have no compiler.

use crate::balance::{PATIENCE, on_all};
use anyhow::{Context, bail};
use cli::exit::Stop;
use lab::Guest;
use std::time::{Duration, Instant};

/// Loads that can be chosen.
pub const LOADS: [&str; 5] = ["idle", "oltp", "web", "mixed", BUILD];
/// Name of a load that is refused: the lab's guests have no compiler.
const BUILD: &str = "build";
/// Pause between two questions to an idle guest: 500 ms.
const ASKED_EVERY: Duration = Duration::from_millis(500);

/// Shell commands that make a table of 50,000 rows, 10 MiB. A commit does not wait for the disk.
const FILL: &str = "systemctl start mariadb && mariadb -e \"set global innodb_flush_log_at_trx_commit=0; create database if not exists b; \
     create table if not exists b.a (id int primary key, k int, c char(120)) engine=innodb; \
     insert ignore into b.a select seq, 0, repeat(md5(seq), 3) from seq_1_to_50000\"";
/// Shell commands that run transactions in the background until the guest ends.
const TRANSACT: &str = "setsid sh -c 'awk \"BEGIN { srand(7); for (;;) printf \\\"begin; select c from a where id=%d; \
     update a set k=k+1 where id=%d; commit;\\\\n\\\", 1+int(rand()*50000), 1+int(rand()*50000) }\" | \
     mariadb -f b' </dev/null >/dev/null 2>&1 &";
/// Shell command that prints how many transactions there were.
const COMMITS: &str =
    "mariadb -NBe \"select variable_value from information_schema.global_status where variable_name='com_commit'\"";
/// Shell commands that ask Apache for a page in the background until the guest ends.
const BROWSE: &str = "systemctl start apache2 && { setsid sh -c 'while :; do ab -q -c 2 -n 200 http://127.0.0.1/; done' \
     </dev/null >/dev/null 2>&1 & }";
/// Shell command that prints how many requests there were.
const REQUESTS: &str = "wc -l < /var/log/apache2/access.log";

/// Kinds of work, each of which has a rate of its own in `Rates`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Idle,
    Oltp,
    Web,
}

const KINDS: [Kind; 3] = [Kind::Idle, Kind::Oltp, Kind::Web];

/// A load, by its name in `LOADS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load(&'static str);

/// Work in a second, of each kind; 0 for kinds that no guest does.
pub type Rates = [f64; KINDS.len()];

impl Kind {
    const fn begin(self) -> &'static str {
        match self {
            Self::Idle => "true",
            Self::Oltp => TRANSACT,
            Self::Web => BROWSE,
        }
    }

    /// Work that one guest does in a second, on average over `during`.
    fn rate(self, guest: &Guest, during: Duration) -> anyhow::Result<f64> {
        let count = match self {
            Self::Idle => return answers_per_s(guest, during),
            Self::Oltp => COMMITS,
            Self::Web => REQUESTS,
        };
        let (first, began) = (number(guest, count)?, Instant::now());
        std::thread::sleep(during);
        let last = number(guest, count)?;
        Ok((last - first) / began.elapsed().as_secs_f64())
    }
}

impl Load {
    /// The load of this name.
    ///
    /// # Errors
    /// [`Stop::HostLacks`] for one that the lab's guests cannot have.
    pub fn named(name: &str) -> anyhow::Result<Self> {
        let found = LOADS.into_iter().find(|load| *load == name).context("no load has this name")?;
        if found == BUILD {
            let why = "the lab's guests have no compiler, so they have no build: take idle, oltp, web or mixed";
            return Err(Stop::HostLacks(why.to_owned()).into());
        }
        Ok(Self(found))
    }

    /// Name of the load.
    pub const fn name(self) -> &'static str {
        self.0
    }

    fn kind_of(self, guest: usize) -> Kind {
        match self.0 {
            "idle" => Kind::Idle,
            "oltp" => Kind::Oltp,
            "web" => Kind::Web,
            _ => KINDS[guest % KINDS.len()],
        }
    }

    /// Begins the load in all guests.
    ///
    /// # Errors
    /// A guest does not do it.
    pub fn begin(self, guests: &[Guest]) -> anyhow::Result<()> {
        let fill = |n| if self.kind_of(n) == Kind::Oltp { FILL } else { "true" };
        on_all(guests, |n| fill(n).to_owned()).context("cannot prepare the load")?;
        on_all(guests, |n| self.kind_of(n).begin().to_owned()).context("cannot begin the load")
    }

    /// Work that the guests do in a second, on average over `during`. All are measured at the same time.
    ///
    /// # Errors
    /// A guest does not tell.
    pub fn rates(self, guests: &[Guest], during: Duration) -> anyhow::Result<Rates> {
        let each: Vec<(usize, anyhow::Result<f64>)> = std::thread::scope(|scope| {
            let run = |(n, guest)| {
                let kind = self.kind_of(n);
                (
                    KINDS.iter().position(|other| *other == kind).unwrap_or(0),
                    scope.spawn(move || kind.rate(guest, during)),
                )
            };
            let running: Vec<_> = guests.iter().enumerate().map(run).collect();
            let join = |(kind, one): (usize, std::thread::ScopedJoinHandle<'_, anyhow::Result<f64>>)| {
                (kind, one.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            };
            running.into_iter().map(join).collect()
        });
        let mut rates = Rates::default();
        for (kind, rate) in each {
            rates[kind] += rate?;
        }
        Ok(rates)
    }
}

/// Number of a guest's answers, over the seconds for which the bench waited for them. The pauses between questions do
/// not count.
fn answers_per_s(guest: &Guest, during: Duration) -> anyhow::Result<f64> {
    let (began, mut answers, mut waited) = (Instant::now(), 0.0, Duration::ZERO);
    while began.elapsed() < during {
        let asked = Instant::now();
        guest.exec(&["true"], PATIENCE)?;
        (answers, waited) = (answers + 1.0, waited + asked.elapsed());
        std::thread::sleep(ASKED_EVERY);
    }
    Ok(answers / waited.as_secs_f64())
}

/// The number that a script in the guest prints.
fn number(guest: &Guest, script: &str) -> anyhow::Result<f64> {
    let output = guest.exec(&["sh", "-c", script], PATIENCE)?;
    let text = String::from_utf8_lossy(&output.stdout);
    if output.status != 0 {
        bail!("{script} in {}: {}", guest.name, String::from_utf8_lossy(&output.stderr).trim());
    }
    text.trim().parse().with_context(|| format!("{script} in {} wrote {}", guest.name, cli::printable(text.trim())))
}
