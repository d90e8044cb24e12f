//! The protocol between an agent that was put into a running process, and the program that put it there.
//!
//! ```text
//!   agent                                                  pagefold-attach
//!     | Halt {n, threads of the agent's} ------------------> |  stops all other threads, or cannot
//!     | <------------------------------- Halted {n}, NotNow {n}
//!     | Go ------------------------------------------------> |  lets them go on
//!     | Connect {server}, and one end of a socket -----------> |  hands the end on to the service
//!     | Ask {n, question} ---------------------------------> |  looks at what a filter of system calls keeps from the agent
//!     | <--------------------------------- Told {n, answers} |
//!     | Gate {where it lies} ------------------------------> |  leads the C library's mremap there
//!     | Born ----------------------------------------------> |  looks whether forked children live long enough for an agent
//!     | <-------------------------------------------- Leave  |
//!     | <--------------------------------------------- Tell  |  after another one was killed
//!     | Threads, Gate, Here {where the agent lies} --------> |
//!     | Threads, Left {ranges} ----------------------------> |  unmaps these ranges, when the agent's threads have ended
//! ```
//!
//! Each message is one datagram: a letter, and numbers of eight bytes.
//!
//! The agent cannot connect by itself: the service's sockets may not be there in its mount namespace. So it makes both
//! ends of a socket, and hands one end on: the kernel then tells the service that the agent's process is the peer. The
//! first frame to the agent is [`FILES`]. With it come the process's pagemap and, if there is one, the device
//! `/dev/userfaultfd`, both open. Not every process may open these files by itself.

use page::{HostVirt, PageRange};

/// Longest message, in bytes.
pub const ATTACH_BYTES: usize = 1 + 8 * MOST;
/// Most numbers in a message.
const MOST: usize = 64;

/// The first frame to the agent.
pub const FILES: [u8; 1] = *b"u";

/// Most descriptors that one question names, and most threads that one answer names.
pub const ASKED_MOST: usize = MOST - 2;

/// Pages of the *gate*, the code that leads calls of `mremap` in the program's C library to the agent: one page of code
/// and one of data. The code begins with the part to which all *ways* (see [`GATE_WAYS_AT`]) jump.
pub const GATE_PAGES: u64 = 2;
/// Offset of the ways in the gate's page of code, in bytes. A way is the piece of code to which one C library's
/// `mremap` jumps, and which jumps to the beginning of the gate.
pub const GATE_WAYS_AT: usize = 2048;
/// Size of one way in the gate's code, in bytes.
pub const GATE_WAY_BYTES: usize = 64;
/// Most ways in a gate: the most C libraries in one process whose calls are led to the agent.
pub const GATE_WAYS: usize = 4;
/// Offset of [`GATE_MARK`] in the page of code, in bytes.
pub const GATE_MARK_AT: usize = 4080;
/// Bytes in the gate's page of code by which a gate of this version is told from other memory. They are changed when
/// the gate's code or layout changes.
pub const GATE_MARK: [u8; 16] = *b"pagefold gate 03";

/// A question about the process. Default filters of containers forbid the system calls that would answer it
/// (`kcmp`, `pidfd_getfd`, `statmount`), so that the agent does not make them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Question {
    /// One thread for each table of open files in the process, but for the table that the agent itself uses. The answer
    /// is empty if there are more than fit into it.
    Tables,
    /// What kind of socket each of these descriptors is, in the table of open files of a thread. The answer has a
    /// [`Socket`] for each.
    Sockets {
        /// The thread.
        thread: u64,
        /// [`ASKED_MOST`] descriptors at most.
        files: Vec<u64>,
    },
    /// The type (`f_type`) of the file system of the mount with this unique number, as the process sees it. The answer
    /// is empty if it is not known.
    FileSystem(u64),
}

/// An open descriptor that may be a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Socket {
    /// The descriptor was closed or stands for another file by now, or its thread has ended.
    Closed,
    /// The kernel does not say what it is.
    Unknown,
    /// A socket.
    Open {
        /// Its family.
        family: u32,
        /// Whether the kernel transforms what is received (`TCP_ULP`).
        transformed: bool,
    },
}

impl Socket {
    const CLOSED: u64 = u64::MAX;
    const UNKNOWN: u64 = u64::MAX - 1;

    /// The number that stands for this in a message.
    pub const fn encode(self) -> u64 {
        match self {
            Self::Closed => Self::CLOSED,
            Self::Unknown => Self::UNKNOWN,
            Self::Open { family, transformed } => (family as u64) << 1 | transformed as u64,
        }
    }

    /// The socket that this number in a message stands for.
    pub fn decode(number: u64) -> Self {
        match (number, u32::try_from(number >> 1)) {
            (Self::CLOSED, _) => Self::Closed,
            (_, Ok(family)) => Self::Open { family, transformed: number & 1 == 1 },
            _ => Self::Unknown,
        }
    }
}

/// The process of a service that a connection is for. The letter is the content of the frame that hands the connection
/// on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Server {
    /// The supervisor, which hands the connection on to the group's worker.
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

    /// The server that this frame names; `None` if it names none.
    pub fn of(frame: &[u8]) -> Option<Self> {
        [Self::Worker, Self::Prover].into_iter().find(|server| server.frame() == frame)
    }
}

/// A message from the agent to the program that put it into the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FromAttached {
    /// Request to stop all threads of the process but the agent's own.
    Halt {
        /// Number of the request.
        number: u64,
        /// The agent's own threads.
        threads: Vec<u64>,
    },
    /// These are the agent's own threads.
    Threads(Vec<u64>),
    /// Let the threads that were stopped for the last [`Self::Halt`] go on.
    Go,
    /// Hand on the socket that comes with this message to the service.
    Connect(Server),
    /// A question about the process.
    Ask {
        /// Number of the question.
        number: u64,
        /// The question.
        question: Question,
    },
    /// A gate lies here: [`GATE_PAGES`].
    Gate(HostVirt),
    /// The process has forked.
    Born,
    /// Where the agent's code and stack lie in the process.
    Here {
        /// Memory of the object and its stack.
        object: PageRange,
        /// Whether all private anonymous memory is folded.
        all_anonymous: bool,
    },
    /// The agent has undone everything but these mappings, which hold its own code and stacks. Its threads end now, and
    /// the program that put it there must unmap them.
    Left(Vec<PageRange>),
}

/// A message to the agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToAttached {
    /// Answer to the request to halt with this number: the threads are stopped.
    Halted(u64),
    /// Answer to the request to halt with this number: the threads cannot be stopped at the moment, and go on.
    NotNow(u64),
    /// Answers to a question.
    Told {
        /// The question's number.
        number: u64,
        /// The answers.
        answers: Vec<u64>,
    },
    /// Undo everything, and end.
    Leave,
    /// Tell where you are: the program that put you there is gone, and another one has taken its place.
    Tell,
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
            Self::Gate(place) => encode(b'e', [place.0]),
            Self::Born => encode(b'b', []),
            Self::Here { object, all_anonymous } => {
                encode(b'o', [object.start.0, object.pages, u64::from(*all_anonymous)])
            }
            Self::Connect(server) => encode(b'c', [server.frame()[0].into()]),
            Self::Ask { number, question: Question::Tables } => encode(b'm', [*number]),
            Self::Ask { number, question: Question::Sockets { thread, files } } => {
                encode(b's', [*number, *thread].into_iter().chain(files.iter().copied()))
            }
            Self::Ask { number, question: Question::FileSystem(mount) } => encode(b'f', [*number, *mount]),
            Self::Left(ranges) => encode(b'l', ranges.iter().flat_map(|range| [range.start.0, range.pages])),
        }
    }

    /// The message in a datagram; `None` if no agent sends this datagram.
    pub fn decode(frame: &[u8]) -> Option<Self> {
        match decode(frame)? {
            (b'h', numbers) => {
                let (number, threads) = numbers.split_first()?;
                Some(Self::Halt { number: *number, threads: threads.to_vec() })
            }
            (b't', threads) => Some(Self::Threads(threads)),
            (b'g', numbers) if numbers.is_empty() => Some(Self::Go),
            (b'e', numbers) => match numbers.as_slice() {
                [place] => Some(Self::Gate(HostVirt(*place))),
                _ => None,
            },
            (b'b', numbers) if numbers.is_empty() => Some(Self::Born),
            (b'o', numbers) => {
                let [start, pages, all @ (0 | 1)] = numbers.as_slice() else { return None };
                let object = PageRange { start: HostVirt(*start), pages: *pages };
                Some(Self::Here { object, all_anonymous: *all == 1 })
            }
            (b'c', numbers) => {
                let [number] = numbers.as_slice() else { return None };
                Server::of(&[u8::try_from(*number).ok()?]).map(Self::Connect)
            }
            (b'm', numbers) => {
                let [number] = numbers.as_slice() else { return None };
                Some(Self::Ask { number: *number, question: Question::Tables })
            }
            (b's', numbers) => {
                let [number, thread, files @ ..] = numbers.as_slice() else { return None };
                let question = Question::Sockets { thread: *thread, files: files.to_vec() };
                Some(Self::Ask { number: *number, question })
            }
            (b'f', numbers) => {
                let [number, mount] = numbers.as_slice() else { return None };
                Some(Self::Ask { number: *number, question: Question::FileSystem(*mount) })
            }
            (b'l', numbers) => {
                let (pairs, []) = numbers.as_chunks::<2>() else { return None };
                let range = |[start, pages]: &[u64; 2]| PageRange { start: HostVirt(*start), pages: *pages };
                Some(Self::Left(pairs.iter().map(range).collect()))
            }
            _ => None,
        }
    }
}

impl ToAttached {
    /// The message as a datagram.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Halted(number) => encode(b'h', [*number]),
            Self::NotNow(number) => encode(b'n', [*number]),
            Self::Told { number, answers } => encode(b't', [*number].into_iter().chain(answers.iter().copied())),
            Self::Leave => encode(b'l', []),
            Self::Tell => encode(b'w', []),
        }
    }

    /// The message in a datagram; `None` if it is no message.
    pub fn decode(frame: &[u8]) -> Option<Self> {
        let (letter, numbers) = decode(frame)?;
        match (letter, numbers.as_slice()) {
            (b'h', [number]) => Some(Self::Halted(*number)),
            (b'n', [number]) => Some(Self::NotNow(*number)),
            (b't', [number, answers @ ..]) => Some(Self::Told { number: *number, answers: answers.to_vec() }),
            (b'l', []) => Some(Self::Leave),
            (b'w', []) => Some(Self::Tell),
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
        let most = Question::Sockets { thread: 9, files: (1000..).take(ASKED_MOST).collect() };
        let questions = [Question::Tables, most, Question::FileSystem(1 << 33)];
        let questions = questions.map(|question| FromAttached::Ask { number: 5, question });
        let here = FromAttached::Here { object: ranges[0], all_anonymous: true };
        let gate = FromAttached::Gate(HostVirt(0x7f00_0000_1000));
        let others = [halt, threads, here, gate, FromAttached::Go, FromAttached::Born, FromAttached::Left(ranges)];
        for sent in others.into_iter().chain(servers).chain(questions) {
            let frame = sent.encode();
            assert!(frame.len() <= ATTACH_BYTES);
            assert_eq!(FromAttached::decode(&frame), Some(sent));
            assert_eq!(FromAttached::decode(&frame[..frame.len() - 1]), None);
        }
        let told = ToAttached::Told { number: 4, answers: (7..).take(ASKED_MOST).collect() };
        for sent in [ToAttached::Halted(1), ToAttached::NotNow(2), told, ToAttached::Leave, ToAttached::Tell] {
            assert_eq!(ToAttached::decode(&sent.encode()), Some(sent));
        }
        assert_eq!((FromAttached::decode(b"x"), ToAttached::decode(b"h")), (None, None));
        assert_eq!(FromAttached::decode(&[b'l'; ATTACH_BYTES + 8]), None);
        let open = |family, transformed| Socket::Open { family, transformed };
        for socket in [Socket::Closed, Socket::Unknown, open(1, false), open(45, true), open(u32::MAX, true)] {
            assert_eq!(Socket::decode(socket.encode()), socket);
        }
        assert_eq!(Socket::decode(1 << 33), Socket::Unknown);
    }
}
