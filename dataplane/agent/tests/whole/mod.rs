//! Whole agents with control over TCP, in this process.
#![allow(dead_code)] // each test uses some of it

#[path = "../settings/mod.rs"]
mod settings;

use harmonaize_agent::config::{Config, Links, Rdma};
use harmonaize_agent::run::run_on;
use harmonaize_agent::session::{Quota, SocketRules, TenantRules};
use harmonaize_client::Secret;
use harmonaize_libibverbs::host_devices;
use harmonaize_server::Server;
use harmonaize_testkit::topology::star;
use harmonaize_transport::tcp::LinkProtection;
use harmonaize_verbs::Devices;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

pub(crate) const LIMIT: Duration = Duration::from_secs(30);

/// Runs until the returned sender is dropped.
pub(crate) fn background<F: Future<Output = ()>>(
    work: impl FnOnce(oneshot::Receiver<()>) -> F + Send + 'static,
) -> oneshot::Sender<()> {
    let (sender, stop) = oneshot::channel();
    std::thread::spawn(move || {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work(stop));
    });
    sender
}

pub(crate) fn control() -> (SocketAddr, oneshot::Sender<()>) {
    control_at("10Gbit/s")
}

/// Of two hosts with links of this rate, as control believes: nothing shapes them.
pub(crate) fn control_at(rate: &str) -> (SocketAddr, oneshot::Sender<()>) {
    control_of(star(2, rate))
}

/// On a fabric of this topology.
pub(crate) fn control_of(topology: String) -> (SocketAddr, oneshot::Sender<()>) {
    control_with(&topology, LIMIT)
}

/// The same where a silent session lives so long.
pub(crate) fn control_with(topology: &str, session_timeout: Duration) -> (SocketAddr, oneshot::Sender<()>) {
    let mut config = settings::config(topology, LIMIT);
    config.session_timeout = session_timeout;
    config.settings.paths = 2;
    let (sender, address) = std::sync::mpsc::channel();
    let stop = background(move |stop| async move {
        let server = Server::bind(config).await.unwrap();
        sender.send(server.local_address()).unwrap();
        server.run(async { drop(stop.await) }).await.unwrap();
    });
    (address.recv_timeout(LIMIT).unwrap(), stop)
}

/// An agent before its start, with the tenant `a` at a socket.
pub(crate) struct Agent {
    pub(crate) config: Config,
    pub(crate) devices: Devices,
    socket: PathBuf,
}

impl Agent {
    pub(crate) fn new(host: &str, control: SocketAddr, socket: &Path) -> Self {
        let uids = vec![rustix::process::getuid().as_raw()];
        let tenant = TenantRules {
            tenant: "a".into(),
            socket: Some(SocketRules { path: socket.to_owned(), uids }),
            secret: None,
            addresses: Vec::new(),
            quota: Quota::default(),
            remote: true,
            rdma: false,
            handshake: LIMIT,
        };
        let config = Config {
            handover: None,
            host: host.into(),
            control: vec![control.to_string()],
            protection: harmonaize_identity::Protection::InsecureLoopback,
            listen: "127.0.0.1:0".parse().unwrap(),
            spin: Duration::from_micros(50),
            engine_threads: 2,
            engine_senders: true,
            peer_timeout: LIMIT,
            connect_timeout: LIMIT,
            verbs: None,
            rdma: None,
            metrics: "127.0.0.1:0".parse().unwrap(),
            telemetry: None,
            links: Links { protection: LinkProtection::Authenticated, dscp: None },
            congestion: None,
            tenants: vec![tenant],
            control_tenants: None,
            sandbox: Default::default(),
            source: None,
        };
        Self { config, devices: host_devices(), socket: socket.to_owned() }
    }

    /// The same, with tenants over RDMA on a device, with queue pairs at 10.9.0.3 or 10.9.0.4. Over TCP too
    /// for those who know the secret and come from this host.
    pub(crate) fn with_rdma(
        mut self,
        devices: Devices,
        device: &str,
        listen: SocketAddr,
        secret: Secret,
    ) -> Self {
        self.devices = devices;
        let (device, listen) = (Some(device.to_owned()), Some(listen));
        self.config.rdma = Some(Rdma { device, listen, ..Rdma::default() });
        for tenant in &mut self.config.tenants {
            tenant.rdma = true;
            tenant.addresses =
                ["127.0.0.1", "10.9.0.3", "10.9.0.4"].map(|ip| ip.parse::<IpAddr>().unwrap()).to_vec();
            tenant.secret = Some(secret.clone());
        }
        self
    }

    /// Starts it and waits for its socket; it runs until the value is dropped.
    pub(crate) fn start(self) -> oneshot::Sender<()> {
        let Self { config, devices, socket } = self;
        let running = background(move |stop| async move {
            run_on(&devices, config, async { drop(stop.await) }).await.unwrap();
        });
        let deadline = Instant::now() + LIMIT;
        while !socket.exists() {
            assert!(Instant::now() < deadline, "the agent made no socket");
            std::thread::yield_now();
        }
        running
    }
}
