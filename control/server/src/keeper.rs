//! The thread that writes to the store. Nobody waits for the disk except who asked for something to be kept.

use crate::metrics::StoreWrites;
use harmonaize_store::{Change, Store, StoreError, backup};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

/// Most jobs that are written together.
const MOST_TOGETHER: usize = 256;

/// The bytes of a store's file. Several may have asked for one copy, and so share its error.
pub(crate) type Copied = Result<Vec<u8>, Arc<StoreError>>;

/// What the thread is asked for.
enum Job {
    /// Changes that are to be kept, by a number of their own.
    Keep(u64, Vec<Change>),
    /// Everything that is kept, as the bytes of a store's file.
    Backup(oneshot::Sender<Copied>),
}

/// What became of a job: kept, or why not.
pub(crate) struct StoreAck {
    pub number: u64,
    pub outcome: Result<(), Arc<StoreError>>,
}

/// Hands jobs to the thread. Dropping it ends the thread after what is queued; [`Kept`] then ends too.
pub(crate) struct Keeper {
    jobs: UnboundedSender<Job>,
    numbers: u64,
    /// What the thread has done.
    pub writes: StoreWrites,
}

impl Keeper {
    /// Starts the thread. Answers come in the order of the jobs; there are no more of them than of jobs.
    ///
    /// # Errors
    /// Where the system gives no thread.
    pub(crate) fn start(store: Box<dyn Store>) -> std::io::Result<(Self, UnboundedReceiver<StoreAck>)> {
        let (jobs, mut queue) = unbounded_channel();
        let (answers, kept) = unbounded_channel();
        let writes = StoreWrites::default();
        let mut disk = Disk { store, answers, writes: writes.clone() };
        let run = move || {
            while let Some(first) = queue.blocking_recv() {
                disk.write(Group::gather(first, &mut queue));
            }
        };
        std::thread::Builder::new().name("store".to_owned()).spawn(run)?;
        Ok((Self { jobs, numbers: 0, writes }, kept))
    }

    /// The same with a task of the caller's in place of the thread, for simulations. In its time each group takes as long as `takes` says.
    #[cfg(feature = "testing")]
    pub(crate) fn simulated(
        store: Box<dyn Store>,
        mut takes: Box<dyn FnMut() -> std::time::Duration + Send>,
    ) -> (Self, UnboundedReceiver<StoreAck>, impl Future<Output = ()> + Send) {
        let (jobs, mut queue) = unbounded_channel();
        let (answers, kept) = unbounded_channel();
        let writes = StoreWrites::default();
        let mut disk = Disk { store, answers, writes: writes.clone() };
        let run = async move {
            while let Some(first) = queue.recv().await {
                let group = Group::gather(first, &mut queue);
                tokio::time::sleep(takes()).await;
                disk.write(group);
            }
        };
        (Self { jobs, numbers: 0, writes }, kept, run)
    }

    /// Queues changes; the number that their [`Kept`] will have.
    pub(crate) fn keep(&mut self, changes: Vec<Change>) -> u64 {
        self.numbers += 1;
        // The thread outlives this.
        let _ = self.jobs.send(Job::Keep(self.numbers, changes));
        self.numbers
    }

    /// Queues a copy of all that was queued before.
    pub(crate) fn backup(&mut self, answer: oneshot::Sender<Copied>) {
        let _ = self.jobs.send(Job::Backup(answer));
    }
}

/// What waits, to be written together: one wait for the disk, however many ask.
#[derive(Default)]
struct Group {
    numbers: Vec<u64>,
    changes: Vec<Change>,
    copies: Vec<oneshot::Sender<Copied>>,
}

impl Group {
    fn gather(first: Job, queue: &mut UnboundedReceiver<Job>) -> Self {
        let mut group = Self::default();
        let more = std::iter::from_fn(|| queue.try_recv().ok()).take(MOST_TOGETHER);
        for job in std::iter::once(first).chain(more) {
            match job {
                Job::Keep(number, more) => {
                    group.numbers.push(number);
                    group.changes.extend(more);
                }
                Job::Backup(answer) => group.copies.push(answer),
            }
        }
        group
    }
}

/// What writes groups, and answers.
struct Disk {
    store: Box<dyn Store>,
    answers: UnboundedSender<StoreAck>,
    writes: StoreWrites,
}

impl Disk {
    fn write(&mut self, group: Group) {
        let Group { numbers, changes, copies } = group;
        if !numbers.is_empty() {
            let began = Instant::now();
            let outcome = self.store.write(&changes).map_err(Arc::new);
            self.writes.wrote(began.elapsed(), outcome.is_ok());
            for number in numbers {
                // Nobody asks any more where control goes down.
                let _ = self.answers.send(StoreAck { number, outcome: outcome.clone() });
            }
        }
        if !copies.is_empty() {
            let copy = self.store.read().and_then(backup).map_err(Arc::new);
            copies.into_iter().for_each(|answer| drop(answer.send(copy.clone())));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_store::{Memory, Stored, Tenant};
    use std::sync::Mutex;
    use std::sync::mpsc::{Receiver, channel};

    /// A store that waits to be let on, and fails where it is told.
    struct Slow {
        inside: Memory,
        let_on: Receiver<bool>,
        groups: Arc<Mutex<Vec<usize>>>,
    }

    impl Store for Slow {
        fn read(&self) -> Result<Stored, StoreError> {
            self.inside.read()
        }

        fn write(&mut self, changes: &[Change]) -> Result<(), StoreError> {
            self.groups.lock().unwrap().push(changes.len());
            if !self.let_on.recv().unwrap_or(true) {
                return Err(StoreError::Failed { path: "here".into(), why: "the disk is full".to_owned() });
            }
            self.inside.write(changes)
        }
    }

    #[test]
    fn what_waits_is_written_together_and_answered_in_order() {
        let (go, let_on) = channel();
        let groups = Arc::default();
        let store = Slow { inside: Memory::new(), let_on, groups: Arc::clone(&groups) };
        let (mut keeper, mut kept) = Keeper::start(Box::new(store)).unwrap();
        let tenant = |name: &str| {
            vec![Change::Tenant(Tenant { name: name.to_owned(), added_ns: 0, ..Tenant::default() })]
        };
        assert_eq!(keeper.keep(tenant("a")), 1);
        while groups.lock().unwrap().is_empty() {
            std::thread::yield_now();
        }
        assert_eq!([2, 3, 4].map(|_| keeper.keep(tenant("b"))), [2, 3, 4]);
        go.send(true).unwrap();
        go.send(false).unwrap();
        drop(keeper);
        let mut answers = Vec::new();
        while let Some(StoreAck { number, outcome }) = kept.blocking_recv() {
            answers.push((number, outcome.err().map(|error| error.to_string())));
        }
        let full = || Some("here: the disk is full".to_owned());
        assert_eq!(answers, [(1, None), (2, full()), (3, full()), (4, full())]);
        assert_eq!(*groups.lock().unwrap(), [1, 3]);
    }
}
