//! Calls to an agent's own service for operators, and what their errors mean to people.

use crate::Failure;
use harmonaize_api::v1::telemetry_client::TelemetryClient;
use harmonaize_api::v1::{
    Finding, Flow, FlowsRequest, PhasesRequest, Snapshot, TracePart, TraceRequest, WatchRequest,
};
use harmonaize_planner::Nanos;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status, Streaming};

/// How long a connection, or a first answer, may take.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Most flows that are taken from an agent.
const MAX_FLOWS: usize = 4 << 20;

/// Where an agent's service listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Socket(pub PathBuf);

impl FromStr for Socket {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let path = text.strip_prefix("unix:").unwrap_or(text);
        let path = path.strip_prefix("//").unwrap_or(path);
        if path.is_empty() || path.contains('\0') || !path.contains('/') {
            return Err("no socket; say unix:/run/harmonaize/telemetry.sock".to_owned());
        }
        let path = Path::new(path);
        let path = std::path::absolute(path).map_err(|error| error.to_string())?;
        Ok(Self(path))
    }
}

/// A connection.
pub(crate) struct Agent {
    client: TelemetryClient<Channel>,
    socket: String,
}

impl Agent {
    pub(crate) async fn connect(socket: &Socket) -> Result<Self, Failure> {
        let path = socket.0.display().to_string();
        let gone = |why: String| Failure::NoAgent { socket: path.clone(), why };
        // Looked at first, for the channel says less of what is wrong.
        let looked = std::fs::metadata(&socket.0).map_err(|error| gone(error.to_string()))?;
        if !std::os::unix::fs::FileTypeExt::is_socket(&looked.file_type()) {
            return Err(gone("it is no socket".to_owned()));
        }
        let endpoint = Endpoint::from_shared(format!("unix://{path}"));
        let endpoint = endpoint.map_err(|error| gone(error.to_string()))?.connect_timeout(TIMEOUT);
        let channel =
            endpoint.connect().await.map_err(|error| gone(harmonaize_identity::root_cause(&error)))?;
        let client = TelemetryClient::new(channel).max_decoding_message_size(64 << 20);
        Ok(Self { client, socket: path })
    }

    pub(crate) async fn watch(
        &mut self,
        interval: Nanos,
        flows: u32,
    ) -> Result<Streaming<Snapshot>, Failure> {
        let request = WatchRequest { interval_ns: interval.0, flows };
        let stream = self.client.watch(request).await;
        stream.map(tonic::Response::into_inner).map_err(|status| self.failure(&status))
    }

    /// All flows, and when they were read.
    pub(crate) async fn flows(&mut self, interface: String) -> Result<(u64, Vec<Flow>), Failure> {
        let stream = self.client.flows(FlowsRequest { interface }).await;
        let mut stream = stream.map_err(|status| self.failure(&status))?.into_inner();
        let (mut time_ns, mut flows) = (0, Vec::new());
        while let Some(part) = stream.message().await.map_err(|status| self.failure(&status))? {
            time_ns = part.time_ns;
            if flows.len() + part.flows.len() > MAX_FLOWS {
                return Err(Failure::Refused(format!("the agent tells of more than {MAX_FLOWS} flows")));
            }
            flows.extend(part.flows);
        }
        Ok((time_ns, flows))
    }

    pub(crate) async fn phases(&mut self, last: u32, follow: bool) -> Result<Streaming<Finding>, Failure> {
        let stream = self.client.phases(PhasesRequest { last, follow }).await;
        stream.map(tonic::Response::into_inner).map_err(|status| self.failure(&status))
    }

    pub(crate) async fn trace(&mut self, time: Nanos) -> Result<Streaming<TracePart>, Failure> {
        let stream = self.client.trace(TraceRequest { duration_ns: time.0 }).await;
        stream.map(tonic::Response::into_inner).map_err(|status| self.failure(&status))
    }

    pub(crate) fn failure(&self, status: &Status) -> Failure {
        match status.code() {
            Code::Unimplemented => Failure::Refused("the agent is of another version".to_owned()),
            Code::Unavailable | Code::Cancelled | Code::Unknown => {
                let why = crate::text::clean(status.message());
                Failure::NoAgent { socket: self.socket.clone(), why }
            }
            _ => Failure::Refused(crate::text::clean(status.message())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_are_named_by_path() {
        for text in ["unix:/run/a.sock", "unix:///run/a.sock", "/run/a.sock"] {
            assert_eq!(text.parse(), Ok(Socket("/run/a.sock".into())), "{text}");
        }
        assert!("./a.sock".parse::<Socket>().unwrap().0.is_absolute());
        for text in ["", "unix:", "h0:7000", "a\0/b"] {
            assert!(text.parse::<Socket>().is_err(), "{text:?}");
        }
    }
}
