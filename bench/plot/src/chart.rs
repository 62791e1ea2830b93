//! Line charts and lanes of bars as SVG, in a page or as pictures that stand alone.

use anyhow::{Context, Result};
use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;
use std::path::Path;

/// Pixels of a chart.
pub(crate) const WIDTH: u32 = 760;
pub(crate) const HEIGHT: u32 = 300;
/// Most points drawn of a series; of longer ones every k-th stretch is drawn by its least and greatest value.
const MOST_POINTS: usize = 1200;
/// Colours of lines, which are Okabe and Ito's. Each has a dash and a gap in pixels; a gap of 0 is a solid
/// line.
const LINES: [(RGBColor, u32, u32); 10] = [
    (RGBColor(0, 114, 178), 0, 0),
    (RGBColor(213, 94, 0), 6, 4),
    (RGBColor(0, 158, 115), 2, 3),
    (RGBColor(204, 121, 167), 8, 3),
    (RGBColor(86, 180, 233), 1, 4),
    (RGBColor(230, 159, 0), 10, 4),
    (RGBColor(0, 0, 0), 3, 3),
    (RGBColor(213, 94, 0), 1, 3),
    (RGBColor(0, 158, 115), 8, 6),
    (RGBColor(119, 119, 119), 4, 8),
];
const SOFT: RGBColor = RGBColor(119, 119, 119);
const FONT: (&str, u32) = ("sans-serif", 12);

/// Where charts are drawn.
type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Values to draw as one line.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// The name in the legend.
    pub name: String,
    /// In order of x. The line is broken where y is no number. What is infinite, or not positive on a logarithmic axis, is left out.
    pub points: Vec<(f64, f64)>,
}

/// The scales of a chart's axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axes {
    /// Both linear.
    Linear,
    /// x linear, y logarithmic.
    LogY,
    /// Both logarithmic, where x is a size in bytes; its ticks are powers of 4.
    Sizes,
}

/// A line chart.
#[derive(Clone, Debug, PartialEq)]
pub struct Chart {
    /// The heading.
    pub title: String,
    /// What x is, with its unit.
    pub x: String,
    /// What y is, with its unit.
    pub y: String,
    /// Their scales.
    pub axes: Axes,
    /// The lines.
    pub series: Vec<Series>,
    /// The x of what happened: upright lines, numbered in this order.
    pub marks: Vec<f64>,
}

/// A line of a picture of lanes: a name, bars or a dot along a scale, and a note behind.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Lane {
    /// The name, before the scale.
    pub name: String,
    /// The note, behind the scale.
    pub note: String,
    /// Whether it is coloured as good.
    pub good: bool,
    /// A bar from one value to another.
    pub bar: Option<(f64, f64)>,
    /// A dot.
    pub dot: Option<f64>,
    /// An upright line.
    pub mark: Option<f64>,
}

/// The scale of a picture of lanes, with named ticks. Values beyond its ends are drawn there.
#[derive(Clone, Copy, Debug)]
pub struct Scale<'a> {
    /// Its ends.
    pub ends: (f64, f64),
    /// Whether it is logarithmic.
    pub logarithmic: bool,
    /// Values with their names.
    pub ticks: &'a [(f64, &'a str)],
}

/// Draws an SVG of that size.
fn drawn((width, height): (u32, u32), draw: impl FnOnce(&Area<'_>) -> Result<()>) -> Result<String> {
    let mut svg = String::new();
    let area = SVGBackend::with_string(&mut svg, (width, height)).into_drawing_area();
    area.fill(&WHITE)?;
    draw(&area)?;
    area.present()?;
    drop(area);
    Ok(svg)
}

/// Writes a picture into `folder`, which is made where it is missing: `name`.svg.
pub(crate) fn write(folder: &Path, name: &str, svg: &str) -> Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let path = folder.join(name).with_extension("svg");
    std::fs::write(&path, svg).with_context(|| format!("cannot write {}", path.display()))
}

/// A tick's number, short.
fn number(value: f64) -> String {
    let size = value.abs();
    match size {
        0.0 => "0".to_owned(),
        _ if !(1e-3..1e6).contains(&size) => format!("{value:.0e}"),
        _ => format!("{value:.4}").trim_end_matches('0').trim_end_matches('.').to_owned(),
    }
}

/// A size in bytes, short.
fn size(bytes: f64) -> String {
    let units = [(1u64 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")];
    let unit = units.into_iter().find(|(unit, _)| bytes.round() >= *unit as f64);
    let (unit, name) = unit.unwrap_or((1, ""));
    format!("{}{name}", number((bytes / unit as f64 * 100.0).round() / 100.0))
}

impl Chart {
    /// Those of the points that can be shown.
    fn shown<'a>(&'a self, points: &'a [(f64, f64)]) -> impl Iterator<Item = (f64, f64)> + 'a {
        let drawable = |&(x, y): &(f64, f64)| {
            x.is_finite()
                && y.is_finite()
                && (self.axes == Axes::Linear || y > 0.0)
                && (self.axes != Axes::Sizes || x > 0.0)
        };
        points.iter().copied().filter(drawable)
    }

    /// Whether no line has a point that can be shown.
    pub(crate) fn is_empty(&self) -> bool {
        self.series.iter().all(|series| self.shown(&series.points).next().is_none())
    }

    /// Writes the chart as a picture that stands alone: `name`.svg in `folder`.
    ///
    /// # Errors
    /// Where the folder or the file cannot be written.
    pub fn write(&self, folder: &Path, name: &str) -> Result<()> {
        write(folder, name, &self.svg()?)
    }

    /// The chart as an `<svg>` element.
    ///
    /// # Errors
    /// Where it cannot be drawn.
    pub fn svg(&self) -> Result<String> {
        let all = || self.series.iter().flat_map(|series| self.shown(&series.points));
        let [x, y] = [all().map(|(x, _)| x).collect(), all().map(|(_, y)| y).collect::<Vec<f64>>()].map(ends);
        let logarithmic = (y.0..y.1 * 1.01).log_scale();
        drawn((WIDTH, HEIGHT), |area| match self.axes {
            Axes::Linear => self.draw(area, x, x.0..x.1, y.0.min(0.0)..y.1, number),
            Axes::LogY => self.draw(area, x, x.0..x.1, logarithmic, number),
            // A little more at either end, so that the least size has its tick whatever was rounded.
            Axes::Sizes => {
                self.draw(area, x, (x.0 * 0.99..x.1 * 1.01).log_scale().base(4.0), logarithmic, size)
            }
        })
    }

    /// `ends` are those of x, `name` names its ticks.
    fn draw<X, Y>(&self, area: &Area<'_>, ends: (f64, f64), x: X, y: Y, name: fn(f64) -> String) -> Result<()>
    where
        X: AsRangedCoord<Value = f64>,
        X::CoordDescType: ValueFormatter<f64>,
        Y: AsRangedCoord<Value = f64>,
        Y::CoordDescType: ValueFormatter<f64>,
    {
        let mut chart = ChartBuilder::on(area)
            .caption(&self.title, ("sans-serif", 14))
            .margin(8)
            .x_label_area_size(38)
            .y_label_area_size(64)
            .build_cartesian_2d(x, y)?;
        let (name, format) = (|value: &f64| name(*value), |value: &f64| number(*value));
        let mut mesh = chart.configure_mesh();
        mesh.disable_x_mesh().light_line_style(TRANSPARENT).label_style(FONT);
        mesh.x_labels(if self.axes == Axes::Sizes { 12 } else { 8 })
            .y_labels(6)
            .x_label_formatter(&name)
            .y_label_formatter(&format);
        mesh.x_desc(&self.x).y_desc(&self.y).draw()?;
        for (series, (colour, dash, gap)) in self.series.iter().zip(LINES.iter().cycle()) {
            let style = colour.stroke_width(2);
            let mut name = Some(&series.name);
            for points in series.points.split(|(_, y)| y.is_nan()) {
                let points = thinned(&self.shown(points).collect::<Vec<_>>());
                let line = match gap {
                    0 => chart.draw_series(LineSeries::new(points, style))?,
                    _ => chart.draw_series(DashedLineSeries::new(points, *dash, *gap, style))?,
                };
                if let Some(name) = name.take() {
                    line.label(name).legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], style));
                }
            }
        }
        let (_, height) = area.dim_in_pixel();
        for (place, mark) in self.marks.iter().enumerate().filter(|(_, at)| (ends.0..=ends.1).contains(*at)) {
            let at = chart.as_coord_spec().translate(&(*mark, f64::MAX)).0;
            area.draw(&PathElement::new([(at, 30), (at, height as i32 - 46)], SOFT))?;
            // Numbers take turns in height: marks are often close together.
            let high = 30 + 10 * (place % 3) as i32;
            area.draw(&Text::new((place + 1).to_string(), (at + 2, high), FONT.into_font().color(&SOFT)))?;
        }
        chart.configure_series_labels().background_style(WHITE.mix(0.8)).label_font(FONT).draw()?;
        Ok(())
    }
}

/// Least and greatest of the values, apart from each other.
fn ends(values: Vec<f64>) -> (f64, f64) {
    let (low, high) = values
        .iter()
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), value| (a.min(*value), b.max(*value)));
    match low <= high {
        false => (1.0, 2.0),
        true if high - low < f64::MIN_POSITIVE.max(high.abs() * 1e-12) => (low, low + 1.0),
        true => (low, high),
    }
}

/// Writes a picture of lanes into `folder`: `name`.svg.
///
/// # Errors
/// Where it cannot be drawn or written.
pub fn write_lanes(folder: &Path, name: &str, title: &str, scale: Scale<'_>, lanes: &[Lane]) -> Result<()> {
    const LANE: i32 = 20;
    const TOP: i32 = 50;
    const LEFT: i32 = 460;
    const RIGHT: i32 = 800;
    let (low, high) = scale.ends;
    let of = |value: f64| if scale.logarithmic { value.log2() } else { value };
    let along = |value: f64| {
        let share = (of(value.clamp(low, high)) - of(low)) / (of(high) - of(low));
        LEFT + (share * f64::from(RIGHT - LEFT)).round() as i32
    };
    let bottom = TOP + LANE * lanes.len() as i32;
    let svg = drawn((1000, bottom as u32 + 10), |area| {
        area.draw(&Text::new(title, (8, 6), ("sans-serif", 14)))?;
        for (value, name) in scale.ticks {
            let at = along(*value);
            area.draw(&PathElement::new([(at, TOP - 6), (at, bottom)], SOFT.mix(0.4)))?;
            area.draw(&Text::new(*name, (at - 3 * name.len() as i32, TOP - 20), FONT))?;
        }
        for (place, lane) in lanes.iter().enumerate() {
            let (top, middle) = (TOP + LANE * place as i32, TOP + LANE * place as i32 + LANE / 2);
            let colour = if lane.good { RGBColor(0, 112, 79) } else { RGBColor(176, 0, 32) };
            area.draw(&Text::new(lane.name.as_str(), (8, top + 4), FONT))?;
            area.draw(&Text::new(lane.note.as_str(), (RIGHT + 8, top + 4), FONT.into_font().color(&colour)))?;
            if let Some((from, to)) = lane.bar {
                let corners = [(along(from), middle - 3), (along(to), middle + 3)];
                area.draw(&Rectangle::new(corners, colour.mix(0.6).filled()))?;
            }
            if let Some(dot) = lane.dot {
                area.draw(&Circle::new((along(dot), middle), 4, colour.filled()))?;
            }
            if let Some(mark) = lane.mark {
                area.draw(&PathElement::new([(along(mark), top + 2), (along(mark), top + LANE - 2)], BLACK))?;
            }
        }
        Ok(())
    })?;
    write(folder, name, &svg)
}

/// At most [`MOST_POINTS`] points that keep every peak.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    if points.len() <= MOST_POINTS {
        return points.to_vec();
    }
    let stretch = points.len().div_ceil(MOST_POINTS / 2);
    let by_y = |a: &&(f64, f64), b: &&(f64, f64)| a.1.total_cmp(&b.1);
    let extremes = |part: &[(f64, f64)]| {
        let both = part.iter().min_by(by_y).into_iter().chain(part.iter().max_by(by_y));
        let mut ends: Vec<(f64, f64)> = both.copied().collect();
        ends.sort_by(|a, b| a.0.total_cmp(&b.0));
        ends.dedup();
        ends
    };
    points.chunks(stretch).flat_map(extremes).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(points: Vec<(f64, f64)>, axes: Axes) -> Chart {
        let series = vec![Series { name: "a <b>".into(), points }];
        let [x, y] = ["x", "y"].map(str::to_owned);
        Chart { title: "T & \"t\"".into(), x, y, axes, series, marks: vec![5.0, 50.0] }
    }

    #[test]
    fn a_line_is_drawn_with_its_marks() {
        let svg = chart(vec![(0.0, 0.0), (5.0, 5.0), (10.0, 10.0)], Axes::Linear).svg().unwrap();
        assert!(svg.contains("a &lt;b&gt;") && svg.contains("T &amp; "), "{svg}");
        let numbered = |number: &str| svg.lines().filter(|line| line.trim() == number).count();
        assert_eq!(numbered("1"), 1, "{svg}");
        // The tick of y, and no mark: what happened outside is not shown.
        assert!(numbered("2") <= 2, "{svg}");
    }

    #[test]
    fn a_logarithmic_axis_leaves_out_what_it_cannot_show() {
        let svg =
            chart(vec![(0.0, 0.0), (1.0, 1.0), (2.0, f64::NAN), (3.0, 100.0)], Axes::LogY).svg().unwrap();
        assert!(!svg.contains("NaN"));
        for tick in ["1", "10", "100"] {
            assert!(svg.lines().any(|line| line.trim() == tick), "{tick}: {svg}");
        }
    }

    #[test]
    fn a_line_is_broken_where_there_is_no_number() {
        let lines = |middle: f64| {
            let points = vec![(0.0, 1.0), (1.0, 1.0), (2.0, middle), (3.0, 1.0), (4.0, 1.0)];
            let svg = Chart { marks: Vec::new(), ..chart(points, Axes::Linear) }.svg().unwrap();
            assert_eq!(svg.matches("a &lt;b&gt;").count(), 1, "one name: {svg}");
            svg.matches("stroke=\"#0072B2\" stroke-width=\"2\"").count()
        };
        // And that of the legend.
        assert_eq!((lines(1.0), lines(f64::NAN)), (2, 3));
    }

    #[test]
    fn sizes_have_ticks_at_powers_of_four() {
        let svg =
            chart(vec![(1024.0, 1.0), (65536.0, 10.0), (268435456.0, 900.0)], Axes::Sizes).svg().unwrap();
        for tick in ["1K", "4K", "64K", "1M", "256M", "10", "100"] {
            assert!(svg.lines().any(|line| line.trim() == tick), "{tick}: {svg}");
        }
        assert_eq!((size(8.0), size(1008.0), size(1.5e6)), ("8".into(), "1008".into(), "1.43M".into()));
    }

    #[test]
    fn nothing_and_one_value_are_drawn_without_nonsense() {
        for points in [vec![], vec![(3.0, 3.0)], vec![(1.0, 0.0), (2.0, 0.0)]] {
            for axes in [Axes::Linear, Axes::LogY, Axes::Sizes] {
                let svg = chart(points.clone(), axes).svg().unwrap();
                assert!(!svg.contains("NaN") && !svg.contains("inf"), "{points:?}: {svg}");
            }
        }
    }

    #[test]
    fn lanes_end_where_the_scale_does() {
        let folder = tempfile::tempdir().unwrap();
        let scale = Scale { ends: (0.0, 2.0), logarithmic: false, ticks: &[(1.0, "one")] };
        let lane = Lane { name: "a <b>".into(), note: "n".into(), bar: Some((0.0, 9.0)), ..Lane::default() };
        let half =
            Lane { good: true, bar: Some((0.0, 1.0)), dot: Some(1.0), mark: Some(0.5), ..Lane::default() };
        write_lanes(&folder.path().join("new"), "p", "T", scale, &[lane, half]).unwrap();
        let svg = std::fs::read_to_string(folder.path().join("new/p.svg")).unwrap();
        for drawn in ["width=\"340\"", "width=\"170\"", "cx=\"630\"", "a &lt;b&gt;"] {
            assert!(svg.contains(drawn), "{drawn}: {svg}");
        }
    }

    #[test]
    fn long_series_are_thinned_and_keep_their_peak() {
        let mut points: Vec<(f64, f64)> = (0..100_000).map(|x| (f64::from(x), 1.0)).collect();
        points[54_321].1 = 9.0;
        let kept = thinned(&points);
        assert!(kept.len() <= MOST_POINTS && kept.contains(&(54_321.0, 9.0)));
        assert!(kept.is_sorted_by(|a, b| a.0 < b.0));
        assert_eq!((number(0.0), number(0.25), number(1e-5)), ("0".into(), "0.25".into(), "1e-5".into()));
    }
}
