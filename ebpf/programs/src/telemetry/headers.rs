//! Reads a packet's headers: Ethernet, VLAN, IPv4, IPv6, TCP, and UDP to the port of RoCE v2.
//!
//! Nothing in a packet is believed: what reaches beyond the packet, or contradicts itself, makes it malformed. Headers that
//! lie deeper than is looked make it `other`, as an unknown protocol would.

use crate::diagnosis::Reason;
use crate::key::PackedFlowKey;
use crate::maps;
use aya_ebpf::bindings::{__sk_buff, xdp_md};
use harmonaize_events::{Direction, EXTENSION_HEADERS, HEADERS_END, PSN_MASK, Protocol, ROCE_PORT};

/// What a buffer is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Class {
    Tcp,
    Roce,
    Other,
    Fragment,
    Malformed,
    /// Its headers are there, but not where they can be read.
    Unreachable,
}

/// What is taken from a buffer. It goes by memory to functions that the verifier goes through on their own, once: joined
/// to every way through the headers, they would be too much for it.
#[repr(C)]
pub struct PacketInfo {
    /// The flow that it belongs to.
    pub key: PackedFlowKey,
    /// Packets on the wire, and their bytes there.
    pub packets: u64,
    pub bytes: u64,
    /// Bytes before the payload, as far as they are known: each packet of a buffer has them.
    pub headers: u32,
    /// Bytes of payload in each packet, or 0 for a buffer that is one.
    pub segment_size: u32,
    /// TCP: sequence number. RoCE: packet sequence number, with the bit that asks for an acknowledgement.
    pub sequence: u32,
    /// TCP: the next sequence number that the other side may send.
    pub acknowledgement: u32,
    /// TCP: bytes of payload.
    pub payload: u32,
    /// TCP: window, as it stands. RoCE: UDP source port.
    pub window: u16,
    /// TCP: flags. RoCE: opcode.
    pub flags: u8,
    /// RoCE: how an acknowledgement turned out.
    pub syndrome: u8,
    /// ECN says that a queue was congested: 1, or else 0.
    pub ecn_ce: u32,
    /// IPv4: 1, or else 0.
    pub ipv4: u32,
}

/// A buffer: a packet, or several that the device will cut or has merged.
pub struct Buffer {
    data: usize,
    end: usize,
    /// Bytes of all of it, with the link's header.
    pub length: u32,
    /// The interface's index.
    pub interface: u32,
    /// Bytes of payload in each packet, or 0 for a buffer that is one.
    pub segment_size: u32,
    segments: u32,
    /// Why it is of no flow, to be told.
    #[cfg(feature = "diagnosis")]
    pub why: core::cell::Cell<Reason>,
}

impl Buffer {
    /// Takes what the kernel says of a buffer.
    #[inline(always)]
    pub fn from_skb(skb: *const __sk_buff) -> Self {
        // SAFETY: the kernel hands a valid context to the program; the verifier turns these into checked loads.
        let (data, end, length, interface, segment_size, segments) = unsafe {
            ((*skb).data, (*skb).data_end, (*skb).len, (*skb).ifindex, (*skb).gso_size, (*skb).gso_segs)
        };
        Self {
            data: pointer(data),
            end: pointer(end),
            length,
            interface,
            segment_size,
            segments,
            #[cfg(feature = "diagnosis")]
            why: core::cell::Cell::new(Reason::Truncated),
        }
    }

    /// Takes what the kernel says of a packet that the device has just received.
    #[inline(always)]
    pub fn from_xdp(xdp: *const xdp_md) -> Self {
        // SAFETY: as above.
        let (data, end, interface) = unsafe { ((*xdp).data, (*xdp).data_end, (*xdp).ingress_ifindex) };
        let (data, end) = (pointer(data), pointer(end));
        Self {
            data,
            end,
            length: (end - data) as u32,
            interface,
            segment_size: 0,
            segments: 0,
            #[cfg(feature = "diagnosis")]
            why: core::cell::Cell::new(Reason::Truncated),
        }
    }

    /// Of a class that is of no flow, and why; nothing but the class where there is no diagnosis.
    #[inline(always)]
    fn reject<T>(&self, class: Class, why: Reason) -> Result<T, Class> {
        #[cfg(feature = "diagnosis")]
        self.why.set(why);
        #[cfg(not(feature = "diagnosis"))]
        let _ = why;
        Err(class)
    }

    /// Tells why it is of no flow, where there is diagnosis; headers are known up to `headers`.
    #[inline(always)]
    pub fn diagnose<const EGRESS: bool>(&self, headers: u32) {
        #[cfg(feature = "diagnosis")]
        crate::diagnosis::report(self.why.get(), EGRESS, self.interface, self.length, headers);
        #[cfg(not(feature = "diagnosis"))]
        let _ = headers;
    }

    /// How many packets on the wire it stands for, with headers of `headers` bytes.
    #[inline(always)]
    pub fn packets(&self, headers: u32) -> u64 {
        if self.segment_size == 0 {
            return 1;
        }
        if self.segments != 0 {
            return u64::from(self.segments);
        }
        // Who handed it in did not count.
        u64::from(self.length.saturating_sub(headers)).div_ceil(u64::from(self.segment_size)).max(1)
    }

    /// A header at `offset`, which must end before `limit`.
    #[inline(always)]
    fn read<T: Copy>(&self, offset: usize, limit: usize) -> Result<T, Class> {
        let beyond = offset + size_of::<T>();
        if beyond > limit {
            return self.reject(Class::Malformed, Reason::HeaderBeyondEnd);
        }
        if offset > HEADERS_END - size_of::<T>() {
            return self.reject(Class::Unreachable, Reason::TooDeep);
        }
        #[cfg(feature = "diagnosis")]
        let offset = bounded(offset);
        let at = self.data + offset;
        if at + size_of::<T>() > self.end {
            return self.reject(Class::Unreachable, Reason::Truncated);
        }
        // SAFETY: it lies within the packet, which the line above proves to the verifier too. Every bit pattern is a T.
        // Where it is not aligned, the machine's loads do not mind; the verifier refuses the program where they would.
        Ok(unsafe { core::ptr::read(at as *const T) })
    }
}

/// Widens an address of the context right where it is read. The verifier takes it for a pointer by then, and refuses the
/// widening where the compiler has put it off.
#[inline(always)]
fn pointer(address: u32) -> usize {
    let mut wide = address as usize;
    // SAFETY: it changes nothing; the compiler takes it for a change of the value.
    unsafe { core::arch::asm!("{0} = {0}", inout(reg) wide) };
    wide
}

/// The same offset, in a register of its own. What is compared has to be the very register that is added to a pointer: kernels
/// before 6.10 do not conclude from the bounds of one to those of another that differs by a constant, as compilers like it.
#[inline(always)]
fn apart(mut offset: usize) -> usize {
    // SAFETY: it changes nothing; the compiler takes it for a change of the value.
    unsafe { core::arch::asm!("{0} = {0}", inout(reg) offset) };
    offset
}

/// The same offset, which is less than [`HEADERS_END`], with that bound where the verifier sees it. Reasons take registers, and then
/// the compiler compares one copy of the offset and adds another.
#[cfg(feature = "diagnosis")]
#[inline(always)]
fn bounded(mut offset: usize) -> usize {
    const { assert!(HEADERS_END == 256) };
    // SAFETY: it changes nothing, for the offset is less.
    unsafe { core::arch::asm!("{0} &= 255", inout(reg) offset) };
    offset
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Ethernet {
    addresses: [u16; 6],
    kind: u16,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Tag {
    control: u16,
    kind: u16,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Ipv4 {
    version: u8,
    service: u8,
    total: u16,
    identification: u16,
    fragment: u16,
    hops: u8,
    protocol: u8,
    checksum: u16,
    source: u32,
    destination: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Ipv6 {
    version: u8,
    class: u8,
    label: u16,
    payload: u16,
    next: u8,
    hops: u8,
    source: [u64; 2],
    destination: [u64; 2],
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Extension {
    next: u8,
    length: u8,
    fragment: u16,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Tcp {
    source: u16,
    destination: u16,
    sequence: u32,
    acknowledgement: u32,
    offset: u8,
    flags: u8,
    window: u16,
    checksum: u16,
    urgent: u16,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Udp {
    source: u16,
    destination: u16,
    length: u16,
    checksum: u16,
}

/// InfiniBand's base transport header.
#[derive(Clone, Copy)]
#[repr(C)]
struct Bth {
    opcode: u8,
    flags: u8,
    partition: u16,
    destination: u32,
    sequence: u32,
}

const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;
const VLAN_TAG: u16 = 0x8100;
const QINQ_TAG: u16 = 0x88a8;

const TCP: u8 = Protocol::Tcp as u8;
const UDP: u8 = Protocol::Roce as u8;

/// Extension headers of IPv6.
const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const AUTHENTICATION: u8 = 51;
const DESTINATION: u8 = 60;

/// Bytes of the checksum at the end of a RoCE packet.
const ICRC_BYTES: usize = 4;
/// RoCE: the operation that has a syndrome, and the service of congestion notifications, which has no operations.
const ACKNOWLEDGEMENT: u8 = 17;
const CONGESTION: u8 = 4;

/// Where the transport's header is, and where the IP packet ends.
#[derive(Clone, Copy)]
struct Transport {
    protocol: u8,
    offset: usize,
    limit: usize,
}

/// Reads the headers of a buffer.
#[inline(always)]
pub fn read<const EGRESS: bool>(buffer: &Buffer, seen: &mut PacketInfo) -> Result<Class, Class> {
    let transport = network::<EGRESS>(buffer, seen)?;
    seen.headers = transport.offset as u32;
    match transport.protocol {
        TCP => tcp::<EGRESS>(buffer, seen, transport),
        UDP => udp::<EGRESS>(buffer, seen, transport),
        _ => Err(Class::Other),
    }
}

#[inline(always)]
fn network<const EGRESS: bool>(buffer: &Buffer, seen: &mut PacketInfo) -> Result<Transport, Class> {
    let length = buffer.length as usize;
    let link: Ethernet = buffer.read(0, length)?;
    let mut kind = u16::from_be(link.kind);
    let mut at = size_of::<Ethernet>();
    for _ in 0..2 {
        if kind != VLAN_TAG && kind != QINQ_TAG {
            break;
        }
        let tag: Tag = buffer.read(at, length)?;
        kind = u16::from_be(tag.kind);
        at += size_of::<Tag>();
    }
    match kind {
        IPV4 => ipv4::<EGRESS>(buffer, seen, at),
        IPV6 => ipv6::<EGRESS>(buffer, seen, at),
        _ => Err(Class::Other),
    }
}

#[inline(always)]
fn ipv4<const EGRESS: bool>(buffer: &Buffer, seen: &mut PacketInfo, at: usize) -> Result<Transport, Class> {
    let length = buffer.length as usize;
    let ip: Ipv4 = buffer.read(at, length)?;
    let own = usize::from(ip.version & 0x0f) * 4;
    if ip.version >> 4 != 4 || own < size_of::<Ipv4>() {
        return buffer.reject(Class::Malformed, Reason::Version);
    }
    let total = usize::from(u16::from_be(ip.total));
    // Merged buffers of more than 64 KiB do not fit into the field, and have 0 there.
    let limit = if total == 0 && buffer.segment_size != 0 { length } else { at + total };
    if limit > length || limit < at + own {
        return buffer.reject(Class::Malformed, Reason::Length);
    }
    if u16::from_be(ip.fragment) & 0x3fff != 0 {
        return buffer.reject(Class::Fragment, Reason::Fragment);
    }
    seen.ecn_ce = u32::from(ip.service & 3 == 3);
    seen.ipv4 = 1;
    seen.key.place::<EGRESS>(PackedFlowKey::mapped(ip.source), PackedFlowKey::mapped(ip.destination));
    Ok(Transport { protocol: ip.protocol, offset: at + own, limit })
}

#[inline(always)]
fn ipv6<const EGRESS: bool>(buffer: &Buffer, seen: &mut PacketInfo, at: usize) -> Result<Transport, Class> {
    let length = buffer.length as usize;
    let ip: Ipv6 = buffer.read(at, length)?;
    if ip.version >> 4 != 6 {
        return buffer.reject(Class::Malformed, Reason::Version);
    }
    let offset = at + size_of::<Ipv6>();
    let payload = usize::from(u16::from_be(ip.payload));
    let limit = if payload == 0 && buffer.segment_size != 0 { length } else { offset + payload };
    if limit > length {
        return buffer.reject(Class::Malformed, Reason::Length);
    }
    seen.ecn_ce = u32::from((ip.class >> 4) & 3 == 3);
    seen.ipv4 = 0;
    seen.key.place::<EGRESS>(ip.source, ip.destination);
    if matches!(ip.next, HOP_BY_HOP | ROUTING | DESTINATION | FRAGMENT | AUTHENTICATION) {
        return extensions(buffer, ip.next, offset, limit);
    }
    Ok(Transport { protocol: ip.next, offset, limit })
}

/// Follows extension headers to the transport's.
#[inline(always)]
fn extensions(buffer: &Buffer, mut next: u8, mut offset: usize, limit: usize) -> Result<Transport, Class> {
    for _ in 0..EXTENSION_HEADERS {
        let unit = match next {
            HOP_BY_HOP | ROUTING | DESTINATION => 8,
            FRAGMENT => 0,
            AUTHENTICATION => 4,
            _ => break,
        };
        offset = apart(offset);
        let extension: Extension = buffer.read(offset, limit)?;
        // The offset and the flag of further fragments; a packet that is all of its fragments goes on.
        if next == FRAGMENT && u16::from_be(extension.fragment) & 0xfff9 != 0 {
            return buffer.reject(Class::Fragment, Reason::Fragment);
        }
        next = extension.next;
        offset += 8 + usize::from(extension.length) * unit;
    }
    // Through memory that the verifier does not follow: it would else go through all that comes for each way to get here.
    let found = maps::opaque((offset as u64) << 8 | u64::from(next)).ok_or(Class::Unreachable)?;
    Ok(Transport { protocol: found as u8, offset: (found >> 8) as usize & 0xffff, limit })
}

#[inline(always)]
fn tcp<const EGRESS: bool>(buffer: &Buffer, seen: &mut PacketInfo, at: Transport) -> Result<Class, Class> {
    let tcp: Tcp = buffer.read(apart(at.offset), at.limit)?;
    let own = usize::from(tcp.offset >> 4) * 4;
    let payload_at = at.offset + own;
    if own < size_of::<Tcp>() || payload_at > at.limit {
        return buffer.reject(Class::Malformed, Reason::TcpOffset);
    }
    seen.headers = payload_at as u32;
    seen.payload = (at.limit - payload_at) as u32;
    seen.sequence = u32::from_be(tcp.sequence);
    seen.acknowledgement = u32::from_be(tcp.acknowledgement);
    seen.flags = tcp.flags;
    seen.syndrome = 0;
    seen.window = tcp.window;
    seen.key.tcp::<EGRESS>(u16::from_be(tcp.source), u16::from_be(tcp.destination));
    Ok(Class::Tcp)
}

/// A datagram of UDP, which is RoCE v2 by its destination port.
#[inline(always)]
fn udp<const EGRESS: bool>(buffer: &Buffer, seen: &mut PacketInfo, at: Transport) -> Result<Class, Class> {
    let udp: Udp = buffer.read(apart(at.offset), at.limit)?;
    let base_at = at.offset + size_of::<Udp>();
    seen.headers = base_at as u32;
    if u16::from_be(udp.destination) != ROCE_PORT {
        return Err(Class::Other);
    }
    let end = at.offset + usize::from(u16::from_be(udp.length));
    if end > at.limit || end < base_at + size_of::<Bth>() + ICRC_BYTES {
        return buffer.reject(Class::Malformed, Reason::UdpLength);
    }
    let base_at = apart(base_at);
    let base: Bth = buffer.read(base_at, end - ICRC_BYTES)?;
    // Another version of the transport header would mean other fields.
    if base.flags & 0x0f != 0 {
        return buffer.reject(Class::Malformed, Reason::Bth);
    }
    seen.syndrome = 0;
    if base.opcode & 0x1f == ACKNOWLEDGEMENT && base.opcode >> 5 != CONGESTION {
        let extended: u32 = buffer.read(apart(base_at + size_of::<Bth>()), end - ICRC_BYTES)?;
        seen.syndrome = (u32::from_be(extended) >> 24) as u8;
    }
    (seen.acknowledgement, seen.payload) = (0, 0);
    seen.flags = base.opcode;
    seen.sequence = u32::from_be(base.sequence);
    seen.window = u16::from_be(udp.source);
    let direction = if EGRESS { Direction::Egress } else { Direction::Ingress };
    seen.key.roce(u32::from_be(base.destination) & PSN_MASK, direction);
    Ok(Class::Roce)
}
