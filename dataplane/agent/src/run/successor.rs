//! An agent takes the place of another.

use crate::agent::AgentImage;
use crate::config::Config;
use crate::control::LedgerImage;
use crate::engines::Engines;
use crate::handover::{Description, Greeting, Offer, Peer};
use crate::served::Tenants;
use crate::session::{AttachmentId, Inherited, TenantLimits};
use anyhow::{Context, anyhow, bail};
use harmonaize_engine::{Command, InheritedEpoch, Leases, Notice};
use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use tokio::sync::mpsc;

/// The agent whose place is taken, and its sockets.
pub(super) struct Predecessor {
    peer: Peer,
    /// Where other agents connect.
    pub(super) agents: Option<OwnedFd>,
    /// Where successors do: who comes next finds this one there.
    pub(super) place: Option<OwnedFd>,
    /// Where tenants do.
    pub(super) sockets: BTreeMap<PathBuf, OwnedFd>,
}

/// What it had, but for what the engine has already.
pub(super) struct Taken {
    pub(super) description: Description,
    pub(super) sessions: Vec<Inherited>,
    pub(super) limits: HashMap<AttachmentId, TenantLimits>,
    pub(super) epochs: Vec<InheritedEpoch>,
}

/// The agent's own part, its sessions, the limits of each attachment, and epochs whose links it has.
type Parts = (AgentImage, Vec<Inherited>, HashMap<AttachmentId, TenantLimits>, Vec<InheritedEpoch>);

impl Taken {
    /// The session with control, and all else.
    pub(super) fn split(self) -> (LedgerImage, Parts) {
        let Self { description, sessions, limits, epochs } = self;
        (description.ledger, (description.agent, sessions, limits, epochs))
    }
}

impl Predecessor {
    /// Asks for its sockets; none if nobody is there.
    pub(super) fn find(config: &Config, own: &Greeting) -> anyhow::Result<Option<Self>> {
        let path = config.handover.as_ref();
        let path =
            path.context("the configuration has no `handover`, the socket of the agent whose place to take")?;
        let at = || format!("cannot take the place of the agent at {}", path.display());
        let Some(peer) = Peer::connect(path).with_context(at)? else { return Ok(None) };
        let (Offer { sockets }, descriptors) = peer.greet(own).with_context(at)?;
        let mut descriptors = descriptors.into_iter();
        let (agents, place) = (descriptors.next(), descriptors.next());
        Ok(Some(Self { peer, agents, place, sockets: sockets.into_iter().zip(descriptors).collect() }))
    }

    /// Takes everything in. Once it returns, the engine goes on, and the other process is gone. Where it cannot, this process ends at once
    /// and in no order, since the other goes on with all of it.
    pub(super) async fn take(
        mut self,
        engines: &mut Engines,
        tenants: &mut Tenants,
        notices: &mut mpsc::UnboundedReceiver<Notice>,
    ) -> Taken {
        match self.try_take(engines, tenants, notices).await {
            Ok(taken) => {
                engines.command_all(|_| Command::Resume);
                self.peer.gone();
                taken
            }
            Err(error) => {
                tracing::error!("the other agent goes on: {error:#}");
                self.peer.refuse(&format!("{error:#}"));
                std::process::exit(1);
            }
        }
    }

    async fn try_take(
        &self,
        engines: &mut Engines,
        tenants: &mut Tenants,
        notices: &mut mpsc::UnboundedReceiver<Notice>,
    ) -> anyhow::Result<Taken> {
        let (description, images, held) = self.peer.take()?;
        tenants.inherit(&description.added).map_err(|error| anyhow!(error))?;
        let (mut sessions, mut limits, mut leases) = (Vec::new(), HashMap::new(), HashMap::new());
        for session in held {
            let attachment = session.image.attachment;
            let mut inherited = tenants.server().inherit(session).map_err(|error| anyhow!(error))?;
            let lent = std::mem::take(&mut inherited.leases);
            leases.extend(lent.into_iter().map(|(base, lease)| ((attachment.0, base), lease)));
            limits.insert(attachment, inherited.limits.clone());
            sessions.push(inherited);
        }
        let mut images = images.into_iter();
        // Each attachment is in one of them, which takes what is its own.
        let mut leases = Some(Leases::new(leases));
        let given = engines.command_all(|thread| {
            let image = Box::new(images.next().unwrap_or_default());
            let leases = leases.as_ref().map(Leases::share).unwrap_or_default();
            Command::TakeOver { thread, image, leases }
        });
        leases.take();
        if !given {
            bail!("a thread of the engine has ended");
        }
        let mut epochs = Vec::new();
        for _ in 0..engines.count() {
            match notices.recv().await {
                Some(Notice::TakenOver { epochs: taken, .. }) => {
                    epochs.extend(taken.map_err(|error| anyhow!("{error}"))?);
                }
                other => bail!("the engine said {other:?} while it took over"),
            }
        }
        self.peer.taken()?;
        Ok(Taken { description, sessions, limits, epochs })
    }
}
