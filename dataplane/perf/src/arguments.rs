//! The command line.

use crate::measured::Measured;
use clap::Parser;
use harmonaize_client::{Collective, Dtype, ReduceOp};
use harmonaize_program::remote::is_host;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

const EXAMPLES: &str = "Examples:
  harmonaize-perf all_reduce --agent /run/harmonaize/a/agent.sock --ranks 4 -b 8 -e 128M -f 2
      four ranks on this host, from 8 bytes to 128 MiB
  harmonaize-perf alltoall --agent A.sock --agent B.sock --ranks 8 -b 1M -e 1M -n 100 --percentiles
      eight ranks, the first four at one agent and the others at another
  harmonaize-perf all_reduce --agent /run/harmonaize/a/agent.sock --hosts n1,n2 -b 1K -e 64M -f 4
      a rank on n1 and one on n2, each at its host's agent; with --dry-run the commands alone
  harmonaize-perf all_reduce --agent /run/harmonaize/a/agent.sock --ranks 8 --hosts root@n1,root@n2
      eight ranks, the first four on n1 and the others on n2
  torchrun --no-python --nproc-per-node 4 harmonaize-perf all_gather --agent /run/harmonaize/a/agent.sock
      ranks by a launcher's variables: RANK and WORLD_SIZE, or those of Open MPI, PMI and Slurm
  harmonaize-perf reduce_scatter --agent A.sock --ranks 2 -d all -o all --csv rows.csv --html report.html";

/// What runs a command on a host where nothing else is given. It asks nobody, and gives an unreachable host up.
const RSH: &str = "ssh -o BatchMode=yes -o ConnectTimeout=10";

/// Measures a collective, or messages around the ranks, through the provider's agents, over sizes, as nccl-tests does
///
/// Each size is run out of place and in place, checked, and printed in nccl-tests' columns.
#[derive(Parser, Clone, Debug)]
#[command(version, after_help = EXAMPLES)]
pub(crate) struct Arguments {
    #[arg(help = format!("What: {}", Program::names()))]
    pub(crate) collective: Program,
    /// The agent's socket for this tenant; several share the ranks out in equal parts
    #[arg(long, required = true, env = "HARMONAIZE_SOCKET")]
    pub(crate) agent: Vec<PathBuf>,
    /// Starts so many ranks, here or on --hosts; without either a launcher's variables say which rank this is
    #[arg(long)]
    pub(crate) ranks: Option<u32>,
    /// Starts a rank on each of these hosts, or --ranks in equal parts, in order; this program has the same path on all
    #[arg(long, value_delimiter = ',', value_name = "HOST,HOST")]
    pub(crate) hosts: Vec<String>,
    /// What runs a command on a host: these words, then the host, then the command as one word for its shell
    #[arg(long, default_value = RSH, requires = "hosts", value_name = "COMMAND")]
    pub(crate) rsh: String,
    /// Prints the commands that would start the ranks, one a line as a shell reads them, and starts nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// The communicator's name, the same at all ranks
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// Smallest size: bytes of a rank's larger tensor, with K, M or G for powers of 1024
    #[arg(short = 'b', long = "minbytes", default_value = "32M")]
    pub(crate) min: Bytes,
    /// Largest size
    #[arg(short = 'e', long = "maxbytes", default_value = "32M")]
    pub(crate) max: Bytes,
    /// Bytes from one size to the next, where no factor is given
    #[arg(short = 'i', long = "stepbytes", default_value = "1M")]
    pub(crate) step: Bytes,
    /// Factor from one size to the next
    #[arg(short = 'f', long = "stepfactor", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) factor: u64,
    /// Operations that are timed
    #[arg(short = 'n', long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) iters: u32,
    /// Operations before them, at the largest and at the smallest size
    #[arg(short = 'w', long = "warmup_iters", default_value_t = 1)]
    pub(crate) warmup: u32,
    /// Element type: int8, uint8, int16, uint16, int32, uint32, int64, uint64, half, float, double, bfloat16, f8e4m3, f8e5m2, bool,
    /// complex64, complex128 or all
    #[arg(short = 'd', long, default_value = "float")]
    pub(crate) datatype: Choice<Dtype>,
    /// Reduction: sum, prod, max, min, avg, mulsum (factors of 1 and 2 in turn), band, bor, bxor or all that a type has
    #[arg(short = 'o', long, default_value = "sum")]
    pub(crate) op: Choice<ReduceOp>,
    /// Root, where the collective has one; -1 for each rank in turn
    #[arg(short = 'r', long, default_value_t = 0, allow_negative_numbers = true)]
    pub(crate) root: i64,
    /// 0: up to eight operations in flight; 1: wait and barrier after each; 2: wait, no barrier; 3: as 1, the time without it
    #[arg(short = 'z', long, default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=3))]
    pub(crate) blocking: u8,
    /// How often each size's result is checked; 0 for never
    #[arg(short = 'c', long, default_value_t = 1)]
    pub(crate) check: u32,
    /// Whose time is printed: 0 rank 0, 1 the mean, 2 the least, 3 the greatest
    #[arg(short = 'a', long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(0..=3))]
    pub(crate) average: u8,
    /// Prints p50, p99 and maximum of single operations, and the slowest rank, under each size
    #[arg(long)]
    pub(crate) percentiles: bool,
    /// Writes a row for each size and place as comma-separated values
    #[arg(long, value_name = "FILE")]
    pub(crate) csv: Option<PathBuf>,
    /// Writes configuration, ranks and rows as JSON; `-` prints them on a line of standard output
    #[arg(short = 'J', long = "json", value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Writes a page of one file: charts of time and bus bandwidth by size, the rows, and where they were measured
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
    /// Seconds until ranks give each other up, and an operation
    #[arg(short = 'T', long, default_value_t = 60)]
    pub(crate) timeout: u64,
}

/// What nccl-tests has a program for, by its name without the end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Program {
    pub(crate) name: &'static str,
    pub(crate) measured: Measured,
}

impl Program {
    /// All of them.
    fn all() -> impl Iterator<Item = Self> {
        let collectives =
            Collective::ALL.iter().map(|one| (one.traits().nccl_tests, Measured::Collective(*one)));
        let others = [("alltoallv", Measured::AllToAllV), ("sendrecv", Measured::SendRecv)];
        let named = collectives.filter(|(name, _)| !name.is_empty()).chain(others);
        named.map(|(name, measured)| Self { name, measured })
    }

    fn names() -> String {
        Self::all().map(|program| program.name).collect::<Vec<_>>().join(", ")
    }
}

impl FromStr for Program {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::all().find(|program| program.name == text);
        found.ok_or_else(|| format!("{text:?} is none of {}", Self::names()))
    }
}

/// A number of bytes with nccl-tests' suffixes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Bytes(pub(crate) u64);

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (digits, suffix) =
            text.split_at(text.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(text.len()));
        let number: u64 = digits.parse().map_err(|_| format!("{text:?} is no number of bytes"))?;
        let shift = match suffix {
            "" => 0,
            "K" | "k" => 10,
            "M" | "m" => 20,
            "G" | "g" => 30,
            suffix => return Err(format!("{suffix:?} is none of K, M and G")),
        };
        number.checked_mul(1 << shift).map(Self).ok_or_else(|| format!("{text} is too large"))
    }
}

/// A value by nccl-tests' name for it.
pub(crate) trait Named: Copy + Sized + 'static {
    const ALL: &[(&str, Self)];
}

/// One value, or all.
#[derive(Clone, Debug)]
pub(crate) struct Choice<T: Named>(pub(crate) Vec<(&'static str, T)>);

impl<T: Named> FromStr for Choice<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let chosen: Vec<_> =
            T::ALL.iter().filter(|(name, _)| text == "all" || text == *name).copied().collect();
        if chosen.is_empty() {
            let names: Vec<_> = T::ALL.iter().map(|(name, _)| *name).collect();
            return Err(format!("{text:?} is none of {} and all", names.join(", ")));
        }
        Ok(Self(chosen))
    }
}

impl Named for Dtype {
    const ALL: &[(&str, Self)] = &[
        ("int8", Self::I8),
        ("uint8", Self::U8),
        ("int16", Self::I16),
        ("uint16", Self::U16),
        ("int32", Self::I32),
        ("uint32", Self::U32),
        ("int64", Self::I64),
        ("uint64", Self::U64),
        ("half", Self::F16),
        ("float", Self::F32),
        ("double", Self::F64),
        ("bfloat16", Self::Bf16),
        ("f8e4m3", Self::F8E4M3),
        ("f8e5m2", Self::F8E5M2),
        ("bool", Self::Bool),
        ("complex64", Self::Complex64),
        ("complex128", Self::Complex128),
    ];
}

impl Named for ReduceOp {
    const ALL: &[(&str, Self)] = &[
        ("sum", Self::Sum),
        ("prod", Self::Product),
        ("max", Self::Max),
        ("min", Self::Min),
        ("avg", Self::Average),
        ("mulsum", Self::PremulSum),
        ("band", Self::BitAnd),
        ("bor", Self::BitOr),
        ("bxor", Self::BitXor),
    ];
}

/// Options that make no sense together.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Contradiction {
    /// Nothing would run a command on a host.
    #[error("--rsh is empty: what runs commands on hosts?")]
    NoRsh,
    /// One of the hosts is none.
    #[error("--hosts {0}: names or addresses, with commas between them")]
    Hosts(String),
    /// A host would have no rank.
    #[error("--ranks {ranks} is fewer than the {hosts} of --hosts")]
    FewRanks { ranks: u32, hosts: usize },
    /// Nothing would be started.
    #[error("--dry-run shows what --ranks or --hosts starts: give one of them")]
    NothingToShow,
    /// Sizes would end before they begin, in bytes.
    #[error("-b {min} is more than -e {max}")]
    Sizes { min: u64, max: u64 },
    /// Sizes would stay as they are.
    #[error("-i 0 never reaches -e")]
    NoStep,
    /// A size of nothing would stay nothing.
    #[error("-b 0 times a factor stays 0")]
    NoGrowth,
    /// No element type is reduced so.
    #[error("no type of -d has a reduction of -o")]
    NoReduction,
    /// No rank has this number.
    #[error("-r {0}: a rank, or -1 for each in turn")]
    Root(i64),
}

impl Arguments {
    /// Refuses what no single option can see.
    pub(crate) fn check(&self) -> Result<(), Contradiction> {
        let wrong = if !self.hosts.is_empty() && self.rsh.trim().is_empty() {
            Contradiction::NoRsh
        } else if !self.hosts.iter().all(|host| is_host(host)) {
            Contradiction::Hosts(self.hosts.join(","))
        } else if let Some(ranks) = self.ranks.filter(|ranks| (*ranks as usize) < self.hosts.len()) {
            Contradiction::FewRanks { ranks, hosts: self.hosts.len() }
        } else if self.dry_run && self.started().is_none() {
            Contradiction::NothingToShow
        } else if self.min > self.max {
            Contradiction::Sizes { min: self.min.0, max: self.max.0 }
        } else if self.factor <= 1 && self.step.0 == 0 && self.min != self.max {
            Contradiction::NoStep
        } else if self.min.0 == 0 && self.factor != 1 {
            Contradiction::NoGrowth
        } else if self.collective.measured.reduces() && !self.has_reduction() {
            Contradiction::NoReduction
        } else if self.root < -1 {
            Contradiction::Root(self.root)
        } else {
            return Ok(());
        };
        Err(wrong)
    }

    /// Whether elements of a type that is asked for are reduced in a way that is asked for.
    fn has_reduction(&self) -> bool {
        let takes = |dtype: Dtype| self.op.0.iter().any(|(_, op)| op.takes(dtype));
        self.datatype.0.iter().any(|(_, dtype)| takes(*dtype))
    }

    /// How many ranks this process is to start, if it is: `--ranks`, or one for each of the hosts.
    pub(crate) fn started(&self) -> Option<u32> {
        let hosts = u32::try_from(self.hosts.len()).unwrap_or(u32::MAX);
        self.ranks.or(Some(hosts).filter(|hosts| *hosts > 0))
    }

    /// The sizes, in bytes.
    pub(crate) fn sizes(&self) -> impl Iterator<Item = u64> + '_ {
        let next = |size: &u64| {
            if self.factor > 1 { size.checked_mul(self.factor) } else { size.checked_add(self.step.0.max(1)) }
        };
        std::iter::successors(Some(self.min.0), next).take_while(|size| *size <= self.max.0)
    }

    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // tests alone

    use super::*;
    use clap::CommandFactory;
    use harmonaize_testkit::golden;

    #[test]
    fn help_of_the_program() {
        golden::same("dataplane/perf/tests/golden/help.txt", &golden::help(Arguments::command()));
    }

    fn read(line: &str) -> Result<Arguments, clap::Error> {
        let words =
            ["harmonaize-perf", "all_reduce", "--agent", "a"].into_iter().chain(line.split_whitespace());
        Arguments::try_parse_from(words)
    }

    fn parsed(line: &str) -> Arguments {
        let arguments = read(line).unwrap();
        arguments.check().unwrap();
        arguments
    }

    #[test]
    fn sizes_step_as_nccl_tests() {
        let sizes = |line| parsed(line).sizes().collect::<Vec<_>>();
        assert_eq!(sizes(""), [32 << 20]);
        assert_eq!(sizes("-b 8 -e 64 -f 2"), [8, 16, 32, 64]);
        assert_eq!(sizes("-b 1K -e 3k -i 1K"), [1024, 2048, 3072]);
        assert_eq!(sizes("-b 1M -e 5M -f 4"), [1 << 20, 4 << 20]);
    }

    #[test]
    fn bad_options_are_refused() {
        for (line, part) in [
            ("-b 1T", "none of K, M and G"),
            ("-b x", "no number"),
            ("-d fp3", "bfloat16"),
            ("-o nand", "avg"),
            ("-z 4", "0..=3"),
            ("-f 0", "--stepfactor"),
            ("--ranks 2 --rsh ssh", "--hosts"),
        ] {
            let error = read(line).unwrap_err().to_string();
            assert!(error.contains(part), "{line}: {error}");
        }
    }

    #[test]
    fn options_that_contradict_each_other_are_refused() {
        for (line, expected) in [
            ("-b 2M -e 1M", Contradiction::Sizes { min: 2 << 20, max: 1 << 20 }),
            ("-b 0 -e 8 -f 2", Contradiction::NoGrowth),
            ("-b 0 -e 8 -i 0", Contradiction::NoStep),
            ("-d float -o band", Contradiction::NoReduction),
            ("-r -2", Contradiction::Root(-2)),
            ("--ranks 1 --hosts n1,n2", Contradiction::FewRanks { ranks: 1, hosts: 2 }),
            ("--dry-run", Contradiction::NothingToShow),
            ("--ranks 2 --hosts n1 --rsh=", Contradiction::NoRsh),
        ] {
            assert_eq!(read(line).unwrap().check(), Err(expected), "{line}");
        }
        for hosts in
            ["n1,,n2", "-oProxyCommand=x", "root@-oProxyCommand", "n1,@n2", "n1,$(reboot)", "n1,n2/x"]
        {
            let refused = read(&format!("--ranks 2 --hosts={hosts}")).unwrap().check();
            assert_eq!(refused, Err(Contradiction::Hosts(hosts.to_owned())));
        }
    }

    #[test]
    fn ranks_are_as_many_as_asked_for_or_one_a_host() {
        let started = |line| parsed(line).started();
        assert_eq!(started(""), None);
        assert_eq!(started("--ranks 3"), Some(3));
        assert_eq!(started("--hosts n1,root@n2.lab,10.0.0.3,fe80::1%eth0"), Some(4));
        assert_eq!(started("--hosts n1,n2 --ranks 5"), Some(5));
    }

    #[test]
    fn collectives_go_by_the_names_of_nccl_tests() {
        let named = |name| Arguments::try_parse_from(["harmonaize-perf", name, "--agent", "a"]);
        for program in Program::all() {
            let parsed = named(program.name).unwrap().collective;
            assert_eq!((parsed.name, parsed.measured), (program.name, program.measured));
        }
        let has_program = |one: &Collective| !one.traits().nccl_tests.is_empty();
        assert!(Collective::ALL.iter().all(|one| has_program(one) == one.has_data()));
        let error = named("allreduce").unwrap_err().to_string();
        assert!(error.contains("none of all_reduce, alltoall"), "{error}");
    }

    #[test]
    fn all_types_and_reductions() {
        let all = parsed("-d all -o all");
        assert_eq!((all.datatype.0.len(), all.op.0.len()), (Dtype::ALL.len(), ReduceOp::ALL.len()));
    }
}
