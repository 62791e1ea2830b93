//! Communicators, and the collectives.

use crate::blocking::{duration, interruptible, lock, optional};
use crate::client::{Attachment, JOIN_WITHIN};
use crate::dictionaries;
use crate::dtype;
use crate::errors::{argument, raised};
use crate::operation::Operation;
use crate::protection::{Protection, Restored, ranks};
use crate::staged::Staged;
use crate::tensor::Tensor;
use harmonaize_client as client;
use harmonaize_client::{
    Collective, Direction, Dtype, Error, OperationOptions, ProtectOptions, Rank, ReduceOp, RegroupOptions,
};
use harmonaize_staging::cuda::Stream;
use harmonaize_staging::stream::Lane;
use harmonaize_staging::{Call, Counts, Kind, Piece};
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// A member's view of a communicator. Left when it and its operations are gone.
#[pyclass(frozen, module = "harmonaize")]
pub(crate) struct Communicator {
    pub(crate) inner: Arc<client::Communicator>,
    pub(crate) client: Arc<Attachment>,
    /// Its calls on a device's memory start in order.
    lane: Lane,
}

/// A tensor as an argument.
type Given<'a, 'py> = &'a Bound<'py, Tensor>;
type Optional<'py> = Option<Bound<'py, Tensor>>;

fn inner<'a>(tensor: &'a Option<Bound<'_, Tensor>>) -> Option<&'a client::Tensor> {
    tensor.as_ref().map(|tensor| &tensor.get().inner)
}

impl Communicator {
    pub(crate) fn new(inner: client::Communicator, client: Arc<Attachment>) -> Self {
        Self { inner: Arc::new(inner), client, lane: Lane::new() }
    }

    fn started(py: Python<'_>, called: Result<client::Operation, Error>) -> PyResult<Operation> {
        called.map(Operation::new).map_err(|error| raised(py, &error))
    }

    fn like(&self, py: Python<'_>, made: Result<client::Communicator, Error>) -> PyResult<Self> {
        let made = made.map_err(|error| raised(py, &error))?;
        Ok(Self::new(made, Arc::clone(&self.client)))
    }
}

#[pymethods]
impl Communicator {
    /// This process's rank.
    #[getter]
    fn rank(&self) -> u32 {
        self.inner.rank().0
    }

    /// How many ranks there are.
    #[getter]
    fn ranks(&self) -> u32 {
        self.inner.ranks()
    }

    /// What calls, events and the provider call it.
    #[getter]
    fn name(&self) -> &str {
        self.inner.name()
    }

    /// Where it goes on from another: by rank, the rank there, and none for newcomers.
    #[getter]
    fn before(&self) -> Vec<Option<u32>> {
        self.inner.before().iter().map(|rank| rank.map(|rank| rank.0)).collect()
    }

    fn __repr__(&self) -> String {
        format!("Communicator({:?}, rank {} of {})", self.name(), self.rank(), self.ranks())
    }

    /// The same membership, whose operations have these options.
    #[pyo3(name = "options", signature = (*, timeout = None, priority = 0, tensor_class = 0, deadline = None, iteration = 0, factor = None))]
    #[expect(clippy::too_many_arguments, reason = "they are Python's keywords")]
    fn with_options(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        priority: u8,
        tensor_class: u8,
        deadline: Option<f64>,
        iteration: u64,
        factor: Option<f64>,
    ) -> PyResult<Self> {
        let options = OperationOptions {
            timeout: optional(timeout)?,
            priority,
            class: tensor_class,
            deadline: optional(deadline)?,
            iteration,
            factor,
            ..OperationOptions::default()
        };
        self.like(py, self.inner.with(options))
    }

    /// Calls that are made together at the end of a `with` block, or not at all.
    fn group(&self) -> Group {
        Group { members: Arc::clone(&self.inner), client: Arc::clone(&self.client), open: Mutex::new(None) }
    }

    /// Ends the communicator at all ranks.
    fn abort(&self, py: Python<'_>) {
        py.detach(|| self.inner.abort());
    }

    /// Splits it: ranks of one color become a communicator; none where this rank names no color.
    #[pyo3(signature = (color, key = None, *, timeout = JOIN_WITHIN.as_secs_f64()))]
    fn split(
        &self,
        py: Python<'_>,
        color: Option<u32>,
        key: Option<u32>,
        timeout: f64,
    ) -> PyResult<Option<Self>> {
        let (members, within) = (Arc::clone(&self.inner), duration(Some(timeout))?);
        let key = key.unwrap_or(self.rank());
        let made = interruptible(py, move || members.split(color, key, within))?;
        Ok(made.map(|made| Self::new(made, Arc::clone(&self.client))))
    }

    /// Goes on without ranks that are gone, and with those that wait to enter.
    #[pyo3(signature = (*, timeout = JOIN_WITHIN.as_secs_f64(), min_ranks = 1, key = None))]
    fn regroup(&self, py: Python<'_>, timeout: f64, min_ranks: u32, key: Option<u32>) -> PyResult<Self> {
        let options =
            RegroupOptions { timeout: duration(Some(timeout))?, min_ranks, key, operation_timeout: None };
        let members = Arc::clone(&self.inner);
        let made = interruptible(py, move || members.regroup(&options))?;
        Ok(Self::new(made, Arc::clone(&self.client)))
    }

    /// Wants another budget from now on.
    fn set_budget(&self, py: Python<'_>, budget: &Bound<'_, PyAny>) -> PyResult<()> {
        let (members, budget) = (Arc::clone(&self.inner), dictionaries::budget(budget)?);
        interruptible(py, move || members.set_budget(&budget))
    }

    /// Protects what these tensors hold at each step that is sealed.
    #[pyo3(signature = (tensors, *, replicas = 1, domain = None, timeout = JOIN_WITHIN.as_secs_f64()))]
    fn protect(
        &self,
        py: Python<'_>,
        tensors: BTreeMap<String, Bound<'_, Tensor>>,
        replicas: u32,
        domain: Option<u64>,
        timeout: f64,
    ) -> PyResult<Protection> {
        let shapes = tensors.iter().map(|(name, tensor)| (name.clone(), tensor.get().dimensions())).collect();
        let options = ProtectOptions { replicas, domain, timeout: duration(Some(timeout))?, shapes };
        let whole = tensors.into_iter().map(|(name, tensor)| Ok((name, tensor.get().inner.slice(..)?)));
        let whole = whole.collect::<Result<Vec<_>, Error>>().map_err(|error| raised(py, &error))?;
        let members = Arc::clone(&self.inner);
        let protection = interruptible(py, move || {
            let named: Vec<_> = whole.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
            members.protect(&named, &options)
        })?;
        Ok(Protection::new(protection))
    }

    /// Takes part in a restore as a newcomer, without a state of its own, and returns the states of these ranks.
    #[pyo3(signature = (of = Vec::new()))]
    fn restore_newcomer(&self, py: Python<'_>, of: Vec<u32>) -> PyResult<Restored> {
        let (members, of) = (Arc::clone(&self.inner), ranks(of));
        Restored::new(py, interruptible(py, move || members.restore_newcomer(&of))?)
    }

    /// Starts an AllReduce, in place where there is no output.
    #[pyo3(signature = (tensor, output = None, *, op = "sum", feedback = None))]
    fn all_reduce(
        &self,
        py: Python<'_>,
        tensor: Given<'_, '_>,
        output: Optional<'_>,
        op: &str,
        feedback: Option<Bound<'_, crate::client::Feedback>>,
    ) -> PyResult<Operation> {
        let reduce = if op == "sum" { ReduceOp::Sum } else { dtype::reduction(op)? };
        let input = &tensor.get().inner;
        let output = inner(&output).unwrap_or(input);
        Self::started(
            py,
            match &feedback {
                None => self.inner.all_reduce(input, output, reduce),
                Some(feedback) => {
                    self.inner.all_reduce_with_feedback(input, output, reduce, &feedback.get().inner)
                }
            },
        )
    }

    /// Starts a ReduceScatter; in place, without an output, the result is this rank's block.
    #[pyo3(signature = (tensor, output = None, *, op = "sum", counts = None))]
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        tensor: Given<'_, '_>,
        output: Optional<'_>,
        op: &str,
        counts: Option<Vec<u64>>,
    ) -> PyResult<Operation> {
        let (reduce, input) = (dtype::reduction(op)?, &tensor.get().inner);
        Self::started(
            py,
            match (inner(&output), counts) {
                (Some(output), Some(counts)) => self.inner.reduce_scatter_v(input, output, reduce, &counts),
                (Some(output), None) => self.inner.reduce_scatter(input, output, reduce),
                (None, None) => self.inner.reduce_scatter_in_place(input, reduce),
                (None, Some(_)) => Err(Error::Shape("a ReduceScatter with counts needs an output".into())),
            },
        )
    }

    /// Starts an AllGather; in place, without an output, the input is this rank's block of the tensor.
    #[pyo3(signature = (tensor, output = None, *, counts = None))]
    fn all_gather(
        &self,
        py: Python<'_>,
        tensor: Given<'_, '_>,
        output: Optional<'_>,
        counts: Option<Vec<u64>>,
    ) -> PyResult<Operation> {
        let input = &tensor.get().inner;
        Self::started(
            py,
            match (inner(&output), counts) {
                (Some(output), Some(counts)) => self.inner.all_gather_v(input, output, &counts),
                (Some(output), None) => self.inner.all_gather(input, output),
                (None, None) => self.inner.all_gather_in_place(input),
                (None, Some(_)) => Err(Error::Shape("an AllGather with counts needs an output".into())),
            },
        )
    }

    /// Starts an AllToAll. Blocks that differ in size have counts; `most` is the largest of any two ranks.
    #[pyo3(signature = (tensor, output, *, send_counts = None, recv_counts = None, most = None))]
    fn all_to_all(
        &self,
        py: Python<'_>,
        tensor: Given<'_, '_>,
        output: Given<'_, '_>,
        send_counts: Option<Vec<u64>>,
        recv_counts: Option<Vec<u64>>,
        most: Option<u64>,
    ) -> PyResult<Operation> {
        let (input, output) = (&tensor.get().inner, &output.get().inner);
        Self::started(
            py,
            match (send_counts, recv_counts, most) {
                (None, None, None) => self.inner.all_to_all(input, output),
                (Some(send), Some(recv), Some(most)) => {
                    self.inner.all_to_all_v(input, &send, output, &recv, most)
                }
                _ => Err(Error::Shape("send_counts, recv_counts and most are given together".into())),
            },
        )
    }

    /// Starts a Broadcast: every rank's tensor becomes the root's.
    #[pyo3(signature = (tensor, root = 0))]
    fn broadcast(&self, py: Python<'_>, tensor: Given<'_, '_>, root: u32) -> PyResult<Operation> {
        Self::started(py, self.inner.broadcast(&tensor.get().inner, Rank(root)))
    }

    /// Starts a Reduce; in place where there is no output.
    #[pyo3(signature = (tensor, output = None, *, op = "sum", root = 0))]
    fn reduce(
        &self,
        py: Python<'_>,
        tensor: Given<'_, '_>,
        output: Optional<'_>,
        op: &str,
        root: u32,
    ) -> PyResult<Operation> {
        let (reduce, input) = (dtype::reduction(op)?, &tensor.get().inner);
        let output = inner(&output).unwrap_or(input);
        Self::started(py, self.inner.reduce(input, Some(output), reduce, Rank(root)))
    }

    /// Starts a Gather; only the root has an output.
    #[pyo3(signature = (tensor, output = None, *, root = 0, counts = None))]
    fn gather(
        &self,
        py: Python<'_>,
        tensor: Given<'_, '_>,
        output: Optional<'_>,
        root: u32,
        counts: Option<Vec<u64>>,
    ) -> PyResult<Operation> {
        let (input, output, root) = (&tensor.get().inner, inner(&output), Rank(root));
        Self::started(
            py,
            match counts {
                Some(counts) => self.inner.gather_v(input, output, &counts, root),
                None => self.inner.gather(input, output, root),
            },
        )
    }

    /// Starts a Scatter; only the root has an input.
    #[pyo3(signature = (tensor, output, *, root = 0, counts = None))]
    fn scatter(
        &self,
        py: Python<'_>,
        tensor: Optional<'_>,
        output: Given<'_, '_>,
        root: u32,
        counts: Option<Vec<u64>>,
    ) -> PyResult<Operation> {
        let (input, output, root) = (inner(&tensor), &output.get().inner, Rank(root));
        Self::started(
            py,
            match counts {
                Some(counts) => self.inner.scatter_v(input, output, &counts, root),
                None => self.inner.scatter(input, output, root),
            },
        )
    }

    /// Starts a Barrier.
    fn barrier(&self, py: Python<'_>) -> PyResult<Operation> {
        Self::started(py, self.inner.barrier())
    }

    /// Starts to send a tensor to a rank.
    fn send(&self, py: Python<'_>, tensor: Given<'_, '_>, to: u32) -> PyResult<Operation> {
        Self::started(py, self.inner.send(&tensor.get().inner, Rank(to)))
    }

    /// Starts to receive what a rank sends; what any sends where none is named.
    #[pyo3(signature = (tensor, source = None))]
    fn recv(&self, py: Python<'_>, tensor: Given<'_, '_>, source: Option<u32>) -> PyResult<Operation> {
        let tensor = &tensor.get().inner;
        Self::started(
            py,
            match source {
                Some(rank) => self.inner.recv(tensor, Rank(rank)),
                None => self.inner.recv_any(tensor),
            },
        )
    }

    /// Starts an operation on memory that is not the attachment's: by code, on pairs of address and bytes, which `keep` keeps. On a device's
    /// memory where `streams` are given: those that copy its inputs and its outputs.
    #[pyo3(signature = (code, dtype, reduce, root, inputs, outputs, keep, counts = None, factor = None, timeout = None, streams = None))]
    #[expect(clippy::too_many_arguments, reason = "of the package's own Python alone")]
    fn _staged(
        &self,
        py: Python<'_>,
        code: u8,
        dtype: u8,
        reduce: u8,
        root: u32,
        inputs: Vec<(usize, usize)>,
        outputs: Vec<(usize, usize)>,
        keep: Py<PyAny>,
        counts: Option<(Vec<u64>, Vec<u64>, u64)>,
        factor: Option<f64>,
        timeout: Option<f64>,
        streams: Option<(usize, usize)>,
    ) -> PyResult<Staged> {
        let pieces = |pieces: Vec<(usize, usize)>| {
            pieces.into_iter().map(|(address, bytes)| Piece { address, bytes }).collect()
        };
        let unknown = |what: &str, code: u8| argument(py, &format!("{what} of the unknown code {code}"));
        let kind = match (Direction::from_code(code), root) {
            (Some(Direction::Send), _) => Kind::Send,
            (Some(Direction::Receive), u32::MAX) => Kind::ReceiveAny,
            (Some(Direction::Receive), _) => Kind::Receive,
            (None, _) => {
                let collective = Collective::from_code(code);
                Kind::Collective(collective.ok_or_else(|| unknown("a collective", code))?)
            }
        };
        let call = Call {
            kind,
            dtype: Dtype::from_code(dtype).ok_or_else(|| unknown("an element type", dtype))?,
            reduce: ReduceOp::from_code(reduce).ok_or_else(|| unknown("a reduction", reduce))?,
            root: Rank(root),
            inputs: pieces(inputs),
            outputs: pieces(outputs),
            counts: counts.map(|(own, received, most)| Counts { own, received, most }),
        };
        if share_bytes(&call.outputs) {
            let remedy = "give each memory of its own, with clone() for example";
            return Err(argument(py, &format!("two of the tensors that are written share memory; {remedy}")));
        }
        let options = OperationOptions { factor, timeout: optional(timeout)?, ..OperationOptions::default() };
        if let Some((inputs, outputs)) = streams {
            let members = self.inner.with(options).map_err(|error| raised(py, &error))?;
            let streams = (Stream(inputs), Stream(outputs));
            return Staged::queue(py, &self.client, (members, self.lane), call, streams);
        }
        if !self.lane.is_clear() {
            py.detach(|| self.lane.wait());
        }
        if options == OperationOptions::default() {
            return Staged::start(py, &self.client, &self.inner, &call, keep);
        }
        let members = self.inner.with(options).map_err(|error| raised(py, &error))?;
        Staged::start(py, &self.client, &members, &call, keep)
    }
}

/// Calls that are made together. Used by `with communicator.group() as calls`, where `calls` is the communicator to call on.
#[pyclass(frozen, module = "harmonaize")]
pub(crate) struct Group {
    members: Arc<client::Communicator>,
    client: Arc<Attachment>,
    open: Mutex<Option<client::Group>>,
}

#[pymethods]
impl Group {
    fn __enter__(&self, py: Python<'_>) -> PyResult<Communicator> {
        let group = self.client.client.group();
        let calls = self.members.grouped(&group).map_err(|error| raised(py, &error))?;
        *lock(&self.open) = Some(group);
        Ok(Communicator::new(calls, Arc::clone(&self.client)))
    }

    #[pyo3(signature = (kind, value, traceback))]
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: Option<Bound<'_, PyAny>>,
        value: Option<Bound<'_, PyAny>>,
        traceback: Option<Bound<'_, PyAny>>,
    ) -> PyResult<bool> {
        let _ = (value, traceback);
        let group = lock(&self.open).take();
        if let (None, Some(group)) = (kind, group) {
            group.end().map_err(|error| raised(py, &error))?;
        }
        Ok(false)
    }
}

/// Whether a byte is of two pieces.
fn share_bytes(pieces: &[Piece]) -> bool {
    let mut ends: Vec<(usize, usize)> = pieces
        .iter()
        .filter(|piece| piece.bytes > 0)
        .map(|piece| (piece.address, piece.address.saturating_add(piece.bytes)))
        .collect();
    ends.sort_unstable();
    ends.iter().zip(ends.iter().skip(1)).any(|((_, end), (next, _))| end > next)
}
