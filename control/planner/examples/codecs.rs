//! How often control chooses each codec, and what each buys, over a grid of networks, hosts, sizes, budgets and tensors.
//!
//! `cargo run --release -p harmonaize-planner --example codecs [-- --without NAME,NAME]`; `--without`: what leaving these codecs out costs.

use harmonaize_codec::{Budget, Codec, Controller, Level, Outlook};
use harmonaize_planner::{
    AggregatorId, AggregatorOffer, Bytes, CodeShape, CodecRates, Conditions, HostId, Rate, Topology,
    codes_rate, common_levels, decide_aggregation, exchange_rate, exchange_usage, line_rate, tuning,
};
use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Write as _;
use std::time::Duration;

/// Mbit/s of a host's link.
const RATES: [u64; 9] = [10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000];
const HOSTS: [usize; 6] = [2, 4, 8, 16, 32, 64];
/// KiB of an operation.
const SIZES: [u64; 7] = [64, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10];
/// Bounds on vNMSE.
const BOUNDS: [f64; 12] = [1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.02, 0.05, 0.1, 0.3, 1.0];
/// Operations of which control learns before its choice counts.
const OPERATIONS: usize = 60;

/// Encoding, and decoding with adding, in GB/s of f32 on one core.
type Speeds = (&'static str, f64, f64);
/// On 32,768 elements with heavy tails, in the cache: a core with AVX-512, the fastest of 400 passes.
const SPEEDS: [Speeds; 10] = [
    ("bf16", 19.0, 26.3),
    ("fp16", 23.1, 24.6),
    ("int8", 19.5, 36.8),
    ("int4", 17.1, 31.3),
    ("int8 stochastic", 9.6, 36.9),
    ("rotated 4", 6.8, 9.1),
    ("rotated 3", 3.5, 6.5),
    ("rotated 2", 5.5, 8.1),
    ("rotated 1", 5.4, 8.7),
    ("nonzero blocks", 27.0, 16.9),
];

/// What a tenant's tensors are.
#[derive(Clone, Copy)]
struct Tensors {
    name: &'static str,
    /// What blocks of integers lose of them, over what heavy tails lose.
    tails: f64,
    /// The part in blocks of zeros.
    zeros: f64,
}

const TENSORS: [Tensors; 4] = [
    Tensors { name: "normal", tails: 0.3, zeros: 0.0 },
    Tensors { name: "heavy tails", tails: 1.0, zeros: 0.0 },
    Tensors { name: "large outliers", tails: 8.0, zeros: 0.0 },
    Tensors { name: "mostly zeros", tails: 1.0, zeros: 0.9 },
];

/// What an operation by a level loses and sends.
fn runs(level: &Level, tensors: Tensors, most: Option<f64>) -> Level {
    let loss = level.loss * if level.codec.name().starts_with("int") { tensors.tails } else { 1.0 };
    if level.codec == Codec::NonzeroBlocks {
        Level { ratio: 1.001 - tensors.zeros, ..*level }
    } else if most.is_some_and(|most| loss > most) {
        Level { loss: 0.0, ratio: 1.0, ..*level }
    } else {
        Level { loss, ..*level }
    }
}

/// What control settles on.
struct Settled {
    codec: Codec,
    finer: Option<Codec>,
    /// Seconds of an operation.
    time: f64,
}

fn settled(levels: &[Level], budget: &Budget, outlook: &Outlook, tensors: Tensors) -> Settled {
    let (mut controller, mut codec, now) = (Controller::default(), Codec::EXACT, Duration::ZERO);
    let mut time = outlook.time(None);
    for _ in 0..OPERATIONS {
        let zeros = levels.iter().find(|level| level.codec == Codec::NonzeroBlocks);
        if let Some(level) = zeros.filter(|_| codec != Codec::NonzeroBlocks) {
            let ratio = 1.001 - tensors.zeros;
            if controller.heeds_zeros(now, ratio) {
                controller.handle_outcome(now, level, 0.0, ratio);
            }
        }
        codec = controller.choose(now, budget, codec, levels, outlook).codec;
        let level = levels.iter().find(|level| level.codec == codec);
        let ran = level.map(|level| runs(level, tensors, budget.max_error_of(codec)));
        time = outlook.time(ran.as_ref());
        if let Some((level, ran)) = level.zip(ran) {
            controller.handle_outcome(now, level, ran.loss, ran.ratio);
        }
    }
    Settled { codec, finer: controller.finer(budget, codec, levels, outlook), time }
}

/// What agents say of their codecs, each as slow as this, and control makes of it for so many hosts.
fn levels(hosts: usize, slower: f64) -> Vec<Level> {
    let of = |(name, encode, decode): &Speeds| {
        let [encode, decode] = [encode, decode].map(|speed| speed * 1e9 / slower);
        Some(Level { encode, decode, ..Level::typical(Codec::named(name)?) })
    };
    let each: Vec<Level> = SPEEDS.iter().filter_map(of).collect();
    common_levels((0..hosts).map(|_| each.as_slice()))
}

/// Hosts at one switch, or in two racks whose uplinks carry a quarter of what their hosts can send; an aggregator at the switch in the middle.
fn fabric(rate: u64, hosts: usize, racks: bool) -> Result<Topology, Box<dyn Error>> {
    let mut text = "[[switch]]\nname = \"s\"\nkind = \"spine\"\n".to_owned();
    let leaves = if racks { 2 } else { 0 };
    for leaf in 0..leaves {
        let up = rate * hosts as u64 / 8;
        writeln!(text, "[[switch]]\nname = \"l{leaf}\"")?;
        writeln!(text, "[[link]]\nfrom = \"l{leaf}\"\nto = \"s\"\nrate = \"{up}Mbit/s\"\ndelay = \"5us\"")?;
    }
    for host in 0..hosts {
        let to = if racks { format!("l{}", 2 * host / hosts) } else { "s".to_owned() };
        writeln!(text, "[[host]]\nname = \"h{host}\"")?;
        writeln!(
            text,
            "[[link]]\nfrom = \"h{host}\"\nto = \"{to}\"\nrate = \"{rate}Mbit/s\"\ndelay = \"5us\""
        )?;
    }
    writeln!(text, "[[aggregator]]\nname = \"a\"\nswitch = \"s\"\nrate = \"{}Mbit/s\"", rate * hosts as u64)?;
    Ok(Topology::parse(&text)?)
}

fn outlook(topology: &Topology, hosts: usize, bytes: u64) -> Outlook {
    let members: Vec<HostId> = (0..hosts).map(HostId).collect();
    let usage = exchange_usage(topology, &members);
    let direct = exchange_rate(&usage, &Conditions::clear(topology), &BTreeMap::new());
    let ring = line_rate(topology, &members);
    // A ring in the best order crosses an uplink once each way.
    let up = topology.links().iter().map(|link| link.rate.0).min().unwrap_or(ring.0);
    let [exact, coded] = [ring.0.min(up), direct.0].map(|rate| rate as f64 / 8.0);
    let rates = CodecRates { exact, coded, overlapped: Duration::ZERO };
    rates.outlook(hosts, bytes as f64, tuning(topology, &members).chunk)
}

/// Whether codes of 4 bits that an aggregator adds undecoded are taken before what hosts do by themselves.
fn shared(
    topology: &Topology,
    hosts: usize,
    bytes: u64,
    coder: Option<Rate>,
    outlook: &Outlook,
    own: &Settled,
) -> bool {
    let Some((coder, shape)) = coder.zip(CodeShape::of_codes(8192, hosts)) else { return false };
    let offer = |payload: u64, carries: u64, coder| AggregatorOffer {
        aggregator: AggregatorId(0),
        payload: Bytes(payload),
        tensor_bytes: Bytes(carries),
        codec_rate: coder,
        packets_per_second: 0,
        other_communicators: 0,
        supports_parents: false,
    };
    let coded = offer(shape.bytes.into(), 4 * u64::from(shape.elements), coder);
    let exact = own.codec == Codec::EXACT;
    let offers: Vec<AggregatorOffer> =
        exact.then(|| offer(8192, 8192, Rate(0))).into_iter().chain([coded]).collect();
    let members: Vec<HostId> = (0..hosts).map(HostId).collect();
    let own = if exact { Rate(0) } else { Rate((8.0 * bytes as f64 / own.time.max(1e-9)) as u64) };
    let ring = Rate((8.0 * outlook.rate) as u64);
    let conditions = Conditions::clear(topology);
    let decided = decide_aggregation(topology, &conditions, &members, (ring, own), Bytes(bytes), &offers);
    decided.plan.is_some_and(|chosen| chosen.coded && chosen.min_bytes.0 <= bytes)
}

/// What is counted of a codec.
#[derive(Default)]
struct Count {
    chosen: usize,
    finer: usize,
    listed: usize,
    /// Times without it over those with it, where it was chosen.
    without: Vec<f64>,
    example: String,
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let dropped: Vec<String> = match arguments.next().as_deref() {
        Some("--without") => arguments.next().unwrap_or_default().split(',').map(str::to_owned).collect(),
        _ => Vec::new(),
    };
    let mut counts: BTreeMap<&str, Count> =
        SPEEDS.iter().map(|(name, ..)| (*name, Count::default())).collect();
    counts.entry("exact").or_default();
    let (mut cells, mut listed, mut allowed) = (0_usize, 0_usize, 0_usize);
    let mut shares: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    let mut dropping: Vec<f64> = Vec::new();
    for (rate, hosts, racks) in RATES
        .iter()
        .flat_map(|rate| HOSTS.map(|hosts| (*rate, hosts)))
        .flat_map(|(rate, hosts)| [false, true].map(|racks| (rate, hosts, racks)))
    {
        if racks && hosts < 4 {
            continue;
        }
        let topology = fabric(rate, hosts, racks)?;
        let bounds = BOUNDS.map(Budget::Vnmse).into_iter();
        let budgets: Vec<Budget> = [Budget::Exact, Budget::MatchBf16].into_iter().chain(bounds).collect();
        for (size, slower) in SIZES.iter().flat_map(|size| [1.0, 4.0].map(|slower| (size << 10, slower))) {
            let (outlook, levels) = (outlook(&topology, hosts, size), levels(hosts, slower));
            let small = size <= 64 << 10;
            for (budget, tensors) in
                budgets.iter().flat_map(|budget| TENSORS.map(|tensors| (budget, tensors)))
            {
                cells += 1;
                let found = match small {
                    true => Settled { codec: Codec::EXACT, finer: None, time: outlook.time(None) },
                    false => settled(&levels, budget, &outlook, tensors),
                };
                let name = found.codec.name();
                let count = counts.entry(name).or_default();
                count.chosen += 1;
                if !small && found.codec != Codec::EXACT {
                    let others = |drop: &dyn Fn(&str) -> bool| -> f64 {
                        let kept: Vec<Level> =
                            levels.iter().filter(|level| !drop(level.codec.name())).copied().collect();
                        settled(&kept, budget, &outlook, tensors).time / found.time.max(1e-9)
                    };
                    let ratio = others(&|other| other == name);
                    if count.without.iter().all(|most| *most < ratio) {
                        count.example = format!(
                            "{rate} Mbit/s{}, {hosts} hosts, {} KiB, {budget}, {}, 1/{slower} speed",
                            if racks { " in racks" } else { "" },
                            size >> 10,
                            tensors.name
                        );
                    }
                    count.without.push(ratio);
                    if !dropped.is_empty() {
                        dropping.push(others(&|other| dropped.iter().any(|name| name == other)));
                    }
                }
                if let Some(finer) = found.finer {
                    counts.entry(finer.name()).or_default().finer += 1;
                }
                let coder = codes_rate(budget, hosts, &levels);
                if coder.is_some() {
                    allowed += 1;
                    if shared(&topology, hosts, size, coder, &outlook, &found) {
                        *shares
                            .entry((found.codec.name(), if small { "up to 64 KiB" } else { "above" }))
                            .or_default() += 1;
                    }
                }
            }
            if !small {
                let all = Budget::Codecs(levels.iter().map(|level| level.codec).collect());
                let found = settled(&levels, &all, &outlook, TENSORS[1]);
                listed += 1;
                counts.entry(found.codec.name()).or_default().listed += 1;
            }
        }
    }
    println!("{cells} cells of bounds, exact and \"as bf16\"; {listed} of a list that names every codec");
    println!("| codec | chosen | finer | by the list | without it, median | most | where |");
    println!("|---|---|---|---|---|---|---|");
    for (name, count) in &mut counts {
        count.without.sort_by(f64::total_cmp);
        let at = |index: usize| count.without.get(index).map_or(String::new(), |ratio| format!("{ratio:.3}"));
        let (median, most) = (at(count.without.len() / 2), at(count.without.len().saturating_sub(1)));
        let Count { chosen, finer, listed, example, .. } = count;
        println!("| {name} | {chosen} | {finer} | {listed} | {median} | {most} | {example} |");
    }
    println!("shared 4, of {allowed} cells whose bound allows it, by what hosts would do: {shares:?}");
    if !dropping.is_empty() {
        dropping.sort_by(f64::total_cmp);
        let mean = dropping.iter().sum::<f64>() / dropping.len() as f64;
        let slower = dropping.iter().filter(|ratio| **ratio > 1.01).count();
        let most = dropping.last().copied().unwrap_or(1.0);
        println!(
            "without {dropped:?}: times {mean:.4} in the mean, {most:.3} at most, more than a hundredth in {slower} of {}",
            dropping.len()
        );
    }
    Ok(())
}
