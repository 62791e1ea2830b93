//! The library for programs of MPI end to end. A program in C that uses MPI alone is compiled and run by Debian's Open MPI and MPICH,
//! on two hosts in turn. What the provider carried is read from the file of its operations.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_testkit::c_library;
use harmonaize_testkit::strict;
use harmonaize_testkit::workspace::{Profile, root};
use harmonaize_tests::c_program::{WARNINGS, succeeded};
use harmonaize_tests::job::{deploy, sockets};
use harmonaize_tests::star;
use std::collections::BTreeMap;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// An MPI: what compiles and what starts its programs.
struct Mpi {
    compiler: &'static str,
    launcher: &'static [&'static str],
}

const MPIS: [Mpi; 2] = [
    Mpi { compiler: "mpicc.openmpi", launcher: &["mpirun.openmpi", "--oversubscribe"] },
    Mpi { compiler: "mpicc.mpich", launcher: &["mpirun.mpich"] },
];

/// Starts the program as a rank with the library, at the agent of a host that goes by the rank.
const RANK: &str = r#"#!/bin/sh
rank=${OMPI_COMM_WORLD_RANK:-$PMI_RANK}
if [ $((rank % 2)) = 0 ]; then HARMONAIZE_SOCKET=$EVEN; else HARMONAIZE_SOCKET=$ODD; fi
export HARMONAIZE_SOCKET LD_PRELOAD="$LIBRARY"
exec "$@"
"#;

/// The program for an MPI, and the library.
struct Job<'a> {
    mpi: &'a Mpi,
    /// The program, in the folder.
    program: &'static str,
    folder: TempDir,
    library: PathBuf,
    /// Of the environment, beside those of all jobs.
    variables: &'static [(&'static str, &'static str)],
}

impl<'a> Job<'a> {
    /// None, loudly, where this machine has no such MPI.
    fn new(mpi: &'a Mpi) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let mut compile = Command::new(mpi.compiler);
        // MPICH's header has arrays of statuses whose constant to ignore them is an address.
        compile.args(["-std=c11", "-g", "-O1"]).args(WARNINGS).arg("-Wno-stringop-overflow");
        compile.arg(root().join("tests/tests/mpi/cases.c")).arg("-o").arg(folder.path().join("cases"));
        let program = "cases";
        if Command::new(mpi.compiler).arg("--version").output().is_err() {
            strict::skip_test(format!("there is no {}", mpi.compiler));
            return None;
        }
        succeeded(&mut compile);
        let start = folder.path().join("rank");
        std::fs::write(&start, RANK).unwrap();
        std::fs::set_permissions(&start, Permissions::from_mode(0o755)).unwrap();
        let library = c_library::MPI.install(Profile::Dev, folder.path()).unwrap();
        Some(Self { mpi, program, folder, library, variables: &[] })
    }

    /// The same, whose MPI is loaded for one part of the program alone, as a module of Python's has it.
    fn loaded(mpi: &'a Mpi) -> Option<Self> {
        let job = Self { program: "load", ..Self::new(mpi)? };
        let module = job.folder.path().join("cases.so");
        let mut compile = Command::new(mpi.compiler);
        compile.args(["-std=c11", "-shared", "-fPIC"]).arg(root().join("tests/tests/mpi/cases.c"));
        succeeded(compile.arg("-o").arg(&module));
        let mut compile = Command::new("cc");
        compile.args(["-std=gnu11"]).args(WARNINGS).arg(root().join("tests/tests/mpi/load.c"));
        compile.arg(format!("-DMODULE=\"{}\"", module.display())).arg("-ldl");
        succeeded(compile.arg("-o").arg(job.folder.path().join(job.program)));
        Some(job)
    }

    /// Runs a case; what it wrote to its standard error, and by rank how often the provider ran each collective.
    fn run(&self, case: &str, ranks: u32, sockets: [&Path; 2]) -> (String, Vec<BTreeMap<String, u32>>) {
        let [program, arguments @ ..] = self.mpi.launcher else { panic!("no launcher") };
        let operations = |rank: &str| self.folder.path().join(format!("{case}-{ranks}-{rank}.jsonl"));
        let mut command = Command::new("timeout");
        command.args(["--kill-after=10", "120", program]).args(arguments).args(["-n", &ranks.to_string()]);
        command.arg(self.folder.path().join("rank")).arg(self.folder.path().join(self.program)).arg(case);
        command.env("LIBRARY", &self.library).env("EVEN", sockets[0]).env("ODD", sockets[1]);
        command.env("HARMONAIZE_DEBUG", "info").env("HARMONAIZE_OPERATIONS", operations("%r"));
        command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        let output = command.envs(self.variables.iter().copied()).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{case} by {}:\n{text}{errors}", self.mpi.compiler);
        let right = text.lines().filter(|line| line.ends_with(" is right")).count();
        assert_eq!(right, ranks as usize, "{text}{errors}");
        let counted = |rank: u32| {
            let mut counts = BTreeMap::new();
            let lines = std::fs::read_to_string(operations(&rank.to_string())).unwrap_or_default();
            for line in lines.lines() {
                let line: serde_json::Value = serde_json::from_str(line).unwrap();
                assert!(line["outcome"] == "ok" || case == "mistakes", "{line}");
                *counts.entry(line["collective"].as_str().unwrap().to_owned()).or_default() += 1;
            }
            counts
        };
        (errors, (0..ranks).map(counted).collect())
    }
}

/// Runs cases by both MPIs, and looks at what the provider ran at each rank.
fn by_both(cases: &[(&str, u32)], check: impl Fn(&str, &BTreeMap<String, u32>, &str)) {
    let Some(deployment) = deploy(&star(2, "10Gbit/s"), |_| ()) else { return };
    let sockets = sockets(&deployment, "a");
    for job in MPIS.iter().filter_map(Job::new) {
        for (case, ranks) in cases {
            let (errors, counts) = job.run(case, *ranks, [&sockets[0], &sockets[1]]);
            counts.iter().for_each(|counts| check(case, counts, &errors));
        }
    }
}

fn counts<const N: usize>(of: [(&str, u32); N]) -> BTreeMap<String, u32> {
    of.into_iter().map(|(name, count)| (name.to_owned(), count)).collect()
}

#[test]
fn every_collective_is_right_and_goes_by_the_provider() {
    by_both(&[("collectives", 4), ("collectives", 3)], |_, ran, errors| {
        let ranks = ran["broadcast"] - 1;
        let expected = counts([
            ("allreduce", 9),
            ("broadcast", ranks + 1),
            ("reduce", ranks + 1),
            ("allgather", 4),
            ("alltoall", 3),
            ("reducescatter", 5),
            ("barrier", 1),
        ]);
        assert_eq!(*ran, expected, "{errors}");
        assert!(!errors.contains("goes to the MPI"), "{errors}");
    });
}

#[test]
fn an_mpi_that_is_loaded_for_a_module_alone_is_found() {
    let Some(deployment) = deploy(&star(2, "10Gbit/s"), |_| ()) else { return };
    let sockets = sockets(&deployment, "a");
    for job in MPIS.iter().filter_map(Job::loaded) {
        let (_, counts) = job.run("collectives", 2, [&sockets[0], &sockets[1]]);
        assert!(counts.iter().all(|ran| ran["allreduce"] == 9), "{counts:?}");
    }
}

#[test]
fn what_the_provider_does_not_reduce_goes_to_the_mpi() {
    by_both(&[("others", 4)], |_, ran, errors| {
        assert_eq!(*ran, counts([]), "{errors}");
        assert!(errors.contains("MPI_Allreduce goes to the MPI: a type or an operation"), "{errors}");
        assert!(errors.contains("0 calls by the provider, 5 by the MPI"), "{errors}");
    });
}

#[test]
fn communicators_of_the_program_have_their_own() {
    by_both(&[("communicators", 6)], |_, ran, errors| {
        // Two of three ranks each, and three of all.
        assert_eq!(ran["barrier"], 2, "{errors}");
        assert_eq!(ran["allreduce"], 3, "{errors}");
        assert!(errors.contains("an intercommunicator"), "{errors}");
        assert!(errors.contains("one rank alone"), "{errors}");
    });
}

#[test]
fn requests_end_by_every_function_that_waits() {
    by_both(&[("nonblocking", 4), ("threads", 3)], |case, ran, errors| {
        let ranks = if case == "threads" { 3 } else { 4 };
        let expected = counts([
            // Of an AllToAll of each block, of one in place that has nothing for the rank itself, and of one to each other rank alone.
            ("send", 3 * ranks - 2),
            ("receive", 3 * ranks - 2),
            ("allreduce", 80),
            ("barrier", 1),
            ("broadcast", 1),
            ("allgather", 2),
            ("alltoall", 1),
            ("reduce", 1),
            ("reducescatter", 2),
        ]);
        assert_eq!(*ran, expected, "{errors}");
        assert!(!errors.contains("MPI_Ialltoallv goes to the MPI"), "{errors}");
        assert!(errors.contains("MPI_Iallreduce goes to the MPI: no collective that blocks"), "{errors}");
    });
}

#[test]
fn large_ones_go_in_pieces_while_the_mpi_transfers() {
    by_both(&[("large", 2)], |_, ran, errors| {
        // 44 MiB, of which 8 MiB are staged at once; and one of 4 bytes before.
        assert_eq!(ran["allreduce"], 7, "{errors}");
        assert_eq!((ran["alltoall"], ran["reducescatter"]), (6, 6), "{errors}");
        assert!(errors.contains("MPI_Ibcast goes to the MPI"), "{errors}");
        // The block from rank 0 to rank 1 is the MPI's.
        assert_eq!(ran["send"] + ran["receive"], 3, "{errors}");
        assert!(errors.contains("MPI_Ialltoallv goes to the MPI: blocks of few bytes, or large"), "{errors}");
    });
}

#[test]
fn small_ones_go_to_the_mpi_where_that_is_asked_for() {
    let Some(deployment) = deploy(&star(2, "10Gbit/s"), |_| ()) else { return };
    let sockets = sockets(&deployment, "a");
    for job in MPIS.iter().filter_map(Job::new) {
        let job = Job { variables: &[("HARMONAIZE_MPI_MIN_BYTES", "8000")], ..job };
        // Blocks of 4,000 bytes each of two ranks, and sums of elements of 8 bytes.
        let (errors, counts) = job.run("collectives", 2, [&sockets[0], &sockets[1]]);
        let expected =
            self::counts([("allgather", 3), ("alltoall", 2), ("allreduce", 5), ("reducescatter", 1)]);
        assert!(counts.iter().all(|ran| *ran == expected), "{counts:?}");
        assert!(errors.contains("MPI_Barrier goes to the MPI: fewer bytes than"), "{errors}");
        let job = Job { variables: &[("HARMONAIZE_MPI_MIN_BYTES", "few")], ..job };
        let (errors, _) = job.run("others", 2, [&sockets[0], &sockets[1]]);
        assert!(errors.contains("HARMONAIZE_MPI_MIN_BYTES=few is no number of bytes"), "{errors}");
    }
}

#[test]
fn ranks_that_call_different_things_have_mpis_errors() {
    by_both(&[("mistakes", 3)], |_, ran, errors| {
        assert_eq!(ran["allreduce"], 2, "{errors}");
        for function in ["MPI_Allreduce", "MPI_Iallreduce"] {
            assert!(errors.contains(&format!("{function}: allreduce(")), "{errors}");
        }
        assert!(errors.contains("ranks called different operations"), "{errors}");
    });
}

#[test]
fn without_an_agent_everything_goes_to_the_mpi_with_one_warning() {
    let Some(deployment) = deploy(&star(2, "10Gbit/s"), |_| ()) else { return };
    let there = &sockets(&deployment, "a")[0];
    for job in MPIS.iter().filter_map(Job::new) {
        // Half of the ranks have one.
        for (case, odd) in [("collectives", Path::new("/nowhere/agent.sock")), ("nonblocking", Path::new(""))]
        {
            let (errors, counts) = job.run(case, 4, [there, odd]);
            assert!(counts.iter().all(BTreeMap::is_empty), "{counts:?}");
            let warnings = errors.matches("collectives of all ranks go to the MPI").count();
            assert_eq!(warnings, 1, "{errors}");
            assert!(errors.contains("HARMONAIZE_SOCKET"), "{errors}");
        }
    }
}
