//! The connection to the worker.

use crate::world;
use host::{Received, Seqpacket};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::collections::VecDeque;
use std::io;
use std::path::Path;
use std::time::Duration;
use wire::attach::Server;
use wire::{FRAME_BYTES, ToAgent, ToWorker};

/// Most frames that wait to be sent while the worker does not read.
const MOST_WAITING: usize = 256;

/// One connection to the worker, until an error ends it.
pub struct Link {
    socket: Seqpacket,
    buffer: Vec<u8>,
    waiting: VecDeque<Vec<u8>>,
}

impl Link {
    /// Connects to the supervisor, which decides the group and hands the connection to the group's worker.
    ///
    /// # Errors
    /// Nobody listens at this path.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let socket = world::connect(Server::Worker, path)?;
        Ok(Self { socket, buffer: vec![0; FRAME_BYTES], waiting: VecDeque::new() })
    }

    /// Sends a message, after the frames that wait.
    ///
    /// # Errors
    /// The worker is gone, or has read nothing for too long.
    pub fn send(&mut self, message: &ToWorker) -> io::Result<()> {
        let mut frame = Vec::new();
        message.encode(&mut frame);
        self.waiting.push_back(frame);
        self.flush()?;
        if self.waiting.len() > MOST_WAITING {
            return Err(io::Error::other("the worker reads nothing"));
        }
        Ok(())
    }

    /// Sends waiting frames as far as the worker takes them.
    ///
    /// # Errors
    /// The worker is gone.
    pub fn flush(&mut self) -> io::Result<()> {
        while let Some(frame) = self.waiting.front() {
            if !self.socket.send(frame, &[])? {
                break;
            }
            self.waiting.pop_front();
        }
        Ok(())
    }

    /// Whether frames wait to be sent, because the worker does not read.
    pub fn is_full(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Whether the worker has read everything that was sent.
    pub fn is_read(&self) -> bool {
        self.waiting.is_empty() && self.socket.unread_bytes().is_ok_and(|bytes| bytes == 0)
    }

    /// The next message of the worker and the files that came with it; `None` if there is none yet.
    ///
    /// # Errors
    /// The worker is gone, or sent a frame that no worker sends.
    pub fn receive(&mut self) -> io::Result<Option<(ToAgent, Vec<OwnedFd>)>> {
        let mut files = Vec::new();
        match self.socket.receive(&mut self.buffer, &mut files)? {
            Received::Frame(bytes) => {
                let message = ToAgent::decode(&self.buffer[..bytes]).map_err(io::Error::other)?;
                Ok(Some((message, files)))
            }
            Received::Nothing => Ok(None),
            Received::Closed => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Waits until a message arrives, until the worker takes one of the waiting frames, until `alarm` is readable, or
    /// until the time is over. Silences the alarm. Returns whether anything came before that time.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn wait(&self, time: Duration, alarm: Option<BorrowedFd<'_>>) -> io::Result<bool> {
        let mut interest = PollFlags::IN;
        interest.set(PollFlags::OUT, self.is_full());
        let time = Timespec::try_from(time).ok();
        let mut files = vec![PollFd::from_borrowed_fd(self.socket.as_fd(), interest)];
        files.extend(alarm.map(|alarm| PollFd::from_borrowed_fd(alarm, PollFlags::IN)));
        let came = match poll(&mut files, time.as_ref()) {
            Ok(files) => files > 0,
            Err(rustix::io::Errno::INTR) => true,
            Err(e) => return Err(e.into()),
        };
        if let (Some(alarm), Some(file)) = (alarm, files.get(1))
            && file.revents().contains(PollFlags::IN)
        {
            rustix::io::read(alarm, &mut [0_u8; 8])?;
        }
        Ok(came)
    }
}
