//! How a path ends: what failed, what is still taken in, and when its queue pair may be destroyed.

use super::super::mailbox::{HEAD, SLOT};
use super::Fault;
use super::{POLL, Pair, Path};
use crate::rings::Rings;
use crate::{Event, MAX_HEADER};
use harmonaize_verbs::{Completion, Status};
use std::time::{Duration, Instant};

/// How long a queue pair that was stopped may take to flush its requests: devices take microseconds.
const FLUSH: Duration = Duration::from_millis(20);

impl Path {
    /// What failed: requests besides the one at fault are flushed, and may complete before it.
    pub(super) fn cause(&mut self, first: &Completion, taken: &[Completion]) -> Fault {
        let at_fault =
            |one: &Completion| !matches!(one.status(), Status::Success | Status::WorkRequestFlushed);
        let words = |one: &Completion| format!("{} (code {:#x})", one.status(), one.vendor_code());
        let mut more = Vec::new();
        if !at_fault(first) {
            let _ = self.completions.poll(&mut more, 3 * self.count as usize);
            // In the order in which they came.
            self.forget(taken);
            self.forget(&more);
        }
        let others = taken.iter().chain(&more);
        let found = std::iter::once(first).chain(others).find(|one| at_fault(one)).unwrap_or(first);
        Fault::Network(words(found) + &self.advice(found.status()))
    }

    /// What to look at after a failure that has more than one cause.
    fn advice(&self, status: Status) -> String {
        let Pair::Connected(pair) = &self.pair else { return String::new() };
        if status != Status::TransportRetriesExceeded {
            return String::new();
        }
        let (device, mtu) = (pair.domain().device().name(), pair.endpoint().mtu);
        format!(
            ": nothing came back to {device}; is the peer's port up, is `gid_index` of [verbs] the entry of this network, \
             and do all switches carry packets of {mtu} bytes and their headers (else set `mtu`)?"
        )
    }

    /// Takes note of completions whose frames nobody needs any more.
    pub(super) fn forget(&mut self, completions: &[Completion]) {
        if let Pair::Connected(pair) = &mut self.pair {
            for completion in completions {
                // Those of another queue pair are none of ours.
                let _ = pair.handle_completion(completion, |_| {});
            }
        }
    }

    /// Reports all that has completed.
    pub(in super::super) fn drain(&mut self, rings: &Rings, sink: &mut dyn FnMut(Event<'_>)) {
        // A peer that is gone sends no more than the mailbox holds; one that is not must not hold us up.
        for _ in 0..self.count {
            if !matches!(self.poll(POLL, rings, sink), Ok(1..)) {
                break;
            }
        }
    }

    /// Stops the queue pair and takes what it flushes, or destroys it at once. Nothing of it refers to any memory any
    /// more.
    pub(in super::super) fn stop(&mut self) {
        if !self.flushes() {
            self.pair = Pair::Gone;
        }
        // Nobody is to be woken by it any more.
        let _ = self.completions.take_events();
    }

    /// Whether all its requests have been flushed within a moment.
    fn flushes(&mut self) -> bool {
        let Pair::Connected(pair) = &mut self.pair else { return false };
        if pair.abort().is_err() {
            return false;
        }
        let until = Instant::now() + FLUSH;
        let mut taken = std::mem::take(&mut self.taken);
        loop {
            self.forget(&taken);
            taken.clear();
            if matches!(&self.pair, Pair::Connected(pair) if pair.outstanding() == 0 && pair.receives() == 0)
            {
                return true;
            }
            match self.completions.poll(&mut taken, POLL) {
                Ok(0) if Instant::now() < until => std::thread::yield_now(),
                Ok(1..) => {}
                _ => return false,
            }
        }
    }

    /// Releases what was not posted.
    pub(in super::super) fn release(&mut self) {
        self.batch.clear();
        self.outbox.clear();
    }

    /// Once it is stopped: hands out the headers, with their messages' numbers, that may not have got out.
    pub(in super::super) fn unsent_headers(&self, mut word: impl FnMut(u32, &[u8])) {
        for posted in &self.posted {
            let Some(bytes) = posted.header_bytes else { continue };
            let mut header = [0; MAX_HEADER];
            let at = u64::from(self.count + (posted.number & (self.count - 1))) * SLOT as u64 + HEAD as u64;
            if let Some(header) = header.get_mut(..bytes.into())
                && self.slots.memory().read(at, header).is_ok()
            {
                word(posted.number, header);
            }
        }
        let mut number = self.next_out;
        for header in self.outbox.bare_headers() {
            word(number, header);
            number = number.wrapping_add(1);
        }
    }
}
