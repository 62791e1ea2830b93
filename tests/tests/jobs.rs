//! Jobs that the provider places, end to end: runners on three hosts, whose workers are shells.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_testkit::deployment::{Deployment, Setup, socket};
use harmonaize_testkit::process::Process;
use harmonaize_tests::job::deploy;
use harmonaize_tests::star;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// How long anything may take: a bound for machines that are busy with other things, and no figure.
const PATIENCE: Duration = Duration::from_secs(120);

/// Nobody waits for the end of the notice, unless something is wrong.
const ALLOCATOR: &str = "[allocator]\npolicy = \"fifo\"\nround = \"2s\"\nnotice = \"60s\"\n";

/// A worker, with a folder, in which it notes what becomes of it. It ends with 0 once the folder has a file of its job's
/// name.
const WORKER: &str = r#"
note() { echo "$HARMONAIZE_JOB $HARMONAIZE_GENERATION $RANK $WORLD_SIZE $1" >> "$0/notes"; }
trap 'note stopped; exit 0' TERM
note started
until [ -e "$0/$HARMONAIZE_JOB" ]; do sleep 0.1; done
note finished
"#;

/// Fails once, as rank 1. Then it is what its second argument says, with the folder.
const FAILS_ONCE: &str = r#"
if [ "$RANK" = 1 ] && [ ! -e "$0/failed" ]; then echo > "$0/failed"; exit 1; fi
exec "$1" "$0"
"#;

/// What a worker noted.
#[derive(Debug)]
struct Note {
    job: String,
    generation: u64,
    rank: u64,
    workers: u64,
    what: String,
}

impl Note {
    fn of(line: &str) -> Self {
        let words: Vec<&str> = line.split(' ').collect();
        let [job, generation, rank, workers, what] = words[..] else { panic!("{line}") };
        let number = |word: &str| word.parse().unwrap();
        let (generation, rank, workers) = (number(generation), number(rank), number(workers));
        Self { job: job.to_owned(), generation, rank, workers, what: what.to_owned() }
    }
}

struct Scene {
    folder: tempfile::TempDir,
    deployment: Deployment,
}

impl Scene {
    /// A runner on a host.
    fn runner(&self, host: usize, tenant: &str, job: &str, workers: &str) -> Process {
        let command = [workers, "--", "sh", "-c", WORKER].map(OsStr::new);
        self.start(host, tenant, job, &[&command[..], &[self.folder.path().as_os_str()]].concat())
    }

    /// The same of a job that bids for its hosts.
    fn bidder(&self, host: usize, (tenant, job): (&str, &str), workers: &str, bid: &str) -> Process {
        let command = [workers, "--bid", bid, "--", "sh", "-c", WORKER].map(OsStr::new);
        self.start(host, tenant, job, &[&command[..], &[self.folder.path().as_os_str()]].concat())
    }

    /// Changes what tenant A's job `bert` bids.
    fn bid(&self, price: &str) -> Result<String, String> {
        let socket = socket(&self.deployment.hosts()[0], "a");
        let arguments = ["tenant", "bid", "bert", price, "--socket", socket.to_str().unwrap()];
        self.deployment.harmonaize(&arguments).map_err(|error| error.to_string())
    }

    /// The same of an elastic job, whose workers add up.
    fn elastic(&self, host: usize) -> Process {
        let command = ["2..3", "--elastic", "--", env!("CARGO_BIN_EXE_resized")].map(OsStr::new);
        self.start(host, "a", "elastic", &[&command[..], &[self.folder.path().as_os_str()]].concat())
    }

    /// The same of a job of three, of which the worker of rank 1 fails once before it joins.
    fn fails_once(&self, host: usize) -> Process {
        let command = ["3", "--elastic", "--", "sh", "-c", FAILS_ONCE].map(OsStr::new);
        let arguments = [self.folder.path().as_os_str(), OsStr::new(env!("CARGO_BIN_EXE_resized"))];
        self.start(host, "a", "elastic", &[&command[..], &arguments].concat())
    }

    fn start(&self, host: usize, tenant: &str, job: &str, arguments: &[&OsStr]) -> Process {
        let host = &self.deployment.hosts()[host];
        let mut command = Command::new(self.deployment.binaries().path("harmonaize").unwrap());
        command.env("HARMONAIZE_SOCKET", socket(host, tenant));
        command.args(["tenant", "run", "--job", job, "--workers"]).args(arguments);
        let log = host.folder.join(format!("runner-{job}"));
        Process::start(&format!("{job} on {}", host.name), &mut command, &host.namespace, &log).unwrap()
    }

    fn notes(&self) -> Vec<Note> {
        let text = fs::read_to_string(self.folder.path().join("notes")).unwrap_or_default();
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        whole.lines().map(Note::of).collect()
    }

    /// What `harmonaize` prints as JSON.
    fn json(&self, arguments: &[&str]) -> Value {
        let text = self.deployment.harmonaize(&[arguments, &["-o", "json"]].concat()).unwrap();
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{arguments:?}: {error}: {text}"))
    }

    /// A job as operators see it.
    fn job(&self, name: &str) -> Option<Value> {
        let reply = self.json(&["jobs"]);
        reply["jobs"].as_array().unwrap().iter().find(|job| job["job"] == name).cloned()
    }

    /// Asks again until there is an answer.
    fn until<T>(&mut self, what: &str, ask: impl Fn(&Self) -> Option<T>) -> T {
        let deadline = Instant::now() + PATIENCE;
        loop {
            self.deployment.check().unwrap();
            if let Some(answer) = ask(self) {
                return answer;
            }
            assert!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}; {}", self.told());
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// What there is to see, for an error.
    fn told(&self) -> String {
        let mut text = format!("{:#}\n{:#?}\n", self.json(&["jobs"]), self.notes());
        for host in self.deployment.hosts() {
            for entry in fs::read_dir(&host.folder).unwrap().flatten() {
                if entry.file_name().to_string_lossy().starts_with("runner-") {
                    let log = fs::read(entry.path()).unwrap_or_default();
                    text += &format!("{}:\n{}\n", entry.path().display(), String::from_utf8_lossy(&log));
                }
            }
        }
        text
    }

    /// Waits until a job runs with so many workers, by themselves and by control; its generation.
    fn runs_with(&mut self, job: &str, workers: u64) -> u64 {
        self.until(&format!("{job} runs with {workers}"), |this| {
            let notes = this.notes();
            let own: Vec<&Note> = notes.iter().filter(|note| note.job == job).collect();
            let generation = own.iter().map(|note| note.generation).max()?;
            let latest: Vec<&Note> = own.into_iter().filter(|note| note.generation == generation).collect();
            let mut ranks: Vec<u64> = latest.iter().map(|note| note.rank).collect();
            ranks.sort_unstable();
            let all_run = latest.iter().all(|note| note.what == "started" && note.workers == workers);
            let status = this.job(job)?;
            let agrees = status["phase"] == "running"
                && status["generation"].as_u64() == Some(generation)
                && status["hosts"].as_array()?.len() as u64 == workers;
            (all_run && agrees && ranks.into_iter().eq(0..workers)).then_some(generation)
        })
    }

    /// Waits until workers of a generation of the elastic job have added up; their processes, by rank.
    fn added_up(&mut self, generation: u64, workers: u64) -> Vec<String> {
        self.until(&format!("{workers} workers of generation {generation}"), |this| {
            let mut notes = this.notes();
            notes.retain(|note| (note.generation, note.workers) == (generation, workers));
            notes.sort_by_key(|note| note.rank);
            let all = notes.iter().map(|note| note.rank).eq(0..workers);
            all.then(|| notes.into_iter().map(|note| note.what).collect())
        })
    }

    /// Workers of a generation that noted this.
    fn count(&self, job: &str, generation: u64, what: &str) -> usize {
        let is = |note: &&Note| note.job == job && note.generation == generation && note.what == what;
        self.notes().iter().filter(is).count()
    }

    /// Lets the workers of a job end by themselves, and its runners with them.
    fn finish(&self, job: &str, runners: &mut [Process]) {
        fs::write(self.folder.path().join(job), "").unwrap();
        let deadline = Instant::now() + PATIENCE;
        runners.iter_mut().for_each(|runner| runner.succeed_by(deadline).unwrap());
    }
}

/// Whether a process has this in its arguments.
fn runs(argument: &Path) -> bool {
    let argument = argument.as_os_str().as_encoded_bytes();
    let mut lines = fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| {
        entry.file_name().to_str()?.parse::<u32>().ok()?;
        fs::read(entry.path().join("cmdline")).ok()
    });
    lines.any(|line| line.split(|byte| *byte == 0).any(|one| one == argument))
}

#[test]
fn jobs_share_hosts_and_end() {
    let allocates = |setup: &mut Setup| setup.control += ALLOCATOR;
    let Some(deployment) = deploy(&star(3, "1Gbit/s"), allocates) else { return };
    let mut scene = Scene { folder: tempfile::tempdir().unwrap(), deployment };
    let mut bert: Vec<Process> = (0..3).map(|host| scene.runner(host, "a", "bert", "1..3")).collect();
    scene.runs_with("bert", 3);
    let why = scene.json(&["why", "a/bert"]);
    assert_eq!((why["tenant"].as_str(), why["reason"].as_str()), (Some("a"), Some("most")), "{why}");
    assert_eq!(scene.json(&["queue"])["jobs"], Value::Array(Vec::new()));

    // One that lacks runners waits, and goes when its runner is asked to.
    let mut late = scene.runner(2, "b", "late", "3");
    scene.until("a job waits", |this| {
        let queue = this.json(&["queue"]);
        (queue["jobs"][0]["job"] == "late" && queue["jobs"][0]["reason"] == "too_few_runners").then_some(())
    });
    assert!(scene.deployment.harmonaize(&["why", "late"]).unwrap().contains("too_few_runners"));
    late.signal(Signal::INT).unwrap();
    let status = late.wait_until(Instant::now() + PATIENCE).unwrap();
    assert!(status.is_some_and(|status| status.code().is_some_and(|code| code != 0)), "{status:?}");
    scene.until("a job without runners is gone", |this| this.job("late").is_none().then_some(()));

    // Another job takes what the first has to spare: all its workers are asked to end, and those that go on start anew.
    let alone = scene.runs_with("bert", 3);
    let asked = ["what-if", "--job", "b/gpt", "--workers", "2", "--host", "h0,h1"];
    let answer = scene.json(&asked);
    let of = |job: &str, field: &str| {
        let found = answer["jobs"].as_array().unwrap().iter().find(|one| one["job"] == job);
        found.unwrap_or_else(|| panic!("{job}: {answer:#}"))[field].clone()
    };
    let changes = [of("bert", "change"), of("gpt", "change")];
    assert_eq!(changes, ["shrinks", "starts"], "{answer:#}");
    assert_eq!(of("gpt", "hosts"), Value::from(vec!["h0", "h1"]), "{answer:#}");
    assert!(scene.job("gpt").is_none(), "nothing comes by asking");
    let refused = scene.deployment.harmonaize(&["what-if", "--without", "h9"]).unwrap_err().to_string();
    assert!(refused.contains("no host `h9`"), "{refused}");
    let mut gpt = [0, 1].map(|host| scene.runner(host, "b", "gpt", "2"));
    scene.runs_with("gpt", 2);
    assert!(scene.runs_with("bert", 1) > alone);
    assert_eq!(scene.count("bert", alone, "stopped"), 3, "{}", scene.told());
    assert_eq!(scene.json(&["why", "bert"])["reason"], "least");
    scene.finish("gpt", &mut gpt);
    scene.runs_with("bert", 3);

    // A runner dies, and its worker with it.
    let mut dead = bert.remove(0);
    dead.signal(Signal::KILL).unwrap();
    assert!(dead.wait_until(Instant::now() + PATIENCE).unwrap().is_some());
    let last = scene.runs_with("bert", 2);
    scene.finish("bert", &mut bert);
    let finished = scene.notes().into_iter().filter(|note| note.job == "bert" && note.what == "finished");
    assert_eq!(finished.map(|note| note.generation).collect::<Vec<_>>(), [last; 2], "{}", scene.told());
    scene.until("no job is left", |this| {
        (this.json(&["jobs"])["jobs"] == Value::Array(Vec::new())).then_some(())
    });
    scene.until("no process is left", |this| (!runs(this.folder.path())).then_some(()));
}

#[test]
fn whoever_bids_more_has_the_hosts() {
    const MARKET: &str = "[[allocator.kind]]\nname = \"\"\nhire = 0.5\n";
    let allocates = |setup: &mut Setup| {
        setup.control += &ALLOCATOR.replace("fifo", "market");
        setup.control += MARKET;
    };
    let Some(deployment) = deploy(&star(3, "1Gbit/s"), allocates) else { return };
    let mut scene = Scene { folder: tempfile::tempdir().unwrap(), deployment };
    let mut bert: Vec<Process> = (0..3).map(|host| scene.bidder(host, ("a", "bert"), "2", "0.60")).collect();
    scene.runs_with("bert", 2);
    let mut gpt: Vec<Process> = (0..3).map(|host| scene.bidder(host, ("b", "gpt"), "3", "0.70")).collect();
    scene.runs_with("gpt", 3);
    scene.until("bert is outbid", |this| {
        let why = this.json(&["why", "a/bert"]);
        (why["reason"] == "outbid" && why["price_millionths"] == 600_000).then_some(())
    });
    let queue = scene.deployment.harmonaize(&["queue"]).unwrap();
    assert!(queue.contains("0.60") && queue.contains("at least 0.50"), "{queue}");

    // What makes no sense changes nothing, and a higher bid wins.
    for wrong in ["nan", "much", "1e9"] {
        let refused = scene.bid(wrong).unwrap_err();
        assert!(refused.contains("a price is a number"), "{refused}");
    }
    assert_eq!(scene.job("bert").unwrap()["bid"]["least_millionths"], 600_000);
    assert_eq!(scene.bid("0.80").unwrap(), "bert: bids 0.80 an hour of a worker\n");
    scene.runs_with("bert", 2);
    assert_eq!(scene.job("bert").unwrap()["price_millionths"], 500_000);
    let log = fs::read_to_string(scene.deployment.hosts()[0].folder.join("runner-bert")).unwrap();
    assert!(log.contains("the price is 0.50 an hour of a worker"), "{log}");
    scene.finish("bert", &mut bert);
    scene.runs_with("gpt", 3);
    scene.finish("gpt", &mut gpt);
}

#[test]
fn workers_of_an_elastic_job_run_on_as_it_grows() {
    let allocates = |setup: &mut Setup| setup.control += ALLOCATOR;
    let Some(deployment) = deploy(&star(3, "1Gbit/s"), allocates) else { return };
    let mut scene = Scene { folder: tempfile::tempdir().unwrap(), deployment };
    let mut runners: Vec<Process> = [0, 1].map(|host| scene.elastic(host)).into();
    let first = scene.added_up(1, 2);
    runners.push(scene.elastic(2));
    let second = scene.added_up(2, 3);
    assert_eq!(second[..2], first, "{}", scene.told());
    assert!(!first.contains(&second[2]), "{}", scene.told());
    let job = scene.job("elastic").unwrap();
    assert_eq!((job["phase"].as_str(), job["generation"].as_u64()), (Some("running"), Some(2)), "{job}");
    assert_eq!(job["elastic"].as_bool(), Some(true), "{job}");
    scene.finish("elastic", &mut runners);
}

#[test]
fn workers_of_an_elastic_job_run_on_as_one_is_killed() {
    let allocates = |setup: &mut Setup| setup.control += ALLOCATOR;
    let Some(deployment) = deploy(&star(3, "1Gbit/s"), allocates) else { return };
    let mut scene = Scene { folder: tempfile::tempdir().unwrap(), deployment };
    let mut runners: Vec<Process> = (0..3).map(|host| scene.elastic(host)).collect();
    let generation = scene.until("three workers", |this| {
        this.notes().iter().filter(|note| note.workers == 3).map(|note| note.generation).max()
    });
    let first = scene.added_up(generation, 3);
    let killed = Pid::from_raw(first[1].parse().unwrap()).unwrap();
    kill_process(killed, Signal::KILL).unwrap();
    let second = scene.added_up(generation + 1, 3);
    assert_eq!([&second[0], &second[1]], [&first[0], &first[2]], "{}", scene.told());
    assert!(!first.contains(&second[2]), "{}", scene.told());
    let job = scene.job("elastic").unwrap();
    assert_eq!((job["phase"].as_str(), job["failures"].as_u64()), (Some("running"), Some(1)), "{job}");
    scene.finish("elastic", &mut runners);
}

#[test]
fn elastic_workers_form_though_one_fails_early() {
    let allocates = |setup: &mut Setup| setup.control += ALLOCATOR;
    let Some(deployment) = deploy(&star(3, "1Gbit/s"), allocates) else { return };
    let mut scene = Scene { folder: tempfile::tempdir().unwrap(), deployment };
    let mut runners: Vec<Process> = (0..3).map(|host| scene.fails_once(host)).collect();
    let generation = scene.until("three workers", |this| {
        this.notes().iter().filter(|note| note.workers == 3).map(|note| note.generation).max()
    });
    scene.added_up(generation, 3);
    assert!(generation > 1 && scene.folder.path().join("failed").exists(), "{}", scene.told());
    // Nobody waited until a join timed out: that would be another failure.
    let job = scene.job("elastic").unwrap();
    assert_eq!((job["phase"].as_str(), job["failures"].as_u64()), (Some("running"), Some(1)), "{job}");
    scene.finish("elastic", &mut runners);
}
