//! A page: families of metrics with their series.

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};
use std::fmt;

/// Longest value of a label, in characters.
const LABEL: usize = 64;

/// The labels of a series: names and values.
pub type Labels = Vec<(&'static str, String)>;

/// Returns a label's value from text that anybody may have written: printable ASCII, 64 characters at most.
pub fn label(text: &str) -> String {
    let clean = |c: char| if c.is_ascii_graphic() && c != '"' && c != '\\' { c } else { '_' };
    text.chars().map(clean).take(LABEL).collect()
}

/// Observations by class.
#[derive(Clone, Debug, PartialEq)]
pub struct Buckets<const N: usize> {
    /// Upper bounds, ascending.
    bounds: &'static [f64; N],
    classes: [u64; N],
    /// Beyond the last bound.
    beyond: u64,
    sum: f64,
}

impl<const N: usize> Buckets<N> {
    /// Without observations, for these upper bounds, which ascend.
    pub const fn new(bounds: &'static [f64; N]) -> Self {
        Self { bounds, classes: [0; N], beyond: 0, sum: 0.0 }
    }

    /// Takes an observation.
    ///
    /// Cost: a search among the bounds.
    pub fn observe(&mut self, value: f64) {
        let class = self.bounds.partition_point(|bound| *bound < value);
        *self.classes.get_mut(class).unwrap_or(&mut self.beyond) += 1;
        self.sum += value;
    }

    /// Adds others of the same bounds.
    pub fn add(&mut self, more: &Self) {
        self.classes.iter_mut().zip(more.classes).for_each(|(class, more)| *class += more);
        self.beyond += more.beyond;
        self.sum += more.sum;
    }

    /// Returns how many there were.
    pub fn count(&self) -> u64 {
        self.classes.iter().sum::<u64>() + self.beyond
    }
}

#[derive(Clone, Debug)]
enum Value {
    Count(u64),
    Real(f64),
    Histogram { sum: f64, classes: Vec<(f64, u64)> },
}

/// A metric of one name, with its series.
#[derive(Clone, Debug)]
pub struct Family {
    name: &'static str,
    help: &'static str,
    unit: Option<Unit>,
    kind: MetricType,
    series: Vec<(Labels, Value)>,
}

impl Family {
    fn new(kind: MetricType, name: &'static str, unit: &str, help: &'static str) -> Self {
        let unit = match unit {
            "" => None,
            "seconds" => Some(Unit::Seconds),
            "bytes" => Some(Unit::Bytes),
            "ratios" => Some(Unit::Ratios),
            other => Some(Unit::Other(other.to_owned())),
        };
        Self { name, help, unit, kind, series: Vec::new() }
    }

    /// Adds a series that counts.
    pub fn count(&mut self, labels: Labels, value: u64) -> &mut Self {
        self.series.push((labels, Value::Count(value)));
        self
    }

    /// Adds a series of a value in the family's unit.
    pub fn real(&mut self, labels: Labels, value: f64) -> &mut Self {
        self.series.push((labels, Value::Real(value)));
        self
    }

    /// Adds a series of observations.
    pub fn buckets<const N: usize>(&mut self, labels: Labels, buckets: &Buckets<N>) -> &mut Self {
        let classes = buckets.bounds.iter().copied().zip(buckets.classes);
        let classes = classes.chain([(f64::INFINITY, buckets.beyond)]).collect();
        self.series.push((labels, Value::Histogram { sum: buckets.sum, classes }));
        self
    }

    fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let unit = self.unit.as_ref();
        let mut metric = encoder.encode_descriptor(self.name, self.help, unit, self.kind)?;
        for (labels, value) in &self.series {
            match labels.as_slice() {
                [] => self.encode_value(&mut metric, value)?,
                _ => self.encode_value(&mut metric.encode_family(labels)?, value)?,
            }
        }
        Ok(())
    }

    fn encode_value(&self, metric: &mut MetricEncoder<'_>, value: &Value) -> fmt::Result {
        match (self.kind, value) {
            (MetricType::Counter, Value::Count(value)) => {
                metric.encode_counter::<NoLabelSet, _, u64>(value, None)
            }
            (MetricType::Counter, Value::Real(value)) => {
                metric.encode_counter::<NoLabelSet, _, u64>(value, None)
            }
            (_, Value::Count(value)) => metric.encode_gauge(value),
            (_, Value::Real(value)) => metric.encode_gauge(value),
            (_, Value::Histogram { sum, classes }) => {
                let count = classes.iter().map(|(_, count)| count).sum();
                metric.encode_histogram::<NoLabelSet>(*sum, count, classes, None)
            }
        }
    }
}

/// Families, in the order in which they are shown. Each name has `harmonaize_` before it, and its unit behind it.
#[derive(Clone, Debug, Default)]
pub struct Page(Vec<Family>);

impl Page {
    fn add(&mut self, family: Family) -> &mut Family {
        self.0.push_mut(family)
    }

    /// Adds a family of what only grows; `_total` follows its name and unit.
    pub fn counter(&mut self, name: &'static str, unit: &str, help: &'static str) -> &mut Family {
        self.add(Family::new(MetricType::Counter, name, unit, help))
    }

    /// Adds a family of values of now.
    pub fn gauge(&mut self, name: &'static str, unit: &str, help: &'static str) -> &mut Family {
        self.add(Family::new(MetricType::Gauge, name, unit, help))
    }

    /// Adds a family of observations.
    pub fn histogram(&mut self, name: &'static str, unit: &str, help: &'static str) -> &mut Family {
        self.add(Family::new(MetricType::Histogram, name, unit, help))
    }

    /// Adds which build of which program this is.
    pub fn build(&mut self, program: &str, version: &str) {
        let labels = vec![("program", program.to_owned()), ("version", label(version))];
        self.gauge("build_info", "", "The program's version, in its labels; always 1").count(labels, 1);
    }

    /// Adds when the program's own certificate ends, in seconds since 1970, where it has one.
    pub fn certificate(&mut self, ends: Option<u64>) {
        if let Some(ends) = ends {
            let help = "When the certificate ends, in seconds since 1970";
            self.gauge("certificate_expiry_timestamp", "seconds", help).count(Vec::new(), ends);
        }
    }

    /// Returns the text of OpenMetrics, `# EOF` included.
    ///
    /// # Errors
    /// Where the encoder fails.
    pub fn text(self) -> Result<String, fmt::Error> {
        let mut registry = Registry::with_prefix("harmonaize");
        registry.register_collector(Box::new(Whole(self)));
        let mut text = String::new();
        encode(&mut text, &registry)?;
        Ok(text)
    }
}

#[derive(Debug)]
struct Whole(Page);

impl Collector for Whole {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.0.0.iter().try_for_each(|family| family.encode(&mut encoder))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static BOUNDS: [f64; 2] = [0.001, 0.5];

    #[test]
    fn a_page_has_units_totals_and_an_end() {
        let mut page = Page::default();
        page.counter("busy", "seconds", "Time").real(vec![("tenant", label("a\"\n\\ö"))], 1.5);
        page.gauge("sessions", "", "Sessions").count(Vec::new(), 3);
        let mut buckets = Buckets::new(&BOUNDS);
        [0.001, 0.002, 7.0].into_iter().for_each(|value| buckets.observe(value));
        page.histogram("wait", "seconds", "Waits").buckets(vec![("size", "small".to_owned())], &buckets);
        let expected = "\
# HELP harmonaize_busy_seconds Time
# TYPE harmonaize_busy_seconds counter
# UNIT harmonaize_busy_seconds seconds
harmonaize_busy_seconds_total{tenant=\"a____\"} 1.5
# HELP harmonaize_sessions Sessions
# TYPE harmonaize_sessions gauge
harmonaize_sessions 3
# HELP harmonaize_wait_seconds Waits
# TYPE harmonaize_wait_seconds histogram
# UNIT harmonaize_wait_seconds seconds
harmonaize_wait_seconds_sum{size=\"small\"} 7.003
harmonaize_wait_seconds_count{size=\"small\"} 3
harmonaize_wait_seconds_bucket{le=\"0.001\",size=\"small\"} 1
harmonaize_wait_seconds_bucket{le=\"0.5\",size=\"small\"} 2
harmonaize_wait_seconds_bucket{le=\"+Inf\",size=\"small\"} 3
# EOF
";
        assert_eq!(page.text().unwrap(), expected);
    }
}
