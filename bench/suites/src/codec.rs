//! Suite codec: speed against memcpy, error and ratio of every codec, on one core.

mod plots;
mod pytorch;

use super::row::{Better, Case, Row};
use super::suite::Request;
use anyhow::{Context, Result};
use harmonaize_testkit::job::printed;
use harmonaize_testkit::workspace;
use pytorch::PyTorch;
use serde::Deserialize;
use std::process::Command;

/// What a line of `cargo run -p harmonaize-codec --example measure` says. Speeds in GB/s of f32.
#[derive(Debug, Deserialize)]
struct Measured {
    tensor: String,
    codec: String,
    elements: u64,
    ratio: f64,
    vnmse: f64,
    memcpy: f64,
    encode: f64,
    decode: f64,
    /// Of shared codes, adding them without decoding.
    decode_add: f64,
}

/// Elements of the tensor that PyTorch converts too: 25 MiB, as of ours.
const ELEMENTS: usize = 25 << 18;

/// The most that a codec may lose of a tensor.
const LOSSES: &[(&str, &str, f64)] = &[
    ("rotated 1", "heavy-tailed", 0.58),
    ("rotated 2", "heavy-tailed", 0.14),
    ("rotated 3", "heavy-tailed", 0.037),
    ("rotated 4", "heavy-tailed", 0.0105),
    ("int8", "heavy-tailed", 1e-3),
    ("shared 4", "gaussian", 0.021),
];

/// A speed of a line.
type Speed = fn(&Measured) -> f64;

/// The least speeds on the normal tensor, in times of memcpy's.
const SPEEDS: &[(&str, &str, f64, Speed)] = &[
    ("bf16", "encode", 1.3, |line| line.encode),
    ("fp16", "encode", 1.3, |line| line.encode),
    ("int8", "encode", 1.7, |line| line.encode),
    ("int8", "decode and add", 2.0, |line| line.decode_add),
    ("rotated 4", "encode", 0.6, |line| line.encode),
    ("rotated 4", "decode", 0.8, |line| line.decode),
];

/// Measures, prints what each codec did in the last round, and returns the rows with bars. It draws the round, and has PyTorch beside it in
/// each round, where that was asked for.
pub fn run(request: &Request) -> Result<Vec<Row>> {
    let pytorch = request.pytorch.then(|| PyTorch::prepare(request.consent(), ELEMENTS));
    let mut pytorch = pytorch.transpose()?;
    let (mut example, rounds) = if request.smoke {
        // With the features of the whole workspace, whose crates are built already.
        let mut build = workspace::cargo();
        build.args(["build", "--workspace", "--bins", "--tests", "--example", "measure"]);
        let built = workspace::executables(&mut build, &["measure"])?;
        let (_, program) = built.first().context("cargo built no example `measure`")?;
        let mut example = Command::new(program);
        example.args(["--elements", "65536", "--passes", "2"]);
        (example, 1)
    } else {
        let mut example = workspace::cargo();
        let package = ["run", "--quiet", "--release", "--package", "harmonaize-codec"];
        example.args(package).args(["--example", "measure", "--"]);
        (example, request.rounds())
    };
    let beside = pytorch.as_ref().map(|pytorch| pytorch.file().to_owned());
    let files = request.files.iter().chain(&beside);
    example.args(files.map(|file| std::path::absolute(file).unwrap_or(file.clone())));
    let (mut lines, mut shared) = (Vec::new(), Vec::new());
    let mut last = 0;
    for _ in 0..rounds {
        last = lines.len();
        let text = printed(&mut example)?;
        for line in text.lines().filter(|line| line.starts_with('{')) {
            let line: Measured = serde_json::from_str(line).context("not what `measure` prints")?;
            let kept = if PyTorch::owns(&line) { &mut shared } else { &mut lines };
            kept.push(line);
        }
        if let Some(pytorch) = &mut pytorch {
            pytorch.round()?;
        }
    }
    println!("{}", table(lines.get(last..).unwrap_or_default()));
    if let Some(folder) = &request.figures {
        plots::write(folder, lines.get(last..).unwrap_or_default())?;
    }
    let beside = pytorch.iter().flat_map(|pytorch| pytorch.rows(&shared));
    Ok(rows(&lines).into_iter().chain(beside).collect())
}

fn table(lines: &[Measured]) -> String {
    let mut text = String::from(
        "| tensor | codec | ratio | vNMSE | memcpy GB/s | encode | decode | decode and add |\n\
         |---|---|---|---|---|---|---|---|\n",
    );
    for Measured { tensor, codec, ratio, vnmse, memcpy, encode, decode, decode_add, .. } in lines {
        text += &format!("| {tensor} | {codec} | {ratio:.2} | {vnmse:.3e} | {memcpy:.1} ");
        text += &format!("| {encode:.1} | {decode:.1} | {decode_add:.1} |\n");
    }
    text
}

fn rows(lines: &[Measured]) -> Vec<Row> {
    let of = |codec: &str, tensor: &str| -> Vec<&Measured> {
        lines.iter().filter(|line| line.codec == codec && line.tensor == tensor).collect()
    };
    let case = |case: String, found: &[&Measured], better, bar| {
        Case::new("codec", case, better, bar).of(found.first().map_or(0, |line| 4 * line.elements), 1)
    };
    let losses = LOSSES.iter().map(|(codec, tensor, most)| {
        let found = of(codec, tensor);
        let lost: Vec<f64> = found.iter().map(|line| line.vnmse).collect();
        case(format!("{codec}, {tensor}: vNMSE"), &found, Better::Less, 1.0).limit(&lost, *most)
    });
    let speeds = SPEEDS.iter().map(|(codec, what, least, speed)| {
        let found = of(codec, "gaussian");
        let ours: Vec<f64> = found.iter().map(|line| speed(line)).collect();
        let memcpy: Vec<f64> = found.iter().map(|line| line.memcpy).collect();
        case(format!("{codec}, {what}: GB/s"), &found, Better::More, *least).compare(&ours, &memcpy, "memcpy")
    });
    losses.chain(speeds).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_apply_to_their_codec_and_tensor() {
        let line = |codec: &str, tensor: &str| Measured {
            tensor: tensor.into(),
            codec: codec.into(),
            elements: 100,
            ratio: 4.0,
            vnmse: 5e-4,
            memcpy: 10.0,
            encode: 18.0,
            decode: 15.0,
            decode_add: 19.0,
        };
        let rows = rows(&[line("int8", "gaussian"), line("int8", "heavy-tailed")]);
        let of = |case: &str| rows.iter().find(|row| row.case.starts_with(case)).unwrap();
        assert!(of("int8, heavy-tailed").passed() && of("int8, encode").passed());
        assert_eq!((of("int8, encode").ratio, of("int8, encode").size), (Some(1.8), 400));
        assert!(!of("int8, decode and add").passed());
        assert!(!of("bf16, encode").passed() && of("bf16, encode").ours.is_none());
    }
}
