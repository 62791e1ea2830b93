//! Wiring: engine, transport, sessions with tenants and with control.

use crate::agent::Agent;
use crate::coding;
use crate::config::{Config, HANDSHAKE, Rdma};
use crate::control::{self, Settings};
use crate::paths::Paths;
use crate::session::{RdmaRules, SessionServer};
use crate::telemetry;
use anyhow::Context;
use harmonaize_api::v1;
use harmonaize_engine::{Engine, marks, start};
use harmonaize_libibverbs::host_devices;
use harmonaize_transport::Transport;
use harmonaize_transport::datagram::RdmaPort;
use harmonaize_transport::tcp::{Config as TcpConfig, TcpTransport};
use harmonaize_transport::verbs::{Config as VerbsConfig, Devices, VerbsTransport};
use std::net::IpAddr;
use std::time::{Duration, Instant};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

/// Requests of tenants that wait.
const REQUESTS: usize = 1024;
/// Marks that wait for the telemetry thread; an operation makes some for each segment and message.
const MARKS: usize = 1 << 16;
/// How often the agent looks at what is due.
const TICK: Duration = Duration::from_millis(100);
/// How long communicators may take to end in order when the agent stops.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(3);

/// Completes with SIGINT or SIGTERM.
///
/// # Errors
/// If the process cannot listen for signals.
pub fn signalled() -> anyhow::Result<impl Future<Output = ()>> {
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    })
}

/// The way to other agents that the configuration asks for.
fn bind(config: &Config, devices: &Devices) -> anyhow::Result<Box<dyn Transport + Send>> {
    let tcp = TcpConfig {
        peer_timeout: config.peer_timeout,
        connect_timeout: config.connect_timeout,
        congestion: config.congestion.clone(),
        ..TcpConfig::new(config.listen)
    };
    let Some(asked) = &config.verbs else { return Ok(Box::new(TcpTransport::bind(tcp)?)) };
    let verbs = VerbsConfig {
        devices: asked.devices.clone(),
        options: asked.port_options(),
        ..VerbsConfig::new(tcp)
    };
    Ok(Box::new(VerbsTransport::bind(verbs, devices)?))
}

/// The device for datagrams to aggregators, and most bytes of one: where links go over RDMA, the first of theirs.
fn datagrams(config: &Config, devices: &Devices) -> Option<(RdmaPort, u32)> {
    let port = config.verbs.as_ref()?.datagrams(config.listen.ip(), devices);
    match port.max_bytes() {
        Ok(bytes) => Some((port, u32::try_from(bytes).unwrap_or(0))),
        Err(error) => {
            tracing::warn!(%error, "no device for datagrams; packets to aggregators go over UDP");
            None
        }
    }
}

/// How tenants attach over RDMA. The device that is not named is the one that their connections come to, or links.
fn rules(rdma: &Rdma, links: IpAddr, devices: &Devices) -> RdmaRules {
    let listening = rdma.listen.map(|listen| listen.ip()).filter(|address| !address.is_unspecified());
    RdmaRules {
        devices: devices.clone(),
        port: rdma.port_options(),
        address: listening.unwrap_or(links),
        listen: rdma.listen,
        handshake: HANDSHAKE,
    }
}

/// Runs an agent until `stop` completes, then ends its communicators in order.
///
/// # Errors
/// If an address or socket cannot be had; says which.
pub async fn run(config: Config, stop: impl Future<Output = ()>) -> anyhow::Result<()> {
    run_on(&host_devices(), config, stop).await
}

/// The same with these RDMA devices for the host's.
///
/// # Errors
/// As of [`run`].
pub async fn run_on(devices: &Devices, config: Config, stop: impl Future<Output = ()>) -> anyhow::Result<()> {
    let transport = bind(&config, devices)
        .with_context(|| format!("cannot listen on {} for other agents", config.listen))?;
    let address = transport.local_address();
    let (notices, mut heard) = mpsc::unbounded_channel();
    // The receiver outlives the engine but for the end of the process.
    let notify = Box::new(move |notice| drop(notices.send(notice)));
    let mut engine = Engine::new(transport, notify).context("cannot create the engine")?;
    let datagrams = datagrams(&config, devices);
    let datagram_bytes = datagrams.as_ref().map_or(0, |(_, bytes)| *bytes);
    if let Some((port, _)) = datagrams {
        engine.set_datagram_port(port);
    }
    let mut telemetry = config.telemetry.as_ref().and_then(|asked| {
        let (writer, reader) = marks(MARKS);
        let begun = telemetry::begin(asked, &config.host, config.listen.ip(), reader)?;
        engine.set_mark_writer(writer);
        Some(begun)
    });
    let (engine, thread) = start(engine, config.spin).context("cannot start the engine's thread")?;

    let (requests, mut asked) = mpsc::channel(REQUESTS);
    let (closing, closed) = watch::channel(false);
    let rdma = config.rdma.as_ref().map(|rdma| rules(rdma, config.listen.ip(), devices));
    let server = SessionServer::bind(config.tenants, rdma)?;
    let mut servers = JoinSet::new();
    servers.spawn(server.run(requests, closed));
    let mut paths = Paths::begin(address, config.verbs.is_none());
    let codecs = coding::codecs().to_vec();
    let abilities = paths.abilities(config.verbs.is_none(), telemetry.is_some());
    // Tensors that only a device reaches cannot be added up into packets.
    let aggregation = config.rdma.is_none();
    let settings = Settings::new(config.control, config.protection, config.host.clone(), address);
    let mut control = control::connect(Settings {
        abilities: v1::Capabilities { codecs, aggregation, datagram_bytes, ..abilities },
        ..settings
    });
    paths
        .answer_into(control.to_control.downgrade())
        .context("cannot start the threads that look at paths")?;
    if let (Some(telemetry), Some(asked)) = (&mut telemetry, &config.telemetry) {
        telemetry.serve(asked, &config.host, &control.to_control).await;
    }
    let mut agent =
        Agent::new(engine, control.to_control, telemetry.as_ref().map(telemetry::Running::handle), paths);
    tokio::pin!(stop);
    let mut tick = tokio::time::interval(TICK);
    tracing::info!(host = config.host, %address, "agent is up");

    let mut checks = JoinSet::new();
    let mut ending: Option<Instant> = None;
    while ending.is_none_or(|ending| ending.elapsed() < DRAIN_TIMEOUT && !thread.is_finished()) {
        tokio::select! {
            Some(notice) = heard.recv() => agent.handle_notice(notice),
            Some(request) = asked.recv(), if agent.has_room() => agent.handle_request(request),
            Some(event) = control.events.recv(), if !agent.is_checking() => {
                if let Some(check) = agent.handle_control(event) {
                    checks.spawn_blocking(move || check.run());
                }
            }
            Some(checked) = checks.join_next() => agent.handle_checked(checked.ok()),
            _ = tick.tick() => {
                agent.handle_timeout(Instant::now());
                if ending.is_none() && thread.is_finished() {
                    tracing::error!("the engine's thread is gone; the agent ends");
                    closing.send_replace(true);
                    break;
                }
            }
            () = &mut stop, if ending.is_none() => {
                tracing::info!("agent is going down");
                ending = Some(Instant::now());
                agent.stop();
                closing.send_replace(true);
            }
        }
    }
    while let Ok(notice) = heard.try_recv() {
        agent.handle_notice(notice);
    }
    // Nobody takes requests any more: sessions that wait for room end.
    drop((agent, asked));
    while servers.join_next().await.is_some() {}
    let _ = tokio::time::timeout(DRAIN_TIMEOUT, control.task).await;
    if let Some(telemetry) = telemetry.take() {
        telemetry.end().await;
    }
    if thread.is_finished() {
        thread.join().map_err(|_| anyhow::anyhow!("the engine's thread has panicked"))?;
    }
    Ok(())
}
