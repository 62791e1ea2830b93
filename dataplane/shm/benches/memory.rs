//! Memory of a tenant's process that is no memfd: one copy into the arena and one out of it, by the process, beside
//! `process_vm_readv` and `process_vm_writev` by the agent into staging and out of it.
//!
//! Then what it costs to find an operand's region.
//!
//! `cargo bench -p harmonaize-shm --bench memory [-- ROUNDS]`. Each round walks over the same 64 MiB in pieces of a size; ways take turns in
//! one run. The table shows medians of a piece's time, and medians of the rounds' ratios to the copy (larger is slower).

use harmonaize_shm::{Memory, Regions, check_range};
use std::hint::black_box;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Bytes that a round walks over.
const ALL: usize = 64 << 20;
const SIZES: [usize; 4] = [4 << 10, 64 << 10, 1 << 20, 64 << 20];
const METHODS: [&str; 4] = ["copy in", "process_vm_readv", "copy out", "process_vm_writev"];

/// Another process with memory at the address at which it is here, too. Ends with this value.
struct Tenant {
    process: libc::pid_t,
    _end: OwnedFd,
}

impl Tenant {
    /// A child in which all of this memory is written, so that it has pages of its own.
    fn begin(heap: &Memory) -> Result<Self, Failure> {
        let (ready, says) = rustix::pipe::pipe()?;
        let (ends, end) = rustix::pipe::pipe()?;
        // SAFETY: this process has one thread, and the child leaves by `_exit`.
        let process = unsafe { libc::fork() };
        if process == 0 {
            drop(end);
            let filled = heap.write(0, &vec![3; ALL]).is_ok();
            let _ = rustix::io::write(&says, &[u8::from(filled)]);
            let _ = rustix::io::read(&ends, &mut [0]);
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(0) };
        }
        let mut filled = [0];
        rustix::io::read(&ready, &mut filled)?;
        if process < 0 || filled != [1] { Err("no child".into()) } else { Ok(Self { process, _end: end }) }
    }

    /// Copies bytes of the child's memory at an address, or to it.
    fn transfer(&self, store: bool, here: u64, there: u64, bytes: usize) -> Result<(), Failure> {
        let at = |address: u64| libc::iovec {
            iov_base: std::ptr::with_exposed_provenance_mut(address as usize),
            iov_len: bytes,
        };
        let (local, remote, process) = (at(here), at(there), self.process);
        let call = if store { libc::process_vm_writev } else { libc::process_vm_readv };
        // SAFETY: the local range lies in a mapping of this process that nothing refers to; the kernel checks the other.
        let copied = unsafe { call(process, &raw const local, 1, &raw const remote, 1, 0) };
        match usize::try_from(copied) {
            Ok(copied) if copied == bytes => Ok(()),
            Ok(copied) => Err(format!("{copied} of {bytes} bytes").into()),
            Err(_) => Err(std::io::Error::last_os_error().into()),
        }
    }
}

/// Seconds for a piece, over all pieces of a round.
fn round(
    way: usize,
    size: usize,
    (heap, arena, staging): (&Memory, &Memory, &Memory),
    tenant: &Tenant,
) -> Result<f64, Failure> {
    let begin = Instant::now();
    for at in (0..ALL as u64).step_by(size) {
        let bytes = size as u64;
        match way {
            0 => copy(heap, arena, at, bytes)?,
            2 => copy(arena, heap, at, bytes)?,
            _ => tenant.transfer(way == 3, staging.address() + at, heap.address() + at, size)?,
        }
    }
    Ok(begin.elapsed().as_secs_f64() / (ALL / size) as f64)
}

fn copy(from: &Memory, to: &Memory, at: u64, bytes: u64) -> Result<(), Failure> {
    let (from, to) = (from.view(at, bytes)?, to.view_mut(at, bytes)?);
    // SAFETY: both views hold as many bytes, of mappings that are not the same.
    unsafe { std::ptr::copy_nonoverlapping(from.pointer(), to.pointer(), bytes as usize) };
    Ok(())
}

/// Operands that are looked for in a round.
const LOOKED: u64 = 1_000_000;

/// Nanoseconds to find the mapping of an operand: where a bound is all there is, in an arena alone, in the arena before many regions, and in
/// those.
fn find(rounds: usize) -> Result<(), Failure> {
    const REGIONS: u64 = 1000;
    const PAGE: u64 = 4096;
    let arena = Memory::private(PAGE as usize)?;
    let (alone, mut many) = (Regions::new(Arc::clone(&arena)), Regions::new(arena));
    for region in 1..=REGIONS {
        many.add(region * 2 * PAGE, Memory::private(PAGE as usize)?)?;
    }
    let bound = |at: u64| check_range(black_box(at), 64, PAGE).is_ok();
    let in_arena = |at: u64| alone.locate(black_box(at), 64).is_ok();
    let before_many = |at: u64| many.locate(black_box(at), 64).is_ok();
    let in_many = |at: u64| many.locate(black_box((1 + at % REGIONS) * 2 * PAGE), 64).is_ok();
    let ways: [(&str, &dyn Fn(u64) -> bool); 4] = [
        ("a bound alone", &bound),
        ("the arena alone", &in_arena),
        ("the arena before 1,000 regions", &before_many),
        ("one of 1,000 regions", &in_many),
    ];
    let mut times: [Vec<f64>; 4] = Default::default();
    for _ in 0..rounds {
        for ((_, way), times) in ways.iter().zip(&mut times) {
            let begin = Instant::now();
            let found = (0..LOOKED).filter(|at| way(at % 4000)).count();
            times.push(begin.elapsed().as_secs_f64() * 1e9 / LOOKED as f64);
            if found as u64 != LOOKED {
                return Err(format!("{found} of {LOOKED} found").into());
            }
        }
    }
    println!("\n| an operand in | ns |\n|---|---|");
    for ((name, _), times) in ways.iter().zip(&mut times) {
        println!("| {name} | {:.1} |", median(times));
    }
    Ok(())
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn main() -> Result<(), Failure> {
    let rounds = std::env::args().skip(1).find_map(|argument| argument.parse().ok()).unwrap_or(41);
    let made: [Arc<Memory>; 3] =
        [Memory::private(ALL)?, Memory::shared(ALL as u64, "arena")?, Memory::private(ALL)?];
    for memory in &made {
        memory.write(0, &vec![1; ALL])?;
    }
    let [heap, arena, staging] = &made;
    let tenant = Tenant::begin(heap)?;
    println!("{rounds} rounds\n\n| bytes | way | us a piece | GB/s | to the copy |\n|---|---|---|---|---|");
    for size in SIZES {
        let mut times: [Vec<f64>; 4] = Default::default();
        for _ in 0..rounds {
            for (way, times) in times.iter_mut().enumerate() {
                times.push(round(way, size, (heap, arena, staging), &tenant)?);
            }
        }
        for (way, name) in METHODS.iter().enumerate() {
            let (Some(own), Some(copy)) = (times.get(way), times.get(way / 2 * 2)) else { continue };
            let mut ratios: Vec<f64> = own.iter().zip(copy).map(|(own, copy)| own / copy).collect();
            let (ratio, time) = (median(&mut ratios), median(&mut own.clone()));
            println!(
                "| {size} | {name} | {:.2} | {:.2} | {ratio:.2} |",
                time * 1e6,
                size as f64 / time / 1e9
            );
        }
    }
    find(rounds)
}
