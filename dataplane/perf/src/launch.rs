//! Which rank this process is: one that `--ranks` started, one of a launcher, or the one that starts the others.

use crate::arguments::Arguments;
use anyhow::{Context, Result, ensure};
use harmonaize_client::Place;
use std::ffi::OsString;
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Duration;

/// By which ranks hear the communicator's name from the process that started them.
const NAME: &str = "HARMONAIZE_NAME";
/// Where the agent's socket is, if no option says so.
const SOCKET: &str = "HARMONAIZE_SOCKET";

/// Set where the process that started this rank keeps its standard input open, for as long as it is there itself.
const WATCH_INPUT: &str = "HARMONAIZE_WATCH_INPUT";

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
    let agent = share(&arguments.agent, place.rank.0, place.ranks).context("no agent")?.clone();
    let name = value(NAME).or_else(|| arguments.name.clone()).unwrap_or_else(|| "perf".into());
    Ok(Some(Seat { rank: place.rank.0, ranks: place.ranks, agent, name }))
}

/// Which of these a rank has, of which each has an equal part of the ranks, in order.
fn share<T>(all: &[T], rank: u32, ranks: u32) -> Option<&T> {
    let at = (u64::from(rank) * all.len() as u64).checked_div(ranks.into())?;
    all.get(usize::try_from(at).ok()?)
}

/// What starts a rank: this program with the same arguments, here or on the rank's host.
fn command(
    arguments: &Arguments,
    program: &Path,
    given: &[OsString],
    variables: &[(&str, String)],
    host: Option<&String>,
) -> Result<Command> {
    let Some(host) = host else {
        let mut command = Command::new(program);
        command.args(given).envs(variables.iter().map(|(name, value)| (name, value)));
        return Ok(command);
    };
    let mut line = "exec env".to_owned();
    for (name, value) in variables {
        line += &format!(" {}", quoted(&format!("{name}={value}")));
    }
    for word in [program.as_os_str()].into_iter().chain(given.iter().map(OsString::as_os_str)) {
        let word =
            word.to_str().with_context(|| format!("{word:?} is no text that a shell could be given"))?;
        line += &format!(" {}", quoted(word));
    }
    let mut rsh = arguments.rsh.split_whitespace();
    let mut command = Command::new(rsh.next().context("--rsh is empty")?);
    // A pipe of ours: what reaches hosts would take a script's input, and the end of this one ends the rank there.
    command.args(rsh).arg(host).arg(line).stdin(Stdio::piped());
    Ok(command)
}

/// Has a rank on another host end with the process that started it: whatever reaches the host may leave the rank alone there.
pub(crate) fn end_with_launcher() -> Result<()> {
    if std::env::var_os(WATCH_INPUT).is_none() {
        return Ok(());
    }
    let watch = || {
        if wait_for_end(std::io::stdin()) {
            // Nothing is printed: nobody may be there to read it.
            std::process::exit(1);
        }
    };
    std::thread::Builder::new().name("launcher".into()).spawn(watch).context("cannot start a thread")?;
    Ok(())
}

/// Waits until an input ends. Returns whether it was open before: a line comes first where it is passed on to the rank.
fn wait_for_end(mut input: impl Read) -> bool {
    let (mut opened, mut bytes) = (false, [0; 64]);
    loop {
        match input.read(&mut bytes) {
            Ok(0) => return opened,
            Ok(_) => opened = true,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => return opened,
        }
    }
}

/// A word as a shell takes it for one.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Starts the ranks and waits for them. One that fails ends the others, which would wait for it.
pub(crate) fn ranks(arguments: &Arguments) -> Result<ExitCode> {
    let ranks = arguments.ranks.unwrap_or(0);
    ensure!(ranks > 0, "--ranks 0 runs nothing");
    let program = std::env::current_exe().context("cannot find this program again")?;
    let name = arguments.name.clone().unwrap_or_else(|| format!("perf-{}", std::process::id()));
    let given: Vec<OsString> = std::env::args_os().skip(1).collect();
    let socket = std::env::var(SOCKET).ok();
    let mut children = Children(Vec::new());
    for rank in 0..ranks {
        let mut variables = vec![
            (NAME, name.clone()),
            ("HARMONAIZE_RANK", rank.to_string()),
            ("HARMONAIZE_RANKS", ranks.to_string()),
        ];
        variables.extend(socket.clone().map(|socket| (SOCKET, socket)));
        let host = share(&arguments.hosts, rank, ranks);
        variables.extend(host.map(|_| (WATCH_INPUT, "1".to_owned())));
        let mut command = command(arguments, &program, &given, &variables, host)?;
        let who = host.map_or_else(|| format!("rank {rank}"), |host| format!("rank {rank} on {host}"));
        let child = command.spawn().with_context(|| format!("cannot start {who}"))?;
        if let Some(mut input) = child.stdin.as_ref() {
            // A command that has ended already is found below.
            let _ = input.write_all(b"\n");
        }
        children.0.push((who, child));
    }
    while !children.0.is_empty() {
        let mut failed = None;
        children.0.retain_mut(|(who, child)| match child.try_wait() {
            Ok(None) => true,
            Ok(Some(status)) if status.success() => false,
            Ok(Some(status)) => {
                failed = Some(format!("{who} has ended: {status}"));
                false
            }
            Err(error) => {
                failed = Some(format!("{who}: {error}"));
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

/// Ranks that end with this, by what they are called. Those on hosts end with their standard input, which is closed here.
struct Children(Vec<(String, Child)>);

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
        let typed = ["harmonaize-perf", "all_reduce"].into_iter().chain(line.split_whitespace());
        let arguments = Arguments::try_parse_from(typed)?;
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
    fn hosts_get_commands_that_their_shells_read_as_meant() {
        let typed = ["harmonaize-perf", "all_reduce", "--agent", "a b", "--ranks", "2", "--hosts", "n1,n2"];
        let arguments = Arguments::try_parse_from(typed).unwrap();
        let given: Vec<OsString> = ["all_reduce", "--agent", "it's $HOME; a b"].map(OsString::from).into();
        let variables = [("HARMONAIZE_RANK", "1".to_owned())];
        let host = share(&arguments.hosts, 1, 2);
        assert_eq!(host.unwrap(), "n2");
        let command = command(&arguments, Path::new("/usr/bin/printf"), &given, &variables, host).unwrap();
        assert_eq!(command.get_program(), "ssh");
        let told: Vec<_> = command.get_args().map(|word| word.to_str().unwrap()).collect();
        assert_eq!(told[..3], ["-o", "BatchMode=yes", "n2"]);
        let line = told[3].replace("'all_reduce'", r"'%s|'");
        let output = Command::new("sh").args(["-c", &line]).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "--agent|it's $HOME; a b|");
        assert_eq!(share(&["n1", "n2"], 1, 5), Some(&"n1"));
        assert_eq!(share(&["n1", "n2"], 4, 5), Some(&"n2"));
        assert_eq!(share(&["n1"; 0], 4, 5), None);
    }

    #[test]
    fn an_input_that_was_never_open_ends_no_rank() {
        assert!(wait_for_end(&b"\n"[..]));
        assert!(!wait_for_end(&b""[..]));
        let (input, output) = std::io::pipe().unwrap();
        let rank = std::thread::spawn(|| wait_for_end(input));
        (&output).write_all(b"\n").unwrap();
        drop(output);
        assert!(rank.join().unwrap());
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
