//! What an aggregator has done, for control and for Prometheus: a tenant's series each, and a bounded number of tenants.

use harmonaize_aggregator::{Counters, Unrecognized};
use harmonaize_api::v1;
use harmonaize_metrics::{Page, label};
use harmonaize_transport::datagram::DatagramCounters;
use std::collections::BTreeMap;

/// Tenants with series of their own: those with most packets; others are summed up in `other`.
const TENANTS: usize = 64;

/// What the thread says of itself.
#[derive(Debug)]
pub(super) struct Reading {
    /// By tenant: communicators that are served, and what was done for all that ever were.
    pub tenants: BTreeMap<String, (u32, Counters)>,
    pub unrecognized: Unrecognized,
    pub datagrams: DatagramCounters,
    /// Packets that could not go out.
    pub unsent: u64,
    /// Units that hold nothing, and all.
    pub free: usize,
    pub units: u32,
}

/// Adds up.
pub(super) fn add(to: &mut Counters, more: &Counters) {
    let Counters {
        received,
        sent,
        sums,
        duplicates,
        stale,
        lost,
        no_slot,
        size,
        ahead,
        worker,
        tag,
        kind,
        up,
        down,
    } = more;
    let pairs = [
        (&mut to.received, received),
        (&mut to.sent, sent),
        (&mut to.sums, sums),
        (&mut to.duplicates, duplicates),
        (&mut to.stale, stale),
        (&mut to.lost, lost),
        (&mut to.no_slot, no_slot),
        (&mut to.size, size),
        (&mut to.ahead, ahead),
        (&mut to.worker, worker),
        (&mut to.tag, tag),
        (&mut to.kind, kind),
        (&mut to.up, up),
        (&mut to.down, down),
    ];
    for (to, more) in pairs {
        *to = to.saturating_add(*more);
    }
}

/// Packets that had no effect because they were forged, damaged or senseless.
fn refused(counters: &Counters) -> u64 {
    counters.size + counters.ahead + counters.worker + counters.tag + counters.kind
}

fn unrecognized_total(strangers: &Unrecognized) -> u64 {
    strangers.length + strangers.magic + strangers.version + strangers.kind + strangers.communicator
}

impl Reading {
    /// The tenants that are told of by name, and the others together.
    fn tenants(&self) -> Vec<(String, u32, Counters)> {
        let mut all: Vec<_> =
            self.tenants.iter().map(|(name, (count, done))| (name.clone(), *count, *done)).collect();
        all.sort_by_key(|(_, _, done)| std::cmp::Reverse(done.received));
        let mut others = ("other".to_owned(), 0, Counters::default());
        for (_, count, done) in all.drain(all.len().min(TENANTS - 1)..) {
            others.1 += count;
            add(&mut others.2, &done);
        }
        all.extend((others.2 != Counters::default() || others.1 > 0).then_some(others));
        all
    }

    /// For control.
    pub(super) fn report(&self) -> v1::AggregatorReport {
        let tenant = |(tenant, communicators, done): (String, u32, Counters)| v1::AggregatedTenant {
            tenant,
            communicators,
            sums: done.sums,
            received: done.received,
            sent: done.sent,
            no_slot: done.no_slot,
            rejected: refused(&done),
            sent_to_parent: done.up,
            received_from_parent: done.down,
        };
        v1::AggregatorReport {
            tenants: self.tenants().into_iter().map(tenant).collect(),
            used_units: self.units.saturating_sub(u32::try_from(self.free).unwrap_or(u32::MAX)),
            unrecognized: unrecognized_total(&self.unrecognized) + self.datagrams.unrecognized,
            send_errors: self.unsent + self.datagrams.unsent,
        }
    }
}

/// A reading as metrics, in the text format of OpenMetrics, with when the certificate ends that control is shown.
pub(super) fn text(reading: &Reading, certificate_ends: Option<u64>) -> Result<String, std::fmt::Error> {
    let mut page = Page::default();
    page.build("aggregator", harmonaize_program::version());
    page.certificate(certificate_ends);
    type One = (&'static str, &'static str, fn(&Counters) -> u64);
    let counts: [One; 7] = [
        ("aggregator_packets_received", "Packets of workers that were accepted", |done| done.received),
        ("aggregator_packets_sent", "Packets to workers", |done| done.sent),
        ("aggregator_sums", "Chunks summed", |done| done.sums),
        ("aggregator_duplicates", "Parts that were in already", |done| done.duplicates),
        ("aggregator_no_slot", "Parts for which there was no slot", |done| done.no_slot),
        ("aggregator_packets_up", "Of the packets sent, to the aggregator above", |done| done.up),
        ("aggregator_packets_down", "Of the packets accepted, of the aggregator above", |done| done.down),
    ];
    let tenants = reading.tenants();
    let tenant = |name: &String| ("tenant", label(name));
    for (name, help, of) in counts {
        let family = page.counter(name, "", help);
        for (name, _, done) in &tenants {
            family.count(vec![tenant(name)], of(done));
        }
    }
    type Reason = (&'static str, fn(&Counters) -> u64);
    let reasons: [Reason; 7] = [
        ("tag", |done| done.tag),
        ("worker", |done| done.worker),
        ("size", |done| done.size),
        ("ahead", |done| done.ahead),
        ("kind", |done| done.kind),
        ("stale", |done| done.stale),
        ("session", |done| done.lost),
    ];
    let help = "Packets of a tenant's communicators that had no effect";
    let family = page.counter("aggregator_dropped_packets", "", help);
    for (name, _, done) in &tenants {
        for (reason, of) in reasons {
            family.count(vec![tenant(name), ("reason", reason.to_owned())], of(done));
        }
    }
    let family = page.gauge("aggregator_communicators", "", "Communicators that are served");
    for (name, communicators, _) in &tenants {
        family.count(vec![tenant(name)], (*communicators).into());
    }
    let Unrecognized { length, magic: stranger, version, kind, communicator } = reading.unrecognized;
    let reasons = [
        ("length", length + reading.datagrams.unrecognized),
        ("stranger", stranger),
        ("version", version),
        ("kind", kind),
        ("communicator", communicator),
        ("overrun", reading.datagrams.overrun),
    ];
    let help = "Datagrams of no communicator, dropped";
    let family = page.counter("aggregator_unrecognized_datagrams", "", help);
    for (reason, count) in reasons {
        family.count(vec![("reason", reason.to_owned())], count);
    }
    page.counter("aggregator_unsent_packets", "", "Packets that could not go out")
        .count(Vec::new(), reading.unsent + reading.datagrams.unsent);
    page.gauge("aggregator_units", "", "Units of the pool").count(Vec::new(), reading.units.into());
    page.gauge("aggregator_free_units", "", "Units of the pool that hold nothing")
        .count(Vec::new(), reading.free as u64);
    page.text()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(tenants: u64) -> Reading {
        let one = |at: u64| {
            let done = Counters { received: 10 * at, sums: at, tag: 1, up: 2 * at, ..Counters::default() };
            (format!("t{at}"), (1, done))
        };
        Reading {
            tenants: (1..=tenants).map(one).collect(),
            unrecognized: Unrecognized { version: 3, ..Unrecognized::default() },
            datagrams: DatagramCounters::default(),
            unsent: 2,
            free: 60,
            units: 64,
        }
    }

    #[test]
    fn what_was_done_is_told_by_tenant_and_the_rest_together() {
        let text = text(&reading(2), Some(5)).unwrap();
        for line in [
            "harmonaize_aggregator_sums_total{tenant=\"t2\"} 2",
            "harmonaize_aggregator_dropped_packets_total{tenant=\"t1\",reason=\"tag\"} 1",
            "harmonaize_aggregator_unrecognized_datagrams_total{reason=\"version\"} 3",
            "harmonaize_aggregator_communicators{tenant=\"t1\"} 1",
            "harmonaize_aggregator_packets_up_total{tenant=\"t2\"} 4",
            "harmonaize_aggregator_free_units 60",
            "harmonaize_aggregator_unsent_packets_total 2",
            "harmonaize_certificate_expiry_timestamp_seconds 5",
        ] {
            assert!(text.contains(line), "{line} is missing in\n{text}");
        }
        let report = reading(200).report();
        assert_eq!(report.tenants.len(), TENANTS);
        assert_eq!(report.tenants[0].tenant, "t200", "most packets first");
        let other = report.tenants.last().unwrap();
        assert_eq!((other.tenant.as_str(), other.communicators), ("other", 200 - 63));
        let sums: u64 = report.tenants.iter().map(|tenant| tenant.sums).sum();
        assert_eq!((sums, report.used_units, report.send_errors), (200 * 201 / 2, 4, 2), "nothing is lost");
    }
}
