//! What PyTorch takes to convert and to quantise the same elements, on one thread.

use super::Measured;
use crate::peers::Gloo;
use crate::row::{Case, Row};
use anyhow::{Context, Result};
use harmonaize_testkit::job::printed;
use harmonaize_testkit::packages::Consent;
use harmonaize_testkit::workspace::{root, target};
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Passes of each conversion in a round; the fastest counts, as of ours.
const PASSES: usize = 15;
/// The name of the tensor.
const TENSOR: &str = "for-pytorch";

/// Its interpreter, and the file of the elements.
#[derive(Debug)]
pub(super) struct PyTorch {
    python: PathBuf,
    file: PathBuf,
    /// What it took, round by round.
    rounds: Vec<Vec<Line>>,
}

/// A line of `bench/peers/convert.py`: a way to do what a codec does. Speeds in GB/s of f32.
#[derive(Debug, Clone, PartialEq, Deserialize)]
struct Line {
    codec: String,
    method: String,
    encode: f64,
    decode: f64,
}

impl PyTorch {
    /// Installs it if that is consented, and writes the file.
    pub(super) fn prepare(consent: Consent, elements: usize) -> Result<Self> {
        let python = Gloo::prepare(consent)?.python().to_owned();
        let file = target().join("peers").join(format!("{TENSOR}.npy"));
        let own = Self { python, file, rounds: Vec::new() };
        let said = printed(own.script("make").arg(elements.to_string()))?;
        eprint!("{said}");
        Ok(own)
    }

    /// The elements, as a file of NumPy.
    pub(super) fn file(&self) -> &Path {
        &self.file
    }

    /// Whether a line of ours is of its tensor.
    pub(super) fn owns(line: &Measured) -> bool {
        line.tensor == TENSOR
    }

    fn script(&self, what: &str) -> Command {
        let mut script = Command::new(&self.python);
        script.arg(root().join("bench/peers/convert.py")).arg(what).arg(&self.file);
        script.env("OMP_NUM_THREADS", "1");
        script
    }

    /// Times a round.
    pub(super) fn round(&mut self) -> Result<()> {
        let text = printed(self.script("time").arg(PASSES.to_string()))?;
        let lines = text.lines().filter(|line| line.starts_with('{'));
        let lines = lines.map(serde_json::from_str).collect::<Result<_, _>>();
        self.rounds.push(lines.context("not what `convert.py` prints")?);
        Ok(())
    }

    /// Our speeds against its, for each of its methods. `ours` are of the same tensor, a line of each codec a
    /// round.
    pub(super) fn rows(&self, ours: &[Measured]) -> Vec<Row> {
        let Some(ways) = self.rounds.first() else { return Vec::new() };
        let row = |way: &Line, what: &str, own: fn(&Measured) -> f64, its: fn(&Line) -> f64| {
            let found: Vec<&Measured> = ours.iter().filter(|line| line.codec == way.codec).collect();
            let speeds: Vec<f64> = found.iter().map(|line| own(line)).collect();
            let theirs = self.rounds.iter().flatten();
            let theirs = theirs.filter(|line| (&line.codec, &line.method) == (&way.codec, &way.method));
            let theirs: Vec<f64> = theirs.map(its).collect();
            let case = Case::more("codec", format!("{}, {what}: GB/s", way.codec), 1.0)
                .of(found.first().map_or(0, |line| 4 * line.elements), 1);
            case.compare(&speeds, &theirs, &format!("PyTorch, {}", way.method))
        };
        let both = |way: &Line| {
            [
                row(way, "encode", |line| line.encode, |line| line.encode),
                row(way, "decode", |line| line.decode, |line| line.decode),
            ]
        };
        ways.iter().flat_map(both).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_method_is_compared_within_its_round() {
        let line =
            |way: &str, encode| Line { codec: "int8".into(), method: way.into(), encode, decode: 30.0 };
        let round = vec![line("composed", 2.0), line("own", 8.0)];
        let rounds = vec![round.clone(), round];
        let pytorch = PyTorch { python: PathBuf::new(), file: PathBuf::new(), rounds };
        let ours = |codec: &str| Measured {
            tensor: TENSOR.into(),
            codec: codec.into(),
            elements: 10,
            ratio: 4.0,
            vnmse: 0.0,
            memcpy: 10.0,
            encode: 6.0,
            decode: 15.0,
            decode_add: 12.0,
        };
        let (other, own) = (ours("bf16"), ours("int8"));
        let rows = pytorch.rows(&[other, own, ours("int8")]);
        let told: Vec<_> = rows.iter().map(|row| (row.ratio, row.passed(), row.runs)).collect();
        assert_eq!(
            told,
            [(Some(3.0), true, 2), (Some(0.5), false, 2), (Some(0.75), false, 2), (Some(0.5), false, 2)]
        );
        assert!(PyTorch::owns(&ours("int8")) && rows[2].reference_name.contains("own"));
    }
}
