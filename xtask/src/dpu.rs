//! `cargo xtask dpu`: emulated offload units. Each is an aarch64 machine that runs the agent for a host which is another
//! machine.

use crate::aarch64::{self, toolchain::Prepared, toolchain::Toolchain};
use anyhow::{Context, Result, bail};
use harmonaize_identity::Authority;
use harmonaize_testkit::packages::{self, Consent};
use harmonaize_testkit::strict;
use layout::{MachineSpec, Order};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::fs::{self, DirBuilder, File};
use std::io::{Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};
use watch::Watch;

use crate::vm;
use crate::vm::initramfs::Image;
use crate::vm::machine::{Emulator, Machine, Wire};

mod guests;
mod layout;
mod watch;

const MEMORY_MIB: u32 = 768;
/// With one, whoever polls keeps the other from running for milliseconds.
const PROCESSORS: u32 = 2;
/// The boots and the ways out, on top of the jobs' own limits.
const AROUND: Duration = Duration::from_secs(60);
/// How long an emulator may take to listen on a wire's socket.
const WIRED: Duration = Duration::from_secs(10);

/// Lines of each machine that are printed when a run has failed.
const SHOWN: usize = 20;

/// What `cargo xtask dpu` takes.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask dpu --yes             one host with its offload unit, a right AllReduce; what CI runs
  cargo xtask dpu --pairs 2         two of each: AllReduce and AllToAll between hosts
  cargo xtask dpu --pairs 3         three of each, and sums through an aggregator on a unit
  cargo xtask dpu --seed 4711       again with the data of an earlier run
  cargo xtask dpu --keep            keep the guests' logs of a good run too")]
pub struct Args {
    /// Install missing packages without asking
    #[arg(long)]
    pub yes: bool,
    /// Pairs of a host and its offload unit
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=3))]
    pub pairs: u32,
    /// From which the ranks make their data; random if left out
    #[arg(long)]
    pub seed: Option<u32>,
    /// Keep the guests' logs even if all went well
    #[arg(long)]
    pub keep: bool,
}

/// Runs the task, or says why this machine cannot.
pub fn run(args: &Args) -> Result<()> {
    let consent = Consent::from_flag(args.yes);
    if let Some(reason) = missing() {
        return strict::skip("offload units", reason);
    }
    packages::require(packages::SOFTROCE, consent)?;
    packages::require(packages::DPU, consent)?;
    packages::require(packages::BUILDING, consent)?;
    let toolchain = match Toolchain::prepare(consent)? {
        Prepared::Ready(toolchain) => toolchain,
        Prepared::Impossible(why) => {
            return strict::skip("offload units", format_args!("nothing is built for aarch64: {why}"));
        }
    };
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    let seed = args.seed.map_or_else(random, Ok)?;
    println!("Seed {seed}; again with this data: cargo xtask dpu --pairs {} --seed {seed}", args.pairs);
    let order = Order { pairs: args.pairs, seed };
    let begun = Instant::now();
    aarch64::build(&toolchain)?;
    let guests = guests::Guests::prepare(&toolchain)?;
    let folder = Folder::make()?;
    let secret = secret()?;
    let mut places = order.places(&folder.sockets);
    layout::certify(&mut places, &Authority::create()?)?;
    let images = places.iter().map(|place| guests.image(place, &secret)).collect::<Result<Vec<Image>>>()?;
    println!("Prepared in {:.1} s.", begun.elapsed().as_secs_f64());
    let booted = Instant::now();
    let outcome =
        Run { guests: &guests, places: &places, images: &images, folder: &folder, stop: &stop }.to_end();
    match outcome {
        Ok(()) => {
            let collectives = match args.pairs {
                1 => "AllReduce",
                2 => "AllReduce and AllToAll",
                _ => "AllReduce and AllToAll, and sums by an aggregator,",
            };
            let ranks = args.pairs * layout::RANKS;
            let (units, hosts) = if args.pairs > 1 { ("units", "hosts") } else { ("unit", "host") };
            println!(
                "PASSED: {collectives} of {ranks} ranks on {} {hosts}, through the agent on {} offload {units}, bit for \
                 bit, in {:.1} s",
                args.pairs,
                args.pairs,
                booted.elapsed().as_secs_f64()
            );
            if args.keep { folder.keep() } else { Ok(()) }
        }
        Err(error) => {
            if !stop.load(Ordering::Relaxed) {
                places.iter().for_each(|place| folder.show_end(place));
                folder.keep()?;
            }
            Err(error)
        }
    }
}

/// Why this machine cannot run the guests at all.
fn missing() -> Option<String> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return Some("the host's guest runs this machine's programs, which have to be x86-64 Linux's".into());
    }
    let absent = absent();
    if !absent.is_empty() && !rustix::process::geteuid().is_root() {
        let list = absent.join(" ");
        return Some(format!(
            "{list} not installed, and installing needs root: `sudo apt-get install {list}`"
        ));
    }
    None
}

/// Packages that are not installed here and are needed.
pub(crate) fn absent() -> Vec<&'static str> {
    packages::missing(&[packages::SOFTROCE, packages::DPU, packages::AARCH64].concat())
}

fn random() -> Result<u32> {
    let mut bytes = [0; 4];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}

/// What nobody can guess, as text.
fn secret() -> Result<String> {
    (0..8).map(|_| Ok(format!("{:08x}", random()?))).collect()
}

/// The folders of a run, removed when dropped.
struct Folder {
    /// For the wires' sockets, whose paths have to be short.
    sockets: PathBuf,
    logs: PathBuf,
}

impl Folder {
    fn make() -> Result<Self> {
        let id = std::process::id();
        let folder = Self {
            sockets: std::env::temp_dir().join(format!("harmonaize-dpu-{id}")),
            logs: vm::folder().join(format!("dpu-{id}")),
        };
        // Nobody else may lay a wire here.
        DirBuilder::new()
            .mode(0o700)
            .create(&folder.sockets)
            .with_context(|| format!("cannot create {}", folder.sockets.display()))?;
        fs::create_dir_all(&folder.logs)?;
        Ok(folder)
    }

    fn log(&self, place: &MachineSpec) -> PathBuf {
        self.logs.join(format!("{}.log", place.name))
    }

    /// Prints the last lines of a machine.
    fn show_end(&self, place: &MachineSpec) {
        let text = fs::read_to_string(self.log(place)).unwrap_or_default();
        let lines: Vec<&str> = text.lines().filter(|line| !line.is_empty()).collect();
        println!("\nThe last lines of {}:", place.name);
        lines.iter().skip(lines.len().saturating_sub(SHOWN)).for_each(|line| println!("  {line}"));
    }

    /// Moves the logs to where the drop does not reach.
    fn keep(&self) -> Result<()> {
        let kept = vm::folder().join("dpu-logs").join(std::process::id().to_string());
        fs::create_dir_all(&kept)?;
        fs::remove_dir(&kept)?;
        fs::rename(&self.logs, &kept)?;
        println!("The guests' logs: {}", kept.display());
        Ok(())
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        for folder in [&self.sockets, &self.logs] {
            if folder.exists()
                && let Err(error) = fs::remove_dir_all(folder)
            {
                eprintln!("warning: {} stays: {error}", folder.display());
            }
        }
    }
}

/// A line of a machine's console by the machine's number, or its end.
type ConsoleLine = (usize, Option<String>);

/// All machines, from their start to the end of the last host.
struct Run<'a> {
    guests: &'a guests::Guests,
    places: &'a [MachineSpec],
    images: &'a [Image],
    folder: &'a Folder,
    stop: &'a AtomicBool,
}

impl Run<'_> {
    fn to_end(&self) -> Result<()> {
        let deadline = Instant::now() + layout::limit(self.places) + AROUND;
        let mut logs = Vec::new();
        for place in self.places {
            logs.push(File::create(self.folder.log(place))?);
        }
        let (sender, said) = mpsc::channel();
        let machines: Vec<Machine<'_>> =
            self.places.iter().zip(self.images).map(|(place, image)| self.machine(place, image)).collect();
        let mut emulators = Vec::new();
        for (number, machine) in machines.iter().enumerate() {
            self.wait_for_wires(machine)?;
            let sender = sender.clone();
            emulators.push(machine.start(move |line| sender.send((number, line)).is_ok())?);
        }
        drop(sender);
        let done = self.follow(&machines, &mut emulators, &mut logs, &said, deadline);
        // What the others said at the time.
        for (number, line) in said.try_iter() {
            write_line(&mut logs, number, line.as_deref().unwrap_or_default())?;
        }
        done
    }

    /// Reads what the machines say until the last host is done.
    fn follow(
        &self,
        machines: &[Machine<'_>],
        emulators: &mut [Emulator],
        logs: &mut [File],
        console: &Receiver<ConsoleLine>,
        deadline: Instant,
    ) -> Result<()> {
        let mut watch = Watch::new(self.places);
        while !watch.done() {
            if self.stop.load(Ordering::Relaxed) {
                bail!("interrupted");
            }
            if Instant::now() >= deadline {
                bail!("past the time limit: {}", watch.state());
            }
            let Some((number, line)) = next(console)? else { continue };
            if let Some(line) = line {
                write_line(logs, number, &line)?;
                watch.line(number, &line)?;
            } else if let (Some(machine), Some(emulator)) = (machines.get(number), emulators.get_mut(number))
            {
                let outcome = ended(machine, emulator, watch.halted(number))?;
                watch.closed(number, &outcome)?;
            }
        }
        Ok(())
    }

    fn machine<'a>(&'a self, place: &'a MachineSpec, image: &'a Image) -> Machine<'a> {
        Machine {
            architecture: guests::architecture(place.side),
            kernel: self.guests.kernel(place.side),
            initramfs: image.path(),
            memory_mib: MEMORY_MIB,
            processors: PROCESSORS,
            kvm: false,
            cards: place.cards.clone(),
        }
    }

    /// Waits until the other ends of the wires that the machine connects to are there.
    fn wait_for_wires(&self, machine: &Machine<'_>) -> Result<()> {
        let deadline = Instant::now() + WIRED;
        for card in &machine.cards {
            let Wire::Connect(path) = &card.wire else { continue };
            while !path.exists() {
                if self.stop.load(Ordering::Relaxed) {
                    bail!("interrupted");
                }
                if Instant::now() >= deadline {
                    bail!("the emulator does not listen on {}", path.display());
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        Ok(())
    }
}

fn write_line(logs: &mut [File], number: usize, line: &str) -> Result<()> {
    if let Some(log) = logs.get_mut(number) {
        writeln!(log, "{line}").context("cannot write a guest's log")?;
    }
    Ok(())
}

/// The next thing said, or nothing for a moment.
fn next(said: &Receiver<ConsoleLine>) -> Result<Option<ConsoleLine>> {
    match said.recv_timeout(Duration::from_millis(100)) {
        Ok(said) => Ok(Some(said)),
        Err(RecvTimeoutError::Timeout) => Ok(None),
        Err(RecvTimeoutError::Disconnected) => {
            bail!("all machines ended before the hosts had said that they were done")
        }
    }
}

/// What came of a machine whose console has closed.
fn ended(
    machine: &Machine<'_>,
    emulator: &mut Emulator,
    halted: Option<u32>,
) -> Result<vm::machine::GuestOutcome> {
    let status = emulator.wait_until(Instant::now() + WIRED)?;
    Ok(status.map_or(vm::machine::GuestOutcome::TimedOut, |status| machine.outcome(halted, status)))
}
