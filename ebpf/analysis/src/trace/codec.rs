//! A trace as bytes.
//!
//! A trace is a header of 16 bytes (`HZTRACE\0`, version as u16, byte order mark 0x0102 as u16, four zero bytes; the byte
//! order is that of the machine that wrote it) and records. A record is the length of what follows (LEB128), a byte for its kind,
//! for a record of a flow the flow, and 64-bit words. A flow is a place in a table of 4096 (LEB128 of twice the place, and 1 more
//! where the table has this flow there already), else followed by its key of 48 bytes. Words are told by what has changed since
//! the last record of the same kind and flow: a LEB128 mask of the words that have, then their differences, zigzag and LEB128.
//! So a snapshot of a flow takes some 30 bytes of 380, and both sides remember a bounded amount, whatever the trace says.

use super::Record;
use super::raw::{KINDS, RawRecord, Words};
use harmonaize_events::FlowKey;
use zerocopy::{FromBytes, IntoBytes};

/// The version of the format that this code writes, and the only one that it reads.
pub const VERSION: u16 = 1;
/// The most bytes of a record behind its length; more are refused.
pub const LARGEST: usize = 1024;

const MAGIC: [u8; 8] = *b"HZTRACE\0";
const ORDER: u16 = 0x0102;
const HEADER: usize = 16;
const SLOTS: usize = 4096;
const KEY: usize = size_of::<FlowKey>();

/// Why bytes are not a trace, or no longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The bytes do not begin as a trace does.
    #[error("these bytes are not a trace")]
    Magic,
    /// A version that this code does not read.
    #[error("the trace has version {0}, and this program reads version {VERSION}")]
    Version(u16),
    /// It was written by a machine of the other byte order.
    #[error("the trace was written by a machine of the other byte order")]
    ByteOrder,
    /// The trace ends within a record, as when its writer was stopped: everything before was read.
    #[error("the trace ends within the record at byte {at}")]
    Torn {
        /// Where the record begins.
        at: usize,
    },
    /// A record contradicts itself: nothing after it can be read.
    #[error("the record at byte {at} is damaged: {what}")]
    Damaged {
        /// Where the record begins.
        at: usize,
        /// What is wrong.
        what: Damage,
    },
}

/// How a record contradicts itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    /// A number does not end within 64 bits.
    #[error("a number of more than 64 bits")]
    LongNumber,
    /// No record is so long, or so short.
    #[error("its length is out of range")]
    Length,
    /// It has no byte.
    #[error("it is empty")]
    Empty,
    /// Its words end before they should.
    #[error("its words end early")]
    ShortWords,
    /// More words than records of its kind have.
    #[error("it has more words than its kind")]
    ManyWords,
    /// It does not say which flow it is of.
    #[error("its flow is missing")]
    NoFlow,
    /// Its flow has a place that the table has not.
    #[error("its flow's place is beyond the table")]
    FlowPlace,
    /// Its flow's key ends before it should.
    #[error("its flow ends early")]
    ShortFlow,
    /// No record before it introduced its flow.
    #[error("its flow was never told")]
    UnknownFlow,
    /// Records of its kind have no place in the table.
    #[error("a kind without a place")]
    KindWithoutPlace,
    /// More bytes than records of its kind have.
    #[error("it is longer than its kind")]
    LongRecord,
}

/// What both sides remember.
#[derive(Default)]
struct Memory {
    slots: Vec<Option<Box<Slot>>>,
    last: [Option<Box<Words>>; KINDS],
}

struct Slot {
    kind: u8,
    key: FlowKey,
    words: Words,
}

impl Memory {
    fn slot(&mut self, place: usize) -> Option<&mut Option<Box<Slot>>> {
        if self.slots.len() <= place && place < SLOTS {
            self.slots.resize_with(place + 1, || None);
        }
        self.slots.get_mut(place)
    }

    fn last(&mut self, kind: u8) -> Option<&mut Words> {
        let last = self.last.get_mut(usize::from(kind).checked_sub(1)?)?;
        Some(last.get_or_insert_with(|| Box::new(Words::EMPTY)))
    }
}

/// A place for a flow; any would do, as the trace says which.
fn slot_index(kind: u8, key: &FlowKey) -> usize {
    let mut hash = u64::from(kind);
    for chunk in key.as_bytes().chunks_exact(8) {
        let word = chunk.try_into().map_or(0, u64::from_le_bytes);
        hash = (hash.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95);
    }
    // The upper bits, which all of the key has reached.
    usize::try_from(hash >> 52).unwrap_or_default() % SLOTS
}

fn put_number(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push((number & 0x7f) as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

/// Takes a LEB128 number from the front; none where the bytes end before it does.
fn number(bytes: &mut &[u8]) -> Option<Result<u64, Damage>> {
    let mut number = 0;
    for shift in (0..70).step_by(7) {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        if shift == 63 && *byte > 1 {
            return Some(Err(Damage::LongNumber));
        }
        number |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(Ok(number));
        }
    }
    Some(Err(Damage::LongNumber))
}

/// Makes a trace.
#[derive(Default)]
pub struct Writer {
    bytes: Vec<u8>,
    payload: Vec<u8>,
    memory: Memory,
    begun: bool,
}

impl Writer {
    /// An empty trace: the header comes with the first record, or with [`Writer::begin`].
    pub fn new() -> Self {
        Self::default()
    }

    /// Writes the header, unless it is written.
    pub fn begin(&mut self) {
        if !std::mem::replace(&mut self.begun, true) {
            self.bytes.extend_from_slice(&MAGIC);
            self.bytes.extend_from_slice(&VERSION.to_ne_bytes());
            self.bytes.extend_from_slice(&ORDER.to_ne_bytes());
            self.bytes.extend_from_slice(&[0; 4]);
        }
    }

    /// Appends a record. Allocates for a flow's first record only, once the sink has grown.
    pub fn write(&mut self, record: &Record) {
        self.begin();
        let RawRecord { kind, key, words } = RawRecord::of(record);
        self.payload.clear();
        self.payload.push(kind);
        if let Some(key) = key {
            let place = slot_index(kind, &key);
            let Some(slot) = self.memory.slot(place) else { return };
            let known = slot.as_ref().is_some_and(|slot| slot.kind == kind && slot.key == key);
            put_number(&mut self.payload, (place as u64) << 1 | u64::from(known));
            if !known {
                self.payload.extend_from_slice(key.as_bytes());
                renew(slot, kind, key);
            }
            if let Some(slot) = slot {
                put_changes(&mut self.payload, &mut slot.words, &words);
            }
        } else if let Some(last) = self.memory.last(kind) {
            put_changes(&mut self.payload, last, &words);
        }
        put_number(&mut self.bytes, self.payload.len() as u64);
        self.bytes.extend_from_slice(&self.payload);
    }

    /// What has been written since the last [`Writer::clear`].
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Forgets the bytes, which have gone elsewhere; the trace goes on.
    pub fn clear(&mut self) {
        self.bytes.clear();
    }

    /// The bytes that are left.
    pub fn into_bytes(mut self) -> Vec<u8> {
        self.begin();
        self.bytes
    }
}

/// Makes a slot another flow's, with the room that it has.
fn renew(slot: &mut Option<Box<Slot>>, kind: u8, key: FlowKey) {
    let fresh = Slot { kind, key, words: Words::EMPTY };
    match slot {
        Some(slot) => **slot = fresh,
        None => *slot = Some(Box::new(fresh)),
    }
}

fn put_changes(bytes: &mut Vec<u8>, base: &mut Words, words: &Words) {
    let both = || words.words.iter().take(words.length).zip(&base.words);
    let mask = both().rev().fold(0, |mask, (new, old)| mask << 1 | u64::from(new != old));
    put_number(bytes, mask);
    for (new, old) in both().filter(|(new, old)| new != old) {
        let change = new.wrapping_sub(*old).cast_signed();
        put_number(bytes, (change << 1 ^ change >> 63).cast_unsigned());
    }
    *base = *words;
}

/// Applies the changes to what is remembered.
fn changes(bytes: &mut &[u8], base: &mut Words, length: usize) -> Result<(), Damage> {
    let mask = number(bytes).ok_or(Damage::ShortWords)??;
    if mask.checked_shr(length as u32).is_some_and(|beyond| beyond != 0) {
        return Err(Damage::ManyWords);
    }
    for (bit, word) in base.words.iter_mut().enumerate().take(length) {
        if mask >> bit & 1 == 1 {
            let change = number(bytes).ok_or(Damage::ShortWords)??;
            let change = (change >> 1) ^ (change & 1).wrapping_neg();
            *word = word.wrapping_add(change);
        }
    }
    base.length = length;
    Ok(())
}

/// Reads a trace record by record; after an error there are no more.
pub struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    memory: Memory,
    skipped: u64,
    ended: bool,
}

impl<'a> Reader<'a> {
    /// A reader of a whole trace.
    ///
    /// # Errors
    /// The header is not one that this version reads.
    pub fn new(bytes: &'a [u8]) -> Result<Self, Error> {
        let header = bytes.get(..HEADER).ok_or(Error::Magic)?;
        let (magic, rest) = header.split_at(MAGIC.len());
        if magic != MAGIC {
            return Err(Error::Magic);
        }
        let half = |at: usize| rest.get(at..at + 2).and_then(|two| two.try_into().ok()).unwrap_or_default();
        match u16::from_ne_bytes(half(2)) {
            ORDER => {}
            order if order == ORDER.swap_bytes() => return Err(Error::ByteOrder),
            _ => return Err(Error::Magic),
        }
        let version = u16::from_ne_bytes(half(0));
        if version != VERSION {
            return Err(Error::Version(version));
        }
        Ok(Self { bytes, at: HEADER, memory: Memory::default(), skipped: 0, ended: false })
    }

    /// How many records were of kinds that this version does not know.
    pub const fn skipped(&self) -> u64 {
        self.skipped
    }

    /// Where the next record begins.
    pub const fn position(&self) -> usize {
        self.at
    }

    fn step(&mut self) -> Result<Option<Record>, Error> {
        let at = self.at;
        let damaged = |what| Error::Damaged { at, what };
        let mut rest = self.bytes.get(at..).unwrap_or_default();
        let length = number(&mut rest).ok_or(Error::Torn { at })?.map_err(damaged)?;
        let length = usize::try_from(length).ok().filter(|length| (1..=LARGEST).contains(length));
        let length = length.ok_or(damaged(Damage::Length))?;
        let mut payload = rest.get(..length).ok_or(Error::Torn { at })?;
        self.at = self.bytes.len() - rest.len() + length;
        let record = self.memory.record(&mut payload).map_err(damaged)?;
        if record.is_none() {
            self.skipped += 1;
        }
        Ok(record)
    }
}

impl Memory {
    fn record(&mut self, payload: &mut &[u8]) -> Result<Option<Record>, Damage> {
        let (kind, rest) = payload.split_first().ok_or(Damage::Empty)?;
        *payload = rest;
        let Some((length, keyed)) = RawRecord::layout(*kind) else { return Ok(None) };
        let mut form = RawRecord { kind: *kind, key: None, words: Words::EMPTY };
        if keyed {
            let place = number(payload).ok_or(Damage::NoFlow)??;
            let known = place & 1 == 1;
            let slot = usize::try_from(place >> 1).ok().and_then(|place| self.slot(place));
            let slot = slot.ok_or(Damage::FlowPlace)?;
            if !known {
                let (key, rest) = payload.split_at_checked(KEY).ok_or(Damage::ShortFlow)?;
                *payload = rest;
                renew(slot, *kind, FlowKey::read_from_bytes(key).unwrap_or_default());
            }
            let slot = slot.as_mut().filter(|slot| slot.kind == *kind).ok_or(Damage::UnknownFlow)?;
            changes(payload, &mut slot.words, length)?;
            (form.key, form.words) = (Some(slot.key), slot.words);
        } else {
            let last = self.last(*kind).ok_or(Damage::KindWithoutPlace)?;
            changes(payload, last, length)?;
            form.words = *last;
        }
        if !payload.is_empty() {
            return Err(Damage::LongRecord);
        }
        Ok(form.record())
    }
}

impl Iterator for Reader<'_> {
    type Item = Result<Record, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        while !self.ended && self.at < self.bytes.len() {
            match self.step() {
                Ok(Some(record)) => return Some(Ok(record)),
                Ok(None) => {}
                Err(error) => {
                    self.ended = true;
                    return Some(Err(error));
                }
            }
        }
        None
    }
}

/// What a trace held.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Replayed {
    /// Records handed on.
    pub records: u64,
    /// Records of kinds that this version does not know.
    pub skipped: u64,
    /// The trace ended within a record, at this byte.
    pub torn: Option<usize>,
}

/// Hands every record of a trace on, in its order. A torn end is told, and no error.
///
/// # Errors
/// The bytes are not a trace, or a record is damaged; the records before it were handed on.
pub fn replay(bytes: &[u8], mut take: impl FnMut(&Record)) -> Result<Replayed, Error> {
    let mut reader = Reader::new(bytes)?;
    let mut replayed = Replayed::default();
    for record in reader.by_ref() {
        match record {
            Ok(record) => {
                take(&record);
                replayed.records += 1;
            }
            Err(Error::Torn { at }) => replayed.torn = Some(at),
            Err(error) => return Err(error),
        }
    }
    replayed.skipped = reader.skipped();
    Ok(replayed)
}
