//! Files.

use harmonaize_analysis::marks::Marks;
use harmonaize_analysis::phases::Phases;
use harmonaize_analysis::{congestion, trace};
use harmonaize_planner::Topology;
use std::path::Path;

/// A configuration, or what is wrong with it.
pub(super) fn configuration(bytes: &[u8]) {
    const TOPOLOGY: &str = "[[host]]\nname = \"h0\"\n";
    let Some((first, text)) = bytes.split_first() else { return };
    let Ok(text) = std::str::from_utf8(text) else { return };
    let wrong = if first & 1 == 0 {
        harmonaize_agent::config::Config::parse(Path::new("/nowhere/agent.toml"), text)
            .err()
            .map(|error| error.to_string())
    } else {
        let topology = Topology::parse(TOPOLOGY).unwrap();
        harmonaize_server::Config::parse(text, topology).err().map(|error| error.to_string())
    };
    assert_ne!(wrong.as_deref(), Some(""));
}

/// A topology, or where the text is wrong.
pub(super) fn topology(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    match Topology::parse(text) {
        Ok(topology) => assert!(topology.hosts().len() < text.len()),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// Records until the first that is none. Written again they are read as the same, and all detectors take them, whatever they say.
pub(super) fn trace(bytes: &[u8]) {
    let mut records = Vec::new();
    let first = trace::replay(bytes, |record| records.push(*record));
    let mut writer = trace::Writer::new();
    writer.begin();
    records.iter().for_each(|record| writer.write(record));
    let mut again = Vec::new();
    trace::replay(writer.bytes(), |record| again.push(*record)).unwrap();
    assert_eq!(again, records, "{first:?}");
    let mut congestion = congestion::Detector::new(congestion::Limits::default());
    let (mut marks, mut phases) = (Marks::default(), Phases::default());
    for record in &records {
        marks.take(record);
        phases.take(record);
        congestion.take(record);
        let now = record.time();
        marks.advance(now);
        phases.advance(now);
        congestion.advance(now);
    }
}
