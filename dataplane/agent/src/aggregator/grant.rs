//! A grant as control tells it, read with care.

use crate::aggregation::{UnknownFormat, parse_format};
use harmonaize_abi::GrantId;
use harmonaize_aggregator::packet::MAX_WORKERS;
use harmonaize_aggregator::{Grant, Key, Parent, Share};
use harmonaize_api::v1;
use std::net::SocketAddr;
use std::time::Duration;

/// A grant, and whose it is.
#[derive(Debug)]
pub(super) struct TenantGrant {
    /// What the aggregator is to serve; its tenant's number is given by who knows all.
    pub grant: Grant,
    /// Where the aggregator above listens, if there is one.
    pub parent: Option<SocketAddr>,
    pub tenant: String,
}

/// How an aggregator deals with one above it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParentConfig {
    /// For how long that may leave questions unanswered, before a session is lost.
    pub timeout: Duration,
    /// How soon a sum may be sent up again.
    pub retry_after: Duration,
}

/// What makes no sense in a grant.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum InvalidGrant {
    #[error("a secret of another length")]
    Secret,
    #[error("{0} workers")]
    Workers(u32),
    #[error(transparent)]
    Format(#[from] UnknownFormat),
    #[error("no address of the aggregator above")]
    ParentAddress,
    #[error("worker {0} of the aggregator above")]
    ParentWorker(u32),
    #[error("a key of another length")]
    ParentKey,
}

/// Reads what control said.
///
/// # Errors
/// What makes no sense.
pub(super) fn read(told: &v1::GrantAggregation, upwards: ParentConfig) -> Result<TenantGrant, InvalidGrant> {
    let (parent, address) = told.parent.as_ref().map(|told| read_parent(told, upwards)).transpose()?.unzip();
    let form = told.form.as_ref().and_then(|form| form.form.as_ref());
    let grant = Grant {
        communicator: GrantId(told.communicator),
        secret: told.secret.as_slice().try_into().map_err(|_| InvalidGrant::Secret)?,
        workers: u16::try_from(told.workers).map_err(|_| InvalidGrant::Workers(told.workers))?,
        format: parse_format(form.ok_or(UnknownFormat::Missing)?)?,
        elements: told.chunk_elements,
        ordered: told.ordered,
        share: Share {
            tenant: 0,
            weight: told.weight,
            guaranteed: told.guaranteed_units,
            most: told.max_units,
        },
        parent,
    };
    let tenant = told.tenant.chars().take(64).collect();
    Ok(TenantGrant { grant, parent: address, tenant })
}

/// The aggregator above, and where it listens.
fn read_parent(
    message: &v1::ParentAggregator,
    ParentConfig { timeout: patience, retry_after: again }: ParentConfig,
) -> Result<(Parent, SocketAddr), InvalidGrant> {
    let address = message
        .address
        .parse::<SocketAddr>()
        .ok()
        .filter(|at| at.port() != 0 && !at.ip().is_unspecified() && !at.ip().is_multicast());
    let address = address.ok_or(InvalidGrant::ParentAddress)?;
    let worker = u16::try_from(message.worker).ok().filter(|worker| *worker < MAX_WORKERS);
    let worker = worker.ok_or(InvalidGrant::ParentWorker(message.worker))?;
    let key: [u8; 32] = message.key.as_slice().try_into().map_err(|_| InvalidGrant::ParentKey)?;
    Ok((Parent { worker, key: Key::new(&key), timeout: patience, retry_after: again }, address))
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_abi::{Dtype, ReduceOp};
    use harmonaize_aggregator::PayloadFormat;
    use harmonaize_api::v1::aggregation_form;

    const UPWARDS: ParentConfig =
        ParentConfig { timeout: Duration::from_millis(70), retry_after: Duration::from_millis(3) };

    fn below() -> v1::ParentAggregator {
        v1::ParentAggregator { address: "10.0.0.9:7400".into(), worker: 2, key: vec![5; 32] }
    }

    fn message() -> v1::GrantAggregation {
        let form = v1::TensorForm { dtype: "f32".into(), op: "sum".into() };
        v1::GrantAggregation {
            communicator: 7,
            secret: vec![1; 32],
            workers: 4,
            form: Some(v1::AggregationForm { form: Some(aggregation_form::Form::Tensor(form)) }),
            chunk_elements: 256,
            tenant: "a".into(),
            weight: 1,
            guaranteed_units: 16,
            max_units: 64,
            ..v1::GrantAggregation::default()
        }
    }

    #[test]
    fn a_grant_is_read_and_what_makes_no_sense_is_named() {
        let read = |told: &v1::GrantAggregation| read(told, UPWARDS);
        let good = read(&message()).unwrap();
        assert!(good.grant.parent.is_none() && good.parent.is_none());
        assert_eq!((good.grant.workers, good.grant.elements, good.tenant.as_str()), (4, 256, "a"));
        assert_eq!(good.grant.format, PayloadFormat::Tensor { dtype: Dtype::F32, op: ReduceOp::Sum });
        type Damage = (InvalidGrant, fn(&mut v1::GrantAggregation));
        let unknown = UnknownFormat::Tensor { dtype: "f31".into(), op: "sum".into() };
        let damaged: [Damage; 5] = [
            (InvalidGrant::Secret, |told| told.secret = vec![1; 31]),
            (InvalidGrant::Workers(1 << 16), |told| told.workers = 1 << 16),
            (UnknownFormat::Missing.into(), |told| told.form = None),
            (unknown.into(), |told| {
                let form = v1::TensorForm { dtype: "f31".into(), op: "sum".into() };
                told.form = Some(v1::AggregationForm { form: Some(aggregation_form::Form::Tensor(form)) });
            }),
            (UnknownFormat::Codes { bits: 300, block: 64, ranks: 4 }.into(), |told| {
                let form = v1::SharedForm { bits: 300, block: 64, ranks: 4 };
                told.form = Some(v1::AggregationForm { form: Some(aggregation_form::Form::Shared(form)) });
            }),
        ];
        for (expected, damage) in damaged {
            let mut told = message();
            damage(&mut told);
            assert_eq!(read(&told).unwrap_err(), expected);
        }
    }

    #[test]
    fn an_aggregator_above_is_read_with_its_address_key_and_number() {
        let with = |change: fn(&mut v1::ParentAggregator)| {
            let mut parent = below();
            change(&mut parent);
            read(&v1::GrantAggregation { parent: Some(parent), ..message() }, UPWARDS)
        };
        let good = with(|_| ()).unwrap();
        let parent = good.grant.parent.unwrap();
        assert_eq!((parent.worker, good.parent), (2, Some(([10, 0, 0, 9], 7400).into())));
        assert_eq!((parent.timeout, parent.retry_after), (UPWARDS.timeout, UPWARDS.retry_after));
        type Damage = (InvalidGrant, fn(&mut v1::ParentAggregator));
        let damaged: [Damage; 5] = [
            (InvalidGrant::ParentAddress, |told| told.address = "agg9".into()),
            (InvalidGrant::ParentAddress, |told| told.address = "10.0.0.9:0".into()),
            (InvalidGrant::ParentAddress, |told| told.address = "0.0.0.0:7400".into()),
            (InvalidGrant::ParentWorker(1024), |told| told.worker = 1024),
            (InvalidGrant::ParentKey, |told| told.key.truncate(3)),
        ];
        for (expected, damage) in damaged {
            assert_eq!(with(damage).unwrap_err(), expected);
        }
    }
}
