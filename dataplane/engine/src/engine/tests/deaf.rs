//! Peers that read nothing: their communicators end in time, with little memory, and others go on.

use super::common::{loopback, reduce};
use super::tap::{Hooks, Tap};
use super::{OTHER, OUTPUT, VICTIM, failures, statuses, submit, world};
use crate::{CommunicatorId, Engine, Epoch};
use harmonaize_abi::{OperationId, Rank, ReduceOp, Status, Submission};
use harmonaize_core::{Control, Failure, Header, Kind, MAX_MESSAGE, Message};
use harmonaize_transport::{LinkId, SendError, Transport};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// One link takes no frame.
struct Deaf(Arc<Mutex<Option<LinkId>>>);

impl Hooks for Deaf {
    fn has_room(&mut self, link: LinkId) -> bool {
        *self.0.lock().unwrap() != Some(link)
    }
}

/// Two engines; the first one's link of the communicator [`VICTIM`] takes nothing any more.
fn deaf() -> super::World {
    let link = Arc::new(Mutex::new(None));
    let wrapped = loopback(2).into_iter().enumerate().map(|(index, inner)| match index {
        0 => Box::new(Tap { inner, hooks: Deaf(Arc::clone(&link)) }) as Box<dyn Transport + Send>,
        _ => inner,
    });
    let world = world(wrapped.collect(), false);
    *link.lock().unwrap() = Some(link_of(&world.engines[0]));
    world
}

fn link_of(engine: &Engine) -> LinkId {
    let key = engine.by_communicator[&CommunicatorId(1)];
    let (link, _) = engine.links.iter().find(|(_, (of, ..))| *of == key).unwrap();
    *link
}

#[test]
fn a_peer_asking_without_end_ends_one_communicator() {
    let mut world = deaf();
    let control = Some(Box::new(Control::Inquire { operation: OperationId(0), count: None }));
    let question = Message { header: Header::new(Kind::Control, Epoch(1)), control };
    let mut buffer = [0; MAX_MESSAGE];
    let used = question.encode(&mut buffer);
    let link = link_of(&world.engines[1]);
    let mut sent = 0;
    while sent < 2000 {
        match world.engines[1].transport.send(link, 0, &buffer[..used], None) {
            Ok(()) => sent += 1,
            Err(SendError::Full) => {
                world.engines.iter_mut().for_each(|engine| {
                    engine.progress(64);
                });
            }
            Err(_) => break,
        }
    }
    world.until("the end", |world| !failures(world, 0).is_empty());
    assert_eq!(failures(&world, 0), [(1, Failure::Internal { ranks: vec![Rank(2)] })]);
    submit(&mut world, OTHER);
    assert_eq!(statuses(&mut world), [Status::Ok; 3]);
}

#[test]
fn a_deaf_peers_operation_ends_by_time_out() {
    const TIMEOUT: Duration = Duration::from_millis(300);
    let mut world = deaf();
    for tenant in &mut world.tenants {
        let call = reduce(ReduceOp::Sum, 20_000, 0, OUTPUT);
        let timeout_ns = TIMEOUT.as_nanos() as u64;
        tenant.end.submit(&Submission { communicator: VICTIM, timeout_ns, ..call }).unwrap();
    }
    let begun = Instant::now();
    let mut ended = [None; 2];
    world.until("the time-out", |world| {
        for (tenant, ended) in world.tenants.iter_mut().zip(&mut ended) {
            *ended = ended.or(tenant.end.completion().unwrap());
        }
        ended.iter().all(Option::is_some)
    });
    let took = begun.elapsed();
    assert!(took < TIMEOUT + Duration::from_secs(1), "{took:?}");
    let statuses = ended.map(|completion| Status::from_code(completion.unwrap().status));
    assert_eq!(statuses, [Some(Status::Timeout); 2]);
}
