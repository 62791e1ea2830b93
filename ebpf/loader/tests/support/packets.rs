//! Packets, byte by byte.

use std::net::IpAddr;

/// Ethernet with VLAN tags around what it carries; `kind` is that of the innermost.
pub(crate) fn ethernet(tags: &[u16], kind: u16, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
    for tag in tags {
        packet.extend(tag.to_be_bytes());
        packet.extend([0, 7]);
    }
    packet.extend(kind.to_be_bytes());
    packet.extend(payload);
    packet
}

/// An IP packet in Ethernet.
pub(crate) fn ip(source: IpAddr, destination: IpAddr, protocol: u8, ecn: u8, payload: &[u8]) -> Vec<u8> {
    match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let mut packet = vec![0x45, ecn];
            packet.extend((20 + payload.len() as u16).to_be_bytes());
            packet.extend([0, 0, 0, 0, 64, protocol, 0, 0]);
            packet.extend(source.octets());
            packet.extend(destination.octets());
            packet.extend(payload);
            ethernet(&[], 0x0800, &packet)
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let mut packet = vec![0x60, ecn << 4, 0, 0];
            packet.extend((payload.len() as u16).to_be_bytes());
            packet.extend([protocol, 64]);
            packet.extend(source.octets());
            packet.extend(destination.octets());
            packet.extend(payload);
            ethernet(&[], 0x86dd, &packet)
        }
        _ => panic!("addresses of two kinds"),
    }
}

/// A TCP segment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Segment {
    pub source: u16,
    pub destination: u16,
    pub sequence: u32,
    pub acknowledgement: u32,
    pub flags: u8,
    pub window: u16,
    pub payload: usize,
}

pub(crate) const FIN: u8 = 0x01;
pub(crate) const SYN: u8 = 0x02;
pub(crate) const RST: u8 = 0x04;
pub(crate) const ACK: u8 = 0x10;
pub(crate) const ECE: u8 = 0x40;
pub(crate) const CWR: u8 = 0x80;

impl Segment {
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(self.source.to_be_bytes());
        bytes.extend(self.destination.to_be_bytes());
        bytes.extend(self.sequence.to_be_bytes());
        bytes.extend(self.acknowledgement.to_be_bytes());
        bytes.extend([0x50, self.flags]);
        bytes.extend(self.window.to_be_bytes());
        bytes.extend([0; 4]);
        bytes.resize(20 + self.payload, 0xab);
        bytes
    }
}

/// A packet of RoCE v2.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Transfer {
    pub opcode: u8,
    pub queue_pair: u32,
    pub sequence: u32,
    /// Asks for an acknowledgement.
    pub asks: bool,
    /// What follows the base header first: for an ACK its syndrome.
    pub extended: u32,
    pub payload: usize,
}

impl Transfer {
    /// UDP with the base header, an extended word, payload and checksum.
    pub(crate) fn bytes(&self, source_port: u16) -> Vec<u8> {
        let mut base = vec![self.opcode, 0x40, 0xff, 0xff];
        base.extend(self.queue_pair.to_be_bytes());
        base.extend((self.sequence | u32::from(self.asks) << 31).to_be_bytes());
        base.extend(self.extended.to_be_bytes());
        base.resize(base.len() + self.payload, 0xcd);
        base.extend([0; 4]);
        udp(source_port, 4791, &base)
    }
}

/// A datagram of UDP.
pub(crate) fn udp(source: u16, destination: u16, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(source.to_be_bytes());
    bytes.extend(destination.to_be_bytes());
    bytes.extend((8 + payload.len() as u16).to_be_bytes());
    bytes.extend([0; 2]);
    bytes.extend(payload);
    bytes
}
