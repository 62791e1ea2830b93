//! Counters that are bound to queue pairs, as `rdma statistic qp show` tells them: by RDMA netlink (`rdma_netlink.h` of Linux).

use crate::netlink::{attributes, list, push_number};
use crate::rdma::{DEVICES, PortCounters, names};
use rustix::io::Errno;
use rustix::net::netlink;
use std::collections::BTreeMap;
use std::io;
use std::path::Path;

/// `RDMA_NLDEV_CMD_GET` and `RDMA_NLDEV_CMD_STAT_GET`, of the client `RDMA_NL_NLDEV`.
const GET_DEVICES: u16 = 5 << 10 | 1;
const GET_COUNTERS: u16 = 5 << 10 | 17;

/// Attributes, `RDMA_NLDEV_ATTR_..`.
const DEVICE_INDEX: u16 = 1;
const DEVICE_NAME: u16 = 2;
const PORT_INDEX: u16 = 3;
const QUEUE_PAIRS: u16 = 19;
const QUEUE_PAIR: u16 = 20;
const QUEUE_PAIR_NUMBER: u16 = 21;
const COUNTED: u16 = 75;
const COUNTERS: u16 = 77;
const COUNTER: u16 = 78;
const COUNTER_NUMBER: u16 = 79;
const VALUES: u16 = 80;
const VALUE_ENTRY: u16 = 81;
const VALUE_NAME: u16 = 82;
const VALUE: u16 = 83;

/// The most counters of a device that are read, and queue pairs of a counter.
const MAX_COUNTERS: usize = 1024;
/// Messages in a row without a counter, after which the kernel is taken to repeat itself.
const EMPTY_MESSAGES: u32 = 3;
/// The driver that can bind counters: Linux has no other that does.
const BINDS: &str = "mlx5_core";

/// What a counter that is bound to queue pairs has counted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct QueuePairCounter {
    /// The port's number, from 1; 0 where the kernel does not tell.
    pub port: u32,
    /// The counter's number on the device.
    pub number: u32,
    /// This device's queue pairs that it counts: several where the kernel binds by their type.
    pub queue_pairs: Vec<u32>,
    /// What it has counted since it was bound.
    pub counters: PortCounters,
}

/// Why there are no counters by queue pair.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotCounted {
    /// The driver has none.
    #[error("{device}: {driver} has no counters by queue pair; of Linux's drivers mlx5 alone has them")]
    Unsupported {
        /// The device.
        device: String,
        /// Its driver.
        driver: String,
    },
    /// The driver has them, and nobody has asked for them.
    #[error(
        "{device}: no counter is bound to a queue pair; `rdma statistic qp set link {device}/1 auto type on` binds them"
    )]
    Unbound {
        /// The device.
        device: String,
    },
    /// The kernel does not tell.
    #[error("{device}: the kernel does not tell counters by queue pair: {reason}")]
    Refused {
        /// The device.
        device: String,
        /// What it says.
        reason: String,
    },
}

impl NotCounted {
    /// The reason in a word, as a label.
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Unsupported { .. } => "unsupported",
            Self::Unbound { .. } => "unbound",
            Self::Refused { .. } => "refused",
        }
    }
}

/// The kernel tells of a counter that does not fit into its message, over and over.
#[derive(Debug, thiserror::Error)]
#[error(
    "{EMPTY_MESSAGES} messages in a row have no counter: one has too many queue pairs for the kernel to tell; \
     `rdma statistic qp unbind` takes some off"
)]
struct RepeatedCounter;

/// The counters by queue pair of an RDMA device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueuePairCounters {
    /// The device's name.
    pub device: String,
    /// Its counters, or why there are none.
    pub counters: Result<Vec<QueuePairCounter>, NotCounted>,
}

/// Reads the counters that are bound to queue pairs, of all RDMA devices of this host, into `into`, whose memory is used again.
///
/// Cost: two requests of the kernel, for which a driver asks its device for each counter. Nothing without a device.
pub fn read_queue_pair_counters(into: &mut Vec<QueuePairCounters>) {
    into.clear();
    let devices = names(Path::new(DEVICES));
    if devices.is_empty() {
        return;
    }
    let mut indexes = BTreeMap::new();
    let listed = list(Some(netlink::RDMA), GET_DEVICES, &[], |_, body| {
        indexes.extend(named_device(body));
        Ok(true)
    });
    for device in devices {
        let found = match (&listed, indexes.get(&device)) {
            (Err(error), _) => {
                let again = error.raw_os_error().map(io::Error::from_raw_os_error);
                Err(again.unwrap_or_else(|| error.kind().into()))
            }
            (Ok(()), Some(index)) => counters_of(*index),
            // Of another network namespace.
            (Ok(()), None) => continue,
        };
        let counters = judge(&device, driver_of(&device), found);
        into.push(QueuePairCounters { device, counters });
    }
}

fn driver_of(device: &str) -> Option<String> {
    let link = std::fs::read_link(Path::new(DEVICES).join(device).join("device/driver")).ok()?;
    link.file_name()?.to_str().map(str::to_owned)
}

fn counters_of(index: u32) -> io::Result<Vec<QueuePairCounter>> {
    let mut request = Vec::new();
    push_number(&mut request, DEVICE_INDEX, index);
    push_number(&mut request, COUNTED, QUEUE_PAIRS.into());
    let mut listed = CounterList::default();
    list(Some(netlink::RDMA), GET_COUNTERS, &request, |_, body| listed.take(body))?;
    Ok(listed.found)
}

/// What a device's list has named so far.
#[derive(Debug, Default)]
struct CounterList {
    found: Vec<QueuePairCounter>,
    /// Messages in a row without a counter.
    empty: u32,
}

impl CounterList {
    /// Takes a message; returns whether more is wanted. The kernel ends a message before a counter that does not fit into the rest, and
    /// begins the next with it. One that fits into none has it send empty ones for ever.
    fn take(&mut self, body: &[u8]) -> io::Result<bool> {
        let empty = all(body, COUNTERS).all(|table| all(table, COUNTER).next().is_none());
        self.empty = if empty { self.empty + 1 } else { 0 };
        if self.empty >= EMPTY_MESSAGES {
            return Err(io::Error::other(RepeatedCounter));
        }
        let more = MAX_COUNTERS.saturating_sub(self.found.len());
        self.found.extend(counters(body).take(more));
        Ok(self.found.len() < MAX_COUNTERS)
    }
}

/// What an answer means. Drivers that bind none answer with an empty list as others do of which nobody asked for any.
fn judge(
    device: &str,
    driver: Option<String>,
    found: io::Result<Vec<QueuePairCounter>>,
) -> Result<Vec<QueuePairCounter>, NotCounted> {
    let unsupported = |driver: Option<String>| {
        let driver = driver.unwrap_or_else(|| "a driver without hardware".into());
        NotCounted::Unsupported { device: device.into(), driver }
    };
    match found {
        Ok(counters) if !counters.is_empty() => Ok(counters),
        Ok(_) if driver.as_ref().is_some_and(|driver| driver.starts_with(BINDS)) => {
            Err(NotCounted::Unbound { device: device.into() })
        }
        Ok(_) => Err(unsupported(driver)),
        Err(error) if error.raw_os_error() == Some(Errno::OPNOTSUPP.raw_os_error()) => {
            Err(unsupported(driver))
        }
        Err(error) => Err(NotCounted::Refused { device: device.into(), reason: error.to_string() }),
    }
}

fn number(value: &[u8]) -> Option<u32> {
    value.try_into().ok().map(u32::from_ne_bytes)
}

/// A string that may end with a zero.
fn text(value: &[u8]) -> Option<&str> {
    std::str::from_utf8(value.split(|byte| *byte == 0).next()?).ok()
}

/// The first attribute of a kind.
fn find(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(bytes).find(|(found, _)| *found == kind).map(|(_, value)| value)
}

/// All attributes of a kind.
fn all(bytes: &[u8], kind: u16) -> impl Iterator<Item = &[u8]> {
    attributes(bytes).filter(move |(found, _)| *found == kind).map(|(_, value)| value)
}

/// A device's name and index.
fn named_device(body: &[u8]) -> Option<(String, u32)> {
    Some((text(find(body, DEVICE_NAME)?)?.to_owned(), number(find(body, DEVICE_INDEX)?)?))
}

/// The counters in a message. One without a number, or without values, is left out.
fn counters(body: &[u8]) -> impl Iterator<Item = QueuePairCounter> {
    all(body, COUNTERS).flat_map(|table| all(table, COUNTER)).filter_map(counter)
}

fn counter(entry: &[u8]) -> Option<QueuePairCounter> {
    let of = |kind| find(entry, kind).and_then(number);
    let pairs = find(entry, QUEUE_PAIRS).unwrap_or_default();
    let pairs = all(pairs, QUEUE_PAIR).filter_map(|pair| number(find(pair, QUEUE_PAIR_NUMBER)?));
    let values: BTreeMap<&str, u64> = all(find(entry, VALUES)?, VALUE_ENTRY).filter_map(value).collect();
    Some(QueuePairCounter {
        port: of(PORT_INDEX).unwrap_or_default(),
        number: of(COUNTER_NUMBER)?,
        queue_pairs: pairs.take(MAX_COUNTERS).collect(),
        // The kernel has the names of the files of the port's own.
        counters: PortCounters::named(|file| values.get(file.strip_prefix("hw_counters/")?).copied()),
    })
}

fn value(entry: &[u8]) -> Option<(&str, u64)> {
    let value = find(entry, VALUE)?.try_into().ok().map(u64::from_ne_bytes)?;
    Some((text(find(entry, VALUE_NAME)?)?, value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::{filled, read_list};
    use crate::rdma::PortCounter::*;

    /// Set by the kernel where an attribute has others within.
    const NESTED: u16 = 0x8000;

    /// An attribute, as the kernel pads it.
    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = [4 + value.len() as u16, kind].map(u16::to_ne_bytes).concat();
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn nested(kind: u16, within: &[Vec<u8>]) -> Vec<u8> {
        attribute(kind | NESTED, &within.concat())
    }

    fn value(name: &str, value: u64) -> Vec<u8> {
        let name = attribute(VALUE_NAME, format!("{name}\0").as_bytes());
        // Before 64 bits the kernel may put an attribute without a value, so that they are aligned.
        nested(VALUE_ENTRY, &[name, attribute(0, &[]), attribute(VALUE, &value.to_ne_bytes())])
    }

    fn counter(number: u32, pairs: &[u32], values: &[Vec<u8>]) -> Vec<u8> {
        let pair = |pair: &u32| nested(QUEUE_PAIR, &[attribute(QUEUE_PAIR_NUMBER, &pair.to_ne_bytes())]);
        let parts = [
            attribute(PORT_INDEX, &1_u32.to_ne_bytes()),
            attribute(COUNTER_NUMBER, &number.to_ne_bytes()),
            // RDMA_NLDEV_ATTR_STAT_MODE: automatic; RDMA_NLDEV_ATTR_RES_TYPE: reliably connected.
            attribute(74, &1_u32.to_ne_bytes()),
            attribute(26, &[2]),
            nested(QUEUE_PAIRS, &pairs.iter().map(pair).collect::<Vec<_>>()),
            nested(VALUES, values),
        ];
        nested(COUNTER, &parts)
    }

    fn message(counters: &[Vec<u8>]) -> Vec<u8> {
        let (index, name) =
            (attribute(DEVICE_INDEX, &2_u32.to_ne_bytes()), attribute(DEVICE_NAME, b"mlx5_0\0"));
        [index, name, nested(COUNTERS, counters)].concat()
    }

    #[test]
    fn counters_of_mlx5_are_read_with_their_queue_pairs() {
        let values = [
            value("rx_write_requests", 80),
            value("out_of_sequence", 6),
            value("packet_seq_err", 7),
            value("local_ack_timeout_err", 2),
            value("rnr_nak_retry_err", u64::MAX),
        ];
        let bytes = message(&[counter(4, &[178, 179], &values), counter(5, &[180], &[])]);
        assert_eq!(named_device(&bytes), Some(("mlx5_0".into(), 2)));
        let counted = [(OutOfSequence, 6), (SequenceNaks, 7), (Timeouts, 2), (ReceiverNotReady, u64::MAX)];
        let found: Vec<_> = counters(&bytes).collect();
        let first = QueuePairCounter {
            port: 1,
            number: 4,
            queue_pairs: vec![178, 179],
            counters: counted.into_iter().collect(),
        };
        let second = QueuePairCounter {
            port: 1,
            number: 5,
            queue_pairs: vec![180],
            counters: PortCounters::default(),
        };
        assert_eq!(found, [first, second]);
    }

    #[test]
    fn odd_answers_are_skipped() {
        let odd = nested(COUNTER, &[attribute(COUNTER_NUMBER, &[1, 2]), nested(VALUES, &[])]);
        let without = nested(COUNTER, &[attribute(COUNTER_NUMBER, &9_u32.to_ne_bytes())]);
        let short =
            nested(VALUE_ENTRY, &[attribute(VALUE_NAME, b"out_of_sequence\0"), attribute(VALUE, &[1])]);
        let named = nested(VALUE_ENTRY, &[attribute(VALUE_NAME, b"\xff"), attribute(VALUE, &[0; 8])]);
        let bytes = message(&[odd, without, counter(3, &[], &[short, named])]);
        let found: Vec<_> = counters(&bytes).collect();
        assert_eq!(found, [QueuePairCounter { port: 1, number: 3, ..QueuePairCounter::default() }]);
        // Cut off or changed anywhere, it is read without harm.
        let whole = message(&[counter(4, &[178], &[value("out_of_sequence", 6)])]);
        for at in 0..whole.len() {
            assert!(counters(&whole[..at]).count() <= 1);
            for byte in [0, 1, 0x7f, 0xff] {
                let mut changed = whole.clone();
                changed[at] = byte;
                let _ = (counters(&changed).count(), named_device(&changed));
            }
        }
    }

    #[test]
    fn a_kernel_that_repeats_itself_is_left_alone() {
        // A datagram with messages that the kernel begins as many others.
        let datagram = |bodies: &[Vec<u8>]| {
            let framed = bodies.iter().map(|body| {
                let length = (16 + body.len() as u32).to_ne_bytes();
                [&length[..], &GET_COUNTERS.to_ne_bytes(), &[0; 10], body].concat()
            });
            framed.collect::<Vec<_>>().concat()
        };
        let (one, none) = (message(&[counter(4, &[178], &[])]), message(&[]));
        let mut rounds = 0;
        let mut listed = CounterList::default();
        let ended = read_list(
            |buffer| {
                rounds += 1;
                let first = if rounds == 1 { &one } else { &none };
                Ok(filled(buffer, &datagram(&[first.clone(), none.clone()])))
            },
            |_, body| listed.take(body),
        );
        assert_eq!((rounds, listed.found.len()), (2, 1));
        let error = ended.unwrap_err();
        let why = judge("d0", Some("mlx5_core".into()), Err(error)).unwrap_err();
        assert!(why.label() == "refused" && why.to_string().contains("too many queue pairs"), "{why}");
        // Empty ones between others are none of it, and odd counters are counters.
        let odd = message(&[nested(COUNTER, &[])]);
        let mut listed = CounterList::default();
        for body in [&none, &none, &one, &none, &none, &odd, &none, &none] {
            assert!(listed.take(body).unwrap());
        }
        let many = message(&vec![counter(4, &[], &[]); 500]);
        assert!(listed.take(&many).unwrap() && listed.take(&many).unwrap());
        assert!(!listed.take(&many).unwrap(), "no more are kept");
        assert_eq!(listed.found.len(), MAX_COUNTERS);
    }

    #[test]
    fn no_counters_have_their_reason() {
        let none = |driver: Option<&str>, found| judge("d0", driver.map(str::to_owned), found).unwrap_err();
        let [rxe, mlx5] = [None, Some("mlx5_core.sf")].map(|driver| none(driver, Ok(Vec::new())));
        assert_eq!([rxe.label(), mlx5.label()], ["unsupported", "unbound"]);
        assert!(rxe.to_string().contains("d0: a driver without hardware has no counters"), "{rxe}");
        assert!(mlx5.to_string().contains("rdma statistic qp set link d0/1 auto type on"), "{mlx5}");
        let refused = |errno: Errno| none(Some("mlx5_core"), Err(errno.into()));
        assert_eq!(refused(Errno::OPNOTSUPP).label(), "unsupported");
        let denied = refused(Errno::PERM);
        assert!(denied.label() == "refused" && denied.to_string().contains("not permitted"), "{denied}");
        let counted = vec![QueuePairCounter::default()];
        assert_eq!(judge("d0", None, Ok(counted.clone())), Ok(counted));
    }

    #[test]
    fn this_host_is_read_without_harm() {
        let mut found = vec![QueuePairCounters { device: String::new(), counters: Ok(Vec::new()) }];
        read_queue_pair_counters(&mut found);
        assert!(found.iter().all(|one| !one.device.is_empty()), "{found:?}");
    }
}
