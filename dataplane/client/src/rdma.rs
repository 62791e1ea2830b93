//! Attachments over RDMA: which device of this process's own, and the exchange that connects the queue pair.

use crate::Error;
use crate::session::Opening;
use harmonaize_abi::session::{PairEnd, Welcome};
use harmonaize_libibverbs::host_devices;
use harmonaize_shm::TenantEnd;
use harmonaize_verbs::attachment::TenantOffer;
use harmonaize_verbs::{Devices, Function, Gid, PortOptions, VerbsError};

/// How an attachment over RDMA finds its device and sends its packets.
#[derive(Clone, Debug)]
pub struct RdmaOptions {
    /// Its name, "mlx5_0", or with a port, "mlx5_0:1". None: over TCP the one that has this end's address; else the agent's
    /// own, if it is here; else the only one with an active port.
    pub device: Option<String>,
    /// Entry of the port's GID table; none: found out.
    pub gid_index: Option<u8>,
    /// Most bytes per packet: 256, 512, 1024, 2048 or 4096; none: the port's own.
    pub mtu: Option<usize>,
    /// DSCP and ECN bits of packets.
    pub traffic_class: u8,
    /// The devices to choose from.
    pub devices: Devices,
}

impl Default for RdmaOptions {
    /// Everything found out, among the host's devices.
    fn default() -> Self {
        Self { device: None, gid_index: None, mtu: None, traffic_class: 0, devices: host_devices() }
    }
}

/// After the agent's welcome: registers tensors and mailbox, and connects.
pub(crate) fn open(
    opening: &Opening,
    welcome: &Welcome,
    options: &RdmaOptions,
) -> Result<Box<dyn TenantEnd>, Error> {
    let agent: PairEnd = opening.receive()?;
    let function = function(opening, &agent, options)?;
    let offer = TenantOffer::new(&function, welcome.arena_bytes, welcome.entries)?;
    opening.send(&offer.offer())?;
    opening.receive_or_refused::<()>()?;
    Ok(Box::new(offer.connect(&agent)?))
}

fn function(opening: &Opening, agent: &PairEnd, options: &RdmaOptions) -> Result<Function, VerbsError> {
    let wanted = PortOptions {
        device: options.device.clone(),
        gid_index: options.gid_index,
        mtu: options.mtu,
        traffic_class: options.traffic_class,
        ..PortOptions::default()
    };
    for address in [opening.local(), Gid(agent.gid).ip()].into_iter().flatten() {
        match Function::open(&options.devices, &wanted, Some(address)) {
            Err(VerbsError::NoSuchAddress { .. }) => {}
            found => return found,
        }
    }
    Function::open(&options.devices, &wanted, None)
}
