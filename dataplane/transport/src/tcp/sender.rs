//! A thread beside the endpoint's that seals and writes what a large operation has queued. So the endpoint's thread receives, adds
//! up and copies meanwhile.
//!
//! The endpoint lends it a path whose queue is long. It writes until the path has nothing to send for a moment, and then gives it
//! back. Paths of one owner alone are lent at a time: who else sends goes by the endpoint's thread as ever, and shares that by weight. What passes
//! between the two lies in the path's [`Loan`]; a path that is not lent is touched by no other thread and wakes none.

use super::awaited::Arrivals;
use super::bell::Bell;
use super::outbox::Outbox;
use super::path::{Path, reason};
use super::pulse::Pulse;
use crate::{DownReason, Event, Landing, LinkId, MAX_HEADER, Owner, SendError};
use arrayvec::ArrayVec;
use harmonaize_abi::Tag;
use harmonaize_shm::Span;
use rustix::event::{PollFd, PollFlags};
use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Most paths that are lent at once.
const MAX_LENT: usize = 64;
/// Most frames that wait beside the queue of a path that is lent.
pub(super) const FRAMES: usize = 32;
/// How long the thread polls for more to send before it gives paths back or sleeps. It sleeps until a connection takes
/// more.
const LINGER: Duration = Duration::from_micros(100);

/// What the endpoint and the sender have for each other of one path. Locked for moments only, and after the path's queue where both are.
#[derive(Debug)]
pub(super) struct Loan {
    /// The path is the sender's to write.
    lent: bool,
    /// The link has ended: nothing is to be written.
    closed: bool,
    /// Why the sender could not write.
    broken: Option<DownReason>,
    /// Frames that were queued since, in order.
    frames: VecDeque<Frame>,
    /// Tags of payloads that were written since.
    sent: Vec<Tag>,
}

#[derive(Debug)]
struct Frame {
    header: ArrayVec<u8, MAX_HEADER>,
    payload: Option<(Landing, Span, Tag)>,
}

impl Loan {
    /// Room for what a path that queues so many frames may need; none where nothing is ever lent.
    pub(super) fn new(queue_frames: Option<usize>) -> Self {
        let (frames, sent) = queue_frames.map_or((0, 0), |queued| (FRAMES, queued + 2 * FRAMES));
        let (frames, sent) = (VecDeque::with_capacity(frames), Vec::with_capacity(sent));
        Self { lent: false, closed: false, broken: None, frames, sent }
    }

    pub(super) fn is_lent(&self) -> bool {
        self.lent
    }

    /// Queues a frame of a path that is lent.
    pub(super) fn push(
        &mut self,
        header: &[u8],
        payload: Option<(Landing, Span, Tag)>,
    ) -> Result<(), SendError> {
        let too_long = payload.as_ref().is_some_and(|(_, span, _)| u32::try_from(span.bytes()).is_err());
        let Some(header) = ArrayVec::try_from(header).ok().filter(|_| !too_long) else {
            return Err(SendError::Invalid);
        };
        // Tokens are taken before more frames are.
        if self.frames.len() + self.sent.len() >= FRAMES {
            return Err(SendError::Full);
        }
        self.frames.push_back(Frame { header, payload });
        Ok(())
    }

    /// Nothing is written any more, but what is being written just now.
    pub(super) fn stop(&mut self) {
        self.closed = true;
    }

    /// Nothing is written any more. The frames without payload that wait, as they would be sent.
    pub(super) fn close(&mut self) -> Vec<u8> {
        self.closed = true;
        let mut bytes = Vec::new();
        for frame in self.frames.drain(..).filter(|frame| frame.payload.is_none()) {
            Outbox::encode(&frame.header, &mut bytes);
        }
        bytes
    }

    /// Moves frames to the path's queue while that has room.
    fn refill(&mut self, outbox: &mut Outbox) {
        while outbox.has_room()
            && let Some(Frame { header, payload }) = self.frames.pop_front()
        {
            let pushed = outbox.push(&header, payload);
            debug_assert_eq!(pushed, Ok(()), "it was checked, and there is room");
        }
    }
}

/// The endpoint's side.
#[derive(Debug)]
pub(super) struct SenderThread {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    /// Bytes that a path must have queued to be lent.
    least: usize,
    /// What is lent, all of one owner's.
    lent: Vec<(LinkId, u16)>,
    owner: Option<Owner>,
    /// The sender was asked to ring.
    sleeping: bool,
}

#[derive(Debug)]
struct Shared {
    requests: Mutex<Requests>,
    /// Wakes the sender.
    bell: Bell,
    /// A loan has something for the endpoint.
    news: AtomicBool,
    /// The endpoint sleeps: news are rung.
    asleep: AtomicBool,
    arrivals: Arc<Arrivals>,
}

#[derive(Debug)]
struct Requests {
    lent: Vec<Arc<Pulse>>,
    asleep: bool,
    over: bool,
}

impl SenderThread {
    /// Starts the thread, which sleeps until something is lent to it.
    pub(super) fn start(least: usize, arrivals: &Arc<Arrivals>) -> io::Result<Self> {
        let requests = Requests { lent: Vec::with_capacity(MAX_LENT), asleep: false, over: false };
        let shared = Arc::new(Shared {
            requests: Mutex::new(requests),
            bell: Bell::new()?,
            news: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            arrivals: Arc::clone(arrivals),
        });
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("sender".into()).spawn(move || theirs.run())?;
        let lent = Vec::with_capacity(MAX_LENT);
        Ok(Self { shared, thread: Some(thread), least, lent, owner: None, sleeping: false })
    }

    /// Lends a path that has enough to send, unless another owner's are lent.
    pub(super) fn consider(&mut self, id: LinkId, number: u16, path: &mut Path, owner: Option<Owner>) {
        if !path.has_queued(self.least)
            || self.lent.len() >= MAX_LENT
            || !self.lent.is_empty() && owner != self.owner
        {
            return;
        }
        self.owner = owner;
        self.lent.push((id, number));
        path.lent = true;
        path.pulse.loan().lent = true;
        let mut requests = self.shared.requests();
        requests.lent.push(Arc::clone(&path.pulse));
        self.shared.wake(requests);
    }

    /// Whether something is lent of which there are news, once for each.
    pub(super) fn has_news(&mut self) -> bool {
        if std::mem::take(&mut self.sleeping) {
            self.shared.asleep.store(false, Ordering::SeqCst);
        }
        !self.lent.is_empty()
            && self.shared.news.load(Ordering::Relaxed)
            && self.shared.news.swap(false, Ordering::SeqCst)
    }

    /// What is lent. Whoever finds that a path no longer is takes it out.
    pub(super) fn lent(&mut self) -> &mut Vec<(LinkId, u16)> {
        &mut self.lent
    }

    /// The endpoint is about to sleep; false if there are news.
    pub(super) fn prepare_sleep(&mut self) -> bool {
        if self.lent.is_empty() {
            return true;
        }
        self.sleeping = true;
        self.shared.asleep.store(true, Ordering::SeqCst);
        !self.shared.news.load(Ordering::SeqCst)
    }

    /// A link ends, whose loans are closed: the sender is to let go of them.
    pub(super) fn forget(&mut self, id: LinkId) {
        let before = self.lent.len();
        self.lent.retain(|(link, _)| *link != id);
        if self.lent.len() < before {
            self.shared.wake(self.shared.requests());
        }
    }
}

impl Drop for SenderThread {
    fn drop(&mut self) {
        let mut requests = self.shared.requests();
        requests.over = true;
        self.shared.wake(requests);
        // It waits for nothing but its bell and connections.
        self.thread.take().map(JoinHandle::join);
    }
}

impl Path {
    /// Reports what the sender has written, and takes the path back if it has ended.
    pub(super) fn collect(&mut self, sink: &mut dyn FnMut(Event<'_>)) -> usize {
        let mut loan = self.pulse.loan();
        let done = loan.sent.len();
        loan.sent.drain(..).for_each(|tag| sink(Event::Sent { tag }));
        if !loan.lent {
            self.lent = false;
            if let Some(reason) = loan.broken.take() {
                drop(loan);
                self.fail_writing(reason);
            }
        }
        done
    }
}

/// How it goes on with a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// There may be more to write.
    Write,
    /// The connection takes nothing for now.
    Blocked,
    /// There is nothing to write.
    Idle,
    /// It is the endpoint's again, or its link's end.
    Over,
}

impl Shared {
    fn requests(&self) -> MutexGuard<'_, Requests> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self, mut requests: MutexGuard<'_, Requests>) {
        if std::mem::take(&mut requests.asleep) {
            self.bell.ring();
        }
    }

    fn announce(&self) {
        self.news.store(true, Ordering::SeqCst);
        if self.asleep.swap(false, Ordering::SeqCst) {
            self.arrivals.bell().ring();
        }
    }

    fn run(&self) {
        let mut paths: Vec<(Arc<Pulse>, Next)> = Vec::with_capacity(2 * MAX_LENT);
        let mut idle_since: Option<Instant> = None;
        loop {
            let mut requests = self.requests();
            if requests.over {
                return;
            }
            paths.extend(requests.lent.drain(..).map(|pulse| (pulse, Next::Write)));
            drop(requests);
            for (pulse, next) in &mut paths {
                *next = self.serve(pulse);
            }
            paths.retain(|(_, next)| *next != Next::Over);
            if paths.iter().any(|(_, next)| *next == Next::Write) {
                idle_since = None;
                continue;
            }
            if !paths.is_empty() && idle_since.get_or_insert_with(Instant::now).elapsed() < LINGER {
                std::thread::yield_now();
                continue;
            }
            idle_since = None;
            paths.retain(|(pulse, next)| *next == Next::Blocked || !self.give_back(pulse));
            if paths.iter().all(|(_, next)| *next == Next::Blocked) {
                self.sleep(&paths);
            }
        }
    }

    /// One write at most. A panic ends the path's link, and nothing else.
    fn serve(&self, pulse: &Pulse) -> Next {
        let mut outbox = pulse.outbox();
        let mut loan = pulse.loan();
        if loan.closed {
            return Next::Over;
        }
        loan.refill(&mut outbox);
        drop(loan);
        if outbox.is_empty() {
            return Next::Idle;
        }
        let mut news = false;
        let mut sent = |tag| {
            news = true;
            pulse.loan().sent.push(tag);
        };
        let written = catch_unwind(AssertUnwindSafe(|| outbox.write(pulse.socket.as_fd(), &mut sent)));
        if written.is_err() {
            outbox.close();
        }
        drop(outbox);
        if news {
            self.announce();
        }
        let broken = match written {
            Ok(Ok((bytes, all))) => {
                pulse.note_write(bytes);
                return if all { Next::Write } else { Next::Blocked };
            }
            Ok(Err(error)) if error.kind() == io::ErrorKind::WouldBlock => return Next::Blocked,
            Ok(Err(error)) => reason(&error),
            Err(_) => DownReason::Network("the sender panicked".into()),
        };
        let mut loan = pulse.loan();
        (loan.lent, loan.broken) = (false, Some(broken));
        drop(loan);
        self.announce();
        Next::Over
    }

    /// Gives a path back, unless it has got frames meanwhile.
    fn give_back(&self, pulse: &Pulse) -> bool {
        let outbox = pulse.outbox();
        let mut loan = pulse.loan();
        let over = loan.closed || outbox.is_empty() && loan.frames.is_empty();
        loan.lent &= !over;
        drop((loan, outbox));
        if over {
            self.announce();
        }
        over
    }

    /// Sleeps until something is lent or a connection takes more.
    fn sleep(&self, blocked: &[(Arc<Pulse>, Next)]) {
        let mut requests = self.requests();
        if requests.over || !requests.lent.is_empty() || blocked.iter().any(|(pulse, _)| pulse.loan().closed)
        {
            return;
        }
        requests.asleep = true;
        drop(requests);
        let mut fds = ArrayVec::<PollFd<'_>, { 2 * MAX_LENT + 1 }>::new();
        fds.push(PollFd::new(&self.bell, PollFlags::IN));
        let sockets = blocked.iter().map(|(pulse, _)| PollFd::new(&pulse.socket, PollFlags::OUT));
        fds.extend(sockets.take(2 * MAX_LENT));
        // Interrupted: what is ready shows in the next round.
        let _ = rustix::event::poll(&mut fds, None);
        self.requests().asleep = false;
        self.bell.silence();
    }
}

#[cfg(test)]
mod tests {
    use crate::tcp::{Config, LinkProtection, TcpTransport};
    use crate::{Event, Introduction, Landing, LinkId, Owner, Ring, Transport};
    use harmonaize_abi::{CommunicatorId, Tag};
    use harmonaize_shm::{Memory, Span};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::{Duration, Instant};

    const SLOT: u32 = 1 << 20;
    const SLOTS: u32 = 32;
    const PROTECTIONS: [LinkProtection; 2] = [LinkProtection::None, LinkProtection::Authenticated];

    fn until(what: &str, mut holds: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !holds() {
            assert!(Instant::now() < deadline, "not within 20 s: {what}");
        }
    }

    /// An endpoint that lends, one that takes in, and so many links between them.
    fn linked(protection: LinkProtection, count: u8) -> ([TcpTransport; 2], Vec<LinkId>) {
        let config = Config { protection, ..Config::new("127.0.0.1:0".parse().unwrap()) };
        let a = TcpTransport::bind(Config { sender_bytes: Some(SLOT as usize), ..config.clone() });
        let mut ends = [a.unwrap(), TcpTransport::bind(config).unwrap()];
        let addresses = [1, 0].map(|other: usize| ends[other].local_address());
        let mut links = Vec::new();
        for name in 0..count {
            for (end, peer) in ends.iter_mut().zip(addresses) {
                let (initiate, source_ports) = (links.len() % 2 == 0, vec![0]);
                let name = [name; 16];
                let (secret, over_tcp) = ([2; 32], false);
                let introduction = Introduction { name, secret, peer, initiate, source_ports, over_tcp };
                links.push(end.open(introduction).unwrap());
            }
            let memory = Memory::private((SLOT * SLOTS) as usize).unwrap();
            let memory = Span::new(&memory, 0, u64::from(SLOT * SLOTS)).unwrap();
            let ring = Ring { memory, slot_bytes: SLOT, slots: SLOTS };
            ends[1].attach_ring(links[links.len() - 1], 0, ring).unwrap();
        }
        let mut up = 0;
        until("links up", || {
            for end in &mut ends {
                end.progress(8, &mut |_, event| up += usize::from(matches!(event, Event::Up)));
            }
            up == links.len()
        });
        (ends, links.into_iter().step_by(2).collect())
    }

    fn source() -> Arc<Memory> {
        Memory::private(SLOT as usize).unwrap()
    }

    /// Queues so many frames of a slot each.
    fn send(end: &mut TcpTransport, link: LinkId, memory: &Arc<Memory>, sequences: std::ops::Range<u32>) {
        for sequence in sequences {
            let span = Span::new(memory, 0, u64::from(SLOT)).unwrap();
            let frame = (Landing { ring: 0, sequence }, span, Tag(sequence.into()));
            end.send(link, 0, &sequence.to_le_bytes(), Some(frame)).unwrap();
        }
    }

    fn lent(end: &mut TcpTransport) -> Vec<(LinkId, u16)> {
        end.sender.as_mut().unwrap().lent().clone()
    }

    #[test]
    fn a_long_queue_is_lent_and_comes_back_empty() {
        for protection in PROTECTIONS {
            let ([mut a, mut b], links) = linked(protection, 1);
            let (memory, mut sent, mut arrived) = (source(), Vec::new(), Vec::new());
            send(&mut a, links[0], &memory, 0..16);
            a.progress(1, &mut |_, event| panic!("{event:?}"));
            assert_eq!(lent(&mut a), [(links[0], 0)]);
            // More frames, with and without payload, go behind those of before.
            send(&mut a, links[0], &memory, 16..20);
            a.send(links[0], 0, &20_u32.to_le_bytes(), None).unwrap();
            let mut take = |_, event: Event<'_>| match event {
                Event::Sent { tag } => sent.push(tag.0),
                event => panic!("{event:?}"),
            };
            let mut receive = |_, event: Event<'_>| match event {
                Event::Received { header, .. } => {
                    arrived.push(u32::from_le_bytes(header.try_into().unwrap()));
                }
                event => panic!("{event:?}"),
            };
            until("all is sent, and nothing lent", || {
                a.progress(8, &mut take);
                b.progress(8, &mut receive);
                lent(&mut a).is_empty()
            });
            until("the rest arrives", || b.progress(8, &mut receive) == 0);
            assert_eq!((sent, arrived), ((0..20).collect(), (0..21).collect()), "{protection}");
            assert_eq!(Arc::strong_count(&memory), 1);
        }
    }

    #[test]
    fn a_short_queue_is_not_lent() {
        let ([mut a, _b], links) = linked(LinkProtection::Authenticated, 1);
        let span = Span::new(&source(), 0, u64::from(SLOT) - 1).unwrap();
        a.send(links[0], 0, b"short", Some((Landing { ring: 0, sequence: 0 }, span, Tag(0)))).unwrap();
        a.progress(8, &mut |_, _| {});
        assert!(lent(&mut a).is_empty());
    }

    #[test]
    fn another_owner_sends_without_the_sender() {
        let ([mut a, mut b], links) = linked(LinkProtection::Authenticated, 3);
        for (link, communicator) in links.iter().zip([1, 1, 2]) {
            let communicator = CommunicatorId(communicator);
            a.set_owner(*link, Owner { tenant: 0, weight: 1, communicator });
        }
        let memory = source();
        // More than the kernel takes while nobody reads.
        for link in &links {
            send(&mut a, *link, &memory, 0..SLOTS);
        }
        let mut sent = 0;
        until("the third sends", || {
            a.progress(8, &mut |link, _| sent += usize::from(link == links[2]));
            assert_eq!(lent(&mut a), [(links[0], 0), (links[1], 0)]);
            sent > 0
        });
        // Once the first two have sent all, it is the third's.
        until("all is sent", || {
            b.progress(8, &mut |_, _| {});
            a.progress(8, &mut |link, _| sent += usize::from(link == links[2]));
            sent == SLOTS as usize && lent(&mut a).is_empty()
        });
    }

    #[test]
    fn a_link_that_is_closed_releases_its_payloads_at_once() {
        for protection in PROTECTIONS {
            let ([mut a, mut b], links) = linked(protection, 2);
            let memory = source();
            send(&mut a, links[0], &memory, 0..SLOTS);
            a.progress(1, &mut |_, _| {});
            send(&mut a, links[0], &memory, SLOTS..SLOTS + 8);
            a.send(links[0], 0, b"the last word", None).unwrap();
            assert_eq!(lent(&mut a), [(links[0], 0)]);
            a.close(links[0]);
            assert_eq!((Arc::strong_count(&memory), lent(&mut a)), (1, Vec::new()), "{protection}");
            let (mut words, mut down) = (0, 0);
            until("the end", || {
                a.progress(8, &mut |_, _| {});
                b.progress(8, &mut |_, event| match event {
                    Event::Received { header, payload: None, .. } => {
                        words += usize::from(header == b"the last word")
                    }
                    Event::Down { .. } => down += 1,
                    _ => {}
                });
                down == 1
            });
            assert_eq!(words, 1, "{protection}");
            // The sender goes on with another link.
            send(&mut a, links[1], &memory, 0..4);
            let mut sent = 0;
            until("another link sends", || {
                b.progress(8, &mut |_, _| {});
                a.progress(8, &mut |_, event| sent += usize::from(matches!(event, Event::Sent { .. })));
                sent == 4
            });
        }
    }

    #[test]
    fn a_peer_that_goes_ends_a_link_that_is_lent() {
        let ([mut a, b], links) = linked(LinkProtection::Authenticated, 1);
        let memory = source();
        send(&mut a, links[0], &memory, 0..SLOTS);
        a.progress(1, &mut |_, _| {});
        assert_eq!(lent(&mut a).len(), 1);
        drop(b);
        let mut down = false;
        until("the end", || {
            a.progress(8, &mut |_, event| down |= matches!(event, Event::Down { .. }));
            down
        });
        assert_eq!((Arc::strong_count(&memory), lent(&mut a)), (1, Vec::new()));
    }

    /// Another thread receives meanwhile. Whoever is not woken sleeps longer than the test has time.
    #[test]
    fn what_the_sender_has_written_wakes_who_sleeps() {
        use rustix::event::{PollFd, PollFlags, Timespec};
        let ([mut a, mut b], links) = linked(LinkProtection::Authenticated, 1);
        let (memory, over) = (source(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    b.progress(64, &mut |_, _| {});
                }
            });
            for round in 0..50 {
                send(&mut a, links[0], &memory, round * 8..round * 8 + 8);
                let mut sent = 0;
                until("all is sent", || {
                    let worked =
                        a.progress(8, &mut |_, event| sent += u32::from(matches!(event, Event::Sent { .. })));
                    if worked == 0 && sent < 8 && a.prepare_sleep() {
                        let limit = Timespec { tv_sec: 30, tv_nsec: 0 };
                        let fd = a.wake_fd().unwrap();
                        let _ = rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&limit));
                    }
                    sent == 8
                });
            }
            over.store(true, Ordering::Relaxed);
        });
    }
}
