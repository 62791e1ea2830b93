//! What the environment of a process says: its agent's socket, its job, and its place among the ranks that a launcher started.

use crate::{AttachOptions, Client, Error};
use harmonaize_abi::Rank;
use std::path::PathBuf;

/// The variable with the path of the agent's socket.
const SOCKET: &str = "HARMONAIZE_SOCKET";

/// The variable with the job, where the tenant runs several.
const JOB: &str = "HARMONAIZE_JOB";

/// Variables of rank and number of ranks: harmonaize-perf's, torchrun's, Open MPI's, PMI's (MPICH, Intel MPI), Slurm's.
const LAUNCHERS: [[&str; 2]; 5] = [
    ["HARMONAIZE_RANK", "HARMONAIZE_RANKS"],
    ["RANK", "WORLD_SIZE"],
    ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"],
    ["PMI_RANK", "PMI_SIZE"],
    ["SLURM_PROCID", "SLURM_NTASKS"],
];

/// A process's place among the ranks that a launcher started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its rank.
    pub rank: Rank,
    /// How many ranks there are.
    pub ranks: u32,
}

impl Place {
    /// The place that a launcher has put into the environment: torchrun, Open MPI, MPICH, Intel MPI or Slurm, in this order.
    ///
    /// # Errors
    /// Where none has, or what it says is no rank.
    pub fn from_env() -> Result<Self, Error> {
        Self::from_variables(|name| std::env::var(name).ok())
    }

    /// As [`Place::from_env`], of these variables.
    ///
    /// # Errors
    /// Likewise.
    pub fn from_variables(value: impl Fn(&str) -> Option<String>) -> Result<Self, Error> {
        let said = |[rank, ranks]: [&'static str; 2]| Some([(rank, value(rank)?), (ranks, value(ranks)?)]);
        let Some([rank, ranks]) = LAUNCHERS.into_iter().find_map(said) else {
            let text =
                "no launcher has set a rank and a number of ranks, as torchrun does with RANK and WORLD_SIZE";
            return Err(Error::Environment(text.to_owned()));
        };
        let number = |(name, text): (&str, String)| {
            text.parse::<u32>().map_err(|_| Error::Environment(format!("{name}={text} is no number")))
        };
        let (rank, ranks) = (number(rank)?, number(ranks)?);
        if rank >= ranks {
            return Err(Error::Environment(format!("the environment says rank {rank} of {ranks} ranks")));
        }
        Ok(Self { rank: Rank(rank), ranks })
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
            Error::Environment(format!(
                "{SOCKET} is not set: set {SOCKET} to the tenant's socket on this host, which the operator names, such as \
                 /run/harmonaize/TENANT/agent.sock"
            ))
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
    fn nobody_and_nonsense_are_errors() {
        for variables in [
            &[][..],
            &[("RANK", "0")],
            &[("RANK", "x"), ("WORLD_SIZE", "2")],
            &[("RANK", "2"), ("WORLD_SIZE", "2")],
        ] {
            assert!(matches!(place(variables), Err(Error::Environment(_))), "{variables:?}");
        }
    }
}
