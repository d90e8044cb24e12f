//! Servers that fork their workers beforehand.

use crate::common::service::until;
use crate::rig::{Peer, Side};
use serde_json::{Value, json};
use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::thread;

pub const APACHE: Peer = Peer {
    name: "apache",
    about: "Apache with mpm_prefork: workers that give up root's rights and hold data of their own, under load; all answers",
    floor: 1000,
    needs: &[
        ("/usr/sbin/apache2", "apache2-bin"),
        ("/usr/lib/apache2/modules/mod_lua.so", "apache2-bin"),
        ("ab", "apache2-utils"),
    ],
    is_short: false,
    at_once: false,
    recipe: apache,
};

pub const PHP_FPM: Peer = Peer {
    name: "php-fpm",
    about: "PHP-FPM: workers that give up root's rights and are replaced under load; requests that keep data for long",
    floor: 1000,
    needs: &[("/usr/sbin/php-fpm8.2", "php8.2-fpm"), ("cgi-fcgi", "libfcgi-bin")],
    is_short: false,
    at_once: false,
    recipe: php_fpm,
};

/// Workers that the server forks.
const WORKERS: usize = 4;
/// A page whose digest says whether a worker's data is right. Each worker makes that once, and keeps it.
const SCRIPT: &str = r#"
local rows

local function made()
    local all = {}
    for n = 1, 20000 do
        all[n] = string.rep(string.format("row %06d ", n % 997), 24)
    end
    return all
end

function handle(r)
    r.content_type = "text/plain"
    rows = rows or made()
    r:puts(#rows, " ", r:sha1(table.concat(rows)))
    return apache2.OK
end
"#;

/// A page whose request makes data, and changes it twice. With a name, it waits before each change until a file is there.
const PHP: &str = r#"<?php
function made(): array {
    $all = [];
    for ($n = 0; $n < 20000; $n++) {
        $all[] = str_repeat(sprintf("row %06d ", $n % 997), 24);
    }
    return $all;
}

function wait(string $name, int $turn): void {
    if ($name === '') {
        return;
    }
    touch("$name-$turn-" . getmypid());
    while (!file_exists("$name-$turn-over")) {
        usleep(50000);
        clearstatcache();
    }
}

$rows = made();
echo count($rows);
for ($turn = 0; $turn < 2; $turn++) {
    wait($_SERVER['QUERY_STRING'] ?? '', $turn);
    for ($n = $turn; $n < count($rows); $n += 100) {
        $rows[$n][0] = 'R';
    }
    echo ' ', sha1(implode($rows));
}
"#;

fn configuration(dir: &str, port: u16) -> String {
    let modules = ["mpm_prefork", "authz_core", "lua"];
    let modules = modules.map(|name| format!("LoadModule {name}_module /usr/lib/apache2/modules/mod_{name}.so\n"));
    format!(
        "{}ServerRoot {dir}\nDefaultRuntimeDir {dir}\nDocumentRoot {dir}\nPidFile {dir}/pid\nErrorLog {dir}/error.log\n\
         ServerName localhost\nListen 127.0.0.1:{port}\nUser www-data\nGroup www-data\n\
         StartServers {WORKERS}\nMinSpareServers {WORKERS}\nMaxSpareServers {WORKERS}\nMaxRequestWorkers {WORKERS}\n\
         LuaScope thread\nLuaMapHandler /rows {dir}/rows.lua handle\n",
        modules.concat()
    )
}

/// The page's text; `None` where there is no answer.
fn page(port: u16) -> Option<String> {
    let mut server = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).ok()?;
    server.write_all(b"GET /rows HTTP/1.0\r\n\r\n").ok()?;
    let mut answer = String::new();
    server.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    head.contains(" 200 ").then(|| body.to_owned())
}

fn apache(side: &Side) -> Value {
    let port =
        TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|socket| socket.local_addr()).expect("a port").port();
    side.file("rows.lua", SCRIPT);
    let configured = side.file("apache.conf", &configuration(side.path("").trim_end_matches('/'), port));
    // It ends with all of its process group, which must not be this program's.
    let mut server = side.start("apache", &["setsid", "/usr/sbin/apache2", "-f", &configured, "-DFOREGROUND"]);
    until(60, "Apache answers", || page(port).is_some());
    let url = format!("http://127.0.0.1:{port}/rows");
    let load = || {
        let said = side.aside(&["ab", "-q", "-n", "100", "-c", "4", &url], "");
        assert!(said.contains("Failed requests:        0") && !said.contains("Non-2xx"), "{said}");
    };
    load();
    side.rest();
    load();
    if side.is_attached {
        let members = || side.shown()["members"].as_array().map_or(0, Vec::len);
        until(120, "its workers are members", || members() > WORKERS);
    }
    side.let_go();
    load();
    let pages: Vec<String> = (0..WORKERS * 4).filter_map(|_| page(port)).collect();
    side.aside(&["kill", &server.pid().to_string()], "");
    server.end(60);
    json!({"pages": pages})
}

fn php_configuration(dir: &str) -> String {
    // Each worker ends after some requests, and another one is forked.
    format!(
        "[global]\nerror_log = {dir}/error.log\ndaemonize = no\n[rows]\nuser = www-data\ngroup = www-data\n\
         listen = {dir}/php.sock\npm = static\npm.max_children = {WORKERS}\npm.max_requests = 20\n"
    )
}

/// Asks PHP for its page as often as it has workers, at the same time. Returns all answers. With a name, requests last until
/// files are there, which `meanwhile` may make.
fn php_pages(side: &Side, name: &str, meanwhile: impl FnOnce()) -> Vec<String> {
    let variables = [format!("SCRIPT_FILENAME={}", side.path("rows.php")), format!("QUERY_STRING={name}")];
    let socket = side.path("php.sock");
    let client = ["REQUEST_METHOD=GET", "cgi-fcgi", "-bind", "-connect", &socket];
    let ask = || side.aside(&[&["env", &variables[0], &variables[1]], &client[..]].concat(), "");
    thread::scope(|scope| {
        let asking: Vec<_> = (0..WORKERS).map(|_| scope.spawn(ask)).collect();
        meanwhile();
        asking.into_iter().map(|one| one.join().expect("an answer")).collect()
    })
}

fn php_fpm(side: &Side) -> Value {
    side.file("rows.php", PHP);
    let configured = side.file("php-fpm.conf", &php_configuration(side.path("").trim_end_matches('/')));
    let mut server = side.start("php-fpm", &["setsid", "/usr/sbin/php-fpm8.2", "-F", "-y", &configured]);
    until(60, "PHP-FPM listens", || fs::exists(side.path("php.sock")).is_ok_and(|there| there));
    let load = || (0..25).flat_map(|_| php_pages(side, "", || ())).collect::<Vec<_>>();
    let mut pages = load();
    let hold = side.path("hold");
    let held = |turn: u32| {
        until(60, "all requests hold their data", || {
            let names = fs::read_dir(side.dir).expect("a directory").flatten().map(|entry| entry.file_name());
            names.filter(|name| name.to_string_lossy().starts_with(&format!("hold-{turn}-"))).count() >= WORKERS
        });
    };
    pages.extend(php_pages(side, &hold, || {
        held(0);
        side.rest();
        if side.is_attached {
            let members = || side.shown()["members"].as_array().map_or(0, Vec::len);
            until(120, "its workers are members", || members() > WORKERS);
        }
        side.file("hold-0-over", "");
        held(1);
        side.let_go();
        side.file("hold-1-over", "");
    }));
    pages.extend(load());
    side.aside(&["kill", &server.pid().to_string()], "");
    server.end(60);
    json!({"pages": pages})
}
