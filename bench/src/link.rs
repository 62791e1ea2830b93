//! One end of a link between two processes, over RDMA or TCP, without agents. Streams and ping-pongs are made of it.

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};
use harmonaize_abi::Tag;
use harmonaize_libibverbs::host_devices;
use harmonaize_shm::{Memory, Span};
use harmonaize_transport::tcp::{self, TcpTransport};
use harmonaize_transport::verbs::{self, PortOptions, VerbsTransport};
use harmonaize_transport::{Event, Introduction, Landing, LinkId, Ring, SendError, Transport};
use rustix::event::{PollFd, PollFlags, Timespec};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

/// The environment variable with the link's secret: 64 hexadecimal digits, the same at both ends.
pub const SECRET: &str = "HARMONAIZE_LINK_SECRET";

/// As agents do: how long one looks for work before one sleeps.
const SPIN: Duration = Duration::from_micros(50);
/// The longest sleep: afterwards the deadline is looked at.
const SLEEP: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
/// Where one looks without an end, the deadline is looked at once in so many turns.
const IDLE_POLLS: u32 = 4096;
/// Calls of progress take so much work at most.
const BUDGET: usize = 64;
/// The one ring of an end.
const RING: u16 = 0;

/// Bytes of a frame's header: its kind and a number.
const HEADER: usize = 16;

/// What carries the frames.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carrier {
    /// RDMA
    Verbs,
    /// TCP alone
    Tcp,
}

/// How an end waits for work.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Look for 50 us, then sleep: what agents do
    Sleep,
    /// Look without an end
    Poll,
}

/// Where the two ends are, and what joins them.
#[derive(Args, Clone, Debug)]
pub struct Ends {
    /// This end's address on the fabric; port 0 for any
    #[arg(long)]
    pub address: SocketAddr,
    /// The other end's address, to connect to; without it this end prints its own as JSON and waits to be connected to
    #[arg(long)]
    pub connect: Option<SocketAddr>,
    /// Where the other end comes from, if this one waits for it; this end's own address, if not given
    #[arg(long)]
    pub from: Option<IpAddr>,
    /// What carries the frames
    #[arg(long, value_enum, default_value_t = Carrier::Verbs)]
    pub carrier: Carrier,
    /// RDMA device, mlx5_0, or with its port, mlx5_0:1; the one that has the address, if not given
    #[arg(long)]
    pub device: Option<String>,
    /// Entry of the port's GID table; the one with the address, if not given
    #[arg(long)]
    pub gid_index: Option<u8>,
    /// How to wait for work
    #[arg(long, value_enum, default_value_t = Wait::Sleep)]
    pub wait: Wait,
    /// After so many seconds in all this end gives up
    #[arg(long, default_value_t = 60)]
    pub limit: u64,
}

/// A frame's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Header {
    /// A payload follows, the one of this number.
    Data(u64),
    /// So many payloads have come: their slots are free.
    Credit(u64),
    /// So many payloads were sent, and no more come.
    Done(u64),
    /// So many payloads were not what they had to be; the last word of who receives.
    Corrupt(u64),
}

impl Header {
    fn encode(self) -> [u8; HEADER] {
        let (kind, number) = match self {
            Self::Data(number) => (1_u64, number),
            Self::Credit(number) => (2, number),
            Self::Done(number) => (3, number),
            Self::Corrupt(number) => (4, number),
        };
        let mut header = [0; HEADER];
        let (first, second) = header.split_at_mut(HEADER / 2);
        first.copy_from_slice(&kind.to_le_bytes());
        second.copy_from_slice(&number.to_le_bytes());
        header
    }

    fn decode(header: &[u8]) -> Option<Self> {
        let (kind, rest) = header.split_first_chunk()?;
        let number = u64::from_le_bytes(rest.try_into().ok()?);
        match u64::from_le_bytes(*kind) {
            1 => Some(Self::Data(number)),
            2 => Some(Self::Credit(number)),
            3 => Some(Self::Done(number)),
            4 => Some(Self::Corrupt(number)),
            _ => None,
        }
    }
}

/// What an end is told of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndEvent {
    /// A frame came; a payload lies in the slot of its number.
    Header(Header),
    /// The payload of a frame has left.
    Sent,
}

/// An end of a link that is up.
pub struct End {
    transport: Box<dyn Transport>,
    link: LinkId,
    wait: Wait,
    deadline: Instant,
    idle_since: Option<Instant>,
    idle_polls: u32,
    room: Span,
    slot_bytes: u64,
    slots: u64,
}

fn secret(text: Option<&str>) -> Result<[u8; 32]> {
    let text =
        text.with_context(|| format!("{SECRET} is not set: 64 hexadecimal digits, at both ends the same"))?;
    let digits: Vec<u8> =
        text.chars().filter_map(|digit| digit.to_digit(16)).map(|digit| digit as u8).collect();
    ensure!(digits.len() == 64 && text.len() == 64, "{SECRET} is not 64 hexadecimal digits");
    let mut secret = [0; 32];
    for (byte, pair) in secret.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = pair.iter().fold(0, |value, digit| value << 4 | digit);
    }
    Ok(secret)
}

fn bind(ends: &Ends) -> Result<Box<dyn Transport>> {
    let tcp =
        tcp::Config { connect_timeout: Duration::from_secs(ends.limit), ..tcp::Config::new(ends.address) };
    Ok(match ends.carrier {
        Carrier::Tcp => {
            Box::new(TcpTransport::bind(tcp).with_context(|| format!("cannot listen on {}", ends.address))?)
        }
        Carrier::Verbs => {
            let config = verbs::Config {
                devices: ends.device.iter().cloned().collect(),
                options: PortOptions { gid_index: ends.gid_index, ..PortOptions::default() },
                ..verbs::Config::new(tcp)
            };
            Box::new(VerbsTransport::bind(config, &host_devices())?)
        }
    })
}

impl End {
    /// Comes up, with a ring of `slots` slots of `slot_bytes` for what the other end sends.
    pub fn open(ends: &Ends, slots: u32, slot_bytes: u32) -> Result<Self> {
        let secret = secret(std::env::var(SECRET).ok().as_deref())?;
        let mut transport = bind(ends)?;
        let bytes = u64::from(slots) * u64::from(slot_bytes);
        let room = Span::new(&Memory::private(usize::try_from(bytes)?)?, 0, bytes)?;
        let from = ends.from.map(|from| SocketAddr::new(from, 0));
        let link = transport.open(Introduction {
            name: *b"harmonaize bench",
            secret,
            peer: ends.connect.or(from).unwrap_or(ends.address),
            initiate: ends.connect.is_some(),
            source_ports: vec![0],
            over_tcp: false,
        })?;
        transport.attach_ring(link, RING, Ring { memory: room.clone(), slot_bytes, slots })?;
        if ends.connect.is_none() {
            println!("{{\"listening\":\"{}\"}}", transport.local_address());
        }
        let deadline = Instant::now() + Duration::from_secs(ends.limit);
        let mut end = Self {
            transport,
            link,
            wait: ends.wait,
            deadline,
            idle_since: None,
            idle_polls: 0,
            room,
            slot_bytes: slot_bytes.into(),
            slots: slots.into(),
        };
        let mut up = false;
        while !up {
            end.progress(&mut |event| {
                up |= matches!(event, Event::Up);
                Ok(())
            })?;
        }
        Ok(end)
    }

    /// Takes what has come, waits if nothing has; an error when the link has ended.
    pub fn run_once(&mut self, heard: &mut dyn FnMut(EndEvent) -> Result<()>) -> Result<()> {
        self.progress(&mut |event| match event {
            Event::Sent { .. } => heard(EndEvent::Sent),
            Event::Received { header, .. } => heard(EndEvent::Header(
                Header::decode(header).context("a frame that this program does not send")?,
            )),
            _ => Ok(()),
        })
    }

    fn progress(&mut self, sink: &mut dyn FnMut(Event<'_>) -> Result<()>) -> Result<()> {
        let mut outcome = Ok(());
        let done = self.transport.progress(BUDGET, &mut |_, event| {
            let next = match event {
                Event::Down { reason } => Err(anyhow::Error::new(reason).context("the link has ended")),
                event => sink(event),
            };
            if outcome.is_ok() {
                outcome = next;
            }
        });
        outcome?;
        if done > 0 {
            self.idle_since = None;
            return Ok(());
        }
        self.idle()
    }

    fn idle(&mut self) -> Result<()> {
        self.idle_polls = self.idle_polls.wrapping_add(1);
        // A clock may cost a system call.
        if self.wait == Wait::Poll && !self.idle_polls.is_multiple_of(IDLE_POLLS) {
            std::hint::spin_loop();
            return Ok(());
        }
        let now = Instant::now();
        ensure!(now < self.deadline, "not done within the limit");
        let since = *self.idle_since.get_or_insert(now);
        if self.wait == Wait::Sleep && now.duration_since(since) < SPIN {
            std::thread::yield_now();
        } else if self.wait == Wait::Sleep {
            self.idle_since = None;
            if self.transport.prepare_sleep()
                && let Some(fd) = self.transport.wake_fd()
            {
                // An interrupted sleep is a short one.
                let _ = rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&SLEEP));
            }
        }
        Ok(())
    }

    /// Sends a word alone; false: the queue is full, try again after a turn.
    pub fn send_header(&mut self, word: Header) -> Result<bool> {
        is_queued(self.transport.send(self.link, 0, &word.encode(), None))
    }

    /// Sends a payload into the slot of its number; false: the queue is full, try again after a turn.
    pub fn send(&mut self, number: u64, payload: Span) -> Result<bool> {
        let landing = Landing { ring: RING, sequence: (number % self.slots) as u32 };
        is_queued(self.transport.send(
            self.link,
            0,
            &Header::Data(number).encode(),
            Some((landing, payload, Tag(0))),
        ))
    }

    /// What lies in the slot of a number.
    pub fn slot(&self, number: u64) -> Result<Span> {
        Ok(self.room.range(number % self.slots * self.slot_bytes, self.slot_bytes)?)
    }
}

fn is_queued(sent: Result<(), SendError>) -> Result<bool> {
    match sent {
        Ok(()) => Ok(true),
        Err(SendError::Full) => Ok(false),
        Err(error) => bail!("a frame was not taken: {error}"),
    }
}

/// Payloads of at most so many bytes are one packet, which comes whole or not at all.
const PACKET: usize = 256;

/// Marks a payload's last bytes with its number, and those of more than a packet at their beginning too.
pub fn stamp(payload: &Span, number: u64) -> Result<()> {
    let at = payload.offset() as u64;
    let mark = number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    if payload.bytes() > PACKET {
        payload.memory().write(at, &mark)?;
    }
    Ok(payload.memory().write(at + payload.bytes().saturating_sub(mark.len()) as u64, &mark)?)
}

/// Whether a payload bears the marks of its number.
pub fn stamped(payload: &Span, number: u64) -> Result<bool> {
    let at = payload.offset() as u64;
    let mark = number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    let (mut first, mut last) = (mark, [0; 8]);
    if payload.bytes() > PACKET {
        payload.memory().read(at, &mut first)?;
    }
    payload.memory().read(at + payload.bytes().saturating_sub(mark.len()) as u64, &mut last)?;
    Ok(first == mark && last == mark)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_round_trip() {
        for word in [Header::Data(u64::MAX), Header::Credit(0), Header::Done(7), Header::Corrupt(1 << 40)] {
            assert_eq!(Header::decode(&word.encode()), Some(word));
        }
        assert_eq!(Header::decode(&[]), None);
        assert_eq!(Header::decode(&[9; HEADER]), None);
        assert_eq!(Header::decode(&[1; HEADER + 1]), None);
    }

    #[test]
    fn a_secret_is_64_digits() {
        let digits = "0f".repeat(32);
        assert_eq!(secret(Some(&digits)).unwrap(), [15; 32]);
        assert!(secret(None).unwrap_err().to_string().contains(SECRET));
        assert!(secret(Some("0f")).is_err() && secret(Some(&"0g".repeat(32))).is_err());
    }

    #[test]
    fn stamps_of_different_numbers_differ() {
        let span = Span::new(&Memory::private(128).unwrap(), 32, 64).unwrap();
        stamp(&span, 7).unwrap();
        assert!(stamped(&span, 7).unwrap() && !stamped(&span, 8).unwrap());
        span.memory().write(95, &[0xff]).unwrap();
        assert!(!stamped(&span, 7).unwrap());
    }
}
