//! What a process finds in its environment. It finds its agent's socket, its job, and its place among the ranks that a
//! launcher started.

use crate::{AttachOptions, Client, Error};
use harmonaize_abi::Rank;
use std::path::PathBuf;

/// The variable with the path of the agent's socket.
const SOCKET: &str = "HARMONAIZE_SOCKET";

/// The variable with the job, where the tenant runs several.
const JOB: &str = "HARMONAIZE_JOB";

/// Variables of rank and number of ranks, as launchers set them. Those of harmonaize-perf, torchrun, Open MPI (`mpirun`, `prterun`),
/// MVAPICH, PMI (MPICH, Intel MPI), PMIx under Slurm, and Slurm's own, of a step and of the whole job.
const LAUNCHERS: [[&str; 2]; 9] = [
    ["HARMONAIZE_RANK", "HARMONAIZE_RANKS"],
    ["RANK", "WORLD_SIZE"],
    ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"],
    ["MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"],
    ["PMI_RANK", "PMI_SIZE"],
    ["PMIX_RANK", "SLURM_STEP_NUM_TASKS"],
    ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS"],
    ["SLURM_PROCID", "SLURM_NTASKS"],
    ["SLURM_PROCID", "SLURM_NPROCS"],
];

/// A process's place among the ranks that a launcher started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its rank.
    pub rank: Rank,
    /// How many ranks there are.
    pub ranks: u32,
}

/// A variable's value. What is no UTF-8 stays visible in errors. Set to nothing is as not set.
pub(crate) fn variable(name: &str) -> Option<String> {
    let value = std::env::var_os(name).filter(|value| !value.is_empty())?;
    Some(value.to_string_lossy().into_owned())
}

impl Place {
    /// The place that a launcher has put into the environment. The launcher is torchrun, Open MPI, MVAPICH, MPICH,
    /// Intel MPI or Slurm, in this order.
    ///
    /// # Errors
    /// [`Error::Environment`] names the variable whose value is no number, is missing beside its partner, or is beyond the ranks.
    pub fn from_env() -> Result<Self, Error> {
        Self::from_variables(variable)
    }

    /// As [`Place::from_env`], of these variables.
    ///
    /// # Errors
    /// Likewise.
    pub fn from_variables(value: impl Fn(&str) -> Option<String>) -> Result<Self, Error> {
        let pair = |[rank, ranks]: [&'static str; 2]| Some([(rank, value(rank)?), (ranks, value(ranks)?)]);
        let Some([rank, ranks]) = LAUNCHERS.into_iter().find_map(pair) else {
            let half = LAUNCHERS.into_iter().find(|[rank, _]| value(rank).is_some());
            return Err(half.map_or_else(
                || {
                    let text = "no launcher has set a rank and a number of ranks, as torchrun does with RANK and WORLD_SIZE";
                    Error::environment("RANK", text)
                },
                |[rank, ranks]| Error::environment(ranks, format!("{rank} is set, and {ranks} is not: set both")),
            ));
        };
        let number = |(name, text): &(&'static str, String)| {
            let number = text.trim().parse::<u32>();
            number.map_err(|_| {
                Error::environment(name, format!("{name}={text} is no number of a rank or of ranks"))
            })
        };
        let place = Self { rank: Rank(number(&rank)?), ranks: number(&ranks)? };
        if place.rank.0 >= place.ranks {
            let ((rank, own), (ranks, all)) = (rank, ranks);
            let text =
                format!("{rank}={own} of {ranks}={all}: ranks count from 0 to one less than their number");
            return Err(Error::environment(rank, text));
        }
        Ok(place)
    }
}

/// The job that the environment names (`HARMONAIZE_JOB`), for [`JoinOptions::job`](crate::JoinOptions::job); empty without.
pub fn job_from_env() -> String {
    std::env::var(JOB).unwrap_or_default()
}

impl Client {
    /// Attaches to the agent whose socket the environment names: `HARMONAIZE_SOCKET`.
    ///
    /// # Errors
    /// Where it names none; otherwise as [`Client::attach`].
    pub fn from_env(options: AttachOptions) -> Result<Self, Error> {
        let path = std::env::var_os(SOCKET).filter(|path| !path.is_empty()).ok_or_else(|| {
            let text = format!(
                "{SOCKET} is not set: set {SOCKET} to the tenant's socket on this host, which the operator names, such as \
                 /run/harmonaize/TENANT/agent.sock"
            );
            Error::environment(SOCKET, text)
        })?;
        Self::attach(PathBuf::from(path), options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(variables: &[(&str, &str)]) -> Result<Place, Error> {
        Place::from_variables(|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn launchers_name_the_place() {
        for [rank, ranks] in LAUNCHERS {
            let expected = Place { rank: Rank(2), ranks: 4 };
            assert_eq!(place(&[(rank, "2"), (ranks, "4")]).unwrap(), expected, "{rank}");
        }
        let both = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2"), ("RANK", "1"), ("WORLD_SIZE", "3")];
        assert_eq!(place(&both).unwrap(), Place { rank: Rank(1), ranks: 3 }, "torchrun under Slurm");
    }

    #[test]
    fn nonsense_is_an_error_that_names_the_variable() {
        for (variables, names) in [
            (&[][..], "RANK"),
            (&[("RANK", "0")], "WORLD_SIZE"),
            (&[("PMI_RANK", "0"), ("WORLD_SIZE", "2")], "PMI_SIZE"),
            (&[("RANK", "x"), ("WORLD_SIZE", "2")], "RANK"),
            (&[("RANK", "0"), ("WORLD_SIZE", "-2")], "WORLD_SIZE"),
            (&[("RANK", "2"), ("WORLD_SIZE", "2")], "RANK"),
            (&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2(x3)")], "SLURM_NTASKS"),
        ] {
            let Err(Error::Environment { variable, text }) = place(variables) else {
                panic!("{variables:?} are a place");
            };
            assert_eq!(variable, names, "{variables:?}: {text}");
            assert!(text.contains(names), "{text}");
        }
    }

    #[test]
    fn a_step_of_slurm_counts_its_own_tasks() {
        let step = [("SLURM_PROCID", "1"), ("SLURM_NTASKS", "8"), ("SLURM_STEP_NUM_TASKS", "2")];
        assert_eq!(place(&step).unwrap(), Place { rank: Rank(1), ranks: 2 });
    }
}
