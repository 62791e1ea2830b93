//! What a packet is, said a second time: read from a slice, with nothing taken from the programs.

use harmonaize_events::{FlowKey, Totals};
use std::net::{Ipv4Addr, Ipv6Addr};

/// What a packet counts as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Tcp(FlowKey),
    Roce(FlowKey),
    Other,
    Fragment,
    Malformed,
}

impl Kind {
    /// One packet of this kind, of so many bytes.
    pub(crate) fn totals(&self, length: usize) -> Totals {
        let mut totals = Totals {
            buffers: 1,
            buffer_bytes: length as u64,
            packets: 1,
            bytes: length as u64,
            ..Totals::default()
        };
        *match self {
            Self::Tcp(_) => &mut totals.tcp,
            Self::Roce(_) => &mut totals.roce,
            Self::Other => &mut totals.other,
            Self::Fragment => &mut totals.fragments,
            Self::Malformed => &mut totals.malformed,
        } = 1;
        totals
    }
}

/// Reads a packet that crosses interface 1.
pub(crate) fn read(packet: &[u8], egress: bool) -> Kind {
    match link(packet, egress) {
        Ok(kind) | Err(kind) => kind,
    }
}

/// `length` bytes at `at`, of a packet that ends at `end`: beyond it is malformed, and too deep is other.
fn take(packet: &[u8], at: usize, length: usize, end: usize) -> Result<&[u8], Kind> {
    if at + length > end || end > packet.len() {
        return Err(Kind::Malformed);
    }
    if at + length > harmonaize_events::HEADERS_END {
        return Err(Kind::Other);
    }
    Ok(&packet[at..at + length])
}

fn short(bytes: &[u8], at: usize) -> usize {
    usize::from(u16::from_be_bytes([bytes[at], bytes[at + 1]]))
}

fn link(packet: &[u8], egress: bool) -> Result<Kind, Kind> {
    let whole = packet.len();
    let mut kind = short(take(packet, 0, 14, whole)?, 12);
    let mut at = 14;
    let mut tags = 0;
    while matches!(kind, 0x8100 | 0x88a8) && tags < 2 {
        kind = short(take(packet, at, 4, whole)?, 2);
        at += 4;
        tags += 1;
    }
    match kind {
        0x0800 => ipv4(packet, at, egress),
        0x86dd => ipv6(packet, at, egress),
        _ => Ok(Kind::Other),
    }
}

fn ipv4(packet: &[u8], at: usize, egress: bool) -> Result<Kind, Kind> {
    let header = take(packet, at, 20, packet.len())?;
    let own = usize::from(header[0] % 16) * 4;
    let total = short(header, 2);
    if header[0] / 16 != 4 || own < 20 || total < own || at + total > packet.len() {
        return Err(Kind::Malformed);
    }
    if short(header, 6) & 0x3fff != 0 {
        return Ok(Kind::Fragment);
    }
    let address = |at: usize| {
        let octets: [u8; 4] = header[at..at + 4].try_into().unwrap();
        Ipv4Addr::from(octets).to_ipv6_mapped().octets()
    };
    transport(packet, at + own, at + total, header[9], key(address(12), address(16), egress), egress)
}

fn ipv6(packet: &[u8], at: usize, egress: bool) -> Result<Kind, Kind> {
    let header = take(packet, at, 40, packet.len())?;
    let end = at + 40 + short(header, 4);
    if header[0] / 16 != 6 || end > packet.len() {
        return Err(Kind::Malformed);
    }
    let address = |at: usize| -> [u8; 16] {
        let octets: [u8; 16] = header[at..at + 16].try_into().unwrap();
        Ipv6Addr::from(octets).octets()
    };
    let (mut next, mut at) = (header[6], at + 40);
    let key = key(address(8), address(24), egress);
    for _ in 0..6 {
        if !matches!(next, 0 | 43 | 44 | 51 | 60) {
            break;
        }
        let extension = take(packet, at, 4, end)?;
        let length = usize::from(extension[1]);
        at += match next {
            44 if short(extension, 2) & 0xfff9 != 0 => return Ok(Kind::Fragment),
            44 => 8,
            51 => 8 + 4 * length,
            _ => 8 + 8 * length,
        };
        next = extension[0];
    }
    transport(packet, at, end, next, key, egress)
}

fn key(source: [u8; 16], destination: [u8; 16], egress: bool) -> FlowKey {
    let (local, remote) = if egress { (source, destination) } else { (destination, source) };
    FlowKey {
        local: FlowKey::words(local),
        remote: FlowKey::words(remote),
        interface: 1,
        ..FlowKey::default()
    }
}

fn transport(
    packet: &[u8],
    at: usize,
    end: usize,
    protocol: u8,
    mut key: FlowKey,
    egress: bool,
) -> Result<Kind, Kind> {
    key.protocol = protocol;
    match protocol {
        6 => {
            let header = take(packet, at, 20, end)?;
            let own = usize::from(header[12] / 16) * 4;
            if own < 20 || at + own > end {
                return Err(Kind::Malformed);
            }
            let (source, destination) = (short(header, 0) as u16, short(header, 2) as u16);
            (key.local_port, key.remote_port) =
                if egress { (source, destination) } else { (destination, source) };
            Ok(Kind::Tcp(key))
        }
        17 => {
            let header = take(packet, at, 8, end)?;
            if short(header, 2) != 4791 {
                return Ok(Kind::Other);
            }
            let last = at + short(header, 4);
            if last > end || last < at + 8 + 12 + 4 {
                return Err(Kind::Malformed);
            }
            let base = take(packet, at + 8, 12, last)?;
            if base[1] % 16 != 0 {
                return Err(Kind::Malformed);
            }
            if base[0] % 32 == 17 && base[0] / 32 != 4 {
                take(packet, at + 20, 4, last - 4)?;
            }
            key.queue_pair = u32::from_be_bytes([0, base[5], base[6], base[7]]);
            key.direction = if egress { 2 } else { 1 };
            Ok(Kind::Roce(key))
        }
        _ => Ok(Kind::Other),
    }
}
