//! What the provider tells of the network, by a thread that NCCL's never wait for.

use harmonaize_client::{
    AttachOptions, Client, CongestionLevel, Error, EventKind, Events, JoinOptions, Rank, job_from_env,
};
use std::ffi::c_int;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::Duration;

/// How long the thread waits for events at a time.
const WAIT: Duration = Duration::from_secs(60);
/// How long it waits before it asks again, where the provider could not tell.
const AGAIN: Duration = Duration::from_secs(1);

/// Nothing is known: there is no agent, or rank 0 is another process.
const UNKNOWN: c_int = -1;

static CONGESTION: AtomicI32 = AtomicI32::new(UNKNOWN);
static BEGUN: AtomicBool = AtomicBool::new(false);

/// The worst that the provider tells of the tenant's communicators now: 0 none, 1 mild, 2 severe. -1 where it is not known: at other
/// ranks than the first communicator's first, without an agent, until the ranks have joined, and while the provider cannot tell.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_nccl_congestion() -> c_int {
    CONGESTION.load(Ordering::Relaxed)
}

/// Takes the process's first communicator of several ranks to the provider, where the environment names an agent. Returns at once.
pub(crate) fn begin(communicator: u64, rank: Rank, ranks: u32) {
    let socket = std::env::var_os("HARMONAIZE_SOCKET").filter(|path| !path.is_empty());
    let Some(socket) = socket.filter(|_| ranks > 1 && !BEGUN.swap(true, Ordering::Relaxed)) else { return };
    // On this thread, because the program may change its environment later.
    let options = JoinOptions { job: job_from_env(), ..JoinOptions::default() };
    let name = format!("nccl-{communicator:016x}");
    let thread = std::thread::Builder::new().name("harmonaize-nccl".into());
    // NCCL goes on without: then nothing is known.
    let _ = thread.spawn(move || {
        let _ = follow(PathBuf::from(socket), &name, (rank, ranks), &options);
        CONGESTION.store(UNKNOWN, Ordering::Relaxed);
    });
}

/// Is a rank of the provider's communicator as long as the process lives. The first hears of the network.
fn follow(
    socket: PathBuf,
    name: &str,
    (rank, ranks): (Rank, u32),
    options: &JoinOptions,
) -> Result<(), Error> {
    let small = AttachOptions { arena_bytes: 1 << 16, entries: 4, ..AttachOptions::default() };
    let client = Client::attach(socket, small)?;
    let mut events = client.events(None);
    if rank == Rank(0) {
        // A communicator that forms later hears what the tenant's others have been told.
        events.read(Duration::ZERO)?;
    }
    let _communicator = client.join_with(name, rank, ranks, options)?;
    if rank != Rank(0) {
        loop {
            std::thread::park();
        }
    }
    let mut reported = Reported::default();
    loop {
        CONGESTION.store(reported.worst(), Ordering::Relaxed);
        match events.read(WAIT) {
            Ok(batch) => batch.events.iter().for_each(|event| reported.update(&event.kind)),
            Err(Error::TooOften { .. }) => std::thread::sleep(AGAIN),
            Err(Error::Events(_)) => {
                CONGESTION.store(UNKNOWN, Ordering::Relaxed);
                std::thread::sleep(AGAIN);
                let mut fresh = client.events(None);
                while let Err(error) = fresh.read(Duration::ZERO) {
                    match error {
                        Error::Events(_) | Error::TooOften { .. } => std::thread::sleep(AGAIN),
                        error => return Err(error),
                    }
                }
                // A provider that was away goes on. To one that began anew, what was told before is nothing.
                let feed = |events: &Events| events.cursor().map(|cursor| cursor.feed);
                if feed(&fresh) != feed(&events) {
                    (events, reported) = (fresh, Reported::default());
                }
            }
            Err(error) => return Err(error),
        }
    }
}

/// What was told last, of all communicators alike.
#[derive(Default)]
struct Reported {
    congestion: CongestionLevel,
    capacity: CongestionLevel,
}

impl Reported {
    fn update(&mut self, kind: &EventKind) {
        match kind {
            EventKind::Congestion(level) => self.congestion = *level,
            EventKind::Capacity(level) => self.capacity = *level,
            _ => {}
        }
    }

    fn worst(&self) -> c_int {
        match self.congestion.max(self.capacity) {
            CongestionLevel::None => 0,
            CongestionLevel::Mild => 1,
            CongestionLevel::Severe => 2,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worse_of_congestion_and_capacity_counts() {
        let mut reported = Reported::default();
        assert_eq!(reported.worst(), 0);
        reported.update(&EventKind::Congestion(CongestionLevel::Severe));
        reported.update(&EventKind::Capacity(CongestionLevel::Mild));
        assert_eq!(reported.worst(), 2);
        reported.update(&EventKind::PlanChanged);
        reported.update(&EventKind::Congestion(CongestionLevel::None));
        assert_eq!(reported.worst(), 1);
    }

    #[test]
    fn without_an_agent_nothing_is_known() {
        let socket = tempfile::tempdir().unwrap().path().join("agent.sock");
        assert!(follow(socket, "nccl-7", (Rank(0), 2), &JoinOptions::default()).is_err());
        assert_eq!(harmonaize_nccl_congestion(), UNKNOWN);
    }
}
