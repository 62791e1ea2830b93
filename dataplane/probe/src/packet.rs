//! The packets that are to die on their route, and what reports that they have. They are of IPv4 (RFC 791), TCP, UDP
//! and ICMP (RFC 792).

use std::net::Ipv4Addr;
use zerocopy::byteorder::big_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Most bytes of a packet that is to die.
pub(super) const MOST: usize = 40;

const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
/// ICMP's type and code of a packet whose time to live is over.
const EXCEEDED: (u8, u8) = (11, 0);
/// TCP's flag PSH: a segment that opens, acknowledges and ends nothing.
const PUSH: u8 = 0x08;
const DONT_FRAGMENT: u16 = 0x4000;
/// What makes a right checksum a wrong one, whatever it is (in one's complement too).
const CHECKSUM_FLIP: u16 = 0x5555;

/// What a traced packet is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// A connection.
    Tcp,
    /// Datagrams.
    Udp,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy, Default)]
#[repr(C)]
struct Ipv4 {
    version: u8,
    service: u8,
    total: U16,
    identification: U16,
    fragment: U16,
    time_to_live: u8,
    protocol: u8,
    checksum: U16,
    source: [u8; 4],
    destination: [u8; 4],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy, Default)]
#[repr(C)]
struct Tcp {
    source: U16,
    destination: U16,
    sequence: U32,
    acknowledgement: U32,
    offset: u8,
    flags: u8,
    window: U16,
    checksum: U16,
    urgent: U16,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy, Default)]
#[repr(C)]
struct Udp {
    source: U16,
    destination: U16,
    length: U16,
    checksum: U16,
}

#[derive(FromBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct Icmp {
    kind: u8,
    code: u8,
    _checksum: U16,
    _unused: U32,
}

/// A packet that is to die.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ProbePacket {
    pub(super) protocol: Protocol,
    pub(super) source: Ipv4Addr,
    pub(super) destination: Ipv4Addr,
    /// Source and destination port.
    pub(super) ports: (u16, u16),
    /// By which it is known again: TCP's sequence number; UDP's identification and checksum.
    pub(super) token: u32,
}

impl ProbePacket {
    /// Changes the token where it would make a datagram whose checksum is right, or one without.
    pub(super) fn sound(mut self) -> Self {
        if self.protocol == Protocol::Udp {
            let right = self.udp(0).1;
            let told = self.token as u16;
            if told == right || told == 0 || (told == 0xffff && right == 0) {
                self.token = (self.token & 0xffff_0000) | u32::from(right ^ CHECKSUM_FLIP).max(1);
            }
            // The kernel fills in an identification of 0.
            if self.token >> 16 == 0 {
                self.token |= 0x0001_0000;
            }
        }
        self
    }

    /// Writes the packet with this time to live; how long it is.
    pub(super) fn write(&self, time_to_live: u8, into: &mut [u8; MOST]) -> usize {
        let (protocol, length) = match self.protocol {
            Protocol::Tcp => (TCP, size_of::<Ipv4>() + size_of::<Tcp>()),
            Protocol::Udp => (UDP, size_of::<Ipv4>() + size_of::<Udp>()),
        };
        let identification = match self.protocol {
            Protocol::Tcp => (self.token as u16).max(1),
            Protocol::Udp => (self.token >> 16) as u16,
        };
        // The kernel sets the checksum of the header (raw(7)).
        let ip = Ipv4 {
            version: 0x45,
            total: U16::new(length as u16),
            identification: U16::new(identification),
            fragment: U16::new(DONT_FRAGMENT),
            time_to_live,
            protocol,
            source: self.source.octets(),
            destination: self.destination.octets(),
            ..Ipv4::default()
        };
        let written = ip.write_to_prefix(into.as_mut_slice()).is_ok();
        let rest = into.get_mut(size_of::<Ipv4>()..).unwrap_or_default();
        let rest = match self.protocol {
            Protocol::Tcp => self.tcp().write_to_prefix(rest).is_ok(),
            Protocol::Udp => self.udp(self.token as u16).0.write_to_prefix(rest).is_ok(),
        };
        if written && rest { length } else { 0 }
    }

    fn tcp(&self) -> Tcp {
        let tcp = Tcp {
            source: U16::new(self.ports.0),
            destination: U16::new(self.ports.1),
            sequence: U32::new(self.token),
            offset: 5 << 4,
            flags: PUSH,
            window: U16::new(u16::MAX),
            ..Tcp::default()
        };
        let right = self.checksum(TCP, tcp.as_bytes());
        Tcp { checksum: U16::new(right ^ CHECKSUM_FLIP), ..tcp }
    }

    /// The header with this checksum, and what would be the right one.
    fn udp(&self, checksum: u16) -> (Udp, u16) {
        let udp = Udp {
            source: U16::new(self.ports.0),
            destination: U16::new(self.ports.1),
            length: U16::new(size_of::<Udp>() as u16),
            checksum: U16::new(0),
        };
        let right = self.checksum(UDP, udp.as_bytes());
        (Udp { checksum: U16::new(checksum), ..udp }, right)
    }

    /// The checksum of TCP and UDP (RFC 9293, 3.1): with the addresses, the protocol and the length.
    fn checksum(&self, protocol: u8, header: &[u8]) -> u16 {
        let (source, destination) = (self.source.octets(), self.destination.octets());
        let pseudo =
            sum_of_u16(&source) + sum_of_u16(&destination) + u64::from(protocol) + header.len() as u64;
        let mut sum = pseudo + sum_of_u16(header);
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        !(sum as u16)
    }
}

fn sum_of_u16(bytes: &[u8]) -> u64 {
    let (pairs, _) = bytes.as_chunks::<2>();
    pairs.iter().map(|pair| u64::from(u16::from_be_bytes(*pair))).sum()
}

/// Reads what a raw socket for ICMP got, with its IP header. Returns which packet has died where, if the message
/// reports that. Anybody may have sent it: nothing in it is believed but by who knows the packet.
pub(super) fn parse_time_exceeded(message: &[u8]) -> Option<(Ipv4Addr, ProbePacket)> {
    let (outer, _) = Ipv4::read_from_prefix(message).ok()?;
    let inside = message.get(header_bytes(&outer)?..)?;
    let (icmp, quoted) = Icmp::read_from_prefix(inside).ok()?;
    if outer.protocol != ICMP || (icmp.kind, icmp.code) != EXCEEDED {
        return None;
    }
    let (inner, _) = Ipv4::read_from_prefix(quoted).ok()?;
    let transport = quoted.get(header_bytes(&inner)?..)?;
    // At least eight bytes are quoted: of TCP the ports and the sequence number, of UDP all.
    let (udp, _) = Udp::read_from_prefix(transport).ok()?;
    let (protocol, token) = match inner.protocol {
        TCP => (Protocol::Tcp, u32::from(udp.length.get()) << 16 | u32::from(udp.checksum.get())),
        UDP => (Protocol::Udp, u32::from(inner.identification.get()) << 16 | u32::from(udp.checksum.get())),
        _ => return None,
    };
    let doomed = ProbePacket {
        protocol,
        source: inner.source.into(),
        destination: inner.destination.into(),
        ports: (udp.source.get(), udp.destination.get()),
        token,
    };
    Some((outer.source.into(), doomed))
}

fn header_bytes(ip: &Ipv4) -> Option<usize> {
    let bytes = usize::from(ip.version & 0x0f) * 4;
    (ip.version >> 4 == 4 && bytes >= size_of::<Ipv4>()).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What a switch sends back of a packet.
    fn obituary(at: Ipv4Addr, packet: &[u8], quoted: usize) -> Vec<u8> {
        let outer = Ipv4 {
            version: 0x46,
            protocol: ICMP,
            source: at.octets(),
            destination: [10, 0, 0, 1],
            ..Ipv4::default()
        };
        let mut message = outer.as_bytes().to_vec();
        message.extend([0, 0, 0, 0, 11, 0, 0, 0, 0, 0, 0, 0]);
        message.extend(packet.iter().take(quoted));
        message
    }

    /// The checksum as a host checks it: of a right packet, 0.
    fn checked(doomed: &ProbePacket, packet: &[u8]) -> u16 {
        let protocol = if doomed.protocol == Protocol::Tcp { TCP } else { UDP };
        doomed.checksum(protocol, &packet[20..])
    }

    fn any_doomed() -> impl Strategy<Value = ProbePacket> {
        (any::<bool>(), any::<[u32; 2]>(), any::<(u16, u16)>(), any::<u32>()).prop_map(
            |(tcp, [source, destination], ports, token)| {
                let protocol = if tcp { Protocol::Tcp } else { Protocol::Udp };
                let (source, destination) = (source.into(), destination.into());
                ProbePacket { protocol, source, destination, ports, token }.sound()
            },
        )
    }

    #[test]
    fn a_segment_reads_as_the_standard_says() {
        let doomed = ProbePacket {
            protocol: Protocol::Tcp,
            source: Ipv4Addr::new(10, 0, 0, 1),
            destination: Ipv4Addr::new(10, 0, 0, 2),
            ports: (0x1234, 7100),
            token: 0xdead_beef,
        };
        let mut buffer = [0xaa; MOST];
        assert_eq!(doomed.write(3, &mut buffer), 40);
        assert_eq!(buffer[..12], [0x45, 0, 0, 40, 0xbe, 0xef, 0x40, 0, 3, 6, 0, 0]);
        assert_eq!(
            buffer[12..28],
            [10, 0, 0, 1, 10, 0, 0, 2, 0x12, 0x34, 0x1b, 0xbc, 0xde, 0xad, 0xbe, 0xef]
        );
        assert_eq!(buffer[28..36], [0, 0, 0, 0, 0x50, 0x08, 0xff, 0xff]);
    }

    proptest! {
        #[test]
        fn what_died_is_known_again_and_no_host_would_take_it(
            doomed in any_doomed(),
            at in any::<u32>(),
            time_to_live in 1..=16_u8,
            more in 0..=12_usize,
        ) {
            let mut buffer = [0; MOST];
            let length = doomed.write(time_to_live, &mut buffer);
            let packet = &buffer[..length];
            prop_assert_ne!(checked(&doomed, packet), 0);
            if doomed.protocol == Protocol::Udp {
                prop_assert_ne!(&packet[26..28], &[0, 0], "a datagram without a checksum is taken");
            }
            let message = obituary(at.into(), packet, 28 + more);
            prop_assert_eq!(parse_time_exceeded(&message), Some((at.into(), doomed)));
            let cut = message.len() - more.min(length - 28) - 1;
            prop_assert_eq!(parse_time_exceeded(&message[..cut]), None, "cut short");
        }

        #[test]
        fn any_bytes_are_read(bytes in proptest::collection::vec(any::<u8>(), 0..120)) {
            let _ = parse_time_exceeded(&bytes);
        }

        #[test]
        fn any_bytes_that_look_like_an_obituary_are_read(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..120),
            lengths in any::<(u8, u8)>(),
        ) {
            for (at, value) in [(0, 0x40 | (lengths.0 % 16)), (9, ICMP), (20, 11), (21, 0), (28, 0x40 | (lengths.1 % 16))] {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte = value;
                }
            }
            let _ = parse_time_exceeded(&bytes);
        }
    }
}
