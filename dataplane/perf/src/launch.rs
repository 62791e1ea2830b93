//! Which rank this process is: one that `--ranks` started, one of a launcher, or the one that starts the others.

use crate::arguments::Arguments;
use anyhow::{Context, Result, ensure};
use harmonaize_client::Place;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode};
use std::time::Duration;

/// By which ranks hear the communicator's name from the process that started them.
const NAME: &str = "HARMONAIZE_NAME";

/// How often the ranks are looked at.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A rank's place.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Seat {
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
    pub(crate) agent: PathBuf,
    pub(crate) name: String,
}

/// This process's seat; `None` if it is to start the ranks.
pub(crate) fn seat(arguments: &Arguments) -> Result<Option<Seat>> {
    from_variables(arguments, |name| std::env::var(name).ok())
}

fn from_variables(arguments: &Arguments, value: impl Fn(&str) -> Option<String>) -> Result<Option<Seat>> {
    if arguments.ranks.is_some() && value("HARMONAIZE_RANK").is_none() {
        return Ok(None);
    }
    let place = Place::from_variables(&value).context("--ranks is missing")?;
    // Equal parts of the ranks, in order.
    let at = u64::from(place.rank.0) * arguments.agent.len() as u64 / u64::from(place.ranks);
    let agent = usize::try_from(at).ok().and_then(|at| arguments.agent.get(at)).context("no agent")?.clone();
    let name = value(NAME).or_else(|| arguments.name.clone()).unwrap_or_else(|| "perf".into());
    Ok(Some(Seat { rank: place.rank.0, ranks: place.ranks, agent, name }))
}

/// Starts the ranks and waits for them. One that fails ends the others, which would wait for it.
pub(crate) fn ranks(arguments: &Arguments) -> Result<ExitCode> {
    let ranks = arguments.ranks.unwrap_or(0);
    ensure!(ranks > 0, "--ranks 0 runs nothing");
    let program = std::env::current_exe().context("cannot find this program again")?;
    let name = arguments.name.clone().unwrap_or_else(|| format!("perf-{}", std::process::id()));
    let mut children = Children(Vec::new());
    for rank in 0..ranks {
        let mut command = Command::new(&program);
        command.args(std::env::args_os().skip(1)).env(NAME, &name);
        command.env("HARMONAIZE_RANK", rank.to_string()).env("HARMONAIZE_RANKS", ranks.to_string());
        children.0.push((rank, command.spawn().with_context(|| format!("cannot start rank {rank}"))?));
    }
    while !children.0.is_empty() {
        let mut failed = None;
        children.0.retain_mut(|(rank, child)| match child.try_wait() {
            Ok(None) => true,
            Ok(Some(status)) if status.success() => false,
            Ok(Some(status)) => {
                failed = Some(format!("rank {rank} has ended: {status}"));
                false
            }
            Err(error) => {
                failed = Some(format!("rank {rank}: {error}"));
                true
            }
        });
        if let Some(why) = failed {
            eprintln!("{why}");
            return Ok(ExitCode::FAILURE);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(ExitCode::SUCCESS)
}

/// Ranks that end with this.
struct Children(Vec<(u32, Child)>);

impl Drop for Children {
    fn drop(&mut self) {
        for (_, child) in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // tests alone

    use super::*;
    use clap::Parser;

    fn seat_of(line: &str, variables: &[(&str, &str)]) -> Result<Option<Seat>> {
        let words = ["harmonaize-perf", "all_reduce"].into_iter().chain(line.split_whitespace());
        let arguments = Arguments::try_parse_from(words)?;
        let value = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        from_variables(&arguments, value)
    }

    #[test]
    fn ranks_are_shared_out_in_order() {
        let agent = |rank: &str| {
            let variables = [("RANK", rank), ("WORLD_SIZE", "5")];
            seat_of("--agent a --agent b", &variables).unwrap().unwrap().agent
        };
        assert_eq!(["0", "1", "2", "3", "4"].map(agent), ["a", "a", "a", "b", "b"].map(PathBuf::from));
    }

    #[test]
    fn ranks_beats_a_launcher_but_not_ours() {
        let launcher = [("RANK", "0"), ("WORLD_SIZE", "2")];
        assert_eq!(seat_of("--agent a --ranks 2", &launcher).unwrap(), None);
        let ours = [("HARMONAIZE_RANK", "1"), ("HARMONAIZE_RANKS", "2")];
        assert_eq!(seat_of("--agent a --ranks 2", &ours).unwrap().unwrap().rank, 1);
    }

    #[test]
    fn nobody_and_nonsense_are_errors() {
        for variables in
            [&[][..], &[("RANK", "x"), ("WORLD_SIZE", "2")], &[("RANK", "2"), ("WORLD_SIZE", "2")]]
        {
            assert!(seat_of("--agent a", variables).is_err(), "{variables:?}");
        }
    }
}
