//! A real Prometheus scrapes a service with members that fold. Its tools find nothing to object to, the alerts' own tests
//! pass, and every query of the dashboard returns data.

mod common;

use common::http::{Http, Target};
use common::service::{Member, Service, cannot_fold, until};
use serde_json::Value;
use std::fs::{self, File, Permissions};
use std::io::Write;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use tempfile::TempDir;

const TOKEN: &str = "reads-all-0123456789abcdef0123456789";
/// Holds 16 MiB, in which every content is there twice.
const HOLDER: &str = "import os, sys; half = os.urandom(8 << 20); both = bytearray(half + half); sys.stdin.read()";

fn packaging(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging").join(path)
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address").port()
}

/// A Prometheus that scrapes one service each second. Dropping it ends it.
struct Prometheus {
    child: Child,
    port: u16,
}

impl Prometheus {
    /// Starts one with the package's own scrape and rules, but for the place of the token, the address and the interval.
    fn start(dir: &TempDir, scraped: u16) -> Self {
        let secret = dir.path().join("secret");
        fs::write(&secret, TOKEN).expect("write the secret");
        let scrape = fs::read_to_string(packaging("prometheus/scrape.yml")).expect("the scrape");
        let scrape = scrape
            .replace("/etc/prometheus/pagefold.token", secret.to_str().expect("a plain path"))
            .replace("127.0.0.1:9469", &format!("127.0.0.1:{scraped}"));
        let rules = packaging("prometheus/pagefold.rules.yml");
        let config = format!("global: {{scrape_interval: 1s}}\nrule_files: ['{}']\n{scrape}", rules.display());
        let file = dir.path().join("prometheus.yml");
        fs::write(&file, config).expect("write the configuration");
        let port = free_port();
        let log = File::create(dir.path().join("log")).expect("a log");
        let child = Command::new("prometheus")
            .arg(format!("--config.file={}", file.display()))
            .arg(format!("--storage.tsdb.path={}", dir.path().join("data").display()))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .stderr(log)
            .spawn()
            .expect("start Prometheus");
        Self { child, port }
    }

    /// The result of a query, one line for each series.
    fn query(&self, query: &str) -> String {
        let url = format!("http://127.0.0.1:{}", self.port);
        let output =
            Command::new("promtool").args(["query", "instant", "--", &url, query]).output().expect("run promtool");
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// All queries of the dashboard, with its variables replaced.
fn queries(dashboard: &Value) -> Vec<String> {
    let mut found = Vec::new();
    match dashboard {
        Value::Object(fields) => {
            let query = fields.get("expr").and_then(Value::as_str);
            found.extend(
                query.map(|q| q.replace("$instance", ".*").replace("$group", ".*").replace("$__rate_interval", "10s")),
            );
            fields.values().for_each(|value| found.extend(queries(value)));
        }
        Value::Array(items) => items.iter().for_each(|item| found.extend(queries(item))),
        _ => {}
    }
    found
}

fn service(dir: &TempDir, port: u16) -> (Service, [Member; 2]) {
    let tokens = dir.path().join("tokens.toml");
    fs::write(&tokens, format!("[[token]]\nname = 'prometheus'\ntoken = '{TOKEN}'\n")).expect("write the tokens");
    fs::set_permissions(&tokens, Permissions::from_mode(0o600)).expect("close the tokens");
    let api = format!("[api]\ngroup = 'nogroup'\nlisten = '{port}'\ntokens = '{}'\n", tokens.display());
    let service = Service::start_with(Some(&format!("{api}[[group]]\nname = 'acme-TOKEN'\n")));
    let members =
        ["web1", "web2"].map(|name| service.run("acme", name, &["--all-anonymous"], &["python3", "-c", HOLDER]));
    (service, members)
}

/// Runs `promtool` on a text, and asserts that it finds nothing.
fn assert_clean(words: &[&str], text: &str) {
    let mut tool = Command::new("promtool");
    tool.args(words).current_dir(packaging("prometheus")).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = tool.stderr(Stdio::piped()).spawn().expect("run promtool");
    child.stdin.take().expect("a pipe").write_all(text.as_bytes()).expect("tell promtool");
    let output = child.wait_with_output().expect("hear from promtool");
    assert!(output.status.success(), "{words:?}: {output:?}");
}

#[test]
fn prometheus_scrapes_it_and_every_query_of_the_dashboard_returns_data() {
    if cannot_fold() {
        return;
    }
    if Command::new("prometheus").arg("--version").output().is_err() {
        eprintln!("skipped: there is no Prometheus: apt-get install prometheus");
        return;
    }
    let dir = tempfile::tempdir().expect("a temporary directory");
    let port = free_port();
    let (service, _members) = service(&dir, port);
    let prometheus = Prometheus::start(&dir, port);
    assert_clean(&["test", "rules", "pagefold.rules.test.yml"], "");
    assert_clean(&["check", "rules", "pagefold.rules.yml"], "");
    until(60, "both members fold", || service.show("acme")["saved_bytes"].as_i64() > Some(12 << 20));
    let metrics = Http::at(Target::Tcp(port)).with(TOKEN).get("/metrics");
    assert_clean(&["check", "metrics"], metrics.body());
    let dashboard = fs::read_to_string(packaging("grafana/pagefold.json")).expect("the dashboard");
    let queries = queries(&serde_json::from_str(&dashboard).expect("JSON"));
    assert!(queries[0].contains("pagefold_group_saved_bytes"), "net savings come first: {}", queries[0]);
    for query in &queries {
        until(60, query, || !prometheus.query(query).is_empty());
    }
    let group = service.group("acme");
    until(60, "Prometheus has what page frames say, within 1%", || {
        let of_audit = service.audit()["by_group"][0]["saved_bytes"].as_f64().expect("savings");
        let line = prometheus.query(&format!("pagefold_group_saved_bytes{{group=\"{group}\"}}"));
        let figure = line.rsplit_once("=> ").and_then(|(_, rest)| rest.split(' ').next()?.parse::<f64>().ok());
        figure.is_some_and(|saved| (saved - of_audit).abs() <= of_audit / 100.0)
    });
    let firing = prometheus.query("ALERTS{alertstate=\"firing\"}");
    assert!(firing.is_empty(), "{firing}");
}
