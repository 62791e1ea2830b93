//! Which switches a flow crosses on an emulated fabric, asked of the switches' own routing.

use crate::fabric::Fabric;
use crate::layout::End;
use crate::topology::Kind;
use anyhow::{Context, Result, bail};
use std::net::Ipv4Addr;
use std::process::{Command, Stdio};

/// Most switches on a way.
const MOST_HOPS: usize = 16;

/// A transport protocol, as `ip route get` names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

/// A flow's packets in one direction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flow {
    /// Protocol.
    pub protocol: Protocol,
    /// The host that sends, by its name.
    pub from: String,
    /// The host that receives.
    pub to: String,
    /// The sender's port.
    pub source_port: u16,
    /// The receiver's.
    pub destination_port: u16,
}

/// The switches that a flow crosses, by name, in order; both hosts are reached by their first link.
pub fn switches(fabric: &Fabric, flow: &Flow) -> Result<Vec<String>> {
    let (source, target) = (address(fabric, &flow.from)?, address(fabric, &flow.to)?);
    let node = |name: &str| fabric.topology().nodes.iter().position(|node| node.name == name);
    let host = node(&flow.from).with_context(|| format!("no node is named {}", flow.from))?;
    let (_, _, mut end) = fabric.layout().ends_of(host).next().context("a host without link")?;
    let mut crossed = Vec::new();
    while crossed.len() < MOST_HOPS {
        let at = fabric.topology().nodes.get(end.node).context("a link to nowhere")?;
        if at.kind == Kind::Host {
            return Ok(crossed);
        }
        crossed.push(at.name.clone());
        end = next(fabric, &at.name, end, flow, source, target)?;
    }
    bail!("{flow:?} goes round: {crossed:?}")
}

/// The first source port from the flow's own on by which the flow crosses `via`. It is an error where 64 of
/// them do not.
pub fn port_via(fabric: &Fabric, flow: &Flow, via: &str) -> Result<u16> {
    for source_port in flow.source_port..flow.source_port.saturating_add(64) {
        if switches(fabric, &Flow { source_port, ..flow.clone() })?.iter().any(|name| name == via) {
            return Ok(source_port);
        }
    }
    bail!("no source port takes a flow from {} to {} over {via}", flow.from, flow.to)
}

fn address(fabric: &Fabric, host: &str) -> Result<Ipv4Addr> {
    let addresses = &fabric.host(host)?.addresses;
    addresses.first().copied().with_context(|| format!("{host} has no address"))
}

/// The far end of the link by which a switch sends a flow on that came in at `inward`.
fn next<'a>(
    fabric: &'a Fabric,
    switch: &str,
    inward: &End,
    flow: &Flow,
    source: Ipv4Addr,
    target: Ipv4Addr,
) -> Result<&'a End> {
    let protocol = if flow.protocol == Protocol::Tcp { "tcp" } else { "udp" };
    let mut ask = Command::new("ip");
    ask.args(["route", "get", &target.to_string(), "from", &source.to_string(), "iif", &inward.device]);
    ask.args(["ipproto", protocol, "sport", &flow.source_port.to_string()]);
    ask.args(["dport", &flow.destination_port.to_string()]).stdin(Stdio::null());
    let output = fabric.namespace(switch).enter(|| ask.output())??;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let device = said.split_whitespace().skip_while(|word| *word != "dev").nth(1);
    let Some(device) = device.filter(|_| output.status.success()) else {
        bail!("{switch} has no route to {target}: {}", String::from_utf8_lossy(&output.stderr).trim());
    };
    let mut ends = fabric.layout().ends_of(inward.node);
    let found = ends.find(|(_, own, _)| own.device == device).map(|(_, _, far)| far);
    found.with_context(|| format!("{switch} sends to {target} by {device}, which is no link"))
}
