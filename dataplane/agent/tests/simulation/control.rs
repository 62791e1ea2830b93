//! Control in the world: started, stopped in order, killed, and started again with what its store has.

use crate::settings;
use crate::wires::Wires;
use harmonaize_server::{Config, Simulated};
use harmonaize_store::{Change, Memory, Store, StoreError, Stored};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;

/// Longer than this an agent is not waited for.
pub(crate) const LEASE: Duration = Duration::from_secs(60);
/// How long a silent session counts as alive.
pub(crate) const SILENCE: Duration = Duration::from_secs(2);
/// How long joins and preparations may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(8);

/// A store that outlives controls.
#[derive(Clone, Default)]
struct Durable(Arc<Mutex<Memory>>);

impl Store for Durable {
    fn read(&self) -> Result<Stored, StoreError> {
        self.0.lock().unwrap().read()
    }

    fn write(&mut self, changes: &[Change]) -> Result<(), StoreError> {
        self.0.lock().unwrap().write(changes)
    }
}

/// Control, whether it runs or not.
pub(crate) struct Control {
    config: Config,
    store: Durable,
    random: ChaCha8Rng,
    wires: Wires,
    running: Option<(JoinHandle<()>, oneshot::Sender<()>)>,
    queues: (usize, usize),
}

impl Control {
    pub(crate) fn new(hosts: usize, mut random: ChaCha8Rng, wires: Wires) -> Self {
        let mut topology = "[[switch]]\nname = \"s\"\n".to_owned();
        for host in 0..hosts {
            topology.push_str(&format!(
                "[[host]]\nname = \"h{host}\"\n[[link]]\nfrom = \"h{host}\"\nto = \"s\"\nrate = \"10Gbit/s\"\n"
            ));
        }
        let mut config = settings::config(&topology, PATIENCE);
        config.session_timeout = SILENCE;
        config.settings.lease = LEASE;
        config.settings.paths = random.random_range(1..3);
        let commands = *[1, 4, 1024].get(random.random_range(0..3)).unwrap();
        let messages = *[64, 4096].get(random.random_range(0..2)).unwrap();
        Self { config, store: Durable::default(), random, wires, running: None, queues: (commands, messages) }
    }

    pub(crate) fn start(&mut self) {
        let (connect, connections) = mpsc::channel(4);
        self.wires.set_control(Some(connect));
        let mut disk = ChaCha8Rng::from_rng(&mut self.random);
        let slowest = *[1, 30, 1500].get(self.random.random_range(0..3)).unwrap();
        let mut random = [0; 32];
        self.random.fill(&mut random);
        let control = Simulated {
            config: self.config.clone(),
            store: Box::new(self.store.clone()),
            disk: Box::new(move || Duration::from_millis(disk.random_range(0..=slowest))),
            random,
            commands: self.queues.0,
            messages: self.queues.1,
        };
        let (stop, stopped) = oneshot::channel();
        let running = tokio::spawn(async move {
            let shutdown = async {
                let _ = stopped.await;
            };
            control.run(ReceiverStream::new(connections), shutdown).await.unwrap();
        });
        self.running = Some((running, stop));
    }

    /// Has control end in order; it has ended when this returns.
    pub(crate) async fn stop(&mut self) {
        let Some((running, stop)) = self.running.take() else { return };
        self.wires.set_control(None);
        let _ = stop.send(());
        running.await.unwrap();
    }

    /// Ends control at once. What it has not stored is lost.
    pub(crate) fn kill(&mut self) {
        let Some((running, _stop)) = self.running.take() else { return };
        self.wires.set_control(None);
        running.abort();
        self.wires.cut_all();
    }
}
