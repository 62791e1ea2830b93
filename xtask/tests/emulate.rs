//! `cargo xtask emulate` as a process: however it ends, no namespace and no process stays.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use harmonaize_testkit::workspace::{self, Binaries, Profile};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const STAR: &str = "[[host]]\nname = 'h0'\n[[host]]\nname = 'h1'\n[[switch]]\nname = 's0'\n\
    [[link]]\nfrom = 'h0'\nto = 's0'\nrate = '1Gbit/s'\n[[link]]\nfrom = 'h1'\nto = 's0'\nrate = '1Gbit/s'\n";

/// Starts it, waits until it says that the fabric is up, and returns it with the fabric's name.
fn emulate(folder: &Path, more: &[&str]) -> Option<(Child, String)> {
    if !harmonaize_testkit::strict::can_make_namespaces() {
        return None;
    }
    let file = folder.join("star.toml");
    std::fs::write(&file, STAR).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command.args(["emulate", "--bare"]).arg(&file).args(more).env("CI", "true").stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let first = lines.next().unwrap().unwrap();
    let name = first.strip_prefix("Fabric ").and_then(|rest| rest.strip_suffix(" is up.")).unwrap();
    // Its output is read to the end, so that it never writes into a closed pipe.
    std::thread::spawn(move || lines.for_each(drop));
    Some((child, name.to_owned()))
}

#[test]
fn a_wrong_file_is_refused_before_anything_is_built() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("wrong.toml");
    for (text, expected) in
        [("host = 3\n", "is not a topology"), ("[[host]]\nname = 'h0'\n", "host h0 has no link")]
    {
        std::fs::write(&file, text).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
        command.arg("emulate").arg(&file).stdin(Stdio::null());
        // What builds calls this, and says so.
        command.env("CARGO", folder.path().join("no-cargo")).env_remove("HARMONAIZE_BINARIES");
        let output = command.output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && said.contains(expected), "{said}");
        assert!(!said.contains("cargo"), "{said}");
    }
}

/// The commands of the guide for tenants' block that has these words, a line each.
fn commands_of_guide(words: &str) -> Vec<String> {
    let guide = std::fs::read_to_string(workspace::root().join("docs/tenants.md")).unwrap();
    let mut blocks = guide.split("```sh\n").skip(1).filter_map(|block| block.split("```").next());
    blocks.find(|block| block.contains(words)).unwrap_or_default().lines().map(str::to_owned).collect()
}

#[test]
fn commands_of_guide_and_output_run_as_they_are() {
    if !harmonaize_testkit::strict::can_make_namespaces() {
        return;
    }
    let guide = commands_of_guide("--example hello");
    let [build, emulate, hello] = guide.as_slice() else { panic!("{guide:?}") };
    workspace::run(workspace::calling_cargo("sh").args(["-ec", build])).unwrap();
    // This very program, for which cargo is called there.
    let emulate = emulate.strip_prefix("cargo xtask ").unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command.args(emulate.split(' ')).current_dir(workspace::root());
    let mut child = command.env("CI", "true").stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let printed: Vec<String> = lines.by_ref().take_while(|line| !line.starts_with("Ctrl-C")).collect();
    let run = |word: &str, input: &str| {
        let line = printed.iter().find(|line| line.contains(word)).cloned().unwrap_or_default();
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("set -e; {line}")]).current_dir(workspace::root());
        shell.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut shell = shell.spawn().unwrap();
        // A command that reads nothing may have ended.
        let _ = shell.stdin.take().unwrap().write_all(input.as_bytes());
        let output = shell.wait_with_output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        (output.status.success() && !line.is_empty(), String::from_utf8_lossy(&said).into_owned())
    };
    let (status, all_reduce) = (run(" status", ""), run("all_reduce", ""));
    // The build's outputs may be elsewhere.
    let programs = Binaries::folder_of(Profile::Dev);
    let programs = programs.strip_prefix(workspace::root()).unwrap_or(&programs).display().to_string();
    let hello = run("HARMONAIZE_SOCKET=", &format!("{}\n", hello.replace("target/debug", &programs)));
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    lines.for_each(drop);
    assert!(child.wait().unwrap().success());
    assert!(status.0 && status.1.contains("2 of 2 agents connected"), "{}\n{printed:?}", status.1);
    assert!(all_reduce.0, "{}\n{printed:?}", all_reduce.1);
    for rank in [0, 1] {
        assert!(hello.1.contains(&format!("rank {rank} of 2: the sum is 3, ")), "{}\n{printed:?}", hello.1);
    }
}

fn gone(name: &str) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while harmonaize_testkit::fabric::standing().unwrap().contains(name) {
        assert!(Instant::now() < deadline, "{name} is still there");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn ends_with(signal: &str, orderly: bool) {
    let folder = tempfile::tempdir().unwrap();
    let Some((mut child, name)) = emulate(folder.path(), &[]) else { return };
    assert!(harmonaize_testkit::fabric::standing().unwrap().contains(&name));
    let killed = Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
    assert!(killed.success());
    assert_eq!(child.wait().unwrap().success(), orderly);
    gone(&name);
}

#[test]
fn ctrl_c_removes_the_fabric() {
    ends_with("-INT", true);
}

#[test]
fn a_request_to_end_removes_the_fabric() {
    ends_with("-TERM", true);
}

#[test]
fn sudden_death_removes_the_fabric() {
    ends_with("-KILL", false);
}

#[test]
fn a_kept_fabric_stays_until_removed() {
    let folder = tempfile::tempdir().unwrap();
    let Some((mut child, name)) = emulate(folder.path(), &["--keep"]) else { return };
    assert!(child.wait().unwrap().success());
    assert!(harmonaize_testkit::fabric::standing().unwrap().contains(&name));
    let down = Command::new(env!("CARGO_BIN_EXE_xtask")).args(["emulate", "--down", &name]).status().unwrap();
    assert!(down.success());
    gone(&name);
}
