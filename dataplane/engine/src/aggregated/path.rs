//! The path to an epoch's aggregator: the worker, its datagrams, and what both are made from.

use super::endpoint::{Reconnect, endpoint};
use crate::command::Aggregator;
use crate::wake::watch;
use harmonaize_abi::{ChannelId, Epoch, GrantId, SegmentIndex};
use harmonaize_aggregator::packet::HEADER_BYTES;
use harmonaize_aggregator::{Codes, Key, PayloadFormat, Worker, WorkerConfig};
use harmonaize_codec::shared_spread;
use harmonaize_core::{Aggregation, EpochPlan, Nanos};
use harmonaize_plan::{MAX_SOURCES, Participant};
use harmonaize_transport::TrafficClass;
use harmonaize_transport::datagram::{Address, DatagramConfig, Endpoint, MAX_DATAGRAM, RdmaPort};
use harmonaize_transport::tcp::Dscp;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::num::TryFromIntError;
use std::os::fd::OwnedFd;
use std::time::Duration;

/// Datagrams that wait to be sent.
pub(super) const BATCH: usize = 64;
/// For how long an aggregator may be silent before hosts take over.
const SILENCE_TIMEOUT: Duration = Duration::from_millis(150);
/// Between which times a part is sent again.
const RETRY_BOUNDS: [Duration; 2] = [Duration::from_millis(4), Duration::from_millis(40)];
/// Of a thousand questions, how many may go unanswered.
const MAX_LOSS_PERMILLE: u32 = 900;
/// Datagrams that leave as one message: more would overrun queues on the way.
const GSO_SEGMENTS: usize = 16;
/// The path to an epoch's aggregator.
#[derive(Debug)]
pub(crate) struct AggregatorPath {
    pub(super) epoch: Epoch,
    pub(super) address: Address,
    /// What it was opened to, for another process.
    pub(crate) aggregator: Aggregator,
    pub(crate) worker: Worker,
    pub(super) datagrams: Endpoint,
    pub(super) reconnect: Reconnect,
    pub(crate) coder: Coder,
    /// Segments for the worker whose inputs may still be on their way, in order, each with its channel.
    pub(crate) awaited: VecDeque<(SegmentIndex, ChannelId)>,
    /// The class that packets are marked with, once they are.
    marked: Option<TrafficClass>,
    pub(super) idle_polls: u32,
    pub(crate) session: Session,
}

/// The state of the session.
#[derive(Debug, Default)]
pub(crate) struct Session {
    /// Whether the session only probes whether the aggregator answers.
    pub(crate) probe_only: bool,
    /// Whether it was given up here, and no mark reports that yet.
    pub(crate) abandoned: bool,
}

/// Why there is no way to an aggregator.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PathError {
    /// A packet cannot hold the sum of a chunk.
    #[error("a chunk that is too long")]
    Chunk,
    /// More hosts than packets can name.
    #[error(transparent)]
    Hosts(#[from] TryFromIntError),
    /// The kernel refused.
    #[error("no endpoint for the aggregator: {0}")]
    Endpoint(#[from] std::io::Error),
}

/// How a host encodes.
#[derive(Debug)]
pub(crate) struct Coder {
    pub(crate) rules: Aggregation,
    /// Where the elements of several ranks are added up: as many as a chunk has.
    pub(crate) sum: RefCell<Box<[f32]>>,
}

impl AggregatorPath {
    /// A way to the aggregator, which is watched by `wake`; all that it needs is allocated here. `None` for a plan without aggregation,
    /// and where there are too many local ranks.
    pub(crate) fn open(
        aggregator: Option<&Aggregator>,
        plan: &EpochPlan,
        me: Participant,
        (wake, port): (&OwnedFd, Option<&RdmaPort>),
    ) -> Result<Option<Box<Self>>, PathError> {
        let (Some(aggregator), Some(rules)) = (aggregator, plan.aggregation) else { return Ok(None) };
        let hosts = plan.plan.group().participants();
        let form = rules.format;
        let ranks = plan.plan.group().local(me).len();
        if ranks > MAX_SOURCES {
            tracing::warn!(
                epoch = %plan.epoch,
                ranks,
                "tensors here cannot be aggregated; hosts sum by themselves"
            );
            return Ok(None);
        }
        let chunk = aggregator.chunk_elements as usize;
        // Sums are longer than parts, and ranges no longer.
        let payload = form.sum_bytes(chunk).ok_or(PathError::Chunk)?;
        let (codes, sum) = match form {
            PayloadFormat::Tensor { .. } => (Codes::default(), 0),
            PayloadFormat::Shared { bits, .. } => {
                let segment_elements = u64::from(plan.tuning.segment_bytes) / size_of::<f32>() as u64;
                let (most, spread) =
                    (aggregator.max_error.unwrap_or(f64::INFINITY), shared_spread(bits, hosts));
                (Codes { segment_elements, max_error: most, spread }, if ranks > 1 { chunk } else { 0 })
            }
        };
        let coder = Coder { rules, sum: RefCell::new(vec![0.0; sum].into_boxed_slice()) };
        let config = WorkerConfig {
            communicator: GrantId(aggregator.communicator),
            worker: aggregator.worker,
            key: Key::new(&aggregator.key),
            format: form,
            elements: aggregator.chunk_elements,
            window: aggregator.window,
            segments: usize::from(plan.channels),
            codes,
            hosts: u16::try_from(hosts)?,
            timeout: SILENCE_TIMEOUT,
            min_retry: RETRY_BOUNDS[0],
            max_retry: RETRY_BOUNDS[1],
            max_loss_permille: MAX_LOSS_PERMILLE,
        };
        let bytes = (HEADER_BYTES + payload).next_multiple_of(64).min(MAX_DATAGRAM);
        let config_of_datagrams =
            DatagramConfig { bytes, batch: BATCH, gso_segments: GSO_SEGMENTS, ..DatagramConfig::default() };
        let (datagrams, address) = endpoint(aggregator, port, config_of_datagrams)?;
        datagrams.wake_fd().and_then(|fd| watch(wake, fd))?;
        let worker = Worker::new(config);
        Ok(Some(Box::new(Self {
            epoch: plan.epoch,
            address,
            aggregator: aggregator.clone(),
            worker,
            datagrams,
            reconnect: Reconnect::default(),
            coder,
            awaited: VecDeque::with_capacity(usize::from(plan.channels)),
            marked: None,
            idle_polls: 0,
            session: Session::default(),
        })))
    }

    /// Begins a session with the aggregator, or one that only probes whether it answers. What waited for the one before is forgotten.
    pub(crate) fn begin(&mut self, now: Nanos, session: u64, probe_only: bool) {
        self.awaited.clear();
        self.session.probe_only = probe_only;
        self.worker.begin(now.into(), session);
    }

    /// Whether segments are given to the worker, or about to be, that are not done.
    pub(crate) fn is_busy(&self) -> bool {
        self.worker.is_busy() || !self.awaited.is_empty()
    }

    /// Ends the session: from now on nothing is read or written for it.
    pub(crate) fn leave(&mut self) {
        self.awaited.clear();
        self.worker.stop();
    }

    /// From now on packets carry the code point of a class. Cheap where they do already.
    pub(crate) fn mark(&mut self, class: TrafficClass, dscp: Dscp) {
        if self.marked.replace(class) == Some(class) {
            return;
        }
        if let Err(error) = self.datagrams.set_dscp(dscp.of(class)) {
            tracing::warn!(epoch = %self.epoch, %error, "packets to the aggregator cannot be marked");
        }
    }

    /// To be called before the loop sleeps; false if something is there already.
    pub(crate) fn prepare_sleep(&mut self) -> bool {
        self.datagrams.prepare_sleep()
    }

    /// When it wants to be called.
    pub(crate) fn poll_timeout(&self, now: Nanos) -> Option<Nanos> {
        if self.datagrams.waiting() > 0 {
            return Some(now);
        }
        self.worker.poll_timeout().map(Nanos::from)
    }
}
