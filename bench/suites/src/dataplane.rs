//! The suites: which cases, what is run in turn, what each is compared with.

use super::lab::{Lab, Measured};
use super::row::{Case, Row, median};
use super::suite::Request;
use anyhow::{Context, Result};

const MIB: u64 = 1 << 20;
/// The size of the large cases.
const LARGE: u64 = 64 * MIB;

/// The median of timed operations in seconds.
fn seconds(times_us: &[f64]) -> Result<f64> {
    Ok(median(times_us).context("nothing was timed")? / 1e6)
}

fn of_size(measured: &[Measured], bytes: u64) -> Result<f64> {
    let found = measured.iter().find(|measured| measured.bytes == bytes);
    seconds(&found.with_context(|| format!("no figure for {bytes} bytes"))?.times_us)
}

/// The mean of timed operations, for people: it shows what the median hides, such as ranks that lose their core.
fn mean_us(measured: &[Measured], bytes: u64) -> f64 {
    let times = measured.iter().filter(|measured| measured.bytes == bytes).flat_map(|found| &found.times_us);
    let (sum, count) = times.fold((0.0, 0u32), |(sum, count), time| (sum + time, count + 1));
    sum / f64::from(count.max(1))
}

/// Four hosts around a switch, links of 1 Gbit/s, one rank a host. Bytes a second that each host sends stand against the
/// goodput of one TCP stream between two of the hosts in the same run. The least that each host must send of a tensor of
/// `S` bytes among `n` is `2(n-1)/n * S` for AllReduce and `(n-1)/n * S` for the others.
pub fn shaped(lab: &mut Lab, request: &Request) -> Result<Vec<Row>> {
    let runs = request.rounds();
    const RANKS: usize = 4;
    let hosts: Vec<usize> = (0..RANKS).collect();
    let least = [
        ("allreduce", 2.0 * 3.0 / 4.0),
        ("alltoall", 3.0 / 4.0),
        ("allgather", 3.0 / 4.0),
        ("reducescatter", 3.0 / 4.0),
    ];
    let (mut stream, mut ours) = (Vec::new(), [const { Vec::new() }; 4]);
    let bytes = LARGE.to_string();
    for run in 1..=runs {
        let goodput = lab.stream(LARGE)? / 1e6;
        eprint!("run {run}/{runs}: one stream {goodput:.1} MB/s");
        stream.push(goodput);
        for ((collective, factor), figures) in least.iter().zip(&mut ours) {
            let arguments =
                ["--collective", collective, "--bytes", &bytes, "--warmup", "1", "--iterations", "4"];
            let took = of_size(&lab.ours(&hosts, &arguments)?, LARGE)?;
            let rate = factor * LARGE as f64 / took / 1e6;
            eprint!(", {collective} {rate:.1} MB/s");
            figures.push(rate);
        }
        eprintln!();
    }
    let rows = least.iter().zip([0.97, 0.95, 0.95, 0.95]).zip(&ours).map(|(((collective, _), bar), ours)| {
        let case = Case::more("shaped", format!("{collective} f32, 4 hosts, 1 Gbit/s: busbw MB/s"), bar)
            .of(LARGE, RANKS);
        case.compare(ours, &stream, "goodput of one TCP stream")
    });
    Ok(rows.collect())
}

/// Two ranks on one host, AllReduce back to back: the overhead of agent and rings, in microseconds. It is the median
/// operation through them, less the median of the same plan driven directly in one process.
pub fn service(lab: &mut Lab, request: &Request) -> Result<Vec<Row>> {
    let runs = request.rounds();
    const RANKS: usize = 2;
    const LIMIT_US: f64 = 40.0;
    let sizes = [32 << 10, 512 << 10];
    let list = sizes.map(|size: u64| size.to_string()).join(",");
    let effort = ["--bytes", &list, "--warmup", "200", "--iterations", "2000"];
    let mut added = [const { Vec::new() }; 2];
    for run in 1..=runs {
        let direct = lab.direct(&effort)?;
        let ours = lab.ours(&[0; RANKS], &effort)?;
        eprint!("run {run}/{runs}:");
        for (size, added) in sizes.iter().zip(&mut added) {
            let mean = mean_us(&ours, *size);
            let (ours, direct) = (of_size(&ours, *size)? * 1e6, of_size(&direct, *size)? * 1e6);
            eprint!(" {} KiB {ours:.1} us (mean {mean:.1}), the plan alone {direct:.1} us;", size >> 10);
            added.push(ours - direct);
        }
        eprintln!();
    }
    let rows = sizes.iter().zip(&added).map(|(size, added)| {
        let case =
            Case::less("service", "allreduce f32, one host: added us at the median", 1.0).of(*size, RANKS);
        case.limit(added, LIMIT_US)
    });
    Ok(rows.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_found_among_others() {
        let measured = [(1, 5.0), (2, 7.0)].map(|(bytes, us)| Measured {
            bytes,
            times_us: vec![us],
            wire_bytes: 0,
            busy: 0.0,
        });
        assert_eq!(of_size(&measured, 2).unwrap(), 7e-6);
        assert!(of_size(&measured, 3).is_err());
    }
}
