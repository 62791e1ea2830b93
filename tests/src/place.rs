//! The place of a worker that the provider starts, and the later ones that it reads as its elastic job gets more hosts or fewer.

use harmonaize_client::{Communicator, Error, ReduceOp, RegroupOptions, Tensor};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long is waited between two looks.
const PAUSE: Duration = Duration::from_millis(10);

/// Where a worker stands among those of its job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Counts the job's sets of workers.
    pub generation: u64,
    /// The worker's rank, below `workers`.
    pub rank: u32,
    /// How many workers there are.
    pub workers: u32,
}

impl Place {
    fn of(words: [Option<&str>; 3]) -> Option<Self> {
        let [generation, rank, workers] = words;
        Some(Self {
            generation: generation?.parse().ok()?,
            rank: rank?.parse().ok()?,
            workers: workers?.parse().ok()?,
        })
    }

    /// That of the environment, where it has one.
    pub fn from_env() -> Option<Self> {
        let names = ["HARMONAIZE_GENERATION", "RANK", "WORLD_SIZE"];
        let [generation, rank, workers] = names.map(|name| std::env::var(name).ok());
        Self::of([generation.as_deref(), rank.as_deref(), workers.as_deref()])
    }

    /// That of a line of standard input.
    fn from_line(line: &str) -> Option<Self> {
        let mut words = line.strip_prefix("RESIZED ")?.split(' ');
        Self::of([words.next(), words.next(), words.next()])
    }

    /// Regroups so that all of the generation come, and keep their ranks. It waits so long for them.
    pub fn options(self, timeout: Duration) -> RegroupOptions {
        let Self { rank, workers, .. } = self;
        RegroupOptions { timeout, min_ranks: workers, key: Some(rank), ..RegroupOptions::default() }
    }
}

/// The place that a worker has read last.
#[derive(Clone, Debug)]
pub struct Latest(Arc<Mutex<Place>>);

impl Latest {
    /// Reads standard input from now on, on a thread. Until a line comes the place is this one.
    pub fn follow(place: Place) -> Self {
        let latest = Self(Arc::new(Mutex::new(place)));
        let reader = latest.clone();
        std::thread::spawn(move || {
            let lines = std::io::stdin().lines().map_while(Result::ok);
            for next in lines.filter_map(|line| Place::from_line(&line)) {
                *reader.0.lock().unwrap_or_else(PoisonError::into_inner) = next;
            }
        });
        latest
    }

    /// What was read last.
    pub fn get(&self) -> Place {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits so long until a place after this one was read; none where none was.
    pub fn after(&self, place: Place, limit: Duration) -> Option<Place> {
        let deadline = Instant::now() + limit;
        while Instant::now() < deadline {
            let next = self.get();
            if next.generation > place.generation {
                return Some(next);
            }
            std::thread::sleep(PAUSE);
        }
        None
    }
}

/// Whether all ranks have read a place of one generation, later than `now`. That is so where the `least` that one has read is
/// the `largest`.
pub fn is_agreed(now: u64, least: u64, largest: u64) -> bool {
    least == largest && least > now
}

/// What all ranks have, as one: `tensor` has room for one number, and `limit` is for the AllReduce.
///
/// # Errors
/// As [`Communicator::all_reduce_in_place`] and its wait have them.
pub fn reduced(
    communicator: &Communicator,
    tensor: &Tensor,
    own: u64,
    by: ReduceOp,
    limit: Duration,
) -> Result<u64, Error> {
    tensor.write(0, &[own])?;
    communicator.all_reduce_in_place(tensor, by)?.wait(limit)?;
    let mut all = [0];
    tensor.read(0, &mut all)?;
    let [all] = all;
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_regroup_for_one_generation_alone() {
        let agreed = |read: [u64; 3]| {
            let (least, largest) = (read.into_iter().min().unwrap(), read.into_iter().max().unwrap());
            is_agreed(1, least, largest)
        };
        assert!(!agreed([1, 1, 1]), "nobody has read a line");
        assert!(!agreed([1, 2, 2]), "one has read none");
        // The job was resized twice, and one has read of the first time alone.
        assert!(!agreed([2, 3, 3]));
        assert!(agreed([3, 3, 3]));
    }

    #[test]
    fn a_line_names_generation_rank_and_workers() {
        let place = Place { generation: 3, rank: 1, workers: 4 };
        assert_eq!(Place::from_line("RESIZED 3 1 4"), Some(place));
        for other in ["", "RESIZED", "RESIZED 3 1", "RESIZED 3 one 4", "resized 3 1 4"] {
            assert_eq!(Place::from_line(other), None, "{other}");
        }
    }
}
