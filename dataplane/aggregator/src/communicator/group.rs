//! Sums to all workers at once, where the network has multicast.
//!
//! A group is used only while every worker says that it hears it: a call goes there with each answer to a Begin, and now and then with sums.

use super::{Communicator, Entry};
use crate::Pool;
use crate::aggregator::{Outbox, To};
use crate::packet::{ALL_WORKERS, HEADER_BYTES, Header, Key, Kind, seal};

/// Sums between two calls, while not all hear.
pub(super) const CALLS: u64 = 64;

/// The group of a communicator's workers.
pub(super) struct Group {
    key: Key,
    /// Workers that hear it.
    hearing: u16,
}

impl Group {
    pub(super) fn new(secret: &[u8; 32], communicator: u64) -> Self {
        Self { key: Key::derive(secret, communicator, ALL_WORKERS), hearing: 0 }
    }

    /// Another session.
    pub(super) fn forget(&mut self) {
        self.hearing = 0;
    }
}

impl Communicator {
    /// A worker says whether it hears the group.
    pub(super) fn hears(&mut self, worker: u16, hears: bool) {
        let Some(group) = &mut self.group else { return };
        let Some(member) = self.members.get_mut(usize::from(worker)) else { return };
        match (member.hears, hears) {
            (false, true) => group.hearing += 1,
            (true, false) => group.hearing -= 1,
            _ => {}
        }
        member.hears = hears;
    }

    /// Whether a sum may go to all at once.
    pub(super) fn all_hear(&self) -> bool {
        self.group.as_ref().is_some_and(|group| group.hearing == self.grant.workers)
    }

    /// Calls the workers, unless all hear already: those that hear it say so from then on.
    pub(super) fn call(&mut self, incarnation: u64, pool: &Pool, out: &mut impl Outbox) {
        let Some(group) = self.group.as_ref().filter(|group| group.hearing < self.grant.workers) else {
            return;
        };
        let header = Header {
            kind: Kind::Granted,
            worker: ALL_WORKERS,
            count: 0,
            communicator: self.grant.communicator,
            session: self.session,
            incarnation,
            sequence: 0,
            chunk: 0,
            had: self.base,
            window: self.window(pool),
            note: 0,
        };
        let mut packet = [0; HEADER_BYTES];
        seal(&header, &group.key, &mut packet);
        self.counters.sent += 1;
        out.send(To::Group { communicator: self.grant.communicator }, &packet);
    }

    /// Cost: a tag.
    pub(super) fn send_sum_to_all(
        &mut self,
        incarnation: u64,
        entry: Entry,
        pool: &mut Pool,
        out: &mut impl Outbox,
    ) {
        let (bytes, header) = (self.sum_bytes(&entry), self.result(incarnation, entry, ALL_WORKERS, pool));
        let unit = pool.unit_mut(self.unit_of(entry.chunk, 0));
        let Some(group) = &self.group else { return };
        if let Some(packet) = unit.get_mut(..HEADER_BYTES + bytes) {
            seal(&header, &group.key, packet);
            self.counters.sent += 1;
            self.counters.to_all += 1;
            out.send(To::Group { communicator: self.grant.communicator }, packet);
        }
    }
}
