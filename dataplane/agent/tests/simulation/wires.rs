//! Connections with control: bytes in memory, late, and lost when a wire is cut.

use harmonaize_identity::{Connection, Dial};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, ReadHalf, WriteHalf, duplex, split};
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until};

/// Bytes that a connection takes in before somebody reads them.
const BUFFER: usize = 16 << 10;
/// Pieces of them under way.
const PIECES: usize = 16;

/// All connections with control.
#[derive(Clone)]
pub(crate) struct Wires(Arc<Mutex<State>>);

struct State {
    random: ChaCha8Rng,
    /// Where control takes connections in, while it runs.
    control: Option<mpsc::Sender<io::Result<Connection>>>,
    wires: BTreeMap<usize, Wire>,
}

/// Somebody's way to control.
struct Wire {
    /// Whether bytes get on.
    open: watch::Sender<bool>,
    /// Most milliseconds that they take.
    delay: u64,
    tasks: Vec<AbortHandle>,
}

impl Wires {
    pub(crate) fn new(random: ChaCha8Rng) -> Self {
        Self(Arc::new(Mutex::new(State { random, control: None, wires: BTreeMap::new() })))
    }

    /// From now on connections go to this control; without one they are refused.
    pub(crate) fn set_control(&self, control: Option<mpsc::Sender<io::Result<Connection>>>) {
        self.0.lock().unwrap().control = control;
    }

    /// How somebody connects.
    pub(crate) fn dial(&self, who: usize) -> Dial {
        let wires = self.clone();
        Dial::new(move |_| {
            let wires = wires.clone();
            async move { wires.connect(who).await }
        })
    }

    async fn connect(&self, who: usize) -> io::Result<DuplexStream> {
        let (near, middle) = duplex(BUFFER);
        let (other, far) = duplex(BUFFER);
        let (control, mut open, delay) = {
            let mut state = self.0.lock().unwrap();
            let control = state.control.clone().ok_or(io::ErrorKind::ConnectionRefused)?;
            let wire = state.wire(who);
            (control, wire.open.subscribe(), wire.delay)
        };
        // The first packets of a connection are lost like others.
        let _ = open.wait_for(|open| *open).await;
        self.pause(delay).await;
        let address = ([127, 0, 0, 1], 1).into();
        let connection = Ok(Connection::in_memory(far, address));
        control.send(connection).await.map_err(|_| io::ErrorKind::ConnectionRefused)?;
        let ((from, into), (back, to)) = (split(middle), split(other));
        let mut tasks = Vec::new();
        for (from, to) in [(from, to), (back, into)] {
            let (pieces, queue) = mpsc::channel(PIECES);
            tasks.push(tokio::spawn(read(self.clone(), who, from, pieces)).abort_handle());
            tasks.push(tokio::spawn(write(queue, to, open.clone())).abort_handle());
        }
        let mut state = self.0.lock().unwrap();
        let wire = state.wire(who);
        wire.tasks.retain(|task| !task.is_finished());
        wire.tasks.extend(tasks);
        Ok(near)
    }

    async fn pause(&self, most: u64) {
        let pause = self.0.lock().unwrap().random.random_range(0..=most);
        tokio::time::sleep(Duration::from_millis(pause)).await;
    }

    /// Ends all connections of somebody's.
    pub(crate) fn cut(&self, who: usize) {
        self.0.lock().unwrap().wire(who).tasks.drain(..).for_each(|task| task.abort());
    }

    pub(crate) fn cut_all(&self) {
        let all: Vec<usize> = self.0.lock().unwrap().wires.keys().copied().collect();
        all.into_iter().for_each(|who| self.cut(who));
    }

    /// Whether somebody's bytes get on; those that do not wait, and nobody hears of it.
    pub(crate) fn set_open(&self, who: usize, open: bool) {
        self.0.lock().unwrap().wire(who).open.send_replace(open);
    }

    /// How long somebody's bytes take at most, in milliseconds.
    pub(crate) fn set_delay(&self, who: usize, delay: u64) {
        self.0.lock().unwrap().wire(who).delay = delay;
    }

    fn due(&self, who: usize) -> Instant {
        let mut state = self.0.lock().unwrap();
        let most = state.wire(who).delay;
        Instant::now() + Duration::from_millis(state.random.random_range(0..=most))
    }
}

impl State {
    fn wire(&mut self, who: usize) -> &mut Wire {
        let new = || Wire { open: watch::Sender::new(true), delay: 2, tasks: Vec::new() };
        self.wires.entry(who).or_insert_with(new)
    }
}

async fn read(
    wires: Wires,
    who: usize,
    mut from: ReadHalf<DuplexStream>,
    pieces: mpsc::Sender<(Instant, Vec<u8>)>,
) {
    let mut bytes = vec![0; BUFFER];
    while let Ok(count @ 1..) = from.read(&mut bytes).await {
        if pieces.send((wires.due(who), bytes[..count].to_vec())).await.is_err() {
            return;
        }
    }
}

async fn write(
    mut queue: mpsc::Receiver<(Instant, Vec<u8>)>,
    mut to: WriteHalf<DuplexStream>,
    mut open: watch::Receiver<bool>,
) {
    while let Some((due, piece)) = queue.recv().await {
        sleep_until(due).await;
        if open.wait_for(|open| *open).await.is_err() || to.write_all(&piece).await.is_err() {
            return;
        }
    }
    let _ = to.shutdown().await;
}
