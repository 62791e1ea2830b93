//! A communicator whose sums go on to the aggregator above: there it is a worker.

use super::{Communicator, Entry, Stage};
use crate::Pool;
use crate::aggregator::{Outbox, Parent, Recipient};
use crate::packet::{HEADER_BYTES, Header, Key, Kind, seal};
use std::time::Duration;

/// This communicator as a worker of the aggregator above.
pub(crate) struct ParentSession {
    parent: Parent,
    incarnation: u64,
    granted: bool,
    window: u16,
    sequence: u64,
    /// The latest packet that was answered.
    last_answered: u64,
    /// All sums below this chunk have come down.
    had: u64,
    /// As far as the parent was told that they have.
    acked: u64,
    /// Since when nothing was answered.
    unanswered_since: Option<Duration>,
}

impl ParentSession {
    pub(super) fn new(parent: Parent) -> Self {
        Self {
            parent,
            incarnation: 0,
            granted: false,
            window: 0,
            sequence: 0,
            last_answered: 0,
            had: 0,
            acked: 0,
            unanswered_since: None,
        }
    }

    pub(super) fn window(&self) -> u16 {
        self.window
    }

    pub(super) fn is_granted(&self) -> bool {
        self.granted
    }

    pub(crate) fn is(&self, worker: u16) -> bool {
        self.parent.worker == worker
    }

    pub(crate) fn key(&self) -> &Key {
        &self.parent.key
    }

    pub(super) fn forget(&mut self) {
        self.granted = false;
        (self.last_answered, self.had, self.acked, self.unanswered_since) = (self.sequence, 0, 0, None);
    }
}

impl Communicator {
    pub(super) fn lose_if_silent(&mut self, now: Duration, pool: &mut Pool) {
        let silent = self.up.as_ref().is_some_and(|up| {
            up.unanswered_since.is_some_and(|since| now.saturating_sub(since) > up.parent.timeout)
        });
        if silent && !self.lost {
            self.lose(pool);
        }
    }

    /// Counts the sums that have come down in a row.
    pub(super) fn advance_up(&mut self) {
        while let Some(had) = self.up.as_ref().map(|up| up.had) {
            if self.entry(had).is_none_or(|entry| entry.stage != Stage::Done) {
                break;
            }
            if let Some(up) = &mut self.up {
                up.had += 1;
            }
        }
    }

    /// Reports to the parent, once, that all workers have everything that there is. So it keeps no slots for what may not follow
    /// soon. If that is lost nobody waits for it: the next part says it too.
    pub(super) fn acknowledge_up(&mut self, now: Duration, out: &mut impl Outbox) {
        let all = self.base == self.top;
        if self.up.as_ref().is_some_and(|up| all && up.had == self.top && up.acked < up.had) {
            self.send_to_parent(now, Kind::Acknowledge, false, self.top, (0, 0), &mut [0; HEADER_BYTES], out);
        }
    }

    pub(super) fn send_up(
        &mut self,
        now: Duration,
        mut entry: Entry,
        pool: &mut Pool,
        out: &mut impl Outbox,
    ) {
        let soon = |sent| self.up.as_ref().is_none_or(|up| now.saturating_sub(sent) < up.parent.retry_after);
        if entry.sent_up.is_some_and(soon) {
            return;
        }
        let again = entry.sent_up.replace(now).is_some();
        let unit = self.unit_of(entry.chunk, 0);
        let mut memory = pool.lift(unit);
        if let Some(packet) = memory.get_mut(..HEADER_BYTES + entry.bytes) {
            let (count, note) = (entry.count, entry.content.note());
            self.send_to_parent(now, Kind::Contribution, again, entry.chunk, (count, note), packet, out);
        }
        pool.put(unit, memory);
        self.set(entry);
    }

    /// Sends a packet to the parent; `packet` holds the payload. `asks`: whether it answers at once, if it lives.
    #[expect(clippy::too_many_arguments, reason = "four of the packet, the rest as everywhere")]
    pub(super) fn send_to_parent(
        &mut self,
        now: Duration,
        kind: Kind,
        asks: bool,
        chunk: u64,
        (count, note): (u16, u8),
        packet: &mut [u8],
        out: &mut impl Outbox,
    ) {
        let Some(up) = &mut self.up else { return };
        up.sequence += 1;
        up.acked = up.had;
        if asks {
            up.unanswered_since.get_or_insert(now);
        }
        let header = Header {
            kind,
            worker: up.parent.worker,
            count,
            communicator: self.grant.communicator,
            session: self.session,
            incarnation: if up.granted { up.incarnation } else { 0 },
            sequence: up.sequence,
            chunk,
            had: up.had,
            window: 0,
            note,
        };
        seal(&header, &up.parent.key, packet);
        self.counters.sent += 1;
        self.counters.up += 1;
        out.send(Recipient::Parent { communicator: self.grant.communicator }, packet);
    }

    /// A packet of the parent.
    pub(crate) fn handle_parent(
        &mut self,
        incarnation: u64,
        header: &Header,
        payload: &[u8],
        pool: &mut Pool,
        out: &mut impl Outbox,
    ) {
        let Some(up) = &mut self.up else { return };
        // A parent that has started again says by another incarnation that it has no such session.
        let free = matches!(header.kind, Kind::Granted | Kind::Lost);
        let known = free || !up.granted || header.incarnation == up.incarnation;
        if header.session != self.session || self.lost || !known {
            self.counters.stale += 1;
            return;
        }
        self.counters.down += 1;
        // An answer to what was sent after all that was answered before: no replay keeps a dead parent alive.
        if header.sequence > up.last_answered && header.sequence <= up.sequence {
            (up.last_answered, up.unanswered_since) = (header.sequence, None);
        }
        up.window = header.window;
        match header.kind {
            Kind::Lost => self.lose(pool),
            Kind::Granted if !up.granted => {
                (up.granted, up.incarnation) = (true, header.incarnation);
                for worker in 0..self.grant.workers {
                    let to = Header { worker, sequence: 0, chunk: 0, ..*header };
                    self.grant_to(incarnation, &to, pool, out);
                }
            }
            Kind::Result => self.handle_parent_sum(incarnation, header, payload, pool, out),
            _ => {}
        }
    }

    fn handle_parent_sum(
        &mut self,
        incarnation: u64,
        header: &Header,
        payload: &[u8],
        pool: &mut Pool,
        out: &mut impl Outbox,
    ) {
        let entry = self.entry(header.chunk).filter(|entry| entry.stage == Stage::Up);
        let Some(mut entry) = entry.filter(|entry| entry.bytes == payload.len()) else {
            self.counters.duplicates += 1;
            return;
        };
        if let Some(up) = &mut self.up {
            up.unanswered_since = None;
        }
        let unit = pool.unit_mut(self.unit_of(header.chunk, 0));
        if let Some(to) = unit.get_mut(HEADER_BYTES..HEADER_BYTES + entry.bytes) {
            to.copy_from_slice(payload);
        }
        entry.count = header.count;
        self.finish(incarnation, entry, pool, out);
    }
}
