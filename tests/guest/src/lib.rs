//! What a guest is to do, and the lines in which it reports. The task outside and the first process inside share it.

#![forbid(unsafe_code)]

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// Where the job stands in the guest, as JSON.
pub const PATH: &str = "/etc/job.json";
/// Where the modules stand, with a file `order` that lists them.
pub const MODULES: &str = "/usr/lib/guest-modules";
/// The largest packet on a wire: room for verbs' largest MTU, 4096 bytes, and its headers.
pub const MTU: u32 = 4200;
/// The largest count that fits the emulator's status.
pub const LARGEST: u32 = 127;

/// What a guest does after it has mounted its file systems and loaded its modules.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Job {
    /// Emulated hosts to build, each with a SoftRoCE device `rxeN` on its own link; none if 0.
    pub hosts: u32,
    /// Network cards to bring up.
    #[serde(default)]
    pub links: Vec<Link>,
    /// Commands, one after the other; a failed one does not keep the later ones from running.
    pub steps: Vec<Step>,
    /// Open a shell on the console after the steps.
    pub shell: bool,
}

/// A network card of the machine, with an address and a SoftRoCE device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    /// The address by which the card is found, `02:00:00:00:00:01`.
    pub mac: String,
    /// The name that it gets.
    pub name: String,
    /// The address that it gets, with the network's length: `10.0.1.2/24`. A device's addresses begin with 10.0.
    pub address: String,
    /// The SoftRoCE device that stands on it.
    pub device: String,
}

/// One command, and maybe a server that it talks to.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Step {
    /// The name in reports, without spaces.
    pub name: String,
    /// Program and arguments; `{gid:DEVICE}` stands for the index of the device's RoCEv2 address.
    pub command: Vec<String>,
    /// Started before; the command follows once it listens, and it has to end well too.
    pub server: Option<Server>,
    /// Further environment variables of both.
    pub environment: BTreeMap<String, String>,
    /// The most time for both, in seconds.
    pub limit_s: u64,
    /// Whether it runs a second time if it failed: what it rests on fails now and then by itself.
    pub repeats: bool,
}

/// A step's server.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Server {
    /// Program and arguments, as in a step.
    pub command: Vec<String>,
    /// The TCP port on which it listens once it is ready.
    pub port: u16,
}

impl Step {
    /// A step with a command alone.
    pub fn new(name: &str, command: &[&str], limit: Duration) -> Self {
        let command = command.iter().map(|word| (*word).to_owned()).collect();
        Self { name: name.to_owned(), command, limit_s: limit.as_secs(), ..Self::default() }
    }
}

/// A line of the guest that says how far it is: `@@ ...` on the console.
#[derive(Debug, Clone, PartialEq)]
pub enum Mark {
    /// A step has begun.
    Begin(String),
    /// A step has ended.
    End {
        /// The step's name.
        name: String,
        /// How.
        status: Status,
        /// After how many seconds.
        seconds: f64,
    },
    /// All is done, and so many steps have failed; the guest powers off.
    Halt(u32),
}

/// How a step ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// The command's exit status; 0 is success.
    Code(i32),
    /// A signal ended the command.
    Signal(i32),
    /// It did not end within its limit, and was ended.
    TimedOut,
    /// It could not be started.
    NotStarted,
}

impl Status {
    /// Whether all went well.
    pub fn fine(self) -> bool {
        self == Self::Code(0)
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "{code}"),
            Self::Signal(signal) => write!(f, "signal-{signal}"),
            Self::TimedOut => f.write_str("timed-out"),
            Self::NotStarted => f.write_str("not-started"),
        }
    }
}

impl std::str::FromStr for Status {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(match text {
            "timed-out" => Self::TimedOut,
            "not-started" => Self::NotStarted,
            _ => match text.strip_prefix("signal-") {
                Some(signal) => Self::Signal(signal.parse()?),
                None => Self::Code(text.parse()?),
            },
        })
    }
}

impl fmt::Display for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Begin(name) => write!(f, "@@ begin {name}"),
            Self::End { name, status, seconds } => write!(f, "@@ end {name} {status} {seconds:.2}"),
            Self::Halt(failed) => write!(f, "@@ halt {failed}"),
        }
    }
}

impl Mark {
    /// The mark in a line of the console, if there is one: other output may stand before it.
    pub fn find(line: &str) -> Option<Self> {
        let (_, mark) = line.trim_end().rsplit_once("@@ ")?;
        let mut words = mark.split(' ');
        let found = match words.next()? {
            "begin" => Self::Begin(words.next()?.to_owned()),
            "end" => Self::End {
                name: words.next()?.to_owned(),
                status: words.next()?.parse().ok()?,
                seconds: words.next()?.parse().ok()?,
            },
            "halt" => Self::Halt(words.next()?.parse().ok()?),
            _ => return None,
        };
        words.next().is_none().then_some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_read_as_they_were_written() {
        let end = |status| Mark::End { name: "a-b".into(), status, seconds: 1.25 };
        for mark in [
            Mark::Begin("a-b".into()),
            end(Status::Code(0)),
            end(Status::Code(101)),
            end(Status::Signal(9)),
            end(Status::TimedOut),
            end(Status::NotStarted),
            Mark::Halt(3),
        ] {
            assert_eq!(Mark::find(&mark.to_string()), Some(mark.clone()));
            assert_eq!(Mark::find(&format!("test x ... {mark}\r\n")), Some(mark));
        }
    }

    #[test]
    fn other_lines_are_no_marks() {
        for line in
            ["", "test x ... ok", "@@ ", "@@ end a", "@@ end a 0", "@@ halt x", "@@ halt 0 0", "@@ fly 1"]
        {
            assert_eq!(Mark::find(line), None, "{line}");
        }
    }

    #[test]
    fn only_a_status_of_zero_is_fine() {
        assert!(Status::Code(0).fine());
        for status in [Status::Code(1), Status::Signal(0), Status::TimedOut, Status::NotStarted] {
            assert!(!status.fine(), "{status}");
        }
    }
}
