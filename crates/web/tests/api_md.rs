//! docs/api.md says what the description (OpenAPI) says: its part below the mark is made from that.
//! `PAGEFOLD_WRITE_DOCS=1 cargo test -p web --test api_md` writes it.

use serde_json::Value;
use std::fmt::Write;
use std::fs;

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/api.md");
const MARK: &str = "<!-- All below is made from the description (OpenAPI). -->\n";

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// `[ListedGroup]` for a list of these.
fn shape(schema: &Value) -> String {
    if let Some(name) = schema["$ref"].as_str() {
        return name.rsplit('/').next().unwrap_or_default().to_owned();
    }
    if schema["type"] == "array" { format!("[{}]", shape(&schema["items"])) } else { text(&schema["type"]).to_owned() }
}

fn operation(out: &mut String, method: &str, path: &str, operation: &Value) {
    let _ = writeln!(out, "\n### `{} {path}`\n\n{}.", method.to_uppercase(), text(&operation["summary"]));
    let more = text(&operation["description"]);
    if !more.is_empty() {
        let _ = writeln!(out, "{}", more.replace('\n', " "));
    }
    let body = &operation["requestBody"]["content"]["application/json"]["schema"];
    if !body.is_null() {
        let _ = writeln!(out, "\nThe body is a `{}`.", shape(body));
    }
    let _ = writeln!(out, "\n| status | body | meaning |\n|---|---|---|");
    for (status, response) in operation["responses"].as_object().expect("responses") {
        let forms = response["content"].as_object().expect("a body");
        let forms: Vec<String> = forms
            .iter()
            .map(|(kind, form)| match &**kind {
                "application/json" => format!("`{}`", shape(&form["schema"])),
                other => format!("`{other}`"),
            })
            .collect();
        let meaning = text(&response["description"]);
        let _ =
            writeln!(out, "| {status} | {} | {} |", forms.join(", "), if meaning.is_empty() { "-" } else { meaning });
    }
}

fn made(openapi: &Value) -> String {
    let mut out = String::new();
    for (path, operations) in openapi["paths"].as_object().expect("paths") {
        for (method, one) in operations.as_object().expect("operations") {
            operation(&mut out, method, path, one);
        }
    }
    out
}

#[test]
fn document_says_what_description_says() {
    let openapi: Value = serde_json::from_str(&web::description()).unwrap();
    let document = fs::read_to_string(FILE).unwrap();
    let (before, after) = document.split_once(MARK).expect("the mark");
    let made = made(&openapi);
    if std::env::var_os("PAGEFOLD_WRITE_DOCS").is_some() {
        fs::write(FILE, format!("{before}{MARK}{made}")).unwrap();
        return;
    }
    assert_eq!(after, made, "PAGEFOLD_WRITE_DOCS=1 cargo test -p web --test api_md");
}

#[test]
fn schema_of_savings_has_the_fields_of_savings() {
    let openapi: Value = serde_json::from_str(&web::description()).unwrap();
    let described = openapi["components"]["schemas"]["Savings"]["properties"].as_object().expect("a schema");
    let real = serde_json::to_value(page::Savings::default()).unwrap();
    let mut real: Vec<_> = real.as_object().unwrap().keys().collect();
    let mut described: Vec<_> = described.keys().collect();
    real.sort();
    described.sort();
    assert_eq!(described, real);
}
