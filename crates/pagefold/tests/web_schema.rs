//! Schemathesis makes requests out of the description of the web side (OpenAPI), and compares the answers with it.
//!
//! `./x schemathesis` installs it below `target/` and runs this. Otherwise `PAGEFOLD_SCHEMATHESIS` names the program.

mod common;

use common::not_root;
use common::web::{CONTROLS_ALL, Web};
use std::process::Command;

#[test]
fn answers_are_those_that_the_description_promises() {
    if not_root() {
        return;
    }
    let Some(program) = std::env::var_os("PAGEFOLD_SCHEMATHESIS") else {
        eprintln!("skipped: PAGEFOLD_SCHEMATHESIS names no program; ./x schemathesis installs it");
        return;
    };
    let web = Web::start("control = true");
    let _member = web.member("acme", "web1");
    let common::http::Target::Tcp(port) = web.tcp.target else { panic!("no port") };
    let mut command = Command::new(program);
    command.args(["run", &format!("http://127.0.0.1:{port}/openapi.json")]);
    command.args(["--header", &format!("Authorization: Bearer {CONTROLS_ALL}")]);
    // A stream of events has no end.
    command.args([
        "--exclude-path",
        "/v1/events",
        "--exclude-path",
        "/v1/journal",
        "--phases",
        "examples,coverage,fuzzing",
        "--max-examples",
        "60",
    ]);
    command.args(["--checks", "not_a_server_error,status_code_conformance,content_type_conformance"]);
    command.args(["--checks", "response_headers_conformance,response_schema_conformance,negative_data_rejection"]);
    command.args(["--continue-on-failure", "--seed", "27", "--no-color"]);
    let output = command.current_dir(web.installed.dir.path()).output().expect("run schemathesis");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    // All the while, others were served, and the group is there.
    assert_eq!(web.unix.get("/v1/groups/acme").status, 200);
}
