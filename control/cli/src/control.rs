//! Calls to control, and what their errors mean to people.

use crate::output::PageArguments;
use crate::{Failure, init};
use harmonaize_analysis::CommunicatorId;
use harmonaize_api::v1::provider_client::ProviderClient;
use harmonaize_api::v1::{
    DissolveRequest, FabricSnapshot, LeaderReply, LeaderRequest, ReorderRequest, StatusReply, StatusRequest,
    WatchTelemetryRequest,
};
use harmonaize_api::{communicator_from_text, communicator_text};
use harmonaize_identity::{CONTROL, Protection, Remote};
use harmonaize_planner::Nanos;
use serde_json::json;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;
use tokio::task::{JoinError, JoinSet};
use tokio::time::Instant;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

/// How long a connection may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a control that is connected may be silent, and how often is looked.
const KEEP_ALIVE: Duration = Duration::from_millis(2500);

/// How long a connection may take where there are others.
const ONE_OF_SEVERAL: Duration = Duration::from_secs(1);

/// How long a leader may take to be elected.
const ELECTION_TIMEOUT: Duration = Duration::from_secs(10);

/// How often is asked who leads.
const LEADER_INTERVAL: Duration = Duration::from_millis(100);

/// How often a change is looked at.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A communicator as an operator names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// By id.
    Id(CommunicatorId),
    /// By tenant and name.
    Name(String, String),
}

impl FromStr for Target {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        if let Some((tenant, name)) = text.split_once('/') {
            return Ok(Self::Name(tenant.to_owned(), name.to_owned()));
        }
        let id = communicator_from_text(text);
        id.map(|id| Self::Id(CommunicatorId(id)))
            .ok_or_else(|| "neither an id in hexadecimal nor tenant/name".to_owned())
    }
}

/// What came of a wish for an order.
#[derive(Debug)]
pub(crate) struct Reordered {
    id: String,
    epoch: u64,
    in_use: bool,
    /// Hosts along the ring as wished; none where control chooses.
    order: Vec<String>,
}

impl Reordered {
    pub(crate) fn text(&self) -> String {
        let Self { id, epoch, in_use, order } = self;
        let state = if *in_use { "in use" } else { "under way" };
        match order.as_slice() {
            [] => format!("{id}: control chooses its order, epoch {epoch} is {state}\n"),
            order => format!("{id}: epoch {epoch} is {state}, order {}\n", order.join(",")),
        }
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        let Self { id, epoch, in_use, order } = self;
        let order = (!order.is_empty()).then_some(order);
        json!({
            "communicator": id,
            "epoch": epoch,
            "in_use": in_use,
            "automatic": order.is_none(),
            "order": order,
        })
    }
}

/// Where control is, and who asks it.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ControlArguments {
    /// Where control listens; several with commas between, of which the one that leads is found.
    #[arg(
        long,
        global = true,
        env = "HARMONAIZE_CONTROL",
        value_name = "HOST:PORT",
        value_delimiter = ',',
        default_value = "127.0.0.1:7000"
    )]
    control: Vec<String>,
    /// Folder with your certificate: ca.crt, tls.crt and tls.key, as `harmonaize init` makes them.
    #[arg(
        long,
        global = true,
        env = "HARMONAIZE_TLS",
        value_name = "FOLDER",
        default_value = init::FOLDER
    )]
    tls: PathBuf,
    /// Control runs on this machine, without certificates.
    #[arg(long, global = true, conflicts_with = "tls")]
    insecure_loopback: bool,
}

impl ControlArguments {
    /// Control at an address, asked with a certificate.
    pub(crate) fn at(address: String, tls: PathBuf) -> Self {
        Self { control: vec![address], tls, insecure_loopback: false }
    }

    fn protection(&self, address: &str) -> Result<Protection, Failure> {
        let tls = (!self.insecure_loopback).then(|| init::operator_in(&self.tls));
        Protection::choose(tls, self.insecure_loopback, address)
            .map_err(|error| Failure::Usage(error.to_string()))
    }
}

/// A connection.
pub(crate) struct Control {
    channel: Channel,
    client: ProviderClient<Channel>,
    address: String,
}

impl Control {
    /// Connects to control; where there are several, to the one that leads. One that follows is better than none: it answers
    /// what is stored.
    pub(crate) async fn connect(at: &ControlArguments) -> Result<Self, Failure> {
        if let [address] = at.control.as_slice() {
            return Self::connect_to(at, address, CONNECT_TIMEOUT).await;
        }
        // All at once, and each by itself: one that is silent delays nobody.
        let deadline = Instant::now() + ELECTION_TIMEOUT;
        let mut asked = JoinSet::new();
        for address in &at.control {
            asked.spawn(Self::until_it_leads(at.clone(), address.clone(), deadline));
        }
        let (mut follower, mut why) = (None, Vec::new());
        while let Some(ended) = asked.join_next().await {
            match ended {
                Ok(Ok((control, LeaderReply { here: true, .. }))) => return Ok(control),
                Ok(Ok((control, _))) => follower = Some(control),
                Ok(Err(Failure::Unreachable { address, why: text })) => {
                    why.push(format!("{address}: {text}"))
                }
                Ok(Err(failure)) => return Err(failure),
                Err(error) => why.push(error.to_string()),
            }
        }
        let none = || Failure::Unreachable { address: at.control.join(","), why: why.join("; ") };
        follower.ok_or_else(none)
    }

    /// Connects to one of several controls, again and again until it leads or the time is over. Returns what it is at last.
    async fn until_it_leads(
        at: ControlArguments,
        address: String,
        deadline: Instant,
    ) -> Result<(Self, LeaderReply), Failure> {
        loop {
            let asked = Self::ask(&at, &address).await;
            let again = match &asked {
                Ok((_, reply)) => !reply.here,
                Err(failure) => matches!(failure, Failure::Unreachable { .. }),
            };
            if !again || Instant::now() + LEADER_INTERVAL >= deadline {
                return asked;
            }
            tokio::time::sleep(LEADER_INTERVAL).await;
        }
    }

    /// Connects to one of several controls and asks whether it leads.
    async fn ask(at: &ControlArguments, address: &str) -> Result<(Self, LeaderReply), Failure> {
        let mut control = Self::connect_to(at, address, ONE_OF_SEVERAL).await?;
        let reply = control.client.leader(LeaderRequest {}).await;
        let reply = reply.map_err(|status| control.failure(&status))?.into_inner();
        Ok((control, reply))
    }

    /// What each of several controls is now: a line each.
    pub(crate) async fn roles(at: &ControlArguments, print: &PageArguments) -> Result<String, Failure> {
        let mut roles = Vec::new();
        let asked: Vec<_> = at
            .control
            .iter()
            .map(|address| {
                let (at, address) = (at.clone(), address.clone());
                tokio::spawn(async move { Self::ask(&at, &address).await })
            })
            .collect();
        for (address, asked) in at.control.iter().zip(asked) {
            let silent =
                |error: JoinError| Failure::Unreachable { address: address.clone(), why: error.to_string() };
            let role = match asked.await.map_err(silent).flatten() {
                Ok((_, reply)) if reply.here => "leads".to_owned(),
                Ok((_, reply)) if reply.listen.is_empty() => "follows nobody".to_owned(),
                Ok((_, reply)) => format!("follows {}", reply.listen),
                Err(Failure::Unreachable { why, .. }) => format!("does not answer: {why}"),
                Err(failure) => return Err(failure),
            };
            roles.push((address, role));
        }
        let complete = roles.iter().map(|(address, role)| json!({"control": address, "role": role}));
        let complete: Vec<_> = complete.collect();
        Ok(print.page(&complete, |_| {
            roles.iter().map(|(address, role)| format!("{address}  {role}\n")).collect()
        }))
    }

    async fn connect_to(at: &ControlArguments, address: &str, within: Duration) -> Result<Self, Failure> {
        let address = address.to_owned();
        let unreachable = |why: String| Failure::Unreachable { address: address.clone(), why };
        let server = Remote::at(&at.protection(&address)?, CONTROL, &address)
            .map_err(|error| unreachable(error.to_string()))?;
        // A control that stands still takes connections, and says nothing through them.
        let server = server
            .with(|endpoint| endpoint.http2_keep_alive_interval(KEEP_ALIVE).keep_alive_timeout(KEEP_ALIVE));
        let connected = tokio::time::timeout(within, server.connect()).await;
        let silent = |_| unreachable(format!("no answer within {within:?}"));
        let channel = connected
            .map_err(silent)?
            .map_err(|error| unreachable(harmonaize_identity::root_cause(&error)))?;
        let client = ProviderClient::new(channel.clone()).max_decoding_message_size(64 << 20);
        Ok(Self { channel, client, address })
    }

    /// The connection, for control's other services.
    pub(crate) fn channel(&self) -> Channel {
        self.channel.clone()
    }

    pub(crate) async fn status(&mut self, patience: Nanos) -> Result<StatusReply, Failure> {
        let request = StatusRequest { patience_ns: patience.0.max(1) };
        let reply = self.client.status(request).await.map_err(|status| self.failure(&status))?;
        Ok(reply.into_inner())
    }

    /// Asks for an order, or, without hosts, that control chooses it again; waits so long until that is in use.
    pub(crate) async fn reorder(
        &mut self,
        target: &Target,
        hosts: Vec<String>,
        wait: Nanos,
    ) -> Result<Reordered, Failure> {
        let communicator = self.resolve(target).await?;
        let order = hosts.clone();
        let request = ReorderRequest { communicator: communicator.0, hosts };
        let reply = self.client.reorder(request).await.map_err(|status| self.failure(&status))?;
        let (epoch, id) = (reply.into_inner().epoch, communicator_text(communicator.0));
        let until = Instant::now() + wait.into();
        while Instant::now() < until {
            let status = self.status(Nanos(1)).await?;
            let Some(known) =
                status.communicators.into_iter().find(|known| known.communicator == communicator.0)
            else {
                return Err(Failure::NotFound(format!("{id} ended while it changed")));
            };
            if known.epoch >= epoch {
                return Ok(Reordered { id, epoch, in_use: true, order });
            }
            if known.next_epoch != epoch {
                return Err(Failure::Refused(format!("{id}: {}", known.last_change)));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        match wait {
            Nanos(0) => Ok(Reordered { id, epoch, in_use: false, order }),
            _ => Err(Failure::UnderWay(format!(
                "{id}: epoch {epoch} is under way, but not in use after {wait}"
            ))),
        }
    }

    pub(crate) async fn dissolve(
        &mut self,
        target: &Target,
        reason: String,
        print: &PageArguments,
    ) -> Result<String, Failure> {
        let communicator = self.resolve(target).await?;
        let request = DissolveRequest { communicator: communicator.0, reason };
        self.client.dissolve(request).await.map_err(|status| self.failure(&status))?;
        let id = communicator_text(communicator.0);
        let ended = json!({"communicator": id, "outcome": "ended"});
        Ok(print.page(&ended, |_| format!("{id}: ended\n")))
    }

    pub(crate) async fn resolve(&mut self, target: &Target) -> Result<CommunicatorId, Failure> {
        let (tenant, name) = match target {
            Target::Id(id) => return Ok(*id),
            Target::Name(tenant, name) => (tenant, name),
        };
        let status = self.status(Nanos(1)).await?;
        let known =
            status.communicators.iter().filter(|known| known.tenant == *tenant && known.name == *name);
        let ids: Vec<CommunicatorId> = known.map(|known| CommunicatorId(known.communicator)).collect();
        match ids.as_slice() {
            [id] => Ok(*id),
            [] => Err(Failure::NotFound(format!(
                "no communicator is named {tenant}/{name}; see `harmonaize status`"
            ))),
            several => {
                let ids: Vec<String> = several.iter().map(|id| communicator_text(id.0)).collect();
                Err(Failure::Refused(format!("{tenant}/{name} names {}; say which by id", ids.join(", "))))
            }
        }
    }

    /// The fabric's telemetry, once an interval.
    pub(crate) async fn watch(&mut self, interval: Nanos) -> Result<Streaming<FabricSnapshot>, Failure> {
        let request = WatchTelemetryRequest { interval_ns: interval.0 };
        let stream = self.client.watch_telemetry(request).await;
        stream.map(tonic::Response::into_inner).map_err(|status| self.failure(&status))
    }

    pub(crate) fn failure(&self, status: &Status) -> Failure {
        let text = status.message().to_owned();
        match status.code() {
            Code::NotFound => Failure::NotFound(text),
            Code::Unavailable => Failure::Unreachable { address: self.address.clone(), why: text },
            Code::Unimplemented => Failure::Refused("control is of another version".to_owned()),
            _ => Failure::Refused(text),
        }
    }
}
