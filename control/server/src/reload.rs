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
        let by = tokio::select! {
            Some(()) = hangup.recv() => "SIGHUP",
            _ = look.tick() => if watched.changed() { "a file's change" } else { continue },
        };
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
        tracing::info!(target: "audit", by, path = %source.path.display(), operators = ?may.operators, "who may do what is as the file says");
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
        tracing::info!(target: "audit", by, path = %source.path.display(), tenants, operators, hosts, links, "the configuration was read again");
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

#[cfg(test)]
#[path = "../tests/log/mod.rs"]
mod log;

#[cfg(test)]
mod tests {
    use super::log::Log;
    use super::*;
    use crate::leader::Leader;
    use tokio::signal::unix::{SignalKind, signal};
    use tokio::sync::mpsc;
    use tokio::time::timeout;

    const LIMIT: Duration = Duration::from_secs(20);

    #[tokio::test]
    async fn operators_that_change_are_logged_though_the_topology_is_refused() {
        let (log, _default) = Log::begin();
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("topology.toml"), "[[host]]\nname = \"h0\"\n").unwrap();
        let path = folder.path().join("control.toml");
        let text = "listen = \"127.0.0.1:0\"\ninsecure_loopback = true\ntopology = \"topology.toml\"\n";
        std::fs::write(&path, text).unwrap();
        let config = Config::load(&path).unwrap();
        let access = Arc::new(Current::new(config.access));
        let (in_force, _settings) = watch::channel(config.settings);
        let (leads, commands) = Commands::new();
        let (state, mut queue) = mpsc::channel(1);
        leads.send_replace(Leader::Here(state));
        let hangup = signal(SignalKind::hangup()).unwrap();
        let source = config.source.unwrap();
        let follows = follow(source, hangup, Arc::clone(&access), in_force, commands, None);
        tokio::pin!(follows);
        let moment = Duration::from_millis(1);
        assert!(timeout(moment, &mut follows).await.is_err(), "it looks at the files as they are first");
        let operator = "[[operator]]\nname = \"ada\"\nrole = \"admin\"\n";
        std::fs::write(&path, format!("{text}{operator}")).unwrap();
        let asked = tokio::select! {
            () = &mut follows => panic!("it follows for ever"),
            asked = timeout(LIMIT, queue.recv()) => asked.unwrap(),
        };
        let Some(Command::Configure(_, answer)) = asked else { panic!("the state is asked first") };
        assert!(access.get().operators.contains_key("ada"));
        assert!(answer.send(Err(TopologyRefusal::HostInUse("h0".to_owned()))).is_ok());
        assert!(timeout(moment, &mut follows).await.is_err());
        let lines = log.audit();
        let told = |line: &String| {
            ["by=\"a file's change\"", "\"ada\": Admin", "control.toml"]
                .iter()
                .all(|part| line.contains(part))
        };
        assert!(lines.iter().any(told), "{lines:#?}");
        assert!(!lines.iter().any(|line| line.contains("was read again")), "{lines:#?}");
    }
}
