//! Redis: most requests get any key, and some set one of a few keys to the value that it has.

use super::{Kind, Load, Member};
use crate::latency::client::{Client, Numbers};
use crate::latency::scene::{Scene, Server};
use crate::overhead::servers::{NAMES, fill_redis, redis_answers, redis_set, redis_words};
use anyhow::Context;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::net::UnixStream;

pub const REDIS: Kind = Kind {
    name: "redis",
    is_usual: true,
    rate: 2000,
    members: &[Member::Started, Member::Attached],
    floor: 4000,
    needs: &[("redis-server", "redis-server"), ("redis-cli", "redis-tools")],
    begin,
};

/// Share of requests that set a key, and of keys that are ever set: 1 in 10.
const ONE_IN: u64 = 10;

fn begin(scene: &Scene) -> anyhow::Result<Load> {
    let keys = scene.side.amount(60_000, 6000);
    let start = |name: &str| -> anyhow::Result<Server> {
        let socket = scene.side.path(&format!("{name}.sock"))?;
        scene.start(name, None, &redis_words(&socket), || redis_answers(&socket))
    };
    let servers = NAMES.map(start).into_iter().collect::<anyhow::Result<Vec<_>>>()?;
    fill_redis(&scene.side, keys)?;
    let pid = servers.first().context("no server")?.pid();
    let (mut numbers, rate) = (Numbers::new(), scene.rate(&REDIS));
    let request = move || match numbers.below(ONE_IN) {
        0 => redis_set(numbers.below(keys / ONE_IN)),
        _ => format!("GET key:{:012}\r\n", numbers.below(keys)),
    };
    let client = Client::asking(&scene.side.path("one.sock")?, rate, request, answer)?;
    Ok(Load { client, pid, _programs: Box::new(servers) })
}

/// Reads an answer: a value, or that one was set.
fn answer(reader: &mut BufReader<UnixStream>) -> io::Result<()> {
    let mut line = String::new();
    reader.read_line(&mut line)?;
    if line == "+OK\r\n" {
        return Ok(());
    }
    let bytes = line.strip_prefix('$').and_then(|rest| rest.trim_end().parse::<usize>().ok());
    let bytes = bytes.ok_or_else(|| io::Error::other(format!("Redis answers {line:?}")))?;
    reader.read_exact(&mut vec![0; bytes + 2])
}
