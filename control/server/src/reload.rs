//! The configuration, read again while control runs: tenants, on which hosts each may be, and operators.

use crate::access::Current;
use crate::actor::Command;
use crate::config::{Config, Source};
use crate::leader::Commands;
use crate::state::Settings;
use harmonaize_identity::Watched;
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::Signal;
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

/// How often the file is looked at.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Reads the configuration again at each SIGHUP and where the file has changed, and has it be in force. One that cannot be used is refused as a whole, and the log says why.
pub(crate) async fn follow(
    mut source: Source,
    mut hangup: Signal,
    access: Arc<Current>,
    in_force: watch::Sender<Settings>,
    commands: Commands,
) {
    let mut watched = Watched::new(vec![source.path.clone()]);
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
        access.set(may);
        // For who begins to lead from now on; one that follows has nobody who must hear of it.
        in_force.send_modify(|known| {
            (known.tenants, known.terms) = (settings.tenants.clone(), settings.terms.clone());
            known.hosts.clone_from(&settings.hosts);
            known.algorithms.clone_from(&settings.algorithms);
            known.congestion_controls.clone_from(&settings.congestion_controls);
        });
        if let Ok(queue) = commands.queue() {
            let _ = queue.send(Command::Configure(Box::new(settings))).await;
        }
        source = again.unwrap_or(source);
        tracing::info!(target: "audit", path = %source.path.display(), tenants, operators, "the configuration was read again");
    }
}
