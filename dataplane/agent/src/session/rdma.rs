//! The device for attachments over RDMA, and an attachment's queue pair on its way to be connected.

use super::RdmaRules;
use harmonaize_abi::session::{Offer, PairEnd, RefusalKind, Refused};
use harmonaize_shm::{AgentEnd, EndError};
use harmonaize_verbs::attachment::{AgentOffer, Rejoin, SuccessorEnd};
use harmonaize_verbs::{Function, Gid, Mtu, Port, VerbsError};
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

/// Numbers of queue pairs and packets have 24 bits.
const MOST_NUMBER: u32 = (1 << 24) - 1;

/// Threads that make queue pairs at a time for a successor.
const MAKERS: usize = 16;

/// Where a process's queue pair may be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Places<'a> {
    /// At any device of this host: the process is on it.
    pub(super) here: bool,
    /// At these addresses.
    pub(super) addresses: &'a [IpAddr],
}

/// The device, opened.
#[derive(Debug)]
pub(super) struct Rdma {
    rules: RdmaRules,
    function: Mutex<Function>,
}

fn unable() -> Refused {
    let text = "the agent cannot serve attachments over RDMA at the moment; try again later".into();
    Refused { kind: RefusalKind::Agent, text }
}

fn malformed(text: String) -> Refused {
    Refused { kind: RefusalKind::Malformed, text }
}

impl Rdma {
    pub(super) fn open(rules: RdmaRules) -> Result<Self, VerbsError> {
        let function = Mutex::new(Function::open(&rules.devices, &rules.port, Some(rules.address))?);
        Ok(Self { rules, function })
    }

    /// A queue pair for an arena of `arena_bytes` and `entries` operations in flight. Takes milliseconds.
    pub(super) async fn offer(
        self: &Arc<Self>,
        arena_bytes: u64,
        entries: u32,
    ) -> Result<AgentOffer, Refused> {
        let this = Arc::clone(self);
        let made = tokio::task::spawn_blocking(move || this.create(arena_bytes, entries)).await;
        // What failed at the device is the provider's business, not the tenant's.
        match made {
            Ok(Ok(offer)) => Ok(offer),
            Ok(Err(error)) => {
                tracing::error!("cannot make an attachment over RDMA: {error}");
                Err(unable())
            }
            Err(error) => {
                tracing::error!("making an attachment over RDMA failed: {error}");
                Err(unable())
            }
        }
    }

    fn create(&self, arena_bytes: u64, entries: u32) -> Result<AgentOffer, VerbsError> {
        let function = self.function.lock().unwrap_or_else(PoisonError::into_inner).clone();
        // A device that was taken away may not say so by itself.
        function.device.check_present();
        match AgentOffer::new(&function, arena_bytes, entries) {
            // It may be back, as another device of the same name or address.
            Err(VerbsError::DeviceLost { .. }) => {
                let again = Function::open(&self.rules.devices, &self.rules.port, Some(self.rules.address))?;
                *self.function.lock().unwrap_or_else(PoisonError::into_inner) = again.clone();
                AgentOffer::new(&again, arena_bytes, entries)
            }
            made => made,
        }
    }

    /// Joins the queue pair to the process's, which must be at one of the places. Takes milliseconds, or as long as its address takes to
    /// resolve.
    pub(super) async fn connect(
        self: &Arc<Self>,
        ours: AgentOffer,
        theirs: Offer,
        arena_bytes: u64,
        places: Places<'_>,
        life: OwnedFd,
    ) -> Result<Box<dyn AgentEnd>, Refused> {
        self.check(&theirs, arena_bytes, places).await?;
        Ok(Box::new(joined(move || ours.connect(&theirs, life)).await?))
    }

    /// What goes on with attachments that another process of the agent's has, of these sizes, in their order. With each comes what joins
    /// it to the tenant's process once more. One takes milliseconds, so some are made at a time.
    ///
    /// # Errors
    /// As of the device.
    pub(super) async fn succeed(
        self: &Arc<Self>,
        sizes: Vec<(u64, u32)>,
    ) -> Result<Vec<(SuccessorEnd, Rejoin)>, EndError> {
        let make = |some: &[(u64, u32)]| {
            let (this, some) = (Arc::clone(self), some.to_vec());
            tokio::task::spawn_blocking(move || {
                let failed = |error: VerbsError| EndError::Rdma(error.to_string());
                let one =
                    |(arena_bytes, entries)| this.create(arena_bytes, entries).map_err(failed)?.succeed();
                some.into_iter().map(one).collect::<Result<Vec<_>, EndError>>()
            })
        };
        let making: Vec<_> = sizes.chunks(sizes.len().div_ceil(MAKERS).max(1)).map(make).collect();
        let mut made = Vec::with_capacity(sizes.len());
        for some in making {
            let some = some.await.map_err(|error| EndError::Rdma(error.to_string()))?;
            made.extend(some?);
        }
        Ok(made)
    }

    /// Joins such an attachment to the process's new queue pair, as [`Self::connect`] does. The process has so many completions.
    pub(super) async fn rejoin(
        self: &Arc<Self>,
        ours: Rejoin,
        (theirs, arrived): (Offer, u64),
        arena_bytes: u64,
        places: Places<'_>,
    ) -> Result<(), Refused> {
        self.check(&theirs, arena_bytes, places).await?;
        joined(move || ours.join(&theirs, arrived)).await
    }

    async fn check(
        self: &Arc<Self>,
        theirs: &Offer,
        arena_bytes: u64,
        places: Places<'_>,
    ) -> Result<(), Refused> {
        check(theirs, arena_bytes)?;
        self.check_place(Gid(theirs.end.gid), places).await
    }

    /// Refuses a queue pair where the process cannot be: the agent would send packets to whomever the process names.
    async fn check_place(self: &Arc<Self>, gid: Gid, places: Places<'_>) -> Result<(), Refused> {
        if let Some(address) = gid.ip()
            && (places.addresses.contains(&address) || (places.here && self.has(gid).await?))
        {
            return Ok(());
        }
        let here = if places.here { "neither an address of an RDMA device of this host nor" } else { "not" };
        let text = format!(
            "the queue pair that was offered is at {gid}, which is {here} one of the addresses that the provider has \
             registered for this tenant; name the device that has one, or have the provider register the address"
        );
        Err(Refused { kind: RefusalKind::User, text })
    }

    /// Whether a device of this host is there. Opens each for a moment; those that cannot be opened or asked are passed over.
    async fn has(self: &Arc<Self>, gid: Gid) -> Result<bool, Refused> {
        let this = Arc::clone(self);
        let found = tokio::task::spawn_blocking(move || {
            let devices = &this.rules.devices;
            let ports = |name: &String| devices.open(name).and_then(|device| device.ports());
            let is_there = |port: &Port| port.gids.iter().any(|entry| entry.gid == gid);
            let names = devices.names()?;
            Ok::<_, VerbsError>(
                names.iter().filter_map(|name| ports(name).ok()).flatten().any(|p| is_there(&p)),
            )
        });
        match found.await {
            Ok(Ok(found)) => Ok(found),
            Ok(Err(error)) => {
                tracing::error!("cannot look for the address of an RDMA device: {error}");
                Err(unable())
            }
            Err(error) => {
                tracing::error!("looking for the address of an RDMA device failed: {error}");
                Err(unable())
            }
        }
    }
}

/// What comes of joining a queue pair to the process's.
async fn joined<T: Send + 'static>(
    connect: impl FnOnce() -> Result<T, VerbsError> + Send + 'static,
) -> Result<T, Refused> {
    match tokio::task::spawn_blocking(connect).await {
        Ok(Ok(end)) => Ok(end),
        Ok(Err(error @ VerbsError::DeviceLost { .. })) => {
            tracing::error!("cannot connect an attachment over RDMA: {error}");
            Err(unable())
        }
        Ok(Err(error)) => {
            tracing::warn!("cannot connect an attachment over RDMA: {error}");
            let text = "the agent could not connect to the queue pair that was offered; do its GID and MTU fit \
                        the network that the agent is on?";
            Err(Refused { kind: RefusalKind::Agent, text: text.into() })
        }
        Err(error) => {
            tracing::error!("connecting an attachment over RDMA failed: {error}");
            Err(unable())
        }
    }
}

/// What can be seen to be nonsense; the rest fails at a device, and ends the attachment.
fn check(offer: &Offer, arena_bytes: u64) -> Result<(), Refused> {
    let PairEnd { queue_pair, psn, mtu, mailbox, .. } = offer.end;
    for (what, number) in [("queue pair", queue_pair), ("packet number", psn)] {
        if number > MOST_NUMBER {
            return Err(malformed(format!("the offer's {what} of {number} has more than 24 bits")));
        }
    }
    if Mtu::from_bytes(mtu.into()).is_none() {
        return Err(malformed(format!(
            "the offer's MTU of {mtu} bytes is none of 256, 512, 1024, 2048 and 4096"
        )));
    }
    for (what, place, bytes) in [("arena", offer.arena, arena_bytes), ("mailbox", mailbox, 0)] {
        if place.address.checked_add(bytes).is_none() {
            return Err(malformed(format!("the offer's {what} does not end below 2^64")));
        }
    }
    Ok(())
}
