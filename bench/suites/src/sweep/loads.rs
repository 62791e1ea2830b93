//! Loads of MCCS's artifact (SIGCOMM 2024, Apache 2.0): TOML files of its folder `workloads`, one a job.
//!
//! A file has `communicator_id`, `cuda_devices` with one device a rank, and `[[traces]]`: `size` in bytes, `type`, and `compute_interval`
//! in microseconds. An iteration does the traces one after another: it computes, then waits for the collective.

use serde::Deserialize;
use std::fmt;
use std::ops::RangeInclusive;

/// The numbers of ranks and operations that are replayed.
const RANKS: RangeInclusive<usize> = 2..=16;
const OPERATIONS: RangeInclusive<usize> = 1..=1000;
/// The most microseconds that an iteration computes: four iterations end before a contestant's time does.
const MOST_COMPUTING_US: u64 = 30_000_000;

/// An iteration of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Load {
    pub(super) ranks: usize,
    /// Bytes of each AllReduce, and microseconds of computing before it.
    pub(super) operations: Vec<(u64, u32)>,
}

/// Why a file is no load that can be replayed. Operations count from 1.
#[derive(Debug, PartialEq)]
pub(super) enum Refused {
    /// It is not TOML, lacks a key, or has a value of another type.
    Form(toml::de::Error),
    /// Its devices are too few or too many.
    Ranks(usize),
    /// Its traces are none or too many.
    Operations(usize),
    /// A collective that the replay does not do.
    Collective { operation: usize, name: String },
    /// Bytes that are no tensor of f32.
    Size { operation: usize, bytes: u64 },
    /// It computes too long.
    Computing { microseconds: u64 },
}

impl fmt::Display for Refused {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Form(error) => write!(out, "{}", error.to_string().trim_end()),
            Self::Ranks(ranks) => {
                let (least, most) = (RANKS.start(), RANKS.end());
                write!(out, "cuda_devices has {ranks} ranks; from {least} to {most} are replayed")
            }
            Self::Operations(operations) => {
                let (least, most) = (OPERATIONS.start(), OPERATIONS.end());
                write!(out, "it has {operations} traces; from {least} to {most} are replayed")
            }
            Self::Collective { operation, name } => {
                write!(out, "trace {operation} is {name:?}; all_reduce alone is replayed")
            }
            Self::Size { operation, bytes } => {
                write!(
                    out,
                    "the size of trace {operation} is {bytes}; it must be a multiple of 4 bytes above 0"
                )
            }
            Self::Computing { microseconds } => {
                write!(
                    out,
                    "its iteration computes {microseconds} us; shorten it to {MOST_COMPUTING_US} at most"
                )
            }
        }
    }
}

impl std::error::Error for Refused {}

/// The keys that MCCS's own generator reads, by each of their names.
#[derive(Deserialize)]
struct File {
    /// It tells jobs apart, and must be there.
    #[serde(rename = "communicator_id", alias = "comm_id")]
    _communicator: u32,
    #[serde(alias = "communicator_devices")]
    cuda_devices: Vec<i32>,
    traces: Vec<Trace>,
}

#[derive(Deserialize)]
struct Trace {
    #[serde(alias = "message_size")]
    size: u64,
    #[serde(rename = "type", alias = "op_type")]
    collective: String,
    compute_interval: u64,
}

impl Load {
    /// Reads a file.
    pub(super) fn parse(text: &str) -> Result<Self, Refused> {
        let File { cuda_devices, traces, .. } = toml::from_str(text).map_err(Refused::Form)?;
        let ranks = cuda_devices.len();
        if !RANKS.contains(&ranks) {
            return Err(Refused::Ranks(ranks));
        }
        if !OPERATIONS.contains(&traces.len()) {
            return Err(Refused::Operations(traces.len()));
        }
        let microseconds =
            traces.iter().fold(0, |sum: u64, trace| sum.saturating_add(trace.compute_interval));
        if microseconds > MOST_COMPUTING_US {
            return Err(Refused::Computing { microseconds });
        }
        let read = |(operation, trace): (usize, Trace)| {
            let Trace { size: bytes, collective: name, compute_interval } = trace;
            if !matches!(name.as_str(), "all_reduce" | "AllReduce") {
                return Err(Refused::Collective { operation, name });
            }
            if bytes == 0 || !bytes.is_multiple_of(4) {
                return Err(Refused::Size { operation, bytes });
            }
            let computing =
                u32::try_from(compute_interval).map_err(|_| Refused::Computing { microseconds })?;
            Ok((bytes, computing))
        };
        let operations = (1..).zip(traces).map(read).collect::<Result<_, _>>()?;
        Ok(Self { ranks, operations })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "communicator_id = 7
cuda_devices = [0, 1, 0]
[[traces]]
size = 64
type = \"all_reduce\"
compute_interval = 250
[[traces]]
message_size = 128
op_type = \"AllReduce\"
compute_interval = 0
";

    fn refused(from: &str, to: &str) -> Refused {
        let text = TEXT.replace(from, to);
        assert_ne!(text, TEXT, "{from}");
        Load::parse(&text).unwrap_err()
    }

    #[test]
    fn devices_are_ranks_and_traces_keep_their_order() {
        let expected = Load { ranks: 3, operations: vec![(64, 250), (128, 0)] };
        assert_eq!(Load::parse(TEXT).unwrap(), expected);
        let other =
            TEXT.replace("communicator_id", "comm_id").replace("cuda_devices", "communicator_devices");
        assert_eq!(Load::parse(&other).unwrap(), expected);
    }

    #[test]
    fn missing_and_mistyped_keys_are_refused_with_place() {
        for (from, to, told) in [
            ("communicator_id = 7", "", "communicator_id"),
            ("communicator_id = 7", "communicator_id = 'bad'", "u32"),
            ("cuda_devices = [0, 1, 0]", "", "cuda_devices"),
            ("[[traces]]", "[[other]]", "traces"),
            ("size = 64", "", "size"),
            ("size = 64", "size = -64", "-64"),
            ("size = 64", "size = 99999999999999999999", "size"),
            ("compute_interval = 0", "", "compute_interval"),
            ("type = \"all_reduce\"", "", "type"),
        ] {
            let error = refused(from, to);
            assert!(matches!(error, Refused::Form(_)), "{error:?}");
            assert!(error.to_string().contains(told), "{to:?}: {error}");
        }
    }

    #[test]
    fn absurd_values_are_refused_with_the_limit() {
        let many = "[0]".replace('0', &["0"; 17].join(","));
        assert_eq!(refused("[0, 1, 0]", "[0]"), Refused::Ranks(1));
        assert_eq!(refused("[0, 1, 0]", &many), Refused::Ranks(17));
        assert_eq!(refused("size = 64", "size = 0"), Refused::Size { operation: 1, bytes: 0 });
        assert_eq!(refused("size = 128", "size = 130"), Refused::Size { operation: 2, bytes: 130 });
        let name = "all_gather".to_owned();
        assert_eq!(refused("all_reduce", "all_gather"), Refused::Collective { operation: 1, name });
        let computes = |microseconds| Refused::Computing { microseconds };
        assert_eq!(refused("= 250", "= 30000001"), computes(30_000_001));
        assert_eq!(refused("compute_interval = 0", "compute_interval = 30000000"), computes(30_000_250));
        let head = "communicator_id = 7\ncuda_devices = [0, 1]\n";
        assert_eq!(Load::parse(&format!("{head}traces = []")), Err(Refused::Operations(0)));
        let trace = "[[traces]]\nsize = 4\ntype = \"all_reduce\"\ncompute_interval = 1\n";
        assert_eq!(Load::parse(&format!("{head}{}", trace.repeat(1001))), Err(Refused::Operations(1001)));
        assert!(refused("size = 64", "size = 0").to_string().contains("above 0"));
    }
}
