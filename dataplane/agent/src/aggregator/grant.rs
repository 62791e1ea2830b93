//! A grant as control tells it, read with care.

use crate::aggregation::{read_form, read_group};
use harmonaize_aggregator::packet::MAX_WORKERS;
use harmonaize_aggregator::{Grant, Key, Parent, Partial, Share};
use harmonaize_api::v1;
use std::net::SocketAddr;
use std::time::Duration;

/// A grant, and whose it is.
#[derive(Debug)]
pub(super) struct Told {
    /// What the aggregator is to serve; its tenant's number is given by who knows all.
    pub grant: Grant,
    /// Where the aggregator above listens, if there is one.
    pub parent: Option<SocketAddr>,
    pub tenant: String,
    /// Where what is for all its workers at once goes.
    pub group: Option<SocketAddr>,
}

/// How an aggregator deals with one above it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Upwards {
    /// For how long that may leave questions unanswered, before a session is lost.
    pub patience: Duration,
    /// How soon a sum may be sent up again.
    pub again: Duration,
}

/// Reads what control said.
///
/// # Errors
/// What makes no sense, in words.
pub(super) fn read(told: &v1::GrantAggregation, upwards: Upwards) -> Result<Told, String> {
    let (parent, address) = told.parent.as_ref().map(|told| above(told, upwards)).transpose()?.unzip();
    let form = told.form.as_ref().and_then(|form| form.form.as_ref());
    let group = read_group(&told.group)?;
    let grant = Grant {
        communicator: told.communicator,
        secret: told.secret.as_slice().try_into().map_err(|_| "a secret of another length".to_owned())?,
        workers: u16::try_from(told.workers).map_err(|_| format!("{} workers", told.workers))?,
        form: read_form(form.ok_or("no form")?)?,
        elements: told.chunk_elements,
        ordered: told.ordered,
        partial: told
            .partial
            .map(|partial| {
                let least = u16::try_from(partial.least).map_err(|_| "partial sums of so many".to_owned())?;
                Ok::<_, String>(Partial { least, after: Duration::from_nanos(partial.after_ns) })
            })
            .transpose()?,
        group: group.is_some(),
        share: Share { tenant: 0, weight: told.weight, guaranteed: told.guaranteed, most: told.most },
        parent,
    };
    let tenant = told.tenant.chars().take(64).collect();
    Ok(Told { grant, parent: address, tenant, group: group.map(SocketAddr::V4) })
}

/// The aggregator above, and where it listens.
fn above(
    told: &v1::ParentAggregator,
    Upwards { patience, again }: Upwards,
) -> Result<(Parent, SocketAddr), String> {
    let address = told
        .address
        .parse::<SocketAddr>()
        .ok()
        .filter(|at| at.port() != 0 && !at.ip().is_unspecified() && !at.ip().is_multicast());
    let address = address.ok_or("no address of the aggregator above")?;
    let worker = u16::try_from(told.worker).ok().filter(|worker| *worker < MAX_WORKERS);
    let worker = worker.ok_or_else(|| format!("worker {} of the aggregator above", told.worker))?;
    let key: [u8; 32] = told.key.as_slice().try_into().map_err(|_| "a key of another length".to_owned())?;
    Ok((Parent { worker, key: Key::new(&key), patience, again }, address))
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_abi::{Dtype, ReduceOp};
    use harmonaize_aggregator::Form;
    use harmonaize_api::v1::aggregation_form;

    const UPWARDS: Upwards = Upwards { patience: Duration::from_millis(70), again: Duration::from_millis(3) };

    fn below() -> v1::ParentAggregator {
        v1::ParentAggregator { address: "10.0.0.9:7400".into(), worker: 2, key: vec![5; 32] }
    }

    fn told() -> v1::GrantAggregation {
        let form = v1::TensorForm { dtype: "f32".into(), op: "sum".into() };
        v1::GrantAggregation {
            communicator: 7,
            secret: vec![1; 32],
            workers: 4,
            form: Some(v1::AggregationForm { form: Some(aggregation_form::Form::Tensor(form)) }),
            chunk_elements: 256,
            tenant: "a".into(),
            weight: 1,
            guaranteed: 16,
            most: 64,
            ..v1::GrantAggregation::default()
        }
    }

    #[test]
    fn a_grant_is_read_and_what_makes_no_sense_is_named() {
        let read = |told: &v1::GrantAggregation| read(told, UPWARDS);
        let good = read(&told()).unwrap();
        assert!(good.grant.parent.is_none() && good.parent.is_none());
        assert_eq!((good.grant.workers, good.grant.elements, good.tenant.as_str()), (4, 256, "a"));
        assert_eq!(good.grant.form, Form::Tensor { dtype: Dtype::F32, op: ReduceOp::Sum });
        type Damage = (&'static str, fn(&mut v1::GrantAggregation));
        let damaged: [Damage; 6] = [
            ("a group that is none", |told| told.group = "10.0.0.1:7".into()),
            ("secret", |told| told.secret = vec![1; 31]),
            ("workers", |told| told.workers = 1 << 16),
            ("no form", |told| told.form = None),
            ("no sums of f31", |told| {
                let form = v1::TensorForm { dtype: "f31".into(), op: "sum".into() };
                told.form = Some(v1::AggregationForm { form: Some(aggregation_form::Form::Tensor(form)) });
            }),
            ("codes of 300 bits", |told| {
                let form = v1::SharedForm { bits: 300, block: 64, ranks: 4 };
                told.form = Some(v1::AggregationForm { form: Some(aggregation_form::Form::Shared(form)) });
            }),
        ];
        for (what, damage) in damaged {
            let mut told = told();
            damage(&mut told);
            let error = read(&told).expect_err(what);
            assert!(error.contains(what), "{what}: {error}");
        }
    }

    #[test]
    fn an_aggregator_above_is_read_with_its_address_key_and_number() {
        let with = |change: fn(&mut v1::ParentAggregator)| {
            let mut parent = below();
            change(&mut parent);
            read(&v1::GrantAggregation { parent: Some(parent), ..told() }, UPWARDS)
        };
        let good = with(|_| ()).unwrap();
        let parent = good.grant.parent.unwrap();
        assert_eq!((parent.worker, good.parent), (2, Some(([10, 0, 0, 9], 7400).into())));
        assert_eq!((parent.patience, parent.again), (UPWARDS.patience, UPWARDS.again));
        type Damage = (&'static str, fn(&mut v1::ParentAggregator));
        let damaged: [Damage; 5] = [
            ("address", |told| told.address = "agg9".into()),
            ("address", |told| told.address = "10.0.0.9:0".into()),
            ("address", |told| told.address = "0.0.0.0:7400".into()),
            ("worker 1024", |told| told.worker = 1024),
            ("key", |told| told.key.truncate(3)),
        ];
        for (what, damage) in damaged {
            let error = with(damage).expect_err(what);
            assert!(error.contains(what), "{what}: {error}");
        }
    }
}
