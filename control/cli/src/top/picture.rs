//! A screen of cells as a picture (SVG), for the operator's guide.

use ratatui::buffer::Buffer;
use ratatui::style::{Color, Modifier};
use std::fmt::Write;

const WIDE: usize = 8;
const HIGH: usize = 18;
const EDGE: usize = 10;

/// The picture.
pub(super) fn svg(buffer: &Buffer, title: &str) -> String {
    let (columns, rows) = (usize::from(buffer.area.width), usize::from(buffer.area.height));
    let (width, height) = (columns * WIDE + 2 * EDGE, rows * HIGH + 2 * EDGE);
    let mut picture = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
         height=\"{height}\" role=\"img\">\n<title>{title}</title>\n\
         <rect width=\"{width}\" height=\"{height}\" rx=\"6\" fill=\"#16181d\"/>\n\
         <g font-family=\"ui-monospace,DejaVu Sans Mono,Menlo,Consolas,monospace\" font-size=\"13\">\n"
    );
    for (row, cells) in buffer.content.chunks(columns).enumerate() {
        for run in cells.chunk_by(|one, next| (one.fg, one.modifier) == (next.fg, next.modifier)) {
            let first = &run[0];
            let start = (run.as_ptr() as usize - cells.as_ptr() as usize) / size_of_val(first);
            let (x, y) = (EDGE + start * WIDE, EDGE + row * HIGH);
            let reversed = first.modifier.contains(Modifier::REVERSED);
            let colour = colour(first.fg);
            let (ink, paper) = if reversed { ("#16181d", Some(colour)) } else { (colour, None) };
            if let Some(paper) = paper {
                let wide = run.len() * WIDE;
                writeln!(
                    picture,
                    "<rect x=\"{x}\" y=\"{y}\" width=\"{wide}\" height=\"{HIGH}\" fill=\"{paper}\"/>"
                )
                .unwrap();
            }
            let weight = if first.modifier.contains(Modifier::BOLD) { " font-weight=\"bold\"" } else { "" };
            let line = match first.modifier.contains(Modifier::UNDERLINED) {
                true => " text-decoration=\"underline\"",
                false => "",
            };
            // Word by word, so that columns line up in any font.
            let words = run.iter().enumerate().collect::<Vec<_>>();
            for word in words.split(|(_, cell)| cell.symbol() == " ").filter(|word| !word.is_empty()) {
                let x = x + word[0].0 * WIDE;
                let text: String = word.iter().map(|(_, cell)| cell.symbol()).collect();
                let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
                let (base, wide) = (y + HIGH - 5, word.len() * WIDE);
                writeln!(
                    picture,
                    "<text x=\"{x}\" y=\"{base}\" textLength=\"{wide}\" fill=\"{ink}\"{weight}{line}>{text}</text>"
                )
                .unwrap();
            }
        }
    }
    picture + "</g>\n</svg>\n"
}

fn colour(colour: Color) -> &'static str {
    match colour {
        Color::Green => "#7ec77f",
        Color::Yellow => "#e3c06b",
        Color::Red => "#ef7070",
        Color::Cyan => "#6fc1d6",
        Color::DarkGray => "#7d838f",
        _ => "#d7dae0",
    }
}
