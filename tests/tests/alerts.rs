//! Each alert's condition on an emulated fabric, and that the shipped rule fires by what the programs then show.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use anyhow::{Result, ensure};
use harmonaize_client::{Constraints, Negotiated};
use harmonaize_identity::Use;
use harmonaize_testkit::cross_traffic::CrossTraffic;
use harmonaize_testkit::deployment::{Deployment, Setup};
use harmonaize_testkit::namespace::Namespace;
use harmonaize_testkit::plans;
use harmonaize_testkit::{clock, etcd, packages, strict, workspace};
use harmonaize_tests::job::{at_all, deploy, joined, sockets};
use harmonaize_tests::load::{noticed_soon, train, under_load_of};
use harmonaize_tests::scrape::{PORTS, scrape};
use harmonaize_tests::{racks_with_unmanaged_hosts, star};
use rustix::net::sockopt::set_tcp_congestion;
use rustix::process::{Pid, Resource, Rlimit, Signal, prlimit};
use serde_json::json;
use std::collections::BTreeMap;
use std::io::Write;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long anything may take: a bound for machines that are busy with other things, and no figure.
const PATIENCE: Duration = Duration::from_secs(120);

/// A program: its name as the label `instance` has it, its namespace, and the port of its page.
type Instance = (String, Namespace, u16);
type Labels = BTreeMap<String, String>;

/// A series as Prometheus has it, with its instance among the labels.
#[derive(Debug)]
struct Sample {
    metric: String,
    labels: Labels,
    value: f64,
}

/// What all instances that answer showed at a time, in seconds since 1970.
#[derive(Debug)]
struct Scrape {
    at: f64,
    samples: Vec<Sample>,
}

impl Scrape {
    fn new(instances: &[Instance]) -> Self {
        let at = clock::realtime_ns().unwrap() as f64 / 1e9;
        let page = |(name, namespace, port): &Instance| Some((name.clone(), scrape(namespace, *port).ok()?));
        let pages = instances.iter().filter_map(page);
        Self { at, samples: pages.flat_map(|(instance, page)| samples(&instance, &page)).collect() }
    }

    /// The labels of each series of a metric that has this value.
    fn with(&self, metric: &str, value: f64) -> Vec<Labels> {
        let fits = self.samples.iter().filter(|sample| sample.metric == metric && sample.value == value);
        fits.map(|sample| sample.labels.clone()).collect()
    }
}

fn samples(instance: &str, page: &str) -> Vec<Sample> {
    let sample = |line: &str| {
        let (series, value) = line.rsplit_once(' ').unwrap();
        let (metric, own) = series.split_once('{').unwrap_or((series, ""));
        let own = own.strip_suffix("\"}").unwrap_or(own).split("\",");
        let own = own.filter_map(|label| label.split_once("=\""));
        let labels =
            own.chain([("instance", instance)]).map(|(name, value)| (name.to_owned(), value.to_owned()));
        Sample { metric: metric.to_owned(), labels: labels.collect(), value: value.parse().unwrap() }
    };
    page.lines().filter(|line| !line.starts_with('#')).map(sample).collect()
}

fn labels<const N: usize>(labels: [(&str, &str); N]) -> Labels {
    labels.map(|(name, value)| (name.to_owned(), value.to_owned())).into()
}

fn control(deployment: &Deployment) -> Instance {
    ("control".to_owned(), deployment.fabric().control(), PORTS[0])
}

fn agents(deployment: &Deployment) -> Vec<Instance> {
    deployment.hosts().iter().map(|host| (host.name.clone(), host.namespace.clone(), PORTS[1])).collect()
}

/// Scrapes until the condition shows.
fn until(instances: &[Instance], shows: impl Fn(&Scrape) -> bool) -> Result<Scrape> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let scrape = Scrape::new(instances);
        if shows(&scrape) {
            return Ok(scrape);
        }
        ensure!(Instant::now() < deadline, "not within {PATIENCE:?}; the last page is {scrape:#?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Minutes for which promtool is given the scrape from before the condition, once a minute.
const BEFORE: u32 = 10;
/// And the scrape from after it came.
const AFTER: u32 = 11;

/// The shipped rule of an alert stays quiet by the scrape from before. By the one from after, as it lasts, the alert fires for
/// exactly these labels, once its time is over.
fn fires(alert: &str, before: &Scrape, after: &Scrape, expected: &[Labels]) {
    let Some(promtool) = packages::promtool() else {
        return strict::skip_test("promtool is missing: cargo xtask test unpacks it");
    };
    assert!(!expected.is_empty());
    let rules = workspace::root().join("xtask/package/monitoring/harmonaize.rules.yml");
    let rules = std::fs::read_to_string(rules).unwrap();
    let head = format!("{alert}\n");
    let rule = rules.split("- alert: ").find_map(|rule| rule.strip_prefix(&head)).expect("such an alert");
    let field = |name: &str| rule.lines().find_map(|line| line.trim().strip_prefix(name));
    let lasts = field("for: ").map_or(0, |text| text.strip_suffix('m').unwrap().parse::<u32>().unwrap());
    let expression = field("expr: ").unwrap();

    let mut series: BTreeMap<String, [Option<f64>; 2]> = BTreeMap::new();
    for (which, scrape) in [before, after].into_iter().enumerate() {
        for sample in scrape.samples.iter().filter(|sample| expression.contains(&sample.metric)) {
            let own = sample.labels.iter().map(|(name, value)| format!("{name}=\"{value}\""));
            let name = format!("{}{{{}}}", sample.metric, own.collect::<Vec<_>>().join(","));
            // By promtool's clock, in which the second scrape follows the first by a minute, and 1970 begins with the test.
            let at = f64::from(60 * (BEFORE - 1 + which as u32));
            let shift = if sample.metric.ends_with("_timestamp_seconds") { at - scrape.at } else { 0.0 };
            series.entry(name).or_default()[which] = Some(sample.value + shift);
        }
    }
    let values = |value: Option<f64>, count: u32| match value {
        Some(value) => format!("{value}x{}", count - 1),
        None => format!("_x{count}"),
    };
    let values = |[before, after]: [Option<f64>; 2]| values(before, BEFORE) + " " + &values(after, AFTER);
    let series: Vec<_> =
        series.into_iter().map(|(name, each)| json!({"series": name, "values": values(each)})).collect();
    let alert_of = |mut labels: Labels| {
        labels.insert("severity".to_owned(), field("severity: ").unwrap().to_owned());
        json!({"exp_labels": labels})
    };
    let alerts: Vec<_> = expected.iter().cloned().map(alert_of).collect();
    let test = json!({
        "rule_files": ["rules.yml"],
        "evaluation_interval": "1m",
        "tests": [{
            "interval": "1m",
            "input_series": series,
            "alert_rule_test": [
                {"eval_time": format!("{}m", BEFORE - 1), "alertname": alert, "exp_alerts": []},
                {"eval_time": format!("{}m", BEFORE + lasts), "alertname": alert, "exp_alerts": alerts},
            ],
        }],
    });
    // Summaries are in promtool's own test of the rules.
    let texts = ["annotations:", "summary:"];
    let bare = rules.lines().filter(|line| !texts.iter().any(|text| line.trim().starts_with(text)));
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("rules.yml"), bare.collect::<Vec<_>>().join("\n")).unwrap();
    // JSON is YAML.
    std::fs::write(folder.path().join("test.yml"), format!("{test:#}")).unwrap();
    let output =
        Command::new(promtool).args(["test", "rules", "test.yml"]).current_dir(&folder).output().unwrap();
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success(), "{alert}: {text}\n{test:#}");
}

/// A small disk of its own, until this is dropped.
struct Disk(tempfile::TempDir);

impl Disk {
    fn mount() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=16m,mode=700", "alerts"]).arg(folder.path());
        workspace::run(&mut mount).unwrap();
        Self(folder)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn fill(&self) {
        let mut filler = std::fs::File::create(self.file("filler")).unwrap();
        while filler.write_all(&[0; 4096]).is_ok() {}
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if let Err(error) = workspace::run(Command::new("umount").arg("-l").arg(self.0.path())) {
            eprintln!("warning: a disk stays: {error:#}");
        }
    }
}

#[test]
fn an_agent_a_certificate_and_the_disk_come_to_their_ends() {
    // Control has its store there until it has ended.
    let mut disk = None;
    let stored = |setup: &mut Setup| {
        let disk = disk.insert(Disk::mount());
        setup.control += &format!("store = {:?}\n", disk.file("control.redb"));
    };
    let Some(mut deployment) = deploy(&star(2, "1Gbit/s"), stored) else { return };
    let [first, second] = [0, 1].map(|host| deployment.hosts()[host].name.clone());
    let instances = [agents(&deployment), vec![control(&deployment)]].concat();
    let before = Scrape::new(&instances);

    deployment.agent(1).unwrap().end().unwrap();
    let lost = labels([("host", second.as_str()), ("instance", "control")]);
    let after =
        until(&instances, |scrape| scrape.with("harmonaize_control_agent_connected", 0.0).contains(&lost));
    fires("HarmonaizeAgentLost", &before, &after.unwrap(), &[lost]);

    // Behind those of an operator and of control.
    let folder = deployment.identities()[2].clone();
    let issued = deployment.authority().issue_for(&first, Use::Session, Duration::from_secs(3600)).unwrap();
    issued.write(&folder).unwrap();
    let after = Scrape::new(&instances);
    fires("HarmonaizeCertificateExpires", &before, &after, &[labels([("instance", first.as_str())])]);

    disk.as_ref().unwrap().fill();
    // Files go on in the room that they have. Large records need more sooner.
    let users = (0..64_u32).flat_map(|user| ["--uid".to_owned(), (4_000_000_000 + user).to_string()]);
    let users: Vec<String> = users.collect();
    let deadline = Instant::now() + PATIENCE;
    for number in 0.. {
        let name = format!("{number:063}");
        let line: Vec<&str> =
            ["tenants", "add", &name].into_iter().chain(users.iter().map(String::as_str)).collect();
        if let Err(error) = deployment.harmonaize(&line) {
            println!("tenant {number}: {error:#}");
            break;
        }
        assert!(Instant::now() < deadline, "{number} tenants are stored on a full disk");
    }
    let after = Scrape::new(&instances);
    fires("HarmonaizeStoreFailing", &before, &after, &[labels([("instance", "control")])]);
}

/// Bytes that control may still map: less than the 2 MiB of another thread's stack.
const HEADROOM: u64 = 1 << 20;

#[test]
fn control_panics_where_the_machine_gives_it_no_thread() {
    let Some(mut deployment) = deploy(&star(2, "1Gbit/s"), |_| ()) else { return };
    let instances = [agents(&deployment), vec![control(&deployment)]].concat();
    let before = Scrape::new(&instances);
    let id = deployment.control().unwrap().id();
    let status = std::fs::read_to_string(format!("/proc/{id}/status")).unwrap();
    let mapped = status.lines().find_map(|line| line.strip_prefix("VmSize:")?.trim().strip_suffix(" kB"));
    let most = (mapped.unwrap().parse::<u64>().unwrap() << 10) + HEADROOM;

    // Dry runs are planned on a thread of their own. Control has had none yet, and tokio panics where it cannot have the first.
    let pid = Pid::from_raw(id.try_into().unwrap());
    let limited = Rlimit { current: Some(most), maximum: None };
    let usual = prlimit(pid, Resource::As, limited).unwrap();
    let refused = deployment.harmonaize(&["plan", "--dry-run"]);
    prlimit(pid, Resource::As, usual).unwrap();
    assert!(refused.is_err(), "control has planned without a thread: {refused:?}");

    let panicked = labels([("work", "other"), ("instance", "control")]);
    let metric = "harmonaize_control_panics_total";
    let after = until(&instances, |scrape| scrape.with(metric, 1.0) == [panicked.clone()]);
    fires("HarmonaizePanic", &before, &after.unwrap(), &[panicked]);
    // That one request was all it cost.
    deployment.harmonaize(&["plan", "--dry-run"]).unwrap();
    deployment.check().unwrap();
}

#[test]
fn control_fails_over_and_then_nobody_leads() {
    if !etcd::is_installed() {
        return;
    }
    let adjust = |setup: &mut Setup| {
        noticed_soon(setup);
        (setup.unmanaged_hosts, setup.replicated) = (3, true);
    };
    let Some(mut deployment) = deploy(&star(4, "1Gbit/s"), adjust) else { return };
    let hosts: Vec<_> = deployment.replicas().iter().map(|replica| replica.host.clone()).collect();
    let instances: Vec<Instance> =
        hosts.iter().map(|host| (host.name.clone(), host.namespace.clone(), PORTS[0])).collect();
    let metric = "harmonaize_control_leader";
    let leads = |scrape: &Scrape| scrape.with(metric, 1.0).len() == 1;
    let follow = |scrape: &Scrape, count: usize| scrape.with(metric, 0.0).len() == count;

    let before = until(&instances, |scrape| leads(scrape) && follow(scrape, 2)).unwrap();
    let leader = before.with(metric, 1.0).remove(0);
    let position = hosts.iter().position(|host| leader["instance"] == host.name).unwrap();
    deployment.replicas()[position].control.signal(Signal::KILL).unwrap();
    let another = until(&instances, |scrape| leads(scrape) && follow(scrape, 1)).unwrap();
    fires("HarmonaizeControlFailover", &before, &another, &another.with(metric, 1.0));

    for replica in &mut deployment.replicas()[..2] {
        replica.etcd.signal(Signal::KILL).unwrap();
    }
    let nobody = until(&instances, |scrape| follow(scrape, 2)).unwrap();
    fires("HarmonaizeNoLeader", &another, &nobody, &[Labels::new()]);
}

#[test]
fn late_ranks_broken_promises_and_full_queues_fire() {
    let Some(deployment) = deploy(&star(3, "1Gbit/s"), |setup| setup.measure("1Gbit/s")) else { return };
    let instances = [agents(&deployment), vec![control(&deployment)]].concat();
    let idle = Scrape::new(&instances);
    let [first, second, third] = deployment.hosts() else { panic!("three hosts") };

    let workers = joined(&sockets(&deployment, "a"), "job");
    let (slow, over) = (AtomicBool::new(false), AtomicBool::new(false));
    let late = labels([("host", third.name.as_str()), ("cause", "compute"), ("instance", "control")]);
    let after = std::thread::scope(|scope| {
        for worker in &workers {
            scope.spawn(|| train(worker, &slow, &over));
        }
        // What is usual comes first.
        std::thread::sleep(Duration::from_secs(1));
        slow.store(true, Ordering::Relaxed);
        let named = |scrape: &Scrape| scrape.with("harmonaize_control_stragglers", 1.0) == [late.clone()];
        let after = until(&instances, named);
        over.store(true, Ordering::Relaxed);
        after
    });
    fires("HarmonaizeStraggler", &idle, &after.unwrap(), &[late]);

    let workers = joined(&sockets(&deployment, "b"), "job");
    let promise = Constraints::new().min_busbw(20_000_000);
    let outcome = workers[0].client.propose("job", &promise).unwrap();
    assert!(matches!(outcome, Negotiated::Agreed(_)), "{outcome:?}");
    let kept = Scrape::new(&instances);
    // An eighth of what is promised.
    deployment.fabric().set_rate(&second.name, Some(20_000_000)).unwrap();
    // Of a size that tells a bandwidth.
    at_all(&workers, |worker| {
        (0..4).for_each(|salt| worker.sum(salt, 1 << 17, true, PATIENCE).unwrap());
    });
    let broken = labels([("tenant", "b"), ("state", "broken"), ("instance", "control")]);
    let after =
        until(&instances, |scrape| scrape.with("harmonaize_control_agreements", 1.0).contains(&broken));
    fires("HarmonaizeAgreementBroken", &kept, &after.unwrap(), &[broken]);

    // Others fill the queue before the narrow link.
    let address = second.addresses[0];
    let listener = second.namespace.enter(|| TcpListener::bind((address, 0))).unwrap().unwrap();
    let target = listener.local_addr().unwrap();
    let sender = first.namespace.enter(|| TcpStream::connect(target)).unwrap().unwrap();
    // Whatever the machine's usual is, which may leave queues empty.
    set_tcp_congestion(&sender, "reno").unwrap();
    let (receiver, _) = listener.accept().unwrap();
    let metric = "harmonaize_link_congestion_level";
    let leaves = |labels: &Labels| labels["instance"] == first.name && labels["direction"] == "egress";
    let after = std::thread::scope(|scope| {
        scope.spawn(|| std::io::copy(&mut &receiver, &mut std::io::sink()));
        scope.spawn(|| while (&sender).write_all(&[0x5a; 1 << 16]).is_ok() {});
        let after = until(&instances, |scrape| scrape.with(metric, 2.0).iter().any(leaves));
        for end in [&sender, &receiver] {
            end.shutdown(Shutdown::Both).unwrap();
        }
        after
    });
    let after = after.unwrap();
    fires("HarmonaizeInterfaceCongested", &idle, &after, &after.with(metric, 2.0));
}

#[test]
fn links_that_are_cut_and_congested_are_found() {
    const RATE: &str = "100Mbit/s";
    let measured = |setup: &mut Setup| {
        setup.unmanaged_hosts = 2;
        setup.measure(RATE);
    };
    let Some(deployment) = deploy(&racks_with_unmanaged_hosts(2, 2, 2, RATE), measured) else { return };
    let instances = [control(&deployment)];
    let before = Scrape::new(&instances);
    let impaired = |scrape: &Scrape, state: &str| {
        let all = scrape.with("harmonaize_control_link_impaired", 1.0).into_iter();
        all.filter(|labels| labels["state"] == state).collect::<Vec<_>>()
    };
    let at = |labels: &Labels, node: &str| labels["from"] == node || labels["to"] == node;
    under_load_of(&sockets(&deployment, "a"), 250_000, |_| {
        let spine = plans::crossed_spine(&deployment, PATIENCE).unwrap();
        let cut = Instant::now();
        deployment.fabric().set_switch(&spine, false).unwrap();
        let failed =
            until(&instances, |scrape| impaired(scrape, "failed").iter().any(|labels| at(labels, &spine)));
        let failed = failed.unwrap();
        eprintln!("links of a spine that is cut are found after {:.1} s", cut.elapsed().as_secs_f64());
        fires("HarmonaizeLinkFailed", &before, &failed, &impaired(&failed, "failed"));

        // All that crosses from rack to rack has the other spine now, of which cross traffic takes half.
        let other = if spine == "spine0" { "spine1" } else { "spine0" };
        let flow = CrossTraffic::start(deployment.fabric(), "f0", "f1", other, 50_000_000).unwrap();
        let congested =
            until(&instances, |scrape| impaired(scrape, "congested").iter().any(|labels| at(labels, other)));
        flow.stop().unwrap();
        let congested = congested.unwrap();
        eprintln!("those of the other, which is congested, by {:.1} s", cut.elapsed().as_secs_f64());
        fires("HarmonaizeLinkCongested", &before, &congested, &impaired(&congested, "congested"));
    });
}
