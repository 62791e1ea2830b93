//! The dashboards that are shipped, read by Debian's Prometheus at an emulated fabric. Each query of each panel is answered, and panels
//! of what load makes have data.
//!
//! `HARMONAIZE_GOLDEN=write cargo test -p harmonaize-tests --test dashboards` has the load last for minutes, and draws the dashboards
//! into `docs/pictures`. It takes twelve minutes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use anyhow::{Context, Result, bail, ensure};
use harmonaize_client::{Budget, Constraints, Dtype, ReduceOp};
use harmonaize_plot::{Axes, Chart, Panel, Series, write_board};
use harmonaize_testkit::cross_traffic::CrossTraffic;
use harmonaize_testkit::deployment::{Deployment, Setup};
use harmonaize_testkit::namespace::Namespace;
use harmonaize_testkit::process::Process;
use harmonaize_testkit::{clock, golden, packages, strict, workspace};
use harmonaize_tests::job::{Worker, deploy, joined, sockets};
use harmonaize_tests::load::{train, under};
use harmonaize_tests::racks_with_unmanaged_hosts;
use harmonaize_tests::scrape::{PORTS, answer};
use serde_json::{Value, json};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long anything may take: a bound for machines that are busy with other things, and no figure.
const PATIENCE: Duration = Duration::from_secs(60);
/// Of each link.
const RATE: &str = "100Mbit/s";
/// How long load lasts in a test, and for pictures. Rates of the dashboards are over five minutes, and full only then.
const LASTS: [Duration; 2] = [Duration::from_secs(30), Duration::from_secs(660)];
/// Where Prometheus listens, in control's namespace.
const PORT: u16 = 9090;
/// Values of the dashboards' variables that are chosen, where there are several.
const CHOSEN: [&str; 2] = ["a", "h0"];
/// Most lines of a panel.
const MOST_LINES: usize = 10;

/// The dashboards, and panels of each that have data wherever a job computes.
const BOARDS: [(&str, &[&str]); 3] = [
    ("fabric", &["Leader", "Links by state", "Communicators", "Plan changes", "Certificates"]),
    ("tenant", &["Operations", "Time of an operation, 99%", "Tensor bytes", "Communicators"]),
    ("host", &["Use of interfaces", "Busbw, median", "Telemetry thread"]),
];

/// Debian's Prometheus beside control, until it is dropped.
struct Prometheus {
    namespace: Namespace,
    process: Process,
    _folder: tempfile::TempDir,
}

impl Prometheus {
    /// Starts the program, and waits until it has scraped control and all agents.
    fn start(program: &Path, deployment: &Deployment) -> Result<Self> {
        let fabric = deployment.fabric();
        let agents = deployment.hosts().iter().map(|host| (host.name.as_str(), host.management, PORTS[1]));
        let all = agents.chain([("control", fabric.control_address(), PORTS[0])]);
        let targets: Vec<_> = all
            .map(|(name, address, port)| {
                json!({"targets": [format!("{address}:{port}")], "labels": {"instance": name}})
            })
            .collect();
        let config = json!({
            "global": {"scrape_interval": "1s"},
            "scrape_configs": [{"job_name": "harmonaize", "static_configs": targets}],
        });
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("prometheus.yml");
        // JSON is YAML.
        std::fs::write(&file, config.to_string())?;
        let option = |name: &str, path: PathBuf| format!("--{name}={}", path.display());
        let mut command = Command::new(program);
        command.arg(option("config.file", file));
        command.arg(option("storage.tsdb.path", folder.path().join("data")));
        command.arg(format!("--web.listen-address=127.0.0.1:{PORT}"));
        let namespace = fabric.control();
        let process =
            Process::start("prometheus", &mut command, &namespace, &folder.path().join("prometheus.log"))?;
        let mut this = Self { namespace, process, _folder: folder };
        let (deadline, wanted) = (Instant::now() + PATIENCE, targets.len().to_string());
        loop {
            let up = this.ask("query", &[("query", "sum(up)")]);
            if up.as_ref().is_ok_and(|up| up["result"][0]["value"][1] == wanted.as_str()) {
                return Ok(this);
            }
            let ended = this.process.status()?.is_some();
            ensure!(
                !ended && Instant::now() < deadline,
                "not all is scraped: {up:?}\n{}",
                this.process.log_tail(4096)
            );
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// What its HTTP API answers.
    fn ask(&self, path: &str, parameters: &[(&str, &str)]) -> Result<Value> {
        let parameters: Vec<String> =
            parameters.iter().map(|(name, value)| format!("{}={}", encoded(name), encoded(value))).collect();
        let path = format!("/api/v1/{path}?{}", parameters.join("&"));
        let text = answer(&self.namespace, PORT, &path)?;
        let body = text.split_once("\r\n\r\n").map(|(_, body)| serde_json::from_str::<Value>(body));
        let mut found = body.with_context(|| text.clone())?.with_context(|| text.clone())?;
        ensure!(found["status"] == "success", "{path}: {}", found["error"]);
        Ok(found["data"].take())
    }

    /// Names of a dashboard's variables, and the value that is chosen of each.
    fn variables(&self, board: &Value) -> Result<Vec<(String, String)>> {
        let all = board["templating"]["list"].as_array().context("no variables")?;
        let queried = all.iter().filter(|variable| variable["type"] == "query");
        let chosen = queried.map(|variable| -> Result<(String, String)> {
            let query = variable["query"].as_str().context("no query")?;
            let asked = query.strip_prefix("label_values(").and_then(|query| query.strip_suffix(')'));
            let (selector, label) =
                asked.and_then(|asked| asked.rsplit_once(", ")).context("another query")?;
            let values = self.ask(&format!("label/{label}/values"), &[("match[]", selector)])?;
            let values: Vec<&str> =
                values.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
            let usual = values.iter().find(|value| CHOSEN.contains(value));
            let value = usual.or(values.first()).with_context(|| format!("{query} finds nothing"))?;
            Ok((variable["name"].as_str().context("no name")?.to_owned(), (*value).to_owned()))
        });
        chosen.collect()
    }

    /// The chart of a panel, between these times in seconds since 1970.
    fn chart(&self, panel: &Value, variables: &[(String, String)], [start, end]: [f64; 2]) -> Result<Chart> {
        let step = ((end - start) / 150.0).ceil().max(1.0);
        let mut lines = Vec::new();
        for target in panel["targets"].as_array().context("no targets")? {
            let query = substituted(target["expr"].as_str().context("no query")?, variables)?;
            let [start, end, step] = [start, end, step].map(|number| number.to_string());
            let names = ["query", "start", "end", "step"];
            let values = [query.as_str(), start.as_str(), end.as_str(), step.as_str()];
            let asked: Vec<(&str, &str)> = names.into_iter().zip(values).collect();
            let found = self.ask("query_range", &asked)?;
            let format = target["legendFormat"].as_str().context("no legend")?;
            for one in found["result"].as_array().context("no series")? {
                lines.push((legend(format, &one["metric"]), samples(&one["values"])?));
            }
        }
        let greatest = |samples: &[(f64, f64)]| {
            samples.iter().map(|(_, value)| *value).filter(|value| value.is_finite()).fold(0.0, f64::max)
        };
        let mut title = panel["title"].as_str().context("no title")?.to_owned();
        if lines.len() > MOST_LINES {
            title += &format!(" (the {MOST_LINES} greatest of {})", lines.len());
            lines.sort_by(|(_, one), (_, other)| greatest(other).total_cmp(&greatest(one)));
            lines.truncate(MOST_LINES);
        }
        let most = lines.iter().map(|(_, samples)| greatest(samples)).fold(0.0, f64::max);
        let unit = panel["fieldConfig"]["defaults"]["unit"].as_str().context("no unit")?;
        let (scale, unit) = scale(unit, most)?;
        let drawn = |samples: &[(f64, f64)]| -> Vec<(f64, f64)> {
            let broken = with_gaps(samples, step).into_iter();
            broken.map(|(at, value)| ((at - start) / 60.0, value * scale)).collect()
        };
        let series =
            lines.iter().map(|(name, samples)| Series { name: name.clone(), points: drawn(samples) });
        let (x, y) = ("minutes of load".to_owned(), unit.to_owned());
        Ok(Chart { title, x, y, axes: Axes::Linear, series: series.collect(), marks: Vec::new() })
    }

    /// Draws a dashboard into a folder, and returns the titles of panels with data and of those without.
    fn draw(&self, name: &str, times: [f64; 2], folder: &Path) -> Result<[Vec<String>; 2]> {
        let board: Value = serde_json::from_str(&shipped(name))?;
        let variables = self.variables(&board)?;
        let (mut panels, mut titles) = (Vec::new(), [Vec::new(), Vec::new()]);
        for panel in board["panels"].as_array().context("no panels")? {
            let title = panel["title"].as_str().context("no title")?.to_owned();
            let chart = self.chart(panel, &variables, times).with_context(|| format!("{name}: {title}"))?;
            let shown =
                chart.series.iter().any(|line| line.points.iter().any(|(_, value)| value.is_finite()));
            titles[usize::from(!shown)].push(title);
            let place = |name: &str| Some(panel["gridPos"][name].as_u64()? as u32);
            let [x, y, w, h] = ["x", "y", "w", "h"].map(place);
            let at = x.zip(y).context("no place")?;
            panels.push(Panel { at, size: w.zip(h).context("no size")?, chart });
        }
        let mut note =
            "Drawn by harmonaize's tests from the dashboard's own queries, which Prometheus answered at an \
                        emulated fabric. No picture of Grafana."
                .to_owned();
        for (name, value) in &variables {
            note += &format!(" ${name} is {value}.");
        }
        let title = board["title"].as_str().context("no title")?;
        write_board(folder, &picture(name), title, &note, &panels)?;
        Ok(titles)
    }
}

/// The name of a dashboard's picture.
fn picture(name: &str) -> String {
    format!("dashboard-{name}")
}

/// A dashboard's text.
fn shipped(name: &str) -> String {
    let file = format!("xtask/package/monitoring/harmonaize-{name}.json");
    std::fs::read_to_string(workspace::root().join(file)).unwrap()
}

/// A text as part of a URL.
fn encoded(text: &str) -> String {
    let byte = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    text.bytes().map(byte).collect()
}

/// A query with these values of variables, which are all that it may have.
fn substituted(query: &str, variables: &[(String, String)]) -> Result<String> {
    let put = |query: String, (name, value): &(String, String)| query.replace(&format!("${name}"), value);
    let query = variables.iter().fold(query.to_owned(), put);
    ensure!(!query.contains('$'), "{query} has a variable that the dashboard lacks");
    Ok(query)
}

/// A series' name, by a format that has labels' names in double braces.
fn legend(format: &str, labels: &Value) -> String {
    let mut parts = format.split("{{");
    let mut name = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (label, behind) = part.split_once("}}").unwrap_or((part, ""));
        name += labels[label].as_str().unwrap_or_default();
        name += behind;
    }
    name
}

/// Times and values of a series.
fn samples(values: &Value) -> Result<Vec<(f64, f64)>> {
    let sample = |pair: &Value| Some((pair[0].as_f64()?, pair[1].as_str()?.parse::<f64>().ok()?));
    let values = values.as_array().context("no values")?;
    values.iter().map(|pair| sample(pair).with_context(|| format!("no sample: {pair}"))).collect()
}

/// The samples, with one that is no number wherever a step has none: nothing is drawn over that.
fn with_gaps(samples: &[(f64, f64)], step: f64) -> Vec<(f64, f64)> {
    let mut broken: Vec<(f64, f64)> = Vec::new();
    for sample in samples {
        if let Some((before, _)) = broken.last().copied().filter(|(before, _)| sample.0 - before > 1.5 * step)
        {
            broken.push((before + step, f64::NAN));
        }
        broken.push(*sample);
    }
    broken
}

/// What values of one of Grafana's units are multiplied by, and the unit that they have then, by the greatest.
fn scale(unit: &str, greatest: f64) -> Result<(f64, &'static str)> {
    const SECONDS: [(f64, &str); 4] = [(1e-6, "µs"), (1e-3, "ms"), (1.0, "s"), (86_400.0, "days")];
    const BYTES: [(f64, &str); 4] = [(1.0, "B/s"), (1e3, "kB/s"), (1e6, "MB/s"), (1e9, "GB/s")];
    let by = |units: [(f64, &'static str); 4]| {
        let (one, name) = units.into_iter().rfind(|(one, _)| greatest >= *one).unwrap_or(units[0]);
        (1.0 / one, name)
    };
    Ok(match unit {
        "short" | "sci" => (1.0, ""),
        "percentunit" => (100.0, "%"),
        "cps" => (1.0, "counts/s"),
        "ops" => (1.0, "operations/s"),
        "pps" => (1.0, "packets/s"),
        "s" => by(SECONDS),
        "Bps" => by(BYTES),
        _ => bail!("{unit} is a unit that is not drawn yet"),
    })
}

/// One operation of the load: sums of whole numbers, and of fractions of which a little may be lost.
fn operation(worker: &Worker, round: u64) -> Result<()> {
    const ELEMENTS: usize = 1 << 17;
    if round == 0 {
        worker.communicator.set_budget(&Budget::Vnmse(0.01))?;
        if worker.rank == 0 {
            // Whether it is agreed on is not what this is about.
            let outcome = worker.client.propose("load", &Constraints::new().min_busbw(1_000_000))?;
            println!("{outcome:?}");
        }
    }
    if round.is_multiple_of(2) {
        return worker.sum(round, ELEMENTS, true, PATIENCE);
    }
    let values = Worker::input(worker.rank, round, ELEMENTS).into_iter();
    let values: Vec<f32> = values.map(|word| (word >> 40) as f32 / (1 << 24) as f32 - 0.5).collect();
    let tensor = worker.client.tensor(Dtype::F32, ELEMENTS as u64)?;
    tensor.write(0, &values)?;
    worker.communicator.all_reduce_in_place(&tensor, ReduceOp::Sum)?.wait(PATIENCE)?;
    Ok(())
}

/// Two jobs compute for so long. A rank of one is late for a while. Then foreign traffic crosses a spine, and then that is cut.
fn story(deployment: &Deployment, lasts: Duration) -> Result<()> {
    const SPINE: &str = "spine1";
    let workers = joined(&sockets(deployment, "b")[..3], "late");
    let (slow, over) = (AtomicBool::new(false), AtomicBool::new(false));
    let began = Instant::now();
    let until = |share: f64| std::thread::sleep(lasts.mul_f64(share).saturating_sub(began.elapsed()));
    let play = || -> Result<()> {
        until(0.2);
        slow.store(true, Ordering::Relaxed);
        until(0.4);
        slow.store(false, Ordering::Relaxed);
        let flow = CrossTraffic::start(deployment.fabric(), "f0", "f1", SPINE, 50_000_000)?;
        until(0.6);
        flow.stop()?;
        deployment.fabric().set_switch(SPINE, false)?;
        until(0.75);
        deployment.fabric().set_switch(SPINE, true)?;
        until(1.0);
        Ok(())
    };
    std::thread::scope(|scope| {
        for worker in &workers {
            scope.spawn(|| train(worker, &slow, &over));
        }
        let mut played = Ok(());
        let load = || under(&sockets(deployment, "a"), 1, operation, |_| played = play());
        let ended = catch_unwind(AssertUnwindSafe(load));
        over.store(true, Ordering::Relaxed);
        ended.map_or_else(|panic| resume_unwind(panic), |_| played)
    })
}

fn now() -> f64 {
    clock::realtime_ns().unwrap() as f64 / 1e9
}

#[test]
fn prometheus_answers_each_panel_of_the_dashboards() {
    // Debian's package has both.
    let beside = packages::promtool().map(|promtool| promtool.with_file_name("prometheus"));
    let Some(program) = beside.filter(|program| program.is_file()) else {
        return strict::skip_test("Debian's package prometheus is missing: cargo xtask test unpacks it");
    };
    let store = tempfile::tempdir().unwrap();
    let shows = |setup: &mut Setup| {
        setup.unmanaged_hosts = 2;
        let [control, agent] = [PORTS[0], PORTS[1]].map(|port| format!("metrics = \"0.0.0.0:{port}\"\n"));
        setup.control += &format!("{control}store = {:?}\n", store.path().join("control.redb"));
        setup.agent += &agent;
        setup.measure(RATE);
    };
    let Some(mut deployment) = deploy(&racks_with_unmanaged_hosts(2, 2, 2, RATE), shows) else { return };
    let prometheus = Prometheus::start(&program, &deployment).unwrap();
    let writes = golden::writes();
    let began = now();
    story(&deployment, LASTS[usize::from(writes)]).unwrap();
    let times = [began, now()];

    let (pictures, drawn) = (workspace::root().join("docs/pictures"), tempfile::tempdir().unwrap());
    for (name, expected) in BOARDS {
        let folder = if writes { pictures.as_path() } else { drawn.path() };
        let [with, without] = prometheus.draw(name, times, folder).unwrap();
        println!("{name}: no data in {without:?}");
        for title in expected {
            assert!(with.iter().any(|own| own == title), "{name}: no data in {title}, but in {with:?}");
        }
        let committed = pictures.join(picture(name)).with_extension("svg");
        let committed = std::fs::read_to_string(&committed).unwrap_or_default();
        for title in with.iter().chain(&without) {
            assert!(
                committed.contains(title.as_str()),
                "HARMONAIZE_GOLDEN=write draws {name}: {title} is new"
            );
        }
    }
    deployment.check().unwrap();
}

#[test]
fn queries_and_names_are_as_grafana_makes_them() {
    let variables = [("instance".to_owned(), "h0".to_owned())];
    let query = "rate(m{instance=~\"$instance\"}[5m])";
    assert_eq!(substituted(query, &variables).unwrap(), "rate(m{instance=~\"h0\"}[5m])");
    assert!(substituted("m{tenant=\"$tenant\"}", &variables).is_err());
    assert_eq!(encoded("a{b=\"c d\"}"), "a%7Bb%3D%22c%20d%22%7D");
    let labels = json!({"from": "h0", "to": "leaf0"});
    assert_eq!(legend("{{from}} to {{to}}: {{state}}", &labels), "h0 to leaf0: ");
    assert_eq!(legend("99%", &labels), "99%");
}

#[test]
fn samples_have_gaps_and_units_that_fit() {
    let values = samples(&json!([[1.5, "1"], [2.5, "+Inf"], [5.5, "NaN"]])).unwrap();
    assert_eq!(values[..2], [(1.5, 1.0), (2.5, f64::INFINITY)]);
    let broken = with_gaps(&values, 1.0);
    assert_eq!(broken.iter().map(|(at, _)| *at).collect::<Vec<_>>(), [1.5, 2.5, 3.5, 5.5]);
    assert!(broken[2].1.is_nan() && samples(&json!([[1.5, 1]])).is_err());
    assert_eq!(scale("Bps", 2.5e6).unwrap(), (1e-6, "MB/s"));
    assert_eq!((scale("s", 0.0).unwrap().1, scale("s", 90_000.0).unwrap().1), ("µs", "days"));
    assert!(scale("furlongs", 1.0).is_err());
}
