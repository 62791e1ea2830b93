//! `harmonaize-perf` end to end: every collective, type and reduction through agents of two hosts, right and as nccl-tests prints.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_client::{Dtype, ReduceOp};
use harmonaize_testkit::deployment::Deployment;
use harmonaize_testkit::workspace::{Binaries, Profile};
use harmonaize_tests::job::{deploy, sockets};
use harmonaize_tests::star;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// Two hosts, and the program that measures through them.
fn two_hosts() -> Option<Deployment> {
    deploy(&star(2, "1Gbit/s"), |setup| {
        setup.binaries = Binaries::build_with(Profile::Dev, &["harmonaize-perf"]).unwrap();
    })
}

fn perf(deployment: &Deployment, arguments: &str) -> Output {
    perf_with(deployment, arguments, &[])
}

/// The same with variables of the environment.
fn perf_with(deployment: &Deployment, arguments: &str, variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(deployment.binaries().path("harmonaize-perf").unwrap());
    command.args(arguments.split_whitespace());
    for socket in sockets(deployment, "a") {
        command.arg("--agent").arg(socket);
    }
    command.envs(variables.iter().copied()).output().unwrap()
}

fn rows(folder: &Path, output: &Output) -> Vec<Vec<String>> {
    let (text, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{text}\n{error}");
    assert!(text.contains("# Out of bounds values : 0 OK"), "{text}");
    assert!(text.contains("# Avg bus bandwidth    : "), "{text}");
    let csv = std::fs::read_to_string(folder.join("rows.csv")).unwrap();
    csv.lines().skip(1).map(|line| line.split(',').map(str::to_owned).collect()).collect()
}

#[test]
fn every_collective_sweeps_right() {
    let Some(deployment) = two_hosts() else { return };
    let folder = tempfile::tempdir().unwrap();
    let files = format!("--csv {0}/rows.csv --json {0}/rows.json", folder.path().display());
    let common = format!("--ranks 4 -n 3 {files}");
    // Sizes: 64 and 2048 bytes; all types, and all reductions that each has where there are any.
    let reductions = |dtype: &Dtype| ReduceOp::ALL.iter().filter(|op| op.takes(*dtype)).count();
    let (types, reduced) = (Dtype::ALL.len(), Dtype::ALL.iter().map(reductions).sum::<usize>());
    let cases = [
        ("all_reduce", "", reduced * 2 * 2),
        ("reduce_scatter", "-z 1", reduced * 2 * 2),
        ("all_gather", "-z 2", types * 2 * 2),
        ("broadcast", "-r -1 -z 3", types * 4 * 2 * 2),
        ("alltoall", "", types * 2),
        ("reduce", "-r 1 -z 1", reduced * 2 * 2),
        ("gather", "-r -1", types * 4 * 2 * 2),
        ("scatter", "-r 3 -z 2", types * 2 * 2),
        ("alltoallv", "-z 1", types * 2),
        ("sendrecv", "", types * 2),
    ];
    for (collective, more, expected) in cases {
        let output =
            perf(&deployment, &format!("{collective} {common} -b 64 -e 2K -f 32 -d all -o all {more}"));
        let rows = rows(folder.path(), &output);
        assert_eq!(rows.len(), expected, "{collective}");
        assert!(rows.iter().all(|row| row.len() == 15 && row[9] == "0"), "{collective}: {rows:?}");
        // Of nothing there is no time.
        let timed = |row: &Vec<String>| row[0] == "0" || row[6].parse::<f64>().unwrap() > 0.0;
        assert!(rows.iter().all(timed), "{collective}: {rows:?}");
        let json = std::fs::read(folder.path().join("rows.json")).unwrap();
        let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
        assert_eq!(json["out_of_bounds"]["okay"], true);
        assert_eq!(json["config"]["devices"].as_array().unwrap().len(), 4);
    }
}

#[test]
fn variables_ask_for_a_log_metrics_and_lines() {
    let Some(deployment) = two_hosts() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (metrics, operations) = (path("%r.prom"), path("%r.jsonl"));
    let variables = [
        ("HARMONAIZE_METRICS", &*metrics),
        ("HARMONAIZE_OPERATIONS", &*operations),
        ("HARMONAIZE_DEBUG", "trace"),
    ];
    let output = perf_with(&deployment, "all_gather --ranks 2 -b 1K -e 1K -n 3 -w 1", &variables);
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{log}");
    for rank in ["0", "1"] {
        let lines = std::fs::read_to_string(path(&format!("{rank}.jsonl"))).unwrap();
        let lines: Vec<serde_json::Value> =
            lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let gathered: Vec<_> = lines.iter().filter(|line| line["collective"] == "allgather").collect();
        // The program gathers ranks' names, too.
        let measured = gathered.iter().filter(|line| line["bytes"] == 1024).count();
        assert!(measured >= 8, "{lines:?}");
        for line in &gathered {
            let fine = line["outcome"] == "ok" && line["ranks"] == 2;
            assert!(fine && line["seconds"].as_f64().unwrap() > 0.0, "{line}");
        }
        let metrics = std::fs::read_to_string(path(&format!("{rank}.prom"))).unwrap();
        let count = format!("collective=\"allgather\",rank=\"{rank}\",outcome=\"ok\"}} {}\n", gathered.len());
        assert!(metrics.contains(&count), "no {count} in\n{metrics}");
        assert!(log.contains(&format!("harmonaize rank {rank}: ")), "{log}");
    }
    assert!(
        log.contains("allgather(") && log.contains("1024 bytes in ") && log.contains(" formed in "),
        "{log}"
    );
    let output = perf_with(&deployment, "all_gather --ranks 2 -b 1K -e 1K", &[("HARMONAIZE_DEBUG", "loud")]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("HARMONAIZE_DEBUG=loud"), "{error}");
}

#[test]
fn hosts_are_reached_by_the_command_given() {
    let Some(deployment) = two_hosts() else { return };
    let folder = tempfile::tempdir().unwrap();
    // Stands for ssh, and notes whom it is to reach.
    let (rsh, reached) = (folder.path().join("rsh"), folder.path().join("reached"));
    let script = format!("#!/bin/sh\necho \"$1\" >> {}\nexec sh -c \"$2\"\n", reached.display());
    std::fs::write(&rsh, script).unwrap();
    std::fs::set_permissions(&rsh, std::fs::Permissions::from_mode(0o755)).unwrap();
    let rsh = rsh.display();
    let line = format!("all_reduce --ranks 4 --hosts n1,n2 --rsh {rsh} -b 1K -e 1K -n 3");
    let output = perf(&deployment, &line);
    let (text, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && text.contains("# Out of bounds values : 0 OK"), "{text}\n{error}");
    let mut hosts: Vec<_> = std::fs::read_to_string(reached).unwrap().lines().map(str::to_owned).collect();
    hosts.sort();
    assert_eq!(hosts, ["n1", "n1", "n2", "n2"]);
    let nobody = perf(&deployment, "all_reduce --ranks 2 --hosts n1 --rsh false -b 1K -e 1K");
    let error = String::from_utf8_lossy(&nobody.stderr);
    assert!(!nobody.status.success() && error.contains("on n1 has ended"), "{error}");
}

#[test]
fn an_unreachable_host_ends_the_run_by_name() {
    let Some(deployment) = two_hosts() else { return };
    let folder = tempfile::tempdir().unwrap();
    // Stands for ssh, notes whom it is to reach, and has no way to one of them.
    let (ssh, reached) = (folder.path().join("ssh"), folder.path().join("reached"));
    let script = format!(
        "#!/bin/sh\nwhile [ \"$1\" = -o ]; do shift 2; done\necho \"$1\" >> {}\n\
         if [ \"$1\" = away ]; then echo no route to it >&2; exit 255; fi\nexec sh -c \"$2\"\n",
        reached.display()
    );
    std::fs::write(&ssh, script).unwrap();
    std::fs::set_permissions(&ssh, std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
    let by_ssh = |line: &str| {
        let output = perf_with(&deployment, line, &[("PATH", &path)]);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.success(), text(&output.stdout), text(&output.stderr))
    };
    let (good, commands, error) = by_ssh("all_reduce --hosts n1,n2 -b 1K -e 1K --dry-run");
    assert!(good && commands.lines().count() == 2, "{commands}\n{error}");
    assert!(commands.lines().all(|line| line.starts_with("ssh -o BatchMode=yes ")), "{commands}");
    assert!(!reached.exists(), "it started something");
    let (good, text, error) = by_ssh("all_reduce --hosts n1,n2 -b 1K -e 1K -n 3");
    assert!(good && text.contains("# Out of bounds values : 0 OK"), "{text}\n{error}");
    let (good, _, error) = by_ssh("all_reduce --hosts n1,away -T 600 -b 1K -e 1K");
    assert!(!good && error.contains("away: no route to it\n"), "{error}");
    assert!(error.contains("rank 1 on away has ended: exit status: 255"), "{error}");
    let (good, _, error) = by_ssh("broadcast --hosts n1,n2 -r 7 -b 1K -e 1K");
    assert!(
        !good && error.lines().any(|line| line.starts_with("n1: ") || line.starts_with("n2: ")),
        "{error}"
    );
}

/// What stands for ssh is killed, as ssh is, and leaves its rank alone. That rank would wait ten minutes for the
/// other.
#[test]
fn a_rank_on_a_host_ends_when_another_fails() {
    let Some(mut deployment) = two_hosts() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let (rsh, begun, ended) = (path("rsh"), path("begun"), path("ended"));
    let (begun, end) = (begun.display(), ended.display());
    let script = format!(
        "#!/bin/sh\nif [ $1 = n2 ]; then until [ -e {begun} ]; do sleep 0.1; done; exit 1; fi\n\
         sh -c \"touch {begun}; ( $2 ); touch {end}\"\nexit 0\n"
    );
    std::fs::write(&rsh, script).unwrap();
    std::fs::set_permissions(&rsh, std::fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = Command::new(deployment.binaries().path("harmonaize-perf").unwrap());
    command.args("all_reduce --ranks 2 --hosts n1,n2 -T 600 -b 1K -e 1K --rsh".split_whitespace()).arg(&rsh);
    for socket in sockets(&deployment, "a") {
        command.arg("--agent").arg(socket);
    }
    // No pipes: the rank on n1 has them for as long as it is there.
    let status = command.stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap();
    assert!(!status.success());
    deployment.wait_until("the rank on n1 goes on", |_| Ok(ended.exists().then_some(()))).unwrap();
}

#[test]
fn percentiles_and_no_check() {
    let Some(deployment) = two_hosts() else { return };
    let output = perf(&deployment, "all_reduce --ranks 2 -b 1M -e 1M -c 0 --percentiles");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("    N/A") && text.contains("in-place: p50 "), "{text}");
}

#[test]
fn a_page_and_a_line_of_json_tell_the_rows() {
    let Some(deployment) = two_hosts() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report.html");
    let output = perf(
        &deployment,
        &format!("all_reduce --ranks 2 -b 1K -e 64K -f 4 -n 3 --json - --html {}", path.display()),
    );
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    let line = text.lines().find(|line| line.starts_with('{')).unwrap();
    let json: serde_json::Value = serde_json::from_str(line).unwrap();
    assert_eq!(json["results"].as_array().unwrap().len(), 4);
    let html = std::fs::read_to_string(path).unwrap();
    assert!(html.matches("<svg").count() == 2 && html.contains("Rank  1"), "{html}");
    for socket in sockets(&deployment, "a") {
        assert!(html.contains(&*socket.to_string_lossy()), "{html}");
    }
    for outside in ["http:", "https:", "src=", "href=", "url("] {
        assert!(!html.contains(outside), "{outside}");
    }
}

#[test]
fn a_rank_that_fails_ends_the_run() {
    let Some(deployment) = two_hosts() else { return };
    let output = perf(&deployment, "broadcast --ranks 2 -r 7 -b 1K -e 1K");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{error}");
    assert!(error.contains("has ended: exit status: 1"), "{error}");
}
