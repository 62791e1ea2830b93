//! Frames that wait for the transport.

use arrayvec::ArrayVec;
use harmonaize_core::MAX_MESSAGE;
use harmonaize_shm::Span;
use harmonaize_transport::{Landing, LinkId, SendError, Transport};
use std::collections::VecDeque;

/// Frames that the transport had no room for, in order.
#[derive(Debug, Default)]
pub(crate) struct Backlog {
    frames: VecDeque<Frame>,
}

#[derive(Debug)]
struct Frame {
    link: LinkId,
    path: u16,
    header: ArrayVec<u8, MAX_MESSAGE>,
    payload: Option<(Landing, Span, u64)>,
}

impl Backlog {
    pub(crate) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Sends a frame now, or keeps it for later. A link that is down swallows it: the link's end is on its way.
    pub(crate) fn send(
        &mut self,
        transport: &mut dyn Transport,
        (link, path): (LinkId, u16),
        header: &[u8],
        payload: Option<(Landing, Span, u64)>,
    ) {
        let kept = payload.clone();
        let full = !self.frames.is_empty()
            || matches!(transport.send(link, path, header, payload), Err(SendError::Full));
        if full && let Ok(header) = header.try_into() {
            self.frames.push_back(Frame { link, path, header, payload: kept });
        }
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
