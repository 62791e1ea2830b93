//! A fabric from counts: racks with a leaf each, joined by spines.

use super::draft::{Draft, ImportError, Kind};
use crate::text::number_of;
use harmonaize_planner::{Nanos, Rate};

/// Racks, hosts and spines.
#[derive(clap::Args)]
pub(crate) struct New {
    /// Racks, with a leaf each.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    racks: u16,
    /// Hosts of each rack.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    hosts: u16,
    /// Spines, each joined to all leaves.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=1024))]
    spines: u16,
    /// What a host's link carries, in each direction.
    #[arg(long, value_name = "RATE", default_value = "100Gbit/s")]
    rate: Rate,
    /// What a link from leaf to spine carries; where it is left out, leaves send on all that their hosts send.
    #[arg(long, value_name = "RATE")]
    uplink: Option<Rate>,
    /// Each link's delay, one way.
    #[arg(long, value_name = "DURATION", default_value = "1us")]
    delay: Nanos,
}

impl New {
    /// # Errors
    /// Several racks and no spine, or more hosts than a topology may have.
    pub(super) fn draft(&self) -> Result<Draft, ImportError> {
        let (racks, hosts, spines) = (self.racks, self.hosts, self.spines);
        if racks > 1 && spines == 0 {
            return Err(ImportError::NoSpine { racks });
        }
        if u32::from(racks) * u32::from(hosts) > 16384 {
            return Err(ImportError::ManyHosts { racks, hosts });
        }
        let uplink = self.uplink.unwrap_or_else(|| {
            Rate(self.rate.0.saturating_mul(u64::from(hosts)).div_ceil(u64::from(spines.max(1))))
        });
        let origin = format!(
            "{} of {}, {}.",
            number_of(racks, "rack", "racks"),
            number_of(hosts, "host", "hosts"),
            number_of(spines, "spine", "spines")
        );
        let mut draft = Draft::new(origin).with_delay(self.delay);
        if spines > 1 {
            draft.note(
                "? Switches have no `addresses`: control cannot tell the routes of packets without them.",
            );
        }
        for spine in 0..spines {
            draft.add(&format!("spine{spine}"), Kind::Switch, None);
        }
        for rack in 0..racks {
            let leaf = format!("leaf{rack}");
            draft.add(&leaf, Kind::Switch, None);
            for host in 0..hosts {
                let name = format!("h{}", u32::from(rack) * u32::from(hosts) + u32::from(host));
                draft.add(&name, Kind::Host, None);
                draft.rack(&name, &format!("r{rack}"));
                draft.cable(&name, &leaf, Some(self.rate));
            }
            for spine in 0..spines {
                draft.cable(&leaf, &format!("spine{spine}"), Some(uplink));
            }
        }
        Ok(draft)
    }
}
