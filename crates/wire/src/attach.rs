//! The protocol between an agent that was put into a running process, and the program that put it there.
//!
//! ```text
//!   agent                                                  pagefold-attach
//!     | Halt {n, threads of the agent's} ------------------> |  stops all other threads, or cannot
//!     | <------------------------------- Halted {n}, NotNow {n}
//!     | Go ------------------------------------------------> |  lets them go on
//!     | Connect {server}, and one end of a socket -----------> |  hands the end on to the service
//!     | <-------------------------------------------- Leave  |
//!     | Threads, Left {ranges} ----------------------------> |  unmaps these ranges, when the agent's threads have ended
//! ```
//!
//! Each message is one datagram: a letter, and numbers of eight bytes.
//!
//! The agent cannot connect by itself: the service's sockets may not be there in its mount namespace. It makes both ends
//! of a socket, so that the kernel notes its process at the end that the service gets. The first frame to it is
//! [`USERFAULTS`], with the device that makes userfaultfds if there is one: not every process may make them by itself.

use page::PageRange;

/// Longest message, in bytes.
pub const ATTACH_BYTES: usize = 1 + 8 * MOST;
/// Most numbers in a message.
const MOST: usize = 64;

/// The first frame to the agent.
pub const USERFAULTS: [u8; 1] = *b"u";

/// The process of a service that a connection is for. The letter is that of a frame which hands one on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Server {
    /// The supervisor, which hands it on to the group's worker.
    Worker,
    /// The prover.
    Prover,
}

impl Server {
    /// The frame that hands a connection on to the supervisor.
    pub const fn frame(self) -> [u8; 1] {
        match self {
            Self::Worker => *b"a",
            Self::Prover => *b"p",
        }
    }

    /// The server that such a frame is for.
    pub fn of(frame: &[u8]) -> Option<Self> {
        [Self::Worker, Self::Prover].into_iter().find(|server| server.frame() == frame)
    }
}

/// From the agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FromAttached {
    /// Stop all threads of the process but these.
    Halt {
        /// Number of the request.
        number: u64,
        /// The agent's own threads.
        threads: Vec<u64>,
    },
    /// These are the agent's own threads.
    Threads(Vec<u64>),
    /// Let them go on.
    Go,
    /// Hand the socket that comes with it on.
    Connect(Server),
    /// All is as it was before the agent came, but for these mappings, which its threads stand on. They end now.
    Left(Vec<PageRange>),
}

/// To the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToAttached {
    /// The threads are stopped.
    Halted(u64),
    /// They cannot be stopped at the moment, and run.
    NotNow(u64),
    /// Undo everything, and end.
    Leave,
}

fn encode(letter: u8, numbers: impl IntoIterator<Item = u64>) -> Vec<u8> {
    std::iter::once(letter).chain(numbers.into_iter().take(MOST).flat_map(u64::to_le_bytes)).collect()
}

fn decode(frame: &[u8]) -> Option<(u8, Vec<u64>)> {
    let (letter, numbers) = frame.split_first()?;
    let (numbers, []) = numbers.as_chunks::<8>() else { return None };
    (numbers.len() <= MOST).then(|| (*letter, numbers.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect()))
}

impl FromAttached {
    /// The message as a datagram.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Halt { number, threads } => encode(b'h', [*number].into_iter().chain(threads.iter().copied())),
            Self::Threads(threads) => encode(b't', threads.iter().copied()),
            Self::Go => encode(b'g', []),
            Self::Connect(server) => encode(b'c', [server.frame()[0].into()]),
            Self::Left(ranges) => encode(b'l', ranges.iter().flat_map(|range| [range.start.0, range.pages])),
        }
    }

    /// A message from a datagram; `None` if no agent sends such.
    pub fn decode(frame: &[u8]) -> Option<Self> {
        match decode(frame)? {
            (b'h', numbers) => {
                let (number, threads) = numbers.split_first()?;
                Some(Self::Halt { number: *number, threads: threads.to_vec() })
            }
            (b't', threads) => Some(Self::Threads(threads)),
            (b'g', numbers) if numbers.is_empty() => Some(Self::Go),
            (b'c', numbers) => {
                let [number] = numbers.as_slice() else { return None };
                Server::of(&[u8::try_from(*number).ok()?]).map(Self::Connect)
            }
            (b'l', numbers) => {
                let (pairs, []) = numbers.as_chunks::<2>() else { return None };
                let range = |[start, pages]: &[u64; 2]| PageRange { start: page::HostVirt(*start), pages: *pages };
                Some(Self::Left(pairs.iter().map(range).collect()))
            }
            _ => None,
        }
    }
}

impl ToAttached {
    /// The message as a datagram.
    pub fn encode(self) -> Vec<u8> {
        match self {
            Self::Halted(number) => encode(b'h', [number]),
            Self::NotNow(number) => encode(b'n', [number]),
            Self::Leave => encode(b'l', []),
        }
    }

    /// A message from a datagram; `None` if it is none.
    pub fn decode(frame: &[u8]) -> Option<Self> {
        match (decode(frame)?.0, decode(frame)?.1.as_slice()) {
            (b'h', [number]) => Some(Self::Halted(*number)),
            (b'n', [number]) => Some(Self::NotNow(*number)),
            (b'l', []) => Some(Self::Leave),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use page::HostVirt;

    #[test]
    fn messages_come_as_they_were_sent_and_others_are_refused() {
        let ranges =
            vec![PageRange { start: HostVirt(4096), pages: 3 }, PageRange { start: HostVirt(1 << 20), pages: 1 }];
        let servers = [Server::Worker, Server::Prover].map(FromAttached::Connect);
        let halt = FromAttached::Halt { number: 7, threads: vec![3, 4] };
        let threads = FromAttached::Threads(vec![3]);
        for sent in [halt, threads, FromAttached::Go, FromAttached::Left(ranges)].into_iter().chain(servers) {
            let frame = sent.encode();
            assert!(frame.len() <= ATTACH_BYTES);
            assert_eq!(FromAttached::decode(&frame), Some(sent));
            assert_eq!(FromAttached::decode(&frame[..frame.len() - 1]), None);
        }
        for sent in [ToAttached::Halted(1), ToAttached::NotNow(2), ToAttached::Leave] {
            assert_eq!(ToAttached::decode(&sent.encode()), Some(sent));
        }
        assert_eq!((FromAttached::decode(b"x"), ToAttached::decode(b"h")), (None, None));
        assert_eq!(FromAttached::decode(&[b'l'; ATTACH_BYTES + 8]), None);
    }
}
