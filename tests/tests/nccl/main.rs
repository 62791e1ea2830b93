//! The library with NCCL's ABI end to end: its symbols, and a program in C that knows NCCL alone, under sanitizers of addresses, leaks
//! and undefined behaviour.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_testkit::c_library;
use harmonaize_testkit::workspace::Profile;
use harmonaize_tests::c_program::{Program, printed, succeeded};
use harmonaize_tests::job::{deploy, sockets};
use harmonaize_tests::star;
use std::collections::BTreeSet;
use std::os::unix::fs::symlink;
use std::process::Command;
use tempfile::TempDir;

/// Functions that NCCL's header of release 2.32 declares, without those for profilers (`pncclX` is `ncclX`).
const FUNCTIONS: &str = include_str!("functions-2.32.txt");

/// The library by NCCL's own name, in a folder that goes with this.
fn installed() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    c_library::NCCL.install(Profile::Dev, folder.path()).unwrap();
    for name in ["libnccl.so.2", "libnccl.so"] {
        symlink(c_library::NCCL.name, folder.path().join("lib").join(name)).unwrap();
    }
    folder
}

/// Runs cases, each with as many ranks, on two hosts in turn.
fn run(cases: &[(&str, u32)]) {
    let Some(deployment) = deploy(&star(2, "10Gbit/s"), |_| ()) else { return };
    let installed = installed();
    // The program's own `cuPointerGetAttribute` is to be found by the library.
    let arguments = ["-lnccl", "-rdynamic"];
    let (into, library) = (installed.path(), installed.path().join("lib"));
    let program = Program::compile("tests/tests/nccl/cases.c", into, &library, &arguments);
    let sockets = sockets(&deployment, "a");
    for (case, ranks) in cases {
        let half = ranks.div_ceil(2);
        let mut all = program.start(Some(case), 0..half, *ranks, &sockets[0]);
        all.extend(program.start(Some(case), half..*ranks, *ranks, &sockets[1]));
        printed(case, all);
    }
}

#[test]
fn every_function_of_nccls_header_is_there_and_nothing_else() {
    let folder = installed();
    let library = folder.path().join("lib/libnccl.so.2");
    let symbols =
        succeeded(Command::new("nm").args(["-D", "--defined-only", "--format=posix"]).arg(&library));
    let exported: BTreeSet<&str> = symbols.lines().filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(exported, FUNCTIONS.lines().collect());
    let dynamic = succeeded(Command::new("readelf").arg("-d").arg(&library));
    assert!(dynamic.contains("Library soname: [libnccl.so.2]"), "{dynamic}");
}

#[test]
fn a_program_for_nccl_runs_as_it_is() {
    run(&[("collectives", 4), ("one_process", 1), ("parts", 5)]);
}

#[test]
fn mistakes_have_nccls_results_and_a_text() {
    run(&[("mistakes", 1), ("no_agent", 1)]);
}
