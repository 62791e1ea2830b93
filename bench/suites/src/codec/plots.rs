//! The suite's figures: speed beside memcpy, and what is lost over the bits that are sent.

use super::Measured;
use crate::plot::{self, Chart, Series, escape};
use anyhow::Result;
use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;

const STYLE: &str = "\n.bar0{fill:var(--s0)}.bar1{fill:var(--s1)}.bar2{fill:var(--s2)}";

const HEAVY: &str = "heavy-tailed";
/// Tensors that are always measured.
const SYNTHETIC: [&str; 3] = ["gaussian", HEAVY, "sparse"];

/// Writes `codec-speed.svg` and `codec-loss.svg` into `folder`, and a `codec-loss-TENSOR.svg` for each tensor that was given.
pub(super) fn write(folder: &Path, lines: &[Measured]) -> Result<()> {
    let (size, bars) = speed(lines);
    plot::write(folder, "codec-speed", STYLE, size, &bars)?;
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
        logarithmic: true,
        series: series.into(),
        marks: Vec::new(),
    }
}

/// Bars in times of memcpy, three a codec, of normal elements; and the picture's size.
fn speed(lines: &[Measured]) -> ((f64, f64), String) {
    const UNIT: f64 = 220.0;
    const LEFT: f64 = 130.0;
    let lines: Vec<&Measured> = lines.iter().filter(|line| line.tensor == "gaussian").collect();
    let height = 60 + 44 * lines.len();
    let title = "Speed by bytes of f32, times memcpy's, one core";
    let mut svg = format!("<text class=\"title\" x=\"10\" y=\"18\">{title}</text>\n");
    for (place, name) in ["encode", "decode", "decode and add"].iter().enumerate() {
        let x = 10 + 120 * place;
        // Writing to a String cannot fail.
        let _ = writeln!(svg, "<rect class=\"bar{place}\" x=\"{x}\" y=\"28\" width=\"10\" height=\"10\"/>");
        let _ = writeln!(svg, "<text x=\"{}\" y=\"38\">{name}</text>", x + 15);
    }
    for (row, line) in lines.iter().enumerate() {
        let top = 50 + 44 * row;
        let _ = writeln!(svg, "<text x=\"10\" y=\"{}\">{}</text>", top + 22, escape(&line.codec));
        for (place, speed) in [line.encode, line.decode, line.decode_add].iter().enumerate() {
            let (times, y) = (speed / line.memcpy, top + 12 * place);
            let width = (times * UNIT).clamp(0.0, 560.0);
            let _ = writeln!(
                svg,
                "<rect class=\"bar{place}\" x=\"{LEFT}\" y=\"{y}\" width=\"{width:.1}\" height=\"10\"/>"
            );
            let _ = writeln!(svg, "<text x=\"{:.1}\" y=\"{}\">{times:.2}</text>", LEFT + width + 4.0, y + 10);
        }
    }
    let one = LEFT + UNIT;
    let _ =
        writeln!(svg, "<line class=\"mark\" x1=\"{one}\" y1=\"46\" x2=\"{one}\" y2=\"{}\"/>", height - 10);
    ((760.0, height as f64), svg)
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
        let (_, bars) = speed(&lines);
        assert!([">1.80<", ">1.50<", ">1.90<", ">int8<"].iter().all(|text| bars.contains(text)), "{bars}");
        assert_eq!(bars.matches("<rect class=\"bar0\"").count(), 2);
        let curves = loss(&lines, HEAVY, "elements").svg();
        assert!(curves.contains("rotated blocks") && curves.matches("<path").count() >= 2, "{curves}");
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &lines).unwrap();
        let mut written: Vec<_> =
            std::fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap()).collect();
        written.sort_by_key(std::fs::DirEntry::file_name);
        let names: Vec<_> = written.iter().map(|file| file.file_name().into_string().unwrap()).collect();
        assert_eq!(names, ["codec-loss-transformer-50.svg", "codec-loss.svg", "codec-speed.svg"]);
    }
}
