//! The loaded programs with their tables.

use crate::attachment::Attachment;
use crate::diagnosis::Diagnosis;
use crate::endpoints::Endpoints;
use crate::error::Error;
use crate::kernel::Kernel;
use crate::read::{Buffers, Counters, Flows};
use crate::sys;
use aya::maps::{Map, MapData, MapError, PerCpuArray, PerCpuValues, RingBuf};
use aya::programs::{SchedClassifier, Xdp};
use aya::{Ebpf, EbpfLoader};
use harmonaize_core_c::Tracing;
use harmonaize_events::{
    Direction, Event, FlowKey, FoldingSecret, INTERFACE_PROBES, INTERFACE_SLOTS, InterfaceTotals, Losses,
    Protocol, QueuePair, QueuePairKey, RoceEntry, ShortKey, Socket, SocketKey, TcpEntry,
};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// The tables of flows, by their names in the object.
const TCP_MAP: &str = "TCP_FLOWS";
const ROCE_MAP: &str = "ROCE_FLOWS";

/// The program of ingress on XDP.
pub(crate) const XDP_PROGRAM: &str = "count_xdp";

const TOTALS: usize = size_of::<InterfaceTotals>();
const LOSSES: usize = size_of::<Losses>();
/// The smallest ring that the kernel makes everywhere: a page, of 64 KiB on some machines.
const SMALLEST_RING: u32 = 64 << 10;

/// What may be set before the programs are loaded.
#[derive(Debug, Clone)]
pub struct Options {
    /// A gap of this length between two packets of a flow ends a burst.
    pub idle_gap: Duration,
    /// Signals of congestion further apart than this begin anew.
    pub clean: Duration,
    /// A round trip that takes so much longer than the least, and twice as long, is late. It is of what leaves. It is reported at
    /// once where the one before was not as late ([`EventKind::LateRtt`](harmonaize_events::EventKind)). Zero: none is.
    pub late_rtt: Duration,
    /// How many TCP connections are kept, and half as many queue pairs; the least recently used are evicted beyond. About 700
    /// bytes of the kernel's memory for each of the number.
    pub flows: u32,
    /// Bytes of the ring of events: a power of two, rounded up.
    pub ring: u32,
    /// Have the kernel take the time of every run, of all its programs: see [`Programs::cost`]. Costs some 30 ns a run, and needs
    /// CAP_SYS_ADMIN: without, [`Programs::missing`] says so.
    pub run_time: bool,
    /// Attach by the clsact queueing discipline even where tcx is there.
    pub clsact: bool,
    /// Count what comes in on XDP instead of traffic control: before the stack, single packets as the device has them. Costs
    /// less a packet and more a byte, since nothing is merged yet; sees what the stack drops. On an interface that has
    /// another program there it fails. Needs Linux 5.9.
    pub xdp: bool,
    /// Also follow what the kernel itself knows of the flows' ends, sockets and queue pairs. Where that cannot be had, the rest
    /// goes on without: [`Programs::missing`] says why.
    pub endpoints: Option<harmonaize_core_c::Options>,
    /// Load the programs that were built for diagnosis. Tracing gets as a warning why a packet was of no flow, found no place, or
    /// could not be reported: at most one each 10 ms a processor. Needs Linux 5.19.
    pub diagnosis: bool,
    /// Other programs than those of this crate, for tests.
    pub object: Option<Cow<'static, [u8]>>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            idle_gap: Duration::from_micros(500),
            clean: Duration::from_millis(10),
            late_rtt: Duration::ZERO,
            flows: 1 << 15,
            ring: 1 << 20,
            run_time: false,
            clsact: false,
            xdp: false,
            endpoints: None,
            diagnosis: false,
            object: None,
        }
    }
}

/// What the programs cost.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cost {
    /// Each program: ingress, egress, that on XDP, and those that follow the flows' ends.
    pub programs: Vec<ProgramCost>,
    /// Whether the kernel takes the time of runs.
    pub timed: bool,
}

/// What one program costs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramCost {
    /// Its name.
    pub name: Cow<'static, str>,
    /// How often it ran while runs were timed.
    pub runs: u64,
    /// How long all of them took.
    pub time: Duration,
    /// Instructions that the verifier went through when it was loaded; none where the kernel does not tell (before 5.16).
    pub verified: Option<u32>,
}

/// One loaded pair of programs, attached to any number of interfaces.
pub struct Programs {
    pub(crate) ebpf: Ebpf,
    pub(crate) kernel: Kernel,
    pub(crate) clsact: bool,
    pub(crate) xdp: bool,
    pub(crate) attachments: BTreeMap<String, Attachment>,
    interfaces: PerCpuArray<MapData, [u8; TOTALS]>,
    losses: PerCpuArray<MapData, [u8; LOSSES]>,
    events: RingBuf<MapData>,
    late_rtts: RingBuf<MapData>,
    /// What keys in the tables of flows are folded with.
    folding: FoldingSecret,
    tcp: Buffers<ShortKey, TcpEntry>,
    roce: Buffers<ShortKey, RoceEntry>,
    removed: u64,
    evicted: u64,
    tracing: Option<Tracing>,
    diagnosis: Option<Diagnosis>,
    sockets: Buffers<SocketKey, Socket>,
    queue_pairs: Buffers<QueuePairKey, QueuePair>,
    missing: Vec<String>,
    /// While it is open, the kernel takes times.
    run_time: Option<OwnedFd>,
}

/// The name of the program of a direction.
pub(crate) const fn program_name(direction: Direction) -> &'static str {
    match direction {
        Direction::Ingress => "count_ingress",
        Direction::Egress => "count_egress",
    }
}

impl Programs {
    /// Loads the programs; nothing is attached yet.
    ///
    /// # Errors
    /// What is missing: see [`Error`].
    pub fn open(options: &Options) -> Result<Self, Error> {
        let kernel = Kernel::probe();
        if let Some(error) = kernel.lacks() {
            return Err(error);
        }
        let (idle_gap, clean) = (nanoseconds(options.idle_gap), nanoseconds(options.clean));
        let late = nanoseconds(options.late_rtt);
        let flows = options.flows.max(2);
        let folding: FoldingSecret = std::array::from_fn(|_| secret());
        let ring = options.ring.max(SMALLEST_RING);
        let ring = ring.checked_next_power_of_two().unwrap_or(1 << 31);
        let usual = if options.diagnosis { crate::DIAGNOSIS } else { crate::OBJECT };
        let mut ebpf = EbpfLoader::new()
            // The programs read no structure of the kernel.
            .btf(None)
            .override_global("IDLE_GAP_NS", &idle_gap, true)
            .override_global("CONGESTION_CLEAR_NS", &clean, true)
            .override_global("LATE_RTT_NS", &late, true)
            .override_global("FOLDING_SECRET", &folding, true)
            .map_max_entries(TCP_MAP, flows)
            .map_max_entries(ROCE_MAP, flows / 2)
            .map_max_entries("REQUESTS", flows / 2)
            .map_max_entries("EVENTS", ring)
            .load(options.object.as_deref().unwrap_or(usual))
            .map_err(Error::opening)?;
        for direction in [Direction::Ingress, Direction::Egress] {
            let name = program_name(direction);
            let program = classifier(&mut ebpf, name)?;
            program.load().map_err(|error| Error::loading(name, error))?;
        }
        if options.xdp {
            let program = xdp_program_mut(&mut ebpf)?;
            program.load().map_err(|error| Error::loading(XDP_PROGRAM, error))?;
        }
        let diagnosis = options.diagnosis.then(|| Diagnosis::of(&mut ebpf)).transpose()?;
        let mut missing = Vec::new();
        let run_time = options.run_time.then(|| aya::sys::enable_stats(aya::sys::Stats::RunTime));
        let run_time = run_time.and_then(|asked| {
            let untimed = |error: &aya::sys::SyscallError| {
                format!("the time of the programs' runs, which needs CAP_SYS_ADMIN: {}", error.io_error)
            };
            asked.inspect_err(|error| missing.push(untimed(error))).ok()
        });
        let tracing = options.endpoints.as_ref().and_then(|options| {
            let opened = Tracing::open(options).inspect_err(|error| missing.push(error.to_string()));
            opened.ok()
        });
        missing.extend(tracing.iter().flat_map(|tracing| tracing.missing().iter().map(ToString::to_string)));
        Ok(Self {
            interfaces: take_map(&mut ebpf, "INTERFACES")?,
            losses: take_map(&mut ebpf, "LOSSES")?,
            events: take_map(&mut ebpf, "EVENTS")?,
            late_rtts: take_map(&mut ebpf, "LATE_RTTS")?,
            ebpf,
            kernel,
            clsact: options.clsact,
            xdp: options.xdp,
            attachments: BTreeMap::new(),
            folding,
            tcp: Buffers::default(),
            roce: Buffers::default(),
            removed: 0,
            evicted: 0,
            tracing,
            diagnosis,
            sockets: Buffers::default(),
            queue_pairs: Buffers::default(),
            missing,
            run_time,
        })
    }

    /// What was asked for and could not be had, each with the reason.
    pub fn missing(&self) -> &[String] {
        &self.missing
    }

    /// The programs that read the kernel's own structures, if they were asked for and could be had.
    pub fn tracing(&self) -> Option<&Tracing> {
        self.tracing.as_ref()
    }

    /// Reads what the kernel itself knows of the flows' ends into `into`; nothing where that is not followed.
    ///
    /// # Errors
    /// A call on a table fails.
    pub fn read_endpoints(&mut self, into: &mut Endpoints) -> Result<(), Error> {
        into.clear();
        let Some(tracing) = &self.tracing else { return Ok(()) };
        let odd = |error: harmonaize_core_c::Error| Error::object(error.to_string());
        let (sockets, queue_pairs) = (tracing.sockets().map_err(odd)?, tracing.queue_pairs().map_err(odd)?);
        self.sockets.each(sockets, "SOCKETS", |key, socket| {
            into.sockets.insert(key, socket);
        })?;
        self.queue_pairs.each(queue_pairs, "QUEUE_PAIRS", |key, pair| {
            into.queue_pairs.insert(key, pair);
        })?;
        into.losses = sum(tracing.losses().map_err(odd)?.iter().map(Vec::as_slice));
        Ok(())
    }

    /// Begins or ends following sockets segment by segment, for who reads them often: see
    /// [`EndpointOptions::segments`](crate::EndpointOptions). True if that changes anything.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn watch_endpoints(&mut self, enabled: bool) -> Result<bool, Error> {
        let Some(tracing) = &mut self.tracing else { return Ok(false) };
        tracing.sample_segments(enabled).map_err(|error| Error::object(error.to_string()))
    }

    /// What was found of the kernel.
    pub fn kernel(&self) -> &Kernel {
        &self.kernel
    }

    /// Reads all flows into `into`, whose memory is used again.
    ///
    /// # Errors
    /// A call on a table fails.
    pub fn read_flows(&mut self, into: &mut Flows) -> Result<(), Error> {
        into.tcp.clear();
        into.roce.clear();
        // Read first: an entry made in between would else seem evicted.
        let entries = self.losses()?.entries;
        self.tcp.each(descriptor(&self.ebpf, TCP_MAP)?, TCP_MAP, |_, entry| {
            into.tcp.push((entry.key, entry.counters))
        })?;
        self.roce.each(descriptor(&self.ebpf, ROCE_MAP)?, ROCE_MAP, |_, entry| {
            into.roce.push((entry.key, entry.counters))
        })?;
        let there = (into.tcp.len() + into.roce.len()) as u64;
        self.evicted = self.evicted.max(entries.saturating_sub(there + self.removed));
        into.evicted = self.evicted;
        Ok(())
    }

    /// Hands the next events, at most `limit`, to `with`; returns how many there were. Late round trips come first, the others in the order
    /// in which they were told. What was told for diagnosis goes on too.
    ///
    /// # Errors
    /// A record is not an event of this version.
    pub fn read_events(&mut self, limit: usize, mut with: impl FnMut(&Event)) -> Result<usize, Error> {
        if let Some(diagnosis) = &mut self.diagnosis {
            diagnosis.forward();
        }
        for read in 0..limit {
            let record = self.late_rtts.next().or_else(|| self.events.next());
            let Some(record) = record else { return Ok(read) };
            match Event::ref_from_bytes(&record) {
                Ok(event) => with(event),
                Err(_) => return Err(Error::object(format!("an event of {} bytes", record.len()))),
            }
        }
        Ok(limit)
    }

    /// Ready to be read when late round trips were told: for poll and epoll.
    pub fn late_rtt_fd(&self) -> BorrowedFd<'_> {
        self.late_rtts.as_fd()
    }

    /// What crossed an interface since it was attached, or for a trial, by its index.
    ///
    /// # Errors
    /// The interface is not listed.
    pub fn totals(&self, index: u32) -> Result<InterfaceTotals, Error> {
        let (_, values) = self.slot_of(index, index)?.ok_or_else(|| interfaces(MapError::KeyNotFound))?;
        let totals: InterfaceTotals = sum(values.iter().map(|bytes| bytes.as_slice()));
        Ok(InterfaceTotals { interface: u64::from(index), ..totals })
    }

    /// What was lost since the programs were loaded. Evicted flows stand in [`Flows::evicted`].
    ///
    /// # Errors
    /// A call on the table fails.
    pub fn losses(&self) -> Result<Losses, Error> {
        let failed = |source| Error::Map { map: "LOSSES", source };
        let values = self.losses.get(&0, 0).map_err(failed)?;
        Ok(sum(values.iter().map(|bytes| bytes.as_slice())))
    }

    /// Reads one flow, at a fraction of the cost of all. None when it is not in the tables.
    ///
    /// # Errors
    /// A call on a table fails.
    pub fn read_flow(&self, flow: &FlowKey) -> Result<Option<Counters>, Error> {
        let (name, key) = self.map_of(flow);
        let table = descriptor(&self.ebpf, name)?;
        let failed = |error| Error::call(format!("reading from the table {name}"), error);
        if name == TCP_MAP {
            let mut value = TcpEntry::new_zeroed();
            let there = sys::lookup(table, key.as_bytes(), &mut value).map_err(failed)?;
            return Ok((there && value.key == *flow).then_some(Counters::Tcp(value.counters)));
        }
        let mut value = RoceEntry::new_zeroed();
        let there = sys::lookup(table, key.as_bytes(), &mut value).map_err(failed)?;
        Ok((there && value.key == *flow).then_some(Counters::Roce(value.counters)))
    }

    /// Removes a flow that is over. False when it is gone already.
    ///
    /// # Errors
    /// A call on the table fails.
    pub fn forget(&mut self, flow: &FlowKey) -> Result<bool, Error> {
        if self.read_flow(flow)?.is_none() {
            return Ok(false);
        }
        let (name, key) = self.map_of(flow);
        let done = sys::delete(descriptor(&self.ebpf, name)?, key.as_bytes())
            .map_err(|error| Error::call(format!("removing from the table {name}"), error))?;
        self.removed += u64::from(done);
        Ok(done)
    }

    /// What the programs cost so far. With tables of this size they take no processor time beside their runs.
    ///
    /// # Errors
    /// The kernel does not tell.
    pub fn cost(&self) -> Result<Cost, Error> {
        let mut programs = Vec::new();
        for name in [Direction::Ingress, Direction::Egress].map(program_name) {
            let info = self.program(name)?.info();
            let info = info.map_err(|error| Error::object(format!("{name}: {error}")))?;
            programs.push(ProgramCost {
                name: name.into(),
                runs: info.run_count(),
                time: info.run_time(),
                verified: info.verified_instruction_count(),
            });
        }
        if self.xdp {
            let sys::ProgramStats { runs, time, verified } = sys::program_stats(self.xdp_program()?)
                .map_err(|error| Error::call(format!("asking about {XDP_PROGRAM}"), error))?;
            programs.push(ProgramCost { name: XDP_PROGRAM.into(), runs, time, verified });
        }
        for (name, program) in self.tracing.iter().flat_map(Tracing::programs) {
            let ran = sys::program_stats(program)
                .map_err(|error| Error::call(format!("asking about {name}"), error))?;
            let sys::ProgramStats { runs, time, verified } = ran;
            programs.push(ProgramCost { name: name.into(), runs, time, verified });
        }
        Ok(Cost { programs, timed: self.run_time.is_some() })
    }

    pub(crate) fn program(&self, name: &str) -> Result<&SchedClassifier, Error> {
        let program = self.ebpf.program(name);
        program
            .and_then(|program| <&SchedClassifier>::try_from(program).ok())
            .ok_or_else(|| Error::object(format!("it has no program {name}")))
    }

    /// The program on XDP, if it was asked for.
    pub(crate) fn xdp_program(&self) -> Result<BorrowedFd<'_>, Error> {
        let program = self.ebpf.program(XDP_PROGRAM).and_then(|program| <&Xdp>::try_from(program).ok());
        let program = program.ok_or_else(|| Error::object(format!("it has no program {XDP_PROGRAM}")))?;
        let fd = program.fd().map_err(|_| Error::object(format!("{XDP_PROGRAM} was not asked for")))?;
        Ok(fd.as_fd())
    }

    /// Lists an interface, so that what crosses it is counted.
    pub(crate) fn register(&mut self, index: u32) -> Result<(), Error> {
        if self.slot_of(index, index)?.is_some() {
            return Ok(());
        }
        let (place, _) = self.slot_of(index, 0)?.ok_or(Error::NoSlot { index })?;
        let listed = InterfaceTotals { interface: u64::from(index), ..InterfaceTotals::new_zeroed() };
        self.interfaces.set(place, per_cpu(&listed)?, 0).map_err(interfaces)
    }

    /// Strikes an interface from the list, and returns what had crossed it.
    pub(crate) fn unregister(&mut self, index: u32) -> Result<InterfaceTotals, Error> {
        let totals = self.totals(index)?;
        if let Some((place, _)) = self.slot_of(index, index)? {
            let nobody = per_cpu(&InterfaceTotals::new_zeroed())?;
            self.interfaces.set(place, nobody, 0).map_err(interfaces)?;
        }
        Ok(totals)
    }

    /// The table that a flow is in, and its key there.
    fn map_of(&self, flow: &FlowKey) -> (&'static str, ShortKey) {
        let name = if flow.protocol == Protocol::Tcp as u8 { TCP_MAP } else { ROCE_MAP };
        (name, ShortKey::of(flow, &self.folding))
    }

    /// Of the places that an interface may have, the one that belongs to `owner`; 0 is nobody.
    fn slot_of(&self, index: u32, owner: u32) -> Result<Option<(u32, SlotTotals)>, Error> {
        for next in 0..INTERFACE_PROBES {
            let place = index.wrapping_add(next) % INTERFACE_SLOTS;
            let values = self.interfaces.get(&place, 0).map_err(interfaces)?;
            let listed = values.first().and_then(|bytes| bytes.first_chunk::<8>());
            if listed.map(|bytes| u64::from_ne_bytes(*bytes)) == Some(u64::from(owner)) {
                return Ok(Some((place, values)));
            }
        }
        Ok(None)
    }
}

/// The totals of an interface on each processor, as bytes.
type SlotTotals = PerCpuValues<[u8; TOTALS]>;

fn interfaces(source: MapError) -> Error {
    Error::Map { map: "INTERFACES", source }
}

/// The same totals on each processor.
fn per_cpu(totals: &InterfaceTotals) -> Result<SlotTotals, Error> {
    let processors = aya::util::nr_cpus().map_err(|(call, error)| Error::call(call, error))?;
    let mut bytes = [0; TOTALS];
    bytes.copy_from_slice(totals.as_bytes());
    PerCpuValues::try_from(vec![bytes; processors])
        .map_err(|error| Error::call("counting the processors", error))
}

/// Ready to be read when there are events other than late round trips: for poll and epoll.
impl AsFd for Programs {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }
}

impl std::fmt::Debug for Programs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Programs").field("attachments", &self.attachments).finish_non_exhaustive()
    }
}

/// A word that nobody can guess.
fn secret() -> u64 {
    RandomState::new().build_hasher().finish()
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

pub(crate) fn classifier<'a>(ebpf: &'a mut Ebpf, name: &str) -> Result<&'a mut SchedClassifier, Error> {
    let program = ebpf.program_mut(name);
    program
        .and_then(|program| <&mut SchedClassifier>::try_from(program).ok())
        .ok_or_else(|| Error::object(format!("it has no program {name}")))
}

fn xdp_program_mut(ebpf: &mut Ebpf) -> Result<&mut Xdp, Error> {
    let program = ebpf.program_mut(XDP_PROGRAM).and_then(|program| <&mut Xdp>::try_from(program).ok());
    program.ok_or_else(|| Error::object(format!("it has no program {XDP_PROGRAM}")))
}

fn take_map<T: TryFrom<Map, Error = aya::maps::MapError>>(
    ebpf: &mut Ebpf,
    name: &'static str,
) -> Result<T, Error> {
    let map = ebpf.take_map(name).ok_or_else(|| Error::object(format!("it has no table {name}")))?;
    T::try_from(map).map_err(|source| Error::Map { map: name, source })
}

fn descriptor<'a>(ebpf: &'a Ebpf, name: &str) -> Result<BorrowedFd<'a>, Error> {
    match ebpf.map(name) {
        Some(Map::LruHashMap(data)) => Ok(data.fd().as_fd()),
        _ => Err(Error::object(format!("it has no table {name}"))),
    }
}

/// Adds up structures of counters of each processor, word by word.
fn sum<'a, T>(values: impl Iterator<Item = &'a [u8]>) -> T
where
    T: FromBytes + IntoBytes + Immutable + KnownLayout,
{
    let mut sum = T::new_zeroed();
    for value in values {
        for (total, one) in sum.as_mut_bytes().chunks_exact_mut(8).zip(value.chunks_exact(8)) {
            let word = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_ne_bytes);
            total.copy_from_slice(&word(total).wrapping_add(word(one)).to_ne_bytes());
        }
    }
    sum
}
