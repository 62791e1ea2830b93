//! State that outlives a lost rank, end to end: real agents and control in network namespaces.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_client::{
    Access, Client, Communicator, Dtype, Error, EventKind, ProtectOptions, Protection, ProtectionError, Rank,
    RankState, ReduceOp, RegroupOptions, Restored, Tensor,
};
use harmonaize_tests::job::{Worker, at_all, deploy, joined, options, sockets};
use harmonaize_tests::{STEP, star};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

/// From docs/tenants.md: seals each step.
fn train(job: &Communicator, weights: &Tensor, options: &ProtectOptions) -> Result<Protection, Error> {
    let mut protection = job.protect(&[("weights", weights)], options)?;
    for step in 1..=3 {
        // Compute, reduce, and update the weights here.
        if !protection.seal(step)? {
            println!("step {step} is not sealed: the one before is still on its way");
        }
    }
    Ok(protection)
}

/// From docs/tenants.md: the agent copies while the job computes.
fn step_on(
    job: &Communicator,
    gradients: &Tensor,
    protection: &mut Protection,
    step: u64,
) -> Result<bool, Error> {
    let sealed = protection.begin_seal(step)?;
    // Compute gradients here, which only reads the weights.
    job.all_reduce_in_place(gradients, ReduceOp::Average)?.wait(Duration::from_secs(60))?;
    protection.end_seal(Duration::from_secs(60))?;
    // Update the weights here.
    Ok(sealed)
}

/// From docs/tenants.md: goes on without the lost ranks. The first rank takes over what they had.
fn go_on(job: &Communicator, protection: &mut Protection) -> Result<(Communicator, Restored), Error> {
    let next = job.regroup(&RegroupOptions::default())?;
    let is_left = |rank: &Rank| next.before().contains(&Some(*rank));
    let mut lost: Vec<Rank> = (0..job.ranks()).map(Rank).filter(|rank| !is_left(rank)).collect();
    if next.rank() != Rank(0) {
        lost.clear();
    }
    let restored = protection.restore(&next, &lost)?;
    Ok((next, restored))
}

/// A rank with its state.
struct Trained {
    worker: Worker,
    weights: Tensor,
    protection: Protection,
}

/// A rank's weights after a step.
fn weights(rank: u32, step: u64) -> Vec<u64> {
    Worker::input(rank, step, 100_000 + 1000 * rank as usize)
}

/// The shape of a rank's weights.
fn shape(rank: u32) -> [u64; 2] {
    [1000, 100 + u64::from(rank)]
}

/// Every rank in a failure domain of its own: here all are on one machine.
fn apart(rank: u32) -> ProtectOptions {
    let shapes = BTreeMap::from([("weights".to_owned(), shape(rank).to_vec())]);
    ProtectOptions { domain: Some(rank.into()), timeout: STEP, shapes, ..ProtectOptions::default() }
}

fn start(worker: Worker) -> Trained {
    let on_one_machine = worker.communicator.protect(&[], &ProtectOptions::default());
    let expected = ProtectionError::TooFewDomains { replicas: 1, domains: 1 }.to_string();
    assert_eq!(on_one_machine.unwrap_err().to_string(), expected);
    let tensor = worker.tensor(&weights(worker.rank, 3)).unwrap();
    let mut protection = train(&worker.communicator, &tensor, &apart(worker.rank)).unwrap();
    protection.wait(STEP).unwrap();
    tensor.write(0, &weights(worker.rank, 4)).unwrap();
    let gradients = worker.client.tensor(Dtype::F32, 100_000).unwrap();
    gradients.write(0, &vec![1.0_f32; 100_000]).unwrap();
    let sealed = step_on(&worker.communicator, &gradients, &mut protection, 4).unwrap();
    assert!(sealed, "all have waited for the step before");
    assert!(protection.committed().is_some_and(|step| (1..=3).contains(&step)));
    protection.wait(STEP).unwrap();
    let descending = protection.seal(4).unwrap_err();
    assert!(matches!(descending, Error::Protection(ProtectionError::Differ(_))), "{descending}");
    // A step that nobody seals.
    tensor.write(0, &weights(worker.rank, 5)).unwrap();
    Trained { worker, weights: tensor, protection }
}

/// The state is that of rank 2 after step 4, in memory and as a file.
fn assert_lost_state(client: &Client, state: &RankState, folder: &Path) {
    let expected = weights(2, 4);
    assert_eq!((state.rank(), state.step()), (Rank(2), 4));
    assert_eq!(state.tensors().collect::<Vec<_>>(), [("weights", Dtype::U64, expected.len() as u64)]);
    let tensor = client.tensor(Dtype::U64, expected.len() as u64).unwrap();
    state.read("weights", &tensor).unwrap();
    assert_eq!(state.shape("weights"), Some(&shape(2)[..]));
    let mut found = vec![0; expected.len()];
    tensor.read(0, &mut found).unwrap();
    assert!(found == expected, "the state of rank 2 is another one");
    let path = folder.join("rank-2.safetensors");
    state.write_safetensors(&path).unwrap();
    let file = std::fs::read(path).unwrap();
    let (length, file) = file.split_at(8);
    let (header, data) = file.split_at(u64::from_le_bytes(length.try_into().unwrap()) as usize);
    let header: serde_json::Value = serde_json::from_slice(header).unwrap();
    assert_eq!(header["weights"]["dtype"], "U64");
    assert_eq!(header["weights"]["shape"], serde_json::json!(shape(2)));
    assert_eq!(header["__metadata__"]["step"], "4");
    let bytes: Vec<u8> = expected.iter().flat_map(|value| value.to_le_bytes()).collect();
    assert!(data == bytes, "the file has another state");
}

#[test]
fn a_lost_ranks_state_comes_back() {
    let impatient = "peer_timeout = \"1s\"\n";
    let Some(mut deployment) = deploy(&star(3, "10Gbit/s"), |setup| setup.agent = impatient.into()) else {
        return;
    };
    let own = sockets(&deployment, "a");
    let folder = tempfile::tempdir().unwrap();
    let mut ranks = at_all(joined(&own, "job"), start);
    let agent = deployment.agent(2).unwrap().id().to_string();
    at_all(&ranks, |rank| {
        if rank.worker.rank == 2 {
            let killed = std::process::Command::new("kill").args(["-9", &agent]).status();
            assert!(killed.unwrap().success());
        }
        rank.worker.sum(6, 100_000, false, STEP).unwrap_err()
    });
    drop(ranks.pop());
    let restored = at_all(&mut ranks, |rank| {
        let (next, restored) = go_on(&rank.worker.communicator, &mut rank.protection).unwrap();
        rank.worker.communicator = next;
        rank.worker.ranks = rank.worker.communicator.ranks();
        assert_eq!((restored.step, &restored.lost), (4, &vec![Rank(2)]));
        let found = rank.worker.contents(&rank.weights).unwrap();
        assert!(found == weights(rank.worker.rank, 4), "rank {} went elsewhere", rank.worker.rank);
        restored
    });
    assert_eq!((restored[0].states.len(), restored[1].states.len()), (1, 0));
    assert_lost_state(&ranks[0].worker.client, &restored[0].states[0], folder.path());
    let path = folder.path().join("rank-1.safetensors");
    assert_eq!(ranks[1].protection.write_safetensors(&path).unwrap(), 4);

    // A newcomer goes on where the lost rank was, by the same replicas.
    deployment.start_agent(2).unwrap();
    deployment.wait_until_ready().unwrap();
    let mut events = ranks[0].worker.client.events(None);
    events.read(Duration::ZERO).unwrap();
    std::thread::scope(|scope| {
        let newcomer = scope.spawn(|| {
            let client = Client::attach(&own[2], options(Access::Mapped, 16)).unwrap();
            let options = RegroupOptions { timeout: STEP, ..RegroupOptions::default() };
            let job = client.enter("job", &options).unwrap();
            let restored = job.restore_newcomer(&[Rank(2)]).unwrap();
            assert_lost_state(&client, &restored.states[0], folder.path());
            let tensor = client.tensor(Dtype::U64, 10).unwrap();
            let options = ProtectOptions { shapes: BTreeMap::new(), ..apart(2) };
            let mut protection = job.protect(&[("weights", &tensor)], &options).unwrap();
            assert!(protection.seal(5).unwrap());
            protection.wait(STEP).unwrap();
        });
        let announced = |kind: &EventKind| matches!(kind, EventKind::Newcomers { waiting: 1 });
        let deadline = Instant::now() + STEP;
        while !events.read(STEP).unwrap().events.iter().any(|event| announced(&event.kind)) {
            assert!(Instant::now() < deadline, "nobody heard of the newcomer");
        }
        at_all(&mut ranks, |rank| {
            let (next, restored) = go_on(&rank.worker.communicator, &mut rank.protection).unwrap();
            assert_eq!((next.ranks(), restored.step), (3, 4));
            let mut protection =
                next.protect(&[("weights", &rank.weights)], &apart(rank.worker.rank)).unwrap();
            assert!(protection.seal(5).unwrap());
            protection.wait(STEP).unwrap();
        });
        newcomer.join().unwrap();
    });
}
