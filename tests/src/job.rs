//! A deployment for tests, and jobs on it whose ranks are threads of the test.

use crate::STEP;
pub use crate::worker::Worker;
use anyhow::{Context, Result};
use harmonaize_client::{Access, AttachOptions, Client};
use harmonaize_testkit::deployment::{Deployment, Setup, Tenant, socket};
use harmonaize_testkit::workspace::{Binaries, Profile};
use std::path::PathBuf;

/// Starts control and agents on a fabric, with the tenants `a` and `b` of this test's own user. Returns `None`,
/// loudly, without the privilege for namespaces. `adjust` changes the settings.
///
/// # Panics
/// If the deployment fails: a test cannot go on.
#[expect(clippy::panic, reason = "support for tests")]
pub fn deploy(topology: &str, adjust: impl FnOnce(&mut Setup)) -> Option<Deployment> {
    let fabric = crate::fabric(topology)?;
    let start = || -> Result<Deployment> {
        let tenants = ["a", "b"].map(|name| Tenant { name: name.into(), user: 0 });
        let mut setup = Setup::new(Binaries::build(Profile::Dev)?, &tenants);
        setup.tenant = "remote = true".into();
        adjust(&mut setup);
        Deployment::start(fabric?, setup)
    };
    match start() {
        Ok(deployment) => Some(deployment),
        Err(error) => panic!("cannot deploy: {error:#}"),
    }
}

/// The socket of a tenant on each host.
pub fn sockets(deployment: &Deployment, tenant: &str) -> Vec<PathBuf> {
    deployment.hosts().iter().map(|host| socket(host, tenant)).collect()
}

impl Worker {
    /// Attaches and joins.
    pub fn join(socket: &PathBuf, job: &str, rank: u32, ranks: u32, options: AttachOptions) -> Result<Self> {
        Self::of(Client::attach(socket, options)?, job, rank, ranks, STEP)
    }
}

/// The usual options for an access, with room for `mebibytes`.
pub fn options(access: Access, mebibytes: u64) -> AttachOptions {
    AttachOptions { access, arena_bytes: mebibytes << 20, ..AttachOptions::default() }
}

/// A job with one rank on each host, that has joined; small tensors have room.
///
/// # Panics
/// If one cannot join: a test cannot go on.
#[expect(clippy::panic, reason = "support for tests")]
pub fn joined(sockets: &[PathBuf], job: &str) -> Vec<Worker> {
    let ranks = sockets.len() as u32;
    std::thread::scope(|scope| {
        let join = |(rank, socket)| {
            scope.spawn(move || Worker::join(socket, job, rank, ranks, options(Access::Mapped, 8)))
        };
        let threads: Vec<_> = (0..ranks).zip(sockets).map(join).collect();
        let ended = threads.into_iter().map(|thread| thread.join());
        ended
            .map(|worker| worker.unwrap_or_else(|_| panic!("a rank's thread panicked")))
            .map(|worker| worker.unwrap_or_else(|error| panic!("cannot join: {error:#}")))
            .collect()
    })
}

/// Something for each of these at once, in threads of their own.
pub fn at_all<W: Send, T: Send>(each: impl IntoIterator<Item = W>, work: impl Fn(W) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = each.into_iter().map(|one| scope.spawn(move || work(one))).collect();
        let ended = threads.into_iter().map(|thread| thread.join());
        ended.map(|done| done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

/// Runs a job of mapped ranks: a thread per rank, `per_host` ranks on each host in host order. Returns the result of each.
pub fn run<T: Send>(
    sockets: &[PathBuf],
    job: &str,
    per_host: u32,
    work: impl Fn(&Worker) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    run_with(sockets, job, per_host, |_| options(Access::Mapped, 192), work)
}

/// What all ranks of a job have come to.
///
/// # Panics
/// If one failed: a test cannot go on.
#[expect(clippy::panic, reason = "support for tests")]
pub fn succeeded<T>(outcomes: Vec<Result<T>>) -> Vec<T> {
    let each = outcomes.into_iter().enumerate();
    each.map(|(rank, outcome)| outcome.unwrap_or_else(|error| panic!("rank {rank}: {error:#}"))).collect()
}

/// The same with the options of each rank.
pub fn run_with<T: Send>(
    sockets: &[PathBuf],
    job: &str,
    per_host: u32,
    options: impl Fn(u32) -> AttachOptions + Sync,
    work: impl Fn(&Worker) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    let ranks = sockets.len() as u32 * per_host;
    std::thread::scope(|scope| {
        let (options, work) = (&options, &work);
        let threads: Vec<_> = (0..ranks)
            .map(|rank| {
                let socket = sockets.get((rank / per_host) as usize);
                scope.spawn(move || {
                    let socket = socket.context("no such host")?;
                    let worker = Worker::join(socket, job, rank, ranks, options(rank))?;
                    work(&worker)
                })
            })
            .collect();
        let panicked = |_| Err(anyhow::anyhow!("a rank's thread panicked"));
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(panicked)).collect()
    })
}
