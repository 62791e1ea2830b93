//! Answers to what operators ask of all hosts through control. Each is a call of its own beside the session, so that rows wait for
//! their reader, and the session's messages for no row.

use crate::telemetry::clock::{realtime_ns, realtime_offset_ns};
use crate::telemetry::service::MAX_TRACE;
use crate::telemetry::{Handle, parts, to_proto, view};
use harmonaize_api::v1::provider_client::ProviderClient;
use harmonaize_api::v1::{self, AnswerPart, Finding, Flow, Question, RowKind};
use prost::Message;
use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;

/// Most answers at once: control asks so many, and its connection takes eight streams.
const PARALLEL: usize = 4;

/// Most rows of a part, and bytes of them behind which a part ends.
const PART: (usize, usize) = (100, 48 << 10);

/// Most rows of an answer that ends, and of what follows in one go.
const MAX_ROWS: usize = 10_000;

/// How often flows are read for a reader who follows.
const FOLLOW_INTERVAL: Duration = Duration::from_secs(1);

/// How long control may take to take an answer's end.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// What answers control's questions.
#[derive(Clone, Debug)]
pub struct Answers {
    telemetry: Option<Handle>,
    host: String,
    places: Arc<Semaphore>,
}

/// Nobody reads any more.
struct Gone;

impl Answers {
    /// Answers for a host; without telemetry by saying so.
    pub fn new(telemetry: Option<Handle>, host: String) -> Self {
        Self { telemetry, host, places: Arc::new(Semaphore::new(PARALLEL)) }
    }

    /// Answers a question, on a task of its own.
    pub(crate) fn begin(&self, question: Question, mut control: ProviderClient<Channel>) {
        let place = Arc::clone(&self.places).try_acquire_owned();
        let telemetry = self.telemetry.clone();
        let first = AnswerPart { id: question.id, host: self.host.clone(), ..AnswerPart::default() };
        tokio::spawn(async move {
            let (parts, queue) = mpsc::channel(1);
            let call = control.answer(ReceiverStream::new(queue));
            tokio::pin!(call);
            let feed = async {
                let refused = match (&telemetry, &place) {
                    (_, Err(_)) => format!("the agent answers {PARALLEL} questions already"),
                    (None, _) => "the agent has no telemetry".to_owned(),
                    (Some(telemetry), Ok(_)) => {
                        let answer = Answer { telemetry, question: &question, first: &first, parts };
                        let _ = answer.feed().await;
                        return;
                    }
                };
                let _ = parts.send(AnswerPart { refused, ..first.clone() }).await;
            };
            tokio::select! {
                // Control wants no more, or is gone.
                _ = &mut call => return,
                () = feed => {}
            }
            let _ = timeout(END_TIMEOUT, call).await;
        });
    }
}

/// An answer under way.
struct Answer<'a> {
    telemetry: &'a Handle,
    question: &'a Question,
    first: &'a AnswerPart,
    parts: mpsc::Sender<AnswerPart>,
}

impl Answer<'_> {
    async fn feed(self) -> Result<(), Gone> {
        self.send(self.first.clone()).await?;
        match self.question.kind() {
            RowKind::Flow => self.flows().await,
            RowKind::Finding => self.findings().await,
            RowKind::Trace => self.trace().await,
            RowKind::Unspecified => {
                let refused = "rows of a kind that this agent does not have".to_owned();
                self.send(AnswerPart { refused, ..self.first.clone() }).await
            }
        }
    }

    async fn send(&self, part: AnswerPart) -> Result<(), Gone> {
        self.parts.send(part).await.map_err(|_| Gone)
    }

    async fn refuse_ended(&self) -> Result<(), Gone> {
        let refused = "the agent's telemetry has ended".to_owned();
        self.send(AnswerPart { refused, ..self.first.clone() }).await
    }

    /// The last rows of those that are wanted, and how many are beyond the limit.
    fn last<T>(&self, rows: &mut Vec<T>) -> u64 {
        if self.question.last > 0 {
            rows.drain(..rows.len().saturating_sub(self.question.last as usize));
        }
        let omitted = rows.len().saturating_sub(MAX_ROWS);
        rows.drain(..omitted);
        omitted as u64
    }

    async fn flows(&self) -> Result<(), Gone> {
        let filter = self.question.filter.clone().unwrap_or_default();
        let mut changes = Changes::default();
        let mut ticks = interval(FOLLOW_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut omitted = None;
        loop {
            ticks.tick().await;
            let Some(now) = self.telemetry.read(true).await else { return self.refuse_ended().await };
            let time_ns = realtime_ns(now.time, now.offset_ns);
            let mut flows = view::flows(&now, &filter.interface);
            flows.retain(|flow| filter.matches_flow(flow));
            flows.sort_by_key(Flow::last_packet_ns);
            if omitted.is_none() {
                let mut rows = flows.clone();
                let beyond = self.last(&mut rows);
                // What is left out now is no news later.
                changes.take(flows);
                flows = rows;
                omitted = Some(beyond);
                if beyond > 0 {
                    self.send(AnswerPart { omitted: beyond, ..self.first.clone() }).await?;
                }
            } else {
                flows = changes.take(flows);
                let beyond = flows.len().saturating_sub(MAX_ROWS);
                if beyond > 0 {
                    flows.drain(..beyond);
                    self.send(AnswerPart { omitted: beyond as u64, ..self.first.clone() }).await?;
                }
            }
            for flows in batches(flows) {
                self.send(AnswerPart { time_ns, flows, ..self.first.clone() }).await?;
            }
            if !self.question.follow {
                return Ok(());
            }
        }
    }

    async fn findings(&self) -> Result<(), Gone> {
        let filter = self.question.filter.clone().unwrap_or_default();
        let names = || self.telemetry.names();
        let (retained, mut coming) = self.telemetry.findings().listen();
        let mut found: Vec<Finding> =
            retained.iter().map(|finding| to_proto::finding(finding, &names())).collect();
        found.retain(|finding| filter.matches_finding(finding));
        let omitted = self.last(&mut found);
        if omitted > 0 {
            self.send(AnswerPart { omitted, ..self.first.clone() }).await?;
        }
        for findings in batches(found) {
            self.send(AnswerPart { findings, ..self.first.clone() }).await?;
        }
        if !self.question.follow {
            return Ok(());
        }
        loop {
            let finding = match coming.recv().await {
                Ok(finding) => to_proto::finding(&finding, &names()),
                Err(RecvError::Lagged(count)) => {
                    self.send(AnswerPart { omitted: count, ..self.first.clone() }).await?;
                    continue;
                }
                Err(RecvError::Closed) => return self.refuse_ended().await,
            };
            if filter.matches_finding(&finding) {
                self.send(AnswerPart { findings: vec![finding], ..self.first.clone() }).await?;
            }
        }
    }

    /// Records for as long as the question says.
    async fn trace(&self) -> Result<(), Gone> {
        let length = Duration::from_nanos(self.question.duration_ns).min(MAX_TRACE);
        let (to, mut from) = parts();
        self.telemetry.trace(to);
        let copy = async {
            while let Some(bytes) = from.recv().await {
                let trace = Some(v1::TracePart { bytes, realtime_offset_ns: realtime_offset_ns() });
                self.send(AnswerPart { trace, ..self.first.clone() }).await?;
            }
            self.refuse_ended().await
        };
        timeout(length, copy).await.unwrap_or(Ok(()))
    }
}

/// Rows in parts of bounded size.
fn batches<T: Message>(rows: Vec<T>) -> Vec<Vec<T>> {
    let (mut all, mut part, mut bytes) = (Vec::new(), Vec::new(), 0);
    for row in rows {
        bytes += row.encoded_len();
        part.push(row);
        if part.len() == PART.0 || bytes > PART.1 {
            all.push(std::mem::take(&mut part));
            bytes = 0;
        }
    }
    if !part.is_empty() {
        all.push(part);
    }
    all
}

/// Which flows a reader has had, by a number of their ends and one of what they are counted to. No larger than the last reading.
#[derive(Default)]
struct Changes {
    hash: RandomState,
    sent: HashMap<u64, u64>,
}

impl Changes {
    /// Of a reading's flows those that are new, or counted to another owner or job than before.
    fn take(&mut self, flows: Vec<Flow>) -> Vec<Flow> {
        let mut sent = HashMap::with_capacity(flows.len());
        let mut fresh = Vec::new();
        for flow in flows {
            let ends = (&flow.local, flow.local_port, &flow.remote, flow.remote_port);
            let key = (&flow.interface, flow.protocol, ends, flow.queue_pair, flow.egress.is_some());
            let owner = flow.owner.as_ref().map(|owner: &v1::FlowOwner| (owner.communicator, owner.epoch));
            let (key, counted) = (self.hash.hash_one(key), self.hash.hash_one((owner, &flow.job)));
            sent.insert(key, counted);
            if self.sent.get(&key) != Some(&counted) {
                fresh.push(flow);
            }
        }
        self.sent = sent;
        fresh
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(port: u32, job: &str) -> Flow {
        Flow { remote_port: port, job: job.to_owned(), ..Flow::default() }
    }

    #[test]
    fn a_flow_is_news_once_and_when_its_job_changes() {
        let mut changes = Changes::default();
        assert_eq!(changes.take(vec![flow(1, ""), flow(2, "")]).len(), 2);
        assert_eq!(changes.take(vec![flow(1, ""), flow(2, "")]), []);
        assert_eq!(changes.take(vec![flow(1, "3"), flow(2, "")]), [flow(1, "3")]);
        // Gone and come again, it is another flow; what is gone takes no room.
        assert_eq!(changes.take(vec![flow(1, "3")]), []);
        assert_eq!(changes.sent.len(), 1);
        assert_eq!(changes.take(vec![flow(1, "3"), flow(2, "")]), [flow(2, "")]);
    }

    #[test]
    fn parts_are_bounded_in_rows_and_bytes() {
        let rows: Vec<Flow> = (0..250).map(|port| flow(port, "")).collect();
        assert_eq!(batches(rows.clone()).iter().map(Vec::len).collect::<Vec<_>>(), [100, 100, 50]);
        let large: Vec<Flow> = (0..3).map(|port| flow(port, &"x".repeat(30 << 10))).collect();
        assert_eq!(batches(large).iter().map(Vec::len).collect::<Vec<_>>(), [2, 1]);
        assert_eq!(batches::<Flow>(Vec::new()), Vec::<Vec<Flow>>::new());
    }
}
