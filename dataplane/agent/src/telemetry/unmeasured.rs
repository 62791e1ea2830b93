//! A source of telemetry of a host whose traffic nobody measures: the engine's marks and RDMA devices' own
//! counters remain.

use harmonaize_events::{Event, FlowKey, InterfaceTotals, Losses};
use harmonaize_loader::{
    AttachedInterface, Change, Collector, Cost, Counters, Dcqcn, Endpoints, Error, Flows, Kernel,
    QueuePairCounters, RdmaPort, read_dcqcn, read_queue_pair_counters, read_rdma_ports,
};
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Has no interfaces, and no events.
#[derive(Debug)]
pub(crate) struct Unmeasured {
    kernel: Kernel,
    /// Never ready.
    silent: OwnedFd,
}

impl Unmeasured {
    pub(crate) fn new() -> std::io::Result<Self> {
        let silent = eventfd(0, EventfdFlags::CLOEXEC)?;
        Ok(Self { kernel: Kernel::default(), silent })
    }
}

impl Collector for Unmeasured {
    fn kernel(&self) -> &Kernel {
        &self.kernel
    }

    fn attach(&mut self, name: &str) -> Result<u32, Error> {
        Err(Error::NoInterface { name: name.to_owned() })
    }

    fn detach(&mut self, name: &str) -> Result<InterfaceTotals, Error> {
        Err(Error::NotAttached { name: name.to_owned() })
    }

    fn attached(&self) -> Vec<AttachedInterface> {
        Vec::new()
    }

    fn refresh(&mut self) -> Result<Vec<Change>, Error> {
        Ok(Vec::new())
    }

    fn read_flows(&mut self, _: &mut Flows) -> Result<(), Error> {
        Ok(())
    }

    fn read_flow(&self, _: &FlowKey) -> Result<Option<Counters>, Error> {
        Ok(None)
    }

    fn read_events(&mut self, _: usize, _: &mut dyn FnMut(&Event)) -> Result<usize, Error> {
        Ok(0)
    }

    fn read_endpoints(&mut self, _: &mut Endpoints) -> Result<(), Error> {
        Ok(())
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

    fn totals(&self, _: u32) -> Result<InterfaceTotals, Error> {
        Ok(InterfaceTotals::default())
    }

    fn losses(&self) -> Result<Losses, Error> {
        Ok(Losses::default())
    }

    fn forget(&mut self, _: &FlowKey) -> Result<bool, Error> {
        Ok(false)
    }

    fn cost(&self) -> Result<Cost, Error> {
        Ok(Cost { programs: Vec::new(), timed: false })
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.silent.as_fd())
    }

    fn late_rtt_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
