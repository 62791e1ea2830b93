//! Telemetry of an agent, from its configuration; without it the agent runs on.

use crate::config::Telemetry;
use crate::counters::Counters;
use crate::telemetry::cpu_budget::nanoseconds;
use crate::telemetry::links::late_rtt_limit;
use crate::telemetry::metrics::{Own, text};
use crate::telemetry::socket::Socket;
use crate::telemetry::unmeasured::Unmeasured;
use crate::telemetry::{Finding, Found, Handle, Setup, report, service, start};
use anyhow::{Context, anyhow};
use harmonaize_api::v1::from_agent;
use harmonaize_engine::MarkReader;
use harmonaize_identity::Protection;
use harmonaize_loader::{Collector, EndpointOptions, Options, Programs, interface_with, own_namespace};
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Telemetry that has begun.
#[derive(Debug)]
pub struct Running {
    handle: Handle,
    thread: JoinHandle<()>,
    servers: JoinSet<()>,
    closing: watch::Sender<bool>,
    metrics: Option<SocketAddr>,
    measures: bool,
}

/// Where what is known is shown.
#[derive(Debug)]
pub struct Shown<'a> {
    /// To operators' tools on this host; none: not at all.
    pub telemetry: Option<&'a Telemetry>,
    /// To Prometheus.
    pub metrics: SocketAddr,
    /// This host's name.
    pub host: &'a str,
    /// Whose certificate the metrics tell of.
    pub protection: &'a Protection,
    /// Whether an agent whose place this one took is about to end, and may still listen.
    pub succeeds: bool,
}

/// How often marks are taken in where nothing is measured.
const UNMEASURED_INTERVAL: Duration = Duration::from_millis(20);
/// How long those who are being told something may take when the agent ends.
const FAREWELL: Duration = Duration::from_secs(1);
/// How long an agent whose place was taken may need to end.
const PREDECESSOR: Duration = Duration::from_secs(10);

impl Running {
    /// A thread that runs, see [`start`]; and whether it `measures` this host's traffic.
    pub fn new(handle: Handle, thread: JoinHandle<()>, measures: bool) -> Self {
        let (servers, closing) = (JoinSet::new(), watch::Sender::new(false));
        Self { handle, thread, servers, closing, metrics: None, measures }
    }

    /// Whether this host's traffic is measured.
    pub fn measures(&self) -> bool {
        self.measures
    }

    /// Where metrics are served.
    pub fn metrics(&self) -> Option<SocketAddr> {
        self.metrics
    }

    /// By which it is reached.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Serves Prometheus, operators where the configuration asks for it, and where traffic is measured reports to control through
    /// `control`. Within a tokio runtime. What cannot be had is said, and the rest goes on.
    pub async fn serve(
        &mut self,
        shown: Shown<'_>,
        control: &mpsc::Sender<from_agent::Message>,
        counters: &Counters,
    ) {
        let Shown { telemetry, metrics, host, protection, succeeds } = shown;
        if self.measures {
            self.servers.spawn(report::run(self.handle.clone(), control.downgrade()));
        }
        let shown = telemetry.filter(|_| self.measures);
        let shown = shown.and_then(|config| Some((config, config.socket.as_ref()?)));
        if let Some((config, path)) = shown {
            match Socket::bind(path, &config.uids, succeeds) {
                Ok(socket) => {
                    let serving =
                        service::serve(self.handle(), host.to_owned(), socket, self.closing.subscribe());
                    self.servers.spawn(serving);
                }
                Err(error) => tracing::error!("telemetry is not shown at its socket: {error:#}"),
            }
        }
        let all = (self.handle(), counters.clone(), protection.clone());
        let measures = self.measures;
        let scrape = move || {
            let (handle, counters, protection) = all.clone();
            async move {
                let certificate_ends = protection.certificate_ends().ok().flatten();
                text(&*handle.read(false).await?, &counters, Own { measures, certificate_ends }).ok()
            }
        };
        let closed = self.closing.subscribe();
        if succeeds {
            self.metrics = Some(metrics);
            self.servers.spawn(async move {
                if let Some(listener) = harmonaize_metrics::listen(metrics, PREDECESSOR).await {
                    harmonaize_metrics::serve(scrape, listener, closed).await;
                }
            });
        } else if let Some(listener) = harmonaize_metrics::listen(metrics, Duration::ZERO).await {
            self.metrics = listener.local_addr().ok();
            self.servers.spawn(harmonaize_metrics::serve(scrape, listener, closed));
        }
    }

    /// Ends it: what was recorded is in its file, and nothing is attached any more.
    pub async fn end(mut self) {
        self.closing.send_replace(true);
        self.handle.stop();
        let _ = timeout(FAREWELL, async { while self.servers.join_next().await.is_some() {} }).await;
        self.servers.shutdown().await;
        if self.thread.join().is_err() {
            tracing::error!("the telemetry thread has panicked");
        }
    }
}

/// Begins to take in the engine's marks, and to measure this host's traffic where `config` asks for it. Where that cannot be had,
/// says why, and goes on with the marks alone. `links` is the address that other agents connect to.
///
/// # Errors
/// If the system gives no thread.
pub fn begin(
    config: Option<&Telemetry>,
    host: &str,
    links: IpAddr,
    marks: &[MarkReader],
) -> anyhow::Result<Running> {
    if let Some(config) = config {
        match try_begin(config, host, links, marks.to_vec()) {
            Ok(running) => return Ok(running),
            Err(error) => tracing::error!("no telemetry: {error:#}; metrics tell of operations alone"),
        }
    }
    let setup = Setup {
        host: host.to_owned(),
        interfaces: Vec::new(),
        rates: BTreeMap::new(),
        interval: UNMEASURED_INTERVAL,
        record: None,
        marks: marks.to_vec(),
        decide: Box::new(log),
    };
    let source: Box<dyn Collector> = Box::new(Unmeasured::new()?);
    let (handle, thread) = start(setup, move || Ok(source))?;
    Ok(Running::new(handle, thread, false))
}

fn try_begin(
    config: &Telemetry,
    host: &str,
    links: IpAddr,
    marks: Vec<MarkReader>,
) -> anyhow::Result<Running> {
    let interfaces =
        match config.interfaces.as_slice() {
            [] => {
                let found = interface_with(links).context("cannot list the interfaces")?;
                vec![found.ok_or_else(|| {
                    anyhow!("no interface has the address {links}; name one in `interfaces`")
                })?]
            }
            names => names.to_vec(),
        };
    let setup = Setup {
        host: host.to_owned(),
        interfaces,
        rates: config.rates.clone(),
        interval: config.interval,
        record: config.record.clone().map(|path| (path, config.record_bytes)),
        marks,
        decide: Box::new(log),
    };
    let late_rtt = config.late_rtt.unwrap_or_else(|| late_rtt_limit(&setup.interfaces, &setup.rates));
    let options = Options {
        idle_gap: config.idle_gap,
        late_rtt,
        flows: config.flows,
        run_time: config.run_time,
        diagnosis: config.diagnosis,
        xdp: config.xdp,
        endpoints: config.kernel.then(own_endpoints),
        ..Options::default()
    };
    let open = move || Ok(Box::new(Programs::open(&options)?) as Box<dyn Collector>);
    let (handle, thread) = start(setup, open)?;
    Ok(Running::new(handle, thread, true))
}

/// What the decision loop does so far: the log has every finding.
fn log(finding: &Finding) {
    match &finding.found {
        Found::Congestion(congestion) => {
            let (link, state, cause) = (congestion.link, congestion.level, congestion.cause);
            tracing::info!(?link, ?state, ?cause, "congestion");
        }
        Found::Straggler(late) => {
            let straggler = &late.straggler;
            let (subject, rank, kind, by_ns) =
                (straggler.subject, straggler.rank, straggler.kind, nanoseconds(straggler.by));
            let over = straggler.ended.is_some();
            tracing::info!(?subject, rank, ?kind, by_ns, over, "straggler");
        }
        Found::Operation(_) | Found::Phase(_) => {}
    }
}

/// Sockets of this network namespace alone: what is on other hosts of an emulated network, or in containers, is theirs.
pub(crate) fn own_endpoints() -> EndpointOptions {
    let namespaces = own_namespace().map_or_else(|_| Vec::new(), |namespace| vec![namespace]);
    // Segment by segment only while somebody looks.
    EndpointOptions { namespaces, segments: false, ..EndpointOptions::default() }
}
