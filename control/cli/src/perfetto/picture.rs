//! A timeline as a picture (SVG), for the operator's guide: rows as Perfetto's window shows them.

use super::track::{Track, lanes};
use harmonaize_planner::Nanos;
use std::fmt::Write;
use std::time::Duration;

const LEFT_MARGIN: f64 = 250.0;
const PLOT_WIDTH: f64 = 760.0;
const ROW_HEIGHT: f64 = 19.0;
const COLOURS: [&str; 6] = ["#8fb8de", "#9ad0a5", "#e3c98b", "#d8a6c0", "#b7aee0", "#8fd0cf"];

/// A rectangle's left edge, right edge and middle, for arrows.
type SliceExtent = (f64, f64, f64);

struct Picture {
    first: Nanos,
    last: Nanos,
    line: usize,
    shapes: String,
    joined: std::collections::BTreeMap<u64, Vec<SliceExtent>>,
}

/// The picture.
pub(super) fn svg(tracks: &[Track], title: &str) -> String {
    let mut times = Vec::new();
    tracks.iter().for_each(|track| gather(track, &mut times));
    let (first, last) = (*times.iter().min().unwrap(), *times.iter().max().unwrap());
    let mut picture = Picture { first, last, line: 1, shapes: String::new(), joined: Default::default() };
    tracks.iter().for_each(|track| picture.track(track, 0));
    let arrows = picture.arrows();
    let (width, height) = (LEFT_MARGIN + PLOT_WIDTH + 10.0, picture.line as f64 * ROW_HEIGHT + 8.0);
    let mut axis = String::new();
    let whole = last.since(first).as_millis() as u64;
    for millis in (0..=whole).step_by(10) {
        let x = picture.x(first.after(Duration::from_millis(millis)));
        writeln!(
            axis,
            "<text x=\"{x:.1}\" y=\"14\" fill=\"#6b7280\">+{millis} ms</text>\
             <path d=\"M{x:.1} 18V{height}\" stroke=\"#e5e7eb\"/>"
        )
        .unwrap();
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
         height=\"{height}\" role=\"img\">\n<title>{title}</title>\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>\n\
         <g font-family=\"system-ui,Helvetica,Arial,sans-serif\" font-size=\"11\">\n{axis}{}{arrows}</g>\n</svg>\n",
        picture.shapes
    )
}

fn gather(track: &Track, times: &mut Vec<Nanos>) {
    times.extend(track.slices.iter().flat_map(|slice| [slice.begin, slice.end]));
    track.tracks.iter().for_each(|beneath| gather(beneath, times));
}

impl Picture {
    fn x(&self, time: Nanos) -> f64 {
        let nanos = |until: Nanos| until.since(self.first).as_nanos() as f64;
        let part = nanos(time) / nanos(self.last);
        LEFT_MARGIN + part.min(1.0) * PLOT_WIDTH
    }

    fn track(&mut self, track: &Track, depth: usize) {
        let lanes = lanes(&track.slices);
        let y = self.line as f64 * ROW_HEIGHT;
        let (x, weight) = (6 + depth * 12, if depth == 0 { " font-weight=\"bold\"" } else { "" });
        if depth == 0 {
            let width = LEFT_MARGIN + PLOT_WIDTH + 10.0;
            writeln!(
                self.shapes,
                "<rect y=\"{y}\" width=\"{width}\" height=\"{ROW_HEIGHT}\" fill=\"#eef1f5\"/>"
            )
            .unwrap();
        }
        let name = track.name.replace('>', "&gt;");
        writeln!(self.shapes, "<text x=\"{x}\" y=\"{}\"{weight}>{name}</text>", y + 13.0).unwrap();
        for lane in &lanes {
            let y = self.line as f64 * ROW_HEIGHT;
            for slice in lane {
                self.slice(slice, y);
            }
            self.line += 1;
        }
        for moment in &track.moments {
            let x = self.x(moment.time);
            writeln!(
                self.shapes,
                "<path d=\"M{x:.1} {}l4 8h-8z\" fill=\"#c0392b\"><title>{}</title></path>",
                y + 4.0,
                moment.name
            )
            .unwrap();
        }
        if let Some(counter) = &track.counter {
            let top = counter.values.iter().map(|(_, value)| *value).max().unwrap_or(1).max(1) as f64;
            let mut path = format!("M{LEFT_MARGIN} {}", y + ROW_HEIGHT - 2.0);
            for (time, value) in &counter.values {
                let height = *value as f64 / top * (ROW_HEIGHT - 5.0);
                write!(path, "H{:.1}V{:.1}", self.x(*time), y + ROW_HEIGHT - 2.0 - height).unwrap();
            }
            let (end, base) = (LEFT_MARGIN + PLOT_WIDTH, y + ROW_HEIGHT - 2.0);
            writeln!(self.shapes, "<path d=\"{path}H{end}V{base}z\" fill=\"#c7d7ea\" stroke=\"#5b84b1\"/>")
                .unwrap();
        }
        if lanes.is_empty() {
            self.line += 1;
        }
        for beneath in &track.tracks {
            self.track(beneath, depth + 1);
        }
    }

    fn slice(&mut self, slice: &super::track::Slice, y: f64) {
        let (left, right) = (self.x(slice.begin), self.x(slice.end));
        let wide = (right - left).max(1.0);
        let hash =
            slice.name.bytes().fold(0_usize, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
        let fill = COLOURS[hash % COLOURS.len()];
        writeln!(
            self.shapes,
            "<rect x=\"{left:.1}\" y=\"{}\" width=\"{wide:.1}\" height=\"{}\" rx=\"2\" fill=\"{fill}\"/>",
            y + 2.0,
            ROW_HEIGHT - 4.0
        )
        .unwrap();
        if wide > slice.name.len() as f64 * 7.2 {
            writeln!(self.shapes, "<text x=\"{:.1}\" y=\"{}\">{}</text>", left + 3.0, y + 13.0, slice.name)
                .unwrap();
        }
        if let Some(number) = slice.joined {
            self.joined.entry(number).or_default().push((left, right, y + ROW_HEIGHT / 2.0));
        }
    }

    fn arrows(&self) -> String {
        let mut arrows = String::new();
        for places in self.joined.values() {
            for pair in places.windows(2) {
                let [(from, _, above), (to, _, below)] = pair else { continue };
                writeln!(
                    arrows,
                    "<path d=\"M{from:.1} {above}C{:.1} {above} {:.1} {below} {to:.1} {below}\" fill=\"none\" \
                     stroke=\"#4b5563\" stroke-opacity=\"0.45\"/>",
                    from - 14.0,
                    to - 14.0
                )
                .unwrap();
            }
        }
        arrows
    }
}
