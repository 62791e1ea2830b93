//! One endpoint for whoever sends and receives datagrams, over whichever network.

use super::{DatagramConfig, DatagramCounters, Datagrams, RdmaAddress, RdmaDatagrams};
use std::io;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;

/// Where datagrams come from and go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Address {
    /// Over UDP.
    Udp(SocketAddr),
    /// Over RDMA.
    Rdma(RdmaAddress),
}

/// An endpoint. It never blocks, and nothing is allocated once there is one. Datagrams are lost, doubled and overtaken as in any network.
#[derive(Debug)]
pub enum Endpoint {
    /// Over UDP.
    Udp(Box<Datagrams>),
    /// Over RDMA.
    Rdma(Box<RdmaDatagrams>),
}

impl Endpoint {
    /// An endpoint over UDP from which `peer` can be reached. It reaches nobody else where there is a route to `peer`
    /// now.
    ///
    /// # Errors
    /// If the kernel refuses the socket.
    pub fn towards(peer: SocketAddr, config: DatagramConfig) -> io::Result<Self> {
        let mut datagrams = Datagrams::bind(Datagrams::unspecified_for(peer), config)?;
        datagrams.restrict_to(peer);
        Ok(Self::Udp(Box::new(datagrams)))
    }

    /// Where it is.
    pub fn local_address(&self) -> Address {
        match self {
            Self::Udp(datagrams) => Address::Udp(datagrams.local_address()),
            Self::Rdma(datagrams) => Address::Rdma(datagrams.local_address()),
        }
    }

    /// What has gone through it.
    pub fn counters(&self) -> DatagramCounters {
        match self {
            Self::Udp(datagrams) => datagrams.counters(),
            Self::Rdma(datagrams) => datagrams.counters(),
        }
    }

    /// Whether the network has said since the last call that nobody is at the peer's address.
    pub fn take_refusal(&mut self) -> bool {
        match self {
            Self::Udp(datagrams) => datagrams.take_refusal(),
            Self::Rdma(_) => false,
        }
    }

    /// As [`Datagrams::has_no_route`]; never over RDMA.
    pub fn has_no_route(&self) -> bool {
        match self {
            Self::Udp(datagrams) => datagrams.has_no_route(),
            Self::Rdma(_) => false,
        }
    }

    /// As [`Datagrams::restrict_to`], where the peer is on the endpoint's network and that is UDP.
    pub fn restrict_to(&mut self, peer: Address) {
        if let (Self::Udp(datagrams), Address::Udp(peer)) = (self, peer) {
            datagrams.restrict_to(peer);
        }
    }

    /// As [`Datagrams::set_dscp`]; over RDMA datagrams keep the traffic class of their port.
    ///
    /// # Errors
    /// If the kernel refuses it.
    pub fn set_dscp(&self, dscp: u8) -> io::Result<()> {
        match self {
            Self::Udp(datagrams) => datagrams.set_dscp(dscp),
            Self::Rdma(_) => Ok(()),
        }
    }

    /// Datagrams that wait to be sent; over RDMA they leave at once.
    pub fn waiting(&self) -> usize {
        match self {
            Self::Udp(datagrams) => datagrams.waiting(),
            Self::Rdma(_) => 0,
        }
    }

    /// Has `write` write a datagram, and say its length and where it goes; it leaves with [`Endpoint::flush`] at the latest. `None` of `write`
    /// leaves things as they were. False if there is no room for more, nothing was written, or the address is of another network.
    pub fn push(&mut self, write: impl FnOnce(&mut [u8]) -> Option<(Address, usize)>) -> bool {
        match self {
            Self::Udp(datagrams) => datagrams.push(|room| match write(room)? {
                (Address::Udp(to), bytes) => Some((to, bytes)),
                (Address::Rdma(_), _) => None,
            }),
            Self::Rdma(datagrams) => datagrams.push(|room| match write(room)? {
                (Address::Rdma(to), bytes) => Some((to, bytes)),
                (Address::Udp(_), _) => None,
            }),
        }
    }

    /// Hands over everything that waits; false if something waits still.
    pub fn flush(&mut self) -> bool {
        match self {
            Self::Udp(datagrams) => datagrams.flush(),
            Self::Rdma(_) => true,
        }
    }

    /// Takes in what has arrived, and shows `sink` each datagram with its sender. How many there were; 0: no more.
    pub fn receive(&mut self, sink: &mut dyn FnMut(Address, &[u8])) -> usize {
        match self {
            Self::Udp(datagrams) => datagrams.receive(&mut |from, bytes| sink(Address::Udp(from), bytes)),
            Self::Rdma(datagrams) => datagrams.receive(&mut |from, bytes| sink(Address::Rdma(from), bytes)),
        }
    }

    /// To be called before sleeping on [`Endpoint::wake_fd`]; false if something is there already.
    pub fn prepare_sleep(&mut self) -> bool {
        match self {
            Self::Udp(_) => true,
            Self::Rdma(datagrams) => datagrams.prepare_sleep(),
        }
    }

    /// Readable when something has arrived.
    ///
    /// # Errors
    /// If a device is gone.
    pub fn wake_fd(&self) -> io::Result<BorrowedFd<'_>> {
        match self {
            Self::Udp(datagrams) => Ok(datagrams.wake_fd()),
            Self::Rdma(datagrams) => datagrams.wake_fd().map_err(io::Error::other),
        }
    }
}
