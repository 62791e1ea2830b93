//! Frames that wait for the transport.

use arrayvec::ArrayVec;
use harmonaize_abi::Tag;
use harmonaize_core::{MAX_MESSAGE, Nanos};
use harmonaize_shm::Span;
use harmonaize_transport::{Landing, LinkId, SendError, Transport};
use std::collections::VecDeque;
use std::time::Duration;

/// How long frames still wait when their communicator has ended. Last words get out where a link moves, and a peer that reads nothing
/// holds nobody up.
const FAREWELL: Duration = Duration::from_millis(200);

/// Frames that the transport had no room for, in order.
///
/// A communicator asks for nothing more while there are any, so they are those of one step, and pieces whose bytes were being fetched.
#[derive(Debug, Default)]
pub(crate) struct Backlog {
    frames: VecDeque<Frame>,
    /// Since when they wait for a communicator that has ended.
    ended: Option<Nanos>,
    /// Nothing waits any more.
    given_up: bool,
}

#[derive(Debug)]
struct Frame {
    link: LinkId,
    path: u16,
    header: ArrayVec<u8, MAX_MESSAGE>,
    payload: Option<(Landing, Span, Tag)>,
}

impl Backlog {
    pub(crate) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Sends a frame now, or keeps it for later, unless that was given up. A link that is down swallows it: the link's end is on its way.
    pub(crate) fn send(
        &mut self,
        transport: &mut dyn Transport,
        (link, path): (LinkId, u16),
        header: &[u8],
        payload: Option<(Landing, Span, Tag)>,
    ) {
        let kept = payload.clone();
        let full = !self.frames.is_empty()
            || matches!(transport.send(link, path, header, payload), Err(SendError::Full));
        if full
            && !self.given_up
            && let Ok(header) = header.try_into()
        {
            self.frames.push_back(Frame { link, path, header, payload: kept });
        }
    }

    /// The communicator has ended, which those that wait for it hear behind these frames: gives them up in a while.
    pub(crate) fn expire(&mut self, now: Nanos) {
        let since = *self.ended.get_or_insert(now);
        if now >= since.after(FAREWELL) {
            self.frames.clear();
            self.given_up = true;
        }
    }

    /// When frames are to be given up.
    pub(crate) fn poll_timeout(&self) -> Option<Nanos> {
        self.ended.filter(|_| !self.frames.is_empty()).map(|since| since.after(FAREWELL))
    }

    /// Tries again; how many frames went out.
    pub(crate) fn flush(&mut self, transport: &mut dyn Transport) -> usize {
        let mut sent = 0;
        while let Some(frame) = self.frames.front() {
            let result = transport.send(frame.link, frame.path, &frame.header, frame.payload.clone());
            if matches!(result, Err(SendError::Full)) {
                break;
            }
            self.frames.pop_front();
            sent += 1;
        }
        sent
    }
}
