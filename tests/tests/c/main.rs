//! The C library end to end. Tests check its symbols, run the example of docs/tenants.md as it stands there, and run programs
//! in C that try every function and every mistake. Those run under sanitizers of addresses, leaks and undefined behaviour.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_testkit::workspace::{Profile, root};
use harmonaize_testkit::{c_library, strict};
use harmonaize_tests::c_program::{Program, WARNINGS, printed, succeeded};
use harmonaize_tests::job::{deploy, sockets};
use harmonaize_tests::star;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

/// The example for tenants, and the cases of the tests, in the tree.
const PROGRAMS: [&str; 2] = ["dataplane/c/examples/all_reduce.c", "tests/tests/c/cases.c"];

/// The library as it is installed, in a folder that goes with this.
fn installed() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    c_library::install(&c_library::build(Profile::Dev).unwrap(), folder.path()).unwrap();
    folder
}

/// Compiles a program of the tree.
fn compiled(installed: &Path, source: &str) -> Program {
    let include = format!("-I{}", installed.join("include").display());
    Program::compile(source, installed, &installed.join("lib"), &[&include, "-lharmonaize"])
}

/// Runs cases, each with as many ranks.
fn run(cases: &[(&str, u32)]) {
    let Some(deployment) = deploy(&star(2, "10Gbit/s"), |_| ()) else { return };
    let installed = installed();
    let program = compiled(installed.path(), PROGRAMS[1]);
    for (case, ranks) in cases {
        printed(case, program.start(Some(case), 0..*ranks, *ranks, &sockets(&deployment, "a")[0]));
    }
}

#[test]
fn every_function_of_the_header_is_exported_with_a_version() {
    let header = std::fs::read_to_string(root().join("dataplane/c/include/harmonaize.h")).unwrap();
    let declared = header.lines().filter_map(|line| {
        let (before, _) = line.strip_suffix(';').unwrap_or(line).split_once('(')?;
        let name = before.rsplit([' ', '*']).next()?;
        name.starts_with("harmonaize_").then(|| name.to_owned())
    });
    let declared: BTreeSet<String> = declared.collect();
    assert!(declared.len() > 60, "{declared:?}");
    let installed = installed();
    let library = installed.path().join("lib").join(c_library::SONAME);
    let symbols =
        succeeded(Command::new("nm").args(["-D", "--defined-only", "--format=posix"]).arg(&library));
    let exported = symbols.lines().filter_map(|line| line.split(' ').next());
    // The version is a symbol, too.
    let exported: BTreeSet<&str> = exported.filter(|name| *name != "HARMONAIZE_0.1").collect();
    let expected: BTreeSet<String> = declared.iter().map(|name| format!("{name}@@HARMONAIZE_0.1")).collect();
    assert_eq!(exported, expected.iter().map(String::as_str).collect());
    let dynamic = succeeded(Command::new("readelf").arg("-d").arg(&library));
    assert!(dynamic.contains("Library soname: [libharmonaize.so.0]"), "{dynamic}");
    assert!(!dynamic.contains("libibverbs"), "{dynamic}");
}

#[test]
fn header_and_programs_compile_without_a_warning() {
    let include = root().join("dataplane/c/include");
    for (compiler, package) in [("gcc", "gcc"), ("g++", "g++"), ("clang", "clang"), ("clang++", "clang")] {
        if Command::new(compiler).arg("--version").output().is_err() {
            strict::skip_test(format!("{compiler} of Debian's package {package} is not installed"));
            continue;
        }
        let compile = || {
            let mut command = Command::new(compiler);
            command.arg("-fsyntax-only").args(WARNINGS).arg("-I").arg(&include);
            command
        };
        if compiler.ends_with("++") {
            let header = include.join("harmonaize.h");
            succeeded(compile().args(["-std=c++11", "-x", "c++"]).arg(header));
            continue;
        }
        for program in PROGRAMS {
            succeeded(compile().arg("-std=c11").arg(root().join(program)));
        }
    }
}

#[test]
fn the_example_for_tenants_is_built_and_run_as_it_says() {
    let Some(deployment) = deploy(&star(2, "10Gbit/s"), |_| ()) else { return };
    let tutorial = std::fs::read_to_string(root().join("docs/tenants.md")).unwrap();
    let commands = tutorial.split("```sh\n").filter_map(|block| block.split("```").next());
    let commands = commands.filter(|block| block.contains("cargo xtask c\n"));
    let commands: Vec<&str> = commands.flat_map(str::lines).collect();
    let [xtask, rest @ ..] = commands.as_slice() else { panic!("no example") };
    // What the first does, but for the time that a release takes.
    assert_eq!(*xtask, "cargo xtask c");
    c_library::install(&c_library::build(Profile::Dev).unwrap(), &root().join("target/c")).unwrap();
    let mut shell = Command::new("sh");
    shell.args(["-euc", &rest.join("\n")]).current_dir(root());
    let said = succeeded(shell.env("HARMONAIZE_SOCKET", &sockets(&deployment, "a")[0]));
    for rank in [0, 1] {
        assert!(said.contains(&format!("rank {rank} of 2: the sum is 3, ")), "{said}");
    }
    // It frees what it has, and says what is wrong.
    let installed = installed();
    let program = compiled(installed.path(), PROGRAMS[0]);
    printed("hello", program.start(None, 0..2, 2, &sockets(&deployment, "a")[0]));
    let mut alone = Command::new(&program.path);
    alone.env("LD_LIBRARY_PATH", installed.path().join("lib")).env("HARMONAIZE_SOCKET", "/nowhere");
    alone.env("SLURM_PROCID", "0").env("SLURM_NTASKS", "1");
    let refused = alone.output().unwrap();
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(
        !refused.status.success() && text.starts_with("cannot connect to the agent at /nowhere: "),
        "{text}"
    );
}

#[test]
fn calls_from_c_do_what_they_say() {
    run(&[("collectives", 2), ("calls", 2), ("provider", 2), ("regroup", 2), ("protect", 2)]);
}

#[test]
fn mistakes_from_c_are_answered() {
    run(&[
        ("wrong", 1),
        ("no_agent", 1),
        ("patience", 2),
        ("mismatch", 2),
        ("late", 2),
        ("abort", 2),
        ("forked", 2),
    ]);
}
