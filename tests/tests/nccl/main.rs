//! The library with NCCL's ABI end to end: its symbols, and a program in C. The program knows NCCL alone, and runs under
//! sanitizers of addresses, leaks and undefined behaviour.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_testkit::c_library;
use harmonaize_testkit::workspace::{Profile, root};
use harmonaize_tests::c_program::{Program, WARNINGS, printed, succeeded};
use harmonaize_tests::job::{deploy, sockets};
use harmonaize_tests::star;
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

/// Functions that NCCL's headers of release 2.32 declare, with a result or with nothing to return. Those for profilers are left
/// out (`pncclX` is `ncclX`).
const FUNCTIONS: &str = include_str!("functions-2.32.txt");

/// Those that the library does not refuse, as `nccl.h` declares them, without names of arguments.
const PROTOTYPES: &str = include_str!("prototypes-2.32.txt");

/// The library by NCCL's own name, in a folder that goes with this.
fn installed() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    c_library::NCCL.install(Profile::Dev, folder.path()).unwrap();
    for name in ["libnccl.so.2", "libnccl.so"] {
        symlink(c_library::NCCL.name, folder.path().join("lib").join(name)).unwrap();
    }
    folder
}

/// A program of this folder, built against the library.
fn compiled(source: &str, installed: &TempDir, arguments: &[&str]) -> Program {
    let library = installed.path().join("lib");
    Program::compile(&format!("tests/tests/nccl/{source}"), installed.path(), &library, arguments)
}

/// Runs cases, each with as many ranks, on two hosts in turn.
fn run(program: impl FnOnce(&TempDir) -> Program, cases: &[(&str, u32)]) {
    let Some(deployment) = deploy(&star(2, "10Gbit/s"), |_| ()) else { return };
    let installed = installed();
    let program = program(&installed);
    let sockets = sockets(&deployment, "a");
    for (case, ranks) in cases {
        let half = ranks.div_ceil(2);
        let mut all = program.start(Some(case), 0..half, *ranks, &sockets[0]);
        all.extend(program.start(Some(case), half..*ranks, *ranks, &sockets[1]));
        printed(case, all);
    }
}

fn on_host_memory(installed: &TempDir) -> Program {
    compiled("cases.c", installed, &["-lnccl"])
}

/// Beside the library that stands in for CUDA's driver, by its name.
fn on_a_device(installed: &TempDir) -> Program {
    let driver = installed.path().join("lib/libcuda.so.1");
    let mut compile = Command::new("cc");
    compile.args(["-std=c11", "-g", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]).args(WARNINGS);
    succeeded(compile.arg(root().join("tests/tests/nccl/cuda.c")).arg("-pthread").arg("-o").arg(&driver));
    compiled("streams.c", installed, &["-DFAKE", "-lnccl", "-l:libcuda.so.1"])
}

/// The names that a library has for programs.
fn exported(library: &Path) -> BTreeSet<String> {
    let symbols = succeeded(Command::new("nm").args(["-D", "--defined-only", "--format=posix"]).arg(library));
    symbols.lines().filter_map(|line| line.split(' ').next()).map(str::to_owned).collect()
}

/// Stock NCCL has its own functions beside it, and closes it while its threads run.
#[test]
fn the_plugin_has_none_of_nccls_functions_and_stays_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let library = c_library::NCCL_PLUGIN.install(Profile::Dev, folder.path()).unwrap();
    let names =
        ["harmonaize_nccl_congestion", "harmonaize_nccl_tune", "ncclProfiler_v6", "ncclTunerPlugin_v6"];
    assert_eq!(exported(&library), BTreeSet::from(names.map(str::to_owned)));
    let dynamic = succeeded(Command::new("readelf").arg("-d").arg(&library));
    assert!(dynamic.contains("NODELETE") && !dynamic.contains("libnccl.so"), "{dynamic}");
}

#[test]
fn every_function_of_nccls_header_is_there_and_nothing_else() {
    let folder = installed();
    let library = folder.path().join("lib/libnccl.so.2");
    assert_eq!(exported(&library), FUNCTIONS.lines().map(str::to_owned).collect());
    let dynamic = succeeded(Command::new("readelf").arg("-d").arg(&library));
    assert!(dynamic.contains("Library soname: [libnccl.so.2]"), "{dynamic}");
}

/// A type of the library's sources as C has it.
fn in_c(rust: &str) -> String {
    match (rust.strip_prefix("*mut "), rust.strip_prefix("*const "), rust) {
        (Some(to), ..) => in_c(to) + "*",
        (_, Some(to), _) => format!("const {}*", in_c(to)),
        (.., "c_void") => "void".to_owned(),
        (.., "c_int") => "int".to_owned(),
        (.., "c_char") => "char".to_owned(),
        (.., "usize") => "size_t".to_owned(),
        (.., same) => same.to_owned(),
    }
}

/// The functions of the library's sources by name, as C declares them; and the names of those that it refuses.
fn declared() -> (BTreeMap<String, String>, BTreeSet<String>) {
    let (mut all, mut refused) = (BTreeMap::new(), BTreeSet::new());
    let mut declare = |result: &str, name: &str, arguments: &str| {
        let types = arguments.split(',').filter_map(|argument| argument.trim().split_once(": "));
        let types: Vec<String> = types.map(|(_, one)| in_c(one)).collect();
        all.insert(name.to_owned(), format!("{} {name}({})", in_c(result), types.join(", ")));
    };
    for file in std::fs::read_dir(root().join("dataplane/nccl/src")).unwrap() {
        let text = std::fs::read_to_string(file.unwrap().path()).unwrap();
        for function in text.split("pub extern \"C\" fn ").skip(1).filter(|one| !one.starts_with('$')) {
            let (name, rest) = function.split_once('(').unwrap();
            let (arguments, rest) = rest.split_once(')').unwrap();
            let result = rest.split_once('{').unwrap().0.trim();
            declare(result.strip_prefix("-> ").unwrap_or("c_void"), name, arguments);
        }
        for line in text.lines().map(str::trim).filter(|line| line.starts_with("nccl")) {
            if let Some((name, plain)) = line.split_once("Config => ") {
                let arguments = plain.split_once('(').unwrap().1.strip_suffix(");").unwrap();
                let arguments = format!("{arguments}, config: *const ncclCollConfig_t");
                declare("ncclResult_t", &format!("{name}Config"), &arguments);
            } else if let Some((name, _)) = line.split_once(": \"") {
                refused.insert(name.to_owned());
            }
        }
    }
    (all, refused)
}

#[test]
fn arguments_are_those_of_nccls_header() {
    let (declared, refused) = declared();
    let names: BTreeSet<&str> = declared.keys().chain(&refused).map(String::as_str).collect();
    assert_eq!(names, FUNCTIONS.lines().collect());
    let expected: BTreeSet<&str> = PROTOTYPES.lines().collect();
    assert_eq!(declared.values().map(String::as_str).collect::<BTreeSet<_>>(), expected);
}

#[test]
fn a_program_for_nccl_runs_as_it_is() {
    run(on_host_memory, &[("collectives", 4), ("one_process", 1), ("parts", 5)]);
}

#[test]
fn mistakes_have_nccls_results_and_a_text() {
    run(on_host_memory, &[("mistakes", 1), ("configurations", 1), ("no_agent", 1)]);
}

#[test]
fn a_devices_memory_is_staged_in_the_order_of_its_streams() {
    run(on_a_device, &[("collectives", 4), ("order", 4), ("failures", 2), ("lost", 3)]);
}
