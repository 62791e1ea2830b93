//! Telemetry of an agent, from its configuration; without it the agent runs on.

use crate::config::Telemetry;
use crate::telemetry::{Finding, Found, Handle, Setup, start};
use anyhow::{Context, anyhow};
use harmonaize_engine::MarkReader;
use harmonaize_loader::{Collector, Options, Programs, interface_with};
use std::net::IpAddr;
use std::thread::JoinHandle;

/// Telemetry that has begun.
#[derive(Debug)]
pub struct Running {
    handle: Handle,
    thread: JoinHandle<()>,
}

impl Running {
    /// By which it is reached.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Ends it: what was recorded is in its file, and nothing is attached any more.
    pub fn end(self) {
        self.handle.stop();
        if self.thread.join().is_err() {
            tracing::error!("the telemetry thread has panicked");
        }
    }
}

/// Begins telemetry, or says why there is none. `links` is the address that other agents connect to.
pub fn begin(asked: &Telemetry, host: &str, links: IpAddr, marks: MarkReader) -> Option<Running> {
    match try_begin(asked, host, links, marks) {
        Ok(running) => Some(running),
        Err(error) => {
            tracing::error!("no telemetry: {error:#}; collectives run without");
            None
        }
    }
}

fn try_begin(asked: &Telemetry, host: &str, links: IpAddr, marks: MarkReader) -> anyhow::Result<Running> {
    let interfaces =
        match asked.interfaces.as_slice() {
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
        rates: asked.rates.clone(),
        interval: asked.interval,
        record: asked.record.clone(),
        marks: Some(marks),
        decide: Box::new(log),
    };
    let options = Options {
        idle_gap: asked.idle_gap,
        flows: asked.flows,
        run_time: asked.run_time,
        ..Options::default()
    };
    let open = move || Ok(Box::new(Programs::open(&options)?) as Box<dyn Collector>);
    let (handle, thread) = start(setup, open)?;
    Ok(Running { handle, thread })
}

/// What the decision loop does so far: the log has every verdict.
fn log(finding: &Finding) {
    match &finding.found {
        Found::Congestion(congestion) => {
            let (link, state, cause) = (congestion.link, congestion.state, congestion.cause);
            tracing::info!(?link, ?state, ?cause, "congestion");
        }
        Found::Straggler(straggler) => {
            let (subject, rank, kind, by_ns) =
                (straggler.subject, straggler.rank, straggler.kind, straggler.by_ns);
            let over = straggler.ended_ns.is_some();
            tracing::info!(?subject, rank, ?kind, by_ns, over, "straggler");
        }
        Found::Operation(_) | Found::Phase(_) => {}
    }
}
