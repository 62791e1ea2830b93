//! How others reach the telemetry thread: what they may ask of it, without ever waiting for it.

use crate::telemetry::congestion_reports::ReportSink;
use crate::telemetry::finding::Findings;
use crate::telemetry::names::Names;
use crate::telemetry::own_flows::EpochLinks;
use crate::telemetry::reading::Reading;
use crate::telemetry::tap::Part;
use crossbeam::channel::{Sender, TrySendError};
use harmonaize_abi::CommunicatorId;
use harmonaize_api::v1::from_agent::Message;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};

/// What the thread is asked for.
pub(super) enum Command {
    Formed(Box<EpochLinks>),
    Ended(CommunicatorId),
    Read { flows: bool, reply: oneshot::Sender<Arc<Reading>> },
    Trace(mpsc::Sender<Part>),
    ReportCongestion(ReportSink),
    Stop,
}

/// A running telemetry thread. Clones reach the same one.
#[derive(Clone, Debug)]
pub struct Handle {
    pub(super) commands: Sender<Command>,
    pub(super) bell: Arc<OwnedFd>,
    pub(super) findings: Findings,
    pub(super) names: Arc<Mutex<Names>>,
    pub(super) report_interval: watch::Sender<Option<Duration>>,
}

impl Handle {
    /// The links of an own communicator's epoch are up.
    pub fn formed(&self, formed: EpochLinks) {
        self.send(Command::Formed(Box::new(formed)));
    }

    /// An own communicator is over.
    pub fn ended(&self, communicator: CommunicatorId) {
        self.send(Command::Ended(communicator));
    }

    /// How things stand, with all flows if wanted; none if the thread has ended.
    pub async fn read(&self, flows: bool) -> Option<Arc<Reading>> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Read { flows, reply });
        answer.await.ok()
    }

    /// Has a trace of its own written into `to` until its other end is dropped. See [`crate::telemetry::parts`].
    pub fn trace(&self, to: mpsc::Sender<Part>) {
        self.send(Command::Trace(to));
    }

    /// What was found.
    pub fn findings(&self) -> &Findings {
        &self.findings
    }

    /// The names of interfaces, those that are gone too.
    pub fn names(&self) -> Names {
        self.names.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Control wants a report each so often from now on, or none. Whoever reports hears of it, see [`Handle::report_interval`].
    pub fn report_every(&self, interval: Option<Duration>) {
        self.report_interval.send_replace(interval);
    }

    /// How often control wants a report; changes with each session, even to the same.
    pub fn report_interval(&self) -> watch::Receiver<Option<Duration>> {
        self.report_interval.subscribe()
    }

    /// Control wants so many congestion reports on own paths in a second from now on, into `to`; 0: none. `listen` is the port of this agent;
    /// `queue_pairs`: also on those of queue pairs.
    pub fn report_paths(
        &self,
        to: mpsc::WeakSender<Message>,
        per_second: u32,
        (listen, queue_pairs): (u16, bool),
    ) {
        self.send(Command::ReportCongestion(ReportSink { to, per_second, listen, queue_pairs }));
    }

    /// Ends the thread.
    pub fn stop(&self) {
        self.send(Command::Stop);
    }

    fn send(&self, command: Command) {
        match self.commands.try_send(command) {
            Ok(()) => {
                // A full counter means that the bell is ringing already.
                let _ = rustix::io::write(&*self.bell, &1_u64.to_ne_bytes());
            }
            Err(TrySendError::Full(_)) => tracing::warn!("telemetry does not keep up with what it is asked"),
            Err(TrySendError::Disconnected(_)) => {}
        }
    }
}
