//! Web servers that fork their workers beforehand.

use crate::common::service::until;
use crate::rig::{Peer, Side};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};

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
    recipe: apache,
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
