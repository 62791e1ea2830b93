//! Aggregation on the way as a recipe tells a worker of it, read with care.

use harmonaize_abi::{Dtype, ReduceOp};
use harmonaize_aggregator::PayloadFormat;
use harmonaize_aggregator::packet::{MAX_PAYLOAD, MAX_WORKERS};
use harmonaize_api::v1::{self, aggregation_form};
use harmonaize_core::Aggregation;
use harmonaize_engine::Aggregator;
use harmonaize_plan::Participant;
use harmonaize_transport::datagram::{Gid, RdmaAddress};
use std::net::SocketAddr;
use std::time::Duration;

/// For how long hosts sum after a session with the aggregator failed, at first and at most.
const BACKOFF: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(30)];
/// Most chunks in flight that a worker keeps account of.
const MAX_WINDOW: u32 = 4096;

/// What does not fit together in what a worker is told.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(crate) enum InvalidAggregation {
    #[error("address")]
    Address,
    #[error("{workers} workers of {participants} participants")]
    Workers { workers: u32, participants: u32 },
    #[error("participant {participant} is told to be worker {worker}")]
    OtherWorker { participant: u32, worker: u32 },
    #[error("worker {worker} of {workers}")]
    Worker { worker: u32, workers: u32 },
    #[error("key of another length")]
    Key,
    #[error(transparent)]
    Format(#[from] UnknownFormat),
    #[error("chunks of {elements} elements, {format:?}")]
    Chunks { elements: usize, format: PayloadFormat },
    #[error("codes of others than {0} workers")]
    Codes(u32),
    #[error("a window of 0")]
    Window,
    /// Aggregators above and below each other carry sums of elements alone.
    #[error("what is no sum of elements, by several aggregators")]
    Tree,
    #[error("broadcasts or barriers that cannot be")]
    SmallOperations,
    #[error("a port's address")]
    Port,
}

/// Payloads that are not known here.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum UnknownFormat {
    #[error("no form")]
    Missing,
    #[error("no sums of {dtype} by {op} are known here")]
    Tensor { dtype: String, op: String },
    #[error("codes of {bits} bits in blocks of {block} for {ranks} are not known here")]
    Codes { bits: u32, block: u32, ranks: u32 },
}

/// What core and engine are to know of the aggregator of a communicator of so many participants.
///
/// # Errors
/// What does not fit together.
pub(crate) fn read(
    message: &v1::Aggregation,
    participants: u32,
    me: Participant,
) -> Result<(Aggregation, Aggregator), InvalidAggregation> {
    let address: SocketAddr = message.address.parse().map_err(|_| InvalidAggregation::Address)?;
    if address.port() == 0 || address.ip().is_unspecified() || address.ip().is_multicast() {
        return Err(InvalidAggregation::Address);
    }
    if message.workers != participants || !(2..=u32::from(MAX_WORKERS)).contains(&participants) {
        return Err(InvalidAggregation::Workers { workers: message.workers, participants });
    }
    if message.worker != me.0 {
        return Err(InvalidAggregation::OtherWorker { participant: me.0, worker: message.worker });
    }
    let worker = worker_index(message)?;
    let key: [u8; 32] = message.key.as_slice().try_into().map_err(|_| InvalidAggregation::Key)?;
    let form = parse_format_or_default(message.form.as_ref())?;
    let chunk = message.chunk_elements as usize;
    let bytes = form.sum_bytes(chunk).filter(|_| form.is_supported() && form.are_whole(chunk));
    if !bytes.is_some_and(|bytes| (1..=MAX_PAYLOAD).contains(&bytes)) || chunk == 0 {
        return Err(InvalidAggregation::Chunks { elements: chunk, format: form });
    }
    let codes = matches!(form, PayloadFormat::Shared { .. });
    let all = !matches!(form, PayloadFormat::Shared { ranks, .. } if u32::from(ranks) != participants);
    if !all {
        return Err(InvalidAggregation::Codes(participants));
    }
    let most = codes.then_some(message.max_error).filter(|most| *most > 0.0);
    let window = u16::try_from(message.window.min(MAX_WINDOW)).unwrap_or(0);
    if window == 0 {
        return Err(InvalidAggregation::Window);
    }
    let [hold, most_hold] = BACKOFF;
    let &v1::Aggregation { min_bytes: least_bytes, small_operations: at_once, barriers, .. } = message;
    if message.branch.is_some() && (codes || barriers || message.broadcast_max_bytes > 0) {
        return Err(InvalidAggregation::Tree);
    }
    let range = [message.broadcast_min_bytes, message.broadcast_max_bytes];
    if range[0] > range[1] || (range[1] > 0 || barriers) && !at_once {
        return Err(InvalidAggregation::SmallOperations);
    }
    let broadcasts = (range[1] > 0).then_some(range);
    let rules = Aggregation {
        format: form,
        min_bytes: least_bytes,
        eager: at_once,
        broadcast_bytes: broadcasts,
        barriers,
        backoff: hold,
        max_backoff: most_hold,
    };
    let rdma = message.datagrams.as_ref().map(|port| {
        let gid: [u8; 16] = port.gid.as_slice().try_into().map_err(|_| InvalidAggregation::Port)?;
        Ok::<_, InvalidAggregation>((RdmaAddress { gid: Gid(gid), number: port.number }, port.key))
    });
    let aggregator = Aggregator {
        address,
        rdma: rdma.transpose()?,
        communicator: message.communicator,
        worker,
        key,
        chunk_elements: message.chunk_elements,
        window,
        max_error: most,
    };
    Ok((rules, aggregator))
}

/// Which worker this is of the aggregator that it sends to.
fn worker_index(told: &v1::Aggregation) -> Result<u16, InvalidAggregation> {
    let (worker, workers) = match told.branch {
        Some(v1::Branch { worker, workers }) => (worker, workers),
        None => (told.worker, told.workers),
    };
    let sound = worker < workers && workers <= u32::from(MAX_WORKERS);
    u16::try_from(worker).ok().filter(|_| sound).ok_or(InvalidAggregation::Worker { worker, workers })
}

/// What payloads are: sums of f32 where nothing is said.
fn parse_format_or_default(told: Option<&v1::AggregationForm>) -> Result<PayloadFormat, UnknownFormat> {
    let Some(form) = told else { return Ok(PayloadFormat::Tensor { dtype: Dtype::F32, op: ReduceOp::Sum }) };
    form.form.as_ref().map_or(Err(UnknownFormat::Missing), parse_format)
}

/// What payloads are, in this version's words.
///
/// # Errors
/// What is not known here.
pub(crate) fn parse_format(told: &aggregation_form::Form) -> Result<PayloadFormat, UnknownFormat> {
    match told {
        aggregation_form::Form::Tensor(v1::TensorForm { dtype, op }) => {
            let short = |text: &str| text.chars().take(64).collect::<String>();
            let known = dtype.parse().ok().zip(op.parse().ok());
            let unknown = || UnknownFormat::Tensor { dtype: short(dtype), op: short(op) };
            let (dtype, op) = known.ok_or_else(unknown)?;
            Ok(PayloadFormat::Tensor { dtype, op })
        }
        &aggregation_form::Form::Shared(v1::SharedForm { bits, block, ranks }) => {
            let numbers = (u8::try_from(bits), u16::try_from(block), u16::try_from(ranks));
            let (Ok(bits), Ok(block), Ok(ranks)) = numbers else {
                return Err(UnknownFormat::Codes { bits, block, ranks });
            };
            Ok(PayloadFormat::Shared { bits, block, ranks })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message() -> v1::Aggregation {
        v1::Aggregation {
            address: "10.0.0.9:7300".into(),
            communicator: 5,
            worker: 1,
            workers: 4,
            key: vec![3; 32],
            chunk_elements: 256,
            window: 64,
            min_bytes: 65_536,
            ..v1::Aggregation::default()
        }
    }

    fn shared(bits: u32, block: u32, ranks: u32) -> Option<v1::AggregationForm> {
        let form = v1::SharedForm { bits, block, ranks };
        Some(v1::AggregationForm { form: Some(aggregation_form::Form::Shared(form)) })
    }

    fn form(dtype: &str, op: &str) -> Option<v1::AggregationForm> {
        let form = v1::TensorForm { dtype: dtype.into(), op: op.into() };
        Some(v1::AggregationForm { form: Some(aggregation_form::Form::Tensor(form)) })
    }

    #[test]
    fn what_control_tells_is_taken_over() {
        let (rules, aggregator) = read(&message(), 4, Participant(1)).unwrap();
        let sums = |dtype, op| PayloadFormat::Tensor { dtype, op };
        assert_eq!((rules.format, rules.min_bytes), (sums(Dtype::F32, ReduceOp::Sum), 65_536));
        assert_eq!((aggregator.communicator, aggregator.chunk_elements, aggregator.window), (5, 256, 64));
        assert_eq!(aggregator.worker, 1);
        let branch = Some(v1::Branch { worker: 3, workers: 4 });
        let (_, below) = read(&v1::Aggregation { branch, ..message() }, 4, Participant(1)).unwrap();
        assert_eq!(below.worker, 3);
        let of_integers = v1::Aggregation { form: form("i64", "max"), ..message() };
        let (rules, _) = read(&of_integers, 4, Participant(1)).unwrap();
        assert_eq!(rules.format, sums(Dtype::I64, ReduceOp::Max));
        let codes = v1::Aggregation { form: shared(4, 256, 4), max_error: 0.03, ..message() };
        let (rules, aggregator) = read(&codes, 4, Participant(1)).unwrap();
        assert_eq!(rules.format, PayloadFormat::Shared { bits: 4, block: 256, ranks: 4 });
        assert_eq!(aggregator.max_error, Some(0.03));
    }

    #[test]
    fn what_does_not_fit_together_is_refused_and_named() {
        use InvalidAggregation as Invalid;
        type Damage = (Invalid, fn(&mut v1::Aggregation));
        let unknown = |dtype: &str, op: &str| UnknownFormat::Tensor { dtype: dtype.into(), op: op.into() };
        let sums =
            |elements, dtype, op| Invalid::Chunks { elements, format: PayloadFormat::Tensor { dtype, op } };
        let codes = |bits, block| Invalid::Chunks {
            elements: 256,
            format: PayloadFormat::Shared { bits, block, ranks: 4 },
        };
        let damaged: [Damage; 25] = [
            (Invalid::Port, |told| {
                told.datagrams = Some(v1::DatagramPort { gid: vec![0; 15], ..v1::DatagramPort::default() });
            }),
            (Invalid::Address, |told| told.address = "somewhere".into()),
            (Invalid::Address, |told| told.address = "10.0.0.9:0".into()),
            (Invalid::Address, |told| told.address = "0.0.0.0:7300".into()),
            (Invalid::Workers { workers: 3, participants: 4 }, |told| told.workers = 3),
            (Invalid::OtherWorker { participant: 1, worker: 2 }, |told| told.worker = 2),
            (Invalid::Key, |told| told.key.truncate(31)),
            (sums(0, Dtype::F32, ReduceOp::Sum), |told| told.chunk_elements = 0),
            (sums(2049, Dtype::F32, ReduceOp::Sum), |told| told.chunk_elements = 2049),
            (sums(u32::MAX as usize, Dtype::F32, ReduceOp::Sum), |told| told.chunk_elements = u32::MAX),
            (Invalid::Window, |told| told.window = 0),
            (sums(256, Dtype::F16, ReduceOp::Sum), |told| told.form = form("f16", "sum")),
            (sums(256, Dtype::F32, ReduceOp::Average), |told| told.form = form("f32", "average")),
            (unknown("f33", "sum").into(), |told| told.form = form("f33", "sum")),
            (UnknownFormat::Codes { bits: 300, block: 256, ranks: 4 }.into(), |told| {
                told.form = shared(300, 256, 4)
            }),
            (codes(5, 256), |told| told.form = shared(5, 256, 4)),
            (codes(4, 512), |told| told.form = shared(4, 512, 4)),
            (Invalid::Codes(4), |told| told.form = shared(4, 256, 5)),
            (Invalid::SmallOperations, |told| (told.small_operations, told.broadcast_min_bytes) = (true, 1)),
            (Invalid::SmallOperations, |told| told.barriers = true),
            (Invalid::Worker { worker: 3, workers: 3 }, |told| {
                told.branch = Some(v1::Branch { worker: 3, workers: 3 })
            }),
            (Invalid::Worker { worker: 3, workers: 1025 }, |told| {
                told.branch = Some(v1::Branch { worker: 3, workers: 1025 })
            }),
            (Invalid::Tree, |told| {
                told.form = shared(4, 256, 4);
                told.branch = Some(v1::Branch { worker: 0, workers: 3 });
            }),
            (Invalid::Tree, |told| {
                (told.small_operations, told.barriers) = (true, true);
                told.branch = Some(v1::Branch { worker: 0, workers: 3 });
            }),
            (UnknownFormat::Missing.into(), |told| told.form = Some(v1::AggregationForm { form: None })),
        ];
        for (expected, damage) in damaged {
            let mut told = message();
            damage(&mut told);
            assert_eq!(read(&told, 4, Participant(1)).unwrap_err(), expected);
        }
        assert!(read(&v1::Aggregation { workers: 1, worker: 0, ..message() }, 1, Participant(0)).is_err());
    }
}
