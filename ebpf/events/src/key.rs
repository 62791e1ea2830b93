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
        /// The address on this side of the interface (source of what leaves): 16 bytes as in an IPv6 header, in memory
        /// order; IPv4 is mapped to `::ffff:a.b.c.d`.
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

    /// A TCP connection over IPv4 in the programs' own table, which is quicker for being short. User space sees [`FlowKey`].
    #[derive(Hash, PartialOrd, Ord)]
    pub struct Ipv4Key {
        /// The address on this side, in memory order.
        pub local: u32,
        /// The address on the other side.
        pub remote: u32,
        /// The port on this side.
        pub local_port: u16,
        /// The port on the other side.
        pub remote_port: u16,
        /// The interface's index in its network namespace.
        pub interface: u32,
    }

    /// What goes to a RoCE v2 queue pair over IPv4, likewise.
    #[derive(Hash, PartialOrd, Ord)]
    pub struct Ipv4RoceKey {
        /// The address on this side, in memory order.
        pub local: u32,
        /// The address on the other side.
        pub remote: u32,
        /// The destination queue pair.
        pub queue_pair: u32,
        /// The interface's index in its network namespace.
        pub interface: u32,
        /// A [`Direction`], by its number.
        pub direction: u32,
        /// Always 0.
        pub reserved: u32,
    }

    /// A request of RoCE v2 whose acknowledgement is awaited: by it the ACK, which names neither the request's queue pair nor
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

impl From<Ipv4Key> for FlowKey {
    fn from(key: Ipv4Key) -> Self {
        Self {
            local: Self::mapped(key.local),
            remote: Self::mapped(key.remote),
            local_port: key.local_port,
            remote_port: key.remote_port,
            interface: key.interface,
            protocol: Protocol::Tcp as u8,
            ..Self::default()
        }
    }
}

impl From<Ipv4RoceKey> for FlowKey {
    fn from(key: Ipv4RoceKey) -> Self {
        Self {
            local: Self::mapped(key.local),
            remote: Self::mapped(key.remote),
            queue_pair: key.queue_pair,
            interface: key.interface,
            protocol: Protocol::Roce as u8,
            direction: key.direction as u8,
            ..Self::default()
        }
    }
}

impl FlowKey {
    /// The key of the programs' own table of TCP over IPv4; none for any other flow.
    pub fn ipv4(&self) -> Option<Ipv4Key> {
        let (local, remote) = self.ipv4_ends(Protocol::Tcp)?;
        let (local_port, remote_port) = (self.local_port, self.remote_port);
        Some(Ipv4Key { local, remote, local_port, remote_port, interface: self.interface })
    }

    /// The key of the programs' own table of RoCE v2 over IPv4; none for any other flow.
    pub fn ipv4_roce(&self) -> Option<Ipv4RoceKey> {
        let (local, remote) = self.ipv4_ends(Protocol::Roce)?;
        let (queue_pair, interface) = (self.queue_pair, self.interface);
        let direction = u32::from(self.direction);
        Some(Ipv4RoceKey { local, remote, queue_pair, interface, direction, reserved: 0 })
    }

    fn ipv4_ends(&self, protocol: Protocol) -> Option<(u32, u32)> {
        let [a, b, mark, local] = self.local;
        let [c, d, other, remote] = self.remote;
        let [_, _, mapped, _] = Self::mapped(0);
        let fits = [a, b, c, d] == [0; 4] && mark == mapped && other == mapped;
        (fits && self.protocol == protocol as u8).then_some((local, remote))
    }

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
        assert_eq!(key.ipv4(), None);
        let short = Ipv4Key { local: 1, remote: 2, local_port: 3, remote_port: 4, interface: 5 };
        assert_eq!(FlowKey::from(short).ipv4(), Some(short));
        assert_eq!(FlowKey::from(short).ipv4_roce(), None);
        let short =
            Ipv4RoceKey { local: 1, remote: 2, queue_pair: 3, interface: 4, direction: 2, reserved: 0 };
        assert_eq!(FlowKey::from(short).ipv4_roce(), Some(short));
        assert_eq!(FlowKey::from(short).ipv4(), None);
    }
}
