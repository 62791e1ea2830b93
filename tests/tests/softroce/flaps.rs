//! A port goes down and up again under a running collective. Results stay right where the devices' retries bridge it. Else every
//! rank has a typed error, after which the agents serve new communicators.

use crate::host::{Host, PATIENCE, may_break, until};
use crate::provider::{HOSTS, Provider, program};
use crate::{alone, ranks};
use anyhow::Result;
use harmonaize_client::{Error, ReduceOp, Status};
use harmonaize_tests::job::{Worker, succeeded};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What the devices' retries bridge with the usual settings: 6 times 4.096 us * 2^17.
const RETRIES: Duration = Duration::from_millis(3221);

/// How a job ended on a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// All results were right until all ranks agreed to end.
    Right,
    /// The loss of a rank.
    Lost,
}

/// A job that runs while ports flap.
#[derive(Default)]
pub(crate) struct Job {
    rounds: AtomicU64,
    over: AtomicBool,
    ended: AtomicBool,
}

/// Has all ranks of a job end once it is dropped, also by a panic. The scope of their threads waits for them.
pub(crate) struct Ends<'a>(pub(crate) &'a Job);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.over.store(true, Ordering::Relaxed);
    }
}

impl Job {
    /// Waits until it got on, or has ended.
    pub(crate) fn wait_for_progress(&self) {
        let seen = self.rounds.load(Ordering::Relaxed);
        let on = || self.ended.load(Ordering::Relaxed) || self.rounds.load(Ordering::Relaxed) >= seen + 4;
        until("the job neither gets on nor ends", on);
    }

    /// A rank of it is over.
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::Relaxed);
    }

    fn round(&self, worker: &Worker, round: u64) -> Result<bool> {
        let over = self.over.load(Ordering::Relaxed);
        worker.sum(round, 20_000, round.is_multiple_of(2), PATIENCE)?;
        // The ranks agree by what they add up.
        let flag = worker.tensor(&[u64::from(over)])?;
        worker.communicator.all_reduce_in_place(&flag, ReduceOp::Sum)?.wait(PATIENCE)?;
        if worker.rank == 0 {
            self.rounds.fetch_add(1, Ordering::Relaxed);
        }
        Ok(worker.contents(&flag)? != [0])
    }

    /// A rank of it.
    pub(crate) fn work(&self, worker: &Worker) -> Result<End> {
        for round in 0.. {
            match self.round(worker, round) {
                Ok(true) => break,
                Ok(false) => {}
                Err(error) => match error.downcast_ref() {
                    Some(Error::Operation { status: Status::RankLost, .. }) => return Ok(End::Lost),
                    _ => return Err(error),
                },
            }
        }
        Ok(End::Right)
    }
}

/// Runs a job on all hosts while `meanwhile` lasts, and until it has ended.
pub(crate) fn job(provider: &Provider, name: &str, meanwhile: impl FnOnce(&Job)) -> Vec<End> {
    let job = Job::default();
    std::thread::scope(|scope| {
        let ranks = scope.spawn(|| {
            let ends = ranks(&provider.sockets(), name, |worker| job.work(worker));
            job.ended.store(true, Ordering::Relaxed);
            ends
        });
        let ends = Ends(&job);
        job.wait_for_progress();
        meanwhile(&job);
        drop(ends);
        succeeded(ranks.join().unwrap())
    })
}

/// Short enough for the retries: no result is lost, however often. Longer: an error on every rank. At either end of the cable:
/// the port's own host loses its routes, too, and with them queue pairs at once. Afterwards the same agents serve again.
#[test]
fn a_port_flap_fails_at_most_its_communicators() {
    let _alone = alone();
    if !may_break(HOSTS) {
        return;
    }
    let Some(provider) = Provider::start_with(|_| String::new(), |_| program("harmonaize-agent")) else {
        return;
    };
    let mut longest = Duration::ZERO;
    let ends = job(&provider, "short", |job| {
        for (down_ms, host) in [(20, 3), (200, 3), (400, 1), (50, 3), (600, 3)] {
            let begun = Instant::now();
            let unplugged = Host(host).unplug();
            std::thread::sleep(Duration::from_millis(down_ms));
            longest = longest.max(begun.elapsed());
            unplugged.mend();
            job.wait_for_progress();
        }
    });
    println!("  down for {longest:?} at most: {ends:?}");
    // A busy machine may have made it longer than was meant.
    if longest < RETRIES / 2 {
        assert_eq!(ends, [End::Right; HOSTS]);
    }

    let begun = Instant::now();
    let ends = job(&provider, "long", |job| {
        let unplugged = Host(3).unplug();
        until("no error", || job.ended.load(Ordering::Relaxed));
        println!("  unplugged: an error on every rank after {:?}", begun.elapsed());
        unplugged.mend();
    });
    assert_eq!(ends, [End::Lost; HOSTS]);

    // Up for less time than a retry takes to come: it ends well or with the error, alike on all ranks.
    let ends = job(&provider, "often", |_| {
        for _ in 0..4 {
            let unplugged = Host(2).unplug();
            std::thread::sleep(Duration::from_millis(150));
            unplugged.mend();
        }
        let down = Host(2).link_down();
        std::thread::sleep(Duration::from_millis(50));
        down.mend();
    });
    println!("  often: {ends:?}");
    assert!(ends == [End::Right; HOSTS] || ends == [End::Lost; HOSTS], "{ends:?}");
    succeeded(ranks(&provider.sockets(), "again", |worker| worker.sum(3, 20_000, true, PATIENCE)));
}
