//! What rank 0 prints and writes: nccl-tests' text, rows as comma-separated values, all as JSON, and a page.

use crate::arguments::Arguments;
use crate::page::{Environment, page};
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

/// One size one way: microseconds, and GB/s of 1e9 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Place {
    /// An operation in the mean, over the ranks as `-a` says.
    pub(crate) time_us: f64,
    /// Bytes of the larger tensor over the time.
    pub(crate) algbw: f64,
    /// The same by what the slowest link carries.
    pub(crate) busbw: f64,
    /// Elements that were wrong, over all ranks; none where nobody checked.
    pub(crate) wrong: Option<u64>,
    /// Greatest of the ranks' medians of single operations.
    pub(crate) p50_us: f64,
    /// Greatest of the ranks' 99th percentiles.
    pub(crate) p99_us: f64,
    /// The longest operation.
    pub(crate) max_us: f64,
    /// The rank whose mean is the greatest.
    pub(crate) slowest_rank: usize,
    /// Its mean.
    pub(crate) slowest_us: f64,
}

/// One size.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    /// Bytes of a rank's larger tensor.
    pub(crate) bytes: u64,
    /// Elements of a block.
    pub(crate) count: u64,
    pub(crate) type_name: String,
    pub(crate) op_name: String,
    /// -1 where the collective has none.
    pub(crate) root: i64,
    pub(crate) out_of_place: Option<Place>,
    pub(crate) in_place: Option<Place>,
}

const CSV: &str = "size,count,type,redop,root,place,time_us,algbw_gbs,busbw_gbs,wrong,p50_us,p99_us,max_us,slowest_rank,slowest_us";

/// The report of one run.
pub(crate) struct Report {
    percentiles: bool,
    csv: Option<File>,
    /// None: standard output.
    json: Option<(Option<File>, Value)>,
    html: Option<(File, Environment)>,
    rows: Vec<Row>,
    busbw: (f64, u32),
    wrong: u64,
    program: String,
}

impl Report {
    /// Prints the heading. `lines` are the ranks' about themselves.
    pub(crate) fn begin(arguments: &Arguments, ranks: u32, lines: &[String]) -> Result<Self> {
        let create =
            |path: &Path| File::create(path).with_context(|| format!("cannot write {}", path.display()));
        let program = format!("{}_perf", arguments.collective.name);
        let mut csv = arguments.csv.as_deref().map(create).transpose()?;
        if let Some(csv) = &mut csv {
            writeln!(csv, "{CSV}")?;
        }
        let config = json!({
            "program": program,
            "version": harmonaize_program::version(),
            "ranks": ranks,
            "minimum_bytes": arguments.min.0,
            "maximum_bytes": arguments.max.0,
            "warmup_iters": arguments.warmup,
            "iterations": arguments.iters,
            "validation": arguments.check,
            "blocking_collectives": arguments.blocking,
            "devices": lines,
        });
        let file = |path| if path == Path::new("-") { Ok(None) } else { create(path).map(Some) };
        let json = arguments.json.as_deref().map(file).transpose()?.map(|file| (file, config));
        let html = arguments.html.as_deref().map(create).transpose()?;
        let html = html.map(|file| (file, Environment::here(arguments, &program, ranks, lines)));
        print(&heading(arguments, &program, lines))?;
        let percentiles = arguments.percentiles;
        Ok(Self { percentiles, csv, json, html, rows: Vec::new(), busbw: (0.0, 0), wrong: 0, program })
    }

    /// Prints a row.
    pub(crate) fn row(&mut self, row: Row) -> Result<()> {
        print(&text(&row, self.percentiles))?;
        for (name, place) in [("out_of_place", &row.out_of_place), ("in_place", &row.in_place)] {
            let Some(place) = place else { continue };
            self.busbw = (self.busbw.0 + place.busbw, self.busbw.1 + 1);
            self.wrong += u64::from(place.wrong.unwrap_or(0) > 0);
            if let Some(csv) = &mut self.csv {
                writeln!(csv, "{}", comma_separated(&row, name, place))?;
            }
        }
        self.rows.push(row);
        Ok(())
    }

    /// Prints the summary; a failure where a result was wrong.
    pub(crate) fn end(self) -> Result<ExitCode> {
        let average = self.busbw.0 / f64::from(self.busbw.1.max(1));
        let outcome = if self.wrong > 0 { "FAILED" } else { "OK" };
        print(&format!(
            "# {:<20} : {} {outcome}\n# {:<20} : {} \n#\n# Collective test concluded: {}\n",
            "Out of bounds values",
            self.wrong,
            "Avg bus bandwidth",
            general(average),
            self.program
        ))?;
        if let Some((file, config)) = self.json {
            let all = json!({
                "config": config,
                "results": self.rows.iter().map(object).collect::<Vec<_>>(),
                "out_of_bounds": { "count": self.wrong, "okay": self.wrong == 0 },
                "average_bus_bandwidth": { "bandwidth": average },
            });
            match file {
                Some(mut file) => writeln!(file, "{}", serde_json::to_string_pretty(&all)?)?,
                None => print(&format!("{all}\n"))?,
            }
        }
        if let Some((mut file, environment)) = self.html {
            file.write_all(page(&environment, &self.rows, self.wrong)?.as_bytes())?;
        }
        Ok(if self.wrong > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    }
}

fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

fn heading(arguments: &Arguments, program: &str, lines: &[String]) -> String {
    let (step, kind) =
        if arguments.factor > 1 { (arguments.factor, "factor") } else { (arguments.step.0, "bytes") };
    let mut text = format!(
        "# harmonaize-perf version {}, flags and columns of nccl-tests 2.19.6\n# Collective test starting: {program}\n\
         # nThread 1 nGpus 1 minBytes {} maxBytes {} step: {step}({kind}) warmup iters: {} iters: {} agg iters: 1 \
         validation: {} graph: 0 unalign: 0\n",
        harmonaize_program::version(),
        arguments.min.0,
        arguments.max.0,
        arguments.warmup,
        arguments.iters,
        arguments.check
    );
    text.push_str(match arguments.blocking {
        1 => "# Blocking Enabled: wait and barrier after each inner iteration (-m) \n",
        2 => "# Blocking Enabled: wait after each inner iteration (-m), no barrier \n",
        3 => "# Blocking Enabled: wait and barrier after each outer iteration (-n); time excludes barrier \n",
        _ => "",
    });
    text.push_str("#\n# Using devices\n");
    for line in lines {
        text.push_str(line);
        text.push('\n');
    }
    text.push_str("#\n");
    let row = |cells: [&str; 13]| {
        let [size, count, kind, redop, root, a, b, c, d, e, f, g, h] = cells;
        format!(
            "# {size:>10}  {count:>12}  {kind:>8}  {redop:>6}  {root:>6}  {a:>7}  {b:>6}  {c:>6}  {d:>6}  {e:>7}  {f:>6}  {g:>6}  {h:>6} \n"
        )
    };
    text.push_str(&format!(
        "# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}           out-of-place                       in-place          \n",
        "", "", "", "", ""
    ));
    text.push_str(&row([
        "size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong", "time", "algbw",
        "busbw", "#wrong",
    ]));
    text.push_str(&row([
        "(B)",
        "(elements)",
        "",
        "",
        "",
        "(us)",
        "(GB/s)",
        "(GB/s)",
        "",
        "(us)",
        "(GB/s)",
        "(GB/s)",
        "",
    ]));
    text
}

fn text(row: &Row, percentiles: bool) -> String {
    let mut text = format!(
        "{:>12}  {:>12}  {:>8}  {:>6}  {:>6}",
        row.bytes,
        row.count,
        row.type_name,
        row.op_name,
        format!("{:>6}", row.root)
    );
    for place in [&row.out_of_place, &row.in_place] {
        match place {
            Some(place) => {
                let wrong = place.wrong.map_or_else(|| "N/A".into(), |wrong| general(wrong as f64));
                text.push_str(&format!(
                    "  {}  {}  {}  {wrong:>6}",
                    fitted(place.time_us, 7),
                    fitted(place.algbw, 6),
                    fitted(place.busbw, 6)
                ));
            }
            None => text.push_str(&" ".repeat(32)),
        }
    }
    text.push('\n');
    for (name, place) in [("out-of-place", &row.out_of_place), ("in-place", &row.in_place)] {
        if let (true, Some(place)) = (percentiles, place) {
            text.push_str(&format!(
                "#   {name}: p50 {:.2} us, p99 {:.2} us, max {:.2} us, slowest rank {} in {:.2} us\n",
                place.p50_us, place.p99_us, place.max_us, place.slowest_rank, place.slowest_us
            ));
        }
    }
    text
}

fn comma_separated(row: &Row, name: &str, place: &Place) -> String {
    let wrong = place.wrong.map_or_else(String::new, |wrong| wrong.to_string());
    format!(
        "{},{},{},{},{},{name},{},{},{},{wrong},{},{},{},{},{}",
        row.bytes,
        row.count,
        row.type_name,
        row.op_name,
        row.root,
        place.time_us,
        place.algbw,
        place.busbw,
        place.p50_us,
        place.p99_us,
        place.max_us,
        place.slowest_rank,
        place.slowest_us
    )
}

fn object(row: &Row) -> Value {
    json!({
        "size": row.bytes,
        "count": row.count,
        "type": row.type_name,
        "redop": row.op_name,
        "root": row.root,
        "out_of_place": row.out_of_place.as_ref().map(of_place),
        "in_place": row.in_place.as_ref().map(of_place),
    })
}

fn of_place(place: &Place) -> Value {
    json!({
        "time": place.time_us,
        "alg_bw": place.algbw,
        "bus_bw": place.busbw,
        "nwrong": place.wrong,
        "p50_us": place.p50_us,
        "p99_us": place.p99_us,
        "max_us": place.max_us,
        "slowest_rank": place.slowest_rank,
        "slowest_us": place.slowest_us,
    })
}

/// As many decimals as fit, as nccl-tests' `getFloatStr`.
fn fitted(value: f64, width: usize) -> String {
    for decimals in [2, 1, 0] {
        let text = format!("{value:>width$.decimals$}");
        if text.len() <= width {
            return text;
        }
    }
    format!("{:>width$}", exponent(value, usize::from(width >= 7)))
}

/// C's `%e`.
fn exponent(value: f64, decimals: usize) -> String {
    let text = format!("{value:.decimals$e}");
    let (mantissa, power) = text.split_once('e').unwrap_or((&text, "0"));
    let power: i32 = power.parse().unwrap_or(0);
    format!("{mantissa}e{}{:02}", if power < 0 { '-' } else { '+' }, power.unsigned_abs())
}

/// C's `%g`: six significant digits, without zeros at the end.
fn general(value: f64) -> String {
    let power = if value == 0.0 { 0 } else { value.abs().log10().floor() as i32 };
    let trimmed = |text: String| match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    };
    if (-4..6).contains(&power) {
        return trimmed(format!("{value:.*}", usize::try_from(5 - power).unwrap_or(0)));
    }
    let text = exponent(value, 5);
    match text.split_once('e') {
        Some((mantissa, power)) => format!("{}e{power}", trimmed(mantissa.to_owned())),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // tests alone

    use super::*;
    use clap::Parser;

    #[test]
    fn numbers_are_those_of_c() {
        let fits = [0.0, 12.345, 12345.67, 1_234_567.8, 123_456_789.0].map(|value| fitted(value, 7));
        assert_eq!(fits, ["   0.00", "  12.35", "12345.7", "1234568", "1.2e+08"]);
        assert_eq!([99999.9, 1234.5, 0.004].map(|value| fitted(value, 6)), ["100000", "1234.5", "  0.00"]);
        let of = [0.0, 4.14141, 0.5, 123.456789, 1_234_567.0, 0.00001].map(general);
        assert_eq!(of, ["0", "4.14141", "0.5", "123.457", "1.23457e+06", "1e-05"]);
    }

    #[test]
    fn rows_stand_in_nccl_tests_columns() {
        let place = Place { time_us: 1000.0, algbw: 8.0, busbw: 12.0, wrong: Some(0), ..Place::default() };
        let row = Row {
            bytes: 8_000_000,
            count: 2_000_000,
            type_name: "float".into(),
            op_name: "sum".into(),
            root: -1,
            out_of_place: Some(place),
            in_place: Some(Place { wrong: None, ..place }),
        };
        let expected = "     8000000       2000000     float     sum      -1  1000.00    8.00   12.00       0  1000.00    8.00   12.00     N/A\n";
        assert_eq!(text(&row, false), expected);
        let apart = text(&Row { in_place: None, ..row.clone() }, true);
        let lines: Vec<_> = apart.lines().collect();
        // nccl-tests leaves a column less than the four figures have.
        assert_eq!(lines.first().unwrap().len(), expected.len() - 2);
        assert!(lines.last().unwrap().starts_with("#   out-of-place: p50 0.00 us"), "{apart}");
        assert_eq!(
            comma_separated(&row, "in_place", &place),
            "8000000,2000000,float,sum,-1,in_place,1000,8,12,0,0,0,0,0,0"
        );
        assert_eq!(CSV.split(',').count(), 15);
    }

    #[test]
    fn heading_is_nccl_tests() {
        let words = ["perf", "all_reduce", "--agent", "a", "-b", "8", "-e", "64", "-f", "2", "-z", "2"];
        let arguments = Arguments::try_parse_from(words).unwrap();
        let text = heading(&arguments, "all_reduce_perf", &["#  Rank  0".into()]);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(
            lines.get(2),
            Some(
                &"# nThread 1 nGpus 1 minBytes 8 maxBytes 64 step: 2(factor) warmup iters: 1 iters: 20 agg iters: 1 validation: 1 graph: 0 unalign: 0"
            )
        );
        assert_eq!(
            lines.get(3),
            Some(&"# Blocking Enabled: wait after each inner iteration (-m), no barrier ")
        );
        let columns = "#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong ";
        assert_eq!(lines.get(lines.len() - 2), Some(&columns));
    }
}
