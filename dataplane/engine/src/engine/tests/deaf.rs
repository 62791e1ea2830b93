//! Peers that read nothing: their communicators end in time, with little memory, and others go on.

use super::common::{loopback, reduce};
use super::{OTHER, OUTPUT, VICTIM, failures, statuses, submit, world};
use crate::{CommunicatorId, Engine, Epoch};
use harmonaize_abi::{OperationId, Rank, ReduceOp, Status, Submission};
use harmonaize_core::{Control, Failure, Header, Kind, MAX_MESSAGE, Message};
use harmonaize_shm::Span;
use harmonaize_transport::{DownReason, Event, Introduction, Landing, LinkId, Ring, SendError, Transport};
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Another transport, of which one link takes no frame.
struct Deaf {
    inner: Box<dyn Transport + Send>,
    link: Arc<Mutex<Option<LinkId>>>,
}

impl Transport for Deaf {
    fn local_address(&self) -> SocketAddr {
        self.inner.local_address()
    }

    fn open(&mut self, introduction: Introduction) -> Result<LinkId, DownReason> {
        self.inner.open(introduction)
    }

    fn attach_ring(&mut self, link: LinkId, ring: u16, memory: Ring) -> Result<(), DownReason> {
        self.inner.attach_ring(link, ring, memory)
    }

    fn send(
        &mut self,
        link: LinkId,
        path: u16,
        header: &[u8],
        payload: Option<(Landing, Span, u64)>,
    ) -> Result<(), SendError> {
        match *self.link.lock().unwrap() {
            Some(deaf) if deaf == link => Err(SendError::Full),
            _ => self.inner.send(link, path, header, payload),
        }
    }

    fn progress(&mut self, budget: usize, sink: &mut dyn FnMut(LinkId, Event<'_>)) -> usize {
        self.inner.progress(budget, sink)
    }

    fn close(&mut self, link: LinkId) {
        self.inner.close(link);
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wake_fd()
    }
}

/// Two engines; the first one's link of the communicator [`VICTIM`] takes nothing any more.
fn deaf() -> super::World {
    let link = Arc::new(Mutex::new(None));
    let wrapped = loopback(2).into_iter().enumerate().map(|(index, inner)| match index {
        0 => Box::new(Deaf { inner, link: Arc::clone(&link) }) as Box<dyn Transport + Send>,
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
fn a_peer_that_asks_without_end_and_reads_nothing_ends_its_communicator_alone() {
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
fn an_operation_with_a_peer_that_reads_nothing_ends_by_its_time_out() {
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
