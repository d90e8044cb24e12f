//! The client of the prover, a process of the service that tells whether anything but this process's page table refers
//! to its pages.
//!
//! The agent's thread uses it, and a group's worker. It needs one descriptor, in the table of files of the thread that
//! uses it. Once connected, it allocates nothing, and waits no longer than the caller allows. A worker does not wait at
//! all: it sends a question, and reads the answer when its socket has one.

use host::{Received, Result, Seqpacket};
use page::{HostVirt, PageRange};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, BorrowedFd};
use rustix::io::Errno;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};
use wire::prove::{ANSWER_BYTES, Kind, Proof, QUESTION_BYTES, Question, decode_answer};

/// A connection to the prover.
#[derive(Debug)]
pub struct Prover {
    socket: Seqpacket,
    last_id: u32,
    question: [u8; QUESTION_BYTES],
    answer: [u8; ANSWER_BYTES],
}

impl Prover {
    /// Connects to the prover of a service. Questions over this connection are about pages of this process, even if
    /// another process asks them after the connection was handed to it.
    ///
    /// # Errors
    /// No prover listens at `path`.
    pub fn connect(path: &Path) -> Result<Self> {
        Seqpacket::connect_to_service(path).map(Self::over)
    }

    /// A client that uses an existing connection.
    pub const fn over(socket: Seqpacket) -> Self {
        Self { socket, last_id: 0, question: [0; QUESTION_BYTES], answer: [0; ANSWER_BYTES] }
    }

    /// Asks about up to 512 private pages in up to 64 ranges, and waits for the answer: one [`Proof`] for each page, in
    /// order. What a proof is worth, and what the caller has to do before it asks, is said in
    /// `crates/prove/src/lib.rs`.
    ///
    /// # Errors
    /// After an error, the contents of `proofs` mean nothing.
    ///
    /// - `InvalidInput`: more ranges or pages than one question may have, or `proofs` is not as long as there are
    ///   pages.
    /// - `TimedOut`: no answer within `timeout`. The connection can be used again, and a late answer is not taken for
    ///   the answer to another question.
    /// - Others: the prover has closed the connection or is gone.
    pub fn ask(&mut self, ranges: &[PageRange], proofs: &mut [Proof], timeout: Duration) -> io::Result<()> {
        let until = Instant::now() + timeout;
        let places = ranges.iter().try_fold(0_u64, |sum, range| sum.checked_add(range.pages));
        if places != Some(proofs.len() as u64) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        while !self.send(Kind::Private, ranges)? {
            self.wait(PollFlags::OUT, until)?;
        }
        while !self.receive(proofs)? {
            self.wait(PollFlags::IN, until)?;
        }
        Ok(())
    }

    /// Sends a question without waiting. `false` if the prover has too many unread ones.
    ///
    /// # Errors
    /// More ranges or pages than one question may have (`InvalidInput`), or the prover is gone.
    pub fn send(&mut self, kind: Kind, ranges: &[PageRange]) -> io::Result<bool> {
        self.last_id = self.last_id.wrapping_add(1);
        let bytes =
            Question::encode(kind, self.last_id, ranges, &mut self.question).ok_or(io::ErrorKind::InvalidInput)?;
        self.socket.send(&self.question[..bytes], &[])
    }

    /// Reads the answer to the last question, one [`Proof`] for each of its pages. `false` if there is none yet.
    ///
    /// # Errors
    /// The prover is gone, or has sent something that is no answer. The contents of `proofs` mean nothing then.
    pub fn receive(&mut self, proofs: &mut [Proof]) -> io::Result<bool> {
        loop {
            match self.socket.receive_bare(&mut self.answer)? {
                Received::Nothing => return Ok(false),
                Received::Closed => return Err(io::ErrorKind::UnexpectedEof.into()),
                Received::Frame(bytes) => match decode_answer(&self.answer[..bytes], self.last_id, proofs) {
                    Ok(true) => return Ok(true),
                    Ok(false) => {}
                    Err(e) => return Err(io::Error::new(io::ErrorKind::InvalidData, e)),
                },
            }
        }
    }

    /// Sends a question without waiting, only to see whether the prover answers. [`Self::has_answered`] tells whether
    /// it has.
    ///
    /// # Errors
    /// The prover has too much to read, or is gone.
    pub fn ask_later(&mut self) -> io::Result<()> {
        let sent = self.send(Kind::Private, &[PageRange { start: HostVirt(0), pages: 1 }])?;
        if sent { Ok(()) } else { Err(io::ErrorKind::WouldBlock.into()) }
    }

    /// Whether the answer to the question of [`Self::ask_later`] has come since the last call.
    ///
    /// # Errors
    /// As [`Self::receive`].
    pub fn has_answered(&mut self) -> io::Result<bool> {
        self.receive(&mut [Proof::Unknown])
    }

    fn wait(&self, flags: PollFlags, until: Instant) -> io::Result<()> {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let left = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::new(&self.socket, flags)], Some(&left)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }
}

impl AsFd for Prover {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::{Files, SeqpacketListener};
    use wire::prove::encode_answer;

    const SHORT: Duration = Duration::from_millis(50);

    fn pair() -> (tempfile::TempDir, Prover, Seqpacket) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = SeqpacketListener::bind(&path, Files::Refused).unwrap();
        let prover = Prover::connect(&path).unwrap();
        let theirs = listener.accept().unwrap().unwrap();
        (dir, prover, theirs)
    }

    fn answer(socket: &Seqpacket, id: u32, proofs: &[Proof]) {
        let mut frame = [0; ANSWER_BYTES];
        let bytes = encode_answer(id, proofs.iter().copied(), &mut frame);
        assert!(socket.send(&frame[..bytes], &[]).unwrap());
    }

    #[test]
    fn silent_prover_times_out_and_late_answer_is_ignored() {
        let (_dir, mut prover, theirs) = pair();
        let ranges = [PageRange { start: HostVirt(4096), pages: 2 }];
        let mut proofs = [Proof::Unknown; 2];
        let late = prover.ask(&ranges, &mut proofs, SHORT).unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
        answer(&theirs, 1, &[Proof::Free, Proof::Free]);
        assert_eq!(prover.ask(&ranges, &mut proofs, SHORT).unwrap_err().kind(), io::ErrorKind::TimedOut);
        answer(&theirs, 2, &[Proof::Free, Proof::Free]);
        answer(&theirs, 3, &[Proof::Referenced, Proof::Free]);
        prover.ask(&ranges, &mut proofs, SHORT).unwrap();
        assert_eq!(proofs, [Proof::Referenced, Proof::Free]);
        answer(&theirs, 4, &[Proof::Free]);
        assert_eq!(prover.ask(&ranges, &mut proofs, SHORT).unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert_eq!(prover.ask(&ranges, &mut [], SHORT).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        drop(theirs);
        assert!(prover.ask(&ranges, &mut proofs, SHORT).is_err());
    }

    #[test]
    fn prover_that_does_not_read_times_out() {
        let (_dir, mut prover, _theirs) = pair();
        let ranges = [PageRange { start: HostVirt(4096), pages: 1 }; 64];
        for _ in 0..2000 {
            let e = prover.ask(&ranges, &mut [Proof::Free; 64], Duration::from_micros(10)).unwrap_err();
            assert_eq!(e.kind(), io::ErrorKind::TimedOut);
        }
    }
}
