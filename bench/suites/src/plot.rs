//! Line charts as inline SVG, coloured by the page's style so that they read on light and on dark, and as pictures that stand alone.

use anyhow::{Context, Result};
use std::fmt::Write;
use std::path::Path;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 74.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 46.0;
/// Most points drawn of a series; of longer ones every k-th stretch is drawn by its least and greatest value.
const MOST_POINTS: usize = 1200;

/// The style that charts need, for the page's `<style>`. Colours are Okabe and Ito's, lighter ones on dark; every series
/// has a dash pattern too.
pub const STYLE: &str = "
svg.chart{width:100%;height:auto;max-width:760px;display:block;margin:1rem 0}
svg.chart text{fill:var(--ink);font:12px system-ui,sans-serif}
svg.chart text.title{font-weight:600;font-size:14px}
svg.chart .grid{stroke:var(--grid);stroke-width:1}
svg.chart path{fill:none;stroke-width:1.8;stroke-linejoin:round}
svg.chart .s0{stroke:var(--s0)}
svg.chart .s1{stroke:var(--s1);stroke-dasharray:6 4}
svg.chart .s2{stroke:var(--s2);stroke-dasharray:2 3}
svg.chart .s3{stroke:var(--s3);stroke-dasharray:8 3 2 3}
svg.chart .s4{stroke:var(--s4);stroke-dasharray:1 4}
svg.chart .mark{stroke:var(--soft);stroke-width:1}
svg.chart text.mark{fill:var(--soft);stroke:none;font-size:10px}";

/// Colours that charts take from the page they stand in, for those that stand alone.
const COLOURS: &str = "svg{--ink:#222;--soft:#777;--grid:#ddd;--good:#00704f;--bad:#b00020;
--s0:#0072b2;--s1:#d55e00;--s2:#009e73;--s3:#cc79a7;--s4:#56b4e9;background:#fff}";

/// Writes a picture that stands alone into `folder`, which is made where it is missing: `name`.svg. `style` is for what `body`
/// has beside charts; `size` is its width and height.
///
/// # Errors
/// Where the folder or the file cannot be written.
pub fn write(folder: &Path, name: &str, style: &str, (width, height): (f64, f64), body: &str) -> Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"chart\" viewBox=\"0 0 {width} {height}\">\n\
         <style>{STYLE}\n{COLOURS}{style}</style>\n{body}</svg>\n"
    );
    let path = folder.join(name).with_extension("svg");
    std::fs::write(&path, svg).with_context(|| format!("cannot write {}", path.display()))
}

/// Lines that look different.
const LINES: usize = 5;

/// Values to draw as one line.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// What the legend says.
    pub name: String,
    /// In order of x. What is not finite, or not positive on a logarithmic axis, is left out.
    pub points: Vec<(f64, f64)>,
}

/// A chart of up to [`LINES`] series.
#[derive(Clone, Debug, PartialEq)]
pub struct Chart {
    /// Heading.
    pub title: String,
    /// What x is, with its unit.
    pub x: String,
    /// What y is, with its unit.
    pub y: String,
    /// Whether y is logarithmic.
    pub logarithmic: bool,
    /// The lines.
    pub series: Vec<Series>,
    /// What happened when: upright lines at their x, numbered in this order.
    pub marks: Vec<f64>,
}

/// Text as it may stand in HTML, between tags and in attributes.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            other => escaped.push(other),
        }
    }
    escaped
}

/// A scale from values to one axis, with its ticks.
#[derive(Debug)]
struct Scale {
    low: f64,
    high: f64,
    logarithmic: bool,
    ticks: Vec<f64>,
}

impl Scale {
    fn over(values: impl Iterator<Item = f64>, logarithmic: bool, from_zero: bool) -> Self {
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for value in values {
            low = low.min(value);
            high = high.max(value);
        }
        if low > high {
            (low, high) = (1.0, 2.0);
        }
        if logarithmic {
            return Self::decades(low, high);
        }
        if from_zero {
            low = low.min(0.0);
        }
        if high - low < f64::MIN_POSITIVE.max(high.abs() * 1e-12) {
            high = low + 1.0;
        }
        let step = nice_step((high - low) / 5.0);
        let (first, last) = ((low / step).floor(), (high / step).ceil());
        let count = (last - first).round().clamp(1.0, 20.0) as usize;
        let ticks: Vec<f64> = (0..=count).map(|number| (first + number as f64) * step).collect();
        Self { low: first * step, high: last * step, logarithmic, ticks }
    }

    fn decades(low: f64, high: f64) -> Self {
        let (first, last) = (low.log10().floor() as i32, high.log10().ceil() as i32);
        let last = last.max(first + 1);
        let stride = ((last - first) / 6 + 1).max(1) as usize;
        let ticks = (first..=last).step_by(stride).map(|decade| 10f64.powi(decade)).collect();
        Self { low: 10f64.powi(first), high: 10f64.powi(last), logarithmic: true, ticks }
    }

    /// 0 at the low end, 1 at the high one.
    fn place(&self, value: f64) -> f64 {
        if self.logarithmic {
            return (value.log10() - self.low.log10()) / (self.high.log10() - self.low.log10());
        }
        (value - self.low) / (self.high - self.low)
    }
}

/// 1, 2 or 5 times a power of ten, at least `step`.
fn nice_step(step: f64) -> f64 {
    let decade = 10f64.powf(step.log10().floor());
    let times = [1.0, 2.0, 5.0].into_iter().find(|times| times * decade >= step * (1.0 - 1e-9));
    times.unwrap_or(10.0) * decade
}

/// A tick's number, short.
fn number(value: f64) -> String {
    let size = value.abs();
    if size == 0.0 {
        return "0".to_owned();
    }
    if !(1e-3..1e6).contains(&size) {
        return format!("{value:.0e}");
    }
    let text = format!("{value:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

impl Chart {
    fn shown<'a>(&'a self, series: &'a Series) -> impl Iterator<Item = (f64, f64)> + 'a {
        let drawable =
            |&(x, y): &(f64, f64)| x.is_finite() && y.is_finite() && (!self.logarithmic || y > 0.0);
        series.points.iter().copied().filter(drawable)
    }

    /// Writes the chart as a picture that stands alone: `name`.svg in `folder`.
    ///
    /// # Errors
    /// Where the folder or the file cannot be written.
    pub fn write(&self, folder: &Path, name: &str) -> Result<()> {
        write(folder, name, "", (WIDTH, HEIGHT), &self.svg())
    }

    /// The chart as an `<svg>` element, without any outside resource.
    pub fn svg(&self) -> String {
        let all = || self.series.iter().flat_map(|series| self.shown(series));
        let x = Scale::over(all().map(|(x, _)| x), false, false);
        let y = Scale::over(all().map(|(_, y)| y), self.logarithmic, true);
        let mut svg = format!(
            "<svg class=\"chart\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\">\n",
            escape(&self.title)
        );
        self.axes(&mut svg, &x, &y);
        self.marks(&mut svg, &x);
        for (place, series) in self.series.iter().enumerate() {
            self.line(&mut svg, place % LINES, series, &x, &y);
        }
        svg.push_str("</svg>\n");
        svg
    }

    // Writing to a String cannot fail.
    fn axes(&self, svg: &mut String, x: &Scale, y: &Scale) {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        for tick in &y.ticks {
            let at = down(y, *tick);
            let _ = writeln!(
                svg,
                "<line class=\"grid\" x1=\"{LEFT}\" y1=\"{at:.1}\" x2=\"{right}\" y2=\"{at:.1}\"/>"
            );
            let _ = writeln!(
                svg,
                "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                LEFT - 6.0,
                at + 4.0,
                number(*tick)
            );
        }
        for tick in &x.ticks {
            let at = along(x, *tick);
            let _ = writeln!(
                svg,
                "<line class=\"grid\" x1=\"{at:.1}\" y1=\"{bottom}\" x2=\"{at:.1}\" y2=\"{}\"/>",
                bottom + 4.0
            );
            let _ = writeln!(
                svg,
                "<text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
                bottom + 18.0,
                number(*tick)
            );
        }
        let _ = writeln!(svg, "<text class=\"title\" x=\"{LEFT}\" y=\"16\">{}</text>", escape(&self.title));
        let middle = LEFT + (right - LEFT) / 2.0;
        let _ = writeln!(
            svg,
            "<text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            HEIGHT - 8.0,
            escape(&self.x)
        );
        let centre = TOP + (bottom - TOP) / 2.0;
        let _ = writeln!(
            svg,
            "<text transform=\"translate(14 {centre}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
            escape(&self.y)
        );
        for (place, series) in self.series.iter().enumerate() {
            let (start, class) = (right - 190.0, place % LINES);
            let line = TOP + 6.0 + 16.0 * place as f64;
            let _ = writeln!(svg, "<path class=\"s{class}\" d=\"M{start} {line}h26\"/>");
            let _ = writeln!(
                svg,
                "<text x=\"{}\" y=\"{}\">{}</text>",
                start + 32.0,
                line + 4.0,
                escape(&series.name)
            );
        }
    }

    fn marks(&self, svg: &mut String, x: &Scale) {
        let bottom = HEIGHT - BOTTOM;
        for (number, mark) in
            self.marks.iter().enumerate().filter(|(_, mark)| (x.low..=x.high).contains(*mark))
        {
            let at = along(x, *mark);
            let _ = writeln!(
                svg,
                "<line class=\"mark\" x1=\"{at:.1}\" y1=\"{TOP}\" x2=\"{at:.1}\" y2=\"{bottom}\"/>"
            );
            // Numbers take turns in height: marks are often close together.
            let text = TOP - 3.0 + 10.0 * (number % 3) as f64;
            let _ = writeln!(
                svg,
                "<text class=\"mark\" x=\"{:.1}\" y=\"{text}\">{}</text>",
                at + 2.0,
                number + 1
            );
        }
    }

    fn line(&self, svg: &mut String, class: usize, series: &Series, x: &Scale, y: &Scale) {
        let points: Vec<(f64, f64)> = self.shown(series).collect();
        let mut path = String::new();
        for (at, (px, py)) in thinned(&points).into_iter().enumerate() {
            let verb = if at == 0 { 'M' } else { 'L' };
            let _ = write!(path, "{verb}{:.1} {:.1}", along(x, px), down(y, py));
        }
        if !path.is_empty() {
            let name = escape(&series.name);
            let _ = writeln!(svg, "<path class=\"s{class}\" d=\"{path}\"><title>{name}</title></path>");
        }
    }
}

fn along(x: &Scale, value: f64) -> f64 {
    LEFT + x.place(value) * (WIDTH - RIGHT - LEFT)
}

fn down(y: &Scale, value: f64) -> f64 {
    HEIGHT - BOTTOM - y.place(value) * (HEIGHT - BOTTOM - TOP)
}

/// At most [`MOST_POINTS`] points that keep every peak.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    if points.len() <= MOST_POINTS {
        return points.to_vec();
    }
    let stretch = points.len().div_ceil(MOST_POINTS / 2);
    let mut kept = Vec::with_capacity(MOST_POINTS);
    for part in points.chunks(stretch) {
        let by_y = |a: &&(f64, f64), b: &&(f64, f64)| a.1.total_cmp(&b.1);
        let mut ends: Vec<(f64, f64)> =
            part.iter().min_by(by_y).into_iter().chain(part.iter().max_by(by_y)).copied().collect();
        ends.sort_by(|a, b| a.0.total_cmp(&b.0));
        ends.dedup();
        kept.extend(ends);
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(points: Vec<(f64, f64)>, logarithmic: bool) -> Chart {
        let series = vec![Series { name: "a <b>".into(), points }];
        Chart {
            title: "T & \"t\"".into(),
            x: "x".into(),
            y: "y".into(),
            logarithmic,
            series,
            marks: vec![5.0, 50.0],
        }
    }

    #[test]
    fn a_line_runs_from_corner_to_corner() {
        let svg = chart(vec![(0.0, 0.0), (5.0, 5.0), (10.0, 10.0)], false).svg();
        assert!(svg.contains("d=\"M74.0 254.0L409.0 144.0L744.0 34.0\""), "{svg}");
        assert!(
            svg.contains("x1=\"409.0\" y1=\"34\" x2=\"409.0\" y2=\"254\"") && svg.contains(">1</text>"),
            "{svg}"
        );
        assert!(
            !svg.contains("class=\"mark\" x=\"411.0\" y=\"41"),
            "what happened outside is not shown: {svg}"
        );
        assert!(svg.contains("aria-label=\"T &amp; &quot;t&quot;\"") && svg.contains("a &lt;b&gt;"), "{svg}");
    }

    #[test]
    fn a_logarithmic_axis_has_decades() {
        let svg = chart(vec![(0.0, 0.0), (1.0, 1.0), (2.0, f64::NAN), (3.0, 100.0)], true).svg();
        assert!(svg.contains("d=\"M74.0 254.0L744.0 34.0\""), "{svg}");
        for tick in [">1<", ">10<", ">100<"] {
            assert!(svg.contains(tick), "{svg}");
        }
        assert!(!svg.contains("NaN"));
    }

    #[test]
    fn nothing_and_one_value_are_drawn_without_nonsense() {
        for points in [vec![], vec![(3.0, 3.0)], vec![(1.0, 0.0), (2.0, 0.0)]] {
            for logarithmic in [false, true] {
                let svg = chart(points.clone(), logarithmic).svg();
                assert!(!svg.contains("NaN") && !svg.contains("inf"), "{points:?}: {svg}");
            }
        }
    }

    #[test]
    fn long_series_are_thinned_and_keep_their_peak() {
        let mut points: Vec<(f64, f64)> = (0..100_000).map(|x| (f64::from(x), 1.0)).collect();
        points[54_321].1 = 9.0;
        let kept = thinned(&points);
        assert!(kept.len() <= MOST_POINTS && kept.contains(&(54_321.0, 9.0)));
        assert!(kept.is_sorted_by(|a, b| a.0 < b.0));
    }

    #[test]
    fn steps_are_nice() {
        for (step, nice) in [(0.11, 0.2), (1.0, 1.0), (3.0, 5.0), (6.0, 10.0), (0.02, 0.02)] {
            assert!((nice_step(step) / nice - 1.0).abs() < 1e-9, "{step} gave {}", nice_step(step));
        }
        assert_eq!((number(0.0), number(0.25), number(1e-5)), ("0".into(), "0.25".into(), "1e-5".into()));
    }
}
