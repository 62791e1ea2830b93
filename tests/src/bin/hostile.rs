//! A tenant's process that does its host's agent all the harm that it can. It does so by one attack or another, for as long as
//! it is told.

#![forbid(unsafe_code)]

use anyhow::{Context, Result, bail};
use clap::{Parser, ValueEnum};
use harmonaize_abi::session::{
    Access, Answer, Budget, Constraints, Hello, Refused, Request, Welcome, decode, decode_first, encode,
    encode_first, length,
};
use harmonaize_abi::{Collective, Dtype, Rank, Region, Submission};
use harmonaize_client::{AttachOptions, Client, ReduceOp};
use harmonaize_shm::{MappedTenant, Memory, TenantEnd, receive_with_descriptors};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::net::{RecvFlags, SendFlags};
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A tenant's process that harms its host's agent.
#[derive(Parser)]
struct Arguments {
    /// The agent's socket
    #[arg(long)]
    socket: PathBuf,
    /// Of the job; not looked at
    #[arg(long)]
    name: String,
    /// What it does
    #[arg(long)]
    attack: Attack,
    /// For how long
    #[arg(long)]
    seconds: f64,
    /// What it draws from
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Attack {
    /// Writes anything anywhere into the rings and the arena.
    Scribble,
    /// Rings the doorbell without end.
    Doorbell,
    /// Asks and submits, and reads nothing.
    Silent,
    /// Attaches and goes, again and again.
    Attach,
    /// Submits descriptors that make no sense, or change once they are published.
    Descriptors,
    /// Sends parts of frames on an attachment that maps nothing.
    Truncate,
    /// Proposes, in messages of the greatest length.
    Maximal,
    /// Takes memory back while operations use it.
    Unmap,
}

/// Numbers from a seed (xorshift).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let end = Instant::now() + Duration::from_secs_f64(arguments.seconds);
    let mut random = Random(arguments.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let run: fn(&Path, &mut Random, Instant, &mut u64) -> Result<()> = match arguments.attack {
        Attack::Scribble => scribble,
        Attack::Doorbell => doorbell,
        Attack::Silent => silent,
        Attack::Attach => attach,
        Attack::Descriptors => descriptors,
        Attack::Truncate => truncate,
        Attack::Maximal => maximal,
        Attack::Unmap => unmap,
    };
    let (mut done, mut refused) = (0, 0_u64);
    // An attachment ends by what it does; then comes the next, as long as there is time. What was done before counts.
    while Instant::now() < end {
        if let Err(error) = run(&arguments.socket, &mut random, end, &mut done) {
            refused += 1;
            if refused == 1 {
                eprintln!("{:?}: {error:#}", arguments.attack);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    println!("{done}");
    eprintln!("{:?} of {}: {done} times, {refused} attachments ended", arguments.attack, arguments.name);
    Ok(())
}

/// An attachment by hand.
struct Raw {
    session: UnixStream,
    welcome: Welcome,
    descriptors: Vec<OwnedFd>,
}

impl Raw {
    fn attach(socket: &Path, access: Access, arena_bytes: u64, entries: u32) -> Result<Self> {
        let mut session = UnixStream::connect(socket)?;
        session.set_read_timeout(Some(Duration::from_secs(5)))?;
        session.set_write_timeout(Some(Duration::from_secs(5)))?;
        session.write_all(&encode_first(&Hello { access, arena_bytes, entries })?)?;
        let mut bytes = [0; 1024];
        let (received, descriptors) =
            receive_with_descriptors(session.as_fd(), &mut bytes, RecvFlags::empty())?;
        let message = bytes.get(4..received).context("no answer")?;
        match decode_first::<Result<Welcome, Refused>>(message)? {
            Ok(welcome) => Ok(Self { session, welcome, descriptors }),
            Err(refused) => bail!("refused: {}", refused.text),
        }
    }

    fn ask(&mut self, request: &Request) -> Result<()> {
        Ok(self.session.write_all(&encode(request)?)?)
    }

    fn answer(&mut self) -> Result<Answer> {
        let mut prefix = [0; 4];
        self.session.read_exact(&mut prefix)?;
        let mut message = vec![0; length(prefix)?];
        self.session.read_exact(&mut message)?;
        Ok(decode(&message)?)
    }

    /// Joins a communicator of this rank alone; its handle.
    fn join(&mut self, name: u64) -> Result<u32> {
        self.ask(&Request::Join {
            id: 1,
            job: String::new(),
            name: format!("hostile{name}"),
            rank: Rank(0),
            ranks: 1,
            timeout_ns: 5_000_000_000,
            budget: Budget::default(),
        })?;
        match self.answer()? {
            Answer::Joined { communicator, .. } => Ok(communicator),
            other => bail!("not joined: {other:?}"),
        }
    }
}

fn scribble(socket: &Path, random: &mut Random, end: Instant, done: &mut u64) -> Result<()> {
    let mut raw = Raw::attach(socket, Access::Mapped, 1 << 20, 16)?;
    let communicator = raw.join(random.next())?;
    let [arena, rings, bell] = <[OwnedFd; 3]>::try_from(raw.descriptors).ok().context("descriptors")?;
    let bytes = rustix::fs::fstat(&rings)?.st_size.unsigned_abs();
    let (rings, arena) = (Memory::map(rings, bytes)?, Memory::map(arena, raw.welcome.arena_bytes)?);
    for _ in 0..10_000 {
        if Instant::now() > end {
            break;
        }
        for _ in 0..32 {
            let value = match random.below(4) {
                0 => random.next(),
                1 => random.below(20),
                2 => u64::from(communicator) << 32,
                _ => random.next() & 0xff,
            };
            rings.write(random.below(bytes / 8) * 8, &value.to_le_bytes())?;
            arena.write(random.below(raw.welcome.arena_bytes - 8), &value.to_le_bytes())?;
        }
        *done += 1;
        rustix::net::send(&bell, &[1; 8], SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
            .or_else(|error| if error == rustix::io::Errno::AGAIN { Ok(0) } else { Err(error) })?;
    }
    Ok(())
}

fn doorbell(socket: &Path, _: &mut Random, end: Instant, done: &mut u64) -> Result<()> {
    let raw = Raw::attach(socket, Access::Mapped, 4096, 4)?;
    let bell = raw.descriptors.get(2).context("no doorbell")?;
    while Instant::now() < end {
        match rustix::net::send(bell, &[1; 1024], SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(_) => *done += 1,
            Err(rustix::io::Errno::AGAIN) => std::thread::yield_now(),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn silent(socket: &Path, random: &mut Random, end: Instant, done: &mut u64) -> Result<()> {
    let mut raw = Raw::attach(socket, Access::Mapped, 1 << 20, 16)?;
    let communicator = raw.join(random.next())?;
    let descriptors = <[OwnedFd; 3]>::try_from(raw.descriptors).ok().context("descriptors")?;
    let mut tenant = MappedTenant::open(descriptors, raw.welcome.arena_bytes, raw.welcome.entries)?;
    let tensor = Region { offset: 0, bytes: 1 << 19 };
    let submission = sum(communicator, tensor, Region { offset: 1 << 19, ..tensor });
    // As many as there is room for, and none of the completions is taken.
    while tenant.submit(&submission).is_ok() {
        *done += 1;
    }
    raw.session.set_nonblocking(true)?;
    let questions = encode(&Request::Detail { id: 2, communicator })?.repeat(64);
    let mut at = 0;
    let patience = Instant::now() + Duration::from_millis(500);
    while Instant::now() < end.min(patience) {
        match raw.session.write(questions.get(at..).unwrap_or_default()) {
            Ok(written) => at = (at + written) % questions.len(),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                // A descriptor beyond what the rings hold.
                *done += u64::from(tenant.submit(&submission).is_ok());
                std::thread::sleep(Duration::from_micros(100));
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn attach(socket: &Path, random: &mut Random, end: Instant, done: &mut u64) -> Result<()> {
    let mut held = Vec::new();
    while Instant::now() < end {
        let access = if random.below(2) == 0 { Access::Mapped } else { Access::Remote };
        match Raw::attach(socket, access, 1 << 20, 4) {
            Ok(raw) => {
                *done += 1;
                held.push(raw);
            }
            // There are no more to be had: all go at once.
            Err(_) => held.clear(),
        }
        if random.below(40) == 0 {
            held.clear();
        }
    }
    Ok(())
}

/// An AllReduce of 32-bit floats.
fn sum(communicator: u32, input: Region, output: Region) -> Submission {
    Submission {
        version: harmonaize_abi::ABI_VERSION,
        collective: Collective::AllReduce.code(),
        dtype: Dtype::F32.code(),
        communicator,
        count: input.bytes / 4,
        input,
        output,
        ..Submission::default()
    }
}

fn descriptors(socket: &Path, random: &mut Random, end: Instant, done: &mut u64) -> Result<()> {
    let mut raw = Raw::attach(socket, Access::Mapped, 1 << 20, 16)?;
    let communicator = raw.join(random.next())?;
    let [arena, rings, bell] = <[OwnedFd; 3]>::try_from(raw.descriptors).ok().context("descriptors")?;
    let bytes = rustix::fs::fstat(&rings)?.st_size.unsigned_abs();
    let written = Memory::map(rings.try_clone()?, bytes)?;
    let mut tenant = MappedTenant::open([arena, rings, bell], raw.welcome.arena_bytes, raw.welcome.entries)?;
    while Instant::now() < end {
        let near = |random: &mut Random| match random.below(4) {
            0 => random.next(),
            1 => u64::MAX - random.below(9),
            _ => random.below(1 << 21),
        };
        let region = |random: &mut Random| {
            let bytes = random.below(1 << 15) * 4;
            Region { offset: near(random), bytes: if random.below(4) == 0 { near(random) } else { bytes } }
        };
        let (input, output) = (region(random), region(random));
        let mut one = sum(communicator, input, output);
        match random.below(8) {
            0 => one.collective = random.next() as u8,
            1 => one.dtype = random.next() as u8,
            2 => one.flags = random.next() as u8,
            3 => one.communicator = random.next() as u32,
            4 => one.root = random.next() as u32,
            5 => one.count = near(random),
            6 => (one.residual_in, one.residual_out) = (region(random), region(random)),
            _ => one.timeout_ns = random.next(),
        }
        let taken = tenant.submit(&one).is_ok();
        *done += u64::from(taken);
        // The other entries, or this one, become something else meanwhile.
        for _ in 0..4 {
            written.write(1024 + random.below((bytes - 1024) / 8) * 8, &near(random).to_le_bytes())?;
        }
        while tenant.completion()?.is_some() {}
        if !taken {
            std::thread::yield_now();
        }
    }
    Ok(())
}

fn truncate(socket: &Path, random: &mut Random, end: Instant, done: &mut u64) -> Result<()> {
    while Instant::now() < end {
        let mut raw = Raw::attach(socket, Access::Remote, 1 << 20, 4)?;
        let communicator = raw.join(random.next())?;
        let stream = raw.descriptors.first().context("no socket")?;
        let tensor = Region { offset: 0, bytes: 4096 };
        let mut frame = [1_u32.to_le_bytes().as_slice(), &[0; 28]].concat();
        frame.extend(zerocopy::IntoBytes::as_bytes(&sum(communicator, tensor, tensor)));
        frame = frame.repeat(3);
        frame.truncate(random.below(frame.len() as u64) as usize);
        if random.below(3) == 0
            && let Some(byte) = frame.first_mut()
        {
            *byte = random.next() as u8;
        }
        let _ = rustix::net::send(stream, &frame, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
        if random.below(2) == 0 {
            // The agent asks for the tensor, and hears nothing.
            std::thread::sleep(Duration::from_millis(random.below(20)));
        }
        *done += 1;
    }
    Ok(())
}

fn maximal(socket: &Path, random: &mut Random, end: Instant, done: &mut u64) -> Result<()> {
    let mut raw = Raw::attach(socket, Access::Mapped, 4096, 4)?;
    let mut constraints = Constraints::new();
    for _ in 0..3000 {
        constraints = constraints.p99(random.next(), Duration::from_nanos(random.next()));
    }
    let request = Request::Negotiate { id: 7, communicator: "x".repeat(128), propose: Some(constraints) };
    let mut message = encode(&request)?;
    while Instant::now() < end {
        if random.below(16) == 0 {
            // As long as a message may be, and something else in it.
            let at = 4 + random.below(message.len() as u64 - 4) as usize;
            if let Some(byte) = message.get_mut(at) {
                *byte = random.next() as u8;
            }
        }
        // Damage may end the session.
        raw.session.write_all(&message)?;
        raw.answer()?;
        *done += 1;
    }
    Ok(())
}

fn unmap(socket: &Path, random: &mut Random, end: Instant, done: &mut u64) -> Result<()> {
    const BYTES: u64 = 4 << 20;
    let options = AttachOptions { arena_bytes: 1 << 20, ..AttachOptions::default() };
    let client = Client::attach(socket, options)?;
    let alone = client.join(&format!("unmap{}", random.next()), Rank(0), 1, Duration::from_secs(5))?;
    while Instant::now() < end {
        let memfd = rustix::fs::memfd_create("hostile", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&memfd, BYTES)?;
        rustix::fs::fcntl_add_seals(&memfd, SealFlags::SHRINK)?;
        let region = client.register(&memfd, 0..BYTES)?;
        let tensor = region.tensor(Dtype::F32, 0, BYTES / 4)?;
        let operation = alone.all_reduce_in_place(&tensor, ReduceOp::Sum)?;
        // The file can be neither cut off nor taken away; holes and writes are all that is left.
        let _ = rustix::fs::ftruncate(&memfd, 0);
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let _ = rustix::fs::fallocate(&memfd, hole, 0, BYTES);
        let _ = region.unregister();
        *done += 1;
        if random.below(32) == 0 {
            // All of it goes under the operation.
            drop((operation, tensor, alone, client));
            return Ok(());
        }
        let mut operation = operation;
        let _ = operation.wait(Duration::from_secs(5));
    }
    Ok(())
}
