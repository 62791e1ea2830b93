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
use harmonaize_program::Compiled;
use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::sync::mpsc;

/// Why a successor that is to end takes no place.
#[derive(Debug, thiserror::Error)]
#[error("the successor was told to end before it had the agent's place")]
pub struct Interrupted;

/// The agent whose place is taken, and its sockets.
pub(super) struct Predecessor {
    peer: Arc<Peer>,
    /// Where other agents connect.
    pub(super) agents: Option<OwnedFd>,
    /// Where successors do: who comes next finds this one there.
    pub(super) place: Option<OwnedFd>,
    /// Where tenants do, over TCP too.
    pub(super) sockets: BTreeMap<PathBuf, OwnedFd>,
}

/// What it had, but for what the engine has already.
pub(super) struct Taken {
    pub(super) description: Description,
    pub(super) sessions: Vec<Inherited>,
    pub(super) limits: HashMap<AttachmentId, (TenantLimits, bool)>,
    pub(super) epochs: Vec<InheritedEpoch>,
}

/// The agent's own part, its sessions, the limits of each attachment and whether it is mapped, and epochs whose links it has.
type Parts = (AgentImage, Vec<Inherited>, HashMap<AttachmentId, (TenantLimits, bool)>, Vec<InheritedEpoch>);

impl Taken {
    /// The session with control, and all else.
    pub(super) fn split(self) -> (LedgerImage, Parts) {
        let Self { description, sessions, limits, epochs } = self;
        (description.ledger, (description.agent, sessions, limits, epochs))
    }
}

impl Predecessor {
    /// Asks for its sockets, for as long as `stop` does not complete; none if nobody is there.
    pub(super) async fn find(
        config: &Config,
        own: Greeting,
        stop: &mut Compiled<'_, ()>,
    ) -> anyhow::Result<Option<Self>> {
        let path = config.handover.as_ref();
        let path =
            path.context("the configuration has no `handover`, the socket of the agent whose place to take")?;
        let at = || format!("cannot take the place of the agent at {}", path.display());
        let Some(peer) = Peer::connect(path).with_context(at)? else { return Ok(None) };
        tracing::info!(
            "waiting for the agent's links: where they go over RDMA, they come to go over TCP first"
        );
        let peer = Arc::new(peer);
        let asking = Arc::clone(&peer);
        let mut greeted = tokio::task::spawn_blocking(move || asking.greet(&own));
        let offer = tokio::select! {
            biased;
            () = stop => {
                peer.hang_up(&Interrupted.to_string());
                // The runtime would wait for its thread.
                let _ = greeted.await;
                bail!(Interrupted);
            }
            offer = &mut greeted => offer?,
        };
        let (Offer { sockets }, descriptors) = offer.with_context(at)?;
        let mut descriptors = descriptors.into_iter();
        let (agents, place) = (descriptors.next(), descriptors.next());
        Ok(Some(Self { peer, agents, place, sockets: sockets.into_iter().zip(descriptors).collect() }))
    }

    /// Takes everything in. Once it returns, the engine goes on, and the other process is gone. Where it cannot, or `stop` completes
    /// first, this process ends at once and in no order, since the other goes on with all of it.
    pub(super) async fn take(
        self,
        engines: &mut Engines,
        tenants: &mut Tenants,
        notices: &mut mpsc::UnboundedReceiver<Notice>,
        stop: &mut Compiled<'_, ()>,
    ) -> Taken {
        match self.try_take(engines, tenants, notices, stop).await {
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
        stop: &mut Compiled<'_, ()>,
    ) -> anyhow::Result<Taken> {
        if is_over(stop).await {
            bail!(Interrupted);
        }
        let (description, images, held) = self.peer.take()?;
        tenants.inherit(&description.added).map_err(|error| anyhow!(error))?;
        let mut limits = HashMap::new();
        let (mut leases, mut ends) = (HashMap::new(), HashMap::new());
        let attachments: Vec<_> = held.iter().map(|session| session.image.attachment).collect();
        let mut sessions = tenants.server().inherit(held).await.map_err(|error| anyhow!(error))?;
        for (attachment, inherited) in attachments.into_iter().zip(&mut sessions) {
            let lent = std::mem::take(&mut inherited.leases);
            leases.extend(lent.into_iter().map(|(base, lease)| ((attachment.0, base), lease)));
            limits.insert(attachment, (inherited.limits.clone(), inherited.end.is_none()));
            ends.extend(inherited.end.take().map(|end| (attachment.0, end)));
        }
        let mut images = images.into_iter();
        // Each attachment is in one of them, which takes what is its own.
        let mut leases = Some(Leases::new(leases, ends));
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
        if is_over(stop).await {
            bail!(Interrupted);
        }
        self.peer.taken()?;
        Ok(Taken { description, sessions, limits, epochs })
    }
}

/// Whether a future has completed by now, with what the runtime has not looked at yet. If so, it is not to be polled again.
async fn is_over(stop: &mut Compiled<'_, ()>) -> bool {
    // Signals are seen between polls of this task alone, and the start of an agent is one poll.
    tokio::task::yield_now().await;
    tokio::select! {
        biased;
        () = stop => true,
        () = std::future::ready(()) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counters::Counters;
    use crate::handover::HandOverError;
    use crate::session::SessionServer;

    /// A successor without engine and tenants takes the place of an agent that refuses it, until `stop`. Why it does not, and what
    /// the agent hears meanwhile.
    async fn take(
        stop: impl Future<Output = ()> + Send + 'static,
    ) -> (anyhow::Error, Result<(), HandOverError>) {
        let (peer, agent) = Peer::pair().unwrap();
        agent.refuse("the agent is busy");
        let peer = Arc::new(peer);
        let found = Predecessor { peer, agents: None, place: None, sockets: BTreeMap::new() };
        let (requests, _asked) = mpsc::channel(1);
        let server = SessionServer::bind(None, requests, Counters::default()).unwrap();
        let mut tenants = Tenants::serve(server, Vec::new(), None, None).unwrap();
        let mut engines = Engines::new(Vec::new(), Counters::default());
        let (_notices, mut heard) = mpsc::unbounded_channel();
        let mut stop: Compiled<'_, ()> = Box::pin(stop);
        let taken = found.try_take(&mut engines, &mut tenants, &mut heard, &mut stop).await;
        (taken.err().unwrap(), agent.waits())
    }

    #[tokio::test]
    async fn an_ended_successor_does_not_report_its_start() {
        let (why, heard) = take(std::future::pending()).await;
        let refused = matches!(why.downcast_ref(), Some(HandOverError::Refused(_)));
        assert!(refused && heard.is_err(), "{why}, {heard:?}");
        let (why, heard) = take(async {}).await;
        assert!(why.is::<Interrupted>() && heard.is_ok(), "{why}, {heard:?}");
    }
}
