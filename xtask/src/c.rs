//! `cargo xtask c`: the C library with its header, as they are installed. Also the libraries for programs of NCCL and of
//! MPI.

use anyhow::Result;
use harmonaize_testkit::c_library;
use harmonaize_testkit::workspace::{self, Profile};
use std::path::PathBuf;

/// What `cargo xtask c` takes.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask c                       into target/c
  cargo xtask c --out /usr/local      for everybody on this machine, as root")]
pub struct Args {
    /// The folder that gets `lib`, `lib/pkgconfig` and `include`; `c` in the folder of build outputs without it
    #[arg(long, value_name = "FOLDER")]
    pub out: Option<PathBuf>,
}

/// Runs the task.
pub fn run(args: &Args) -> Result<()> {
    let out = args.out.clone().unwrap_or_else(|| workspace::target().join("c"));
    c_library::install(&c_library::build(Profile::Release)?, &out)?;
    let stand_ins = [c_library::NCCL, c_library::NCCL_PLUGIN, c_library::MPI];
    let installed = stand_ins.map(|library| library.install(Profile::Release, &out));
    let shown = out.display();
    println!("{shown}/include/harmonaize.h\n{shown}/lib/{}\n{shown}/lib/libharmonaize.a", c_library::SONAME);
    for library in installed {
        println!("{}", library?.display());
    }
    println!("PKG_CONFIG_PATH={shown}/lib/pkgconfig pkg-config --cflags --libs harmonaize");
    Ok(())
}
