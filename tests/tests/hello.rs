//! The client's example in Rust, as docs/tenants.md has it run: a rank at each of two agents.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_testkit::workspace::{self, Binaries, Profile};
use harmonaize_tests::c_program::printed;
use harmonaize_tests::job::{deploy, sockets};
use harmonaize_tests::star;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

#[test]
fn ranks_of_the_example_get_their_sum() {
    let Some(deployment) = deploy(&star(2, "1Gbit/s"), |_| ()) else { return };
    // Of the whole workspace: cargo unifies features over what a call names.
    let mut build = workspace::cargo();
    workspace::run(build.args(["build", "--quiet", "--workspace", "--example", "hello"])).unwrap();
    let program = Binaries::folder_of(Profile::Dev).join("examples/hello");
    let start = |(rank, socket): (u32, PathBuf)| {
        let mut command = Command::new(&program);
        command.env("HARMONAIZE_SOCKET", socket).env("RANK", rank.to_string()).env("WORLD_SIZE", "2");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let ranks: Vec<Child> = (0..2).zip(sockets(&deployment, "a")).map(start).collect();
    for (rank, said) in printed("hello", ranks).iter().enumerate() {
        assert!(said.starts_with(&format!("rank {rank} of 2: the sum is 3, ")), "{said}");
    }
}
