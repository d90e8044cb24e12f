//! Templates: the memory of a saved guest, as a segment of its group's pool whose slots lie in the order of the guest's
//! memory. All pages of a member that maps the whole file privately as its memory are folded from the start.
//!
//! ```text
//!   asker                                           supervisor (hand.sock)
//!     | load {group, name} + memory file              |
//!     | --------------------------------------------> |   sealed from here on, and a segment of the group's pool
//!     | <------------------------- loaded + its file  |   or the file of a template with this name
//!     | unload {group, name} -----------------------> |   it goes when no member maps it any more
//! ```
//!
//! The asker makes the file by `memfd_create`, with the name of a segment of that group ([`file_name`]). By this name,
//! `audit` recognizes its mappings. A template belongs to one group alone. Another group that wants the same guest has
//! a file of its own.
//!
//! | for the asker and for members | because |
//! |---|---|
//! | write no page of zeros into the file | a page that is empty takes no memory until a member reads it there: one page for the whole group |
//! | a member's program uses `MADV_DONTFORK` for it, as QEMU does | memory that forked children inherit is folded from the start; pages of it that a child writes are not folded again |
//! | a program that registers a userfaultfd of its own does it before other slots are placed there | afterwards the kernel answers `EBUSY` |
//! | no balloon gives memory back | QEMU punches a hole into the file, which is sealed |

use crate::place::Place;
use host::{ForeignFile, Received, Seqpacket};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::BorrowedFd;
use serde::{Deserialize, Serialize};
use std::io;
use std::time::Duration;

/// First byte of each question about templates and of each answer, which distinguishes them from other messages at
/// `hand.sock`.
pub const MARK: u8 = b't';
/// Longest question or answer: 8 KiB.
pub const MOST_BYTES: usize = 8 << 10;
/// Time for the answer to a question: 10 s. The service may be starting anew.
const ANSWER: Duration = Duration::from_secs(10);

/// A question about templates. The asker's user is known by the socket (`SO_PEERCRED`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Question {
    /// Make the file that comes with the question a template of this name. If a template of this name is loaded
    /// already, or no file comes along, the answer has the loaded one.
    Load {
        /// The group.
        group: String,
        /// The template's name in the group.
        name: String,
    },
    /// Unload a template: it is dropped when no member maps it any more.
    Unload {
        /// The group.
        group: String,
        /// The template's name.
        name: String,
    },
    /// List a group's templates.
    List {
        /// The group.
        group: String,
    },
}

impl Question {
    /// The group that the question is about.
    pub fn group(&self) -> &str {
        let (Self::Load { group, .. } | Self::Unload { group, .. } | Self::List { group }) = self;
        group
    }
}

/// A template that is loaded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Template {
    /// Its name.
    pub name: String,
    /// Number of its segment in the pool.
    pub number: u8,
    /// Number of its pages, empty ones included.
    pub slots: u32,
    /// Memory that it takes.
    pub bytes: u64,
}

/// The answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// The template is loaded. Its file comes with the answer.
    Loaded(Template),
    /// The template is unloaded, and is dropped when no member maps it any more.
    Unloaded,
    /// The templates that are loaded.
    Templates(Vec<Template>),
    /// The question is refused for this reason.
    Refused(String),
}

/// The name that the file of a group's template must get from `memfd_create`.
pub fn file_name(group: &str) -> String {
    format!("pagefold-{group}")
}

/// Asks a service a question about templates. The file that comes with the answer is the template's.
///
/// # Errors
/// No service is there, or it does not answer.
pub fn ask(
    place: &Place,
    question: &Question,
    file: Option<BorrowedFd<'_>>,
) -> io::Result<(Reply, Option<ForeignFile>)> {
    let service = Seqpacket::connect(&place.hand_socket()).map_err(io::Error::other)?.take_files();
    service.send(&encode(question)?, &Vec::from_iter(file))?;
    poll(&mut [PollFd::new(&service, PollFlags::IN)], Timespec::try_from(ANSWER).ok().as_ref())?;
    let (mut frame, mut files) = (vec![0; MOST_BYTES], Vec::new());
    match service.receive(&mut frame, &mut files)? {
        Received::Frame(bytes) => {
            let reply = decode(&frame[..bytes]).ok_or(io::ErrorKind::InvalidData)?;
            Ok((reply, files.pop().map(ForeignFile::from)))
        }
        Received::Nothing | Received::Closed => Err(io::ErrorKind::TimedOut.into()),
    }
}

/// Answers a question.
///
/// # Errors
/// The asker is gone.
pub fn answer(to: &Seqpacket, reply: &Reply, file: Option<BorrowedFd<'_>>) -> io::Result<()> {
    to.send(&encode(reply)?, &Vec::from_iter(file)).map(drop)
}

fn encode(message: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut frame = vec![MARK];
    frame.append(&mut serde_json::to_vec(message).map_err(io::Error::other)?);
    Ok(frame)
}

/// Decodes a question or a reply; `None` if the message is neither.
pub fn decode<T: for<'a> Deserialize<'a>>(frame: &[u8]) -> Option<T> {
    serde_json::from_slice(frame.strip_prefix(&[MARK])?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longest_question_and_answer_fit() {
        let long = |n: usize| "x".repeat(n);
        let (group, name) = (long(crate::name::MOST_BYTES), long(crate::name::MOST_BYTES));
        let question = Question::Load { group, name: name.clone() };
        let frame = encode(&question).unwrap();
        assert_eq!(decode::<Question>(&frame), Some(question));
        let most = usize::from(page::PoolSlot::SEGMENTS - page::PoolSlot::FIRST_TEMPLATE);
        let all = vec![Template { name, number: u8::MAX, slots: u32::MAX, bytes: u64::MAX }; most];
        let reply = Reply::Templates(all);
        let answer = encode(&reply).unwrap();
        assert!(frame.len() < MOST_BYTES && answer.len() < MOST_BYTES);
        assert_eq!(decode::<Reply>(&answer), Some(reply));
        assert_eq!(decode::<Reply>(&answer[1..]), None);
    }
}
