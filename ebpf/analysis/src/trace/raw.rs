//! Records as the trace's format sees them: a kind, a flow, and words.

use super::{Label, Link, Lost, LostKind, Observer, Owner, Port, PortDirection, Record};
use harmonaize_abi::{CommunicatorId, Epoch};
use harmonaize_events::{Event, FlowKey, InterfaceTotals, Mark, RoceCounters, TcpFlow};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// The most words of a kind.
pub(super) const WORDS: usize = 41;
/// Kinds are 1 to this.
pub(super) const KINDS: usize = 10;

const _: () = assert!(size_of::<TcpFlow>() / 8 < WORDS && size_of::<RoceCounters>() / 8 < WORDS);

mod kind {
    pub(super) const OBSERVER: u8 = 1;
    pub(super) const EVENT: u8 = 2;
    pub(super) const TCP: u8 = 3;
    pub(super) const ROCE: u8 = 4;
    pub(super) const TOTALS: u8 = 5;
    pub(super) const MARK: u8 = 6;
    pub(super) const OWNER: u8 = 7;
    pub(super) const LINK: u8 = 8;
    pub(super) const LOST: u8 = 9;
    pub(super) const PORT: u8 = 10;
}

#[derive(Clone, Copy)]
pub(super) struct Words {
    pub(super) words: [u64; WORDS],
    pub(super) length: usize,
}

impl Words {
    pub(super) const EMPTY: Self = Self { words: [0; WORDS], length: 0 };

    fn push(&mut self, word: u64) {
        if let Some(place) = self.words.get_mut(self.length) {
            *place = word;
            self.length += 1;
        }
    }

    fn push_each<const N: usize>(&mut self, words: [u64; N]) {
        words.into_iter().for_each(|word| self.push(word));
    }

    fn push_all<T: IntoBytes + Immutable>(&mut self, value: &T) {
        for chunk in value.as_bytes().chunks_exact(8) {
            self.push(chunk.try_into().map_or(0, u64::from_ne_bytes));
        }
    }

    /// Takes words from the front.
    fn take(&self, from: &mut usize) -> u64 {
        let word = self.words.get(*from).copied().unwrap_or_default();
        *from += 1;
        word
    }

    fn take_all<T: FromBytes + IntoBytes + FromZeros + Immutable + KnownLayout>(
        &self,
        from: &mut usize,
    ) -> T {
        let mut value = T::new_zeroed();
        for chunk in value.as_mut_bytes().chunks_exact_mut(8) {
            chunk.copy_from_slice(&self.take(from).to_ne_bytes());
        }
        value
    }
}

/// A record as the format sees it.
pub(super) struct RawRecord {
    pub(super) kind: u8,
    pub(super) key: Option<FlowKey>,
    pub(super) words: Words,
}

impl RawRecord {
    /// Returns how many words a kind has, and whether it has a flow. Returns none for a kind that this version does not know.
    pub(super) const fn layout(kind: u8) -> Option<(usize, bool)> {
        Some(match kind {
            kind::OBSERVER | kind::LOST => (3, false),
            kind::EVENT => (7, true),
            kind::TCP => (1 + size_of::<TcpFlow>() / 8, true),
            kind::ROCE => (1 + size_of::<RoceCounters>() / 8, true),
            kind::TOTALS => (1 + size_of::<InterfaceTotals>() / 8, false),
            kind::MARK => (size_of::<Mark>() / 8, false),
            kind::OWNER => (6 + Label::CAPACITY / 8, true),
            kind::LINK => (4 + Label::CAPACITY / 8, false),
            kind::PORT => (12 + Label::CAPACITY / 8, false),
            _ => return None,
        })
    }

    /// The form of a record.
    pub(super) fn of(record: &Record) -> Self {
        let mut words = Words::EMPTY;
        let (kind, key) = match record {
            Record::Observer(observer) => {
                words.push_each([
                    observer.time_ns,
                    observer.host,
                    observer.realtime_offset_ns.cast_unsigned(),
                ]);
                (kind::OBSERVER, None)
            }
            Record::Event(event) => {
                let parts = u64::from(event.kind) | u64::from(event.count) << 32;
                let (began, ended) = (event.burst_began_ns, event.burst_ended_ns);
                let sent = u64::from(event.paused_ns) | u64::from(event.size) << 32;
                words.push_each([event.time_ns, parts, event.total, began, ended, event.burst_bytes, sent]);
                (kind::EVENT, Some(event.flow))
            }
            Record::Tcp { time_ns, key, flow } => {
                words.push(*time_ns);
                words.push_all(flow);
                (kind::TCP, Some(*key))
            }
            Record::Roce { time_ns, key, counters } => {
                words.push(*time_ns);
                words.push_all(counters);
                (kind::ROCE, Some(*key))
            }
            Record::Totals { time_ns, totals } => {
                words.push(*time_ns);
                words.push_all(totals);
                (kind::TOTALS, None)
            }
            Record::Mark(mark) => {
                words.push_all(mark);
                (kind::MARK, None)
            }
            Record::Owner(owner) => {
                let (epoch, from, to) = (owner.epoch.into(), owner.from.into(), owner.to.into());
                words.push_each([owner.time_ns, owner.communicator.0, epoch, from, to, owner.owned.into()]);
                words.push_all(owner.tenant.bytes());
                (kind::OWNER, Some(owner.flow))
            }
            Record::Link(link) => {
                words.push_each([
                    link.time_ns,
                    link.interface.into(),
                    link.bytes_per_second,
                    link.watched.into(),
                ]);
                words.push_all(link.name.bytes());
                (kind::LINK, None)
            }
            Record::Lost(lost) => {
                words.push_each([lost.time_ns, lost.kind as u64, lost.count]);
                (kind::LOST, None)
            }
            Record::Port(port) => {
                words.push_each([port.time_ns, port.interface.into(), port.number.into(), port.not_ready]);
                for one in [&port.egress, &port.ingress] {
                    words.push_each([one.packets, one.bytes, one.ecn_ce, one.lost]);
                }
                words.push_all(port.device.bytes());
                (kind::PORT, None)
            }
        };
        Self { kind, key, words }
    }

    /// The record of a form; none where a number stands for nothing in this version.
    pub(super) fn record(&self) -> Option<Record> {
        let words = &self.words;
        let at = &mut 0;
        let narrow = |word: u64| u32::try_from(word).ok();
        let flow = self.key.unwrap_or_default();
        Some(match self.kind {
            kind::OBSERVER => Record::Observer(Observer {
                time_ns: words.take(at),
                host: words.take(at),
                realtime_offset_ns: words.take(at).cast_signed(),
            }),
            kind::EVENT => {
                let halves = |word: u64| (word as u32, (word >> 32) as u32);
                let (time_ns, (kind, count)) = (words.take(at), halves(words.take(at)));
                let (total, burst_began_ns) = (words.take(at), words.take(at));
                let (burst_ended_ns, burst_bytes) = (words.take(at), words.take(at));
                // Older traces end before this, with zeros.
                let (paused_ns, size) = halves(words.take(at));
                Record::Event(Event {
                    time_ns,
                    flow,
                    kind,
                    count,
                    total,
                    burst_began_ns,
                    burst_ended_ns,
                    burst_bytes,
                    paused_ns,
                    size,
                })
            }
            kind::TCP => Record::Tcp { time_ns: words.take(at), key: flow, flow: words.take_all(at) },
            kind::ROCE => Record::Roce { time_ns: words.take(at), key: flow, counters: words.take_all(at) },
            kind::TOTALS => Record::Totals { time_ns: words.take(at), totals: words.take_all(at) },
            kind::MARK => Record::Mark(words.take_all(at)),
            kind::OWNER => Record::Owner(Owner {
                time_ns: words.take(at),
                flow,
                communicator: CommunicatorId(words.take(at)),
                epoch: Epoch(narrow(words.take(at))?),
                from: narrow(words.take(at))?,
                to: narrow(words.take(at))?,
                owned: words.take(at) != 0,
                tenant: Label::from_bytes(words.take_all(at))?,
            }),
            kind::LINK => Record::Link(Link {
                time_ns: words.take(at),
                interface: narrow(words.take(at))?,
                bytes_per_second: words.take(at),
                watched: words.take(at) != 0,
                name: Label::from_bytes(words.take_all(at))?,
            }),
            kind::LOST => Record::Lost(Lost {
                time_ns: words.take(at),
                kind: LostKind::from_number(narrow(words.take(at))?)?,
                count: words.take(at),
            }),
            kind::PORT => {
                let (time_ns, interface) = (words.take(at), narrow(words.take(at))?);
                let (number, not_ready) = (narrow(words.take(at))?, words.take(at));
                let mut direction = || PortDirection {
                    packets: words.take(at),
                    bytes: words.take(at),
                    ecn_ce: words.take(at),
                    lost: words.take(at),
                };
                let (egress, ingress) = (direction(), direction());
                let device = Label::from_bytes(words.take_all(at))?;
                Record::Port(Port { time_ns, interface, number, device, not_ready, egress, ingress })
            }
            _ => return None,
        })
    }
}
