//! A grant as control tells it, read with care.

use crate::aggregation::read_form;
use harmonaize_aggregator::{Grant, Partial, Share};
use harmonaize_api::v1;
use std::time::Duration;

/// A grant, and whose it is.
#[derive(Debug)]
pub(super) struct Told {
    /// What the aggregator is to serve; its tenant's number is given by who knows all.
    pub grant: Grant,
    pub tenant: String,
}

/// Reads what control said.
///
/// # Errors
/// What makes no sense, in words.
pub(super) fn read(told: &v1::GrantAggregation) -> Result<Told, String> {
    let form = told.form.as_ref().and_then(|form| form.form.as_ref());
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
        share: Share { tenant: 0, weight: told.weight, guaranteed: told.guaranteed, most: told.most },
        parent: None,
    };
    Ok(Told { grant, tenant: told.tenant.chars().take(64).collect() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_abi::{Dtype, ReduceOp};
    use harmonaize_aggregator::Form;
    use harmonaize_api::v1::aggregation_form;

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
        let good = read(&told()).unwrap();
        assert_eq!((good.grant.workers, good.grant.elements, good.tenant.as_str()), (4, 256, "a"));
        assert_eq!(good.grant.form, Form::Tensor { dtype: Dtype::F32, op: ReduceOp::Sum });
        type Damage = (&'static str, fn(&mut v1::GrantAggregation));
        let damaged: [Damage; 5] = [
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
}
