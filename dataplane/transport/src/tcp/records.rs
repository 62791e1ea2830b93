//! Records: what protects a connection's bytes after its handshake, and by which keys.
//!
//! ```text
//! length of the data (2 bytes, little-endian) | data, 1 to 16,384 bytes | tag (16 bytes)
//! ```
//! A receiver gives on no byte of a record before its tag was verified. Records are numbered from 0 in each direction, and a tag is of
//! one number: a record that is changed, repeated, left out or moved ends the connection.
//!
//! - [`LinkProtection::Authenticated`]: the tag is the first half of HMAC-SHA256 (RFC 2104) of POLYVAL (RFC 8452, section 3) over number,
//!   length and data, as of packets to aggregators.
//! - [`LinkProtection::Encrypted`]: AES-256-GCM (NIST SP 800-38D). The nonce is the number, the length is additional data.
//!
//! Keys come from the link's secret by HKDF-SHA256 (RFC 5869). The salt is the handshake's Hello and the acceptor's nonce, so that each
//! connection has its own; the rest is who sends, and how many keys there were before. A key is for 2^22 records, 64 GiB at most.

use super::handshake::Hello;
use super::inherit::RecordsImage;
use super::sys::{self, Piece};
use crate::DownReason;
use harmonaize_abi::{View, ViewMut};
use harmonaize_kernels::polyval::{BLOCK, Polyval};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::hkdf::{HKDF_SHA256, Prk, Salt};
use ring::hmac;
use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use subtle::ConstantTimeEq;
use zerocopy::IntoBytes;

/// Most bytes of data in a record.
const DATA: usize = 16 << 10;
const LENGTH: usize = 2;
const TAG: usize = 16;
/// Bytes of a record beside its data.
const OVERHEAD: usize = LENGTH + TAG;
/// Room for records at either end: so much is written or read in one call.
const ROOM: usize = 4 * (DATA + OVERHEAD);
/// How many records a key is for.
const RECORDS_PER_KEY: u64 = 1 << 22;

/// How frames between agents are protected, over TCP. Both ends of a link must do the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum LinkProtection {
    /// Not at all: who reaches the connection can change what crosses it.
    None = 0,
    /// What was changed, repeated or moved on the way ends the link. Anybody on the way can read.
    Authenticated = 1,
    /// The same, and nobody on the way can read.
    Encrypted = 2,
}

impl LinkProtection {
    pub(super) fn of(code: u16) -> Option<Self> {
        [Self::None, Self::Authenticated, Self::Encrypted].into_iter().find(|known| *known as u16 == code)
    }
}

impl fmt::Display for LinkProtection {
    /// As the configuration has it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Authenticated => "authenticated",
            Self::Encrypted => "encrypted",
        })
    }
}

/// Both directions of a connection as one of its ends has them.
#[derive(Debug)]
pub(super) struct Records {
    pub(super) sealer: Sealer,
    pub(super) opener: Opener,
    /// What the keys come from, beside the link's secret.
    pub(super) salt: Vec<u8>,
}

impl Records {
    /// From what both ends know after the handshake; none for a link without protection.
    ///
    /// # Errors
    /// If no key can be made.
    pub(super) fn derive(
        protection: LinkProtection,
        initiate: bool,
        secret: &[u8; 32],
        hello: &Hello,
        nonce: &[u8; 32],
    ) -> io::Result<Option<Self>> {
        if protection == LinkProtection::None {
            return Ok(None);
        }
        let mut salt = hello.as_bytes().to_vec();
        salt.extend_from_slice(nonce);
        Self::of(protection, initiate, secret, salt)
            .map(Some)
            .ok_or_else(|| io::Error::other("no keys can be made for a link"))
    }

    fn of(protection: LinkProtection, initiate: bool, secret: &[u8; 32], salt: Vec<u8>) -> Option<Self> {
        let secrets = Salt::new(HKDF_SHA256, &salt).extract(secret);
        let (ours, theirs) = if initiate { (INITIATOR, ACCEPTOR) } else { (ACCEPTOR, INITIATOR) };
        let keys = |from| Keys::new(protection, secrets.clone(), from);
        Some(Self { sealer: Sealer::new(keys(ours)?), opener: Opener::new(keys(theirs)?), salt })
    }

    /// The records of another process of this end's. None where no key can be made, or its records have no room here.
    pub(super) fn resume(
        protection: LinkProtection,
        initiate: bool,
        secret: &[u8; 32],
        image: &RecordsImage,
    ) -> Option<Self> {
        let mut records = Self::of(protection, initiate, secret, image.salt.clone())?;
        records.sealer.keys.skip_to(image.next.0)?;
        records.opener.keys.skip_to(image.next.1)?;
        let opener = &mut records.opener;
        let opened = image.opened.len();
        let end = opened + image.unopened.len();
        opener.records.get_mut(..opened)?.copy_from_slice(&image.opened);
        opener.records.get_mut(opened..end)?.copy_from_slice(&image.unopened);
        (opener.opened, opener.start, opener.end) = (0..opened, opened, end);
        Some(records)
    }
}

type Sender = &'static [u8; 9];
const INITIATOR: Sender = b"initiator";
const ACCEPTOR: Sender = b"acceptor ";

/// The keys of one direction, one after the other.
struct Keys {
    protection: LinkProtection,
    secrets: Prk,
    from: Sender,
    /// The next record's number.
    next: u64,
    /// The key of that record, unless it begins a new one.
    key: Key,
}

enum Key {
    Authenticated { hash: Box<Polyval>, mac: hmac::Key },
    Encrypted(Box<LessSafeKey>),
}

impl fmt::Debug for Keys {
    /// Without the keys.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { protection, secrets: _, from: _, next, key: _ } = self;
        f.debug_tuple("Keys").field(&(protection, next)).finish()
    }
}

impl Keys {
    fn new(protection: LinkProtection, secrets: Prk, from: Sender) -> Option<Self> {
        let key = Key::derive(protection, &secrets, from, 0)?;
        Some(Self { protection, secrets, from, next: 0, key })
    }

    /// Goes on with this record.
    fn skip_to(&mut self, next: u64) -> Option<()> {
        // A key begins with the first of its records, by `take`.
        let before = next.saturating_sub(1) / RECORDS_PER_KEY;
        self.key = Key::derive(self.protection, &self.secrets, self.from, before)?;
        self.next = next;
        Some(())
    }

    /// The next record's number and key.
    fn take(&mut self) -> Option<(u64, &Key)> {
        let number = self.next;
        if number > 0 && number.is_multiple_of(RECORDS_PER_KEY) {
            self.key = Key::derive(self.protection, &self.secrets, self.from, number / RECORDS_PER_KEY)?;
        }
        self.next = number.checked_add(1)?;
        Some((number, &self.key))
    }
}

impl Key {
    fn derive(protection: LinkProtection, secrets: &Prk, from: Sender, before: u64) -> Option<Self> {
        let bytes = |what: &[u8]| {
            let mut bytes = [0; 32];
            let info = [b"harmonaize link ", from.as_slice(), &before.to_le_bytes(), what];
            secrets.expand(&info, HKDF_SHA256).ok()?.fill(&mut bytes).ok()?;
            Some(bytes)
        };
        Some(match protection {
            LinkProtection::None => return None,
            LinkProtection::Authenticated => {
                let hash = bytes(b"hash")?.first_chunk().map(|key| Box::new(Polyval::new(*key)))?;
                Self::Authenticated { hash, mac: hmac::Key::new(hmac::HMAC_SHA256, &bytes(b"tag")?) }
            }
            LinkProtection::Encrypted => {
                let key = UnboundKey::new(&AES_256_GCM, &bytes(b"encryption")?).ok()?;
                Self::Encrypted(Box::new(LessSafeKey::new(key)))
            }
        })
    }

    /// Writes a record of these pieces, which are as long together as its room for data. A piece that is alone is copied and hashed in
    /// one pass. Each byte of a piece is read once, so the tag is of what is sent, whatever a tenant writes there meanwhile.
    ///
    /// # Safety
    /// Each piece must be readable for the time of the call.
    unsafe fn seal(&self, number: u64, pieces: &[Piece], record: &mut [u8]) -> Option<()> {
        let (length, data, tag) = parts(record)?;
        *length = u16::try_from(data.len()).ok()?.to_le_bytes();
        if let (Self::Authenticated { hash, mac }, [piece]) = (self, pieces) {
            // SAFETY: as the caller vouches.
            let from = unsafe { View::new(piece.iov_base.cast_const().cast(), piece.iov_len) };
            let hashed = hash.hash_copying(&numbered(number, data), from, ViewMut::from(data))?;
            *tag = sign(mac, &hashed)?;
            return Some(());
        }
        // SAFETY: as the caller vouches.
        unsafe { copy(pieces, data) }?;
        *tag = match self {
            Self::Authenticated { hash, mac } => authenticate(hash, mac, number, data)?,
            Self::Encrypted(key) => {
                let made = key.seal_in_place_separate_tag(nonce(number), Aad::from(*length), data).ok()?;
                made.as_ref().try_into().ok()?
            }
        };
        Some(())
    }

    /// Opens the peer's record of this number, or none if it is not that. Its data goes to `to`, as long as that, where the key can verify
    /// and copy in one pass: true. It counts only once this has returned so. Else it stays in the record, decrypted: false.
    fn open(&self, number: u64, record: &mut [u8], to: Option<ViewMut<'_>>) -> Option<bool> {
        let (length, data, tag) = parts(record)?;
        match (self, to) {
            (Self::Authenticated { hash, mac }, Some(to)) => {
                // What is hashed is the record, which nobody else writes to, and never what lies in `to`.
                let hashed = hash.hash_copying(&numbered(number, data), View::from(&*data), to)?;
                bool::from(sign(mac, &hashed)?.ct_eq(tag)).then_some(true)
            }
            (Self::Authenticated { hash, mac }, None) => {
                bool::from(authenticate(hash, mac, number, data)?.ct_eq(tag)).then_some(false)
            }
            (Self::Encrypted(key), _) => {
                let aad = Aad::from(*length);
                key.open_in_place(nonce(number), aad, record.get_mut(LENGTH..)?).ok().map(|_| false)
            }
        }
    }
}

/// Copies pieces one after the other to where there is as much room; none where there is not.
///
/// # Safety
/// Each piece must be readable for the time of the call.
unsafe fn copy(pieces: &[Piece], to: &mut [u8]) -> Option<()> {
    let mut rest = to;
    for piece in pieces {
        let (to, behind) = rest.split_at_mut_checked(piece.iov_len)?;
        // SAFETY: the piece is readable by the caller's word, and `to` is as long and no part of it.
        unsafe { std::ptr::copy_nonoverlapping(piece.iov_base.cast(), to.as_mut_ptr(), to.len()) };
        rest = behind;
    }
    rest.is_empty().then_some(())
}

/// A record's length, data and tag.
fn parts(record: &mut [u8]) -> Option<(&mut [u8; LENGTH], &mut [u8], &mut [u8; TAG])> {
    let (length, rest) = record.split_first_chunk_mut()?;
    let (data, tag) = rest.split_last_chunk_mut()?;
    Some((length, data, tag))
}

fn nonce(number: u64) -> Nonce {
    let mut nonce = [0; NONCE_LEN];
    if let Some(room) = nonce.last_chunk_mut() {
        *room = number.to_be_bytes();
    }
    Nonce::assume_unique_for_key(nonce)
}

fn authenticate(hash: &Polyval, mac: &hmac::Key, number: u64, data: &[u8]) -> Option<[u8; TAG]> {
    sign(mac, &hash.hash([&numbered(number, data), data]))
}

/// What is hashed before the data.
fn numbered(number: u64, data: &[u8]) -> [u8; BLOCK] {
    zerocopy::transmute!([number, data.len() as u64].map(u64::to_le_bytes))
}

fn sign(mac: &hmac::Key, hash: &[u8; BLOCK]) -> Option<[u8; TAG]> {
    hmac::sign(mac, hash).as_ref().first_chunk().copied()
}

/// What goes out: plain bytes in, records to the socket.
///
/// Cost a byte: a pass that copies and hashes, or a copy and a pass of AES-GCM, both in the first caches.
#[derive(Debug)]
pub(super) struct Sealer {
    keys: Keys,
    /// Whole records; what lies from `start` to `end` is not with the kernel yet.
    records: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Sealer {
    fn new(keys: Keys) -> Self {
        Self { keys, records: vec![0; ROOM].into_boxed_slice(), start: 0, end: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Most bytes of the next record's data; 0 if there is no room for another.
    pub(super) fn room(&self) -> usize {
        let used = if self.is_empty() { 0 } else { self.end };
        if self.records.len() < used + OVERHEAD + DATA { 0 } else { DATA }
    }

    /// Makes a record of these pieces, in order.
    ///
    /// # Errors
    /// If it cannot be sealed: it has no data, or more than [`Self::room`].
    ///
    /// # Safety
    /// Each piece must be readable for the time of the call.
    pub(super) unsafe fn seal(&mut self, pieces: &[Piece]) -> io::Result<()> {
        let data = pieces.iter().fold(0, |sum: usize, piece| sum.saturating_add(piece.iov_len));
        let room = self.room();
        if self.is_empty() {
            (self.start, self.end) = (0, 0);
        }
        let fits = (1..=room).contains(&data);
        let record = self.records.get_mut(self.end..).filter(|_| fits);
        let sealed = record.and_then(|records| records.get_mut(..OVERHEAD + data)).and_then(|record| {
            let (number, key) = self.keys.take()?;
            // SAFETY: as the caller vouches.
            unsafe { key.seal(number, pieces, record) }
        });
        sealed.ok_or_else(|| io::Error::other("a record cannot be sealed"))?;
        self.end += OVERHEAD + data;
        Ok(())
    }

    /// Offers all records in one call: how many bytes were taken, and whether all were.
    pub(super) fn write(&mut self, socket: BorrowedFd<'_>) -> io::Result<(usize, bool)> {
        let records = self.records.get(self.start..self.end).unwrap_or_default();
        let taken = sys::send_bytes(socket, records)?;
        self.start += taken;
        Ok((taken, self.is_empty()))
    }

    /// The records that are not with the kernel yet, and `rest` in further ones. Allocates.
    ///
    /// # Errors
    /// If one cannot be sealed.
    pub(super) fn finish(&mut self, rest: &[u8]) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::with_capacity(rest.len() + rest.len() / DATA * OVERHEAD + ROOM);
        let mut take = |this: &mut Self| {
            bytes.extend_from_slice(this.records.get(this.start..this.end).unwrap_or_default());
            this.start = this.end;
        };
        take(self);
        for data in rest.chunks(DATA) {
            let piece = Piece { iov_base: data.as_ptr().cast_mut().cast(), iov_len: data.len() };
            // SAFETY: the piece is `data`, which is only read.
            unsafe { self.seal(&[piece]) }?;
            take(self);
        }
        Ok(bytes)
    }
}

/// What comes in: records from the socket, plain bytes out.
///
/// Cost a byte: a pass that hashes and copies, or a pass of AES-GCM and a copy.
#[derive(Debug)]
pub(super) struct Opener {
    keys: Keys,
    /// As they came: what lies from `start` to `end` was not looked at yet, or is not whole.
    records: Box<[u8]>,
    start: usize,
    end: usize,
    /// Where `records` has verified data that was not given on yet.
    opened: Range<usize>,
    /// What is wrong with the record behind those.
    wrong: Option<DownReason>,
}

/// What a call of [`Opener::receive`] brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Opened {
    /// So many verified bytes, and whether there may be more.
    Bytes(usize, bool),
    /// Some bytes and for now no more, but no whole record.
    Partial,
    /// The stream has ended.
    End,
}

/// What became of the next record.
enum Next {
    /// It is not whole yet.
    Incomplete,
    /// It is verified, and its data lies in `opened`.
    Kept,
    /// It is verified, and so many bytes of data lie where they were to go.
    Moved(usize),
}

/// Moves a piece past what was filled.
fn pass(piece: &mut Piece, count: usize) {
    piece.iov_base = piece.iov_base.wrapping_byte_add(count);
    piece.iov_len -= count;
}

impl Sealer {
    /// The next record's number.
    pub(super) fn next(&self) -> u64 {
        self.keys.next
    }
}

impl Opener {
    /// The next record's number, what is verified and not given on, and what was not looked at yet.
    pub(super) fn image(&self) -> (u64, &[u8], &[u8]) {
        let bytes = |range: Range<usize>| self.records.get(range).unwrap_or_default();
        (self.keys.next, bytes(self.opened.clone()), bytes(self.start..self.end))
    }

    fn new(keys: Keys) -> Self {
        Self { keys, records: vec![0; ROOM].into_boxed_slice(), start: 0, end: 0, opened: 0..0, wrong: None }
    }

    /// At most one system call: verified bytes into the pieces in order, which are moved past what was filled. Behind that, in what is left
    /// of a piece, may lie bytes that nobody has verified.
    ///
    /// # Errors
    /// If a record is not the peer's next, or is cut off.
    ///
    /// # Safety
    /// Each piece must be writable for the time of the call, and covered by no reference.
    pub(super) unsafe fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        pieces: &mut [Piece],
    ) -> Result<io::Result<Opened>, DownReason> {
        // SAFETY: as the caller vouches.
        let got = unsafe { self.give(pieces) }?;
        if got > 0 || !self.opened.is_empty() {
            return Ok(Ok(Opened::Bytes(got, true)));
        }
        if self.start > 0 {
            self.records.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let room = self.records.get_mut(self.end..).unwrap_or_default();
        let asked = room.len();
        let read = match sys::receive_bytes(socket, room) {
            Ok(0) if self.end > 0 => {
                let why = "the connection ended within a record: it was cut off, or its process ended";
                return Err(DownReason::Network(why.into()));
            }
            Ok(0) => return Ok(Ok(Opened::End)),
            Ok(read) => read,
            Err(error) => return Ok(Err(error)),
        };
        self.end += read;
        // SAFETY: as the caller vouches.
        let got = unsafe { self.give(pieces) }?;
        let more = read == asked || !self.opened.is_empty() || self.has_record() || self.wrong.is_some();
        // A full buffer has a whole record.
        Ok(Ok(if got > 0 { Opened::Bytes(got, more) } else { Opened::Partial }))
    }

    /// Moves verified bytes into the pieces while there are whole records and room.
    ///
    /// # Safety
    /// As of [`Self::receive`].
    unsafe fn give(&mut self, pieces: &mut [Piece]) -> Result<usize, DownReason> {
        let mut given = 0;
        for piece in pieces {
            while piece.iov_len > 0 {
                if self.opened.is_empty() {
                    if given > 0 && self.outgrows(piece.iov_len) {
                        return Ok(given);
                    }
                    // SAFETY: as the caller vouches.
                    let to = unsafe { ViewMut::new(piece.iov_base.cast(), piece.iov_len) };
                    match self.wrong.take().map_or_else(|| self.open_next(to), Err) {
                        Ok(Next::Kept) => {}
                        Ok(Next::Moved(count)) => {
                            pass(piece, count);
                            given += count;
                            continue;
                        }
                        Ok(Next::Incomplete) => return Ok(given),
                        Err(reason) if given == 0 => return Err(reason),
                        // What is right before it counts.
                        Err(reason) => {
                            self.wrong = Some(reason);
                            return Ok(given);
                        }
                    }
                }
                let from = self.records.get(self.opened.clone()).unwrap_or_default();
                let count = piece.iov_len.min(from.len());
                // SAFETY: the piece has that many bytes by the caller's word, and the buffer, of which none is part, as well.
                unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), piece.iov_base.cast(), count) };
                pass(piece, count);
                self.opened.start += count;
                given += count;
            }
        }
        Ok(given)
    }

    /// The next record's length with what is around its data, if that has come.
    fn next_bytes(&self) -> Option<usize> {
        let length = self.records.get(self.start..self.end)?.first_chunk()?;
        Some(usize::from(u16::from_le_bytes(*length)) + OVERHEAD)
    }

    /// Whether the next record has more data than there is room, and no more than a record may have. Behind a head it waits until that was
    /// looked at: most likely it has a payload, and goes to where that lands.
    fn outgrows(&self, room: usize) -> bool {
        self.next_bytes().is_some_and(|bytes| (OVERHEAD + room + 1..=OVERHEAD + DATA).contains(&bytes))
    }

    fn has_record(&self) -> bool {
        self.next_bytes().is_some_and(|bytes| bytes <= self.end - self.start)
    }

    /// Verifies the next record, if it is whole. Its data goes to `to` where that has room for all.
    fn open_next(&mut self, to: ViewMut<'_>) -> Result<Next, DownReason> {
        let Some(bytes) = self.next_bytes() else { return Ok(Next::Incomplete) };
        let number = self.keys.next;
        let forged = |what| Err(DownReason::Forged(format!("record {number} {what}")));
        if bytes == OVERHEAD || bytes > OVERHEAD + DATA {
            return forged("has a length that no agent gives");
        }
        let whole = self.start..self.start + bytes;
        let Some(record) = self.records.get_mut(whole.clone()).filter(|_| whole.end <= self.end) else {
            return Ok(Next::Incomplete);
        };
        let data = bytes - OVERHEAD;
        let to = to.range(0, data);
        let Some(moved) = self.keys.take().and_then(|(number, key)| key.open(number, record, to)) else {
            return forged("was changed on the way, repeated, left out or moved");
        };
        self.start = whole.end;
        if moved {
            return Ok(Next::Moved(data));
        }
        self.opened = whole.start + LENGTH..whole.end - TAG;
        Ok(Next::Kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    const PROTECTIONS: [LinkProtection; 2] = [LinkProtection::Authenticated, LinkProtection::Encrypted];

    fn records(protection: LinkProtection, initiate: bool, secret: u8, nonce: u8) -> Records {
        let hello = Hello::new([1; 16], 0, 1, protection, [2; 32]);
        Records::derive(protection, initiate, &[secret; 32], &hello, &[nonce; 32]).unwrap().unwrap()
    }

    /// What one end sends, and what the other receives it by.
    fn ends(protection: LinkProtection) -> (Sealer, Opener) {
        (records(protection, true, 3, 4).sealer, records(protection, false, 3, 4).opener)
    }

    fn sealed(sealer: &mut Sealer, data: &[u8]) -> Vec<u8> {
        sealer.finish(data).unwrap()
    }

    fn opened(opener: &mut Opener, bytes: &[u8]) -> (Vec<u8>, Result<(), DownReason>) {
        opened_into([1000, 2000], opener, bytes)
    }

    /// All that an opener gives on of these bytes, after which the stream ends, and how that goes. It has two pieces of these lengths
    /// at a time.
    fn opened_into(
        lengths: [usize; 2],
        opener: &mut Opener,
        bytes: &[u8],
    ) -> (Vec<u8>, Result<(), DownReason>) {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let writer = {
            let bytes = bytes.to_vec();
            // The other end may be gone before all is written.
            std::thread::spawn(move || drop(theirs.write_all(&bytes)))
        };
        let (mut room, mut all) = (vec![0; lengths[0] + lengths[1]], Vec::new());
        let outcome = loop {
            let (one, two) = room.split_at_mut(lengths[0]);
            let piece = |room: &mut [u8]| Piece { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
            let mut pieces = [piece(one), piece(two)];
            // SAFETY: the pieces are `room`, which nothing else touches meanwhile.
            match unsafe { opener.receive(ours.as_fd(), &mut pieces) } {
                Ok(Ok(Opened::Bytes(got, _))) => all.extend_from_slice(&room[..got]),
                Ok(Ok(Opened::Partial)) => {}
                Ok(Ok(Opened::End)) => break Ok(()),
                Ok(Err(error)) if error.kind() == io::ErrorKind::WouldBlock => std::thread::yield_now(),
                Ok(Err(error)) => panic!("{error}"),
                Err(reason) => break Err(reason),
            }
        };
        drop(ours);
        writer.join().unwrap();
        (all, outcome)
    }

    fn pattern(bytes: usize) -> Vec<u8> {
        (0..bytes).map(|at| (at * 131 + at / 255) as u8).collect()
    }

    fn is_forged(outcome: &Result<(), DownReason>) -> bool {
        matches!(outcome, Err(DownReason::Forged(_)))
    }

    #[test]
    fn what_is_sealed_comes_out_and_nothing_else() {
        for protection in PROTECTIONS {
            let (mut sealer, mut opener) = ends(protection);
            for bytes in [0, 1, 15, 16, 17, DATA - 1, DATA, DATA + 1, 10 * DATA + 7] {
                let data = pattern(bytes);
                let wire = sealed(&mut sealer, &data);
                assert_eq!(wire.len(), bytes + bytes.div_ceil(DATA) * OVERHEAD);
                let shows = wire.windows(8).any(|part| data.windows(8).next() == Some(part));
                let plain = protection == LinkProtection::Authenticated;
                assert_eq!(shows, plain && bytes >= 8, "{protection}, {bytes} bytes");
                assert_eq!(opened(&mut opener, &wire), (data, Ok(())), "{protection}, {bytes} bytes");
            }
        }
    }

    /// Of one piece it is made in one pass, of several after they were copied. Into one piece it is opened in one pass.
    #[test]
    fn a_record_is_the_same_however_it_is_made_and_opened() {
        let data = pattern(700);
        for protection in PROTECTIONS {
            let wire = sealed(&mut ends(protection).0, &data);
            for parts in [vec![&data[..]], vec![&data[..1], &data[1..]], data.chunks(99).collect()] {
                let (mut sealer, _) = ends(protection);
                let piece =
                    |part: &&[u8]| Piece { iov_base: part.as_ptr().cast_mut().cast(), iov_len: part.len() };
                let pieces: Vec<Piece> = parts.iter().map(piece).collect();
                // SAFETY: the pieces are `data`, which is only read.
                unsafe { sealer.seal(&pieces) }.unwrap();
                assert_eq!(sealer.finish(&[]).unwrap(), wire, "{protection}, {} pieces", pieces.len());
            }
            for lengths in [[1000, 2000], [700, 1], [699, 1], [699, 700], [3, 700], [1, 1]] {
                let (_, mut opener) = ends(protection);
                let (all, outcome) = opened_into(lengths, &mut opener, &wire);
                assert_eq!((all == data, outcome), (true, Ok(())), "{protection}, {lengths:?}");
            }
        }
    }

    /// So a payload's record does not pass through the buffer that its head came into.
    #[test]
    fn a_record_that_does_not_fit_waits_for_where_it_lands() {
        for protection in PROTECTIONS {
            let (mut sealer, mut opener) = ends(protection);
            let data = pattern(DATA);
            let wire = [sealed(&mut sealer, &data[..40]), sealed(&mut sealer, &data)].concat();
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            theirs.write_all(&wire).unwrap();
            for (room, came) in [(1000, 40), (DATA, DATA)] {
                let mut bytes = vec![0; room];
                let mut piece = [Piece { iov_base: bytes.as_mut_ptr().cast(), iov_len: room }];
                // SAFETY: the piece is `bytes`, which nothing else touches meanwhile.
                let received = unsafe { opener.receive(ours.as_fd(), &mut piece) }.unwrap().unwrap();
                assert_eq!(received, Opened::Bytes(came, true), "{protection}");
                assert!(bytes[..came] == data[..came], "{protection}");
            }
        }
    }

    #[test]
    fn a_change_of_any_bit_lets_nothing_of_its_record_through() {
        for protection in PROTECTIONS {
            let (first, second) = (pattern(50), pattern(70));
            let wire = |sealer: &mut Sealer| [sealed(sealer, &first), sealed(sealer, &second)].concat();
            // With room for a whole record, for one of the two, and for none.
            for lengths in [[1000, 2000], [60, 10], [7, 5]] {
                for bit in 0..8 * (50 + 70 + 2 * OVERHEAD) {
                    let (mut sealer, mut opener) = ends(protection);
                    let mut wire = wire(&mut sealer);
                    wire[bit / 8] ^= 1 << (bit % 8);
                    let (all, outcome) = opened_into(lengths, &mut opener, &wire);
                    let right: &[u8] = if bit / 8 < 50 + OVERHEAD { &[] } else { &first };
                    assert_eq!(all, right, "{protection}, bit {bit}, {lengths:?}");
                    // A length that has grown waits for more than comes.
                    let ended = is_forged(&outcome) || matches!(outcome, Err(DownReason::Network(_)));
                    assert!(ended, "{protection}, bit {bit}, {lengths:?}: {outcome:?}");
                }
            }
        }
    }

    #[test]
    fn repeated_moved_and_missing_records_are_refused() {
        for protection in PROTECTIONS {
            let (mut sealer, _) = ends(protection);
            let wires = [1, 2, 3].map(|byte| sealed(&mut sealer, &[byte; 40]));
            for (order, through) in
                [(&[0, 1, 2][..], 3), (&[0, 0], 1), (&[1, 0], 0), (&[0, 2], 1), (&[0, 1, 0], 2), (&[2], 0)]
            {
                let (_, mut opener) = ends(protection);
                let wire: Vec<u8> = order.iter().flat_map(|at| wires[*at].clone()).collect();
                let (all, outcome) = opened(&mut opener, &wire);
                assert_eq!(all.len(), through * 40, "{order:?}");
                assert_eq!(is_forged(&outcome), through < order.len(), "{order:?}: {outcome:?}");
            }
        }
    }

    #[test]
    fn a_record_that_is_cut_off_is_noticed() {
        for protection in PROTECTIONS {
            let (mut sealer, _) = ends(protection);
            let wire = sealed(&mut sealer, &pattern(40));
            for bytes in 1..wire.len() {
                let (_, mut opener) = ends(protection);
                let (all, outcome) = opened(&mut opener, &wire[..bytes]);
                assert!(all.is_empty() && matches!(outcome, Err(DownReason::Network(_))), "{bytes} bytes");
            }
        }
    }

    #[test]
    fn other_keys_open_nothing() {
        for protection in PROTECTIONS {
            let wire = sealed(&mut ends(protection).0, &pattern(40));
            let [one, two] = PROTECTIONS;
            let other = if protection == one { two } else { one };
            let wrong = [
                records(protection, false, 9, 4),
                records(protection, false, 3, 9),
                records(other, false, 3, 4),
                // A record that comes back to who made it.
                records(protection, true, 3, 4),
            ];
            for mut wrong in wrong {
                let (all, outcome) = opened(&mut wrong.opener, &wire);
                assert!(all.is_empty() && is_forged(&outcome), "{protection}: {outcome:?}");
            }
        }
    }

    #[test]
    fn a_new_key_follows_one_that_is_used_up() {
        for protection in PROTECTIONS {
            let (mut sealer, mut opener) = ends(protection);
            (sealer.keys.next, opener.keys.next) = (RECORDS_PER_KEY - 1, RECORDS_PER_KEY - 1);
            let last = sealed(&mut sealer, b"the last of a key");
            let first = sealed(&mut sealer, b"the first of the next");
            let (all, outcome) = opened(&mut opener, &[last, first.clone()].concat());
            assert_eq!((&all[..], outcome), (&b"the last of a keythe first of the next"[..], Ok(())));
            let key = |before| Key::derive(protection, &opener.keys.secrets, INITIATOR, before).unwrap();
            assert!(key(1).open(RECORDS_PER_KEY, &mut first.clone(), None).is_some());
            assert!(
                key(0).open(RECORDS_PER_KEY, &mut first.clone(), None).is_none(),
                "the key did not change"
            );
        }
    }

    #[test]
    fn a_full_room_says_so_and_takes_no_more() {
        let (mut sealer, _) = ends(LinkProtection::Encrypted);
        let (data, mut full) = (pattern(DATA), 0);
        let piece = |iov_len| Piece { iov_base: data.as_ptr().cast_mut().cast(), iov_len };
        while sealer.room() > 0 {
            // SAFETY: the piece is `data`, which is only read.
            unsafe { sealer.seal(&[piece(sealer.room())]) }.unwrap();
            full += 1;
        }
        assert_eq!(full, ROOM / (DATA + OVERHEAD));
        for bytes in [0, 1, DATA] {
            // SAFETY: as above.
            assert!(unsafe { sealer.seal(&[piece(bytes)]) }.is_err(), "{bytes} bytes");
        }
    }

    #[test]
    fn debug_output_has_no_keys() {
        let (sealer, opener) = ends(LinkProtection::Encrypted);
        let (sealer, opener) = (format!("{:?}", sealer.keys), format!("{:?}", opener.keys));
        assert_eq!((&sealer[..], &opener[..]), ("Keys((Encrypted, 0))", "Keys((Encrypted, 0))"));
    }
}
