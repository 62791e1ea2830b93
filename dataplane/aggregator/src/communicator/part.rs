//! A worker's part of a chunk.

use super::{Communicator, Entry, FREE, Stage};
use crate::aggregator::Outbox;
use crate::packet::{Content, HEADER_BYTES, Header, Kind};
use crate::{PayloadFormat, Pool};
use std::time::Duration;

impl Communicator {
    /// Takes a worker's part. The first part costs a copy, each other one pass of the sum, and the last also a
    /// tag a worker.
    pub(super) fn part(
        &mut self,
        now: Duration,
        incarnation: u64,
        header: &Header,
        payload: &[u8],
        pool: &mut Pool,
        out: &mut impl Outbox,
    ) {
        let (chunk, worker) = (header.chunk, header.worker);
        if chunk < self.base {
            self.counters.stale += 1;
            return;
        }
        let Some(content) = self.content(header) else {
            return self.differs(incarnation, header, pool, out);
        };
        let known = self.entry(chunk);
        let Some(mut entry) = known.or_else(|| self.open(chunk, content, payload.len(), pool)) else {
            self.answer(Kind::Waiting, incarnation, header, 0, 0, pool, out);
            return;
        };
        // Of several parts with bytes for all none is right.
        let spread = content == Content::Spread;
        let alike = match payload.len() {
            0 => true,
            // Whoever opened the chunk may have had none of the bytes.
            bytes if spread => {
                bytes <= pool.unit_bytes() && (entry.stage == Stage::Filling || entry.root == worker)
            }
            bytes => bytes == entry.bytes,
        };
        if content != entry.content || !alike {
            return self.differs(incarnation, header, pool, out);
        }
        if self.has(chunk, worker) {
            self.counters.duplicates += 1;
            return self.handle_request(now, incarnation, header, pool, out);
        }
        self.mark(chunk, worker);
        if entry.stage != Stage::Filling {
            return self.handle_request(now, incarnation, header, pool, out);
        }
        let added = match entry.content {
            Content::Nothing => true,
            Content::Spread => {
                let unit = pool.unit_mut(self.unit_of(chunk, 0));
                let to = unit.get_mut(HEADER_BYTES..HEADER_BYTES + payload.len());
                to.map(|to| to.copy_from_slice(payload)).is_some()
            }
            Content::Sum | Content::Ranges | Content::Other(..) if self.grant.ordered => {
                let unit = pool.unit_mut(self.unit_of(chunk, usize::from(worker)));
                let to = unit.get_mut(HEADER_BYTES..HEADER_BYTES + entry.bytes);
                to.map(|to| to.copy_from_slice(payload)).is_some()
            }
            Content::Sum | Content::Ranges | Content::Other(..) => {
                let form = self.format_of(entry.content);
                let sum = form.sum_bytes(entry.elements).unwrap_or_default();
                let unit = pool.unit_mut(self.unit_of(chunk, 0));
                let to = unit.get_mut(HEADER_BYTES..HEADER_BYTES + sum);
                to.is_some_and(|to| form.add(entry.elements, entry.seen == 0, payload, to))
            }
        };
        debug_assert!(added, "lengths were looked at");
        entry.seen += 1;
        entry.count = entry.count.saturating_add(header.count);
        let whole = if spread { !payload.is_empty() } else { entry.seen == self.grant.workers };
        if spread && whole {
            (entry.root, entry.bytes) = (worker, payload.len());
        }
        self.set(entry);
        if whole {
            self.complete(now, incarnation, entry, pool, out);
        }
    }

    /// Workers that differ would wait for ever; the host algorithm tells who is wrong.
    fn differs(&mut self, incarnation: u64, header: &Header, pool: &mut Pool, out: &mut impl Outbox) {
        self.counters.size += 1;
        self.lose(pool);
        self.answer(Kind::Lost, incarnation, header, 0, 0, pool, out);
    }

    /// What a part is; `None` if there are none such here. Only sums go on to an aggregator above.
    fn content(&self, header: &Header) -> Option<Content> {
        Content::of(header.note).filter(|content| match content {
            Content::Sum | Content::Other(..) => true,
            Content::Ranges => matches!(self.grant.format, PayloadFormat::Shared { .. }),
            Content::Spread | Content::Nothing => self.up.is_none(),
        })
    }

    /// How the parts of a chunk are added.
    pub(super) fn format_of(&self, content: Content) -> PayloadFormat {
        match content {
            Content::Ranges => PayloadFormat::RANGES,
            Content::Other(dtype, op) => PayloadFormat::Tensor { dtype, op },
            Content::Sum | Content::Spread | Content::Nothing => self.grant.format,
        }
    }

    /// Bytes of a chunk's sum.
    pub(super) fn sum_bytes(&self, entry: &Entry) -> usize {
        match entry.content {
            Content::Sum | Content::Ranges | Content::Other(..) => {
                self.format_of(entry.content).sum_bytes(entry.elements).unwrap_or_default()
            }
            Content::Spread => entry.bytes,
            Content::Nothing => 0,
        }
    }

    /// An entry for a chunk that has none, if there is room.
    fn open(&mut self, chunk: u64, content: Content, bytes: usize, pool: &mut Pool) -> Option<Entry> {
        let whole = self.grant.elements as usize;
        let added = |most| {
            let elements = self.format_of(content).elements(bytes, most);
            elements.filter(|elements| (1..=most).contains(elements))
        };
        let elements = match content {
            Content::Sum => added(whole),
            Content::Other(dtype, _) => added(self.grant.format.elements_of_other(whole, dtype)),
            Content::Ranges => {
                added(self.grant.format.ranges_bytes(self.grant.format.ranged(whole)) / size_of::<f32>())
            }
            Content::Spread => (bytes <= pool.unit_bytes()).then_some(0),
            Content::Nothing => Some(0),
        };
        let Some(elements) = elements else {
            self.counters.size += 1;
            return None;
        };
        if chunk - self.base >= self.max_open(pool) {
            self.counters.no_slot += 1;
            return None;
        }
        let (from, id) = (self.place(chunk) * self.grain as usize, self.grant.communicator);
        for at in 0..self.grain as usize {
            let Some(unit) = pool.take(id) else {
                for unit in self.units.get(from..from + at).unwrap_or_default() {
                    pool.give_back(id, *unit);
                }
                self.counters.no_slot += 1;
                return None;
            };
            if let Some(to) = self.units.get_mut(from + at) {
                *to = unit;
            }
        }
        let place = self.place(chunk) * self.bitmap_len;
        self.bits.iter_mut().skip(place).take(self.bitmap_len).for_each(|word| *word = 0);
        self.top = self.top.max(chunk + 1);
        let entry = Entry { stage: Stage::Filling, chunk, content, elements, bytes, ..FREE };
        self.set(entry);
        Some(entry)
    }
}
