//! The interfaces that are measured: attaching, waiting for those that are not there, and what their links carry.

use crate::telemetry::Failed;
use crate::telemetry::losses::Losses;
use harmonaize_abi::Nanos;
use harmonaize_analysis::congestion::Limits;
use harmonaize_analysis::trace::{Label, Link, LostKind, Record};
use harmonaize_loader::{Change, Collector, Error};
use std::collections::BTreeMap;
use std::time::Duration;

/// An interface that is measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeasuredInterface {
    /// Its name.
    pub name: String,
    /// Its index in its network namespace.
    pub index: u32,
    /// What its link carries in each direction, in bits a second; none where that is not known.
    pub bits: Option<u64>,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Links {
    /// Those that the operator wants, and what is wrong with those that are not measured.
    configured: BTreeMap<String, Option<String>>,
    rates: BTreeMap<String, u64>,
    measured: Vec<MeasuredInterface>,
    begun: bool,
}

impl Links {
    pub(crate) fn new(wanted: Vec<String>, rates: BTreeMap<String, u64>) -> Self {
        let configured = wanted.into_iter().map(|name| (name, None)).collect();
        Self { configured, rates, measured: Vec::new(), begun: false }
    }

    /// Those that are measured now.
    pub(crate) fn measured(&self) -> &[MeasuredInterface] {
        &self.measured
    }

    /// Returns the indexes of those that are measured now.
    pub(crate) fn indexes(&self) -> Vec<u32> {
        self.measured.iter().map(|link| link.index).collect()
    }

    /// Appends the totals of each.
    pub(crate) fn read_totals(&self, source: &dyn Collector, time: Nanos, into: &mut Vec<Record>) {
        let time_ns = time.0;
        let totals = self.measured.iter().filter_map(|link| source.totals(link.index).ok());
        into.extend(totals.map(|totals| Record::Totals { time_ns, totals }));
    }

    /// What is wrong with those that are not, a sentence each.
    pub(crate) fn missing(&self) -> impl Iterator<Item = &str> {
        self.configured.values().filter_map(|wrong| wrong.as_deref())
    }

    /// Attaches what is there and not measured, notices what is gone. True if anything has changed.
    pub(crate) fn refresh(
        &mut self,
        source: &mut dyn Collector,
        now: Nanos,
        gaps: &mut Losses,
        into: &mut Vec<Record>,
    ) -> Result<bool, Failed> {
        let before = self.measured.clone();
        let changes = source.refresh();
        for change in changes.iter().flatten() {
            match change {
                Change::Detached { name, index, .. } => {
                    tracing::warn!(interface = %name, index, "is gone: nothing of it is measured until it is back");
                    self.gone(name, now, into);
                }
                Change::Reattached { name, index } => {
                    tracing::info!(interface = %name, index, "is back: what crossed it meanwhile was not measured");
                    self.begin(name, *index, now, into);
                    gaps.count += 1;
                    into.push(gaps.lost(now, LostKind::Gap, 0));
                }
            }
        }
        // Whatever went wrong there, the others are looked after; what is attached is what the source says.
        let attached = source.attached();
        let strayed = |one: &MeasuredInterface| !attached.iter().any(|watched| watched.index == one.index);
        let strays: Vec<String> =
            self.measured.iter().filter(|one| strayed(one)).map(|one| one.name.clone()).collect();
        strays.iter().for_each(|name| self.gone(name, now, into));
        let absent: Vec<String> = self
            .configured
            .keys()
            .filter(|name| self.measured.iter().all(|one| one.name != **name))
            .cloned()
            .collect();
        for name in absent {
            self.attach(source, &name, now, gaps, into);
        }
        self.begun = true;
        changes.map(|_| self.measured != before)
    }

    fn attach(
        &mut self,
        source: &mut dyn Collector,
        name: &str,
        now: Nanos,
        gaps: &mut Losses,
        into: &mut Vec<Record>,
    ) {
        match source.attach(name) {
            Ok(index) => {
                if self.begun {
                    gaps.count += 1;
                    into.push(gaps.lost(now, LostKind::Gap, 0));
                }
                tracing::info!(interface = name, index, "is measured from now on");
                self.begin(name, index, now, into);
            }
            Err(error) => {
                let text = error.to_string();
                let entry = self.configured.entry(name.to_owned()).or_default();
                if entry.as_deref() != Some(text.as_str()) {
                    let waits = matches!(error, Error::NoInterface { .. });
                    tracing::warn!(interface = name, waits, "is not measured: {text}");
                    *entry = Some(text);
                }
            }
        }
    }

    fn begin(&mut self, name: &str, index: u32, now: Nanos, into: &mut Vec<Record>) {
        let bits = self.rates.get(name).copied().or_else(|| speed(name, Some(index)));
        self.configured.insert(name.to_owned(), None);
        self.measured.push(MeasuredInterface { name: name.to_owned(), index, bits });
        into.extend(self.measured.last().map(|one| one.record(now, true)));
    }

    fn gone(&mut self, name: &str, now: Nanos, into: &mut Vec<Record>) {
        let at = self.measured.iter().position(|one| one.name == name);
        let gone = at.map(|at| self.measured.remove(at));
        into.extend(gone.map(|one| one.record(now, false)));
        self.configured.insert(name.to_owned(), Some(format!("the interface {name} is gone")));
    }
}

impl MeasuredInterface {
    /// As analysis is told of it.
    pub(crate) fn record(&self, time: Nanos, watched: bool) -> Record {
        let time_ns = time.0;
        let bytes_per_second = self.bits.unwrap_or(0) / 8;
        let (interface, name) = (self.index, Label::new(&self.name));
        Record::Link(Link { time_ns, interface, name, bytes_per_second, watched })
    }
}

/// How much longer than the least a round trip must be to be late. It is that of the fastest of some interfaces, by their `rates` in bits a
/// second, or by their drivers. Over the others more of them are late.
pub(crate) fn late_rtt_limit(interfaces: &[String], rates: &BTreeMap<String, u64>) -> Duration {
    let bits = interfaces.iter().filter_map(|name| rates.get(name).copied().or_else(|| speed(name, None)));
    Limits::default().late_rtt_limit(bits.max().unwrap_or(0) / 8)
}

/// What the link carries by its driver, in bits a second. With an index, it is of the interface that has the index.
fn speed(name: &str, index: Option<u32>) -> Option<u64> {
    let folder = std::path::Path::new("/sys/class/net").join(name);
    let read = |file: &str| std::fs::read_to_string(folder.join(file)).ok();
    // The file system may show another network namespace, which may have an interface of the same name.
    let read_index = || read("ifindex")?.trim().parse::<u32>().ok();
    if index.is_some() && read_index() != index {
        return None;
    }
    let megabits = read("speed")?.trim().parse::<i64>().ok()?;
    u64::try_from(megabits).ok().filter(|megabits| *megabits > 0)?.checked_mul(1_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fastest_link_says_what_is_late() {
        let interfaces = ["no-such-0", "no-such-1"].map(str::to_owned);
        let late = |rates: &[(&str, u64)]| {
            let rates = rates.iter().map(|(name, bits)| ((*name).to_owned(), *bits)).collect();
            late_rtt_limit(&interfaces, &rates).as_nanos()
        };
        assert_eq!(late(&[("no-such-0", 200_000_000)]), 2_621_440);
        assert_eq!(late(&[("no-such-0", 200_000_000), ("no-such-1", 1_000_000_000)]), 2_500_000);
        assert_eq!(late(&[("no-such-1", 100_000_000_000)]), 2_500_000);
        assert_eq!(late(&[]), 2_500_000, "no rate is known");
    }
}
