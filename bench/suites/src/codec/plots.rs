//! The suite's figures: speed beside memcpy, and what is lost over the bits that are sent.

use super::Measured;
use anyhow::Result;
use harmonaize_plot::{Axes, Chart, Lane, Scale, Series, write_lanes};
use std::collections::BTreeSet;
use std::path::Path;

const HEAVY: &str = "heavy-tailed";
/// Tensors that are always measured.
const SYNTHETIC: [&str; 3] = ["gaussian", HEAVY, "sparse"];

/// Writes `codec-speed.svg` and `codec-loss.svg` into `folder`, and a `codec-loss-TENSOR.svg` for each tensor that was given.
pub(super) fn write(folder: &Path, lines: &[Measured]) -> Result<()> {
    let scale = Scale { ends: (0.0, 3.0), logarithmic: false, ticks: &[(1.0, "memcpy"), (2.0, "twice")] };
    let title = "Speed by bytes of f32, times memcpy's, one core";
    write_lanes(folder, "codec-speed", title, scale, &speed(lines))?;
    loss(lines, HEAVY, "heavy-tailed elements (Student's t, 3 degrees of freedom)")
        .write(folder, "codec-loss")?;
    let given: BTreeSet<&str> = lines.iter().map(|line| line.tensor.as_str()).collect();
    for tensor in given.into_iter().filter(|tensor| !SYNTHETIC.contains(tensor)) {
        loss(lines, tensor, tensor).write(folder, &format!("codec-loss-{tensor}"))?;
    }
    Ok(())
}

/// What is lost of a tensor by the bits of an element, one line a family of codecs.
fn loss(lines: &[Measured], tensor: &str, what: &str) -> Chart {
    let families: [(&str, &[&str]); 3] = [
        ("integers, a scale a block of 256", &["int4", "int8"]),
        ("rotated blocks of 1024", &["rotated 1", "rotated 2", "rotated 3", "rotated 4"]),
        ("16-bit floats", &["bf16", "fp16"]),
    ];
    let series = families.map(|(name, codecs)| {
        let found = |codec: &&str| {
            let line = lines.iter().find(|line| line.codec == *codec && line.tensor == tensor)?;
            Some((32.0 / line.ratio, line.vnmse))
        };
        Series { name: name.to_owned(), points: codecs.iter().filter_map(found).collect() }
    });
    Chart {
        title: format!("What is lost of {what}"),
        x: "bits of an element on the wire".to_owned(),
        y: "vNMSE".to_owned(),
        axes: Axes::LogY,
        series: series.into(),
        marks: Vec::new(),
    }
}

/// Bars in times of memcpy, three a codec, of normal elements.
fn speed(lines: &[Measured]) -> Vec<Lane> {
    let lines = lines.iter().filter(|line| line.tensor == "gaussian");
    let bars = |line: &Measured| {
        [("encode", line.encode), ("decode", line.decode), ("decode and add", line.decode_add)].map(
            |(what, speed)| {
                let times = speed / line.memcpy;
                let (name, note) = (format!("{}, {what}", line.codec), format!("{times:.2}"));
                Lane { name, note, good: times >= 1.0, bar: Some((0.0, times)), ..Lane::default() }
            },
        )
    };
    lines.flat_map(bars).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_show_what_was_measured() {
        let line = |codec: &str, tensor: &str, ratio, vnmse| Measured {
            tensor: tensor.into(),
            codec: codec.into(),
            elements: 100,
            ratio,
            vnmse,
            memcpy: 10.0,
            encode: 18.0,
            decode: 15.0,
            decode_add: 19.0,
        };
        let lines = [
            line("int8", "gaussian", 4.0, 1e-4),
            line("int8", "heavy-tailed", 4.0, 1e-3),
            line("int4", "heavy-tailed", 8.0, 0.2),
            line("rotated 4", "heavy-tailed", 8.0, 0.01),
            line("rotated 1", "heavy-tailed", 30.0, 0.5),
            line("int8", "transformer-50", 4.0, 1e-3),
        ];
        let notes: Vec<(String, String)> =
            speed(&lines).into_iter().map(|bar| (bar.name, bar.note)).collect();
        let expected = [("int8, encode", "1.80"), ("int8, decode", "1.50"), ("int8, decode and add", "1.90")];
        assert_eq!(notes, expected.map(|(name, note)| (name.to_owned(), note.to_owned())));
        let curves = loss(&lines, HEAVY, "elements");
        assert_eq!(curves.series.iter().map(|line| line.points.len()).collect::<Vec<_>>(), [2, 2, 0]);
        assert!(curves.svg().unwrap().contains("rotated blocks"));
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &lines).unwrap();
        let mut written: Vec<_> =
            std::fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap()).collect();
        written.sort_by_key(std::fs::DirEntry::file_name);
        let names: Vec<_> = written.iter().map(|file| file.file_name().into_string().unwrap()).collect();
        assert_eq!(names, ["codec-loss-transformer-50.svg", "codec-loss.svg", "codec-speed.svg"]);
    }
}
