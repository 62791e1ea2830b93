//! What operators' tools ask the agent itself: the service `Telemetry` of the provider's interface.

use crate::telemetry::clock::{monotonic, realtime_ns, realtime_offset_ns};
use crate::telemetry::reading::Reading;
use crate::telemetry::socket::Socket;
use crate::telemetry::{Handle, parts, to_proto, view};
use harmonaize_api::v1;
use harmonaize_api::v1::telemetry_server::{Telemetry, TelemetryServer};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

/// Flows in a part of an answer.
const FLOWS: usize = 500;
/// Flows in a snapshot: usual and most.
const WATCHED: (u32, u32) = (32, 1000);
/// Time between snapshots: least, usual, most.
const INTERVALS: [Duration; 3] =
    [Duration::from_millis(100), Duration::from_secs(1), Duration::from_secs(60)];
/// Longest trace.
pub(super) const MAX_TRACE: Duration = Duration::from_secs(3600);
/// Answers that wait for a reader.
const WAITING: usize = 4;

/// Serves a socket until `closed` says so.
pub(crate) async fn serve(handle: Handle, host: String, socket: Socket, mut closed: watch::Receiver<bool>) {
    let (connections, _file) = socket.connections();
    let service = TelemetryServer::new(Service { handle, host, closed: closed.clone() });
    let closing = async move { over(&mut closed).await };
    let served =
        Server::builder().add_service(service).serve_with_incoming_shutdown(connections, closing).await;
    if let Err(error) = served {
        crate::telemetry::failed("serving operators", &error);
    }
}

struct Service {
    handle: Handle,
    host: String,
    closed: watch::Receiver<bool>,
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl Service {
    async fn read(handle: &Handle, flows: bool) -> Result<Arc<Reading>, Status> {
        handle.read(flows).await.ok_or_else(|| Status::unavailable("the telemetry thread has ended"))
    }

    /// A stream that `work` feeds until it is done, nobody reads any more, or the agent ends.
    fn stream<T, F>(&self, work: impl FnOnce(mpsc::Sender<Result<T, Status>>) -> F) -> Response<Answers<T>>
    where
        T: Send + 'static,
        F: Future<Output = Result<(), Status>> + Send + 'static,
    {
        let (answers, stream) = mpsc::channel(WAITING);
        let (work, mut closed) = (work(answers.clone()), self.closed.clone());
        tokio::spawn(async move {
            tokio::select! {
                done = work => if let Err(status) = done {
                    let _ = answers.send(Err(status)).await;
                },
                () = answers.closed() => {}
                () = over(&mut closed) => {}
            }
        });
        Response::new(Box::pin(ReceiverStream::new(stream)))
    }
}

/// The agent ends.
async fn over(closed: &mut watch::Receiver<bool>) {
    // One that is gone has ended, too.
    let _ = closed.wait_for(|closed| *closed).await;
}

/// Nobody reads any more.
fn gone<T>(_: mpsc::error::SendError<T>) -> Status {
    Status::cancelled("nobody reads")
}

#[tonic::async_trait]
impl Telemetry for Service {
    type WatchStream = Answers<v1::Snapshot>;
    type FlowsStream = Answers<v1::FlowsReply>;
    type PhasesStream = Answers<v1::Finding>;
    type TraceStream = Answers<v1::TracePart>;

    async fn watch(&self, request: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let asked = request.into_inner();
        let [least, usual, most] = INTERVALS;
        let length = match asked.interval_ns {
            0 => usual,
            nanos => Duration::from_nanos(nanos).clamp(least, most),
        };
        let flows = if asked.flows == 0 { WATCHED.0 } else { asked.flows.min(WATCHED.1) } as usize;
        let (handle, host) = (self.handle.clone(), self.host.clone());
        Ok(self.stream(|answers| async move {
            let mut tick = interval(length);
            tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
            let mut before: Option<Arc<Reading>> = None;
            loop {
                tick.tick().await;
                let now = Self::read(&handle, true).await?;
                let since = before.as_ref().unwrap_or(&now);
                let snapshot = view::snapshot(&host, since, &now, flows);
                answers.send(Ok(snapshot)).await.map_err(gone)?;
                before = Some(now);
            }
        }))
    }

    async fn flows(&self, request: Request<v1::FlowsRequest>) -> Result<Response<Self::FlowsStream>, Status> {
        let asked = request.into_inner();
        let handle = self.handle.clone();
        Ok(self.stream(|answers| async move {
            let now = Self::read(&handle, true).await?;
            let time_ns = realtime_ns(now.time, now.offset_ns);
            let mut rest = view::flows(&now, &asked.interface);
            loop {
                let next = rest.split_off(rest.len().min(FLOWS));
                let flows = std::mem::replace(&mut rest, next);
                answers.send(Ok(v1::FlowsReply { time_ns, flows })).await.map_err(gone)?;
                if rest.is_empty() {
                    return Ok(());
                }
            }
        }))
    }

    async fn phases(
        &self,
        request: Request<v1::PhasesRequest>,
    ) -> Result<Response<Self::PhasesStream>, Status> {
        let asked = request.into_inner();
        let handle = self.handle.clone();
        Ok(self.stream(|answers| async move {
            let (kept, mut coming) = handle.findings().listen();
            let last = if asked.last == 0 { kept.len() } else { asked.last as usize };
            for finding in kept.iter().skip(kept.len().saturating_sub(last)) {
                answers.send(Ok(to_proto::finding(finding, &handle.names()))).await.map_err(gone)?;
            }
            if !asked.follow {
                return Ok(());
            }
            loop {
                let told = match coming.recv().await {
                    Ok(finding) => to_proto::finding(&finding, &handle.names()),
                    Err(RecvError::Lagged(count)) => v1::Finding {
                        time_ns: realtime_ns(monotonic(), realtime_offset_ns()),
                        finding: Some(v1::finding::Finding::Lost(v1::LostFindings { count })),
                    },
                    Err(RecvError::Closed) => {
                        return Err(Status::unavailable("the telemetry thread has ended"));
                    }
                };
                answers.send(Ok(told)).await.map_err(gone)?;
            }
        }))
    }

    async fn trace(&self, request: Request<v1::TraceRequest>) -> Result<Response<Self::TraceStream>, Status> {
        let length = Duration::from_nanos(request.into_inner().duration_ns).min(MAX_TRACE);
        let handle = self.handle.clone();
        Ok(self.stream(|answers| async move {
            let (to, mut from) = parts();
            handle.trace(to);
            let copy = async {
                while let Some(bytes) = from.recv().await {
                    let part = v1::TracePart { bytes, realtime_offset_ns: realtime_offset_ns() };
                    answers.send(Ok(part)).await.map_err(gone)?;
                }
                Err(Status::unavailable("the telemetry thread has ended"))
            };
            // Over time or by a reader that is gone.
            timeout(length, copy).await.unwrap_or(Ok(()))
        }))
    }
}
