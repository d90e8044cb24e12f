//! A program that sleeps until the next millisecond, again and again, and tells how late it woke.

use super::{Kind, Load, Member, guest_ticker};
use crate::compiled::compiled;
use crate::latency::client::Client;
use crate::latency::samples::Samples;
use crate::latency::scene::{Scene, Server};
use crate::overhead::servers::NAMES;
use anyhow::Context;
use std::cell::OnceCell;
use std::io::{BufReader, Read};
use std::os::unix::net::{UnixListener, UnixStream};

pub const TICKER: Kind = Kind {
    name: "ticker",
    is_usual: true,
    rate: 1000,
    members: &[Member::Started, Member::Attached, Member::Guest],
    floor: 4000,
    needs: &[("cc", "gcc")],
    begin,
};

/// Source of the ticker, in C.
pub const SOURCE: &str = include_str!("ticker.c");
/// Bytes that the ticker writes for each tick: when it was due, and how long it took.
pub const TICK_BYTES: usize = 16;

fn begin(scene: &Scene) -> anyhow::Result<Load> {
    if scene.member == Member::Guest {
        return guest_ticker::begin(scene);
    }
    let program = compiled(scene.dir, "ticker", SOURCE, &[])?;
    let program = program.to_str().context("a path that is not UTF-8")?;
    let mib = scene.side.amount(32, 8).to_string();
    let start = |name: &str| -> anyhow::Result<(Server, UnixStream)> {
        let socket = scene.side.path(&format!("{name}-ticker.sock"))?;
        let (listener, ticks) = (UnixListener::bind(&socket).context("cannot listen")?, OnceCell::new());
        listener.set_nonblocking(true)?;
        let is_there = || listener.accept().is_ok_and(|(stream, _)| ticks.set(stream).is_ok());
        let server = scene.start(&format!("{name}-ticker"), None, &[program, &mib, "0", &socket], is_there)?;
        let ticks = ticks.into_inner().context("no ticker has connected")?;
        ticks.set_nonblocking(false)?;
        Ok((server, ticks))
    };
    let (servers, mut streams): (Vec<_>, Vec<_>) =
        NAMES.map(start).into_iter().collect::<anyhow::Result<Vec<_>>>()?.into_iter().unzip();
    // Both tickers run; the second one's ticks are read and not kept.
    let (first, other) = (streams.remove(0), streams.remove(0));
    let mut client = Client::default();
    for stream in [&first, &other] {
        client.keep(stream)?;
    }
    client.go(move |samples| listen(&first, Some(samples)))?;
    client.go(move |_| listen(&other, None))?;
    let pid = servers.first().context("no ticker")?.pid();
    Ok(Load { client, pid, _programs: Box::new(servers) })
}

/// Reads the ticks of a ticker until it ends, and keeps them in `samples`, if given.
fn listen(stream: &UnixStream, samples: Option<&Samples>) -> anyhow::Result<()> {
    let (mut reader, mut tick) = (BufReader::new(stream), [0; TICK_BYTES]);
    loop {
        reader.read_exact(&mut tick).context("the ticker has ended")?;
        let (due_ns, took_ns) = numbers(tick);
        if let Some(samples) = samples {
            samples.add(due_ns, took_ns);
        }
    }
}

/// From the bytes of a tick, in nanoseconds: when it was due, and how long it took.
pub fn numbers(tick: [u8; TICK_BYTES]) -> (u64, u64) {
    let both = u128::from_le_bytes(tick);
    (both as u64, (both >> 64) as u64)
}
