//! The loaded programs with their tables.

use crate::error::{Error, Missing};
use crate::print;
use harmonaize_events::{EndpointLosses, QueuePair, QueuePairKey, Socket, SocketKey};
use libbpf_rs::{ErrorKind, Link, MapCore, MapFlags, Object, ObjectBuilder, OpenObject};
use std::borrow::Cow;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;
use zerocopy::IntoBytes;

/// Where a kernel describes its types.
const TYPES: &str = "/sys/kernel/btf/vmlinux";
/// Where it names its functions.
const SYMBOLS: &str = "/proc/kallsyms";

/// The tables, by their names in the object.
const SOCKETS: &str = "SOCKETS";
const QUEUE_PAIRS: &str = "QUEUE_PAIRS";
const LOSSES: &str = "ENDPOINT_LOSSES";

/// What is followed of TCP: a tracepoint's program where the verifier knows its arguments' types, and where it does not.
const TCP: [(&str, &str); 3] = [
    ("segment_typed", "segment_untyped"),
    ("retransmission_typed", "retransmission_untyped"),
    ("state_typed", "state_untyped"),
];
/// Of those, the ones that every segment runs.
const SEGMENTS: [&str; 2] = ["segment_typed", "segment_untyped"];
/// What is followed of queue pairs. Each entry is a program, the kernel's function that it waits for, and whether all is void
/// without it.
const RDMA: [(&str, &str, bool); 5] = [
    ("pair_created", "ib_create_qp_user", true),
    ("kernels_pair_created", "ib_create_qp_kernel", false),
    ("pair_changes", "ib_modify_qp_with_udata", true),
    ("pair_changed", "ib_modify_qp_with_udata", true),
    ("pair_destroyed", "ib_destroy_qp_user", true),
];

/// What may be set before the programs are loaded.
#[derive(Debug, Clone)]
pub struct Options {
    /// A segment that comes in sooner after a socket's last sample does not make another. Retransmissions and changes of state always
    /// do.
    pub interval: Duration,
    /// Sample sockets at segments from the beginning on; else from [`Tracing::sample_segments`] on. Until then sockets are known
    /// from changes of their state and from retransmissions.
    pub segments: bool,
    /// How many sockets are kept; the least recently used are evicted beyond. About 300 bytes each.
    pub sockets: u32,
    /// How many queue pairs, likewise.
    pub queue_pairs: u32,
    /// Only sockets of these network namespaces, by inode number; all if there are none. At most 1024.
    pub namespaces: Vec<u64>,
    /// Only sockets of these cgroups, by id, not those beneath them; all if there are none. At most 1024.
    pub cgroups: Vec<u64>,
    /// A file with this kernel's type information, for one that has none of its own.
    pub types: Option<PathBuf>,
    /// Other programs than those of this crate, for tests.
    pub object: Option<Cow<'static, [u8]>>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            interval: Duration::from_millis(1),
            segments: true,
            sockets: 1 << 14,
            queue_pairs: 1 << 13,
            namespaces: Vec::new(),
            cgroups: Vec::new(),
            types: None,
            object: None,
        }
    }
}

/// How TCP's tracepoints are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TracepointMode {
    /// The verifier knows the arguments' types (tp_btf): fields are read like any memory.
    Typed,
    /// It does not (raw tracepoints): every field is a call.
    Untyped,
}

/// The programs, attached.
pub struct Tracing {
    // Before the object: programs are detached first.
    links: Vec<Link>,
    segments: Option<Link>,
    object: Object,
    tcp: Option<TracepointMode>,
    rdma: bool,
    missing: Vec<Missing>,
}

impl Tracing {
    /// Loads the programs and attaches those that this kernel has a place for.
    ///
    /// # Errors
    /// None of them can be had: see [`Error`].
    pub fn open(options: &Options) -> Result<Self, Error> {
        if options.types.is_none() && !Path::new(TYPES).exists() {
            return Err(Error::Types { path: TYPES.to_owned() });
        }
        if let Some(path) = options.types.as_ref().filter(|path| !path.is_file()) {
            return Err(Error::Types { path: path.display().to_string() });
        }
        print::begin();
        let how = if options.types.is_none() { TracepointMode::Typed } else { TracepointMode::Untyped };
        let symbols = fs::read_to_string(SYMBOLS).unwrap_or_default();
        let lacking = RDMA.iter().find(|(_, function, vital)| *vital && !has_symbol(&symbols, function));
        let mut missing = Vec::new();
        let mut rdma = true;
        if let Some((_, function, _)) = lacking {
            let why =
                format!("this kernel has no function {function}: its RDMA is not loaded, or another version");
            missing.push(Missing { what: "queue pairs", why });
            rdma = false;
        }
        let wanted = |rdma: bool, name: &str| {
            let tcp = TCP.iter().any(|(typed, untyped)| match how {
                TracepointMode::Typed => *typed == name,
                TracepointMode::Untyped => *untyped == name,
            });
            tcp || rdma
                && RDMA.iter().any(|(own, function, _)| *own == name && has_symbol(&symbols, function))
        };
        let mut object = open_object(options, |name| wanted(rdma, name))?.load();
        if let (true, Err(error)) = (rdma, &object) {
            // The types of a module may be missing where the kernel's own are there.
            missing.push(Missing { what: "queue pairs", why: format!("{error}: {}", print::tail()) });
            rdma = false;
            object = open_object(options, |name| wanted(rdma, name))?.load();
        }
        let object = object.map_err(refused)?;
        scope(&object, "NAMESPACES", &options.namespaces)?;
        scope(&object, "CGROUPS", &options.cgroups)?;
        let mut tracing = Self { links: Vec::new(), segments: None, object, tcp: None, rdma: false, missing };
        let rare = |name: &str| !RDMA.iter().any(|(own, ..)| *own == name) && !SEGMENTS.contains(&name);
        tracing.tcp = tracing.attach(rare, "TCP's sockets").then_some(how);
        if options.segments
            && tracing.tcp.is_some()
            && let Err(error) = tracing.sample_segments(true)
        {
            tracing.missing.push(Missing { what: "TCP's segments", why: error.to_string() });
        }
        tracing.rdma =
            rdma && tracing.attach(|name| RDMA.iter().any(|(own, ..)| *own == name), "queue pairs");
        Ok(tracing)
    }

    /// Attaches some of the loaded programs: all of them, or none with a note of why.
    fn attach(&mut self, which: impl Fn(&str) -> bool, what: &'static str) -> bool {
        let mut links = Vec::new();
        for program in self.object.progs_mut() {
            let name = program.name().to_string_lossy();
            if !program.autoload() || !which(&name) {
                continue;
            }
            match program.attach() {
                Ok(link) => links.push(link),
                Err(error) => {
                    self.missing
                        .push(Missing { what, why: format!("the kernel does not attach {name}: {error}") });
                    return false;
                }
            }
        }
        self.links.append(&mut links);
        true
    }

    /// Begins or ends sampling sockets at segments that come in: a run of a program for each. True if that changes anything.
    ///
    /// # Errors
    /// The kernel does not attach the program.
    pub fn sample_segments(&mut self, enabled: bool) -> Result<bool, Error> {
        let sampled = self.segments.is_some();
        if enabled == sampled || self.tcp.is_none() {
            return Ok(false);
        }
        if !enabled {
            self.segments = None;
            return Ok(true);
        }
        let mut programs = self.object.progs_mut();
        let program = programs.find(|program| {
            program.autoload() && SEGMENTS.contains(&program.name().to_string_lossy().as_ref())
        });
        let program = program.ok_or_else(|| Error::object("it has no program for segments"))?;
        let link = program.attach().map_err(|error| Error::object(format!("attaching: {error}")))?;
        self.segments = Some(link);
        Ok(true)
    }

    /// How TCP's sockets are followed; none where they are not.
    pub fn tcp(&self) -> Option<TracepointMode> {
        self.tcp
    }

    /// Whether queue pairs are followed.
    pub fn rdma(&self) -> bool {
        self.rdma
    }

    /// What could not be had, and why.
    pub fn missing(&self) -> &[Missing] {
        &self.missing
    }

    /// The table of sockets: [`SocketKey`] to [`Socket`].
    ///
    /// # Errors
    /// The object has none.
    pub fn sockets(&self) -> Result<BorrowedFd<'_>, Error> {
        self.map(SOCKETS)
    }

    /// The table of queue pairs: [`QueuePairKey`] to [`QueuePair`].
    ///
    /// # Errors
    /// The object has none.
    pub fn queue_pairs(&self) -> Result<BorrowedFd<'_>, Error> {
        self.map(QUEUE_PAIRS)
    }

    /// What was lost since the programs were loaded: one [`EndpointLosses`] of each processor, as bytes.
    ///
    /// # Errors
    /// A call on the table fails.
    pub fn losses(&self) -> Result<Vec<Vec<u8>>, Error> {
        let table = self.object.maps().find(|map| map.name() == OsStr::new(LOSSES));
        let table = table.ok_or_else(|| missing_map(LOSSES))?;
        let values = table.lookup_percpu(&0u32.to_ne_bytes(), MapFlags::ANY);
        let values = values.map_err(|error| Error::object(format!("{LOSSES}: {error}")))?;
        Ok(values.unwrap_or_default())
    }

    /// The loaded programs, by their names.
    pub fn programs(&self) -> impl Iterator<Item = (String, BorrowedFd<'_>)> {
        self.object.progs().filter_map(|program| {
            let name = program.name().to_string_lossy().into_owned();
            // SAFETY: the descriptor of a loaded program stays open as long as the object, which the result borrows; one
            // that was not loaded has none, and is left out.
            let fd = program.autoload().then(|| unsafe { BorrowedFd::borrow_raw(raw_fd(&program)) });
            Some((name, fd?))
        })
    }

    fn map(&self, name: &str) -> Result<BorrowedFd<'_>, Error> {
        let table = self.object.maps().find(|map| map.name() == OsStr::new(name));
        let table = table.ok_or_else(|| missing_map(name))?;
        // SAFETY: the descriptor of a table stays open as long as the object, which the result borrows; the handle that it
        // is taken from does not own it.
        Ok(unsafe { BorrowedFd::borrow_raw(std::os::fd::AsRawFd::as_raw_fd(&table.as_fd())) })
    }
}

fn raw_fd(program: &libbpf_rs::Program<'_>) -> std::os::fd::RawFd {
    std::os::fd::AsRawFd::as_raw_fd(&program.as_fd())
}

impl std::fmt::Debug for Tracing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (links, tcp, rdma) = (self.links.len(), &self.tcp, &self.rdma);
        f.debug_struct("Tracing")
            .field("links", &links)
            .field("segments", &self.segments.is_some())
            .field("tcp", tcp)
            .field("rdma", rdma)
            .finish_non_exhaustive()
    }
}

/// The network namespace of the calling thread, by its inode number.
///
/// # Errors
/// There is no `/proc`.
pub fn own_namespace() -> io::Result<u64> {
    Ok(std::os::unix::fs::MetadataExt::ino(&fs::metadata("/proc/thread-self/ns/net")?))
}

/// Whether a kernel's list of symbols has a function.
fn has_symbol(symbols: &str, function: &str) -> bool {
    symbols.lines().any(|line| line.split_whitespace().nth(2) == Some(function))
}

/// The object with its settings, and only the wanted programs.
fn open_object(options: &Options, include: impl Fn(&str) -> bool) -> Result<OpenObject, Error> {
    let mut builder = ObjectBuilder::default();
    let odd = |error: libbpf_rs::Error| Error::object(format!("{error}: {}", print::tail()));
    if let Some(path) = &options.types {
        builder.btf_custom_path(path).map_err(odd)?;
    }
    let bytes = options.object.as_deref().unwrap_or(crate::OBJECT);
    if bytes.is_empty() {
        return Err(Error::object("it is empty"));
    }
    let mut object = builder.open_memory(bytes).map_err(odd)?;
    let mut known = 0;
    for mut map in object.maps_mut() {
        let name = map.name().to_string_lossy().into_owned();
        let (key, value) = (map.key_size() as usize, map.value_size() as usize);
        let sizes = match name.as_str() {
            SOCKETS => {
                map.set_max_entries(options.sockets.max(1)).map_err(odd)?;
                (size_of::<SocketKey>(), size_of::<Socket>())
            }
            QUEUE_PAIRS => {
                map.set_max_entries(options.queue_pairs.max(1)).map_err(odd)?;
                (size_of::<QueuePairKey>(), size_of::<QueuePair>())
            }
            LOSSES => (size_of::<u32>(), size_of::<EndpointLosses>()),
            name if name.ends_with(".rodata") => {
                let settings = settings(options);
                if value != settings.as_bytes().len() {
                    return Err(Error::object(format!("its settings are {value} bytes")));
                }
                map.set_initial_value(settings.as_bytes()).map_err(odd)?;
                (key, value)
            }
            _ => continue,
        };
        if (key, value) != sizes {
            return Err(Error::object(format!("its table {name} has other sizes")));
        }
        known += 1;
    }
    if known != 4 {
        return Err(Error::object("it lacks tables"));
    }
    for mut program in object.progs_mut() {
        let name = program.name().to_string_lossy().into_owned();
        program.set_autoload(include(&name));
    }
    Ok(object)
}

/// `struct Settings` of `programs/schema.h`.
fn settings(options: &Options) -> [u64; 3] {
    let interval = u64::try_from(options.interval.as_nanos()).unwrap_or(u64::MAX);
    let scoped = |list: &[u64]| u64::from(!list.is_empty());
    // One alone is compared, several are looked up.
    let (namespace, namespaces) = match options.namespaces.as_slice() {
        [one] => (*one, 0),
        several => (0, scoped(several)),
    };
    let cgroups = scoped(&options.cgroups);
    // Two words of 32 bits in one of 64, in memory order.
    let [low, high] =
        if cfg!(target_endian = "little") { [namespaces, cgroups] } else { [cgroups, namespaces] };
    [interval, namespace, low | high << 32]
}

fn scope(object: &Object, table: &str, list: &[u64]) -> Result<(), Error> {
    let map: libbpf_rs::Map<'_> =
        object.maps().find(|map| map.name() == OsStr::new(table)).ok_or_else(|| missing_map(table))?;
    for number in list {
        let done = map.update(&number.to_ne_bytes(), &0u64.to_ne_bytes(), MapFlags::ANY);
        done.map_err(|error| Error::object(format!("{table}: {error}")))?;
    }
    Ok(())
}

fn missing_map(table: &str) -> Error {
    Error::object(format!("it has no table {table}"))
}

fn refused(error: libbpf_rs::Error) -> Error {
    let log = print::tail();
    if error.kind() == ErrorKind::PermissionDenied && !log.contains("PROG LOAD LOG") {
        return Error::Denied { source: io::Error::new(io::ErrorKind::PermissionDenied, error.to_string()) };
    }
    Error::Refused { reason: error.to_string(), log }
}
