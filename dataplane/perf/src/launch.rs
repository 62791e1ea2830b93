//! Which rank this process is: one that `--ranks` started, one of a launcher, or the one that starts the others.

use crate::arguments::Arguments;
use anyhow::{Context, Result, ensure};
use harmonaize_client::Place;
use harmonaize_program::remote::quoted;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

/// By which ranks hear the communicator's name from the process that started them.
const NAME: &str = "HARMONAIZE_NAME";
/// Where the agent's socket is, if no option says so.
const SOCKET: &str = "HARMONAIZE_SOCKET";

/// Set where the process that started this rank keeps the rank's standard input open. It does so for as long as
/// it is there itself.
const WATCH_INPUT: &str = "HARMONAIZE_WATCH_INPUT";

/// How often the ranks are looked at.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// How long the last words of a rank that has ended may take. What has its standard error may outlive it.
const LAST_OUTPUT: Duration = Duration::from_secs(2);

/// The longest line of a rank on a host that is printed as one, in bytes.
const LONGEST_LINE: u64 = 16 << 10;

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
    // Ranks that were started are not given --dry-run: the variables are another's, such as those of a job of this host.
    if arguments.started().is_some() && (arguments.dry_run || value("HARMONAIZE_RANK").is_none()) {
        return Ok(None);
    }
    let place = Place::from_variables(&value).context("--ranks or --hosts is missing")?;
    let agent = share(&arguments.agent, place.rank.0, place.ranks).context("no agent")?.clone();
    let name = value(NAME).or_else(|| arguments.name.clone()).unwrap_or_else(|| "perf".into());
    Ok(Some(Seat { rank: place.rank.0, ranks: place.ranks, agent, name }))
}

/// Which of these a rank has, of which each has an equal part of the ranks, in order.
fn share<T>(all: &[T], rank: u32, ranks: u32) -> Option<&T> {
    let at = (u64::from(rank) * all.len() as u64).checked_div(ranks.into())?;
    all.get(usize::try_from(at).ok()?)
}

/// A rank that is to be started.
struct Start {
    /// What it is called in messages.
    who: String,
    host: Option<String>,
    command: Command,
}

/// What starts the ranks, in order: this program with the same arguments, here or on each rank's host.
fn starts(
    arguments: &Arguments,
    program: &Path,
    given: &[OsString],
    name: &str,
    socket: Option<&str>,
) -> Result<Vec<Start>> {
    let ranks = arguments.started().unwrap_or(0);
    ensure!(ranks > 0, "--ranks 0 runs nothing");
    let start = |rank: u32| {
        let mut variables = vec![
            (NAME, name.to_owned()),
            ("HARMONAIZE_RANK", rank.to_string()),
            ("HARMONAIZE_RANKS", ranks.to_string()),
        ];
        variables.extend(socket.map(|socket| (SOCKET, socket.to_owned())));
        let host = share(&arguments.hosts, rank, ranks);
        variables.extend(host.map(|_| (WATCH_INPUT, "1".to_owned())));
        let who = host.map_or_else(|| format!("rank {rank}"), |host| format!("rank {rank} on {host}"));
        let command = command(arguments, program, given, &variables, host)?;
        Ok(Start { who, host: host.cloned(), command })
    };
    (0..ranks).map(start).collect()
}

/// What starts a rank with these variables, here or on a host.
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
    // Pipes of ours: what reaches hosts would take a script's input, and the end of this one ends the rank there. What ranks
    // say of errors is printed behind their host's name.
    command.args(rsh).arg(host).arg(line).stdin(Stdio::piped()).stderr(Stdio::piped());
    Ok(command)
}

/// A command as a person would type it, with its variables.
fn shown(command: &Command) -> String {
    let mut arguments: Vec<String> = command
        .get_envs()
        .filter_map(|(name, value)| Some(format!("{}={}", name.to_string_lossy(), value?.to_string_lossy())))
        .collect();
    if !arguments.is_empty() {
        arguments.insert(0, "env".to_owned());
    }
    arguments.push(command.get_program().to_string_lossy().into_owned());
    arguments.extend(command.get_args().map(|word| word.to_string_lossy().into_owned()));
    arguments.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ")
}

/// Has a rank on another host end with the process that started it. What reaches the host may leave the rank alone there.
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

/// Starts the ranks and waits for them. One that fails ends the others, which would wait for it.
pub(crate) fn ranks(arguments: &Arguments) -> Result<ExitCode> {
    let program = std::env::current_exe().context("cannot find this program again")?;
    let name = arguments.name.clone().unwrap_or_else(|| format!("perf-{}", std::process::id()));
    let given: Vec<OsString> = std::env::args_os().skip(1).filter(|word| word != "--dry-run").collect();
    let socket = std::env::var(SOCKET).ok();
    let starts = starts(arguments, &program, &given, &name, socket.as_deref())?;
    if arguments.dry_run {
        let lines: String = starts.iter().map(|start| shown(&start.command) + "\n").collect();
        std::io::stdout().write_all(lines.as_bytes()).context("cannot print the commands")?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut started = Started(Vec::new());
    for Start { who, host, mut command } in starts {
        let mut child = command.spawn().with_context(|| format!("cannot start {who}"))?;
        if let Some(mut input) = child.stdin.as_ref() {
            // A command that has ended already is found below.
            let _ = input.write_all(b"\n");
        }
        let errors = host.zip(child.stderr.take());
        started.0.push(Rank { who, child, printed: None });
        if let (Some((host, errors)), Some(rank)) = (errors, started.0.last_mut()) {
            rank.printed = Some(print_errors(host, errors)?);
        }
    }
    while !started.0.is_empty() {
        let mut failed = None;
        started.0.retain_mut(|rank| match rank.child.try_wait() {
            Ok(None) => true,
            Ok(Some(status)) => {
                rank.finish_printing();
                if !status.success() {
                    failed.get_or_insert_with(|| format!("{} has ended: {status}", rank.who));
                }
                false
            }
            Err(error) => {
                failed.get_or_insert_with(|| format!("{}: {error}", rank.who));
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

/// Prints what a rank on a host says of errors, each line behind the host's name. The channel ends with that.
fn print_errors(host: String, errors: impl Read + Send + 'static) -> Result<Receiver<()>> {
    let (printing, printed) = mpsc::channel();
    let print = move || {
        copy_lines(&host, errors, std::io::stderr());
        drop(printing);
    };
    std::thread::Builder::new().name("errors".into()).spawn(print).context("cannot start a thread")?;
    Ok(printed)
}

/// Copies lines, each behind a host's name.
fn copy_lines(host: &str, from: impl Read, mut to: impl Write) {
    let (mut from, mut line) = (BufReader::new(from), Vec::new());
    while from.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line).is_ok_and(|bytes| bytes > 0) {
        let text = String::from_utf8_lossy(&line);
        // In one piece, since hosts take turns. Where nobody reads it any more, the ranks go on.
        let _ = to.write_all(format!("{host}: {}\n", text.trim_end()).as_bytes());
        line.clear();
    }
}

/// A rank that was started.
struct Rank {
    /// What it is called in messages.
    who: String,
    child: Child,
    /// Ends when all is printed that it said of errors.
    printed: Option<Receiver<()>>,
}

impl Rank {
    /// Waits until its last words are printed, but not long.
    fn finish_printing(&self) {
        if let Some(printed) = &self.printed {
            // Nothing is sent: it ends, or the time is over.
            let _ = printed.recv_timeout(LAST_OUTPUT);
        }
    }
}

/// Ranks that end with this. Those on hosts end with their standard input, which is closed here.
struct Started(Vec<Rank>);

impl Drop for Started {
    fn drop(&mut self) {
        for rank in &mut self.0 {
            let _ = rank.child.kill();
            let _ = rank.child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // tests alone

    use super::*;
    use clap::Parser;
    use harmonaize_testkit::golden;

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
        // What only shows commands is no rank, in a job's shell either.
        assert_eq!(seat_of("--agent a --ranks 2 --dry-run", &ours).unwrap(), None);
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
        assert_eq!(told[..5], ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "n2"]);
        let line = told[5].replace(" all_reduce ", r" '%s|' ");
        let output = Command::new("sh").args(["-c", &line]).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "--agent|it's $HOME; a b|");
        assert_eq!(share(&["n1", "n2"], 1, 5), Some(&"n1"));
        assert_eq!(share(&["n1", "n2"], 4, 5), Some(&"n2"));
        assert_eq!(share(&["n1"; 0], 4, 5), None);
    }

    #[test]
    fn commands_are_shown_as_a_shell_reads_them() {
        let shown_of = |line: &str| {
            let given = format!("all_reduce --agent /run/a.sock -b 1K {line}");
            let mut given: Vec<OsString> = given.split_whitespace().map(OsString::from).collect();
            let typed = [OsString::from("harmonaize-perf")].into_iter().chain(given.clone());
            let arguments = Arguments::try_parse_from(typed).unwrap();
            arguments.check().unwrap();
            given.push("--csv=it's rows.csv".into());
            let program = Path::new("/usr/bin/harmonaize-perf");
            let starts = starts(&arguments, program, &given, "night run", Some("/run/b.sock")).unwrap();
            let lines: String = starts.iter().map(|start| shown(&start.command) + "\n").collect();
            format!("# {line}\n{lines}")
        };
        let lines = ["--ranks 2", "--hosts n1,root@n2", "--hosts n1,n2 --ranks 3 --rsh rsh"].map(shown_of);
        golden::same("dataplane/perf/tests/golden/commands.txt", &lines.concat());
        // What is shown is what a shell reads back.
        let shown_to_shell = |arguments: &[&str]| {
            let mut command = Command::new("printf");
            command.arg("%s|").args(arguments);
            Command::new("sh").args(["-c", &shown(&command)]).output().unwrap().stdout
        };
        let odd = ["it's", "$HOME", "a b", "", "*", "~", "a;b", "\"", "`x`", "n1,n2"];
        let expected: String = odd.iter().map(|word| format!("{word}|")).collect();
        assert_eq!(String::from_utf8_lossy(&shown_to_shell(&odd)), expected);
    }

    #[test]
    fn what_hosts_say_has_their_names() {
        let mut printed = Vec::<u8>::new();
        copy_lines("n2", &b"one\r\ntwo\n\xffthree"[..], &mut printed);
        assert_eq!(String::from_utf8_lossy(&printed), "n2: one\nn2: two\nn2: \u{fffd}three\n");
        let (long, mut printed) = (vec![b'x'; 2 * LONGEST_LINE as usize], Vec::<u8>::new());
        copy_lines("n2", &*long, &mut printed);
        assert_eq!(String::from_utf8_lossy(&printed).lines().count(), 2);
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
