//! Metrics for Prometheus: few series, however many flows and communicators there are.

use crate::telemetry::reading::{LinkReading, Reading};
use harmonaize_analysis::congestion::{Congestion, Path, State};
use harmonaize_events::{Direction, Totals};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Communicators that have series of their own, over all time; others are summed up in `other`.
const COMMUNICATORS: usize = 50;
/// Longest label from a tenant's words.
const LABEL: usize = 64;
/// The label of what is summed up.
const OTHER: &str = "other";

/// Which communicators have series of their own: those that came first.
#[derive(Debug, Default)]
pub(crate) struct Labels(Mutex<Vec<String>>);

impl Labels {
    fn of(&self, tenant: &str, name: &str) -> String {
        let clean = |text: &str| -> String {
            text.chars()
                .map(|c| if c.is_ascii_graphic() && c != '"' && c != '\\' { c } else { '_' })
                .take(LABEL)
                .collect()
        };
        let label = format!("{}/{}", clean(tenant), clean(name));
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.contains(&label) {
            return label;
        }
        if known.len() < COMMUNICATORS {
            known.push(label.clone());
            return label;
        }
        OTHER.to_owned()
    }
}

/// A reading as metrics, in the text format of OpenMetrics.
pub(crate) fn text(reading: Arc<Reading>, labels: &Labels) -> Result<String, std::fmt::Error> {
    let mut registry = Registry::with_prefix("harmonaize");
    let mut communicators: BTreeMap<String, Sums> = BTreeMap::new();
    for traffic in reading.communicators.values() {
        let sums = communicators.entry(labels.of(&traffic.tenant, &traffic.name)).or_default();
        let values = [
            traffic.operations,
            traffic.failed,
            traffic.sent_bytes,
            traffic.received_bytes,
            traffic.median_ns(),
            traffic.coded,
            traffic.refused,
            traffic.saved_bytes,
        ];
        for (sum, value) in sums.iter_mut().zip(values) {
            *sum = sum.saturating_add(value);
        }
    }
    registry.register_collector(Box::new(Told { reading, communicators }));
    let mut text = String::new();
    encode(&mut text, &registry)?;
    Ok(text)
}

/// What one answer tells.
#[derive(Debug)]
struct Told {
    reading: Arc<Reading>,
    communicators: BTreeMap<String, Sums>,
}

/// What a communicator's series tell, in their order.
type Sums = [u64; 8];

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

impl Collector for Told {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        self.links(&mut encoder)?;
        self.verdicts(&mut encoder)?;
        self.own(&mut encoder)?;
        self.telemetry(&mut encoder)
    }
}

impl Told {
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

    fn verdicts(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let levels = self.reading.links.iter().flat_map(|link| {
            [Direction::Ingress, Direction::Egress].map(|direction| {
                let of = |found: &&Congestion| {
                    found.link.interface == link.measured.index && found.link.direction == direction
                };
                let of_link = self.reading.congestion.iter().filter(of);
                let level = |state: State| match state {
                    State::None => 0,
                    State::Mild => 1,
                    State::Severe => 2,
                };
                let whole = of_link.clone().filter(|found| found.link.path == Path::Whole);
                let paths =
                    of_link.filter(|found| found.link.path != Path::Whole && found.state > State::None);
                let way = if direction == Direction::Ingress { "ingress" } else { "egress" };
                let labels = vec![("interface", link.measured.name.clone()), ("direction", way.to_owned())];
                (labels, whole.map(|found| level(found.state)).max().unwrap_or(0), paths.count() as u64)
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
        let told = [
            (Kind::Counter, "operations", "Operations that ended for all local ranks"),
            (Kind::Counter, "operations_failed", "Of those, the ones that failed"),
            (Kind::Counter, "tensor_bytes_sent", "Tensor bytes handed to the transport"),
            (Kind::Counter, "tensor_bytes_received", "Tensor bytes that arrived"),
            (
                Kind::Gauge,
                "operation_median_nanoseconds",
                "Median of the last 64 operations' durations; summed in other",
            ),
            (Kind::Counter, "operations_coded", "Operations that travelled in fewer bits"),
            (Kind::Counter, "operations_coded_refused", "Of those, the ones of which chunks went exact"),
            (Kind::Counter, "tensor_bytes_saved", "Tensor bytes that those sent less than exact ones would"),
        ];
        for (at, (kind, name, help)) in told.iter().enumerate() {
            let one = |(label, sums): (&String, &Sums)| {
                (vec![("communicator", label.clone())], sums.get(at).copied().unwrap_or(0))
            };
            family(encoder, kind, name, help, &self.communicators.iter().map(one).collect())?;
        }
        let count = vec![(Vec::new(), self.reading.communicators.len() as u64)];
        family(encoder, &Kind::Gauge, "communicators", "Communicators of this agent", &count)
    }

    fn telemetry(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let reading = &self.reading;
        let (gaps, thread) = (reading.gaps, reading.thread.as_nanos());
        let lost = [
            ("events", gaps.events),
            ("flows", gaps.flows),
            ("ambiguous", gaps.ambiguous),
            ("marks", gaps.marks),
            ("records", gaps.records),
            ("gaps", gaps.count),
        ];
        let lost = lost.map(|(what, count)| (vec![("what", what.to_owned())], count)).to_vec();
        family(encoder, &Kind::Counter, "telemetry_lost", "What was lost on the way, by what", &lost)?;
        let flows = vec![(Vec::new(), reading.flows_known)];
        family(encoder, &Kind::Gauge, "flows", "Flows that were known when all were last read", &flows)?;
        let spent = vec![(Vec::new(), u64::try_from(thread).unwrap_or(u64::MAX))];
        let help = "Processor time of the telemetry thread";
        family(encoder, &Kind::Counter, "telemetry_thread_nanoseconds", help, &spent)?;
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
    use crate::telemetry::own::Traffic;

    #[test]
    fn series_are_few_however_many_communicators_come_and_go() {
        let labels = Labels::default();
        let scrape = |names: std::ops::Range<u64>| {
            let traffic = |name: u64| Traffic {
                tenant: "a".into(),
                name: format!("job \"{name}\"\n"),
                operations: 1,
                coded: 1,
                saved_bytes: 5,
                ..Traffic::default()
            };
            let communicators = names.map(|name| (name, traffic(name))).collect();
            text(Arc::new(Reading { communicators, ..Reading::default() }), &labels).unwrap()
        };
        let operations = |text: &str| -> Vec<String> {
            let lines = text.lines().filter(|line| line.starts_with("harmonaize_operations_total{"));
            lines.map(str::to_owned).collect()
        };
        let other = |series: &str| format!("\nharmonaize_{series}{{communicator=\"other\"}} ");
        let told = scrape(0..60);
        for (series, sum) in [
            ("operations_coded_total", 10),
            ("operations_coded_refused_total", 0),
            ("tensor_bytes_saved_total", 50),
        ] {
            assert!(told.contains(&format!("{}{sum}\n", other(series))), "{series}: {told}");
        }
        let first = operations(&scrape(0..60));
        assert_eq!(first.len(), COMMUNICATORS + 1, "{first:?}");
        assert!(
            first.contains(&"harmonaize_operations_total{communicator=\"other\"} 10".to_owned()),
            "{first:?}"
        );
        assert!(
            first.contains(&"harmonaize_operations_total{communicator=\"a/job__7__\"} 1".to_owned()),
            "{first:?}"
        );
        // The first keep their names; whoever comes later has none.
        let later = operations(&scrape(49..1_049));
        assert_eq!(later.len(), 2, "{later:?}");
        assert!(
            later.contains(&"harmonaize_operations_total{communicator=\"other\"} 999".to_owned()),
            "{later:?}"
        );
    }
}
