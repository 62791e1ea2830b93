//! Once a communicator is up and has run each kind of operation, no poll loop allocates. Two whole agents run with control
//! over TCP in one process, with tenants mapped and remote. Every allocation of the engines' threads is counted.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

#[allow(dead_code, reason = "it counts for threads that others run")]
#[path = "../../transport/tests/counting/mod.rs"]
mod counting;
mod whole;

use counting::Counting;
use harmonaize_client::{Access, AttachOptions, Client, Communicator, Dtype, Rank, ReduceOp, Tensor};
use std::path::PathBuf;
use std::sync::Barrier;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use whole::{Agent, LIMIT, control};

#[global_allocator]
static ALLOCATOR: Counting = Counting(count);

/// The engines' threads, two an agent, once they are known.
static COUNTED: [AtomicI32; 4] = [const { AtomicI32::new(0) }; 4];
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

fn count() {
    if COUNTED[0].load(Ordering::Relaxed) != 0 {
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        if COUNTED.iter().any(|counted| counted.load(Ordering::Relaxed) == thread) {
            ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn engine_threads() -> Vec<i32> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    let name = |task: &PathBuf| std::fs::read_to_string(task.join("comm")).unwrap_or_default();
    let engines = tasks.filter(|task| name(task).starts_with("engine-"));
    engines.map(|task| task.file_name().unwrap().to_str().unwrap().parse().unwrap()).collect()
}

struct Job {
    communicator: Communicator,
    small: [Tensor; 2],
    large: [Tensor; 2],
}

impl Job {
    fn join(socket: &PathBuf, access: Access, rank: u32) -> Self {
        let options = AttachOptions { access, ..AttachOptions::default() };
        let client = Client::attach(socket, options).unwrap();
        let tensor = |elements| client.tensor(Dtype::F32, elements).unwrap();
        let (small, large) = ([(); 2].map(|()| tensor(1024)), [(); 2].map(|()| tensor(1 << 20)));
        let communicator = client.join("job", Rank(rank), 4, LIMIT).unwrap();
        Self { communicator, small, large }
    }

    fn round(&self) {
        for [input, output] in [&self.small, &self.large] {
            let wait =
                |operation: Result<harmonaize_client::Operation, _>| operation.unwrap().wait(LIMIT).unwrap();
            wait(self.communicator.all_reduce(input, output, ReduceOp::Average));
            wait(self.communicator.all_reduce_in_place(input, ReduceOp::Sum));
            wait(self.communicator.all_to_all(input, output));
            wait(self.communicator.all_gather_in_place(output));
            wait(self.communicator.reduce_scatter_in_place(input, ReduceOp::Average));
            wait(self.communicator.broadcast(input, Rank(2)));
            wait(self.communicator.barrier());
        }
    }
}

#[test]
fn no_poll_loop_allocates_once_a_communicator_is_up() {
    let folder = tempfile::tempdir().unwrap();
    let (address, _control) = control();
    let sockets = ["h0", "h1"].map(|host| folder.path().join(host));
    let _agents = [0, 1].map(|host| Agent::new(["h0", "h1"][host], address, &sockets[host]).start());
    let warm = Barrier::new(5);
    std::thread::scope(|scope| {
        for rank in 0..4_u32 {
            let (socket, warm) = (&sockets[(rank / 2) as usize], &warm);
            scope.spawn(move || {
                let access = if rank % 2 == 0 { Access::Mapped } else { Access::Remote };
                let job = Job::join(socket, access, rank);
                // As many as to bring every operation to every channel.
                (0..40).for_each(|_| job.round());
                warm.wait();
                warm.wait();
                (0..100).for_each(|_| job.round());
                warm.wait();
                warm.wait();
            });
        }
        warm.wait();
        let threads = engine_threads();
        assert_eq!(threads.len(), COUNTED.len());
        // The first is looked at by all that allocate.
        for (counted, thread) in COUNTED.iter().zip(threads).rev() {
            counted.store(thread, Ordering::Relaxed);
        }
        warm.wait();
        warm.wait();
        let allocations = ALLOCATIONS.load(Ordering::Relaxed);
        COUNTED[0].store(0, Ordering::Relaxed);
        warm.wait();
        assert_eq!(allocations, 0, "allocations of the engines in 100 rounds of fourteen operations");
    });
}
