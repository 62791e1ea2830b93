//! By what flows are told apart.

use crate::shared;

/// Which way a packet crosses the interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Direction {
    /// It comes in.
    Ingress = 1,
    /// It leaves.
    Egress = 2,
}

/// What a flow speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Protocol {
    /// TCP: a flow is a connection.
    Tcp = 6,
    /// RoCE v2, on UDP: a flow is what goes to one queue pair.
    Roce = 17,
}

shared! {
    /// A flow, as one interface sees it.
    ///
    /// A TCP connection is one entry whose value holds both directions, so that an acknowledgement finds what it acknowledges
    /// in one look-up. RoCE v2 names only the destination queue pair in a packet, so each direction is an entry of its own.
    #[derive(Hash, PartialOrd, Ord)]
    pub struct FlowKey {
        /// The address on this side of the interface (source of what leaves). It is 16 bytes as in an IPv6 header, in
        /// memory order; IPv4 is mapped to `::ffff:a.b.c.d`.
        pub local: [u32; 4],
        /// The address on the other side, likewise.
        pub remote: [u32; 4],
        /// TCP port on this side; 0 for RoCE, whose source port only spreads flows over paths.
        pub local_port: u16,
        /// TCP port on the other side; 0 for RoCE.
        pub remote_port: u16,
        /// RoCE: the destination queue pair, 24 bits; 0 for TCP.
        pub queue_pair: u32,
        /// The interface's index in its network namespace.
        pub interface: u32,
        /// A [`Protocol`], by its number in the IP header.
        pub protocol: u8,
        /// A [`Direction`], by its number; 0 in the key of a TCP entry, which holds both.
        pub direction: u8,
        /// Always 0.
        pub reserved: u16,
    }

    /// A flow in the programs' own tables, which are quicker for short keys: see [`ShortKey::of`]. Who it is, its entry says in full;
    /// two flows with the same key are told apart by that, and the second finds no place.
    #[derive(Hash, PartialOrd, Ord)]
    pub struct ShortKey {
        /// Addresses and interface, folded.
        pub folded: [u32; 2],
        /// TCP: the ports, that on this side first. RoCE v2: the queue pair, and the direction in the upper 8 bits.
        pub numbers: u32,
    }

    /// A request of RoCE v2 whose acknowledgement is awaited. By it the ACK, which names neither the request's queue pair nor
    /// its port, finds the request again.
    #[derive(Hash)]
    pub struct RequestKey {
        /// Source address of the request, as in [`FlowKey`].
        pub requester: [u32; 4],
        /// Its destination address.
        pub responder: [u32; 4],
        /// Its packet sequence number.
        pub sequence: u32,
        /// The interface's index.
        pub interface: u32,
    }

    /// What is remembered of such a request.
    pub struct RequestSent {
        /// When it passed.
        pub time_ns: u64,
        /// The queue pair that it went to, or [`RequestSent::AMBIGUOUS`].
        pub queue_pair: u32,
        /// Always 0.
        pub reserved: u32,
    }
}

impl RequestSent {
    /// Stands for a queue pair where two requests cannot be told apart, or one was sent again: no sample is taken.
    pub const AMBIGUOUS: u32 = u32::MAX;
}

/// What [`ShortKey::of`] folds with: secret, so that nobody finds flows that have the same key.
pub type FoldingSecret = [u64; 5];

impl ShortKey {
    /// The key of a flow.
    pub fn of(flow: &FlowKey, secret: &FoldingSecret) -> Self {
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let ([a, b, c, d], [e, f, g, h]) = (flow.local, flow.remote);
        let [_, _, mark, _] = FlowKey::mapped(0);
        let ipv4 = [a, b, c] == [0, 0, mark] && [e, f, g] == [0, 0, mark];
        let words = [pair(a, b), pair(c, d), pair(e, f), pair(g, h)];
        let folded = Self::fold(words, ipv4, flow.interface, secret);
        let numbers = if flow.protocol == Protocol::Tcp as u8 {
            u32::from(flow.local_port) | u32::from(flow.remote_port) << 16
        } else {
            flow.queue_pair | u32::from(flow.direction) << 24
        };
        Self { folded: [folded as u32, (folded >> 32) as u32], numbers }
    }

    /// The addresses, on this side and on the other, and the interface, folded. Addresses of IPv4 fit as they are; those of IPv6
    /// are folded by NH, so that the chance that two pairs of them come out the same is at most 2^-32 for whoever does not know
    /// the secret (Black and others: UMAC, CRYPTO 1999, section 4).
    #[inline(always)]
    pub fn fold(words: [u64; 4], ipv4: bool, interface: u32, secret: &FoldingSecret) -> u64 {
        let product = |word: u64, with: u64| {
            let low = (word as u32).wrapping_add(with as u32);
            let high = ((word >> 32) as u32).wrapping_add((with >> 32) as u32);
            u64::from(low).wrapping_mul(u64::from(high))
        };
        let ([a, b, c, d], [s, t, u, v, w]) = (words, *secret);
        let addresses = if ipv4 {
            b >> 32 | d >> 32 << 32
        } else {
            let (one, other) =
                (product(a, s).wrapping_add(product(b, t)), product(c, u).wrapping_add(product(d, v)));
            one.wrapping_add(other)
        };
        // Odd: another interface always makes another sum of the same addresses.
        addresses.wrapping_add(u64::from(interface).wrapping_mul(w | 1))
    }
}

impl FlowKey {
    /// The words of an IPv4 address in [`FlowKey::local`] and [`FlowKey::remote`]; `address` in memory order.
    pub const fn mapped(address: u32) -> [u32; 4] {
        [0, 0, u32::from_ne_bytes([0, 0, 0xff, 0xff]), address]
    }

    /// An address of a key as bytes in the order of the network.
    pub fn octets(address: [u32; 4]) -> [u8; 16] {
        let mut octets = [0; 16];
        for (place, word) in octets.chunks_exact_mut(4).zip(address) {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        octets
    }

    /// The words of an address that is given in the order of the network.
    pub fn words(octets: [u8; 16]) -> [u32; 4] {
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = octets;
        [[a, b, c, d], [e, f, g, h], [i, j, k, l], [m, n, o, p]].map(u32::from_ne_bytes)
    }

    /// The address on this side.
    pub fn local_address(&self) -> core::net::IpAddr {
        core::net::Ipv6Addr::from(Self::octets(self.local)).to_canonical()
    }

    /// The address on the other side.
    pub fn remote_address(&self) -> core::net::IpAddr {
        core::net::Ipv6Addr::from(Self::octets(self.remote)).to_canonical()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

    #[test]
    fn addresses_survive_the_key() {
        let four = Ipv4Addr::new(10, 1, 2, 3);
        let six: Ipv6Addr = "fd00::1:2".parse().unwrap();
        let key = FlowKey {
            local: FlowKey::mapped(u32::from_ne_bytes(four.octets())),
            remote: FlowKey::words(six.octets()),
            ..FlowKey::default()
        };
        assert_eq!(key.local_address(), IpAddr::V4(four));
        assert_eq!(key.remote_address(), IpAddr::V6(six));
        assert_eq!(FlowKey::words(four.to_ipv6_mapped().octets()), key.local);
    }

    /// Flows that differ in one thing each, over IPv4 and IPv6.
    fn family() -> [FlowKey; 13] {
        let tcp = FlowKey {
            local: FlowKey::mapped(1 << 24),
            remote: FlowKey::mapped(2 << 24),
            local_port: 3,
            remote_port: 4,
            interface: 5,
            protocol: Protocol::Tcp as u8,
            ..FlowKey::default()
        };
        let six = FlowKey { local: [1, 2, 3, 4], remote: [5, 6, 7, 8], ..tcp };
        let roce = FlowKey {
            local_port: 0,
            remote_port: 0,
            queue_pair: 9,
            protocol: Protocol::Roce as u8,
            direction: Direction::Ingress as u8,
            ..six
        };
        [
            tcp,
            FlowKey { local: tcp.remote, remote: tcp.local, ..tcp },
            FlowKey { local_port: 4, remote_port: 3, ..tcp },
            FlowKey { interface: 6, ..tcp },
            FlowKey { remote: FlowKey::mapped(3 << 24), ..tcp },
            six,
            FlowKey { local: six.remote, remote: six.local, ..six },
            FlowKey { interface: 6, ..six },
            // Words of 64 bits whose uppermost bits differ: what plain multiplication would not see.
            FlowKey { local: [1, 2 | 1 << 31, 3, 4 | 1 << 31], ..six },
            FlowKey { remote: [5, 6, 7, 9], ..six },
            roce,
            FlowKey { direction: Direction::Egress as u8, ..roce },
            FlowKey { queue_pair: 10, ..roce },
        ]
    }

    #[test]
    fn short_keys_distinguish_flows() {
        let secret = [
            0x243f_6a88_85a3_08d3,
            0x1319_8a2e_0370_7344,
            0xa409_3822_299f_31d0,
            0x082e_fa98_ec4e_6c89,
            0x4528,
        ];
        let keys = family().map(|flow| ShortKey::of(&flow, &secret));
        for (index, key) in keys.iter().enumerate() {
            assert!(!keys[..index].contains(key), "{:?}", family()[index]);
        }
        // Another secret makes other keys, but of the same numbers.
        let others = family().map(|flow| ShortKey::of(&flow, &secret.map(|word| word ^ 0xff00_ff00_ff00)));
        for (key, other) in keys.iter().zip(&others) {
            assert_eq!((key.numbers, key.folded != other.folded), (other.numbers, true));
        }
        assert_eq!(keys[0].numbers, 3 | 4 << 16);
        assert_eq!(keys[10].numbers, 9 | 1 << 24);
    }
}
