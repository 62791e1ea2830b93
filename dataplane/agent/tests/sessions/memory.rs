//! Memory beside the arena: arenas that grow, memory that the process has already, and processes that mean ill.

use crate::hostile::{attach, good, works};
use crate::stub::{LIMIT, Stub, until};
use harmonaize_abi as abi;
use harmonaize_abi::session::{AddedRegion, Answer, Request, decode, encode};
use harmonaize_client::{
    Access, AttachOptions, Client, Communicator, Dtype, Error, Rank, ReduceOp, Region, RegionRefused, Tensor,
};
use harmonaize_shm::{MappedTenant, Memory, TenantEnd, receive_with_descriptors, send_with_descriptors};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::{RecvFlags, SendFlags};
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;

const PAGE: u64 = 4096;
const ARENA: u64 = 1 << 20;

/// A memfd of so many pages, sealed so.
pub(crate) fn memfd(pages: u64, seals: SealFlags) -> OwnedFd {
    let fd = rustix::fs::memfd_create("tensors", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&fd, pages * PAGE).unwrap();
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    fd
}

fn attached(stub: &Stub) -> (Client, Communicator) {
    let client = Client::attach(&stub.path, stub.options(Access::Mapped)).unwrap();
    let comm = client.join("job", Rank(0), 1, LIMIT).unwrap();
    (client, comm)
}

fn copies(comm: &Communicator, input: &Tensor, output: &Tensor) {
    let expected: Vec<u64> = (0..input.elements()).map(|i| i * 3 + 1).collect();
    input.write(0, &expected).unwrap();
    comm.all_reduce(input, output, ReduceOp::Sum).unwrap().wait(LIMIT).unwrap();
    let mut found = vec![0_u64; expected.len()];
    output.read(0, &mut found).unwrap();
    assert_eq!(found, expected);
}

fn region_refused<T: std::fmt::Debug>(result: Result<T, Error>) -> RegionRefused {
    match result.unwrap_err() {
        Error::Region(refused) | Error::NoRoom { refused: Some(refused), .. } => refused,
        other => panic!("{other}"),
    }
}

#[test]
fn a_full_arena_doubles_and_tensors_go_on() {
    let stub = Stub::start();
    let (client, comm) = attached(&stub);
    let kept: Vec<Tensor> = (0..24).map(|_| client.tensor(Dtype::U64, 16 << 10).unwrap()).collect();
    // 3 MiB of tensors: 1 MiB, and twice as much again.
    assert_eq!(client.arena_bytes().unwrap(), 4 * ARENA);
    for pair in kept.windows(2) {
        copies(&comm, &pair[0], &pair[1]);
    }
    // More than twice all there is.
    let large = client.tensor(Dtype::U64, (ARENA * 9) / 8).unwrap();
    assert_eq!(client.arena_bytes().unwrap(), 13 * ARENA);
    copies(&comm, &large, &client.tensor(Dtype::U64, large.elements()).unwrap());
    let bytes = client.arena_bytes().unwrap();
    drop((kept, large));
    let again: Vec<Tensor> = (0..24).map(|_| client.tensor(Dtype::U64, 16 << 10).unwrap()).collect();
    copies(&comm, &again[0], &again[23]);
    assert_eq!(client.arena_bytes().unwrap(), bytes, "what was given back is used again");
    client.grow(5 * ARENA).unwrap();
    assert_eq!(client.arena_bytes().unwrap(), bytes + 5 * ARENA);
}

#[test]
fn growth_ends_at_the_quota_and_at_what_the_process_said() {
    let stub = Stub::with(|rules| rules.quota.arena_bytes = 3 * ARENA);
    let (client, comm) = attached(&stub);
    let first = client.tensor(Dtype::U8, ARENA).unwrap();
    let second = client.tensor(Dtype::U8, ARENA).unwrap();
    // To double is too much, the tensor alone is not.
    let third = client.tensor(Dtype::U8, ARENA).unwrap();
    assert_eq!(client.arena_bytes().unwrap(), 3 * ARENA);
    let limit = 3 * ARENA;
    let error = client.tensor(Dtype::U8, 1).unwrap_err();
    let Error::NoRoom { refused, .. } = error else { panic!("{error}") };
    assert_eq!(refused, Some(RegionRefused::Bytes { asked: 1, left: 0, limit }));
    let explicit = region_refused(client.grow(PAGE + 1));
    assert_eq!(explicit, RegionRefused::Bytes { asked: 2 * PAGE, left: 0, limit });
    assert_eq!(region_refused(client.grow(0)), RegionRefused::Size);
    assert_eq!(region_refused(client.grow(u64::MAX)), RegionRefused::Size);
    let registered = region_refused(client.register(memfd(1, SealFlags::SHRINK), 0..PAGE));
    assert_eq!(registered, RegionRefused::Bytes { asked: PAGE, left: 0, limit });
    drop((first, second, third, client, comm));
    // Comes free when the session is over.
    let options = AttachOptions { max_arena_bytes: 2 * ARENA, ..stub.options(Access::Mapped) };
    let client = until(|| Client::attach(&stub.path, options.clone()));
    let _full = client.tensor(Dtype::U8, 2 * ARENA - 4096).unwrap_err();
    let _half = client.tensor(Dtype::U8, ARENA).unwrap();
    let _rest = client.tensor(Dtype::U8, ARENA).unwrap();
    assert!(matches!(client.tensor(Dtype::U8, 1), Err(Error::NoRoom { refused: None, .. })));
    assert_eq!(client.arena_bytes().unwrap(), 2 * ARENA);
}

#[test]
fn threads_that_find_no_room_grow_the_arena_once() {
    let stub = Stub::start();
    let (client, comm) = attached(&stub);
    let _full = client.tensor(Dtype::U8, ARENA).unwrap();
    let tensors: Vec<Tensor> = std::thread::scope(|scope| {
        let take = || client.tensor(Dtype::U64, 1000).unwrap();
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(take)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(client.arena_bytes().unwrap(), 2 * ARENA);
    copies(&comm, &tensors[0], &tensors[7]);
}

#[test]
fn tensors_lie_in_the_processs_own_memfd() {
    let stub = Stub::start();
    let (client, comm) = attached(&stub);
    let fd = memfd(8, SealFlags::SHRINK);
    let region: Region = client.register(&fd, PAGE..5 * PAGE).unwrap();
    assert_eq!(region.bytes(), 4 * PAGE);
    let (input, output) =
        (region.tensor(Dtype::U64, 0, 1000).unwrap(), region.tensor(Dtype::U64, 2 * PAGE + 8, 1000).unwrap());
    copies(&comm, &input, &output);
    let mut last = [0; 8];
    rustix::io::pread(&fd, &mut last, 3 * PAGE + 8 + 999 * 8).unwrap();
    assert_eq!(u64::from_ne_bytes(last), 999 * 3 + 1, "where the program's own mapping has it");
    copies(&comm, &input, &client.tensor(Dtype::U64, 1000).unwrap());
    copies(&comm, &input.slice(1..9).unwrap(), &output.slice(7..15).unwrap());
    // The file may grow and be registered further; what is there is refused.
    rustix::fs::ftruncate(&fd, 9 * PAGE).unwrap();
    let _more = client.register(&fd, 5 * PAGE..9 * PAGE).unwrap();
    let _first = client.register(&fd, 0..PAGE).unwrap();
    assert_eq!(region_refused(client.register(&fd, 4 * PAGE..6 * PAGE)), RegionRefused::Overlap);
    assert_eq!(region_refused(client.register(&fd, 0..9 * PAGE)), RegionRefused::Overlap);
    assert!(
        region.tensor(Dtype::U64, 4 * PAGE - 8, 1).is_ok() && region.tensor(Dtype::U8, 4 * PAGE, 0).is_ok()
    );
    for (offset, elements) in [(4 * PAGE - 8, 2), (4 * PAGE, 1), (0, u64::MAX), (u64::MAX - 7, 1)] {
        let error = region.tensor(Dtype::U64, offset, elements).unwrap_err();
        assert!(matches!(error, Error::Memory(_)), "{offset}: {error}");
    }
    assert!(matches!(region.tensor(Dtype::U64, 4, 1), Err(Error::Shape(_))));
}

#[test]
fn a_region_goes_when_its_last_user_does() {
    let stub = Stub::start();
    let (client, comm) = attached(&stub);
    let fd = memfd(4, SealFlags::SHRINK);
    let region = client.register(&fd, 0..PAGE).unwrap();
    let tensor = region.tensor(Dtype::U64, 0, 100).unwrap();
    // With an operation in flight on a tensor that nobody has any more.
    stub.knobs.hold.store(true, Ordering::Relaxed);
    let mut operation = comm.all_reduce_in_place(&tensor, ReduceOp::Sum).unwrap();
    drop((region, tensor));
    assert!(matches!(client.register(&fd, 0..PAGE), Err(Error::Region(RegionRefused::Overlap))));
    stub.knobs.hold.store(false, Ordering::Relaxed);
    operation.wait(LIMIT).unwrap();
    stub.knobs.expect("gone");
    stub.knobs.log.lock().unwrap().clear();
    // At once, and waited for.
    let region = client.register(&fd, 0..PAGE).unwrap();
    region.unregister().unwrap();
    let region = client.register(&fd, 0..PAGE).unwrap();
    let tensor = region.tensor(Dtype::U64, 0, 100).unwrap();
    assert_eq!(region_refused(region.unregister()), RegionRefused::InUse);
    copies(&comm, &tensor.slice(..50).unwrap(), &tensor.slice(50..).unwrap());
    stub.knobs.log.lock().unwrap().clear();
    drop(tensor);
    stub.knobs.expect("gone");
    // With the attachment, which lasts as long as a tensor.
    let region = client.register(&fd, 0..PAGE).unwrap();
    let tensor = region.tensor(Dtype::U64, 0, 1).unwrap();
    drop((client, comm, operation));
    tensor.write(0, &[5_u64]).unwrap();
    drop(tensor);
    region.unregister().unwrap();
    stub.knobs.expect("detached");
}

#[test]
fn what_cannot_be_mapped_safely_is_refused_with_its_reason() {
    let stub = Stub::start();
    let (client, _comm) = attached(&stub);
    let of = |fd: &OwnedFd| region_refused(client.register(fd, 0..PAGE));
    assert_eq!(of(&memfd(1, SealFlags::empty())), RegionRefused::Shrinkable);
    assert_eq!(of(&memfd(1, SealFlags::SHRINK | SealFlags::WRITE)), RegionRefused::ReadOnly);
    let file: OwnedFd = tempfile::tempfile().unwrap().into();
    rustix::fs::ftruncate(&file, PAGE).unwrap();
    assert!(matches!(of(&file), RegionRefused::NotMemfd | RegionRefused::Shrinkable));
    let fd = memfd(2, SealFlags::SHRINK);
    assert_eq!(region_refused(client.register(&fd, 1..PAGE + 1)), RegionRefused::Unaligned { page: PAGE });
    assert_eq!(region_refused(client.register(&fd, 0..3 * PAGE)), RegionRefused::Beyond { size: 2 * PAGE });
    assert_eq!(region_refused(client.register(&fd, 0..0)), RegionRefused::Size);
    #[expect(clippy::reversed_empty_ranges, reason = "it is refused")]
    let backwards = PAGE..0;
    assert_eq!(region_refused(client.register(&fd, backwards)), RegionRefused::Size);
    works(&client);
}

#[test]
fn attachments_that_are_not_mapped_keep_one_region() {
    let stub = Stub::start();
    for access in [Access::Remote, Access::Rdma] {
        let client = Client::attach(&stub.path, stub.options(access)).unwrap();
        assert_eq!(region_refused(client.grow(PAGE)), RegionRefused::Access);
        let fd = memfd(1, SealFlags::SHRINK);
        assert_eq!(region_refused(client.register(&fd, 0..PAGE)), RegionRefused::Access);
        let _all = client.tensor(Dtype::U8, ARENA).unwrap();
        assert!(matches!(client.tensor(Dtype::U8, 1), Err(Error::NoRoom { refused: None, .. })));
    }
}

/// A process that speaks the protocol by hand.
struct Raw(UnixStream);

impl Raw {
    fn attach(stub: &Stub) -> (Self, Vec<OwnedFd>) {
        let (stream, descriptors) = attach(stub, Access::Mapped);
        (Self(stream), descriptors)
    }

    fn send(&mut self, request: &Request, descriptors: &[BorrowedFd<'_>]) {
        let message = encode(request).unwrap();
        let sent = send_with_descriptors(self.0.as_fd(), &message, descriptors, SendFlags::empty()).unwrap();
        assert_eq!(sent, message.len());
    }

    /// The next answer, and what came with it; none when the agent has ended the session.
    fn answer(&mut self) -> Option<(Answer, Vec<OwnedFd>)> {
        let (mut prefix, mut descriptors) = ([0; 4], Vec::new());
        let mut filled = 0;
        while filled < 4 {
            let (got, came) =
                receive_with_descriptors(self.0.as_fd(), &mut prefix[filled..], RecvFlags::empty()).ok()?;
            descriptors.extend(came);
            filled += got;
            if got == 0 {
                return None;
            }
        }
        let mut message = vec![0; u32::from_le_bytes(prefix) as usize];
        self.0.read_exact(&mut message).ok()?;
        Some((decode(&message).unwrap(), descriptors))
    }

    fn register(
        &mut self,
        descriptors: &[BorrowedFd<'_>],
        offset: u64,
        bytes: u64,
    ) -> Result<AddedRegion, RegionRefused> {
        self.send(&Request::Register { id: 7, offset, bytes }, descriptors);
        let (answer, came) = self.answer().unwrap();
        let Answer::Registered { id: 7, added } = answer else { panic!("{answer:?}") };
        assert!(came.is_empty());
        added
    }

    fn unregister(&mut self, base: u64) -> Option<RegionRefused> {
        self.send(&Request::Unregister { id: 8, base }, &[]);
        let (answer, _) = self.answer().unwrap();
        let Answer::Unregistered { id: 8, refused } = answer else { panic!("{answer:?}") };
        refused
    }

    fn grow(&mut self, bytes: u64) -> Result<AddedRegion, RegionRefused> {
        self.send(&Request::Grow { id: 9, bytes }, &[]);
        let (answer, came) = self.answer().unwrap();
        let Answer::Grown { id: 9, added } = answer else { panic!("{answer:?}") };
        assert_eq!(came.len(), usize::from(added.is_ok()));
        if let (Ok(place), Some(memfd)) = (added, came.into_iter().next()) {
            Memory::map(memfd, place.bytes).unwrap();
        }
        added
    }
}

#[test]
fn the_agent_looks_at_every_descriptor_itself() {
    let stub = Stub::start();
    let client = good(&stub);
    let (mut raw, descriptors) = Raw::attach(&stub);
    let right = memfd(2, SealFlags::SHRINK);
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&right));
    let reading = rustix::fs::open(&path, rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty()).unwrap();
    let pipe = rustix::pipe::pipe().unwrap().0;
    let future = memfd(1, SealFlags::SHRINK | SealFlags::FUTURE_WRITE);
    for (fd, offset, bytes, why) in [
        (None, 0, PAGE, RegionRefused::NoDescriptor),
        (Some(&memfd(1, SealFlags::empty())), 0, PAGE, RegionRefused::Shrinkable),
        (Some(&memfd(1, SealFlags::GROW)), 0, PAGE, RegionRefused::Shrinkable),
        (Some(&future), 0, PAGE, RegionRefused::ReadOnly),
        (Some(&reading), 0, PAGE, RegionRefused::ReadOnly),
        (Some(&pipe), 0, PAGE, RegionRefused::NotMemfd),
        (Some(&right), 8, PAGE, RegionRefused::Unaligned { page: PAGE }),
        (Some(&right), 0, PAGE + 8, RegionRefused::Unaligned { page: PAGE }),
        (Some(&right), 0, 0, RegionRefused::Size),
        (Some(&right), PAGE, 2 * PAGE, RegionRefused::Beyond { size: 2 * PAGE }),
        (Some(&right), u64::MAX - PAGE + 1, PAGE, RegionRefused::Beyond { size: 2 * PAGE }),
    ] {
        let fds: Vec<_> = fd.into_iter().map(AsFd::as_fd).collect();
        assert_eq!(raw.register(&fds, offset, bytes), Err(why));
    }
    let huge = u64::MAX - PAGE + 1;
    let Err(RegionRefused::Bytes { asked, .. }) = raw.register(&[right.as_fd()], 0, huge) else { panic!() };
    assert_eq!(asked, huge);
    // Even the agent's own memfds are but memfds.
    let arena = raw.register(&[descriptors[0].as_fd()], 0, PAGE).unwrap();
    let place = raw.register(&[right.as_fd()], 0, PAGE).unwrap();
    assert!(place.base > arena.base && place.base % PAGE == 0 && arena.base > 1 << 16, "a page apart");
    assert_eq!(raw.register(&[right.as_fd()], 0, 2 * PAGE), Err(RegionRefused::Overlap));
    for base in [0, 1, arena.base + 1, u64::MAX] {
        assert_eq!(raw.unregister(base), Some(RegionRefused::Unknown));
    }
    assert_eq!(raw.unregister(place.base), None);
    assert_eq!(raw.unregister(place.base), Some(RegionRefused::Unknown));
    let again = raw.register(&[right.as_fd()], 0, 2 * PAGE).unwrap();
    assert!(again.base > place.base, "an offset names nothing twice");
    // It cannot shrink any more under whoever has mapped it.
    assert!(rustix::fs::ftruncate(&right, 0).is_err());
    assert_eq!(raw.grow(1).unwrap().bytes, PAGE);
    works(&client);
}

#[test]
fn regions_are_counted_and_come_free() {
    let stub = Stub::with(|rules| rules.quota.regions = 40);
    let client = good(&stub);
    let (mut raw, _descriptors) = Raw::attach(&stub);
    let fd = memfd(4000, SealFlags::SHRINK);
    let mut places = Vec::new();
    for page in 0..4000 {
        match raw.register(&[fd.as_fd()], page * PAGE, PAGE) {
            Ok(place) => places.push(place),
            Err(refused) => assert_eq!(refused, RegionRefused::Regions { limit: 40 }),
        }
    }
    assert_eq!(places.len(), 40);
    assert_eq!(raw.grow(1), Err(RegionRefused::Regions { limit: 40 }));
    assert_eq!(region_refused(client.grow(1)), RegionRefused::Regions { limit: 40 }, "the same tenant's");
    assert_eq!(raw.unregister(places[20].base), None);
    raw.grow(1).unwrap();
    drop(raw);
    stub.knobs.expect("detached 2");
    // What a process had comes free when it dies.
    until(|| client.grow(1));
    works(&client);
}

#[test]
fn descriptors_that_belong_to_nothing_end_the_session() {
    let stub = Stub::start();
    let client = good(&stub);
    let fd = memfd(1, SealFlags::SHRINK);
    let four = [fd.as_fd(); 4];
    let (mut raw, _descriptors) = Raw::attach(&stub);
    let leave = Request::Leave { id: 1, communicator: 99 };
    raw.send(&leave, &four);
    assert!(raw.answer().is_some(), "few are let be");
    raw.send(&leave, &four);
    while raw.answer().is_some() {}
    // More than a message may have are cut off by the kernel.
    let (raw, _descriptors) = Raw::attach(&stub);
    let most = vec![fd.as_fd(); 200];
    let mut space = vec![std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(200))];
    let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
    assert!(control.push(rustix::net::SendAncillaryMessage::ScmRights(&most)));
    let bytes = encode(&leave).unwrap();
    let bytes = [std::io::IoSlice::new(&bytes)];
    rustix::net::sendmsg(&raw.0, &bytes, &mut control, SendFlags::empty()).unwrap();
    stub.knobs.expect("detached 3");
    // A register request in two halves keeps its descriptor.
    let (mut raw, _descriptors) = Raw::attach(&stub);
    let message = encode(&Request::Register { id: 7, offset: 0, bytes: PAGE }).unwrap();
    send_with_descriptors(raw.0.as_fd(), &message[..5], &[fd.as_fd()], SendFlags::empty()).unwrap();
    raw.0.write_all(&message[5..]).unwrap();
    let Some((Answer::Registered { added: Ok(_), .. }, _)) = raw.answer() else { panic!() };
    // It dies with a registration under way.
    raw.send(&Request::Grow { id: 1, bytes: PAGE }, &[]);
    raw.send(&Request::Register { id: 2, offset: 0, bytes: PAGE }, &[memfd(1, SealFlags::SHRINK).as_fd()]);
    drop(raw);
    stub.knobs.expect("detached 4");
    works(&client);
}

#[test]
fn who_asks_too_early_keeps_a_region_that_is_in_use() {
    let stub = Stub::start();
    let (mut raw, descriptors) = Raw::attach(&stub);
    let mut end = MappedTenant::open(descriptors.try_into().unwrap(), 1 << 16, 4).unwrap();
    let place = raw.register(&[memfd(1, SealFlags::SHRINK).as_fd()], 0, PAGE).unwrap();
    stub.knobs.hold.store(true, Ordering::Relaxed);
    let tensor = abi::Region { offset: place.base, bytes: PAGE };
    let submission = abi::Submission { input: tensor, output: tensor, ..abi::Submission::default() };
    end.submit(&submission).unwrap();
    stub.knobs.until_taken(1);
    assert_eq!(raw.unregister(place.base), Some(RegionRefused::InUse));
    stub.knobs.hold.store(false, Ordering::Relaxed);
    let completion = until(|| end.completion().unwrap().ok_or("none yet"));
    assert_eq!(completion.status, 0);
    assert_eq!(raw.unregister(place.base), None);
    end.submit(&submission).unwrap();
    let completion = until(|| end.completion().unwrap().ok_or("none yet"));
    assert_eq!(completion.status, abi::Status::OutOfRange.code());
}

/// Pages that a memfd has.
fn pages_of(memfd: impl AsFd) -> i64 {
    rustix::fs::fstat(memfd).unwrap().st_blocks * 512 / PAGE as i64
}

#[test]
fn memory_of_a_gone_process_is_free() {
    const RAW_ARENA: u64 = 1 << 16;
    let stub = Stub::with(|rules| rules.quota.arena_bytes = RAW_ARENA);
    let (stream, descriptors) = attach(&stub, Access::Mapped);
    let arena = Memory::map(descriptors[0].try_clone().unwrap(), RAW_ARENA).unwrap();
    arena.write(0, &[1; RAW_ARENA as usize]).unwrap();
    assert_eq!(pages_of(&descriptors[0]), (RAW_ARENA / PAGE) as i64);
    drop(stream);
    stub.knobs.expect("detached 1");
    // It has the whole quota, which is given back after the memory.
    let (_stream, _descriptors) = attach(&stub, Access::Mapped);
    assert_eq!(pages_of(&descriptors[0]), 0);
    let mut first = [1; 8];
    arena.read(0, &mut first).unwrap();
    assert_eq!(first, [0; 8]);
}

#[test]
fn tensors_keep_what_is_in_them_when_the_client_is_gone() {
    let stub = Stub::start();
    let (client, comm) = attached(&stub);
    let [input, output] = [0; 2].map(|_| client.tensor(Dtype::U64, 100).unwrap());
    copies(&comm, &input, &output);
    drop((input, comm, client));
    // A later attachment has been served, and this one is there still.
    let other = good(&stub);
    works(&other);
    drop(other);
    stub.knobs.expect("detached 2");
    let mut found = vec![0_u64; 100];
    output.read(0, &mut found).unwrap();
    assert_eq!((found[0], found[99]), (1, 298));
    drop(output);
    stub.knobs.expect("detached 1");
}
