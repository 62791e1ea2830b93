//! Helm charts: `harmonaize`, of control, agents and aggregators, and `harmonaize-dpf`, which has DPF run the agents on offload units.

mod rendered;

use super::{Package, empty, folder, tar};
use anyhow::{Context, Result, bail};
use harmonaize_testkit::workspace;
pub(super) use rendered::test;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

/// The charts, by their names and folders.
const CHARTS: [&str; 2] = ["harmonaize", "harmonaize-dpf"];
/// What stands for the version in their sources.
const VERSION: &str = "0.0.0";

/// Makes them; their files.
pub(super) fn make(package: &Package) -> Result<Vec<PathBuf>> {
    let home = unpacked();
    empty(&home)?;
    let mut made = Vec::new();
    for chart in CHARTS {
        let source = workspace::root().join("xtask/package/charts").join(chart);
        workspace::run(Command::new("cp").arg("-r").arg(&source).arg(&home))?;
        let about = home.join(chart).join("Chart.yaml");
        let text = fs::read_to_string(&about).with_context(|| format!("cannot read {}", about.display()))?;
        if text.matches(VERSION).count() != 2 {
            bail!("{} has not {VERSION} as version and appVersion", source.display());
        }
        fs::write(&about, text.replace(VERSION, package.version))?;
        let file = folder().join(format!("{chart}-{}.tgz", package.version));
        workspace::run(tar::archive(package, &file).arg("--directory").arg(&home).arg(chart))?;
        made.push(file);
    }
    Ok(made)
}

/// The folder with each chart as it is packed.
fn unpacked() -> PathBuf {
    folder().join("charts")
}
