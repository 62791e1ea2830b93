//! A worker whose gradients are kept: what its rank gives of some steps' averages, as files of NumPy.

use crate::communicator::{Communicator, Cost};
use crate::npy;
use crate::training::RIDERS;
use anyhow::{Context, Result};
use std::path::PathBuf;

/// A communicator that writes what its rank gives in some steps before it averages it.
pub struct Recorded<'a> {
    /// What averages.
    pub inner: &'a mut dyn Communicator,
    /// Where files go, which is made where it is missing.
    pub folder: PathBuf,
    /// What files are called, before the step: `NAME-STEP.npy`.
    pub name: String,
    /// Which steps, from 1.
    pub steps: Vec<usize>,
    /// Steps so far.
    pub made: usize,
}

impl Communicator for Recorded<'_> {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn ranks(&self) -> usize {
        self.inner.ranks()
    }

    fn average(&mut self, values: &mut [f32]) -> Result<Cost> {
        // What rides along is no gradient, nor is it where it goes by itself.
        let riders = if self.inner.is_lossy() { 0 } else { RIDERS };
        let gradients = values.get(..values.len() - riders.min(values.len())).unwrap_or_default();
        if gradients.len() > RIDERS {
            self.made += 1;
            if self.steps.contains(&self.made) {
                std::fs::create_dir_all(&self.folder)
                    .with_context(|| format!("cannot make {}", self.folder.display()))?;
                npy::write(&self.folder.join(format!("{}-{}.npy", self.name, self.made)), gradients)?;
            }
        }
        self.inner.average(values)
    }

    fn is_lossy(&self) -> bool {
        self.inner.is_lossy()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::communicator::SingleProcess;
    use crate::model::{Kind, Model};
    use crate::training::{Recipe, train};

    #[test]
    fn requested_steps_are_recorded() {
        let folder = tempfile::tempdir().unwrap();
        let mut recorded = Recorded {
            inner: &mut SingleProcess,
            folder: folder.path().join("new"),
            name: "perceptron".to_owned(),
            steps: vec![2, 3],
            made: 0,
        };
        let recipe = Recipe { steps: 3, tested: 10, ..Recipe::default() };
        let outcome = train(&recipe, &mut recorded, &|| true, &mut |_| Ok(())).unwrap();
        assert_eq!(
            outcome,
            train(&recipe, &mut SingleProcess, &|| true, &mut |_| Ok(())).unwrap(),
            "nothing changed"
        );
        let mut files: Vec<_> =
            std::fs::read_dir(folder.path().join("new")).unwrap().map(|file| file.unwrap().path()).collect();
        files.sort();
        let names: Vec<_> = files.iter().map(|file| file.file_name().unwrap().to_str().unwrap()).collect();
        assert_eq!(names, ["perceptron-2.npy", "perceptron-3.npy"]);
        let elements = Model::new(Kind::default(), recipe.seed).unwrap().parameters().unwrap().len();
        let bytes = files.iter().map(|file| std::fs::read(file).unwrap());
        let [one, other]: [Vec<u8>; 2] = bytes.collect::<Vec<_>>().try_into().unwrap();
        assert_eq!(one.len(), 128 + 4 * elements);
        assert!(one[128..].iter().any(|byte| *byte != 0) && one != other);
    }
}
