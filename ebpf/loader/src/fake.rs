//! A source of telemetry that nothing in the kernel feeds: for the tests of what reads one.

use crate::attachment::{AttachMode, Change};
use crate::collector::{AttachedInterface, Collector};
use crate::dcqcn::Dcqcn;
use crate::endpoints::Endpoints;
use crate::error::Error;
use crate::kernel::Kernel;
use crate::programs::Cost;
use crate::queue_pair_counters::QueuePairCounters;
use crate::rdma::RdmaPort;
use crate::read::{Counters, Flows};
use harmonaize_events::{Event, FlowKey, InterfaceTotals, Losses};
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What a [`Fake`] says. Whoever holds a clone of the fake changes it as the test goes on.
#[derive(Debug, Default)]
pub struct Scene {
    /// The interfaces that there are: name and index. Those that vanish from here are gone.
    pub interfaces: BTreeMap<String, u32>,
    /// What the tables hold.
    pub flows: Flows,
    /// What the kernel knows of the flows' ends.
    pub endpoints: Endpoints,
    /// What RDMA devices have counted.
    pub ports: Vec<RdmaPort>,
    /// What they have counted by queue pair.
    pub queue_pair_counters: Vec<QueuePairCounters>,
    /// How often that was read.
    pub device_readings: u64,
    /// Their parameters of DCQCN.
    pub dcqcn: Vec<Dcqcn>,
    /// Events that were not read yet.
    pub events: VecDeque<Event>,
    /// What crossed each interface, by its index.
    pub totals: BTreeMap<u32, InterfaceTotals>,
    /// What was lost.
    pub losses: Losses,
    /// When set, the next reading of flows fails, once, as if the call had returned this number.
    pub failure: Option<i32>,
}

/// A source whose content a test sets. Clones share it.
#[derive(Debug, Clone)]
pub struct Fake {
    kernel: Kernel,
    scene: Arc<Mutex<Scene>>,
    attached: Vec<AttachedInterface>,
}

impl Default for Fake {
    fn default() -> Self {
        let kernel = Kernel { release: "made up".to_owned(), ..Kernel::default() };
        Self { kernel, scene: Arc::default(), attached: Vec::new() }
    }
}

impl Fake {
    /// What it says, to be changed.
    pub fn scene(&self) -> MutexGuard<'_, Scene> {
        self.scene.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Collector for Fake {
    fn kernel(&self) -> &Kernel {
        &self.kernel
    }

    fn attach(&mut self, name: &str) -> Result<u32, Error> {
        if self.attached.iter().any(|watched| watched.name == name) {
            return Err(Error::Attached { name: name.to_owned() });
        }
        let mut scene = self.scene();
        let index = *scene.interfaces.get(name).ok_or(Error::NoInterface { name: name.to_owned() })?;
        scene
            .totals
            .insert(index, InterfaceTotals { interface: u64::from(index), ..InterfaceTotals::default() });
        drop(scene);
        self.attached.push(AttachedInterface { name: name.to_owned(), index, mode: AttachMode::Tcx });
        Ok(index)
    }

    fn detach(&mut self, name: &str) -> Result<InterfaceTotals, Error> {
        let at = self.attached.iter().position(|watched| watched.name == name);
        let at = at.ok_or(Error::NotAttached { name: name.to_owned() })?;
        let watched = self.attached.remove(at);
        Ok(self.scene().totals.remove(&watched.index).unwrap_or_default())
    }

    fn attached(&self) -> Vec<AttachedInterface> {
        self.attached.clone()
    }

    fn refresh(&mut self) -> Result<Vec<Change>, Error> {
        let mut changes = Vec::new();
        for AttachedInterface { name, index, .. } in self.attached.clone() {
            let now = self.scene().interfaces.get(&name).copied();
            if now == Some(index) {
                continue;
            }
            let totals = Box::new(self.detach(&name)?);
            changes.push(Change::Detached { name: name.clone(), index, totals });
            if now.is_some() {
                let index = self.attach(&name)?;
                changes.push(Change::Reattached { name, index });
            }
        }
        Ok(changes)
    }

    fn read_flows(&mut self, into: &mut Flows) -> Result<(), Error> {
        let mut scene = self.scene();
        if let Some(number) = scene.failure.take() {
            return Err(Error::call("reading flows", std::io::Error::from_raw_os_error(number)));
        }
        into.clone_from(&scene.flows);
        Ok(())
    }

    fn read_flow(&self, flow: &FlowKey) -> Result<Option<Counters>, Error> {
        let scene = self.scene();
        let tcp = scene.flows.tcp.iter().find(|(key, _)| key == flow).map(|(_, tcp)| Counters::Tcp(*tcp));
        let roce = scene.flows.roce.iter().find(|(key, _)| key == flow);
        Ok(tcp.or(roce.map(|(_, roce)| Counters::Roce(*roce))))
    }

    fn read_events(&mut self, limit: usize, with: &mut dyn FnMut(&Event)) -> Result<usize, Error> {
        let events: Vec<Event> = {
            let mut scene = self.scene();
            let count = limit.min(scene.events.len());
            scene.events.drain(..count).collect()
        };
        events.iter().for_each(with);
        Ok(events.len())
    }

    fn read_endpoints(&mut self, into: &mut Endpoints) -> Result<(), Error> {
        into.clone_from(&self.scene().endpoints);
        Ok(())
    }

    fn read_ports(&mut self, into: &mut Vec<RdmaPort>) {
        into.clone_from(&self.scene().ports);
    }

    fn read_queue_pair_counters(&mut self, into: &mut Vec<QueuePairCounters>) {
        let mut scene = self.scene();
        scene.device_readings += 1;
        into.clone_from(&scene.queue_pair_counters);
    }

    fn read_dcqcn(&mut self, into: &mut Vec<Dcqcn>) {
        into.clone_from(&self.scene().dcqcn);
    }

    fn totals(&self, index: u32) -> Result<InterfaceTotals, Error> {
        let missing = || Error::object(format!("no interface with index {index} is watched"));
        self.scene().totals.get(&index).copied().ok_or_else(missing)
    }

    fn losses(&self) -> Result<Losses, Error> {
        Ok(self.scene().losses)
    }

    fn forget(&mut self, flow: &FlowKey) -> Result<bool, Error> {
        let mut scene = self.scene();
        let Flows { tcp, roce, .. } = &mut scene.flows;
        let before = tcp.len() + roce.len();
        tcp.retain(|(key, _)| key != flow);
        roce.retain(|(key, _)| key != flow);
        Ok(tcp.len() + roce.len() < before)
    }

    fn cost(&self) -> Result<Cost, Error> {
        Ok(Cost { programs: Vec::new(), timed: false })
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn late_rtt_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interfaces_and_flows_come_and_go() {
        let mut fake = Fake::default();
        let other = fake.clone();
        assert!(matches!(fake.attach("wire"), Err(Error::NoInterface { .. })));
        other.scene().interfaces.insert("wire".into(), 3);
        assert_eq!(fake.attach("wire").unwrap(), 3);
        other.scene().interfaces.insert("wire".into(), 4);
        let changes = fake.refresh().unwrap();
        assert!(matches!(
            &changes[..],
            [Change::Detached { index: 3, .. }, Change::Reattached { index: 4, .. }]
        ));
        let key = FlowKey { local_port: 7, ..FlowKey::default() };
        other.scene().flows.tcp.push((key, Default::default()));
        other.scene().events.extend([Event::default(), Event::default()]);
        let mut flows = Flows::default();
        fake.read_flows(&mut flows).unwrap();
        assert_eq!(flows.tcp.len(), 1);
        let mut told = 0;
        assert_eq!(fake.read_events(1, &mut |_| told += 1).unwrap(), 1);
        assert_eq!(fake.read_events(9, &mut |_| told += 1).unwrap(), 1);
        assert_eq!(told, 2);
        assert!(fake.forget(&key).unwrap() && !fake.forget(&key).unwrap());
        other.scene().failure = Some(5);
        assert!(fake.read_flows(&mut flows).is_err());
        assert!(fake.read_flows(&mut flows).is_ok());
    }
}
