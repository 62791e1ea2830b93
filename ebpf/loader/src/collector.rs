//! What the agent takes telemetry from: the programs in the kernel, or a made-up source in tests.

use crate::attachment::{AttachMode, Change};
use crate::dcqcn::{Dcqcn, read_dcqcn};
use crate::endpoints::Endpoints;
use crate::error::Error;
use crate::kernel::Kernel;
use crate::programs::{Cost, Programs};
use crate::queue_pair_counters::{QueuePairCounters, read_queue_pair_counters};
use crate::rdma::{RdmaPort, read_rdma_ports};
use crate::read::{Counters, Flows};
use harmonaize_events::{Event, FlowKey, InterfaceTotals, Losses};
use std::os::fd::{AsFd, BorrowedFd};

/// An interface that is watched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttachedInterface {
    /// Its name.
    pub name: String,
    /// Its index in its network namespace.
    pub index: u32,
    /// How the programs are held there.
    pub mode: AttachMode,
}

/// A source of telemetry: flows, events, totals, and what was lost. [`Programs`] is the real one, [`crate::fake::Fake`] one
/// for tests.
///
/// Interfaces are those of the calling thread's network namespace. Times are nanoseconds of CLOCK_MONOTONIC.
pub trait Collector: Send {
    /// What was found of the kernel.
    fn kernel(&self) -> &Kernel;

    /// What was asked for and could not be had, each with the reason.
    fn missing(&self) -> &[String] {
        &[]
    }

    /// Begins to watch an interface, and returns its index.
    ///
    /// # Errors
    /// There is no such interface, it is watched already, or the kernel refuses.
    fn attach(&mut self, name: &str) -> Result<u32, Error>;

    /// Ends that, and returns what had crossed the interface. Its flows stay until they are forgotten.
    ///
    /// # Errors
    /// It is not watched, or the kernel refuses.
    fn detach(&mut self, name: &str) -> Result<InterfaceTotals, Error>;

    /// The interfaces that are watched.
    fn attached(&self) -> Vec<AttachedInterface>;

    /// Looks after interfaces that are gone or were replaced by others of their name.
    ///
    /// # Errors
    /// As for [`Collector::attach`]; a later call goes on.
    fn refresh(&mut self) -> Result<Vec<Change>, Error>;

    /// Reads all flows into `into`, whose memory is used again.
    ///
    /// # Errors
    /// A call on a table fails.
    fn read_flows(&mut self, into: &mut Flows) -> Result<(), Error>;

    /// Reads one flow, at a fraction of the cost of all. None when it is not known.
    ///
    /// # Errors
    /// A call on a table fails.
    fn read_flow(&self, flow: &FlowKey) -> Result<Option<Counters>, Error>;

    /// Hands the next events, at most `limit`, to `with`; returns how many there were. Late round trips come first.
    ///
    /// # Errors
    /// A record is not an event of this version.
    fn read_events(&mut self, limit: usize, with: &mut dyn FnMut(&Event)) -> Result<usize, Error>;

    /// Reads what the kernel itself knows of the flows' ends, sockets and queue pairs, into `into`. `into` is empty where there
    /// is no such source.
    ///
    /// # Errors
    /// A call on a table fails.
    fn read_endpoints(&mut self, into: &mut Endpoints) -> Result<(), Error>;

    /// Begins or ends following sockets at each of their segments. Without that, what [`Collector::read_endpoints`] reads is as
    /// of the last change of their state. True if that changes anything.
    ///
    /// # Errors
    /// The kernel refuses.
    fn watch_endpoints(&mut self, enabled: bool) -> Result<bool, Error> {
        let _ = enabled;
        Ok(false)
    }

    /// Reads what RDMA devices count themselves, by port, into `into`, whose memory is used again. Empty where there is no device.
    fn read_ports(&mut self, into: &mut Vec<RdmaPort>);

    /// Reads what RDMA devices count by queue pair, into `into`, whose memory is used again. Empty where there is no device.
    fn read_queue_pair_counters(&mut self, into: &mut Vec<QueuePairCounters>);

    /// Reads the parameters of DCQCN of RDMA devices that show some, into `into`, whose memory is used again.
    fn read_dcqcn(&mut self, into: &mut Vec<Dcqcn>);

    /// What crossed an interface since it was attached.
    ///
    /// # Errors
    /// It is not watched.
    fn totals(&self, index: u32) -> Result<InterfaceTotals, Error>;

    /// What was lost since the beginning. Evicted flows stand in [`Flows::evicted`].
    ///
    /// # Errors
    /// A call on the table fails.
    fn losses(&self) -> Result<Losses, Error>;

    /// Removes a flow that is over. False when it is gone already.
    ///
    /// # Errors
    /// A call on the table fails.
    fn forget(&mut self, flow: &FlowKey) -> Result<bool, Error>;

    /// What all programs cost so far.
    ///
    /// # Errors
    /// The kernel does not tell.
    fn cost(&self) -> Result<Cost, Error>;

    /// Ready to be read when there are events other than late round trips, for poll and epoll. None where that cannot be waited
    /// for.
    fn event_fd(&self) -> Option<BorrowedFd<'_>>;

    /// The same for late round trips.
    fn late_rtt_fd(&self) -> Option<BorrowedFd<'_>>;
}

impl Collector for Programs {
    fn kernel(&self) -> &Kernel {
        Programs::kernel(self)
    }

    fn missing(&self) -> &[String] {
        Programs::missing(self)
    }

    fn attach(&mut self, name: &str) -> Result<u32, Error> {
        Programs::attach(self, name)
    }

    fn detach(&mut self, name: &str) -> Result<InterfaceTotals, Error> {
        Programs::detach(self, name)
    }

    fn attached(&self) -> Vec<AttachedInterface> {
        let own = Programs::attached(self);
        own.map(|(name, index, hook)| AttachedInterface { name: name.to_owned(), index, mode: hook })
            .collect()
    }

    fn refresh(&mut self) -> Result<Vec<Change>, Error> {
        Programs::refresh(self)
    }

    fn read_flows(&mut self, into: &mut Flows) -> Result<(), Error> {
        Programs::read_flows(self, into)
    }

    fn read_flow(&self, flow: &FlowKey) -> Result<Option<Counters>, Error> {
        Programs::read_flow(self, flow)
    }

    fn read_events(&mut self, limit: usize, with: &mut dyn FnMut(&Event)) -> Result<usize, Error> {
        Programs::read_events(self, limit, with)
    }

    fn read_endpoints(&mut self, into: &mut Endpoints) -> Result<(), Error> {
        Programs::read_endpoints(self, into)
    }

    fn watch_endpoints(&mut self, wanted: bool) -> Result<bool, Error> {
        Programs::watch_endpoints(self, wanted)
    }

    fn read_ports(&mut self, into: &mut Vec<RdmaPort>) {
        read_rdma_ports(into);
    }

    fn read_queue_pair_counters(&mut self, into: &mut Vec<QueuePairCounters>) {
        read_queue_pair_counters(into);
    }

    fn read_dcqcn(&mut self, into: &mut Vec<Dcqcn>) {
        read_dcqcn(into);
    }

    fn totals(&self, index: u32) -> Result<InterfaceTotals, Error> {
        Programs::totals(self, index)
    }

    fn losses(&self) -> Result<Losses, Error> {
        Programs::losses(self)
    }

    fn forget(&mut self, flow: &FlowKey) -> Result<bool, Error> {
        Programs::forget(self, flow)
    }

    fn cost(&self) -> Result<Cost, Error> {
        Programs::cost(self)
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.as_fd())
    }

    fn late_rtt_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.late_rtt_fd())
    }
}
