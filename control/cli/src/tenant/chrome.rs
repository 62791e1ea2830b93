//! A tenant's own operations as a Chrome trace, alone or within one of torch.profiler.

use crate::Failure;
use crate::perfetto::{Fact, Slice, lanes};
use crate::text::{bytes, number_of};
use harmonaize_planner::Nanos;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::{Path, PathBuf};

/// Ranks' numbers as processes begin where Linux's end, so that they meet none that is in a trace.
const FIRST_PROCESS: u64 = 1 << 22;

/// What is used of a line of `HARMONAIZE_OPERATIONS`.
#[derive(Deserialize)]
struct Line {
    /// When it ended, in seconds since 1970.
    time: f64,
    seconds: f64,
    communicator: String,
    rank: u32,
    collective: String,
    bytes: u64,
    outcome: String,
}

impl Line {
    fn slice(self) -> Slice {
        // Of a file: numbers beyond the range become its ends.
        let nanos = |seconds: f64| Nanos((seconds * 1e9) as u64);
        let (begin, end) = (nanos(self.time - self.seconds), nanos(self.time));
        let name = format!("{} {}", self.collective, bytes(self.bytes));
        let facts = vec![("bytes", Fact::Number(self.bytes)), ("outcome", Fact::Text(self.outcome))];
        Slice { begin, end: end.max(begin), name, facts, joined: None }
    }
}

/// Writes a trace of the operations in `files`. Where a trace of torch is named, all that is in it is written too.
pub(super) fn write(files: &[PathBuf], torch: Option<&Path>, out: &Path) -> Result<String, Failure> {
    let mut trace = match torch {
        Some(path) => serde_json::from_str(&read(path)?).map_err(|error| refused(path, &error))?,
        None => json!({"traceEvents": [], "displayTimeUnit": "ms"}),
    };
    let base_ns = trace.get("baseTimeNanoseconds").and_then(Value::as_i64).unwrap_or(0);
    let mut operations: BTreeMap<(u32, String), Vec<Slice>> = BTreeMap::new();
    for path in files {
        // A line without an end is one that its process was writing.
        let text = read(path)?;
        let lines = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        for (number, line) in lines.enumerate() {
            let line: Line = serde_json::from_str(line)
                .map_err(|error| refused(path, &format!("line {}: {error}", number + 1)))?;
            operations.entry((line.rank, line.communicator.clone())).or_default().push(line.slice());
        }
    }
    let count: usize = operations.values().map(Vec::len).sum();
    let events = trace.get_mut("traceEvents").and_then(Value::as_array_mut);
    let Some(events) = events else {
        return Err(refused(torch.unwrap_or(out), &"this has no `traceEvents`"));
    };
    let mut thread = 0;
    for ((rank, communicator), slices) in &operations {
        let process = FIRST_PROCESS + u64::from(*rank);
        let named = |what: &str, thread: u64, name: String| json!({"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}});
        events.push(named("process_name", 0, format!("harmonaize, rank {rank}")));
        // Those of a row must not overlap.
        for lane in lanes(slices) {
            thread += 1;
            events.push(named("thread_name", thread, communicator.clone()));
            events.extend(lane.into_iter().map(|slice| event(slice, base_ns, process, thread)));
        }
    }
    std::fs::write(out, trace.to_string()).map_err(|error| refused(out, &error))?;
    Ok(format!("{}: {}\n", out.display(), number_of(count as u64, "operation", "operations")))
}

fn event(slice: &Slice, base_ns: i64, process: u64, thread: u64) -> Value {
    let micros = |nanos: i64| nanos as f64 / 1000.0;
    let begin = micros(slice.begin.0.cast_signed().wrapping_sub(base_ns));
    let lasted = micros(slice.end.0.saturating_sub(slice.begin.0).cast_signed());
    let facts = slice.facts.iter().map(|(name, fact)| {
        let value = match fact {
            Fact::Number(number) => json!(number),
            Fact::Text(text) => json!(text),
        };
        ((*name).to_owned(), value)
    });
    json!({
        "ph": "X", "cat": "harmonaize", "name": slice.name, "pid": process, "tid": thread,
        "ts": begin, "dur": lasted, "args": facts.collect::<Map<String, Value>>(),
    })
}

fn read(path: &Path) -> Result<String, Failure> {
    std::fs::read_to_string(path).map_err(|error| refused(path, &error))
}

fn refused(path: &Path, why: &dyn Display) -> Failure {
    Failure::Refused(format!("{}: {why}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A line as the client writes it: an operation that ends so many microseconds after a moment.
    fn line(end_us: u64, length_us: u64, collective: &str) -> String {
        let time = 1_795_757_104.0 + end_us as f64 / 1e6;
        let line = json!({
            "time": time, "communicator": "job", "rank": 3, "ranks": 4, "collective": collective, "dtype": "f32",
            "count": 256, "reduce": "sum", "root": null, "peer": null, "bytes": 1024,
            "seconds": length_us as f64 / 1e6, "busbw": 1.5, "wire_bytes": 1024, "outcome": "ok",
        });
        format!("{line}\n")
    }

    fn written(lines: &str, torch: Option<&str>) -> Result<Value, String> {
        let folder = tempfile::tempdir().unwrap();
        let [operations, profile, out] =
            ["o.jsonl", "torch.json", "out.json"].map(|name| folder.path().join(name));
        std::fs::write(&operations, lines).unwrap();
        let profile = torch.map(|text| {
            std::fs::write(&profile, text).unwrap();
            profile.as_path()
        });
        write(&[operations], profile, &out).map_err(|failure| failure.to_string())?;
        Ok(serde_json::from_str(&std::fs::read_to_string(&out).unwrap()).unwrap())
    }

    #[test]
    fn operations_lie_under_torch_s_by_its_clock() {
        let torch = r#"{"baseTimeNanoseconds": 1795757000000000000, "rank": 3, "traceEvents": [{"ph": "X", "name": "aten::mm"}]}"#;
        let lines =
            [line(2000, 1000, "allreduce"), line(2500, 1000, "allgather"), line(4000, 500, "barrier")];
        let trace = written(&(lines.concat() + "{\"time\": 17"), Some(torch)).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        assert_eq!((&trace["rank"], &events[0]["name"]), (&json!(3), &json!("aten::mm")));
        let own: Vec<&Value> = events.iter().filter(|event| event["cat"] == "harmonaize").collect();
        let names: Vec<_> = own.iter().map(|event| event["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["allreduce 1.00KiB", "barrier 1.00KiB", "allgather 1.00KiB"]);
        // The second overlaps the first: it has a row of its own. A second's fraction is kept to a quarter of a microsecond.
        assert_eq!([0, 1, 2].map(|at: usize| own[at]["tid"].as_u64().unwrap()), [1, 1, 2]);
        let (begin, lasted) = (own[0]["ts"].as_f64().unwrap(), own[0]["dur"].as_f64().unwrap());
        assert!((begin - 104_001_000.0).abs() < 1.0 && (lasted - 1000.0).abs() < 1.0, "{begin} {lasted}");
        assert_eq!(
            (&own[0]["pid"], &own[0]["args"]),
            (&json!(4_194_307), &json!({"bytes": 1024, "outcome": "ok"}))
        );
    }

    #[test]
    fn what_is_no_trace_is_refused() {
        let alone = written(&line(0, 10, "barrier"), None).unwrap();
        assert_eq!(alone["traceEvents"].as_array().unwrap().len(), 3);
        let error = written(&(line(0, 10, "barrier") + "{}\n"), None).unwrap_err();
        assert!(error.contains("o.jsonl: line 2: missing field"), "{error}");
        let error = written("", Some("[]")).unwrap_err();
        assert!(error.ends_with("torch.json: this has no `traceEvents`"), "{error}");
    }
}
