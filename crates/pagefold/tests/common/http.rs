//! Requests to the web side, byte by byte.

use serde_json::Value;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

/// A place to send requests to.
#[derive(Clone, Debug)]
pub enum Target {
    Unix(PathBuf),
    Tcp(u16),
}

/// A connection.
pub trait Stream: Read + Write + Send {}

impl<T: Read + Write + Send> Stream for T {}

/// A client, which makes a connection for each request.
#[derive(Clone, Debug)]
pub struct Http {
    pub target: Target,
    pub token: Option<String>,
}

/// An answer.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    /// All of it, byte by byte.
    pub text: String,
}

impl Reply {
    pub fn body(&self) -> &str {
        self.text.split_once("\r\n\r\n").expect("a body").1
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        let head = self.text.split_once("\r\n\r\n").expect("a head").0;
        let mut headers = head.lines().filter_map(|line| line.split_once(": "));
        headers.find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value)
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(self.body()).unwrap_or_else(|e| panic!("{e}: {}", self.text))
    }
}

impl Http {
    pub fn at(target: Target) -> Self {
        Self { target, token: None }
    }

    pub fn with(&self, token: &str) -> Self {
        Self { token: Some(token.to_owned()), ..self.clone() }
    }

    pub fn connect(&self) -> std::io::Result<Box<dyn Stream>> {
        let patience = Some(Duration::from_secs(60));
        Ok(match &self.target {
            Target::Unix(path) => {
                let stream = UnixStream::connect(path)?;
                stream.set_read_timeout(patience)?;
                Box::new(stream)
            }
            Target::Tcp(port) => {
                let stream = TcpStream::connect(("127.0.0.1", *port))?;
                stream.set_read_timeout(patience)?;
                Box::new(stream)
            }
        })
    }

    /// The head of a request; `more` are lines of it.
    pub fn head(&self, method: &str, path: &str, more: &str) -> String {
        let token = self.token.as_ref().map_or(String::new(), |token| format!("Authorization: Bearer {token}\r\n"));
        format!("{method} {path} HTTP/1.1\r\nHost: pagefold\r\n{token}{more}")
    }

    pub fn try_request(&self, method: &str, path: &str, more: &str, body: &str) -> std::io::Result<Reply> {
        let mut stream = self.connect()?;
        let length = if body.is_empty() { String::new() } else { format!("Content-Length: {}\r\n", body.len()) };
        let head = self.head(method, path, &format!("{more}{length}Connection: close\r\n\r\n"));
        stream.write_all((head + body).as_bytes())?;
        let mut text = Vec::new();
        stream.read_to_end(&mut text)?;
        let text = String::from_utf8(text).map_err(std::io::Error::other)?;
        let status = text.get(9..12).and_then(|status| status.parse().ok());
        Ok(Reply { status: status.ok_or_else(|| std::io::Error::other("no answer"))?, text })
    }

    pub fn get(&self, path: &str) -> Reply {
        self.try_request("GET", path, "", "").unwrap_or_else(|e| panic!("GET {path}: {e}"))
    }

    pub fn patch(&self, path: &str, body: &str) -> Reply {
        let json = "Content-Type: application/json\r\n";
        self.try_request("PATCH", path, json, body).unwrap_or_else(|e| panic!("PATCH {path}: {e}"))
    }
}

/// A stream of events.
pub struct Events {
    stream: Box<dyn Stream>,
    /// All that was read, without the head.
    pub text: String,
}

impl Events {
    pub fn open(http: &Http) -> Self {
        let mut stream = http.connect().expect("connect");
        stream.write_all(http.head("GET", "/v1/events", "\r\n").as_bytes()).expect("ask");
        let mut events = Self { stream, text: String::new() };
        let head = events.read_until("\r\n\r\n");
        assert!(head.starts_with("HTTP/1.1 200") && head.contains("text/event-stream"), "{head}");
        events.text = head.split_once("\r\n\r\n").expect("a head").1.to_owned();
        events
    }

    /// Reads until this has come. Returns all that was read.
    pub fn read_until(&mut self, wanted: &str) -> String {
        let mut bytes = [0; 4096];
        while !self.text.contains(wanted) {
            let read = self.stream.read(&mut bytes).unwrap_or_else(|e| panic!("{e}: no {wanted} in {}", self.text));
            assert_ne!(read, 0, "the stream ended without {wanted}: {}", self.text);
            self.text += str::from_utf8(&bytes[..read]).expect("text");
        }
        self.text.clone()
    }
}
