//! Who delays what links ask to be delayed: the kernel, or a thread of this process.

use super::Fabric;
use crate::delay::{Delays, Wire, open_all};
use crate::namespace::Namespace;
use crate::topology::Kind;
use anyhow::{Result, bail};

/// Bytes of a frame beside what it carries.
const HEADER: usize = 14;

/// Who sees to links' delays.
#[derive(Debug)]
pub(super) enum Delayed {
    /// No link has one, or nobody.
    Not,
    Kernel,
    /// This process; none until all devices are there.
    Here(#[expect(dead_code, reason = "it ends the thread when it is dropped")] Option<Delays>),
}

impl Fabric {
    /// True when links ask for delay and have it.
    pub fn delays(&self) -> bool {
        !matches!(self.delayed, Delayed::Not)
    }

    /// Who can delay what links ask for; says so loudly when nobody can.
    pub(super) fn delayed_by(&self) -> Delayed {
        let asked = self.layout.cables.iter().any(|cable| !cable.delay.is_zero());
        if !asked {
            return Delayed::Not;
        }
        let probe = ["qdisc add dev lo root netem delay 1us".to_owned(), "qdisc del dev lo root".to_owned()];
        if self.control().tc(&probe).is_ok() {
            return Delayed::Kernel;
        }
        if self.topology.forwards {
            return Delayed::Here(None);
        }
        eprintln!("warning: this kernel has no netem, so the DELAYS of the topology's links are IGNORED");
        Delayed::Not
    }

    /// The namespace through which links go whose frames are delayed here.
    pub(super) fn wires(&self) -> Namespace {
        Namespace::named(format!("{}-_wires", self.name))
    }

    /// Links whose frames are delayed here, and what their ends are called there.
    pub(super) fn delayed_here(&self) -> Vec<(usize, [String; 2])> {
        let here = matches!(self.delayed, Delayed::Here(_));
        let cables = self.layout.cables.iter().enumerate();
        let cables = cables.filter(|(_, cable)| here && !cable.delay.is_zero());
        cables.map(|(at, _)| (at, ["a", "b"].map(|end| format!("w{at}{end}")))).collect()
    }

    pub(super) fn delay_here(&mut self) -> Result<()> {
        let cables = self.delayed_here();
        if cables.is_empty() {
            return Ok(());
        }
        let lines = cables.iter().flat_map(|(_, ends)| ends).flat_map(|end| {
            [
                format!("link set {end} up"),
                format!("link add link {end} name t{end} type macvtap mode passthru"),
                format!("link set t{end} txqueuelen 10000"),
                format!("link set t{end} up"),
            ]
        });
        let namespace = self.wires();
        namespace.ip(&lines.collect::<Vec<_>>())?;
        let mut opened = open_all(&namespace, &self.folder)?;
        let mut wires = Vec::new();
        let switch =
            |node: usize| self.topology.nodes.get(node).is_some_and(|node| node.kind == Kind::Switch);
        for (at, [one, other]) in cables {
            let taken = (opened.remove(&format!("t{one}")), opened.remove(&format!("t{other}")));
            let (Some(one), Some(other)) = taken else { bail!("a link's device is missing") };
            let Some(cable) = self.layout.cables.get(at) else { bail!("a link is missing") };
            let switches = cable.ends.each_ref().map(|end| switch(end.node));
            let frame = self.topology.mtu as usize + HEADER;
            wires.push(Wire { ends: [one, other], switches, delay: cable.delay, rate: cable.rate, frame });
        }
        self.delayed = Delayed::Here(Some(Delays::start(wires)?));
        Ok(())
    }
}
