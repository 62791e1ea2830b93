//! Made-up agents of a whole fabric, which prepare what they are asked to, and say which way packets go.

use super::{Agent, hello_of};
use anyhow::{Context, Result};
use harmonaize_api::v1::{self, from_agent, to_agent};
use harmonaize_topology::text;
use std::fmt::Write;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tonic::transport::Endpoint;

/// Sessions through one connection: fewer than control lets be.
const SESSIONS: usize = 32;

/// Racks under spines, with links of 100 Gbit/s: hosts `h0`, `h1`, ... are in rack `r0` first, under switch `leaf0`.
#[derive(Clone, Copy, Debug)]
pub struct LeafSpine {
    /// Racks.
    pub racks: usize,
    /// Hosts of each.
    pub hosts: usize,
    /// Spines.
    pub spines: usize,
}

/// Agents of all hosts, with sessions until this is dropped.
#[derive(Debug)]
pub struct Played {
    /// What each says to control.
    pub agents: Vec<mpsc::Sender<v1::FromAgent>>,
    ready: mpsc::UnboundedReceiver<v1::Ready>,
    _tasks: JoinSet<()>,
}

impl LeafSpine {
    /// How many hosts there are.
    pub fn len(&self) -> usize {
        self.racks * self.hosts
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The topology as control's file has it.
    pub fn topology(&self) -> String {
        let mut all = String::new();
        for (kind, count) in [("leaf", self.racks), ("spine", self.spines)] {
            for switch in 0..count {
                let address = address(kind, switch);
                let _ = writeln!(
                    all,
                    "[[switch]]\nname = \"{kind}{switch}\"\nkind = \"{kind}\"\naddresses = [\"{address}\"]"
                );
            }
        }
        for host in 0..self.len() {
            let _ = writeln!(all, "[[host]]\nname = \"h{host}\"\nrack = \"r{}\"", self.rack(host));
        }
        let link = |from: &str, to: &str| text::link(from, to, "100Gbit/s", "5us");
        for host in 0..self.len() {
            all += &link(&format!("h{host}"), &format!("leaf{}", self.rack(host)));
        }
        for leaf in 0..self.racks {
            for spine in 0..self.spines {
                all += &link(&format!("leaf{leaf}"), &format!("spine{spine}"));
            }
        }
        all
    }

    /// The rack of a host.
    pub fn rack(&self, host: usize) -> usize {
        host / self.hosts.max(1)
    }

    /// Opens a session for each host with a control that asks for no certificates.
    ///
    /// # Errors
    /// Where control does not welcome one.
    pub async fn connect(self, control: SocketAddr) -> Result<Played> {
        let endpoint = Endpoint::from_shared(format!("http://{control}"))?;
        let (sink, ready) = mpsc::unbounded_channel();
        let (mut agents, mut tasks) = (Vec::with_capacity(self.len()), JoinSet::new());
        let mut channel = endpoint.connect().await?;
        for host in 0..self.len() {
            if host > 0 && host % SESSIONS == 0 {
                channel = endpoint.connect().await?;
            }
            let listen = format!("{}:7200", address("host", host));
            let capabilities = Some(v1::Capabilities { trace: true, ..v1::Capabilities::default() });
            let hello = v1::Hello { listen, capabilities, ..hello_of(&format!("h{host}")) };
            let (agent, _) = Agent::hello(channel.clone(), hello).await?;
            agents.push(agent.up.clone());
            tasks.spawn(self.play(host, agent, sink.clone()));
        }
        Ok(Played { agents, ready, _tasks: tasks })
    }

    /// Answers what control asks an agent of, until its session ends.
    async fn play(self, host: usize, mut agent: Agent, ready: mpsc::UnboundedSender<v1::Ready>) {
        loop {
            let answer = match agent.down.message().await {
                Ok(Some(v1::ToAgent { message: Some(message) })) => match message {
                    to_agent::Message::Form(recipe) | to_agent::Message::Change(recipe) => {
                        let v1::Recipe { communicator, epoch, .. } = recipe;
                        from_agent::Message::Prepared(v1::Prepared { communicator, epoch, links: None })
                    }
                    to_agent::Message::Ready(now) => {
                        let v1::Ready { communicator, epoch } = now;
                        let _ = ready.send(now);
                        if epoch == 1 {
                            continue;
                        }
                        from_agent::Message::Switched(v1::Switched { communicator, epoch, first_segment: 1 })
                    }
                    to_agent::Message::TracePaths(question) => {
                        from_agent::Message::PathsTraced(self.trace(host, &question))
                    }
                    _ => continue,
                },
                Ok(Some(_)) => continue,
                _ => return,
            };
            if agent.send(answer).await.is_err() {
                return;
            }
        }
    }

    /// Packets between racks go over the spine that the ports choose.
    fn trace(&self, host: usize, question: &v1::TracePaths) -> v1::PathsTraced {
        let to = (0..self.len()).find(|to| address("host", *to) == question.address).unwrap_or(host);
        let (from, into) = (self.rack(host), self.rack(to));
        let paths = question.ports.iter().map(|ports| {
            let v1::PortPair { source_port, destination_port } = *ports;
            let spine = (source_port ^ destination_port) as usize * 7 + host.min(to) + host.max(to) * 3;
            let mut hops = vec![address("leaf", from)];
            if from != into {
                hops.extend([address("spine", spine % self.spines.max(1)), address("leaf", into)]);
            }
            v1::TracedPath { source_port, destination_port, hops }
        });
        v1::PathsTraced { request: question.request, paths: paths.collect(), error: String::new() }
    }
}

fn address(kind: &str, number: usize) -> String {
    let net = match kind {
        "host" => 64,
        "leaf" => 65,
        _ => 66,
    };
    format!("10.{net}.{}.{}", number / 250, number % 250 + 1)
}

impl Played {
    /// One rank on each of these hosts joins; the communicator once all agents may use its first epoch.
    ///
    /// # Errors
    /// Where it has not formed within `limit`.
    pub async fn form(&mut self, tenant: &str, name: &str, hosts: &[usize], limit: Duration) -> Result<u64> {
        for (rank, host) in (0..).zip(hosts) {
            let join = v1::Join {
                request: u64::from(rank) + 1,
                tenant: tenant.to_owned(),
                communicator: name.to_owned(),
                rank,
                ranks: u32::try_from(hosts.len())?,
                ..v1::Join::default()
            };
            let agent = self.agents.get(*host).context("no such host")?;
            agent.send(from_agent::Message::Join(join).into()).await?;
        }
        let mut missing = hosts.len();
        let all = async {
            loop {
                let v1::Ready { communicator, epoch } = self.ready.recv().await.context("no agent lives")?;
                missing -= usize::from(epoch == 1);
                if missing == 0 {
                    return Ok(communicator);
                }
            }
        };
        tokio::time::timeout(limit, all).await.context("it does not form")?
    }
}
