//! Telemetry of an agent, from its configuration; without it the agent runs on.

use crate::config::Telemetry;
use crate::counters::Counters;
use crate::telemetry::metrics::text;
use crate::telemetry::socket::Socket;
use crate::telemetry::{Finding, Found, Handle, Setup, http, report, service, start};
use anyhow::{Context, anyhow};
use harmonaize_api::v1::from_agent;
use harmonaize_engine::MarkReader;
use harmonaize_loader::{Collector, EndpointOptions, Options, Programs, interface_with, own_namespace};
use std::net::{IpAddr, SocketAddr};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::net::TcpListener;
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
}

/// How long those who are being told something may take when the agent ends.
const FAREWELL: Duration = Duration::from_secs(1);

impl Running {
    /// A thread that runs; see [`start`].
    pub fn new(handle: Handle, thread: JoinHandle<()>) -> Self {
        Self { handle, thread, servers: JoinSet::new(), closing: watch::Sender::new(false), metrics: None }
    }

    /// Where metrics are served.
    pub fn metrics(&self) -> Option<SocketAddr> {
        self.metrics
    }

    /// By which it is reached.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Serves operators and Prometheus where the configuration asks for it, and reports to control through `control`. Within
    /// a tokio runtime. What cannot be had is said, and the rest goes on.
    pub async fn serve(
        &mut self,
        config: &Telemetry,
        host: &str,
        control: &mpsc::Sender<from_agent::Message>,
        counters: &Counters,
    ) {
        self.servers.spawn(report::run(self.handle.clone(), control.downgrade()));
        if let Some(path) = &config.socket {
            match Socket::bind(path, &config.uids) {
                Ok(socket) => {
                    let serving =
                        service::serve(self.handle(), host.to_owned(), socket, self.closing.subscribe());
                    self.servers.spawn(serving);
                }
                Err(error) => tracing::error!("telemetry is not shown at its socket: {error:#}"),
            }
        }
        if let Some(address) = config.metrics {
            match TcpListener::bind(address).await {
                Ok(listener) => {
                    self.metrics = listener.local_addr().ok();
                    let handle = self.handle();
                    let counters = counters.clone();
                    let scrape = move || {
                        let (handle, counters) = (handle.clone(), counters.clone());
                        async move { text(handle.read(false).await?, &counters).ok() }
                    };
                    self.servers.spawn(http::serve(scrape, listener, self.closing.subscribe()));
                }
                Err(error) => tracing::error!("no metrics: cannot listen on {address}: {error}"),
            }
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

/// Begins telemetry, or says why there is none. `links` is the address that other agents connect to.
pub fn begin(config: &Telemetry, host: &str, links: IpAddr, marks: Vec<MarkReader>) -> Option<Running> {
    match try_begin(config, host, links, marks) {
        Ok(running) => Some(running),
        Err(error) => {
            tracing::error!("no telemetry: {error:#}; collectives run without");
            None
        }
    }
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
    let options = Options {
        idle_gap: config.idle_gap,
        late_rtt: config.late_rtt,
        flows: config.flows,
        run_time: config.run_time,
        diagnosis: config.diagnosis,
        xdp: config.xdp,
        endpoints: config.kernel.then(own_endpoints),
        ..Options::default()
    };
    let open = move || Ok(Box::new(Programs::open(&options)?) as Box<dyn Collector>);
    let (handle, thread) = start(setup, open)?;
    Ok(Running::new(handle, thread))
}

/// What the decision loop does so far: the log has every verdict.
fn log(finding: &Finding) {
    match &finding.found {
        Found::Congestion(congestion) => {
            let (link, state, cause) = (congestion.link, congestion.level, congestion.cause);
            tracing::info!(?link, ?state, ?cause, "congestion");
        }
        Found::Straggler(late) => {
            let straggler = &late.straggler;
            let (subject, rank, kind, by_ns) =
                (straggler.subject, straggler.rank, straggler.kind, straggler.by_ns);
            let over = straggler.ended_ns.is_some();
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
