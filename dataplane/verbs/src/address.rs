//! How ports are addressed: GIDs and their kinds, path MTUs, and flow labels.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Address of a port, 16 bytes in network order. Over Ethernet it is an IPv6 address, or an IPv4 address mapped into
/// one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// Whether the table's entry is unused.
    pub fn is_empty(self) -> bool {
        self.0 == [0; 16]
    }

    /// The IP address that it stands for; none for an unused entry.
    pub fn ip(self) -> Option<IpAddr> {
        if self.is_empty() {
            return None;
        }
        let address = Ipv6Addr::from(self.0);
        Some(address.to_ipv4_mapped().map_or(IpAddr::V6(address), IpAddr::V4))
    }
}

impl From<Ipv4Addr> for Gid {
    fn from(address: Ipv4Addr) -> Self {
        Self(address.to_ipv6_mapped().octets())
    }
}

impl From<IpAddr> for Gid {
    fn from(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(address) => address.into(),
            IpAddr::V6(address) => Self(address.octets()),
        }
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ipv6Addr::from(self.0).fmt(f)
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Which packets a GID stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GidKind {
    /// `InfiniBand`, or Ethernet frames without IP (`RoCE` v1); the kernel's name for it is `IB/RoCE v1`.
    InfiniBandOrRoceV1,
    /// UDP over IP.
    RoceV2,
    /// The kernel did not say, or said something new.
    Unknown,
}

/// An entry of a port's GID table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GidEntry {
    /// Its place in the table.
    pub index: u8,
    /// The address.
    pub gid: Gid,
    /// What packets it is for.
    pub kind: GidKind,
}

/// Largest payload of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mtu {
    /// 256 bytes.
    Bytes256,
    /// 512 bytes.
    Bytes512,
    /// 1024 bytes.
    Bytes1024,
    /// 2048 bytes.
    Bytes2048,
    /// 4096 bytes.
    Bytes4096,
}

impl Mtu {
    const ALL: [Self; 5] =
        [Self::Bytes256, Self::Bytes512, Self::Bytes1024, Self::Bytes2048, Self::Bytes4096];

    /// In bytes.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bytes256 => 256,
            Self::Bytes512 => 512,
            Self::Bytes1024 => 1024,
            Self::Bytes2048 => 2048,
            Self::Bytes4096 => 4096,
        }
    }

    /// The one of as many bytes.
    pub fn from_bytes(bytes: usize) -> Option<Self> {
        Self::ALL.into_iter().find(|mtu| mtu.bytes() == bytes)
    }

    /// Its code in `enum ibv_mtu`: 1 for 256 bytes up to 5.
    pub const fn code(self) -> u32 {
        match self {
            Self::Bytes256 => 1,
            Self::Bytes512 => 2,
            Self::Bytes1024 => 3,
            Self::Bytes2048 => 4,
            Self::Bytes4096 => 5,
        }
    }

    /// The MTU behind a code of `enum ibv_mtu`.
    pub fn from_code(code: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|mtu| mtu.code() == code)
    }
}

impl fmt::Display for Mtu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.bytes())
    }
}

/// The flow label that makes a `RoCE` v2 device send from this UDP source port. The port is at least 0xc000: the upper
/// two bits are set whatever one asks for. What a fabric hashes to pick a path.
pub const fn flow_label(source_port: u16) -> u32 {
    (source_port & 0x3fff) as u32
}

/// The UDP source port that a flow label leads to: `rdma_flow_label_to_udp_sport` of Linux.
pub const fn udp_source_port(flow_label: u32) -> u16 {
    let folded = (flow_label & 0x03fff) ^ ((flow_label & 0xfc000) >> 14);
    (folded | 0xc000) as u16
}

/// The UDP source port of a path that is opened with this one. From 0xc001 on it is the port itself.
pub const fn source_port_on_wire(source_port: u16) -> u16 {
    udp_source_port(flow_label(source_port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gids_stand_for_ip_addresses() {
        let address = Ipv4Addr::new(10, 0, 3, 1);
        assert_eq!(Gid::from(address).to_string(), "::ffff:10.0.3.1");
        assert_eq!(Gid::from(address).ip(), Some(IpAddr::V4(address)));
        let link_local: Ipv6Addr = "fe80::1".parse().unwrap();
        assert_eq!(Gid::from(IpAddr::V6(link_local)).ip(), Some(IpAddr::V6(link_local)));
        assert_eq!(Gid::default().ip(), None);
    }

    #[test]
    fn a_flow_label_gives_back_its_port() {
        for port in 0xc000..=0xffff {
            assert_eq!(udp_source_port(flow_label(port)), port);
            assert_eq!(source_port_on_wire(port), port);
        }
        assert_eq!(source_port_on_wire(20_000), 0xc000 | (20_000 & 0x3fff));
        assert_eq!(udp_source_port(flow_label(17)), 0xc011);
    }

    #[test]
    fn mtus_are_powers_of_two() {
        for mtu in Mtu::ALL {
            assert_eq!(Mtu::from_bytes(mtu.bytes()), Some(mtu));
            assert_eq!(Mtu::from_code(mtu.code()), Some(mtu));
            assert_eq!(mtu.bytes(), 128 << mtu.code());
        }
        assert_eq!((Mtu::from_bytes(1500), Mtu::from_code(0)), (None, None));
    }
}
