//! The containers of the bench, and the load that they are put under.

use crate::guardian::Guardian;
use anyhow::{Context, ensure};
use cli::say;
use lab::{Cache, Guest, Idle, Image, Lab, Progress, Spec};
use serde::Serialize;
use std::path::Path;
use std::thread;
use std::time::Duration;

/// Rows of the table that the load reads and writes, in each container.
const ROWS: u32 = 20_000;
/// Time limit for containers to become idle.
const SETTLE: Duration = Duration::from_secs(60);
/// Time limit for filling the tables, and for a load beyond its own time.
const PATIENCE: Duration = Duration::from_secs(120);
/// Pause between two samples under load: 1 s.
const SAMPLE: Duration = Duration::from_secs(1);
/// Beginning of each command of sysbench.
const SYSBENCH: &str = "sysbench oltp_read_write --mysql-socket=/run/mysqld/mysqld.sock --mysql-user=bench --tables=1";

/// Running containers.
pub struct Scene {
    lab: Lab,
    mariadb: Vec<Guest>,
    apache: Vec<Guest>,
}

/// Requests that all containers have answered, a second.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Rates {
    /// Transactions of sysbench.
    pub mariadb_per_s: f64,
    /// Requests of ab.
    pub apache_per_s: f64,
}

impl Scene {
    /// Starts the containers with all memory of their processes opted in to ksmd, fills their tables, and waits until
    /// all are idle.
    ///
    /// # Errors
    /// The host lacks something, or a container does not come up.
    pub fn start(containers: u32, dir: &Path, guardian: &mut Guardian) -> anyhow::Result<Self> {
        let dir = dir.join("lab");
        guardian.keep_lab(&dir)?;
        let lab = Lab::open(&dir)?;
        act::set_memory_merge(true)
            .context("ksmd cannot be told to merge whole processes: Linux 6.4 or newer is needed")?;
        let up = [("db", Image::LxcMariadb), ("web", Image::LxcApache)].map(|(group, image)| {
            let spec = Spec { guests: containers as usize, groups: vec![group.to_owned()], ..Spec::new(image) };
            lab.up(&spec, &Cache::open(&lab::cache_dir()?)?, &|event| {
                if let Progress::Building(_) = event {
                    say!("pagefold: building the image for the containers, once");
                }
            })
        });
        let _ = act::set_memory_merge(false);
        let [mariadb, apache] = up;
        let scene = Self { lab, mariadb: mariadb?, apache: apache? };
        let prepare = format!("{SYSBENCH} --table-size={ROWS} prepare >/dev/null");
        all(&scene.mariadb, &prepare, PATIENCE, |_| Some(0.0))?;
        scene.settle()?;
        Ok(scene)
    }

    /// Names of all containers.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.mariadb.iter().chain(&self.apache).map(|guest| &*guest.name)
    }

    /// Processes of all containers, without LXC's monitors.
    pub fn pids(&self) -> Vec<u32> {
        let all = self.mariadb.iter().chain(&self.apache);
        all.flat_map(|guest| guest.pids().into_iter().filter(|pid| Some(*pid) != guest.pid)).collect()
    }

    /// LXC's monitors.
    pub fn monitors(&self) -> Vec<u32> {
        self.mariadb.iter().chain(&self.apache).filter_map(|guest| guest.pid).collect()
    }

    /// Waits until all containers are idle.
    ///
    /// # Errors
    /// The lab cannot be read.
    pub fn settle(&self) -> anyhow::Result<()> {
        if !self.lab.settle(Idle::default(), SETTLE, &|_| {})?.idle {
            say!("pagefold: the containers are not idle; going on");
        }
        Ok(())
    }

    /// Puts first all MariaDBs under load, then all Apaches, each kind for some seconds. `sample` is called once a second.
    ///
    /// # Errors
    /// A server does not answer.
    pub fn load(&self, seconds: u64, mut sample: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<Rates> {
        let sysbench = format!("{SYSBENCH} --table-size={ROWS} --threads=1 --time={seconds} run");
        let ab = format!("ab -q -c 2 -t {seconds} -n 100000000 http://127.0.0.1:8080/");
        let mut run = |guests: &[Guest], command: &str, rate: fn(&str) -> Option<f64>| {
            thread::scope(|scope| {
                let load = scope.spawn(|| all(guests, command, PATIENCE + Duration::from_secs(seconds), rate));
                while !load.is_finished() {
                    thread::sleep(SAMPLE);
                    sample()?;
                }
                load.join().map_err(|_| anyhow::anyhow!("a load broke off"))?
            })
        };
        let mariadb_per_s = run(&self.mariadb, &sysbench, |text| number(text, "transactions:", '('))?;
        let apache_per_s = run(&self.apache, &ab, |text| number(text, "Requests per second:", ':'))?;
        Ok(Rates { mariadb_per_s, apache_per_s })
    }
}

/// The number after `behind`, in the line of the text that begins with `line`.
fn number(text: &str, line: &str, behind: char) -> Option<f64> {
    let line = text.lines().find(|found| found.trim_start().starts_with(line))?;
    line.split_once(behind)?.1.split_ascii_whitespace().next()?.parse().ok()
}

/// Runs a command in all of these containers at once. Returns the sum of what `rate` finds in their outputs.
fn all(guests: &[Guest], command: &str, time: Duration, rate: fn(&str) -> Option<f64>) -> anyhow::Result<f64> {
    let one = |guest: &Guest| {
        let output = guest.exec(&["sh", "-c", command], time)?;
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        ensure!(output.status == 0, "{} in container {}: {out}{err}", command, guest.name);
        rate(&out).with_context(|| format!("{command} in container {} says something else: {out}", guest.name))
    };
    thread::scope(|scope| {
        let running: Vec<_> = guests.iter().map(|guest| scope.spawn(move || one(guest))).collect();
        running.into_iter().map(|run| run.join().map_err(|_| anyhow::anyhow!("a load broke off"))?).sum()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read() {
        let sysbench = "SQL statistics:\n    transactions:                        1234   (61.68 per sec.)\n";
        assert_eq!(number(sysbench, "transactions:", '('), Some(61.68));
        let ab = "Complete requests:      10\nRequests per second:    4321.09 [#/sec] (mean)\n";
        assert_eq!(number(ab, "Requests per second:", ':'), Some(4321.09));
        assert_eq!(number("", "transactions:", '('), None);
    }
}
