//! The configuration, read again while control runs: the topology, tenants, on which hosts each may be, and operators.

use crate::access::Current;
use crate::actor::Command;
use crate::config::{Config, Source};
use crate::leader::Commands;
use crate::operators::Stored;
use crate::state::{Settings, TopologyRefusal};
use harmonaize_identity::Watched;
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::Signal;
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

/// How often the files are looked at.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Reads the configuration again at each SIGHUP, and puts it in force. It does so too where its file or the topology's has changed. One
/// that cannot be used is refused as a whole, and the log says why. Where the topology alone is refused, operators are those of the file.
/// `stored` is what several controls share. One that follows refuses what the leader's state does, for it may lead next.
pub(crate) async fn follow(
    mut source: Source,
    mut hangup: Signal,
    access: Arc<Current>,
    in_force: watch::Sender<Settings>,
    commands: Commands,
    stored: Option<Stored>,
) {
    let mut watched = Watched::new(vec![source.path.clone(), source.topology.clone()]);
    let mut look = tokio::time::interval(POLL_INTERVAL);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            Some(()) = hangup.recv() => {}
            _ = look.tick() => if !watched.changed() { continue },
        }
        let Config { access: may, settings, source: again, .. } = match source.read_again() {
            Ok(again) => again,
            Err(error) => {
                tracing::error!(%error, "the configuration stays as it was");
                continue;
            }
        };
        let (tenants, operators) = (settings.tenants.len(), may.operators.len());
        let (hosts, links) = (settings.topology.hosts().len(), settings.topology.links().len());
        // Operators who are taken out are so at once, whatever becomes of the topology.
        access.set(may);
        let follows = stored.as_ref().filter(|_| commands.queue().is_err());
        let mut outcome = match follows {
            Some(stored) => stored.check(settings.clone()).await,
            None => Ok(()),
        };
        if outcome.is_ok() {
            outcome = put_in_force(settings, &in_force, &commands).await;
        }
        if let Err(refusal) = outcome {
            tracing::error!(%refusal, path = %source.topology.display(), "the configuration stays as it was");
            continue;
        }
        source = again.unwrap_or(source);
        tracing::info!(target: "audit", path = %source.path.display(), tenants, operators, hosts, links, "the configuration was read again");
    }
}

/// Has settings be in force, here and for who begins to lead from now on. One that follows has nobody who must hear of it.
///
/// # Errors
/// Why the state refuses them. Nothing has changed then.
async fn put_in_force(
    settings: Settings,
    in_force: &watch::Sender<Settings>,
    commands: &Commands,
) -> Result<(), TopologyRefusal> {
    let before = in_force.borrow().clone();
    in_force.send_modify(|known| {
        known.topology.clone_from(&settings.topology);
        (known.tenants, known.terms) = (settings.tenants.clone(), settings.terms.clone());
        known.hosts.clone_from(&settings.hosts);
        known.algorithms.clone_from(&settings.algorithms);
        known.congestion_controls.clone_from(&settings.congestion_controls);
    });
    let configure = |answer| Command::Configure(Box::new(settings), answer);
    let outcome = commands.ask(configure).await.unwrap_or(Ok(()));
    if outcome.is_err() {
        in_force.send_replace(before);
    }
    outcome
}
