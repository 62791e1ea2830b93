//! The agent's other role: an aggregator on the way, for the communicators that control grants it.
//!
//! One thread serves datagrams and holds all state; this task carries control's grants to it and its words back. What was granted is
//! served on while control is away; a new start is another incarnation, to which control grants again. Where control names an aggregator
//! above, sums go on there, through the same socket.

mod calibrate;
mod config;
mod grant;
mod metrics;
mod routes;
mod serve;

pub use calibrate::{Calibration, calibrate};
pub use config::AggregatorConfig;
pub use grant::ParentConfig;

use crate::control::{self, Event, Settings};
use anyhow::Context;
use harmonaize_aggregator::{Aggregator, Pool};
use harmonaize_api::communicator_text;
use harmonaize_api::v1::{self, from_agent};
use harmonaize_identity::Watched;
use harmonaize_libibverbs::host_devices;
use harmonaize_program::{Compiled, Watchdog};
use harmonaize_transport::datagram::{DatagramConfig, Datagrams, Endpoint, RdmaDatagrams};
use harmonaize_verbs::Devices;
use serve::{Endpoints, Server, Thread};
use std::time::{Duration, Instant};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

/// How often control is told what was done.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);
/// Datagrams that wait to be sent.
const BATCH: usize = 256;
/// How often the configuration's file is looked at.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// How long the calibration may take.
const CALIBRATION: Duration = Duration::from_millis(50);
/// How long the last words to control may take.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

/// Serves until `stop` completes.
///
/// # Errors
/// If an address cannot be had, or the system gives no thread or randomness; says which.
pub async fn run(config: AggregatorConfig, stop: impl Future<Output = ()> + Send) -> anyhow::Result<()> {
    run_on(&host_devices(), config, stop).await
}

/// The same with these RDMA devices for the host's.
///
/// # Errors
/// As of [`run`].
pub async fn run_on(
    devices: &Devices,
    config: AggregatorConfig,
    stop: impl Future<Output = ()> + Send,
) -> anyhow::Result<()> {
    compiled(devices, config, Box::pin(stop)).await
}

fn compiled<'a>(
    devices: &'a Devices,
    config: AggregatorConfig,
    stop: Compiled<'a, ()>,
) -> Compiled<'a, anyhow::Result<()>> {
    Box::pin(serve(devices, config, stop))
}

async fn serve(
    devices: &Devices,
    mut config: AggregatorConfig,
    mut stop: Compiled<'_, ()>,
) -> anyhow::Result<()> {
    let mut hangup = signal(SignalKind::hangup()).context("cannot listen for SIGHUP")?;
    let (unit, units) = (config.unit_bytes(), config.units());
    let datagrams = DatagramConfig {
        bytes: unit + harmonaize_aggregator::packet::HEADER_BYTES,
        batch: BATCH,
        ..DatagramConfig::default()
    };
    let socket = Datagrams::bind(config.listen, datagrams)
        .with_context(|| format!("cannot listen on {} for workers", config.listen))?;
    let address = socket.local_address();
    let rate = match config.packets_per_second {
        Some(rate) => rate,
        None => calibrate(unit, CALIBRATION).map_or(0, |measured| measured.packets_per_second()),
    };
    let incarnation = incarnation()?;
    let rdma = config.verbs.as_ref().map(|verbs| {
        let (port, key) = (verbs.datagrams(address.ip(), devices), incarnation as u32 & (u32::MAX >> 1));
        let opened = RdmaDatagrams::open(&port, key, datagrams);
        opened.map(|datagrams| (datagrams, key)).context("cannot open the RDMA device for datagrams")
    });
    let rdma = rdma.transpose()?;
    let datagrams = rdma.as_ref().map(|(datagrams, key)| v1::DatagramPort {
        gid: datagrams.local_address().gid.0.to_vec(),
        number: datagrams.local_address().number,
        key: *key,
        bytes: u32::try_from(datagrams.max_bytes()).unwrap_or(0),
    });
    let rdma = rdma.map(|(datagrams, _)| Endpoint::Rdma(Box::new(datagrams)));
    let endpoints = Endpoints { udp: Endpoint::Udp(Box::new(socket)), rdma };
    let server = Server::new(endpoints, Aggregator::new(incarnation, Pool::new(units, unit)), config.spin);
    let thread = Thread::start(server).context("cannot start the aggregator's thread")?;
    let told = v1::Aggregator {
        incarnation,
        units,
        unit_bytes: u32::try_from(unit).unwrap_or(u32::MAX),
        packets_per_second: rate,
        granted: Vec::new(),
        datagrams,
    };
    let (above, protection) = (config.control.clone(), config.protection.clone());
    let settings = Settings::new(above, protection.clone(), config.name.clone(), address);
    let mut control = control::connect(Settings { aggregator: Some(told), ..settings });
    let (closing, closed) = watch::channel(false);
    if let Some(listener) = harmonaize_metrics::listen(config.metrics, Duration::ZERO).await {
        let all = (thread.commands(), protection);
        let scrape = move || {
            let (asked, protection) = all.clone();
            async move {
                let certificate_ends = protection.certificate_ends().ok().flatten();
                metrics::text(&asked.read().await?, certificate_ends).ok()
            }
        };
        tokio::spawn(harmonaize_metrics::serve(scrape, listener, closed));
    }
    tracing::info!(name = config.name, %address, units, unit, packets_per_second = rate, "aggregator is up");
    harmonaize_program::ready();
    let mut watchdog = Watchdog::new(Instant::now());
    let mut reports = tokio::time::interval(REPORT_INTERVAL);
    let mut watched = Watched::new(config.source.iter().cloned().collect());
    let mut poll = tokio::time::interval(POLL_INTERVAL);
    poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            Some(event) = control.events.recv() => {
                if let Some(answer) = handle_event(&thread, config.parent, event).await {
                    let _ = control.to_control.send(answer).await;
                }
            }
            _ = reports.tick() => {
                if let Some(reading) = thread.commands().read().await {
                    watchdog.alive(Instant::now());
                    // A control that does not read gets the next one.
                    let _ = control.to_control.try_send(from_agent::Message::Aggregator(reading.report()));
                }
            }
            Some(()) = hangup.recv() => reload(&mut config),
            _ = poll.tick() => if watched.changed() { reload(&mut config) },
            () = &mut stop => break,
        }
    }
    tracing::info!("aggregator is going down");
    harmonaize_program::stopping();
    closing.send_replace(true);
    drop(control.to_control);
    drop(control.events);
    let _ = tokio::time::timeout(DRAIN_TIMEOUT, control.task).await;
    thread.end()
}

/// Reads the configuration again. One that cannot be used is refused as a whole, and the log says why.
fn reload(config: &mut AggregatorConfig) {
    match config.reload() {
        Ok(()) => tracing::info!("the configuration was read again"),
        Err(error) => tracing::error!(%error, "the configuration stays as it was"),
    }
}

/// Does what control says; the answer, if it wants one.
async fn handle_event(thread: &Thread, upwards: ParentConfig, event: Event) -> Option<from_agent::Message> {
    match event {
        Event::GrantAggregation(told) => {
            let id = told.communicator;
            let (communicator, tenant) = (communicator_text(id), told.tenant.clone());
            let outcome = match grant::read(&told, upwards) {
                Ok(read) => thread.grant(read).await.map_err(|error| error.to_string()),
                Err(error) => Err(error.to_string()),
            };
            match &outcome {
                Ok(()) => {
                    let above = told.parent.map_or_else(|| "-".to_owned(), |parent| parent.address);
                    tracing::info!(communicator, tenant, workers = told.workers, above, "granted");
                }
                Err(why) => tracing::warn!(communicator, tenant, why, "a grant is refused"),
            }
            let refused = outcome.err().unwrap_or_default();
            let answer = v1::AggregationGranted { communicator: id, refused };
            Some(from_agent::Message::AggregationGranted(answer))
        }
        Event::RevokeAggregation(grant) => {
            tracing::info!(communicator = communicator_text(grant.0), "withdrawn");
            thread.revoke(grant).await;
            None
        }
        Event::Connected(welcome) => {
            tracing::info!(control = welcome.build, "session with control is open");
            None
        }
        // An aggregator has no communicators of its own.
        _ => None,
    }
}

/// A number that no other start has.
fn incarnation() -> anyhow::Result<u64> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes)
        .map_err(|error| anyhow::anyhow!("the system gives no randomness: {error}"))?;
    Ok(u64::from_le_bytes(bytes).max(1))
}
