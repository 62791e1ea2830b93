//! Compares the TCP transport with plain sockets on the loopback device. It runs streams of large payloads, and small
//! round trips, with each protection of links.
//!
//! `cargo bench -p harmonaize-transport --bench tcp [-- ROUNDS]`. Rounds of ours and of plain sockets take turns in one run;
//! the table shows medians, and
//! the medians of the rounds' ratios to plain sockets, of the value and of processor time (larger is better for us).

use harmonaize_abi::{Tag, View, ViewMut};
use harmonaize_kernels::polyval::Polyval;
use harmonaize_shm::{Memory, Span};
use harmonaize_transport::tcp::{Config, LinkProtection, TcpTransport};
use harmonaize_transport::{Event, Introduction, Landing, LinkId, Ring, SendError, Transport};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use std::hint::black_box;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

type Failure = Box<dyn std::error::Error + Send + Sync>;

const STREAM_BYTES: usize = 512 << 20;
const SLOTS: u32 = 8;
const TRIPS: u32 = 5_000;
const SMALL: usize = 64;
/// Bytes of data in a record.
const RECORD: usize = 16 << 10;

fn any() -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, 0))
}

fn span(bytes: usize) -> Result<Span, Failure> {
    Ok(Span::new(&Memory::private(bytes)?, 0, bytes as u64)?)
}

/// Two endpoints with a link that is up: the initiator first.
fn linked(slot_bytes: usize, protection: LinkProtection) -> Result<[(TcpTransport, LinkId); 2], Failure> {
    let config = Config { protection, ..Config::new(any()) };
    let (mut a, mut b) = (TcpTransport::bind(config.clone())?, TcpTransport::bind(config)?);
    let introduction = |peer, initiate| Introduction {
        name: [1; 16],
        secret: [2; 32],
        peer,
        initiate,
        source_ports: vec![0],
        over_tcp: false,
    };
    let at_a = a.open(introduction(b.local_address(), true))?;
    let at_b = b.open(introduction(a.local_address(), false))?;
    for (end, link) in [(&mut a, at_a), (&mut b, at_b)] {
        let memory = span(slot_bytes * SLOTS as usize)?;
        end.attach_ring(link, 0, Ring { memory, slot_bytes: slot_bytes as u32, slots: SLOTS })?;
    }
    let (mut up, deadline) = (0, Instant::now() + Duration::from_secs(10));
    while up < 2 && Instant::now() < deadline {
        a.progress(8, &mut |_, event| up += usize::from(matches!(event, Event::Up)));
        b.progress(8, &mut |_, event| up += usize::from(matches!(event, Event::Up)));
    }
    Ok([(a, at_a), (b, at_b)])
}

fn sleep(end: &TcpTransport) {
    use rustix::event::{PollFd, PollFlags};
    if let Some(fd) = end.wake_fd() {
        // Interrupted: the caller looks again.
        let _ = rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], None);
    }
}

/// Streams payloads from one thread to another; bytes per second. The receiver's slots are written again at will.
fn our_stream(bytes: usize, protection: LinkProtection) -> Result<f64, Failure> {
    let [(mut a, at_a), (mut b, _)] = linked(bytes, protection)?;
    let frames = (STREAM_BYTES / bytes) as u32;
    let source = span(bytes * 4)?;
    let start = Instant::now();
    std::thread::scope(|scope| {
        let sender = scope.spawn(move || -> Result<(), Failure> {
            // The link stays up until the receiver has all and drops its end.
            let (mut next, mut sent, mut over) = (0, 0, false);
            while !over {
                while next < frames && next - sent < 32 {
                    let from = source.range(u64::from(next % 4) * bytes as u64, bytes as u64)?;
                    let frame = Some((Landing { ring: 0, sequence: next }, from, Tag(0)));
                    match a.send(at_a, 0, &[7; 32], frame) {
                        Ok(()) => next += 1,
                        Err(SendError::Full) => break,
                        Err(error) => return Err(error.into()),
                    }
                }
                let took = a.progress(16, &mut |_, event| match event {
                    Event::Sent { .. } => sent += 1,
                    Event::Down { .. } => over = true,
                    _ => {}
                });
                if took == 0 {
                    sleep(&a);
                }
            }
            if sent == frames { Ok(()) } else { Err("the link went down".into()) }
        });
        let mut arrived = 0;
        while arrived < frames {
            let took = b.progress(16, &mut |_, event| {
                arrived += u32::from(matches!(event, Event::Received { .. }));
            });
            if took == 0 {
                sleep(&b);
            }
        }
        let took = start.elapsed();
        drop(b);
        sender.join().map_err(|_| "the sender panicked")??;
        Ok(f64::from(frames) * bytes as f64 / took.as_secs_f64())
    })
}

fn plain_pair() -> Result<[TcpStream; 2], Failure> {
    let listener = TcpListener::bind(any())?;
    let a = TcpStream::connect(listener.local_addr()?)?;
    let (b, _) = listener.accept()?;
    for end in [&a, &b] {
        end.set_nodelay(true)?;
    }
    Ok([a, b])
}

/// As [`our_stream`], by blocking writes and reads of whole payloads, without any framing.
fn plain_stream(bytes: usize) -> Result<f64, Failure> {
    let [mut a, mut b] = plain_pair()?;
    let frames = STREAM_BYTES / bytes;
    let start = Instant::now();
    std::thread::scope(|scope| {
        let sender = scope.spawn(move || -> Result<(), Failure> {
            let source = vec![1; bytes * 4];
            for at in (0..frames).map(|frame| frame % 4 * bytes) {
                a.write_all(source.get(at..at + bytes).unwrap_or_default())?;
            }
            Ok(())
        });
        let mut room = vec![0; bytes * SLOTS as usize];
        for frame in 0..frames {
            let at = frame % SLOTS as usize * bytes;
            b.read_exact(room.get_mut(at..at + bytes).unwrap_or_default())?;
        }
        let took = start.elapsed();
        sender.join().map_err(|_| "the sender panicked")??;
        Ok((frames * bytes) as f64 / took.as_secs_f64())
    })
}

/// Waits for a frame, asleep.
fn await_frame(end: &mut TcpTransport) {
    let mut came = false;
    while !came {
        let over = |event: &Event<'_>| matches!(event, Event::Received { .. } | Event::Down { .. });
        if end.progress(16, &mut |_, event| came |= over(&event)) == 0 {
            sleep(end);
        }
    }
}

/// Round trips of a frame with 64 bytes of payload, both threads sleeping in between; seconds each.
fn our_trips(protection: LinkProtection) -> Result<f64, Failure> {
    let [(mut a, at_a), (mut b, at_b)] = linked(SMALL, protection)?;
    let source = span(SMALL)?;
    let frame = |sequence| Some((Landing { ring: 0, sequence }, source.clone(), Tag(0)));
    std::thread::scope(|scope| {
        let frame = &frame;
        let echo = scope.spawn(move || -> Result<(), Failure> {
            for trip in 0..TRIPS {
                // The answer goes out with the first progress of the next wait.
                await_frame(&mut b);
                b.send(at_b, 0, b"", frame(trip))?;
            }
            await_frame(&mut b);
            Ok(())
        });
        let start = Instant::now();
        for trip in 0..TRIPS {
            a.send(at_a, 0, b"", frame(trip))?;
            await_frame(&mut a);
        }
        let took = start.elapsed();
        drop(a);
        echo.join().map_err(|_| "the echo panicked")??;
        Ok(took.as_secs_f64() / f64::from(TRIPS))
    })
}

/// As [`our_trips`], by blocking reads and writes.
fn plain_trips() -> Result<f64, Failure> {
    let [mut a, mut b] = plain_pair()?;
    std::thread::scope(|scope| {
        let echo = scope.spawn(move || -> Result<(), Failure> {
            let mut room = [0; SMALL];
            for _ in 0..TRIPS {
                b.read_exact(&mut room)?;
                b.write_all(&room)?;
            }
            Ok(())
        });
        let mut room = [0; SMALL];
        let start = Instant::now();
        for _ in 0..TRIPS {
            a.write_all(&[1; SMALL])?;
            a.read_exact(&mut room)?;
        }
        let took = start.elapsed();
        echo.join().map_err(|_| "the echo panicked")??;
        Ok(took.as_secs_f64() / f64::from(TRIPS))
    })
}

/// Bytes a second of one core that does `pass` to a record's data again and again: the best of `rounds`.
fn rate(
    rounds: usize,
    mut pass: impl FnMut() -> Result<(), ring::error::Unspecified>,
) -> Result<f64, Failure> {
    const TIMES: usize = 2000;
    let mut best = 0.0_f64;
    for _ in 0..rounds {
        let start = Instant::now();
        (0..TIMES).try_for_each(|_| pass()).map_err(|_| "a record could not be sealed")?;
        best = best.max((TIMES * RECORD) as f64 / start.elapsed().as_secs_f64());
    }
    Ok(best)
}

/// What a protected link does with each byte, alone, and what it could do in its place.
fn passes(rounds: usize) -> Result<(), Failure> {
    let key = UnboundKey::new(&AES_256_GCM, &[1; 32]).map_err(|_| "no key")?;
    let (key, hash) = (LessSafeKey::new(key), Polyval::new([2; 16]));
    let nonce = || Nonce::assume_unique_for_key([0; NONCE_LEN]);
    let (data, mut room) = (vec![3_u8; RECORD], vec![0_u8; RECORD]);
    let copied = rate(rounds, || {
        room.copy_from_slice(black_box(&data));
        black_box(&mut room);
        Ok(())
    })?;
    let hashed = rate(rounds, || {
        black_box(hash.hash([black_box(&data), &[]]));
        Ok(())
    })?;
    let both = rate(rounds, || {
        let to = ViewMut::from(room.as_mut_slice());
        black_box(hash.hash_copying(&[], View::from(black_box(data.as_slice())), to));
        Ok(())
    })?;
    let sealed = rate(rounds, || key.seal_in_place_separate_tag(nonce(), Aad::empty(), &mut room).map(drop))?;
    let signed = rate(rounds, || {
        key.seal_in_place_separate_tag(nonce(), Aad::from(black_box(&data)), &mut []).map(drop)
    })?;
    for (what, rate) in [
        ("a copy", copied),
        ("POLYVAL", hashed),
        ("both in one pass", both),
        ("AES-256-GCM", sealed),
        ("GMAC by ring", signed),
    ] {
        println!("one core, 16 KiB: {what:<16} {:>8.2} GB/s", rate / 1e9);
    }
    Ok(())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Processor time of this process, all threads, in seconds.
fn processor_time() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// What a run measured, and the processor time that it took.
fn timed(run: impl FnOnce() -> Result<f64, Failure>) -> Result<(f64, f64), Failure> {
    let before = processor_time();
    let value = run()?;
    Ok((value, processor_time() - before))
}

/// Runs both in turns and prints a line; `better` turns two values into a ratio, larger is better for us.
fn compare(
    case: &str,
    unit: &str,
    rounds: usize,
    ours: &dyn Fn() -> Result<f64, Failure>,
    plain: &dyn Fn() -> Result<f64, Failure>,
    better: fn(f64, f64) -> f64,
) -> Result<(), Failure> {
    let mut table: [Vec<f64>; 4] = Default::default();
    for _ in 0..rounds {
        let ((ours, our_time), (plain, plain_time)) = (timed(ours)?, timed(plain)?);
        let row = [ours, plain, better(ours, plain), plain_time / our_time];
        table.iter_mut().zip(row).for_each(|(column, value)| column.push(value));
    }
    let [ours, plain, ratio, processor] = table.map(median);
    println!("{case:<18} {ours:>8.2} {plain:>8.2} {unit:<5} {ratio:>8.3} {processor:>16.3}");
    Ok(())
}

fn main() -> Result<(), Failure> {
    let rounds = std::env::args().find_map(|argument| argument.parse().ok()).unwrap_or(9);
    passes(rounds)?;
    println!(
        "{:<18} {:>8} {:>8} {:<5} {:>8} {:>16}",
        "case", "ours", "plain", "", "ratio", "processor ratio"
    );
    for protection in [LinkProtection::None, LinkProtection::Authenticated, LinkProtection::Encrypted] {
        println!("links: {protection}");
        for bytes in [128 << 10, 256 << 10, 1 << 20] {
            let case = format!("stream {} KiB", bytes >> 10);
            let ours = || Ok(our_stream(bytes, protection)? / 1e9);
            let plain = || Ok(plain_stream(bytes)? / 1e9);
            compare(&case, "GB/s", rounds, &ours, &plain, |ours, plain| ours / plain)?;
        }
        let (ours, plain) = (|| Ok(our_trips(protection)? * 1e6), || Ok(plain_trips()? * 1e6));
        compare("round trip 64 B", "us", rounds, &ours, &plain, |ours, plain| plain / ours)?;
    }
    Ok(())
}
