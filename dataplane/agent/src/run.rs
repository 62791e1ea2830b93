//! Wiring: engine, transport, sessions with tenants and with control.

mod predecessor;
mod successor;

pub use successor::Interrupted;

use crate::agent::Agent;
use crate::coding;
use crate::config::{Config, HANDSHAKE, Rdma};
use crate::congestion;
use crate::control::{self, Event, LedgerImage, SessionThread, Settings};
use crate::costs;
use crate::counters::Counters;
use crate::engines::Engines;
use crate::handover::{Greeting, Place, VERSION};
use crate::paths::Paths;
use crate::sandbox::without_privileges;
use crate::served::Tenants;
use crate::session::{Freeze, RdmaRules, SessionServer};
use crate::telemetry;
use crate::wiring::{Remainder, Wiring};
use anyhow::Context;
use harmonaize_api::v1;
use harmonaize_engine::{
    Engine, Handle as EngineHandle, MarkReader, MarkWriter, Notice, PassSharing, marks, start,
};
use harmonaize_libibverbs::host_devices;
use harmonaize_program::{Compiled, Watchdog};
use harmonaize_transport::datagram::RdmaPort;
use harmonaize_transport::tcp::{Acceptor, Config as TcpConfig, Rejected, TcpTransport};
use harmonaize_transport::verbs::{Config as VerbsConfig, Devices, VerbsTransport};
use harmonaize_transport::{Transport, Uplink};
use predecessor::Handing;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use successor::Predecessor;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;

/// Requests of tenants that wait.
const REQUESTS: usize = 1024;
/// Marks of one of the engine's threads that wait for telemetry's; an operation makes some for each segment and message.
const MARKS: usize = 1 << 16;
/// From how many bytes queued on a connection on a sender writes them: enough work to wake a thread for.
const SENDER_BYTES: usize = 256 << 10;
/// How often it is looked at threads, and at who should not be there.
const TICK: Duration = Duration::from_millis(500);
/// How often it is looked at threads that are to end.
const ENDING_TICK: Duration = Duration::from_millis(100);
/// How soon a hand-over goes on.
const HANDING: Duration = Duration::from_millis(1);
/// How often the operator is told of connections that nobody introduced, and of links on whose way somebody is.
const INTRUDERS_INTERVAL: Duration = Duration::from_secs(10);
/// How often the configuration's files are looked at.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// How far the thread of the sessions is behind the engines' threads, as a nice value. So a tenth of a processor's time
/// is its own.
const SESSIONS_NICE: i32 = 10;
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

/// How links to other agents go over TCP.
fn tcp(config: &Config) -> TcpConfig {
    TcpConfig {
        protection: config.links.protection,
        dscp: config.links.dscp,
        peer_timeout: config.peer_timeout,
        connect_timeout: config.connect_timeout,
        congestion: config.congestion.clone(),
        ..TcpConfig::new(config.listen)
    }
}

/// A way to other agents that the configuration asks for, of one thread.
fn transport(
    config: &Config,
    tcp: TcpConfig,
    acceptor: &Acceptor,
    devices: &Devices,
) -> anyhow::Result<Box<dyn Transport + Send>> {
    let Some(asked) = &config.verbs else {
        let tcp = TcpConfig { sender_bytes: config.engine_senders.then_some(SENDER_BYTES), ..tcp };
        return Ok(Box::new(TcpTransport::accepting(acceptor, tcp)?));
    };
    let verbs = VerbsConfig {
        devices: asked.devices.clone(),
        options: asked.port_options(),
        ..VerbsConfig::new(tcp)
    };
    Ok(Box::new(VerbsTransport::accepting(acceptor, verbs, devices)?))
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

/// The engine's threads, and what they have for the rest of the agent.
struct Started {
    engines: Engines,
    threads: Vec<JoinHandle<()>>,
    telemetry: telemetry::Running,
}

impl Started {
    /// Starts the threads, and telemetry's.
    fn start(
        config: &Config,
        (acceptor, uplink): (&Acceptor, &Arc<Uplink>),
        devices: &Devices,
        port: Option<&RdmaPort>,
        notices: &mpsc::UnboundedSender<Notice>,
        counters: &Counters,
    ) -> anyhow::Result<Self> {
        let (writers, readers): (Vec<_>, Vec<MarkReader>) =
            (0..config.engine_threads).map(|_| marks(MARKS)).unzip();
        let telemetry =
            telemetry::begin(config.telemetry.as_ref(), &config.host, config.listen.ip(), &readers)
                .context("cannot start the telemetry thread")?;
        let begin = || Self::engines(config, (acceptor, uplink), (devices, port), notices, writers);
        let (handles, threads) = without_privileges(config, begin)?;
        Ok(Self { engines: Engines::new(handles, counters.clone()), threads, telemetry })
    }

    /// Starts a thread for each writer of marks.
    fn engines(
        config: &Config,
        (acceptor, uplink): (&Acceptor, &Arc<Uplink>),
        (devices, port): (&Devices, Option<&RdmaPort>),
        notices: &mpsc::UnboundedSender<Notice>,
        writers: Vec<MarkWriter>,
    ) -> anyhow::Result<(Vec<EngineHandle>, Vec<JoinHandle<()>>)> {
        let mut started = Vec::new();
        let sharing = PassSharing::among(writers.len());
        for (number, (writer, sharing)) in writers.into_iter().zip(sharing).enumerate() {
            let tcp = TcpConfig { uplink: Some(Arc::clone(uplink)), ..tcp(config) };
            let transport = transport(config, tcp, acceptor, devices).context("cannot reach other agents")?;
            let notices = notices.clone();
            // The receiver outlives the engine but for the end of the process.
            let notify = Box::new(move |notice| drop(notices.send(notice)));
            let mut engine = Engine::new(transport, notify).context("cannot create the engine")?;
            if let Some(port) = port {
                engine.set_datagram_port(port.clone());
            }
            engine.set_mark_writer(writer);
            engine.set_dscp(config.links.dscp);
            engine.share_passes(sharing);
            started.push(start(engine, number, config.spin).context("cannot start the engine's threads")?);
        }
        Ok(started.into_iter().unzip())
    }
}

/// Tells the operator now and then of who came or spoke on a link and should not have.
struct IntruderWatch {
    acceptor: Acceptor,
    /// Connections, and links, that the operator knows of.
    rejected: u64,
    forged: u64,
    next: Instant,
}

impl IntruderWatch {
    /// What is new, if it is time to tell.
    fn news(&mut self, now: Instant) -> Vec<String> {
        if now < self.next {
            return Vec::new();
        }
        let mut news = Vec::new();
        let Rejected { count, last } = self.acceptor.rejected();
        let more = count - std::mem::replace(&mut self.rejected, count);
        if let Some(last) = last.filter(|_| more > 0) {
            let what = "connections from addresses that control did not introduce, the last from";
            news.push(format!("{more} {what} {last}"));
        }
        let forged = self.acceptor.forged();
        let more = forged - std::mem::replace(&mut self.forged, forged);
        if more > 0 {
            news.push(format!(
                "{more} links ended because what came on them was not their peers'; the log has each"
            ));
        }
        if !news.is_empty() {
            self.next = now + INTRUDERS_INTERVAL;
        }
        news
    }
}

/// Runs an agent until `stop` completes, then ends its communicators in order.
///
/// # Errors
/// If an address or socket cannot be had; says which.
pub async fn run(config: Config, stop: impl Future<Output = ()> + Send) -> anyhow::Result<()> {
    run_on(&host_devices(), config, stop).await
}

/// As [`run`], in the place of the agent that runs here by the same configuration, with its state. Without such an agent it is
/// [`run`].
///
/// # Errors
/// As of [`run`]; and why the other agent keeps its place. It does where `stop` completes first.
pub async fn take_over(config: Config, stop: impl Future<Output = ()> + Send) -> anyhow::Result<()> {
    let mut stop: Compiled<'_, ()> = Box::pin(stop);
    let predecessor = Predecessor::find(&config, greeting(&config), &mut stop).await?;
    if predecessor.is_none() {
        tracing::info!("no agent is there whose place to take");
    }
    compiled(&host_devices(), config, predecessor, stop).await
}

/// What this agent says of itself to a successor, or to the agent whose place it takes.
fn greeting(config: &Config) -> Greeting {
    let links = &config.links;
    let over = if config.verbs.is_some() { "RDMA" } else { "TCP" };
    // What an agent without says is what it said in release 0.2.0.
    let attachments = if config.rdma.is_some() { ", with attachments over RDMA" } else { "" };
    Greeting {
        version: VERSION,
        build: harmonaize_program::version().to_owned(),
        host: config.host.clone(),
        threads: config.engine_threads,
        links: format!("{} over {over} at {}{attachments}", links.protection, config.listen),
    }
}

/// The place for a successor, where the configuration asks for it; that of the agent before, if there was one.
fn place(config: &Config, inherited: Option<OwnedFd>) -> Option<Place> {
    let path = config.handover.as_ref()?;
    let place = inherited.map_or_else(|| Place::bind(path), Place::inherit);
    place.map_err(|error| tracing::error!(path = %path.display(), %error, "no place for a successor")).ok()
}

/// The same with these RDMA devices for the host's.
///
/// # Errors
/// As of [`run`].
pub async fn run_on(
    devices: &Devices,
    config: Config,
    stop: impl Future<Output = ()> + Send,
) -> anyhow::Result<()> {
    compiled(devices, config, None, Box::pin(stop)).await
}

fn compiled<'a>(
    devices: &'a Devices,
    config: Config,
    predecessor: Option<Predecessor>,
    stop: Compiled<'a, ()>,
) -> Compiled<'a, anyhow::Result<()>> {
    Box::pin(serve(devices, config, predecessor, stop))
}

async fn serve(
    devices: &Devices,
    config: Config,
    mut predecessor: Option<Predecessor>,
    mut stop: Compiled<'_, ()>,
) -> anyhow::Result<()> {
    let listener = predecessor.as_mut().and_then(|predecessor| predecessor.agents.take());
    let acceptor = without_privileges(&config, || match listener {
        Some(listener) => Acceptor::inherit(listener, &tcp(&config)),
        None => Acceptor::bind(&tcp(&config)),
    });
    let acceptor =
        acceptor.with_context(|| format!("cannot listen on {} for other agents", config.listen))?;
    let listening = acceptor.clone();
    let address = acceptor.local_address();
    let (notices, mut heard) = mpsc::unbounded_channel();
    let counters = Counters::default();
    let datagrams = datagrams(&config, devices);
    let (port, datagram_bytes) = datagrams.as_ref().map_or((None, 0), |(port, bytes)| (Some(port), *bytes));
    let uplink = Arc::new(Uplink::default());
    let Started { mut engines, threads, mut telemetry } =
        Started::start(&config, (&acceptor, &uplink), devices, port, &notices, &counters)?;
    let mut intruders = IntruderWatch { acceptor, rejected: 0, forged: 0, next: Instant::now() };

    let (requests, asked) = mpsc::channel(REQUESTS);
    let rdma = config.rdma.as_ref().map(|rdma| rules(rdma, config.listen.ip(), devices));
    let (freeze, standing) = Freeze::new(predecessor.is_some());
    let inherited = predecessor.as_mut().and_then(|found| found.place.take());
    let sockets = predecessor.as_mut().map_or_else(BTreeMap::new, |found| std::mem::take(&mut found.sockets));
    let server = SessionServer::bind_frozen(rdma, requests, counters.clone(), freeze, sockets)?;
    let (own, at) = (greeting(&config), config.clone());
    let mut tenants = Tenants::serve(server, config.tenants, config.control_tenants, config.source)?;
    let taken = match predecessor {
        Some(predecessor) => Some(predecessor.take(&mut engines, &mut tenants, &mut heard, &mut stop).await),
        None => None,
    };
    let mut handing = Handing::new(own, (at.verbs.is_some(), taken.is_some()), standing);
    let mut reload = signal(SignalKind::hangup()).context("cannot listen for SIGHUP")?;
    let mut paths = Paths::begin(address, config.verbs.is_none());
    if let Some(verbs) = &config.verbs {
        paths.set_queue_pairs(verbs.send_from(config.listen.ip(), devices));
    }
    let codecs = coding::codecs().to_vec();
    let abilities = paths.abilities(config.verbs.is_none(), telemetry.measures());
    let settings = Settings::new(config.control, config.protection.clone(), config.host.clone(), address);
    let settings = Settings {
        abilities: v1::Capabilities {
            codecs,
            aggregation: true,
            datagram_bytes,
            costs: costs::measure(config.links.protection),
            congestion_controls: congestion::controls(&at),
            links_over_tcp: at.verbs.is_some(),
            ..abilities
        },
        answers: Some(telemetry::Answers::new(
            telemetry.measures().then(|| telemetry.handle()),
            config.host.clone(),
        )),
        ..settings
    };
    let (ledger, parts) = taken.map(|taken| taken.split()).unzip();
    let changes = ledger.as_ref().map(LedgerImage::changes).transpose()?.unwrap_or_default();
    let session = SessionThread::start().context("cannot start the thread of the session with control")?;
    let control = match ledger {
        Some(ledger) => {
            let resumed = session.enter(|| control::resume(settings, ledger));
            resumed.context("the agent before had no such session")?
        }
        None => session.enter(|| control::connect(settings)),
    };
    paths
        .answer_into(control.to_control.downgrade())
        .context("cannot start the threads that look at paths")?;
    let shown = telemetry::Shown {
        telemetry: config.telemetry.as_ref(),
        metrics: config.metrics,
        host: &config.host,
        protection: &config.protection,
        succeeds: parts.is_some(),
    };
    telemetry.serve(shown, &control.to_control, &counters).await;
    // Of this thread, and of those that it starts from now on. What tenants ask for, however much, makes no engine's thread wait for a
    // processor.
    if let Err(error) = rustix::process::nice(SESSIONS_NICE) {
        tracing::warn!(%error, "sessions of tenants compete with the engines for processors");
    }
    let agent = Agent::new(engines, control.to_control, telemetry.handle(), paths, counters);
    let mut wiring = Wiring::new(agent, heard, asked, control.events);
    // Sessions go on once their requests can be passed on.
    let mut waiting = None;
    if let Some((image, sessions, limits, epochs)) = parts {
        wiring.agent.inherit(image, &limits, &changes).map_err(|error| anyhow::anyhow!(error))?;
        wiring.agent.report_inherited(&epochs);
        tracing::info!(
            sessions = sessions.len(),
            epochs = epochs.len(),
            "took the place of the agent before"
        );
        sessions.into_iter().for_each(|session| tenants.server().resume(session));
        waiting = Some(Instant::now() + DRAIN_TIMEOUT);
    }
    handing.open(place(&at, inherited));
    let mut connected = false;
    let (mut tick, mut poll) = (tokio::time::interval(TICK), tokio::time::interval(POLL_INTERVAL));
    poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
    tracing::info!(host = config.host, %address, threads = threads.len(), "agent is up");
    harmonaize_program::ready();
    let mut watchdog = Watchdog::new(Instant::now());

    let mut ending: Option<Instant> = None;
    let running = || !threads.iter().all(JoinHandle::is_finished);
    while ending.is_none_or(|ending| ending.elapsed() < DRAIN_TIMEOUT && running()) {
        tokio::select! {
            () = tokio::time::sleep(HANDING), if handing.is_running() => {
                let idle = wiring.is_idle();
                handing.step(&mut wiring.agent, &mut tenants, &control.pause, (connected, idle)).await;
            }
            peer = handing.next(), if !handing.is_running() && ending.is_none() && waiting.is_none() => {
                handing.begin(peer, listening.descriptor());
            }
            remainder = wiring.next() => match remainder {
                None => {}
                Some(Remainder::Notice(Notice::HandedOver { thread, image })) => {
                    if let Err(why) = handing.handed(thread, image) {
                        handing.call_off(&mut wiring.agent, &mut tenants, &control.pause, &why.to_string());
                    }
                }
                Some(Remainder::Notice(_)) => {}
                Some(Remainder::Check(check)) => wiring.check_blocking(check),
                Some(Remainder::Event(Event::ServeTenants(told))) if ending.is_none() => {
                    wiring.agent.tenants_served(tenants.set_added(told));
                }
                Some(Remainder::Event(Event::Connected(mut welcome))) if ending.is_none() => {
                    connected = true;
                    if waiting.take().is_some() {
                        handing.release(&mut tenants);
                    }
                    uplink.set_rate(Some(welcome.uplink_bits_per_second).filter(|rate| *rate > 0));
                    let told = std::mem::take(&mut welcome.serve);
                    let takes_over_tcp = welcome.takes_links_over_tcp;
                    wiring.handle_control(Event::Connected(welcome));
                    handing.connected(&mut wiring.agent, takes_over_tcp, tenants.server().awaited());
                    wiring.agent.tenants_served(tenants.set_added(told));
                }
                Some(Remainder::Event(event)) => {
                    connected &= !matches!(event, Event::Disconnected { .. });
                    wiring.handle_control(event);
                }
            },
            Some(()) = reload.recv(), if ending.is_none() && !handing.is_running() => {
                tenants.reload().into_iter().for_each(|served| wiring.agent.tenants_served(served));
            }
            _ = poll.tick(), if ending.is_none() && !handing.is_running() => {
                tenants.poll().into_iter().for_each(|served| wiring.agent.tenants_served(served));
            }
            _ = tick.tick() => {
                let now = Instant::now();
                watchdog.alive(now);
                if waiting.take_if(|at| now >= *at).is_some() {
                    handing.release(&mut tenants);
                }
                if connected && ending.is_none() {
                    handing.keep(&mut wiring.agent, tenants.server().awaited());
                }
                intruders.news(now).into_iter().for_each(|news| wiring.agent.note(news));
                let gone = threads.iter().any(JoinHandle::is_finished) || intruders.acceptor.is_finished();
                if ending.is_none() && gone {
                    tracing::error!("a thread of the engine, or the one that takes connections, is gone; the agent ends");
                    wiring.agent.stop();
                    break;
                }
            }
            () = &mut stop, if ending.is_none() => {
                if handing.is_running() {
                    handing.call_off(&mut wiring.agent, &mut tenants, &control.pause, "the agent is going down");
                }
                tracing::info!("agent is going down");
                harmonaize_program::stopping();
                ending = Some(Instant::now());
                tick = tokio::time::interval(ENDING_TICK);
                wiring.agent.stop();
                tenants.stop();
            }
        }
    }
    // Nobody takes requests any more: sessions that wait for room end.
    let _events = wiring.end();
    tenants.ended().await;
    let _ = tokio::time::timeout(DRAIN_TIMEOUT, control.task).await;
    telemetry.end().await;
    for thread in threads.into_iter().filter(JoinHandle::is_finished) {
        thread.join().map_err(|_| anyhow::anyhow!("a thread of the engine has panicked"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Verbs;
    use std::path::Path;

    #[test]
    fn a_successor_uses_rdma_where_its_agent_does() {
        let text =
            "host = \"h0\"\ncontrol = \"127.0.0.1:1\"\nlisten = \"127.0.0.1:0\"\ninsecure_loopback = true\n";
        let config = Config::parse(Path::new("agent.toml"), text).unwrap();
        let greetings = [(false, false), (false, true), (true, false), (true, true)].map(|(verbs, rdma)| {
            let (verbs, rdma) = (verbs.then(Verbs::default), rdma.then(Rdma::default));
            greeting(&Config { verbs, rdma, ..config.clone() })
        });
        for (one, agent) in greetings.iter().enumerate() {
            for (other, successor) in greetings.iter().enumerate() {
                assert_eq!(agent.refuse(successor).is_none(), one == other, "{agent:?}, {successor:?}");
            }
        }
    }
}
