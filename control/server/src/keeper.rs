//! The thread that writes to the store, so that nobody waits for the disk but who asked for something to be kept.

use crate::metrics::StoreWrites;
use harmonaize_store::{Change, Store, backup};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

/// Most jobs that are written together.
const MOST_TOGETHER: usize = 256;

/// What the thread is asked for.
enum Job {
    /// Changes that are to be kept, by a number of their own.
    Keep(u64, Vec<Change>),
    /// Everything that is kept, as the bytes of a store's file.
    Backup(oneshot::Sender<Result<Vec<u8>, String>>),
}

/// What became of a job: kept, or why not.
pub(crate) struct StoreAck {
    pub number: u64,
    pub outcome: Result<(), String>,
}

/// Hands jobs to the thread. Dropping it ends the thread after what is queued; [`Kept`] then ends too.
pub(crate) struct Keeper {
    jobs: Sender<Job>,
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
        let (jobs, queue) = channel();
        let (answers, kept) = unbounded_channel();
        let writes = StoreWrites::default();
        let wrote = writes.clone();
        let run = move || keep(store, &queue, &answers, &wrote);
        std::thread::Builder::new().name("store".to_owned()).spawn(run)?;
        Ok((Self { jobs, numbers: 0, writes }, kept))
    }

    /// Queues changes; the number that their [`Kept`] will have.
    pub(crate) fn keep(&mut self, changes: Vec<Change>) -> u64 {
        self.numbers += 1;
        // The thread outlives this.
        let _ = self.jobs.send(Job::Keep(self.numbers, changes));
        self.numbers
    }

    /// Queues a copy of all that was queued before.
    pub(crate) fn backup(&mut self, answer: oneshot::Sender<Result<Vec<u8>, String>>) {
        let _ = self.jobs.send(Job::Backup(answer));
    }
}

/// Writes what waits as one group: one wait for the disk, however many ask.
fn keep(
    mut store: Box<dyn Store>,
    queue: &Receiver<Job>,
    answers: &UnboundedSender<StoreAck>,
    writes: &StoreWrites,
) {
    while let Ok(first) = queue.recv() {
        let (mut numbers, mut changes, mut copies) = (Vec::new(), Vec::new(), Vec::new());
        for job in std::iter::once(first).chain(queue.try_iter().take(MOST_TOGETHER)) {
            match job {
                Job::Keep(number, more) => {
                    numbers.push(number);
                    changes.extend(more);
                }
                Job::Backup(answer) => copies.push(answer),
            }
        }
        if !numbers.is_empty() {
            let began = Instant::now();
            let outcome = store.write(&changes).map_err(|error| error.to_string());
            writes.wrote(began.elapsed(), outcome.is_ok());
            for number in numbers {
                // Nobody asks any more where control goes down.
                let _ = answers.send(StoreAck { number, outcome: outcome.clone() });
            }
        }
        if !copies.is_empty() {
            let copy = store.read().and_then(backup).map_err(|error| error.to_string());
            copies.into_iter().for_each(|answer| drop(answer.send(copy.clone())));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_store::{Memory, StoreError, Stored, Tenant};
    use std::sync::{Arc, Mutex};

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
            answers.push((number, outcome.err()));
        }
        let full = || Some("here: the disk is full".to_owned());
        assert_eq!(answers, [(1, None), (2, full()), (3, full()), (4, full())]);
        assert_eq!(*groups.lock().unwrap(), [1, 3]);
    }
}
