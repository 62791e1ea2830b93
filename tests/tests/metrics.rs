//! Metrics of all three programs on a fabric, and the rules and dashboards that are shipped. The metrics that these ask
//! for are there.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_testkit::process::Process;
use harmonaize_testkit::{packages, strict, workspace};
use harmonaize_tests::job::{at_all, deploy, joined, sockets};
use harmonaize_tests::scrape::{PORTS, scrape};
use harmonaize_tests::star_with_aggregator;
use rustix::process::Signal;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long anything may take: a bound for machines that are busy with other things, and no figure.
const PATIENCE: Duration = Duration::from_secs(60);

fn shipped() -> PathBuf {
    workspace::root().join("xtask/package/monitoring")
}

#[test]
fn rules_pass_promtool_and_each_alert_fires() {
    let Some(promtool) = packages::promtool() else {
        return strict::skip_test("promtool is missing: cargo xtask test unpacks it");
    };
    for arguments in [["check", "rules", "harmonaize.rules.yml"], ["test", "rules", "harmonaize.test.yml"]] {
        let output = Command::new(&promtool).args(arguments).current_dir(shipped()).output().unwrap();
        let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert!(output.status.success(), "{text}");
    }
    // Each alert has a test that expects it, one where it must not fire, one that makes its condition, and an entry of the runbook.
    let read = |name: &str| std::fs::read_to_string(shipped().join(name)).unwrap();
    let (rules, tests) = (read("harmonaize.rules.yml"), read("harmonaize.test.yml"));
    let [runbook, conditions] = ["docs/operators.md", "tests/tests/alerts.rs"]
        .map(|path| std::fs::read_to_string(workspace::root().join(path)).unwrap());
    let alerts: Vec<&str> = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    assert!(alerts.len() > 6, "{alerts:?}");
    for alert in alerts {
        assert!(tests.contains(&format!("  - name: {alert}\n")), "no test of {alert}");
        let quiet = format!("  - name: {alert} stays quiet\n");
        assert!(tests.contains(&quiet), "no test of what {alert} must not fire at");
        let made = format!("fires(\"{alert}\", ");
        assert!(conditions.contains(&made), "no test that makes the condition of {alert}");
        assert!(runbook.contains(&format!("`{alert}`")), "no entry of {alert} in docs/operators.md");
    }
    // So has each recorded series.
    let recorded: Vec<&str> =
        rules.lines().filter_map(|line| line.trim().strip_prefix("- record: ")).collect();
    assert!(recorded.len() > 4, "{recorded:?}");
    for series in recorded {
        assert!(tests.contains(&format!("      - expr: '{series}'\n")), "no test of {series}");
    }
}

/// What a scrape has: the labels of each metric, `le` included.
type Scrape = BTreeMap<String, BTreeSet<String>>;

/// Debian's own, which has Debian's packages; another may come before it on the path.
const PYTHON: &str = "/usr/bin/python3";

/// The reference parser of OpenMetrics takes it.
fn parsed(text: &str) {
    let program = "import sys\nfrom prometheus_client.openmetrics.parser import text_string_to_metric_families as f\n\
                   assert len(list(f(sys.stdin.read()))) > 5";
    let probe = Command::new(PYTHON).args(["-c", "import prometheus_client"]).output();
    if !probe.is_ok_and(|output| output.status.success()) {
        return strict::skip_test("python3-prometheus-client is missing");
    }
    let mut python = Command::new(PYTHON)
        .args(["-c", program])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    python.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = python.wait_with_output().unwrap();
    assert!(output.status.success(), "{}\n{text}", String::from_utf8_lossy(&output.stderr));
}

fn take(text: &str, metrics: &mut Scrape) {
    for line in text.lines() {
        if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|line| line.split_once(' ')) {
            let endings: &[&str] = match kind {
                "counter" => &["_total"],
                "histogram" => &["_bucket", "_sum", "_count"],
                _ => &[""],
            };
            for ending in endings {
                metrics.entry(format!("{name}{ending}")).or_default();
            }
        } else if let Some((name, rest)) = line.split_once('{') {
            let labels = rest.split("\",").filter_map(|label| Some(label.split_once('=')?.0.to_owned()));
            metrics.get_mut(name).unwrap_or_else(|| panic!("{name} has no type")).extend(labels);
        }
    }
}

/// The metrics of a query, each with the labels that its selector names.
fn metrics_in(query: &str) -> Vec<(String, Vec<String>)> {
    let mut found = Vec::new();
    let mut rest = query;
    while let Some(at) = rest.find("harmonaize_") {
        rest = &rest[at..];
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
        let (name, behind) = rest.split_at(end);
        let selector = behind.strip_prefix('{').and_then(|selector| selector.split_once('}'));
        let labels = selector.map_or("", |(labels, _)| labels).split(',');
        let labels = labels.filter_map(|label| Some(label.split_once(['=', '!'])?.0.trim().to_owned()));
        found.push((name.to_owned(), labels.collect()));
        rest = behind;
    }
    found
}

/// The labels that a query groups or joins by.
fn grouped(query: &str) -> Vec<String> {
    let lists = ["by (", "on ("].into_iter().flat_map(|word| query.split(word).skip(1));
    let labels = lists.filter_map(|list| Some(list.split_once(')')?.0));
    labels.flat_map(|labels| labels.split(',').map(|label| label.trim().to_owned())).collect()
}

fn queries() -> Vec<(String, String)> {
    let mut queries = Vec::new();
    for entry in std::fs::read_dir(shipped()).unwrap() {
        let path = entry.unwrap().path();
        let (name, text) = (path.display().to_string(), std::fs::read_to_string(&path).unwrap());
        if name.ends_with(".json") {
            let board: serde_json::Value = serde_json::from_str(&text).unwrap();
            let panels = board["panels"].as_array().unwrap();
            assert!(panels.len() > 6, "{name}");
            let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().unwrap());
            queries.extend(targets.map(|target| (name.clone(), target["expr"].as_str().unwrap().to_owned())));
            let variables = board["templating"]["list"].as_array().unwrap();
            queries.extend(
                variables.iter().map(|one| (name.clone(), one["query"].as_str().unwrap().to_owned())),
            );
        } else if name.ends_with("rules.yml") {
            let expressions = text.lines().filter_map(|line| line.trim().strip_prefix("expr: "));
            queries.extend(expressions.map(|query| (name.clone(), query.to_owned())));
        }
    }
    queries
}

/// An aggregator reads its configuration again, in the session that it has.
fn reloaded(aggregator: &mut Process, deadline: Instant) {
    aggregator.signal(Signal::HUP).unwrap();
    loop {
        let log = aggregator.log_tail(1 << 16);
        assert_eq!(log.matches("session with control is open").count(), 1, "{log}");
        if log.contains("the configuration was read again") {
            return;
        }
        assert!(aggregator.status().unwrap().is_none() && Instant::now() < deadline, "{log}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn every_query_finds_its_metrics_in_a_scrape() {
    let topology = star_with_aggregator(3, 1000, "0us");
    let Some(mut deployment) = deploy(&topology, |setup| setup.measure("1Gbit/s")) else { return };
    let workers = joined(&sockets(&deployment, "a"), "job");
    at_all(&workers, |worker| {
        (0..20).for_each(|salt| worker.sum(salt, 5000, false, PATIENCE).unwrap());
    });
    let hosts: Vec<_> = deployment.hosts().iter().map(|host| host.namespace.clone()).collect();
    let aggregator = deployment.fabric().aggregators()[0].namespace.clone();
    let deadline = Instant::now() + PATIENCE;
    reloaded(deployment.aggregator(0).unwrap(), deadline);
    // Marks and reports take a moment.
    let agent = loop {
        let text = scrape(&hosts[0], PORTS[1]).unwrap();
        if text.contains("harmonaize_operations_total{tenant=\"a\",communicator=\"job\"} 20\n") {
            break text;
        }
        assert!(Instant::now() < deadline, "{text}");
        std::thread::sleep(Duration::from_millis(50));
    };
    let control = scrape(&deployment.fabric().control(), PORTS[0]).unwrap();
    for line in [
        "harmonaize_control_leader 1",
        "harmonaize_control_agent_connected{host=\"h0\"} 1",
        "harmonaize_control_communicators{tenant=\"a\",state=\"running\"} 1",
        "harmonaize_control_plan_changes_total{reason=\"formed\"} 1",
    ] {
        assert!(control.lines().any(|one| one == line), "{line} is not in\n{control}");
    }
    let mut metrics = Scrape::new();
    for text in [agent, control, scrape(&aggregator, PORTS[2]).unwrap()] {
        assert!(text.ends_with("# EOF\n") && text.contains("harmonaize_build_info{"), "{text}");
        assert!(text.contains("harmonaize_certificate_expiry_timestamp_seconds 1"), "{text}");
        parsed(&text);
        take(&text, &mut metrics);
    }
    let queries = queries();
    assert!(queries.len() > 40, "{}", queries.len());
    for (file, query) in queries {
        let found = metrics_in(&query);
        let mut all = BTreeSet::from(["instance".to_owned()]);
        let mut complete = true;
        for (name, labels) in found {
            let has = metrics.get(&name).unwrap_or_else(|| panic!("{file}: no metric {name}"));
            complete &= !has.is_empty();
            for label in labels.iter().filter(|label| *label != "instance" && !has.is_empty()) {
                assert!(has.contains(label), "{file}: {name} has no label {label}, but {has:?}");
            }
            all.extend(has.iter().cloned());
        }
        for label in grouped(&query) {
            assert!(all.contains(&label) || !complete, "{file}: {query}: nothing has a label {label}");
        }
    }
}
