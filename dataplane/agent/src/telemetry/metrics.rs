//! Metrics for Prometheus: few series, however many flows and communicators there are.

use crate::counters::{Counted, Counters, METRICS};
use crate::telemetry::latencies::BOUNDS_NS;
use crate::telemetry::reading::{LinkReading, Reading};
use crate::telemetry::series::SeriesTotals;
use harmonaize_abi::CongestionLevel;
use harmonaize_analysis::congestion::{Congestion, Path};
use harmonaize_events::{Direction, Totals};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A reading as metrics, in the text format of OpenMetrics.
pub(crate) fn text(reading: Arc<Reading>, counters: &Counters) -> Result<String, std::fmt::Error> {
    let mut registry = Registry::with_prefix("harmonaize");
    let communicators = reading.series.totals(reading.communicators.values());
    let counters = counters.clone();
    registry.register_collector(Box::new(Answer { reading, communicators, counters }));
    let mut text = String::new();
    encode(&mut text, &registry)?;
    Ok(text)
}

/// What one answer tells.
#[derive(Debug)]
struct Answer {
    reading: Arc<Reading>,
    communicators: BTreeMap<String, SeriesTotals>,
    counters: Counters,
}

type Series = Vec<(Vec<(&'static str, String)>, u64)>;

enum Kind {
    Counter,
    Gauge,
}

fn family(
    encoder: &mut DescriptorEncoder<'_>,
    kind: &Kind,
    name: &str,
    help: &str,
    series: &Series,
) -> Result<(), std::fmt::Error> {
    let metric_type = match kind {
        Kind::Counter => ConstCounter::new(0_u64).metric_type(),
        Kind::Gauge => ConstGauge::new(0_i64).metric_type(),
    };
    let mut metric = encoder.encode_descriptor(name, help, None, metric_type)?;
    if let [(labels, value)] = series.as_slice()
        && labels.is_empty()
    {
        return one(metric, kind, *value);
    }
    for (labels, value) in series {
        one(metric.encode_family(labels)?, kind, *value)?;
    }
    Ok(())
}

fn one(encoder: MetricEncoder<'_>, kind: &Kind, value: u64) -> Result<(), std::fmt::Error> {
    match kind {
        Kind::Counter => ConstCounter::new(value).encode(encoder),
        Kind::Gauge => ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX)).encode(encoder),
    }
}

impl Collector for Answer {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        self.links(&mut encoder)?;
        self.congestion(&mut encoder)?;
        self.own(&mut encoder)?;
        self.agent(&mut encoder)?;
        self.telemetry(&mut encoder)
    }
}

impl Answer {
    fn links(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let both = |of: fn(&Totals) -> u64| -> Series {
            let one = |link: &LinkReading, way: &str, totals: &Totals| {
                (vec![("interface", link.measured.name.clone()), ("direction", way.to_owned())], of(totals))
            };
            let links = self.reading.links.iter();
            links
                .flat_map(|link| {
                    [one(link, "ingress", &link.totals.ingress), one(link, "egress", &link.totals.egress)]
                })
                .collect()
        };
        type Class = (&'static str, &'static str, fn(&Totals) -> u64);
        let classes: [Class; 5] = [
            ("interface_packets", "Packets on the wire", |totals| totals.packets),
            ("interface_bytes", "Their bytes, with the link's header", |totals| totals.bytes),
            ("interface_roce_packets", "Of the packets, those of RoCE v2", |totals| totals.roce),
            ("interface_malformed_packets", "Packets that contradict themselves", |totals| totals.malformed),
            ("interface_unplaced_packets", "Packets without a place in the table of flows", |totals| {
                totals.unplaced
            }),
        ];
        for (name, help, of) in classes {
            family(encoder, &Kind::Counter, name, help, &both(of))?;
        }
        Ok(())
    }

    fn congestion(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let levels = self.reading.links.iter().flat_map(|link| {
            [Direction::Ingress, Direction::Egress].map(|direction| {
                let of = |found: &&Congestion| {
                    found.link.interface == link.measured.index && found.link.direction == direction
                };
                let of_link = self.reading.congestion.iter().filter(of);
                let level = |state: CongestionLevel| match state {
                    CongestionLevel::None => 0,
                    CongestionLevel::Mild => 1,
                    CongestionLevel::Severe => 2,
                };
                let whole = of_link.clone().filter(|found| found.link.path == Path::Whole);
                let paths = of_link
                    .filter(|found| found.link.path != Path::Whole && found.level > CongestionLevel::None);
                let way = if direction == Direction::Ingress { "ingress" } else { "egress" };
                let labels = vec![("interface", link.measured.name.clone()), ("direction", way.to_owned())];
                (labels, whole.map(|found| level(found.level)).max().unwrap_or(0), paths.count() as u64)
            })
        });
        let levels: Vec<_> = levels.collect();
        let whole: Series = levels.iter().map(|(labels, level, _)| (labels.clone(), *level)).collect();
        let help = "How congested an interface is: 0 not, 1 mildly, 2 severely";
        family(encoder, &Kind::Gauge, "link_congestion", help, &whole)?;
        let paths: Series = levels.into_iter().map(|(labels, _, paths)| (labels, paths)).collect();
        family(
            encoder,
            &Kind::Gauge,
            "congested_paths",
            "Paths through an interface that are congested",
            &paths,
        )?;
        let stragglers = vec![(Vec::new(), self.reading.stragglers.len() as u64)];
        family(encoder, &Kind::Gauge, "stragglers", "Ranks that hold others up now", &stragglers)
    }

    fn own(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let counters = [
            ("operations", "Operations that ended for all local ranks"),
            ("operations_failed", "Of those, the ones that failed"),
            ("tensor_bytes_sent", "Tensor bytes handed to the transport"),
            ("tensor_bytes_received", "Tensor bytes that arrived"),
            ("operations_coded", "Operations that travelled in fewer bits"),
            ("operations_coded_refused", "Of those, the ones of which chunks went exact"),
            ("tensor_bytes_saved", "Tensor bytes that those sent less than exact ones would"),
            ("operations_aggregated", "Operations that an aggregator was to sum"),
            ("operations_fallback", "Of those, the ones of which hosts did some"),
            ("aggregation_given_up", "Sessions with an aggregator that were given up here"),
        ];
        let labels = |label: &String| vec![("communicator", label.clone())];
        for (at, (name, help)) in counters.iter().enumerate() {
            let one = |(label, told): (&String, &SeriesTotals)| {
                (labels(label), told.sums.get(at).copied().unwrap_or(0))
            };
            family(encoder, &Kind::Counter, name, help, &self.communicators.iter().map(one).collect())?;
        }
        let living = self.communicators.iter();
        let medians = living.filter_map(|(label, told)| Some((labels(label), told.median_ns?))).collect();
        let help = "Median of the last 64 operations' durations; summed in other";
        family(encoder, &Kind::Gauge, "operation_median_nanoseconds", help, &medians)?;
        let count = vec![(Vec::new(), self.reading.communicators.len() as u64)];
        family(encoder, &Kind::Gauge, "communicators", "Communicators of this agent", &count)
    }

    /// What the agent itself counts.
    fn agent(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        for (name, help, label, counters) in METRICS {
            let one = |(value, counted): &(Option<&str>, Counted)| {
                let labels = value.map(|value| (label, value.to_owned())).into_iter().collect();
                (labels, self.counters.get(*counted))
            };
            family(encoder, &Kind::Counter, name, help, &counters.iter().map(one).collect())?;
        }
        Ok(())
    }

    fn telemetry(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let reading = &self.reading;
        let (gaps, thread) = (reading.losses, reading.thread.as_nanos());
        let lost = [
            ("events", gaps.events),
            ("flows", gaps.flows),
            ("ambiguous", gaps.ambiguous),
            ("marks", gaps.marks),
            ("records", gaps.records),
            ("gaps", gaps.count),
            ("unregistered", gaps.unregistered),
            ("endpoints", gaps.ends),
        ];
        let lost = lost.map(|(what, count)| (vec![("what", what.to_owned())], count)).to_vec();
        family(encoder, &Kind::Counter, "telemetry_lost", "What was lost on the way, by what", &lost)?;
        let flows = vec![(Vec::new(), reading.flow_count)];
        family(encoder, &Kind::Gauge, "flows", "Flows that were known when all were last read", &flows)?;
        let spent = vec![(Vec::new(), u64::try_from(thread).unwrap_or(u64::MAX))];
        let help = "Processor time of the telemetry thread";
        family(encoder, &Kind::Counter, "telemetry_thread_nanoseconds", help, &spent)?;
        let lags = reading.latencies;
        let bounds = BOUNDS_NS.iter().map(|bound| *bound as f64).chain([f64::INFINITY]);
        let classes: Vec<(f64, u64)> = bounds.zip(lags.classes).collect();
        let help = "Times from an event in the kernel until what follows from it was decided";
        let kind = MetricType::Histogram;
        let mut metric = encoder.encode_descriptor("event_decision_nanoseconds", help, None, kind)?;
        let (sum, count) = (lags.sum_ns as f64, lags.classes.iter().sum());
        metric.encode_histogram::<NoLabelSet>(sum, count, &classes, None)?;
        let programs = reading.cost.iter().filter(|cost| cost.timed).flat_map(|cost| &cost.programs);
        let (runs, times): (Series, Series) = programs
            .map(|one| {
                let labels = vec![("program", one.name.to_string())];
                let time = u64::try_from(one.time.as_nanos()).unwrap_or(u64::MAX);
                ((labels.clone(), one.runs), (labels, time))
            })
            .unzip();
        family(encoder, &Kind::Counter, "program_runs", "Runs of a program in the kernel", &runs)?;
        let help = "Processor time of those runs";
        family(encoder, &Kind::Counter, "program_nanoseconds", help, &times)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::own_flows::{EpochLinks, OwnFlows};
    use crate::telemetry::series::COMMUNICATORS;
    use harmonaize_events::{Mark, MarkKind};

    /// A communicator with this number comes, and codes an operation that saves five bytes.
    fn come(own: &mut OwnFlows, communicator: u64) {
        let formed = EpochLinks {
            communicator,
            tenant: "a".into(),
            name: format!("job \"{communicator}\"\n"),
            ranks: vec![0],
            epoch: 1,
            participant: 0,
            flows: Vec::new(),
        };
        own.formed(&formed, 1, &[], &mut Vec::new());
        let kind = MarkKind::Coded as u32;
        own.mark(&Mark { communicator, kind, bytes: 5, ..Mark::default() });
        for (kind, segment) in [
            (MarkKind::Aggregated, 0),
            (MarkKind::Aggregated, 1),
            (MarkKind::Aggregated, 2),
            (MarkKind::GivenUp, 0),
        ] {
            own.mark(&Mark { communicator, kind: kind as u32, segment, ..Mark::default() });
        }
    }

    fn scrape(own: &OwnFlows) -> String {
        let (communicators, series) = (own.communicators().clone(), own.series());
        let reading = Reading { communicators, series, ..Reading::default() };
        text(Arc::new(reading), &Counters::default()).unwrap()
    }

    fn series(text: &str, name: &str) -> BTreeMap<String, u64> {
        let lines = text.lines().filter_map(|line| line.strip_prefix(&format!("harmonaize_{name}{{")));
        lines
            .map(|line| line.rsplit_once(' ').unwrap())
            .map(|(l, v)| (l.into(), v.parse().unwrap()))
            .collect()
    }

    #[test]
    fn series_are_few_however_many_communicators_come_and_go() {
        let mut own = OwnFlows::default();
        (0..60).for_each(|number| come(&mut own, number));
        let told = scrape(&own);
        for (name, sum) in [
            ("operations_coded_total", 10),
            ("operations_coded_refused_total", 0),
            ("tensor_bytes_saved_total", 50),
            ("operations_aggregated_total", 30),
            ("operations_fallback_total", 20),
            ("aggregation_given_up_total", 10),
        ] {
            let told = series(&told, name);
            assert_eq!(told.len(), COMMUNICATORS + 1, "{told:?}");
            assert_eq!(told["communicator=\"other\"}"], sum, "{name}");
        }
        let first = series(&told, "tensor_bytes_saved_total");
        assert_eq!(first["communicator=\"a/job__7__\"}"], 5, "{first:?}");
        // The first keep their names, and what they came to; whoever comes later has none.
        (0..49).for_each(|number| own.ended(number, 2, &[], &mut Vec::new()));
        (60..1_049).for_each(|number| come(&mut own, number));
        let told = scrape(&own);
        let later = series(&told, "tensor_bytes_saved_total");
        assert_eq!(later.len(), COMMUNICATORS + 1, "{later:?}");
        assert_eq!(later["communicator=\"other\"}"], 999 * 5, "{later:?}");
        // Medians are of those that live.
        assert_eq!(series(&told, "operation_median_nanoseconds").len(), 2);
    }

    #[test]
    fn times_to_decisions_are_told_by_classes() {
        let mut reading = Reading::default();
        [10_000, 60_000, 70_000, 1 << 40].into_iter().for_each(|lag| reading.latencies.note(lag));
        let told = text(Arc::new(reading), &Counters::default()).unwrap();
        let name = "harmonaize_event_decision_nanoseconds";
        for line in [
            "_bucket{le=\"20000.0\"} 1",
            "_bucket{le=\"75000.0\"} 3",
            "_bucket{le=\"100000000.0\"} 3",
            "_bucket{le=\"+Inf\"} 4",
            "_count 4",
        ] {
            assert!(told.contains(&format!("{name}{line}\n")), "{line} in {told}");
        }
    }

    #[test]
    fn what_the_agent_counts_is_told_by_label() {
        let counters = Counters::default();
        counters.add(Counted::CommunicatorPanic);
        (0..3).for_each(|_| counters.add(Counted::CommandLate));
        counters.add(Counted::LogLine);
        let told = text(Arc::new(Reading::default()), &counters).unwrap();
        for line in [
            "panics_total{scope=\"communicator\"} 1",
            "panics_total{scope=\"session\"} 0",
            "engine_commands_total{what=\"late\"} 3",
            "engine_commands_total{what=\"lost\"} 0",
            "quota_refusals_total{quota=\"joins\"} 0",
            "log_lines_left_out_total 1",
        ] {
            assert!(told.contains(&format!("harmonaize_{line}\n")), "{line} in {told}");
        }
    }

    #[test]
    fn counters_never_fall() {
        let mut own = OwnFlows::default();
        let mut before = BTreeMap::new();
        for round in 0_u64..200 {
            come(&mut own, round % 120);
            if round % 3 > 0 {
                own.ended(round * 7 % 120, 2, &[], &mut Vec::new());
            }
            let now = series(&scrape(&own), "tensor_bytes_saved_total");
            for (label, value) in &before {
                assert!(now.get(label) >= Some(value), "round {round}: {label} {value}: {now:?}");
            }
            assert_eq!(now.values().sum::<u64>(), (round + 1) * 5);
            before = now;
        }
    }
}
