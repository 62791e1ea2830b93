//! Packets that nobody should believe.

use super::roles::key_of;
use super::world::{COMMUNICATOR, Place, World};
use harmonaize_abi::GrantId;
use harmonaize_aggregator::Key;
use harmonaize_aggregator::packet::{HEADER_BYTES, Header, Kind, MAX_PAYLOAD, seal};
use rand::RngExt;
use rand::seq::IndexedRandom;

pub(crate) fn sealed(header: &Header, key: &Key, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0; HEADER_BYTES];
    packet.extend_from_slice(payload);
    seal(header, key, &mut packet);
    packet
}

fn header(kind: Kind, communicator: GrantId, worker: u16, session: u64) -> Header {
    Header {
        kind,
        worker,
        count: 1,
        communicator,
        session,
        incarnation: 0,
        sequence: 1,
        chunk: 0,
        had: 0,
        window: 0,
        note: 0,
    }
}

pub(crate) fn begin(communicator: GrantId, worker: u16, session: u64, key: &Key) -> Vec<u8> {
    sealed(&header(Kind::Begin, communicator, worker, session), key, &[])
}

impl World {
    /// Somebody who sees `packet` on its way to `place` sends something there.
    pub(crate) fn hostile(&mut self, place: &Place, packet: &[u8]) {
        self.statistics.hostile += 1;
        if self.captured.len() < 64 {
            self.captured.push((place.clone(), packet.to_vec()));
        } else {
            let at = self.random.random_range(0..64);
            self.captured[at] = (place.clone(), packet.to_vec());
        }
        if self.scenario.refusing {
            self.lie();
        }
        let mut forged = packet.to_vec();
        match self.random.random_range(0..8) {
            // Sent again, at any later time.
            0..=2 => {
                let (place, packet) = self.captured.choose(&mut self.random).unwrap().clone();
                return self.later(place, packet);
            }
            // Cut.
            3 => forged.truncate(self.random.random_range(0..packet.len())),
            // Longer than it says, or than anything may be.
            4 => forged.resize(packet.len() + self.random.random_range(1..2 * MAX_PAYLOAD), 7),
            // Another communicator.
            5 => forged[8..16].copy_from_slice(&self.random.random::<u64>().to_le_bytes()),
            // Another field, or payload, under the same tag.
            6 => {
                let at = self.random.random_range(4..packet.len());
                forged[at] = forged[at].wrapping_add(self.random.random_range(1..=255));
            }
            // A worker with its own key names another: with the very words that would count.
            _ => {
                if self.scenario.workers < 2 || !matches!(place, Place::Aggregator(_)) {
                    return;
                }
                let liar = self.random.random_range(0..self.scenario.workers);
                let (number, key) = key_of(&self.scenario, liar);
                let session = self.nodes[liar].session;
                let other = self.random.random_range(0..self.scenario.workers) as u16;
                if other == number {
                    return;
                }
                let kind = [Kind::Begin, Kind::Contribution][self.random.random_range(0..2)];
                let payload = if kind == Kind::Contribution { vec![0x55; 4] } else { Vec::new() };
                let session = session + self.random.random_range(0..2);
                let header = Header {
                    chunk: self.random.random_range(0..4),
                    incarnation: u64::from(packet[24]),
                    ..header(kind, COMMUNICATOR, other, session)
                };
                forged = sealed(&header, &key, &payload);
            }
        }
        self.later(place.clone(), forged);
    }
}
