//! A training job that states what it needs and adapts to the answers. docs/tenants.md goes through it part by part.

use harmonaize_client::{
    AttachOptions, BatchKnobs, Checkpoint, Client, Collective, Communicator, CongestionLevel, Constraints,
    Dtype, Error, EventKind, GradientNoise, Hints, JoinOptions, Knobs, LearningRate, Negotiated,
    OperationOptions, Priority, Rank, ReduceOp, Tensor,
};
use std::path::Path;
use std::time::{Duration, Instant};

/// What one rank went through.
#[derive(Debug, Default)]
pub(crate) struct TrainingReport {
    /// Number of the agreement; 0 without one.
    pub(crate) agreement: u64,
    /// Micro-batches that were added up in all.
    pub(crate) batches: u32,
    /// Checkpoints that were saved.
    pub(crate) saved: u32,
    /// The sum that came of the last step.
    pub(crate) sum: f32,
}

/// Says what the job needs, and takes what can be had.
fn agree(client: &Client) -> Result<u64, Error> {
    let wanted = Constraints::new().weight(2).min_busbw(60_000_000).p99(64 << 10, Duration::from_millis(50));
    let outcome = client.negotiate("train", &wanted, |counter, reasons| {
        for reason in reasons {
            println!("not to be had: {}", reason.text);
        }
        Some(counter.clone())
    })?;
    match outcome {
        Negotiated::Agreed(agreement) => Ok(agreement.number),
        Negotiated::Refused { .. } => Ok(0),
    }
}

/// Says what the job is going to do.
fn hint(client: &Client) -> Result<(), Error> {
    let hints = Hints::new()
        .period(Duration::from_secs(2))
        .overlapped(Collective::AllReduce, 48 << 20)
        .expect(Collective::AllReduce, 16 << 20)
        .task_priority(2);
    client.hint("train", &hints)
}

/// Looks at what has happened, without waiting; whether the job should save now.
fn handle_events(events: &mut harmonaize_client::Events) -> Result<bool, Error> {
    let mut save = false;
    for event in events.read(Duration::ZERO)?.events {
        match event.kind {
            EventKind::Maintenance { ranks, .. } => save |= !ranks.is_empty(),
            EventKind::Congestion(level) => save |= level == CongestionLevel::Severe,
            EventKind::AgreementBroken { clauses } => println!("not kept: {clauses:?}"),
            EventKind::Stragglers { cause, ranks } => println!("late ({}): {ranks:?}", cause.as_str()),
            _ => {}
        }
    }
    Ok(save)
}

/// What the provider chooses for this step, asked by rank 0 and told to all.
fn choose(client: &Client, job: &Communicator, saved: Instant) -> Result<(u32, bool), Error> {
    let choice = client.tensor(Dtype::U64, 2)?;
    if job.rank() == Rank(0) {
        let (every, cost) = (Duration::from_secs(600), Duration::from_secs(5));
        let importance = Priority::Normal;
        let checkpoint = Some(Checkpoint { every, cost, last: saved.elapsed(), importance });
        let chosen = client.iteration("train", &Knobs { accumulate: (1, 8), checkpoint })?;
        choice.write(0, &[u64::from(chosen.accumulate), u64::from(chosen.checkpoint)])?;
    }
    job.broadcast(&choice, Rank(0))?.wait(Duration::from_secs(30))?;
    let mut chosen = [0_u64; 2];
    choice.read(0, &mut chosen)?;
    Ok((chosen[0] as u32, chosen[1] == 1))
}

/// Adds the gradients up, however late another rank is within a minute.
fn sum(job: &Communicator, gradients: &Tensor, step: u64) -> Result<(), Error> {
    let timeout = Some(Duration::from_secs(60));
    let options = OperationOptions { timeout, iteration: step, ..OperationOptions::default() };
    job.with(options)?.all_reduce_in_place(gradients, ReduceOp::Sum)?.wait(Duration::MAX)?;
    Ok(())
}

/// Averages gradients of 32 samples of each rank; their noise over the last 200 steps.
fn average(job: &Communicator, gradients: &Tensor) -> Result<Option<GradientNoise>, Error> {
    let marked = job.with(OperationOptions { gradients: true, ..OperationOptions::default() })?;
    marked.all_reduce_in_place(gradients, ReduceOp::Average)?.wait(Duration::from_secs(60))?;
    job.gradient_noise(32, 200)
}

/// The samples of each rank's next step, and its learning rate; asked by one rank, which tells the others.
fn choose_batch(client: &Client, job: &Communicator, noise: GradientNoise) -> Result<(u32, f64), Error> {
    let batch = BatchKnobs {
        samples: (96, 4096),
        micro: (8, 256),
        initial: 96,
        rule: LearningRate::AdaScale,
        square: noise.square,
        trace: noise.trace,
        pass: Duration::from_millis(2),
        sample: Duration::from_micros(100),
        exchange: Duration::from_millis(10),
    };
    let knobs = Knobs { accumulate: (1, 4), checkpoint: None };
    match client.iteration_with_batch(job.name(), &knobs, &batch)? {
        (choice, Some(batch)) => Ok((choice.accumulate * batch.micro, 0.1 * batch.learning_rate)),
        (_, None) => Ok((32, 0.1)),
    }
}

/// Joins the communicator of one of several jobs.
fn world(client: &Client, rank: Rank, ranks: u32) -> Result<Communicator, Error> {
    let options = JoinOptions { job: "run-17".into(), ..JoinOptions::default() };
    let world = client.join_with("world", rank, ranks, &options)?;
    assert_eq!(world.name(), "run-17/world");
    Ok(world)
}

/// Adds the gradients up where this process is the one that attached.
fn unless_forked(communicator: &Communicator, gradients: &Tensor) -> Result<(), Error> {
    match communicator.all_reduce_in_place(gradients, ReduceOp::Sum) {
        Err(Error::Forked) => println!("this worker was forked; attach in it"),
        started => drop(started?.wait(Duration::from_secs(30))?),
    }
    Ok(())
}

/// What one rank's calls gave.
pub(crate) struct Calls {
    /// What it has of a sum of ones after three sums.
    pub(crate) sum: f32,
    /// The noise of gradients that are one more than the rank.
    pub(crate) noise: Option<GradientNoise>,
    /// At rank 0: the samples and learning rate that follow.
    pub(crate) batch: Option<(u32, f64)>,
}

/// One rank's part in a job of its own.
pub(crate) fn calls(socket: &Path, rank: u32, ranks: u32) -> Result<Calls, Error> {
    let client = Client::attach(socket, AttachOptions::default())?;
    let world = world(&client, Rank(rank), ranks)?;
    let gradients = client.tensor(Dtype::F32, 1 << 16)?;
    gradients.write(0, &vec![1.0_f32; 1 << 16])?;
    for _ in 0..3 {
        unless_forked(&world, &gradients)?;
    }
    let mut sum = [0.0_f32];
    gradients.read((1 << 16) - 1, &mut sum)?;
    gradients.write(0, &vec![rank as f32 + 1.0; 1 << 16])?;
    let noise = average(&world, &gradients)?;
    let batch = noise.filter(|_| rank == 0).map(|noise| choose_batch(&client, &world, noise)).transpose()?;
    Ok(Calls { sum: sum[0], noise, batch })
}

/// Trains for some steps as one rank.
pub(crate) fn train(socket: &Path, rank: u32, ranks: u32, steps: u32) -> Result<TrainingReport, Error> {
    let client = Client::attach(socket, AttachOptions::default())?;
    let job = client.join("train", Rank(rank), ranks, Duration::from_secs(60))?;
    let mut events = client.events(None);
    let mut told = TrainingReport::default();
    if rank == 0 {
        told.agreement = agree(&client)?;
        hint(&client)?;
    }
    let (mut saved, gradients) = (Instant::now(), client.tensor(Dtype::F32, 1 << 16)?);
    for step in 0..steps {
        let warned = handle_events(&mut events)?;
        let (accumulate, checkpoint) = choose(&client, &job, saved)?;
        if checkpoint {
            // Save the model here.
            (saved, told.saved) = (Instant::now(), told.saved + 1);
        } else if warned {
            println!("the provider has said something, and chose to save later");
        }
        // Run `accumulate` micro-batches here, and add their gradients up.
        gradients.write(0, &vec![accumulate as f32; 1 << 16])?;
        sum(&job, &gradients, 1 + u64::from(step))?;
        told.batches += accumulate;
    }
    let mut sum = [0.0_f32];
    gradients.read(0, &mut sum)?;
    told.sum = sum[0];
    Ok(told)
}
